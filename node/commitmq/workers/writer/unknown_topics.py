"""Topics that the writer does not know: the sends to them wait until the coordinator has created them, or has refused.

Socket: DEALER to the coordinator. The number and the bytes of waiting sends are bounded.

Where a message was born: the address of the peer that sent it, as the record has it.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from typing import Any, Final

import orjson
import zmq

from commitmq.format.constants import Host
from commitmq.format.message_id import pack_host
from commitmq.network.guard import PROTOCOL, Guard
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id
from commitmq.security.audit import Actor
from commitmq.security.native_rights import Vouching
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.local_sockets import Frames, Payload, Peer
from commitmq.workers.writer.put_rules import PutRefusal

_MAX_KNOWN_PEERS: Final = 65_536
MAX_CLIENT_CHARACTERS: Final = 255


class BornHosts:
    """The encoded born host of each peer. A peer of this machine counts as 127.0.0.1."""

    def __init__(self) -> None:
        self._local = pack_host(Host("127.0.0.1", 0))
        self._peers: dict[Peer, bytes] = {}

    def of(self, identity: Peer, frame: zmq.Frame | Payload) -> bytes:
        """The born host of messages of ``identity``, one of whose frames is ``frame``."""
        host = self._peers.get(identity)
        if host is None:
            if len(self._peers) >= _MAX_KNOWN_PEERS:
                self._peers.clear()
            address = peer_address(frame)
            try:
                host = pack_host(Host(address, 0)) if address else self._local
            except ValueError:
                host = self._local
            self._peers[identity] = host
        return host


def peer_address(frame: zmq.Frame | Payload) -> str | None:
    """The peer's IP address from ZeroMQ; None over ipc. An IPv4 address mapped into IPv6 counts as IPv4."""
    try:
        text = str(frame.get("Peer-Address"))
        address = ipaddress.ip_address(text.partition("%")[0])
    except (zmq.ZMQError, ValueError, KeyError):
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def keeps_hosts(header: dict[str, Any], name: str, frame: zmq.Frame | Payload) -> bool:
    """True for a run of one of the node's own movers or gateways. ``header[name]``, 4 or 6, says how its born hosts are
    laid out. They come over ipc, whose sockets are in a folder that only the node's account may enter. Raises PutRefusal.
    """
    if peer_address(frame) is not None or "producer_id" in header:
        raise PutRefusal("NO_PERMISSION", f"only a process of this node may append with {name}")
    if header[name] not in (4, 6):
        raise PutRefusal("INVALID_PARAMETER", f"{name} must be 4 or 6")
    return True


def user_of(guard: Guard | None, vouching: Vouching, header: dict[str, Any], frames: Frames) -> str | None:
    """Whose quotas hold for a send: its user's, as ``guard`` knows, or whoever the node sends for; else None."""
    if guard is not None and (known := guard.user_of(frames[0])):
        return known
    return vouching.user(header)


def client_of(identity: Peer, header: dict[str, Any], frame: zmq.Frame | Payload) -> Peer | str:
    """For whose rates a send counts: the connection, or the ``client`` for which one of the node's gateways sends.
    Raises PutRefusal for a ``client`` that comes from elsewhere.
    """
    name = header.get("client")
    if name is None:
        return identity
    if peer_address(frame) is not None:
        raise PutRefusal("NO_PERMISSION", "only a process of this node may send for another client")
    if type(name) is not str or not 0 < len(name) <= MAX_CLIENT_CHARACTERS:
        raise PutRefusal("INVALID_PARAMETER", f"client must be a string of 1 to {MAX_CLIENT_CHARACTERS} characters")
    return name


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
        """Let a send wait for ``topic``, and ask for it once. Returns an answer when it cannot wait."""
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
