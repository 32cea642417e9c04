"""The supervisor's reports to the program or person that started the node: JSON lines, or lines of text. Everything
else is in its log.

In the foreground the keeper is the started process. It passes two descriptors on: standard output, and the first
standard error, before the log took its place. A restarted supervisor prints again that it is ready.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

from commitmq.protocol import wire

Report = Callable[[dict[str, Any]], None]
_STDOUT: Final = 1
_BOLD, _RED, _PLAIN = "\033[1m", "\033[1;31m", "\033[0m"


def console_report(errors_fd: int) -> Report:
    """A function that writes the supervisor's reports: to standard output, and failures to ``errors_fd``."""

    def report(message: dict[str, Any]) -> None:
        for line, is_wrong in lines_of(message):
            _write(errors_fd if is_wrong else _STDOUT, line, _RED if is_wrong else "")
        if message["event"] == "ready":
            _write(_STDOUT, f"node is ready at {message['admin'][0]}", _BOLD)

    return report


def pipe_report(fd: int) -> Report:
    """Reports as JSON lines to ``fd`` (-1: nowhere). A reader that has gone is ignored."""

    def report(message: dict[str, Any]) -> None:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.write(fd, wire.dumps(message) + b"\n")

    return report


def lines_of(message: dict[str, Any]) -> list[tuple[str, bool]]:
    """``(line, whether it is bad news)`` of one report, without the last line of a node that is ready."""
    event = message["event"]
    if event == "info":
        return [(str(message["message"]), False)]
    if event == "failed":
        return [(f"commitmq: {message['error']}", True)]
    if event == "ready":
        store = message["store"]
        warnings = [(f"WARNING: {warning}", True) for warning in message["warnings"]]
        stop = (f"store {store}; Ctrl-C stops the node, or `commitmq stop --store {store}`", False)
        return [*warnings, stop, *((line, False) for line in server_lines(message))]
    if event == "stopped":
        if message["clean"]:
            return [("node stopped; everything written is flushed and dispatched", False)]
        return [("node stopped, but not in order: its next start recovers the store", True)]
    return []


def server_lines(message: dict[str, Any]) -> list[str]:
    """Where the servers of plugins serve, from the report of a node that is ready."""
    return [f"{name} is at {address.removeprefix('tcp://')}" for name, address in message["servers"].items()]


def _write(fd: int, line: str, style: str) -> None:
    # The terminal may be gone; that must not fail the node.
    with contextlib.suppress(OSError):
        if style and os.isatty(fd):
            line = f"{style}{line}{_PLAIN}"
        os.write(fd, f"{line}\n".encode(errors="replace"))
