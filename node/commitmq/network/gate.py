"""The gate behind a port: a thread that ends connections before they can harm the process or its other clients.

libzmq bounds a frame and counts whole requests. It does not bound the connections that it accepts (without a free
descriptor it aborts the process), a request without an end, or the bytes that a hundred connections hold together. So
the gate learns of each connection from libzmq's monitor, counts its bytes (see :mod:`.connection`), and shuts down the
sockets that break one of these bounds:

* ``network.max_connections``, and the descriptors that this process may have: connections that never sent a request go
  first;
* ``network.max_client_connections``: the connections of one address, on this host of one process. Of the connections that
  find no place some are *turned away*: for a second they stand in the descriptors that are kept for bursts, and their
  first request is answered with the reason. Without it a client could only try again until its time is over. The node's
  own processes are let in: they are few, and clients need what they do;
* ``network.first_request_timeout_ms``: a TCP connection without a request;
* the bytes of the longest request that this port takes: more bytes came, the receiving thread had taken all complete
  requests, and these bytes were not among them;
* ``network.max_pending_bytes``: bytes of all connections that are received and not handled; a single connection may
  hold half of it. The bytes of ended connections count, up to half of it. A client whose ended connections have left a
  quarter of it gets no connection until less is left: otherwise a client that connects again and again could have any
  number of requests wait;
* ``flow.user_pending_bytes``, twice: see :class:`.guard.UserBounds`;
* ``network.max_growth_bytes``: the growth of the process while requests were incomplete, beyond twice the bytes
  received for them. Only this bound catches a request of millions of empty frames, which take thirty times as much.

The threads: the I/O thread only reads and writes. The receiving thread publishes what it handled
(``PeerConnection.handled``, ``looks``, how often it found nothing left, and ``is_empty``, whether it found nothing the last
time). The gate's thread does the rest. It sleeps while nothing comes, and looks every 25 ms while bytes come, at the
connections to which bytes came since the last look (``EPOLLET``), whose count grew in it, or which hold bytes. A connection
that libzmq has closed is looked at once more. (After 60 ms a request of empty frames has taken 400 MB.)

Beside a busy receiving thread a call that gives up the interpreter's lock costs both threads more than all else in a look. So
a look makes few of them.

With a limit for the time that requests wait (:meth:`Gate.limit_waits`), or quotas of pending bytes, the thread also wakes
by itself, and looks at all connections while the receiving thread is behind: what libzmq reads at once makes no event.

Routing ids: the names under which ROUTER sockets know their peers.

libzmq gives a peer without an id of its own the next of 2^32 numbers, and aborts the process when another peer has
chosen exactly that number. It counts from the first value of C's ``rand``, which is the same in every process that has
not called ``srand``: six connections are then enough to end any node. So each process seeds it from the system's
randomness. An attacker can then only guess: a client that holds c chosen ids needs 2^32 / c connections of others to
meet one. A peer that sends requests under such an id is also refused.

A peer that chooses the id of another one takes its place. So nobody may be able to guess a chosen id.

The descriptors that this process may have, and how many connections they suffice for.

The growth of this process: its private memory, compared with the least since nothing was held.

The share of a processor that requests of one kind may take from a loop.

A loop that answers as fast as it is asked takes a whole processor from the processes that carry messages, for a client
that only asks and never reads. So it counts the processor time of these requests, and rests when they took more than
their share. Unread requests wait in the connections of their clients.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import select
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import zmq

from commitmq.config import NetworkConfig
from commitmq.log import Log
from commitmq.network.connection import FRAME_HEAD_BYTES, Disconnect, Disconnects, DueDisconnect, PeerConnection
from commitmq.network.guard import UserBounds

LEAST_CHOSEN_BYTES: Final = 16
_AUTOMATIC_BYTES: Final = 5
_NUMBERS: Final = 1 << 32


def seed() -> None:
    """Let libzmq's automatic ids begin at a secret number. Call it in each process, before its first ROUTER."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def number_of_id(routing_id: bytes) -> int | None:
    """The number in an automatic id; None for an id that a peer has chosen by the rules."""
    if len(routing_id) == _AUTOMATIC_BYTES and not routing_id[0]:
        return int.from_bytes(routing_id[1:], "big")
    return None


def id_fault(routing_id: bytes, first: int, given: int) -> str | None:
    """Why ``routing_id`` must not be used; None when it may. The router gave at most ``given`` ids, from ``first`` on."""
    automatic = number_of_id(routing_id)
    if automatic is not None:
        if (automatic - first) % _NUMBERS < given:
            return None
        return "ids that begin with a zero byte are the node's to give"
    if not routing_id[0]:
        return "ids that begin with a zero byte are the node's to give"
    if len(routing_id) < LEAST_CHOSEN_BYTES:
        return (
            f"a routing id of {len(routing_id)} bytes can be guessed: take {LEAST_CHOSEN_BYTES} random bytes or more,"
            " new for each connection, or none"
        )
    return None


# Descriptors kept for other uses than connections: three quarters when there are few, this many when there are many.
# libzmq accepts connections before the gate learns of them, and its listener of a Unix socket ends the process when no
# descriptor is left. A gate that waits 30 ms for a processor may learn of 250 connections at once.
_OTHER_FILES: Final = 1_024


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20) if soft == resource.RLIM_INFINITY else soft


def affordable_connections(wanted: int) -> int:
    """How many connections a port may accept: ``wanted``, or fewer as descriptors allow, and at least 8."""
    descriptors = raise_descriptor_limit()
    used = len(os.listdir("/proc/self/fd"))
    reserve = min(_OTHER_FILES, descriptors * 3 // 4)
    # Each connection takes two descriptors, libzmq's and the gate's.
    return max(8, min(wanted, (descriptors - used - reserve) // 2))


_PAGE_BYTES: Final = resource.getpagesize()
_TRIM_S: Final = 0.5


class Growth:
    """Measures the process. Call :meth:`settle` at each look while nothing is held, else :meth:`measure`."""

    def __init__(self) -> None:
        # Not by psutil: the gate measures at each look, and one pread of an open file costs least.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.trim_s = 0.0
        """When :meth:`settle` gives freed memory back to the kernel, in monotonic seconds; 0: none was freed."""
        self._low = self._private_bytes()

    def close(self) -> None:
        os.close(self._statm)

    def trim_soon(self, now_s: float) -> None:
        """Memory is about to be freed: give it back to the kernel a moment after ``now_s``."""
        self.trim_s = now_s + _TRIM_S

    def settle(self, now_s: float) -> None:
        """Growth counts from here."""
        if self.trim_s and now_s >= self.trim_s:
            # Memory that libzmq freed stays in the heap, and would count as growth.
            self.trim_s = 0.0
            ctypes.CDLL(None).malloc_trim(0)
        self._low = self._private_bytes()

    def measure(self) -> int:
        private = self._private_bytes()
        self._low = min(self._low, private)
        return private - self._low

    def _private_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES


BURST_S: Final = 0.05
LONGEST_REST_S: Final = 0.2


class ShareOfTime:
    """``share``: of one processor, above 0 and below 1. After an idle time :data:`BURST_S` of processor time are free."""

    __slots__ = ("_clock_s", "_left_s", "_seen_s", "_share")

    def __init__(self, share: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock_s = clock_s
        self._left_s, self._seen_s = BURST_S, clock_s()

    def spend(self, used_s: float) -> float:
        """Requests took ``used_s`` of processor time. Returns the seconds to rest before further ones."""
        now_s = self._clock_s()
        left_s = min(BURST_S, self._left_s + self._share * (now_s - self._seen_s)) - used_s
        self._left_s, self._seen_s = max(left_s, -self._share * LONGEST_REST_S), now_s
        return max(0.0, -self._left_s / self._share)


_LOOK_S: Final = 0.025
_SETTLE_S: Final = 0.1  # what the process grows by itself in this time does not matter
# A look at thousands of connections must not use up the process's time. So the gate pauses for this many times the
# processor time of the look, but not for long, because a client sends more than a gigabyte a second.
_REST: Final = 20
_LONGEST_REST_S: Final = 0.1
# Connections that come or go by the hundred must not take the time of those that carry messages.
_HEARD_AT_ONCE: Final = 32
_HEARD_REST_S: Final = 0.002
_LEFT_OF_CLIENT: Final = 4
_LONGEST_STEP_S: Final = 1.0
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_ARMED: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_GONE: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_NEWCOMER_S: Final = 1.0
_EVENT_S: Final = 0.1  # the longest wait for the event of a connection whose request came before it
_LOOKS_A_LIMIT: Final = 4
_TURNED_AWAY_S: Final = 1.0
_MOST_TURNED_AWAY: Final = 32  # no more than there are places
# With quotas of pending bytes: what libzmq reads at once makes no event.
_BEHIND_S: Final = 0.1
_SCAN: Final = 1_000
# libzmq may give out automatic ids before the gate has learnt of their connections.
_UNHEARD: Final = 4_096


class UnknownSourceError(Exception):
    """No frame of the peer names its connection. A peer of ZMTP before 3.0 would be one; a router ends those."""


class Gate:
    """The connections of one ROUTER. ``max_request_bytes``: the size of the longest request that it takes, with all its
    frames. ``first_number``: the number of the first automatic id that clients can get.
    """

    def __init__(
        self,
        config: NetworkConfig,
        log: Log,
        router: zmq.Socket[bytes],
        *,
        max_request_bytes: int,
        first_number: int,
        head_bytes: int = FRAME_HEAD_BYTES,
    ) -> None:
        """``head_bytes``: see :class:`PeerConnection`."""
        self._config = config
        self._log = log
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.endings = Disconnects(log, self._wake)
        self._max_request_bytes = max_request_bytes
        # With every configuration one connection must be able to send the longest request.
        self._max_pending_bytes = max(config.max_pending_bytes, 2 * max_request_bytes)
        self._first_number, self._head_bytes = first_number, head_bytes
        self.max_connections = affordable_connections(config.max_connections)
        self._most_turned_away = min(_MOST_TURNED_AWAY, self.max_connections)
        # Set by the receiving thread: connections with a request, by routing id; how often it found nothing left, and
        # whether it did the last time.
        self.peers: dict[bytes, PeerConnection] = {}
        self.looks, self.is_empty = 0, True
        self._wait_limit_s = 0.0
        self.users: UserBounds | None = None  # set before the first request, where users are known
        self.departed: deque[bytes] = deque(maxlen=_UNHEARD)  # ids of ended connections; the process may empty it
        self._connections: dict[int, PeerConnection] = {}
        self._watched: dict[int, PeerConnection] = {}
        # Closed and not fully handled: connections by id, bytes by client.
        self._leaving: dict[bytes, PeerConnection] = {}
        self._left: Counter[str] = Counter()
        # Connections with a request before the gate learnt of them, by descriptor; both threads write it, so it has a lock.
        self._unheard: dict[int, PeerConnection] = {}
        self._meeting = threading.Lock()
        self._held: set[PeerConnection] = set()
        self._grew: set[PeerConnection] = set()  # in the last look: libzmq may have read more since
        self._of_client: Counter[str] = Counter()
        self._silent: deque[PeerConnection] = deque()
        self._silent_again_s, self._silent_looks = 0.0, -1  # the receiving thread was behind: when to see again
        self._turned_away: dict[PeerConnection, float] = {}  # and when each is ended, the first one first
        self._accepted, self._seen_looks, self._counting_s, self._looked_s = 0, -1, 0.0, 0.0
        self._growth = Growth()
        self._settle_at = 0.0
        address = f"inproc://gate-{id(self)}"
        router.monitor(address, _EVENTS)
        self._monitor: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a monitor whose queue is full stops the I/O thread
        self._monitor.connect(address)
        self._arrivals = select.epoll()
        # libzmq's signal to the receiving thread: a message flushed to an empty queue sets it.
        self._signals = select.poll()
        self._signals.register(int(router.getsockopt(zmq.FD)), select.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._connections)

    # ------------------------------------------------------------ the receiving thread's side

    def meet(self, identity: bytes, frame: zmq.Frame) -> tuple[PeerConnection, str | None]:
        """The connection of ``frame``, and why the peer must not have its id, or None. Raises UnknownSourceError."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError as error:
            raise UnknownSourceError from error
        fault = id_fault(identity, self._first_number, self._accepted + _UNHEARD)
        with self._meeting:
            found = self._connections.get(descriptor)
            if found is not None and not found.is_on(descriptor):
                found = None
            leaving = self._leaving.get(identity)
            # A client may have chosen its earlier id again; libzmq never gives an automatic id twice.
            if leaving is not None and identity[:1] == b"\0":
                return leaving, None
            if found is None:
                # A request was faster than the monitor's event, and the gate continues with this object. It would take
                # the peer for one without a request, and the handled bytes for a request without an end.
                found = self._unheard.get(descriptor)
                if found is None or found.identity not in (identity, None):
                    found = self._unheard[descriptor] = PeerConnection(descriptor, self._head_bytes)
            if fault is None:
                # The last connection is right: a peer's requests may come after its descriptor belongs to another one.
                if found.identity is not None and found.identity != identity:
                    if self.peers.get(found.identity) is found:
                        del self.peers[found.identity]
                    found.ending = found.hurried = False
                    found.refusals = 0
                found.last_fault_s = 0.0
                found.identity = identity
                if self._connections.get(descriptor) is found:
                    self.peers[identity] = found
        return found, fault

    def found_nothing(self) -> None:
        """No request waits; each loop must say so before it sleeps. Otherwise the bytes of an incomplete request look
        like requests that wait, and no bound on its size holds.
        """
        self.looks += 1
        self.is_empty = True

    def peer(self, identity: bytes) -> PeerConnection | None:
        """The connection of ``identity``. A peer's first request may be faster than the event of its connection; then that is
        waited for, a tenth of a second at most. So this is for what is rare.
        """
        deadline = time.monotonic() + _EVENT_S
        while (found := self.peers.get(identity)) is None and time.monotonic() < deadline:
            with self._meeting:
                if all(one.identity != identity for one in self._unheard.values()):
                    return self.peers.get(identity)
            time.sleep(0.001)
        return found

    def has_left(self, identity: bytes) -> bool:
        """Whether the peer of ``identity`` has gone, and its requests still wait."""
        found = self.peers.get(identity)
        return identity in self._leaving if found is None else found.gone

    def end(self, connection: PeerConnection, bound: str, why: str) -> None:
        """Let the gate end ``connection`` a moment later, after the peer got its answer. Its further requests must be
        dropped, and reported to ``endings.drop``.
        """
        self.endings.ask(connection, bound, why)

    def doubt(self, connection: PeerConnection, why: str) -> None:
        """A request came under an id that its peer must not have. ``connection`` had its descriptor at that time."""
        self.endings.doubt(connection, "routing id", why)

    def limit_waits(self, limit_s: float) -> None:
        """From now on ``late_below`` of each connection tells which of its requests have waited longer than ``limit_s``."""
        self._wait_limit_s = limit_s
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def stop(self, router: zmq.Socket[bytes]) -> None:
        """End the thread; before ``router`` is closed."""
        with contextlib.suppress(zmq.ZMQError):
            router.monitor(None, 0)  # first: the I/O thread would wait for a monitor that is not read
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._monitor.close(0)
        for connection in self._connections.values():
            connection.close()
        self._arrivals.close()
        os.close(self._wake)
        self._growth.close()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._turns()
        except Exception as error:
            self._log.exception("the gate failed: this process's port is not guarded any more", error=repr(error))

    def _turns(self) -> None:
        poller = select.poll()
        monitor = int(self._monitor.getsockopt(zmq.FD))
        arrivals = self._arrivals.fileno()
        for descriptor in (monitor, self._wake, arrivals):
            poller.register(descriptor, select.POLLIN)
        look_at: float | None = None
        rest_s = _LOOK_S
        behind_at = 0.0
        # The monitor's descriptor only reports changes: read until nothing is left, before the next sleep.
        more = True
        while not self._stopping:
            if more:
                more = self._hear()
                if more:
                    time.sleep(_HEARD_REST_S)
            now = time.monotonic()
            behind_s = self._behind_s()
            if behind_s and now >= behind_at:
                behind_at = now + behind_s
                if self._sees_waiting(now) and look_at is None:
                    look_at = now
                    poller.unregister(arrivals)
            if look_at is not None and now >= look_at:
                look_at = now + rest_s if self._look(now) else None
                rest_s = min(max(_LOOK_S, _REST * self._counting_s), _LONGEST_REST_S)
                if look_at is None:
                    poller.register(arrivals, select.POLLIN)
            self._end_silent(now)
            while (asked := self.endings.hurried()) is not None:
                self._end_asked(asked, now)
            due = [
                at for at in (look_at, self._silent_due_s(), self._end_turned_away(now), behind_s and behind_at) if at
            ]
            timeout_ms = max(0, int((min(due) - time.monotonic()) * 1000) + 1) if due else None
            timeout_ms = 0 if more else timeout_ms
            for descriptor, _ in poller.poll(timeout_ms):
                if descriptor == monitor:
                    more = True
                    continue
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                if look_at is None:
                    look_at = time.monotonic() + _LOOK_S
                    poller.unregister(arrivals)

    def _behind_s(self) -> float:
        """How often to see whether the receiving thread is behind; 0.0 when it does not matter."""
        if self._wait_limit_s:
            return self._wait_limit_s / _LOOKS_A_LIMIT
        return _BEHIND_S if self.users is not None and self.users.quotas.bounds_pending else 0.0

    def _hear(self) -> bool:
        """Take what the monitor tells, some of it; True when there may be more."""
        for _ in range(_HEARD_AT_ONCE):
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            kind, descriptor = struct.unpack("=HI", event)
            if kind == zmq.EVENT_ACCEPTED:
                self._accept(descriptor)
            else:
                self._drop(descriptor)
        return True

    def _accept(self, descriptor: int) -> None:
        self._accepted += 1
        if descriptor in self._connections:
            self._drop(descriptor)
        with self._meeting:
            connection = self._unheard.pop(descriptor, None)
            if connection is None or connection.accepted_s < time.monotonic() - _NEWCOMER_S:
                connection = PeerConnection(
                    descriptor, self._head_bytes
                )  # an old object would belong to a peer that came and went
            # Open before anybody sees it: a connection without a descriptor of its own is one that could not be opened.
            try:
                own, failed = connection.open(), None
            except OSError as error:
                own, failed = -1, error
            self._connections[descriptor] = connection
            if connection.identity is not None:
                self.peers[connection.identity] = connection
        try:
            if failed is not None:
                raise failed
            self._arrivals.register(own, _ARMED)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                connection.refuse()
                self._tell_end(Disconnect(connection, "max_connections", "no descriptor is left to guard it"))
            return
        self._watched[own] = connection
        self._of_client[connection.client] += 1
        left = self._left[connection.client] if self._left else 0
        if left > self._max_pending_bytes // _LEFT_OF_CLIENT:
            why = f"{left} bytes that previous connections of this client sent wait to be handled"
            self._end(connection, "max_pending_bytes", why)
        elif self._of_client[connection.client] > self._config.max_client_connections:
            most = self._config.max_client_connections
            why = f"this process of the node has {most} connections of one client, the most (network.max_client_connections)"
            self._turn_away(connection, "max_client_connections", why)
        elif len(self._connections) - len(self._turned_away) > self.max_connections and not self._lets_in(connection):
            self._make_room(connection)
        if connection not in self._turned_away:
            self._silent.append(connection)

    def _lets_in(self, connection: PeerConnection) -> bool:
        """Whether it comes from a process of the node, and descriptors that are kept for bursts are left for it."""
        return len(self._connections) <= self.max_connections + 2 * self._most_turned_away and connection.is_own()

    def _make_room(self, newest: PeerConnection) -> None:
        """End the oldest connection without a request, or else turn the newest away."""
        before = time.monotonic() - _NEWCOMER_S
        most = self.max_connections
        enough = "the most (network.max_connections)"
        if most < self._config.max_connections:
            enough = (
                f"as many as its limit of {descriptor_limit()} open files allows (LimitNOFILE= of the service, ulimit"
                " -n of a shell)"
            )
        why = f"this process of the node has {most} connections, {enough}"
        for one in itertools.islice(self._silent, _SCAN):
            if one.accepted_s > before:
                break
            if one.identity is None and not one.ended:
                self._end(one, "max_connections", why)
                return
        self._turn_away(newest, "max_connections", why)

    def _turn_away(self, connection: PeerConnection, bound: str, why: str) -> None:
        """End a connection for which there is no place, a moment later where there is room for it until then."""
        if len(self._turned_away) >= self._most_turned_away:
            self._end(connection, bound, why)
            return
        connection.ending, connection.turned_away = True, why
        self._turned_away[connection] = time.monotonic() + _TURNED_AWAY_S
        self._uncount(connection)
        self._tell_end(Disconnect(connection, bound, why))

    def _end_turned_away(self, now: float) -> float | None:
        """End those that timed out. Returns when the next one's is."""
        due_s = None
        for connection, due_s in self._turned_away.items():
            if due_s > now:
                return due_s
            if not connection.ended:
                connection.end()
        return None

    def _uncount(self, connection: PeerConnection) -> None:
        self._of_client[connection.client] -= 1
        if not self._of_client[connection.client]:
            del self._of_client[connection.client]

    def _drop(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        own = connection.own
        if own is not None:
            # Before the close: as long as libzmq's descriptor is open the kernel would keep reporting events.
            with contextlib.suppress(OSError):
                self._arrivals.unregister(own)
            self._watched.pop(own, None)
        connection.close()
        connection.ended = True
        connection.judge(time.monotonic(), all_taken=False)
        with self._meeting:
            if connection.identity is not None:
                self.departed.append(connection.identity)
            if connection.identity is not None and self.peers.get(connection.identity) is connection:
                del self.peers[connection.identity]
            if connection.pending and connection.identity is not None:
                self._leaving[connection.identity] = connection
        if connection.pending:
            self._held.add(connection)
            self._left[connection.client] += connection.pending
        if self.users is not None:
            self.users.forget(connection)
        if self._turned_away.pop(connection, None) is None and connection.client:
            self._uncount(connection)

    def _end(self, connection: PeerConnection, bound: str, why: str) -> None:
        if connection.ended:
            return
        connection.end()
        self._tell_end(Disconnect(connection, bound, why))

    def _end_asked(self, asked: DueDisconnect, now: float) -> None:
        one = asked.ending.connection
        if self._unheard.get(one.descriptor) is one:
            if one.accepted_s > now - _NEWCOMER_S:
                self.endings.put_off(asked, now)
        elif one.own is not None and self.endings.holds(asked):
            self._end(*asked.ending)

    def _tell_end(self, ending: Disconnect) -> None:
        self._growth.trim_soon(time.monotonic())
        self.endings.tell(ending)

    # ------------------------------------------------------------ connections without a request

    def _silent_due_s(self) -> float | None:
        if not self._silent:
            return None
        return max(self._silent[0].accepted_s + self._config.first_request_timeout_ms / 1000, self._silent_again_s)

    def _end_silent(self, now: float) -> None:
        """A request that waits is not silence: nobody is ended before the receiving thread has taken all there was."""
        silent = self._silent
        timeout_s = self._config.first_request_timeout_ms / 1000
        if now < self._silent_again_s:
            return
        looks, self._silent_looks = self._silent_looks, -1
        while silent and (silent[0].ended or silent[0].accepted_s + timeout_s <= now):
            one = silent[0]
            # The node's own processes connect to each other before they have a request to send.
            if one.identity is None and not one.ended and not one.is_local:
                if looks in (-1, self.looks) and (not self.is_empty or self._signals.poll(0)):
                    self._silent_looks, self._silent_again_s = self.looks, now + _BEHIND_S
                    return
                self._end(one, "first_request_timeout_ms", f"nothing was asked for {timeout_s:g} s")
            silent.popleft()

    # ------------------------------------------------------------ received bytes

    def _look(self, now: float) -> bool:
        """Count the new bytes, and end connections that hold too much. False when nothing came and nothing is held."""
        while (asked := self.endings.due(now)) is not None:
            self._end_asked(asked, now)
        began = time.thread_time()
        active = self._grew
        for own, events in self._arrivals.poll(0, max(1, len(self._connections))):
            if (connection := self._watched.get(own)) is not None:
                active.add(connection)
                connection.gone = connection.gone or bool(events & _GONE)
        # Bytes that libzmq has read by now are no new arrival. For connections that hold bytes each byte counts.
        self._grew = set()
        for connection in active | self._held:
            connection.grown = 0
            if connection.own is not None:
                with contextlib.suppress(OSError):
                    connection.look()
            if connection.grown:
                self._grew.add(connection)
        self._counting_s = time.thread_time() - began
        looks = self.looks
        all_taken = looks != self._seen_looks or (self.is_empty and not self._signals.poll(0))
        self._seen_looks = looks
        self._held |= active
        self._count_idle(now)
        for connection in self._held:
            connection.judge(now, all_taken=all_taken, wait_limit_s=self._wait_limit_s)
        self._held = {one for one in self._held if one.is_held}
        self._count_left()
        self._bound_requests()
        self._bound_pending()
        users = self.users
        if users is not None and users.quotas.bounds_connections and (ending := users.look(self._held)) is not None:
            self._end(*ending)
        self._bound_growth(now)
        return bool(active or self._held or self.endings or self._growth.trim_s)

    def _sees_waiting(self, now: float) -> bool:
        """Whether the receiving thread is behind; then all connections are to be looked at."""
        if not self.is_empty or self._signals.poll(0):
            self._held.update(self._watched.values())
            return True
        for connection in self._watched.values() if self._wait_limit_s else ():
            if not connection.is_sampled:
                with contextlib.suppress(OSError):
                    connection.look()
                    connection.sample(now)
        return False

    def _count_idle(self, now: float) -> None:
        """Without it each client that comes and goes would leave something here for as long as the receiving thread never
        finds nothing: a flood of 25 seconds left 2,000 connections to look at.
        """
        passed_s, self._looked_s = min(now - self._looked_s, _LONGEST_STEP_S), now
        has_moved, idle = False, []
        for one in self._held:
            if one.has_moved():
                has_moved, one.idle_s = True, 0.0
            elif one.closed:
                idle.append(one)
        for one in idle if has_moved else ():
            one.idle_s += passed_s

    def _count_left(self) -> None:
        if not self._left:
            return
        closed = [one for one in self._held if one.closed]
        self._left.clear()
        for one in closed:
            self._left[one.client] += one.pending
        with self._meeting:
            self._leaving = {one.identity: one for one in closed if one.identity is not None}

    def _bound_requests(self) -> None:
        for one in self._held:
            if not one.closed and one.unfinished > self._max_request_bytes:
                why = f"a request of more than {self._max_request_bytes} bytes, {one.unfinished} so far"
                self._end(one, "max_frame_bytes", why)

    def _bound_pending(self) -> None:
        most = self._max_pending_bytes // 2
        limit = self._max_pending_bytes - min(self._left.total(), most)
        alive = [one for one in self._held if not one.ended]
        total = sum(one.pending for one in alive)
        for one in sorted(alive, key=lambda one: (one.unfinished, one.pending), reverse=True):
            if total > limit or one.pending > most:
                self._end(one, "max_pending_bytes", f"it holds {one.pending} of {total} bytes that wait to be handled")
                total -= one.pending

    def _bound_growth(self, now: float) -> None:
        unfinished = [one for one in self._held if one.unfinished and not one.ended]
        if not self._held:
            if now >= self._settle_at:
                self._settle_at = now + _SETTLE_S
                self._growth.settle(now)
            return
        growth = self._growth.measure()
        if unfinished and growth - 2 * sum(one.pending for one in self._held) > self._config.max_growth_bytes:
            worst = max(unfinished, key=lambda one: (one.grown, one.pending))
            self._end(worst, "max_growth_bytes", f"the process grew by {growth} bytes while requests had no end")
