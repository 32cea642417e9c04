"""The ROUTER behind each port of the node, with its gate.

Its limits: the bytes of a frame (libzmq ends the connection that sends a larger one), 64 whole requests waiting per
connection, the frames of one request, waiting answers, and the bounds of :mod:`.gate`. Requests with long headers wait for
shorter ones, see :class:`LongRequests`; one that names no operation is refused unread. Requests of a connection that is
about to be ended are dropped.

``ROUTER_HANDOVER`` is on: a connection that comes with the id of another one takes its place. With it off, libzmq would
ignore the newcomer and keep its messages for ever, also after it has gone (4 connections and 60 requests of 1 MB each:
236 MB that are never freed), so that any client could fill the process. It is safe because an id cannot be guessed. It also
lets a client that lost its connection come back at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import zmq
from zmq import MessageTracker

from commitmq.config import NetworkConfig
from commitmq.log import Log
from commitmq.network import gate as routing_ids
from commitmq.network import ports
from commitmq.network.connection import FRAME_HEAD_BYTES, SEALED_FRAME_BYTES, UNKNOWN_ACCOUNT, PeerConnection
from commitmq.network.gate import Gate, UnknownSourceError
from commitmq.network.guard import CONNECTIONS, DOMAIN, LOCAL, PROTOCOL, Guard, UserBounds
from commitmq.protocol import wire
from commitmq.security.audit import Actor
from commitmq.security.native_rights import Vouching

LONG_HEADER_BYTES: Final = 48 * 1024
"""A longer header is long. That of an ordinary send is not: the properties of a message have 32 KiB at most."""
REST: Final = 9
MAX_BYTES: Final = 64 * 1024 * 1024
_LONGEST_REST_NS: Final = 200_000_000
_REQUEST_BYTES: Final = 512  # of memory that a request takes besides its frames


@dataclass(slots=True)
class _RouterPeer:
    owner: PeerConnection
    requests: deque[tuple[list[Any], int]] = field(default_factory=deque)
    size: int = 0


class LongRequests:
    """Requests with a long header wait in a line of their own, so that short ones do not wait for them.

    A header must be parsed before anything is known about its request, and a long one takes milliseconds: a group's join with
    100,000 topics 9 ms, a pull with 60 KB of tags 1 ms. So a process handles short requests as they come. After a long
    request it takes no further one for :data:`REST` times as long as that one took. The first one is taken at once.

    The peers in the line take turns. A peer with a request in the line gets its later requests, short ones too, behind it:
    the order of one peer's requests never changes. The bytes in the line are bounded: the router ends the connection
    that holds the most, and forgets its requests.

    The line of one ROUTER. ``waiting``: the number of its requests; ``total_bytes``: the memory they take; ``began_ns``:
    when the long request was taken that is being handled, else 0.
    """

    __slots__ = ("_clock_ns", "_due_ns", "_peers", "_released", "_rests", "began_ns", "total_bytes", "waiting")

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.waiting = 0
        self.total_bytes = 0
        self._clock_ns = clock_ns
        self._peers: dict[bytes, _RouterPeer] = {}  # the first one is the next
        # Short requests that came behind a long one of their peer, which has been taken.
        self._released: deque[list[Any]] = deque()
        self.began_ns = self._due_ns = 0
        self._rests = True

    def add(self, request: list[Any], size: int, owner: PeerConnection) -> None:
        """Put ``request``, ``[routing id, header, …]`` of ``size`` bytes in all, behind the others of its peer."""
        self.settle()
        peer = self._peers.setdefault(request[0], _RouterPeer(owner))
        peer.owner = owner
        size += _REQUEST_BYTES
        peer.requests.append((request, size))
        peer.size += size
        self.total_bytes += size
        self.waiting += 1

    def holds(self, identity: bytes) -> bool:
        """Whether a request of this peer waits, so that its next one must wait too."""
        return identity in self._peers or any(one[0] == identity for one in self._released)

    def take(self) -> list[Any] | None:
        """The next request whose time has come."""
        if self._released:
            self.waiting -= 1
            return self._released.popleft()
        self.settle()
        if not self._peers or (self._rests and self._clock_ns() < self._due_ns):
            return None
        identity = next(iter(self._peers))
        peer = self._peers.pop(identity)
        request = self._pop(peer)
        self.waiting -= 1
        while peer.requests and len(peer.requests[0][0][1]) <= LONG_HEADER_BYTES:
            self._released.append(self._pop(peer))
        if peer.requests:
            self._peers[identity] = peer  # behind the others
        self.began_ns = self._clock_ns()
        return request

    def wait_ms(self) -> float:
        """How long :meth:`take` will give nothing, while requests wait."""
        self.settle()
        if self._released or not self._rests:
            return 0.0
        return max(0.0, (self._due_ns - self._clock_ns()) / 1e6)

    def settle(self) -> None:
        """The last long request has been handled: the loop says so before its next request, and before it sleeps."""
        if self.began_ns:
            now_ns = self._clock_ns()
            self._due_ns = now_ns + min(REST * (now_ns - self.began_ns), _LONGEST_REST_NS)
            self.began_ns = 0

    def next_owner(self) -> PeerConnection | None:
        first = next(iter(self._peers.values()), None)
        return None if first is None else first.owner

    def drop_next(self) -> None:
        self._drop(next(iter(self._peers)))

    def drop_worst(self) -> tuple[PeerConnection, int]:
        """Forget the requests of the peer that holds the most bytes; returns its connection and these bytes."""
        return self._drop(max(self._peers, key=lambda one: self._peers[one].size))

    def stop_resting(self) -> None:
        """The process ends: give everything without a rest."""
        self._rests = False

    def _drop(self, identity: bytes) -> tuple[PeerConnection, int]:
        peer = self._peers.pop(identity)
        self.waiting -= len(peer.requests)
        self.total_bytes -= peer.size
        return peer.owner, peer.size

    def _pop(self, peer: _RouterPeer) -> list[Any]:
        request, size = peer.requests.popleft()
        peer.size -= size
        self.total_bytes -= size
        return request


_TRACK_BYTES: Final = 1024 * 1024
_MAX_UNTRACKED_CLIENTS: Final = 4_096
# One client gets at most a quarter of the total, and no more than is free: n clients that never read end up with
# 1/(n+1) each, and the same share is left for the others. A client without unsent answers may exceed the total by this
# share.
_CLIENT_SHARE: Final = 4
_NEWCOMERS_SHARE: Final = 4


class UnsentAnswers:
    """Counts answers that ZeroMQ still holds because their client does not read, so that they can be bounded.

    A ROUTER must not block for one slow peer, and its queues count answers, not bytes. Without this count a client that
    asks and never reads could make a node hold any amount of memory.

    A tracker on the last frame tells that an answer has left; it costs a hand-over between threads. Answers to one
    client leave in order, so one tracker covers everything sent before it: the sizes of small answers are summed up
    until they are worth a tracker.

    Bytes passed to ZeroMQ and not yet out, by client.
    """

    def __init__(self, max_total_bytes: int) -> None:
        self._max_client_bytes = max_total_bytes // _CLIENT_SHARE
        self._max_total_bytes = max_total_bytes
        self._answers: dict[bytes, deque[tuple[MessageTracker, int]]] = {}
        self._bytes: dict[bytes, int] = {}
        self._total = 0
        # Clients come and go: the entries of the longest silent clients are dropped, with the few bytes they may stand
        # for.
        self._untracked: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Bytes of all answers with a tracker, as of the last look."""
        return self._total

    def wants_tracker(self, client: bytes, size: int) -> bool:
        """Count an answer of ``size`` bytes that is about to be sent. True when it must be sent with a tracker."""
        size += self._untracked.pop(client, 0)
        self._untracked[client] = size
        if len(self._untracked) > _MAX_UNTRACKED_CLIENTS:
            self._untracked.popitem(last=False)
        return size >= _TRACK_BYTES

    def add(self, client: bytes, tracker: MessageTracker | None) -> None:
        """``tracker`` covers all answers counted for ``client`` since the last tracker."""
        size = self._untracked.pop(client, 0)
        if tracker is None:
            return
        self._settle(client)
        self._answers.setdefault(client, deque()).append((tracker, size))
        self._bytes[client] = self._bytes.get(client, 0) + size
        self._total += size

    def is_over(self, client: bytes) -> bool:
        """Whether ``client`` must read before it gets more answers."""
        if not self._total:
            return False
        if self._breaks(client):
            for one in list(self._answers):
                self._settle(one)
        return self._breaks(client)

    def worst(self) -> bytes | None:
        """The client that holds the most bytes; None when none holds any."""
        return max(self._bytes, key=self._bytes.__getitem__, default=None)

    def holds(self, client: bytes) -> int:
        """Bytes of ``client`` as of the last look."""
        return self._bytes.get(client, 0)

    def _breaks(self, client: bytes) -> bool:
        held = self._bytes.get(client, 0)
        if not held:
            return self._total >= self._max_total_bytes + self._max_total_bytes // _NEWCOMERS_SHARE
        return held >= min(self._max_client_bytes, self._max_total_bytes - self._total)

    def _settle(self, client: bytes) -> None:
        answers = self._answers.get(client)
        if answers is None:
            return
        while answers and answers[0][0].done:
            size = answers.popleft()[1]
            self._bytes[client] -= size
            self._total -= size
        if not answers:
            del self._answers[client], self._bytes[client]


MAX_FRAMES: Final = 1_024
_MOST_REFUSALS: Final = 1_000
# Plain ints: zmq's enums cost more than the call.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_BUSY_RETRY_MS: Final = 50
_BACKLOG: Final = 1_024
_WAITING_REQUESTS: Final = 64
_numbers = itertools.count(1)


class Router(zmq.Socket[bytes]):
    """Made by :func:`open_router`; ``gate`` guards it, and requests with long headers wait in ``line``."""

    gate: Gate
    unsent: UnsentAnswers
    line: LongRequests
    only_answers: bool
    has_line: bool
    guard: Guard | None
    """Decides for each request whether its sender may ask for it; None on a node without keys."""
    vouching: Vouching
    """Knows the processes of the node that may name somebody else as the one who asks."""
    users: UserBounds | None
    """What the clients of one user may have at this port."""

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        """The next request: routing id, header, payload. A request that is refused because of its sender's id is never
        returned. A request that only needs an answer is not returned when its peer has gone.

        Frames of a connection that has sent a long header are copied when they are returned, because the line may drop
        them.
        """
        gate, line = self.gate, self.line
        if line.began_ns:
            line.settle()
        while True:
            if line.waiting and (long := self.take_long()) is not None:
                if self.guard is not None and self.turns_away(self.guard, *long[:2]):
                    continue
                long = _copied(long)
                if self._is_over(long):
                    continue
                return long
            try:
                identity = self.recv(flags)
            except zmq.Again:
                gate.found_nothing()
                raise
            gate.is_empty = False
            connection = gate.peers.get(identity)
            copies = connection is not None and not connection.sends_long and self.guard is None
            first: Any = self.recv(flags, copy=copies)
            frames = [identity, first]
            if connection is None:
                connection = self.meet(identity, first)
            while self.getsockopt(zmq.RCVMORE):
                if len(frames) > MAX_FRAMES:
                    self.skip_rest(identity, connection)
                    break
                frames.append(self.recv(flags, copy=copies))
            if connection is None:
                continue
            size = sum(map(len, frames)) + FRAME_HEAD_BYTES + connection.head_bytes * (len(frames) - 1)
            connection.handled += size
            if connection.gone and self.only_answers:
                continue
            is_plain = size <= LONG_HEADER_BYTES and not line.waiting and not connection.ending
            if not is_plain and self.sets_aside(frames, size, connection):
                continue
            if self.guard is not None and self.turns_away(self.guard, *frames[:2]):
                continue
            if not copies:
                frames = _copied(frames)
            if self._is_over(frames):
                continue
            return frames

    def sets_aside(self, request: list[Any], size: int, connection: PeerConnection) -> bool:
        """Whether ``request``, ``[routing id, header, …]``, is not handled now: it waits in the line, was refused unread,
        or comes from an ``ending`` connection. Ask for large ones, for those connections, and while any waits.
        """
        line = self.line
        if connection.ending:
            if connection.turned_away:
                self._turn_away(request, connection)
            else:
                self.gate.endings.drop(connection)
            return True
        if not self.has_line:
            return False
        if len(request[1]) > LONG_HEADER_BYTES:
            connection.sends_long = True
            if wire.names_no_operation(request[1]):
                self._refuse_unread(request[0], connection)
                return True
        elif not line.holds(request[0]):
            return False
        line.add(request, size, connection)
        while line.total_bytes > MAX_BYTES and line.waiting > 1:
            worst, held = line.drop_worst()
            why = f"{held} of the {MAX_BYTES} bytes of requests with long headers that may wait"
            self.gate.end(worst, "long headers", why)
        return True

    def take_long(self) -> list[Any] | None:
        """The next request of the line whose time has come."""
        line = self.line
        while (owner := line.next_owner()) is not None and (owner.ending or (owner.gone and self.only_answers)):
            line.drop_next()
        return line.take()

    def _turn_away(self, request: list[Any], connection: PeerConnection) -> None:
        """Answer the first request of a connection for which there is no place; the gate ends it."""
        why, connection.turned_away = connection.turned_away, ""
        header = request[1] if type(request[1]) is bytes else request[1].bytes
        answer = wire.error(wire.request_id(header), "LIMIT_EXCEEDED", why, outcome="not_stored")
        with contextlib.suppress(zmq.ZMQError):
            super().send_multipart([request[0], answer], zmq.NOBLOCK)

    def _refuse_unread(self, identity: bytes, connection: PeerConnection) -> None:
        """Refuse a long header that names no operation, and end its connection: its further ones would cost the same."""
        with contextlib.suppress(zmq.ZMQError):
            super().send_multipart([identity, wire.error(None, "UNKNOWN_OP", wire.NO_OPERATION)], zmq.NOBLOCK)
        self.gate.end(connection, "operation", wire.NO_OPERATION)

    def turns_away(self, guard: Guard, identity: bytes, frame: zmq.Frame) -> bool:
        """Whether the sender of a request, whose header is in ``frame``, may not ask for it; then it has its answer. A
        connection that continues all the same is ended.
        """
        answer = guard.refusal(frame)
        if answer is None:
            users = self.users
            return (
                users is not None
                and users.quotas.bounds_connections
                and self._is_too_much(users, guard, identity, frame)
            )
        with contextlib.suppress(zmq.ZMQError):
            super().send_multipart([identity, answer], zmq.NOBLOCK)
        connection = self.gate.peers.get(identity)
        if connection is not None:
            connection.refusals += 1
            if connection.refusals == _MOST_REFUSALS:
                self.gate.end(connection, "permissions", f"{_MOST_REFUSALS} requests that its user may not ask for")
        return True

    def _is_too_much(self, users: UserBounds, guard: Guard, identity: bytes, frame: zmq.Frame) -> bool:
        """Whether the user of a request has more connections or waiting bytes than the quota; then it has its answer."""
        connection = self.gate.peers.get(identity)
        if connection is None or not guard.user or (refused := users.refusal(connection, guard.user)) is None:
            return False
        more = {"retry_after_ms": refused.retry_after_ms, "outcome": "not_stored"}
        busy = wire.error(wire.request_id(frame.bytes), "SYSTEM_BUSY", refused.sentence, **more)
        with contextlib.suppress(zmq.ZMQError):
            super().send_multipart([identity, busy], zmq.NOBLOCK)
        if refused.bound == CONNECTIONS:
            self.gate.end(connection, refused.bound, refused.sentence)
        return True

    def actor(self, identity: bytes, header: dict[str, Any], *, looks_up: bool = True) -> Actor:
        """Who asked for what was just taken, for the audit log. ``identity``: its routing id. ``looks_up``: ask the
        kernel whose a connection over loopback is, once for each.
        """
        named = self.vouching.actor(header)
        if named is not None:
            return named
        if self.guard is not None:
            return self.guard.actor
        connection = self.gate.peer(identity) if looks_up else self.gate.peers.get(identity)
        if connection is None:
            return Actor(protocol=PROTOCOL)
        if looks_up and connection.account == UNKNOWN_ACCOUNT and not connection.is_local:
            connection.account = connection.account_over_loopback()
        if connection.account >= 0:
            return Actor(f"uid {connection.account}", PROTOCOL, LOCAL)
        return Actor("", PROTOCOL, connection.client)

    def user_of(self, header: dict[str, Any]) -> str | None:
        """Whose quotas hold for the request that was just taken: the user who sent it, or the one on whose behalf a process of
        the node asks; None for nobody's.
        """
        if self.guard is not None and (name := self.guard.user):
            return name
        return self.vouching.user(header)

    def _is_over(self, request: list[Any]) -> bool:
        if not len(self.unsent) or not self.unsent.is_over(request[0]):
            return False
        self._refuse_busy(request[0], request[1])
        return True

    @property
    def has_request(self) -> bool:
        """Whether a request is there to be received."""
        return bool(int(self.getsockopt(_EVENTS)) & _POLLIN)

    def next_sender(self, *, told: bool) -> bytes | None:
        """The routing id of the next request, whose frames are to be received; None when none is there.

        ``told``: the loop's epoll named this socket, so a request is probably there. Without that its events are asked first,
        which costs half of what an Again exception does.
        """
        try:
            return self.recv(_NOBLOCK) if told or self.has_request else None
        except zmq.Again:
            return None

    def send_multipart(
        self, msg_parts: Any, flags: int = 0, copy: bool = True, track: bool = False, **_: Any
    ) -> zmq.MessageTracker | None:
        """Send an answer, ``[routing id, frame, …]``, and count it until it has left."""
        client = msg_parts[0]
        if not self.unsent.wants_tracker(client, sum(map(len, msg_parts[1:]))):
            return super().send_multipart(msg_parts, flags, copy)
        self.unsent.add(client, super().send_multipart(msg_parts, flags, copy=False, track=True))
        return None

    def _refuse_busy(self, identity: bytes, header: bytes) -> None:
        """Refuse a client that does not read its answers; where others leave it no room, the worst is ended."""
        sentence = "too many answers were not taken off the connection yet"
        busy = wire.error(wire.request_id(header), "SYSTEM_BUSY", sentence, retry_after_ms=_BUSY_RETRY_MS)
        with contextlib.suppress(zmq.ZMQError):
            super().send_multipart([identity, busy], zmq.NOBLOCK)
        worst = self.unsent.worst()
        if worst is not None and not self.unsent.holds(identity) and (one := self.gate.peers.get(worst)) is not None:
            why = f"{self.unsent.holds(worst)} bytes of answers were not taken, and others wait for room"
            self.gate.end(one, "max_unsent_bytes", why)

    def meet(self, identity: bytes, first: zmq.Frame) -> PeerConnection | None:
        """The connection of a peer that ``gate.peers`` lacks. None: its request was refused, or came from no connection that
        can be named, and must be dropped.
        """
        try:
            connection, fault = self.gate.meet(identity, first)
        except UnknownSourceError:
            return None
        if fault is None:
            return connection
        with contextlib.suppress(zmq.ZMQError):
            self.send_multipart([identity, wire.error(None, "INVALID_PARAMETER", fault)], zmq.NOBLOCK)
        self.gate.doubt(connection, fault)
        return None

    def skip_rest(self, identity: bytes, connection: PeerConnection | None) -> None:
        """Discard the rest of a request with too many frames, and end its connection."""
        while self.getsockopt(zmq.RCVMORE):
            self.recv(copy=False)
        if connection is not None:
            self.gate.end(connection, "frames", f"a request of more than {MAX_FRAMES} frames")

    def close(self, linger: int | None = None) -> None:
        """Stop the gate, then close the socket."""
        if not self.closed and hasattr(self, "gate"):
            self.gate.stop(self)
            del self.gate
        super().close(linger)
        if getattr(self, "guard", None) is not None:
            guard, self.guard = self.guard, None
            assert guard is not None
            guard.close()


def _copied(request: list[Any]) -> list[bytes]:
    return [one if type(one) is bytes else one.bytes for one in request]


def open_router(
    context: zmq.Context[zmq.Socket[bytes]],
    config: NetworkConfig,
    log: Log,
    ipc: str,
    port: int,
    *,
    takes_payload: bool = False,
    only_answers: bool = False,
    has_line: bool = True,
    max_header_bytes: int = wire.MAX_HEADER_BYTES,
    waiting_answers: int = 10_000,
    linger_ms: int = 500,
    guard: Guard | None = None,
    vouching: Vouching | None = None,
    users: UserBounds | None = None,
) -> tuple[Router, list[str]]:
    """A ROUTER bound to ``ipc`` and to ``port`` of ``network.host`` (0: a free one). Returns it and its endpoints.

    ``takes_payload``: requests have more than a header. ``only_answers``: requests change nothing, so those of a peer
    that has gone are dropped. ``has_line``: requests with long headers wait for short ones, see :mod:`.long_requests`;
    the loop then wakes when one's time comes. ``max_header_bytes``: a header of more than twice this size ends its
    connection. ``waiting_answers``: further answers to a peer that reads none are dropped, which can only hurt that peer.
    ``guard``: asks each peer who it is; the router closes it. ``vouching``: believes the node's own processes on whose behalf
    they ask. ``users``: bounds the users that the guard knows. Raises zmq.ZMQError when an address is taken.
    """
    routing_ids.seed()
    router = cast(Router, context.socket(zmq.ROUTER, socket_class=Router))
    router.unsent = UnsentAnswers(config.max_unsent_bytes)
    router.line = LongRequests()
    router.only_answers, router.has_line, router.guard = only_answers, has_line, guard
    router.vouching, router.users = vouching or Vouching(""), users
    option = router.setsockopt
    option(zmq.LINGER, linger_ms)
    frame_bytes = config.max_frame_bytes if takes_payload else min(config.max_frame_bytes, 2 * max_header_bytes)
    sealed_bytes = 0 if guard is None else SEALED_FRAME_BYTES
    option(zmq.MAXMSGSIZE, frame_bytes + sealed_bytes)
    option(zmq.RCVHWM, _WAITING_REQUESTS)
    option(zmq.SNDHWM, waiting_answers)
    option(zmq.BACKLOG, _BACKLOG)
    option(zmq.ROUTER_HANDOVER, 1)
    # With a domain libzmq ends peers of ZMTP 1.0 and 2.0 at their greeting. No frame of theirs would name its connection, so
    # their requests could only be dropped one by one, until max_frame_bytes: two seconds of a processor a connection. Without
    # a handler in this context nobody is asked about the others.
    option(zmq.ZAP_DOMAIN, DOMAIN)
    host = config.host
    if ":" in host:
        option(zmq.IPV6, 1)
        host = f"[{host}]"
    try:
        first_number = _first_number(router)
        router.gate = Gate(
            config,
            log,
            router,
            max_request_bytes=frame_bytes + max_header_bytes,
            first_number=first_number,
            head_bytes=FRAME_HEAD_BYTES + sealed_bytes,
        )
        router.gate.users = users
        # The options of a socket are those of its next bind.
        if guard is not None:
            guard.before_ipc(router)
        router.bind(ipc)
        if guard is not None:
            guard.after_ipc(ipc.removeprefix("ipc://"))
            guard.before_tcp(router)
        _bind_tcp(router, host, port)
    except BaseException:
        router.close()
        raise
    return router, [router.getsockopt_string(zmq.LAST_ENDPOINT), ipc]


def _bind_tcp(router: Router, host: str, port: int) -> None:
    """Bind ``port``; for 0 a free port that the kernel gives to no outgoing connection of this machine."""
    if port == 0:
        for free in ports.candidates():
            try:
                router.bind(f"tcp://{host}:{free}")
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    router.bind(f"tcp://{host}:{port or '*'}")


def _first_number(router: Router) -> int:
    """The number after the first automatic id, which a peer within this process gets and returns."""
    address = f"inproc://first-{os.getpid()}-{next(_numbers)}"
    router.bind(address)
    with router.context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(address)
        peer.send(b"")
        identity = zmq.Socket.recv_multipart(router)[0]
    router.unbind(address)
    number = routing_ids.number_of_id(identity)
    assert number is not None
    return number + 1
