"""Silences a Spark driver: standard error gets only messages that the program or its user has to know.

Three sources write otherwise: the JVM when it starts (its incubator module, log4j's profile and levels), py4j when a
call is interrupted or the JVM is gone, and both at the end of the program, when one of them ends before the other. So
the environment gives the JVM a log4j configuration, which any configuration elsewhere overrules; and the JVM is ended
in order before the interpreter is.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_VARIABLE: Final = "LOG4J_CONFIGURATION_FILE"
_CONFIGURATION: Final = Path(__file__).with_name("log4j2.properties")
_FORMS: Final = ("properties", "xml", "yaml", "yml", "json", "jsn")
# Messages that py4j logs beside the exception that it raises: the first two through the root logger.
_TOLD: Final = (
    "Exception while sending command.",
    "KeyboardInterrupt while sending command.",
    "Exception occurred while shutting down connection",
)
_END_S: Final = 20
_CANCEL_S: Final = 5


def log_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that names CommitMQ's log4j configuration; nothing when a file of Spark's configuration folder or
    the variable itself configures logging. A Java option ``-Dlog4j2.configurationFile`` overrules the variable.
    """
    if environment.get(LOG_VARIABLE):
        return {}
    if any((folder / f"log4j2.{form}").exists() for folder in _configuration_folders(environment) for form in _FORMS):
        return {}
    # A comma would separate two files.
    return {LOG_VARIABLE: _CONFIGURATION.as_uri().replace(",", "%2C")}


def _configuration_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    if folder := environment.get("SPARK_CONF_DIR"):
        yield Path(folder)
    else:
        from pyspark.find_spark_home import _find_spark_home

        yield Path(_find_spark_home()) / "conf"


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """For creating a session: if that starts a JVM, handle its end, and Ctrl-C."""
    from pyspark import SparkContext

    had_gateway, had_context = SparkContext._gateway is not None, SparkContext._active_spark_context is not None
    before = signal.getsignal(signal.SIGINT)
    yield
    gateway = SparkContext._gateway
    if not had_gateway and gateway is not None:
        for name in (None, "py4j.clientserver"):
            logging.getLogger(name).addFilter(_is_news)
        atexit.register(_end, gateway, os.getpid())
    if not had_context and threading.current_thread() is threading.main_thread():
        # Spark takes SIGINT for itself, also from a program that has a handler of its own.
        signal.signal(signal.SIGINT, _interrupted if before is signal.default_int_handler else before)


def quiet_daemon() -> None:
    """For a worker of Spark's own daemon, which plans reads: let it end silently when the JVM has closed its
    connection.

    The setting ``spark.python.daemon.module`` is not for these workers. The daemon writes the traceback of a
    BrokenPipeError when the worker is done; by then no program waits for its output.
    """
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", "") == "pyspark.daemon":
        vars(main)["traceback"] = _Tracebacks()


class _Tracebacks:
    """The module ``traceback``, except that nothing is printed for a closed connection."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
            traceback.print_exc()


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.msg in _TOLD and os.path.basename(os.path.dirname(record.pathname)) == "py4j")


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: cancel running jobs, and raise KeyboardInterrupt. Spark's handler cancels over the connection on which
    the interrupted thread waits, which fails. A thread of its own has a connection of its own.
    """
    del number, frame
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is not None:
        canceller = threading.Thread(target=_quietly, args=(context.cancelAllJobs,), daemon=True)
        canceller.start()
        canceller.join(_CANCEL_S)
    _close_connection(SparkContext._gateway)
    raise KeyboardInterrupt


def _close_connection(gateway: Any) -> None:
    """Close this thread's connection to the JVM; it makes a new one when it needs one.

    Otherwise py4j tells the JVM on KeyboardInterrupt to close the interrupted connection. The JVM closes all connections
    that it has when it reads that. The new one of this thread may be among them, and its error would hide the
    KeyboardInterrupt.
    """
    connection = None if gateway is None else gateway._gateway_client.get_thread_connection()
    if connection is not None:
        _quietly(connection.close)


def _quietly(work: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(Exception):
        work(*arguments)


def _stop_streams(spark: SparkSession) -> None:
    for query in spark.streams.active:
        query.stop()


def _end(gateway: Any, process_id: int) -> None:
    """At the end of the program: stop running queries, then the JVM, and wait for it. Otherwise the JVM meets closed
    sockets of a Python that is gone, and writes about them behind the program's last line.
    """
    if os.getpid() != process_id:
        # A forked child has no JVM.
        return
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = SparkContext._active_spark_context
        if context is not None:
            found = SparkSession._instantiatedSession
            if found is not None:
                _quietly(_stop_streams, found)
            _quietly(context.stop)
        _quietly(gateway.shutdown)
        if gateway.proc is not None:
            # The JVM ends when its standard input does.
            _quietly(gateway.proc.stdin.close)
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.proc.wait(_END_S)
