"""Expiry by hand: the operation ``expire`` of the cleanup worker.

    expire {before?, keep_bytes?, dry_run?}

``before``: delete segments stored before this time (milliseconds since 1970). ``keep_bytes``: delete segments further
than this many bytes behind the log's end. With both, delete only segments that both allow. With neither, delete the
segments that expired by age now, at any hour. Only whole segments are deleted. The answer comes when the deletion is
done. Repeating a request is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.request_socket import RequestSocket

_MOST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ByHand:
    """The parameters of an expiry by hand."""

    before_ms: int | None = None
    keep_bytes: int | None = None
    dry_run: bool = False


def expiry_socket(context: WorkerContext, expire: Callable[[ByHand], dict[str, Any]]) -> RequestSocket:
    """The socket of the cleanup worker."""
    operations = {"expire": lambda header: expire(_by_hand(header))}
    return RequestSocket(context, "cleanup", operations, {"expire": ("before", "keep_bytes")})


def _by_hand(header: dict[str, Any]) -> ByHand:
    numbers = []
    for field in ("before", "keep_bytes"):
        value = header.get(field)
        if value is not None and (type(value) is not int or not 0 <= value < _MOST):
            raise ProtocolError("INVALID_PARAMETER", f"{field} must be a whole number, not {value!r:.40}")
        numbers.append(value)
    dry_run = header.get("dry_run", False)
    if type(dry_run) is not bool:
        raise ProtocolError("INVALID_PARAMETER", f"dry_run must be true or false, not {dry_run!r:.40}")
    return ByHand(numbers[0], numbers[1], dry_run)
