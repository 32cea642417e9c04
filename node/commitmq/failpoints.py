"""Named places where a test can make a process die, stop, wait or fail; in a normal run they do nothing.

``COMMITMQ_FAILPOINTS="writer.after_append=kill@3;flush.before_fdatasync=delay:50ms"`` names them. Actions:

    kill            SIGKILL to this process, like the out-of-memory killer
    kill_node       SIGKILL to every process of this one's group: a whole node but its keeper, which starts it again
    stop            SIGSTOP to this process: a hang that only a heartbeat shows
    exit            end at once with exit code 77, without clean-up
    delay:50ms      sleep (``us``, ``ms`` or ``s``)
    errno:ENOSPC    raise OSError with that errno, as the system call at this place would
    short:100       at a place that writes: pass at most this many bytes to the system call, so it reports a short write

``@n`` fires only at the n-th hit of a process, ``@n-m`` at the n-th to the m-th; without it every hit fires. A
restarted worker counts from zero. So ``COMMITMQ_FAILPOINTS_ONCE=FOLDER`` lets each point with ``@n`` fire in one
process only: the point leaves a file of its name there when it fires, and does not fire while that file exists. A name
that begins with a role and a slash (``flush/disk.sync.segment:before``) means the place in that worker (or
``supervisor``) only; in the name of the file the slash is ``%``.

``COMMITMQ_FAILPOINTS_SEEN=FOLDER`` lists the places: each process writes the name of every place that it reaches into
``ROLE.PID`` there, one line per hit.

Code at such a place reads ``if failpoints.ACTIVE: failpoints.hit("name")``: without the variable that is one load of a
module attribute, and no call.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from commitmq.errors import ConfigError

Buffer: TypeAlias = bytes | bytearray | memoryview
VARIABLE = "COMMITMQ_FAILPOINTS"
ONCE_VARIABLE = "COMMITMQ_FAILPOINTS_ONCE"
SEEN_VARIABLE = "COMMITMQ_FAILPOINTS_SEEN"
EXIT_CODE = 77  # workers.runtime.context.ExitCode.FAILPOINT, repeated because this module must not import the runtime

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(slots=True)
class Failpoint:
    """One configured point: the action, its argument, and the range of hits (0: every hit)."""

    name: str
    action: str
    delay_s: float = 0.0
    errno: int = 0
    bytes: int = 0
    at_hit: int = 0
    last_hit: int = 0
    hits: int = 0
    is_ours: bool = False  # of the processes that share a FOLDER, this is the one in which the point fires


def parse(text: str) -> dict[str, Failpoint]:
    """The points in ``text``. Raises ConfigError with the part that cannot be understood."""
    points: dict[str, Failpoint] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, equals, rest = part.partition("=")
        action, at, nth = rest.partition("@")
        action, _, argument = action.partition(":")
        first, _, last = nth.partition("-")
        last = last or first
        if (
            not name
            or not equals
            or (at and not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)))
        ):
            raise ConfigError(f"{VARIABLE}: {part!r} is not name=action[:argument][@hit[-hit]]")
        points[name] = Failpoint(name, action, at_hit=int(first) if at else 0, last_hit=int(last) if at else 0)
        if action == "delay":
            points[name].delay_s = _seconds(argument, part)
        elif action == "errno":
            number = getattr(errno, argument, None)
            if not isinstance(number, int):
                raise ConfigError(f"{VARIABLE}: {part!r} names no errno; write for example errno:ENOSPC")
            points[name].errno = number
        elif action == "short" and argument.isdecimal() and int(argument) > 0:
            points[name].bytes = int(argument)
        elif action not in ("kill", "kill_node", "stop", "exit") or argument:
            raise ConfigError(
                f"{VARIABLE}: {part!r} has no action of kill, kill_node, stop, exit, delay:TIME, errno:NAME, short:BYTES"
            )
    return points


def _seconds(text: str, part: str) -> float:
    for unit, factor in _UNITS_S.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdecimal():
            return float(number) * factor
    raise ConfigError(f"{VARIABLE}: {part!r} needs a time such as delay:50ms")


def hit(name: str) -> None:
    """Reach the place ``name``: act if it is configured and due. May raise OSError (action ``errno``)."""
    point = _due(name)
    if point is not None:
        _act(point)


def _act(point: Failpoint) -> None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "kill_node":
        os.killpg(0, signal.SIGKILL)
    elif point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif point.action == "exit":
        os._exit(EXIT_CODE)
    elif point.action == "delay":
        time.sleep(point.delay_s)
    elif point.action == "errno":
        raise OSError(point.errno, os.strerror(point.errno))


def clip(name: str, data: Buffer) -> memoryview:
    """The bytes of ``data`` to pass to the system call at the place ``name``: fewer when a short write is due. Other
    actions happen as in :func:`hit`.
    """
    view = memoryview(data)
    point = _due(name)
    if point is None:
        return view
    if point.action == "short":
        return view[: point.bytes]
    _act(point)
    return view


def play(role: str) -> None:
    """Make this process the worker of ``role`` from now on."""
    global _role
    _role = role
    for point in _points.values():
        point.hits = 0  # drop the hits of the process that this one was forked from


def _due(name: str) -> Failpoint | None:
    if _seen:
        _write_down(name)
    found = None
    for point in (_points.get(name), _points.get(f"{_role}/{name}")):
        if point is not None:
            point.hits += 1
            if not point.at_hit or (point.at_hit <= point.hits <= point.last_hit and _fires_here(point)):
                found = point
    return found


def _fires_here(point: Failpoint) -> bool:
    folder = os.environ.get(ONCE_VARIABLE)
    if folder and not point.is_ours:
        name = point.name.replace("/", "%")
        try:
            os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        point.is_ours = True
    return True


def _write_down(name: str) -> None:
    path = Path(_seen) / f"{_role}.{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, name.encode() + b"\n")
    finally:
        os.close(fd)


_role = ""
_points = parse(os.environ.get(VARIABLE, ""))
_seen = os.environ.get(SEEN_VARIABLE, "")
ACTIVE = bool(_points) or bool(_seen)
