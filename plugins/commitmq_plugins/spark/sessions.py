"""Starts a Spark session: Java is found, workers run this Python, the source is registered, only errors are printed.

Converts Spark's exceptions back into the CommitMQError that caused them.

An error of the source reaches the driver as text: a Java exception that quotes a Python traceback, sometimes several
times. Its last line has CommitMQ's sentence. :func:`plain` restores the CommitMQError from it; :func:`tell_plainly`
reduces the text of Spark's own exceptions to that sentence.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from commitmq import errors
from commitmq.errors import CommitMQError, ConfigError, MissingExtraError
from commitmq.extras import SPARK_MODULES, need
from commitmq_plugins.spark.java import find_java, quiet_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
