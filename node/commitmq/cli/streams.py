"""Standard streams that were closed when the command began (``>&-``, or a launcher that closes everything).

Python has None in the place of such a stream, and the next file or socket that is opened gets its descriptor: what is meant
for a terminal would be written into it. So each of them is opened again, on ``/dev/null``. Input and output are opened for the
other direction: using them fails, and the verb says what is closed. Standard error takes everything: there is nobody to tell.
"""

from __future__ import annotations

import os
import sys

_stand_ins: set[int] = set()


def stand_in() -> None:
    """Give each closed standard stream a stand-in."""
    for fd, name, flags, mode in (
        (0, "stdin", os.O_WRONLY, "r"),
        (1, "stdout", os.O_RDONLY, "w"),
        (2, "stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is not None:
            continue
        found = os.open(os.devnull, flags)  # the lowest number that is free, which is ``fd``
        if found == fd:
            os.set_inheritable(fd, True)
            _stand_ins.add(fd)
        stream = open(found, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def is_closed(fd: int) -> bool:
    """Whether the standard stream ``fd`` was closed when the command began."""
    return fd in _stand_ins


def do_without() -> None:
    """From now on nothing fails for a closed stream: what is written goes nowhere, and there is nothing to read."""
    for fd in _stand_ins:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd)
        os.close(null)
