"""One Spark session for all tests here: a JVM takes ten seconds to start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from commitmq_plugins.spark.sessions import QUICK_START, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The first of these tests waits for a JVM, and all of them for Python workers: on a busy machine that is minutes.
_TIMEOUT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of this folder first.

    Workers of pytest-xdist each get one stretch of all tests and take over from the end of another's. So the tests here
    stay with the worker that begins with them, and one JVM is started, not one in each.
    """
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
    items[:] = ours + [item for item in items if item not in set(ours)]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores, set up to start quickly. Tests may change SQL settings, and must change them back."""
    from pyspark import SparkContext

    found = session("local[2]", app="tests", **QUICK_START)
    found.sparkContext.setLogLevel("ERROR")
    gateway = SparkContext._gateway
    yield found
    found.stop()
    if gateway is not None:
        # The JVM ends when its standard input does.
        gateway.shutdown()
        gateway.proc.stdin.close()
        try:
            gateway.proc.wait(timeout=60)
        except subprocess.TimeoutExpired:
            gateway.proc.send_signal(signal.SIGQUIT)  # it prints what its threads do
            jvm = gateway.proc.pid
            raise AssertionError(
                f"the JVM does not end; its threads: {threads(jvm)}; its input is open in {holders(jvm)}"
            ) from None
        finally:
            gateway.proc.kill()


def threads(pid: int) -> str:
    """The names of the threads of ``pid``, but for those of its own garbage collector and compiler."""
    names = [Path(f"/proc/{pid}/task/{one}/comm").read_text().strip() for one in os.listdir(f"/proc/{pid}/task")]
    return ", ".join(sorted(one for one in names if not one.startswith(("GC", "G1", "C1", "C2"))))


def holders(pid: int) -> list[str]:
    """Who has an end of the pipe that is the standard input of ``pid``: process, its parent, what it waits for, descriptor
    and its flags (1: it writes). A forked child of this process has its name.
    """
    pipe = os.readlink(f"/proc/{pid}/fd/0")
    found = []
    for process in psutil.process_iter():
        folder = f"/proc/{process.pid}/fd"
        try:
            numbers = os.listdir(folder)
        except OSError as error:
            found.append(f"{process.pid} {process.name()} hides its descriptors: {error.strerror}")
            continue
        for number in numbers:
            with contextlib.suppress(OSError, psutil.Error):  # it has closed it, or has ended
                if os.readlink(f"{folder}/{number}") == pipe:
                    flags = Path(f"/proc/{process.pid}/fdinfo/{number}").read_text().split()[3]
                    waits = Path(f"/proc/{process.pid}/wchan").read_text()
                    who = f"{process.pid} of {process.ppid()} (this is {os.getpid()}) in {waits or 'user code'}"
                    found.append(f"{who} descriptor {number} flags {flags} {' '.join(process.cmdline())[:200]}")
    return found
