"""The Maven projects of these tests: built when a source changed, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE / "java" / "target" / "repository"
_BUILD_TIMEOUT_S = 300


@dataclass(frozen=True)
class JavaProject:
    """``folder`` has the pom and the sources. ``target`` gets ``jar`` and the jars that it needs, ``needs`` of RocketMQ's."""

    folder: Path
    target: Path
    jar: str
    needs: tuple[str, ...]
    properties: tuple[str, ...] = ()
    """Maven's, ``name=value``."""

    def build(self) -> str:
        """Build it unless it is as it was the last time; returns the class path. Raises RuntimeError with Maven's words."""
        self.target.mkdir(parents=True, exist_ok=True)
        stamp, state = self.target / "built-from", self._state()
        with _only_one_at_a_time(self.target / "build.lock"):
            if not (self._is_built() and stamp.exists() and stamp.read_text() == state):
                stamp.unlink(missing_ok=True)
                self._maven()
                stamp.write_text(state)
        return f"{self.target / self.jar}{os.pathsep}{self.target / 'dependency'}/*"

    def _state(self) -> str:
        """Changes with each source."""
        digest = hashlib.sha256("\0".join(self.properties).encode())
        sources = sorted(path for path in (self.folder / "src").rglob("*") if path.is_file())
        for path in [self.folder / "pom.xml", *sources]:
            digest.update(str(path.relative_to(self.folder)).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()

    def _is_built(self) -> bool:
        jars = self.target / "dependency"
        return (self.target / self.jar).exists() and all(any(jars.glob(f"rocketmq-{one}-*.jar")) for one in self.needs)

    def _maven(self) -> None:
        """Build without the network if everything was fetched before, else with it."""
        said = ""
        shutil.rmtree(self.target / "classes", ignore_errors=True)  # of sources that are gone
        for mode in (["--offline"], []):
            done = subprocess.run(
                [
                    "mvn",
                    *mode,
                    *_repository(),
                    *(f"-D{one}" for one in self.properties),
                    "--quiet",
                    "--batch-mode",
                    "package",
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_BUILD_TIMEOUT_S,
                check=False,
            )
            if done.returncode == 0 and self._is_built():
                return
            said = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"Maven could not build {self.folder}:\n{said}")


def missing_tools() -> list[str]:
    """Names of the programs this needs and PATH does not have."""
    return [name for name in ("java", "javac", "mvn") if shutil.which(name) is None]


def _repository() -> list[str]:
    """Where Maven keeps what it fetches, for an account without a home."""
    own = Path(os.path.expanduser("~")) / ".m2"  # (Path.home() raises for an account without an entry)
    if os.access(own if own.exists() else own.parent, os.W_OK):
        return []
    return [f"-Dmaven.repo.local={_REPOSITORY}"]


@contextlib.contextmanager
def _only_one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


INTEROP = JavaProject(_HERE / "java", _HERE / "java" / "target", "interop.jar", ("store", "filter", "broker"))


def scenarios(version: str) -> JavaProject:
    """The scenarios for the clients of one version of RocketMQ."""
    left_out = "v5" if version.startswith("4.") else "v4"
    folder = _HERE / "scenarios"
    properties = (f"rocketmq.version={version}", f"left.out={left_out}")
    return JavaProject(folder, folder / "target" / version, "scenarios.jar", ("client", "remoting"), properties)
