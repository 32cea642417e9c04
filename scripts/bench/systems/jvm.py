"""The Java half of the comparison: builds ``scripts/bench/java`` with Maven, and starts the built programs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from bench.system import BenchError

JAVA_PROJECT = Path(__file__).resolve().parent.parent / "java"
_POM = JAVA_PROJECT / "pom.xml"
_STAMP = JAVA_PROJECT / "target" / "built-from"
_BUILD_TIMEOUT_S = 900.0
_OLDEST_JAVA = 17

DRIVER_FLAGS = {"-Xms": "512m", "-Xmx": "3g"}
"""The flags of the drivers' virtual machines; the collector is Java's own choice (G1)."""


WARM_UP = "three times that of the other systems' clients"
"""As the drivers do it."""


def missing() -> str | None:
    """The reason why nothing can be built or run; None when it can."""
    programs = [name for name in ("java", "javac", "mvn") if shutil.which(name) is None]
    if programs:
        return f"no JDK {_OLDEST_JAVA} with Maven: PATH has no {', '.join(programs)}"
    try:
        said = subprocess.run(["javac", "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no JDK: javac does not run: {error}"
    found = re.search(r"javac (\d+)", said.stdout + said.stderr)
    if found is None or int(found[1]) < _OLDEST_JAVA:
        return f"no JDK {_OLDEST_JAVA}: javac says {(said.stdout + said.stderr).strip()!r}"
    return None


def version(name: str) -> str:
    """The version of a server, as the Maven project pins it."""
    found = re.search(rf"<{name}\.version>(.*)</{name}\.version>", _POM.read_text(encoding="utf-8"))
    if found is None:
        raise BenchError(f"{_POM} pins no version of {name}")
    return found[1]


def install() -> None:
    """Build servers and drivers unless their sources are unchanged since the last time. Raises BenchError."""
    sources = sorted(path for path in JAVA_PROJECT.glob("*/src/**/*") if path.is_file())
    digest = hashlib.sha256()
    for path in [_POM, *sorted(JAVA_PROJECT.glob("*/pom.xml")), *sources]:
        digest.update(str(path.relative_to(JAVA_PROJECT)).encode() + b"\0" + path.read_bytes() + b"\0")
    _STAMP.parent.mkdir(exist_ok=True)
    with (_STAMP.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_STAMP.exists() and _STAMP.read_text(encoding="utf-8") == digest.hexdigest()):
            _STAMP.unlink(missing_ok=True)
            _maven()
            _STAMP.write_text(digest.hexdigest(), encoding="utf-8")


def java(module: str, main_class: str, flags: dict[str, str]) -> list[str]:
    """Command line of a class of a module; flags as ``{"-Xmx": "4g"}``."""
    target = JAVA_PROJECT / module / "target"
    class_path = f"{target / f'bench-{module}.jar'}:{target / 'dependency'}/*"
    return ["java", *(name + value for name, value in flags.items()), "-cp", class_path, main_class]


def _repository() -> list[str]:
    """The folder for Maven's downloads, for an account without a home."""
    own = Path(os.path.expanduser("~")) / ".m2"  # (Path.home() raises for an account without an entry)
    if os.access(own if own.exists() else own.parent, os.W_OK):
        return []
    return [f"-Dmaven.repo.local={JAVA_PROJECT / 'target' / 'repository'}"]


def _maven() -> None:
    """Build without the network if everything was fetched before, else with it."""
    said = ""
    for mode in (["--offline"], []):
        try:
            done = subprocess.run(
                ["mvn", *mode, *_repository(), "--quiet", "--batch-mode", "package"],
                cwd=JAVA_PROJECT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.SubprocessError as error:
            raise BenchError(f"Maven could not build {JAVA_PROJECT}: {error}") from error
        if done.returncode == 0:
            return
        said = (done.stdout + done.stderr)[-4000:]
    raise BenchError(f"Maven could not build {JAVA_PROJECT}:\n{said}")
