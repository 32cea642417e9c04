"""The positions in the half topic and in the op topic: offsets of the group CID_RMQ_SYS_TRANS, as in RocketMQ (spec 12.3).

``config/consumerOffset.json`` belongs to the coordinator. This process asks it, as a client does.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import zmq

from commitmq.errors import ProtocolError
from commitmq.protocol import wire
from commitmq.semantics.transaction import CHECK_GROUP, HALF_TOPIC, OP_TOPIC
from commitmq.workers.runtime import dealer
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.transaction.half_queues import QUEUE

_ANSWER_MS: Final = 1_000
_LOOK_MS: Final = 50


class Positions:
    """The two offsets at the coordinator."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._next = 0

    def fetch(self) -> tuple[int, int] | None:
        """(half offset, op offset), -1 for one that was never committed; None when the coordinator does not answer.

        The topics exist afterwards.
        """
        if self._ask("topic.own") is None:
            return None
        answer = self._ask("offset.fetch", queues=[[HALF_TOPIC, QUEUE], [OP_TOPIC, QUEUE]])
        if answer is None:
            return None
        found = {topic: offset for topic, _, offset in answer["offsets"]}
        return int(found[HALF_TOPIC]), int(found[OP_TOPIC])

    def commit(self, half_offset: int, op_offset: int) -> bool:
        """Commit both. False when the coordinator did not answer: the same call may be repeated."""
        return (
            self._ask("offset.commit", offsets=[[HALF_TOPIC, QUEUE, half_offset], [OP_TOPIC, QUEUE, op_offset]])
            is not None
        )

    def _ask(self, op: str, **fields: Any) -> dict[str, Any] | None:
        """The answer, None without one in time. Raises ProtocolError for a refusal."""
        self._next += 1
        request = wire.pack({"op": op, "id": self._next, "group": CHECK_GROUP, **fields})
        deadline = monotonic_ms() + _ANSWER_MS
        socket = self._connected()
        sent = False
        while monotonic_ms() < deadline:
            self._context.heartbeat()
            if not sent:
                if socket.poll(_LOOK_MS, zmq.POLLOUT):
                    socket.send(request, zmq.NOBLOCK)
                    sent = True
                continue
            if not socket.poll(_LOOK_MS):
                continue
            answer: dict[str, Any] = orjson.loads(socket.recv())
            if answer.get("id") != self._next:
                continue
            if answer["ok"]:
                return answer
            if answer["code"] == "SERVICE_NOT_AVAILABLE":
                return None
            raise ProtocolError(answer["code"], answer["error"])
        self.close()
        return None

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = dealer.connect(self._context, "coordinator")
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
