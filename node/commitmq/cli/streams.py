"""Replaces standard streams that were closed when the command began (``>&-``, or a launcher that closes everything).

For such a stream Python has None, and the next opened file or socket gets its descriptor: output for a terminal would
be written into that file. So each closed stream is opened again, on ``/dev/null``. Input and output are opened for the
other direction: using them fails, and the verb reports which stream is closed. Standard error takes everything: no
message can reach a person.
"""

from __future__ import annotations

import os
import sys

_stand_ins: set[int] = set()


def stand_in() -> None:
    """Replace each closed standard stream."""
    for fd, name, flags, mode in (
        (0, "stdin", os.O_WRONLY, "r"),
        (1, "stdout", os.O_RDONLY, "w"),
        (2, "stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is not None:
            continue
        found = os.open(os.devnull, flags)  # the lowest free number, which is ``fd``
        if found == fd:
            os.set_inheritable(fd, True)
            _stand_ins.add(fd)
        stream = open(found, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def is_closed(fd: int) -> bool:
    """Whether the standard stream ``fd`` was closed when the command began."""
    return fd in _stand_ins


def do_without() -> None:
    """From now on a closed stream fails nothing: output is discarded, and input is empty."""
    for fd in _stand_ins:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd)
        os.close(null)
