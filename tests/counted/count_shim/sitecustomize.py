"""Found first on the path of every process whose work is counted: counts the calls that its Python code makes.

Calls of Python functions and of compiled ones, in the main thread and what it starts. The counter lies in a file
``calls.PID`` in ``$COMMITMQ_COUNT``, so that it can be read from outside; a forked process has its own.
"""

import mmap
import os
import sys
import threading

_cell = memoryview(bytearray(8)).cast("Q")


def _attach() -> None:
    global _cell
    fd = os.open(f"{os.environ['COMMITMQ_COUNT']}/calls.{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, 8)
    _cell = memoryview(mmap.mmap(fd, 8)).cast("Q")
    os.close(fd)


def _count(_frame: object, event: str, _argument: object) -> None:
    if event == "call" or event == "c_call":
        _cell[0] += 1


if "COMMITMQ_COUNT" in os.environ:
    _attach()
    os.register_at_fork(after_in_child=_attach)
    threading.setprofile(_count)
    sys.setprofile(_count)
