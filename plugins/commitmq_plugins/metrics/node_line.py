"""Requests of this process to others of its node, one after the other, each with a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import zmq

from commitmq.errors import NodeUnavailableError
from commitmq.plugin import WorkerContext
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id

DEADLINE_S: Final = 2.0


class NodeLine:
    """A connection to each process that was asked. For one thread."""

    def __init__(self, context: WorkerContext, deadline_s: float = DEADLINE_S) -> None:
        self._context, self._deadline_s = context, deadline_s
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._number = 0

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close(0)
        self._sockets.clear()

    def ask(self, role: str, op: str, **fields: Any) -> dict[str, Any]:
        """The answer of ``role``, or of the supervisor (``admin``).

        Raises NodeUnavailableError without an answer in time, ProtocolError for a refusal, and StoreError, KeyError or
        IndexError while the supervisor's address is not known.
        """
        endpoint = self._context.admin_ipc if role == "admin" else self._context.layout.ipc(role)
        sock = self._sockets.get(endpoint)
        if sock is None:
            sock = self._sockets[endpoint] = self._opened(endpoint)
        self._number += 1
        deadline = time.monotonic() + self._deadline_s
        try:
            sock.send(wire.pack({"op": op, "id": self._number, **fields}), zmq.NOBLOCK)
            while (left_ms := (deadline - time.monotonic()) * 1000) > 0 and sock.poll(max(1, int(left_ms))):
                answer = wire.parse_answer(sock.recv())
                if answer.get("id") == self._number:
                    if not answer["ok"]:
                        raise wire.refusal(answer)
                    return answer
        except zmq.ZMQError as error:
            self._drop(endpoint)
            raise NodeUnavailableError(f"{role} takes no requests at present: {error}") from error
        self._drop(endpoint)
        raise NodeUnavailableError(f"{role} did not answer {op} within {self._deadline_s:g} s")

    def pages(self, role: str, op: str, name: str, most: int) -> Iterator[Any]:
        """The entries of the list ``name`` on all pages, up to ``most``. Raises as :meth:`ask`."""
        after: Any = None
        while most > 0:
            page = self.ask(role, op, after=after)
            yield from page[name][:most]
            most -= len(page[name])
            after = page["next"]
            if after is None:
                return

    def _opened(self, endpoint: str) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.zmq.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.ROUTING_ID, new_routing_id())
        sock.connect(endpoint)
        return sock

    def _drop(self, endpoint: str) -> None:
        self._sockets.pop(endpoint).close(0)
