"""The connection of a mover to the coordinator: a few requests at a time, and a wait for their answers.

A process's connection to another process of its node, over ipc.
"""

from __future__ import annotations

import time
from typing import Any, Final

import orjson
import zmq

from commitmq.errors import ProtocolError
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id
from commitmq.workers.runtime.context import Socket, WorkerContext


def connect(context: WorkerContext, role: str) -> Socket:
    """A DEALER to ``role``. It sends only while that process listens, and drops what was not sent when it is closed."""
    found = context.zmq.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.IMMEDIATE, 1)
    found.setsockopt(zmq.ROUTING_ID, new_routing_id())
    found.connect(context.layout.ipc(role))
    return found


_PATIENCE_S: Final = 2.0
_SILENT_S: Final = 0.5
_AWAY: Final = "the coordinator does not answer"


class CoordinatorLine:
    """See the module. It connects with the first request."""

    def __init__(self, context: WorkerContext, *, patience_s: float = _PATIENCE_S) -> None:
        """``patience_s``: how long to wait for the answers to one call."""
        self._context = context
        self._patience_s = patience_s
        self._socket: zmq.Socket[bytes] | None = None
        self._number = 0
        self._silent_until = 0.0
        """A coordinator that did not answer is not waited for again before: other clients wait meanwhile."""

    def ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers, refusals among them. Raises ProtocolError SERVICE_NOT_AVAILABLE when one does not come in time."""
        if time.monotonic() < self._silent_until:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", _AWAY, retry_after_ms=500)
        socket = self._connected()
        numbers: dict[int, int] = {}
        answers: list[dict[str, Any]] = [{}] * len(requests)
        deadline = time.monotonic() + self._patience_s
        try:
            for index, request in enumerate(requests):
                self._number += 1
                numbers[self._number] = index
                while not socket.poll(50, zmq.POLLOUT):
                    self._look(deadline)
                socket.send(wire.pack({**request, "id": self._number}), zmq.NOBLOCK)
            while numbers:
                if not socket.poll(50):
                    self._look(deadline)
                    continue
                answer = orjson.loads(socket.recv())
                index = numbers.pop(answer.get("id"), -1)
                if index >= 0:
                    answers[index] = answer
        except BaseException:
            self.close()
            raise
        return answers

    def one(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises ProtocolError for a refusal too."""
        (answer,) = self.ask([request])
        if not answer.get("ok"):
            raise wire.refusal(answer)
        return answer

    def _look(self, deadline: float) -> None:
        self._context.heartbeat()
        if time.monotonic() >= deadline:
            self._silent_until = time.monotonic() + _SILENT_S
            raise ProtocolError("SERVICE_NOT_AVAILABLE", _AWAY, retry_after_ms=500)

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = connect(self._context, "coordinator")
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
