"""Topics that the writer does not know: the sends to them wait until the coordinator has created them, or has refused.

Socket: DEALER to the coordinator. The number and the bytes of waiting sends are bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import orjson
import zmq

from commitmq.network.guard import PROTOCOL, Guard
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id
from commitmq.security.audit import Actor
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.born_hosts import user_of
from commitmq.workers.writer.local_sockets import Frames, Peer

_TOPIC_TIMEOUT_MS = 5_000
_DELETED_RETRY_MS = 50
_MAX_WAITING_FOR_TOPIC = 10_000
_MAX_WAITING_BYTES = 64 * 1024 * 1024

Sends = list[tuple[Peer, dict[str, Any], Frames]]


class UnknownTopics:
    """The waiting sends by topic, and the requests to the coordinator."""

    def __init__(self, context: WorkerContext, topics: TopicViews, guard: Guard | None = None) -> None:
        """``topics`` learns the topics that the coordinator has created. ``guard``: of the port, knows who makes one."""
        self._guard, self._vouching = guard, context.vouching
        self._topics = topics
        self.socket: zmq.Socket[bytes] = context.zmq.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, new_routing_id())
        self.socket.connect(context.layout.ipc("coordinator"))
        context.register(self.socket, quiet=True)
        self._waiting: dict[str, Sends] = {}
        self._count = self._bytes = 0
        self.deadlines: dict[str, int] = {}
        """When the wait for each topic is over, in monotonic milliseconds."""
        self._asked: dict[int, str] = {}
        self._next_ask = 0

    def ask(self, identity: Peer, topic: str, header: dict[str, Any], frames: Frames) -> bytes | None:
        """Let a send wait for ``topic``, and ask for the topic unless another send has asked. Returns an answer when it
        cannot wait.
        """
        size = sum(map(len, frames))
        if self._count >= _MAX_WAITING_FOR_TOPIC or self._bytes + size > _MAX_WAITING_BYTES:
            return wire.error(
                header["id"],
                "SYSTEM_BUSY",
                "too many sends wait for new topics",
                outcome="not_stored",
                retry_after_ms=100,
            )
        waiting = self._waiting.get(topic)
        if waiting is None:
            self._next_ask += 1
            user = user_of(self._guard, self._vouching, header, frames)
            more = self._vouching.fields("topic.route", Actor(user, PROTOCOL)) if user else {}
            ask = wire.pack({"op": "topic.route", "id": self._next_ask, "topic": topic, "create": True, **more})
            try:
                self.socket.send(ask, zmq.NOBLOCK)
            except zmq.Again:
                return wire.error(
                    header["id"],
                    "SYSTEM_BUSY",
                    "the coordinator does not answer, so a new topic cannot be made",
                    outcome="not_stored",
                    retry_after_ms=500,
                )
            waiting = self._waiting[topic] = []
            self.deadlines[topic] = monotonic_ms() + _TOPIC_TIMEOUT_MS
            self._asked[self._next_ask] = topic
        waiting.append((identity, header, frames))
        self._count += 1
        self._bytes += size
        return None

    def hear(self) -> Iterator[tuple[Sends, dict[str, Any] | None]]:
        """Take the coordinator's answers. Yields the waiting sends of each topic that has an answer or whose time is
        up, and why they are refused: a dictionary with ``code``, ``error`` and perhaps ``retry_after_ms``, None when
        the topic is there.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                reply = orjson.loads(self.socket.recv(zmq.NOBLOCK))
                topic = self._asked.pop(reply.get("id"), None)
                if topic is None:
                    continue
                if reply.get("ok") and self._topics.learn(topic, reply["topic"]):
                    yield self._release(topic), None
                elif reply.get("ok"):
                    # The topic was deleted while this answer was on its way.
                    sentence = f"topic {topic} is just being deleted"
                    refusal = {"code": "SERVICE_NOT_AVAILABLE", "error": sentence, "retry_after_ms": _DELETED_RETRY_MS}
                    yield self._release(topic), refusal
                else:
                    yield self._release(topic), reply
        if self.deadlines:
            now = monotonic_ms()
            for topic in [topic for topic, deadline in self.deadlines.items() if deadline <= now]:
                sentence = "the coordinator did not answer about this topic"
                refusal = {"code": "SYSTEM_BUSY", "error": sentence, "retry_after_ms": 500}
                yield self._release(topic), refusal

    def _release(self, topic: str) -> Sends:
        self.deadlines.pop(topic, None)
        sends = self._waiting.pop(topic, [])
        self._count -= len(sends)
        self._bytes -= sum(sum(map(len, frames)) for _, _, frames in sends)
        return sends
