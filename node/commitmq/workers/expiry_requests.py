"""Expiry by hand: the operation ``expire`` of the cleanup worker.

    expire {before?, keep_bytes?, dry_run?}

``before``: what was stored before this time (milliseconds since 1970) goes; ``keep_bytes``: what lies further than this many
bytes behind the log's end goes; both: what both allow. Neither: what is expired by age goes now, whatever the hour. Whole
segments only. The answer comes when it is done. Repeating a request is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq

from commitmq.client import wire
from commitmq.errors import CommitMQError, ProtocolError
from commitmq.workers.runtime import WorkerContext

_REQUESTS_A_TURN: Final = 16
_MOST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ByHand:
    """What a person asked for."""

    before_ms: int | None = None
    keep_bytes: int | None = None
    dry_run: bool = False


class ExpiryRequests:
    """The socket of the cleanup worker."""

    def __init__(self, context: WorkerContext, expire: Callable[[ByHand], dict[str, Any]]) -> None:
        self._context = context
        self._expire = expire
        self.router, self.endpoints = context.bind_router(context.role)
        context.register(self.router)

    def serve(self) -> None:
        """Answer what has arrived."""
        for _ in range(_REQUESTS_A_TURN):
            try:
                client, *frames = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.router.send_multipart([client, self._answer(frames)])

    def _answer(self, frames: list[bytes]) -> bytes:
        if len(frames) != 1:
            return wire.error(None, "BAD_HEADER", f"cleanup takes one frame, not {len(frames)}")
        try:
            header = wire.parse_request(frames[0])
        except ProtocolError as error:
            return wire.error(wire.request_id(frames[0]), error.code, error.message)
        identity = header["id"]
        if header["op"] != "expire":
            return wire.error(identity, "UNKNOWN_OP", f"cleanup knows expire, not {header['op']!r:.100}")
        try:
            return wire.ok(identity, **self._expire(_by_hand(header)))
        except ProtocolError as error:
            return wire.error(identity, error.code, error.message)
        except (CommitMQError, OSError) as error:
            self._context.log.error("a request failed", error=str(error))
            return wire.error(identity, "SYSTEM_ERROR", str(error))


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
