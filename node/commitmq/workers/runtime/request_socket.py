"""A worker's socket for a few one-frame requests. Every request is answered, and none ends the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import zmq

from commitmq.errors import CommitMQError, ProtocolError
from commitmq.protocol import wire
from commitmq.security.audit import Event
from commitmq.workers.runtime.context import WorkerContext

_REQUESTS_A_TURN: Final = 64

Operation = Callable[[bytes, dict[str, Any]], dict[str, Any] | None]
"""Takes the client and a request's header, returns the fields of its answer; None: it is answered later, by the operation's
own process. An exception becomes the answer.
"""


class RequestSocket:
    """A ROUTER under the worker's own name. ``who``: the worker's name in sentences. ``changes``: operations that go to the
    audit log, except as a ``dry_run``, with fields of theirs that it shows.
    """

    def __init__(
        self,
        context: WorkerContext,
        who: str,
        operations: Mapping[str, Operation],
        changes: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        *,
        requests_a_turn: int = _REQUESTS_A_TURN,
    ) -> None:
        self._context = context
        self._who, self._requests_a_turn = who, requests_a_turn
        self.operations, self._changes = operations, changes
        self.router, self.endpoints = context.bind_router(context.role)
        context.register(self.router)

    def serve(self) -> bool:
        """Answer the requests that have arrived. True when more may have arrived."""
        for _ in range(self._requests_a_turn):
            try:
                client, *frames = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            answer = self._answer(client, frames)
            if answer is not None:
                self.router.send_multipart([client, answer])
        return True

    def _answer(self, client: bytes, frames: list[bytes]) -> bytes | None:
        if len(frames) != 1:
            return wire.error(None, "BAD_HEADER", f"{self._who} takes one frame, not {len(frames)}")
        try:
            header = wire.parse_request(frames[0])
        except ProtocolError as error:
            return wire.refused(wire.request_id(frames[0]), error)
        operation = self.operations.get(header["op"])
        if operation is None:
            known = ", ".join(self.operations)
            return wire.error(header["id"], "UNKNOWN_OP", f"{self._who} knows {known}, not {header['op']!r}")
        return self._carried_out(client, header, operation)

    def _carried_out(self, client: bytes, header: dict[str, Any], operation: Operation) -> bytes | None:
        identity = header["id"]
        try:
            if header["op"] not in self._changes or header.get("dry_run"):
                fields = operation(client, header)
            else:
                with self._context.audit.changing(self._change(client, header)):
                    fields = operation(client, header)
            return None if fields is None else wire.ok(identity, **fields)
        except ProtocolError as error:
            return wire.refused(identity, error)
        except (CommitMQError, OSError) as error:
            self._context.log.error("a request failed", op=header["op"], error=str(error))
            return wire.error(identity, "SYSTEM_ERROR", str(error))
        except Exception as error:
            self._context.log.exception("a request failed", op=header["op"], error=repr(error))
            return wire.error(identity, "SYSTEM_ERROR", f"{self._who} failed on this request: {error!r:.1000}")

    def _change(self, client: bytes, header: dict[str, Any]) -> Event:
        role, op = self._context.role, header["op"]
        wanted = {name: header[name] for name in self._changes[op] if name in header}
        return Event(self.router.actor(client, header), f"{role}.{op}", request=header["id"], after=wanted or None)
