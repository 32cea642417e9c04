"""One connection that libzmq has accepted, with the byte counts of the kernel and of the process, and how it is ended.

The kernel counts the bytes that libzmq has read from a connection: for TCP in ``TCP_INFO``, for a Unix socket by
``SO_PEEK_OFF``, which every byte read moves back by one (socket(7)). The offset is set again once per gigabyte and not
at each look. The kernel reads and writes it in two steps, so a reader between these steps writes back the value from
before it was set (seen with Linux 6.18), and all counted bytes would be counted once more. The receiving thread counts
the bytes of the requests that it has handled. The difference is in libzmq: waiting requests, and incomplete ones.

Whose is the other end of a TCP connection within this host: the kernel's table of connections says it (proc(5)).

    sl  local_address rem_address   st tx_queue:rx_queue tr:tm->when retrnsmt   uid  timeout inode …
     0: 0100007F:1C8E 0100007F:D2F0 01 00000000:00000000 00:00000000 00000000  1000        0 12345 …

The line of the peer's end has its address first. Addresses are words of four bytes in the machine's order, ports are numbers.
Of a tunnel it is the account of the tunnel's end here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import struct
import sys
import time
from collections import Counter, deque
from typing import Final, NamedTuple

from commitmq.log import Log

UNKNOWN_ACCOUNT: Final = -1
"""Nobody has asked yet."""
NO_ACCOUNT: Final = -2
"""The connection comes from elsewhere, or the kernel does not tell."""

_UID: Final = 7
_TABLES: Final = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


def account_of_peer(connected: socket.socket) -> int:
    """The uid of the process at the other end over loopback, else NO_ACCOUNT. Raises OSError when the connection has ended."""
    peer, own = connected.getpeername(), connected.getsockname()
    address = ipaddress.ip_address(peer[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_loopback:
        return NO_ACCOUNT
    wanted = [_written(peer), _written(own)]
    # A client with a socket of IPv4 stands in the other table.
    tables = {_TABLES[connected.family]: wanted}
    if mapped is not None:
        tables[_TABLES[socket.AF_INET]] = [one[24:] for one in wanted]
    for path, ends in tables.items():
        with open(path, encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if fields[1:3] == ends:
                    return int(fields[_UID])
    return NO_ACCOUNT


def _written(end: tuple[str, int]) -> str:
    """An address and its port as they stand in the table."""
    packed = ipaddress.ip_address(end[0]).packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{one:08X}' for one in words)}:{end[1]:04X}"


# linux/socket.h, and the offset of tcpi_bytes_received in struct tcp_info (since Linux 4.1).
_SO_PEEK_OFF: Final = 42
_BYTES_RECEIVED_AT: Final = 128
_TCP_INFO_BYTES: Final = _BYTES_RECEIVED_AT + 8
_PEEK_BASE: Final = (1 << 31) - 1
_PEEK_SPAN: Final = 1 << 30
# The bytes a peer may send besides requests: greeting and handshake once, and heartbeats.
_HANDSHAKE_BYTES: Final = 1_024
_BYTES_A_SECOND: Final = 64
_QUIET_S: Final = 1.0
# ``handled`` counts 9 bytes for each frame's head, and the id. Less may have come.
_HEADS_BYTES: Final = 32
FORGOTTEN_S: Final = 60.0
"""A closed connection is forgotten when no request of it was handled for so long, while those of others were."""
FRAME_HEAD_BYTES: Final = 9
"""ZeroMQ writes them before each frame, or fewer."""
SEALED_FRAME_BYTES: Final = 33
"""CURVE's command name, nonce, tag and flags around each frame."""


class PeerConnection:
    """The counts of one connection. The receiving thread sets ``handled``, ``identity``, ``sends_long``, ``ending``,
    ``hurried``, ``last_fault_s`` and ``user``, the gate sets the rest.

    In bytes: ``received`` in all, ``grown`` since the look before, ``pending`` of them not handled, and ``unfinished``
    of those known to belong to an incomplete request. ``ended``: the gate has shut the connection down. ``closed``:
    libzmq has closed it, and requests from it may still wait to be handled. ``gone``: the peer has closed it. libzmq
    closes it when it has read everything. ``sends_long``: it has sent a long header. ``ending``: its end was asked for,
    and its further requests are dropped. ``hurried``: one came, so it is ended at once. ``doubted``: a request came from its
    descriptor under an id that its peer must not have; ``last_fault_s``: when the last one came, 0 when another request came
    since.
    ``turned_away``: why there is no place for it, until its first request was answered so. ``process``: the one at the other
    end of a Unix socket. ``head_bytes``: counted for each frame of a request. ``refusals``: requests that its user may not
    ask for. ``idle_s``: since it was closed, how long none of its requests was handled while those of others were.
    ``late_below``: requests that end below this count of ``handled`` bytes waited longer than the limit of :meth:`judge`.

    The connection has a descriptor of its own. Otherwise bytes that came just before libzmq closed the other descriptor
    would not be counted.
    """

    __slots__ = (
        "_handled_at_look",
        "_handled_before",
        "_is_unix",
        "_left",
        "_left_before_renewal",
        "_marks",
        "_others",
        "_others_at_s",
        "_received_before",
        "_socket",
        "accepted_s",
        "account",
        "client",
        "closed",
        "descriptor",
        "doubted",
        "ended",
        "ending",
        "gone",
        "grown",
        "handled",
        "head_bytes",
        "hurried",
        "identity",
        "idle_s",
        "last_fault_s",
        "late_below",
        "pending",
        "process",
        "received",
        "refusals",
        "sends_long",
        "turned_away",
        "unfinished",
        "user",
    )

    def __init__(self, descriptor: int, head_bytes: int = FRAME_HEAD_BYTES) -> None:
        """``head_bytes``: those before each frame over TCP."""
        self.descriptor = descriptor
        self.head_bytes = head_bytes
        self.refusals = 0
        # The uid of a client on this host: of a Unix socket at once, of loopback when somebody asks.
        self.account = UNKNOWN_ACCOUNT
        self.client = ""  # the client: an address, or on this host a process
        self.user = ""  # whose quotas it counts for; empty until a request was judged, and without quotas
        self.accepted_s = time.monotonic()
        self.identity: bytes | None = None
        self.handled = 0
        self.received = 0
        self.grown = 0
        self.pending = 0
        self.unfinished = 0
        self.sends_long = self.ending = self.hurried = self.doubted = False
        self.process = 0
        self.turned_away = ""
        self.last_fault_s = 0.0
        self.ended = False
        self.closed = False
        self.gone = False
        self.late_below = -2 * _HEADS_BYTES
        self._received_before = 0
        self._handled_at_look = 0
        self._handled_before = 0
        self.idle_s = 0.0
        self._marks: deque[tuple[float, int]] = deque()  # when, and how many bytes of requests had come by then
        self._others = _HANDSHAKE_BYTES  # bytes beside requests, at the time of the next
        self._others_at_s = self.accepted_s
        self._is_unix = False
        # SO_PEEK_OFF at the last look, and at the look that set it again.
        self._left = self._left_before_renewal = _PEEK_BASE
        self._socket: socket.socket | None = None

    def open(self) -> int:
        """Duplicate the descriptor, which libzmq has just accepted; returns the new descriptor. Raises OSError: the
        connection is closed again, or no descriptor is left.
        """
        copy = os.dup(self.descriptor)
        try:
            found = socket.socket(fileno=copy)
        except BaseException:
            os.close(copy)  # the connection has gone, and its number belongs to a file of this process
            raise
        try:
            self._is_unix = found.family == socket.AF_UNIX
            if self._is_unix:
                self.head_bytes = FRAME_HEAD_BYTES
                self.process, self.account, _ = struct.unpack(
                    "3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                )
                self.client = f"process {self.process}"
                found.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, _PEEK_BASE)
            else:
                self.client = str(found.getpeername()[0])
        except BaseException:
            found.close()
            raise
        self._socket = found
        return found.fileno()

    @property
    def own(self) -> int | None:
        """Its own descriptor, None once it is closed."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def is_local(self) -> bool:
        """Whether it came over the node's own Unix socket, which only the node's account reaches."""
        return self._is_unix

    def is_own(self) -> bool:
        """Whether a process of this node is at the other end: the supervisor, whose child this process is if it is not the
        supervisor itself, or a child of it.
        """
        supervisors = (os.getppid(), os.getpid())
        if self.process in (0, os.getpid()):
            return False
        if self.process in supervisors:
            return True
        try:
            with open(f"/proc/{self.process}/stat", "rb") as stat:
                return int(stat.read().rpartition(b")")[2].split()[1]) in supervisors
        except (OSError, ValueError, IndexError):
            return False

    def is_on(self, descriptor: int) -> bool:
        """False when ``descriptor`` belongs to another connection by now: this one has ended, and the gate has not heard. Also
        False when it was never opened: nobody knows whose the descriptor is.
        """
        own = self._socket
        try:
            return own is not None and os.path.sameopenfile(descriptor, own.fileno())
        except OSError:  # one of both is closed
            return True

    def account_over_loopback(self) -> int:
        """The uid of the peer's end of a TCP connection within this host, or NO_ACCOUNT."""
        try:
            return NO_ACCOUNT if self._socket is None else account_of_peer(self._socket)
        except OSError:  # it has ended
            return NO_ACCOUNT

    def close(self) -> None:
        """libzmq has closed its descriptor, or is about to. The peer sees the end when both descriptors are closed."""
        self.closed = self.gone = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self.look()
            self._socket.close()
            self._socket = None

    def look(self) -> None:
        """Count the bytes since the last look. Raises OSError when the kernel gives no count."""
        assert self._socket is not None
        self._handled_at_look = self.handled  # before the count: what is handled has come
        if self._is_unix:
            left = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
            self.grown = self._left - left
            if self.grown >= _PEEK_SPAN:
                # This many bytes do not come between two looks: a reader has undone the renewal.
                self.grown = max(0, self._left_before_renewal - left)
            self.received += self.grown
            self._left = left
            if left < _PEEK_BASE - _PEEK_SPAN:
                self._renew(left)
        else:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            received: int = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)[0]
            self.grown, self.received = received - self.received, received

    def _renew(self, left: int) -> None:
        """Set SO_PEEK_OFF again before it reaches 0. Bytes read between the two calls (microseconds) do not count."""
        assert self._socket is not None
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, _PEEK_BASE)
        if self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF) > left:
            self._left, self._left_before_renewal = _PEEK_BASE, left

    def judge(self, now_s: float, *, all_taken: bool, wait_limit_s: float = 0.0) -> None:
        """Compute ``pending`` and ``unfinished``, and with a ``wait_limit_s`` also ``late_below``. Call it at each look,
        whether bytes have come or not.

        ``all_taken``: since the last call the receiving thread found nothing left. So bytes that had come before and
        are not handled belong to an incomplete request.
        """
        handled = self.handled
        over = handled + _HANDSHAKE_BYTES + int(_BYTES_A_SECOND * (now_s - self.accepted_s))
        self.pending = max(0, self.received - over)
        self.unfinished = max(0, self._received_before - over) if all_taken else 0
        self._received_before = self.received
        if wait_limit_s:
            self._note_wait(now_s, wait_limit_s)

    def sample(self, now_s: float) -> int:
        """Learn from the last :meth:`look` how many bytes beside requests have come; returns what is known now.

        At a look they are at most what came less what was handled before. Between two such samples handshakes and heartbeats
        add few bytes, fewer than a request has.
        """
        known = self._others + math.ceil(max(0.0, _BYTES_A_SECOND * (now_s - self._others_at_s - _QUIET_S)))
        most = self.received - self._handled_at_look
        if most <= known:
            self._others, self._others_at_s, known = most, now_s, most
        return known

    @property
    def is_sampled(self) -> bool:
        """Whether nothing was handled since the last :meth:`look`."""
        return self.handled == self._handled_at_look

    @property
    def is_late(self) -> bool:
        """Whether the request that was handled last waited longer than the limit of :meth:`judge`."""
        return self.handled - _HEADS_BYTES <= self.late_below

    def _note_wait(self, now_s: float, limit_s: float) -> None:
        """Note what waits since ``now_s``, the time of the last :meth:`look`, and what has waited longer than ``limit_s``."""
        come = self.received - self.sample(now_s)
        marks, handled = self._marks, self.handled
        if come > handled and (not marks or come > marks[-1][1]):
            marks.append((now_s, come))
        while marks and marks[0][1] <= handled:
            marks.popleft()
        while len(marks) > 1 and marks[1][0] <= now_s - limit_s:
            marks.popleft()
        if marks and marks[0][0] <= now_s - limit_s:
            self.late_below = marks[0][1]

    def has_moved(self) -> bool:
        """Whether a request was handled since the last call."""
        handled = self.handled
        moved, self._handled_before = handled != self._handled_before, handled
        return moved

    @property
    def is_held(self) -> bool:
        """Whether bytes of this connection wait. libzmq drops an incomplete request when its connection has ended, and the
        kernel drops what libzmq has not read. So of a closed connection none waits when the receiving thread, which takes the
        connections in turns, has taken none for long.
        """
        if self.closed:
            return self.pending > self.unfinished and self.idle_s < FORGOTTEN_S
        return (self.pending > 0 or bool(self._marks)) and not self.ended

    def end(self) -> None:
        """Shut the connection down. libzmq then drops the incomplete request and the descriptor. Only this object's own
        descriptor is shut down, never another connection with the same number.
        """
        self.ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Shut it down over libzmq's descriptor, when :meth:`open` got none; only while its arrival is handled."""
        self.ended = True
        with contextlib.suppress(OSError):
            theirs = socket.socket(fileno=self.descriptor)
            try:
                theirs.shutdown(socket.SHUT_RDWR)
            finally:
                theirs.detach()


_ANSWER_S: Final = 0.1  # within this time the I/O thread sends an answer
_DOUBT_S: Final = 1.0
_GOES_ON_S: Final = 0.5  # requests of a peer that has gone are read within this time
_LOG_INTERVAL_S: Final = 1.0
_LONGEST_LOG_INTERVAL_S: Final = 60.0


class Disconnect(NamedTuple):
    """Which connection is to be ended, the bound that it broke, and a sentence that says how."""

    connection: PeerConnection
    bound: str
    why: str


class DueDisconnect(NamedTuple):
    """An end that is due at ``at_s``, for the peer with the id ``identity``. ``is_doubt``: its peer has no right to its id."""

    at_s: float
    identity: bytes | None
    ending: Disconnect
    is_doubt: bool = False


class Disconnects:
    """The ends that the receiving thread asks for, and the record of all ended connections.

    A connection that breaks a rule is ended a moment after its answer, so that the peer can read it. Requests that come
    in the meantime are dropped: the peer waits for no answer, so it is ended at once, before it sends still more.

    A request may wait until its connection has gone, and until another peer has the descriptor. So an end is for a
    routing id, and the gate does not end a connection that has another one by then. A connection that is new has a
    second to show that. A request under an id that its peer must not have says even less: whoever has the descriptor is
    ended after a second in which no other request came, and one that had asked for something before, only when the
    forbidden requests continue.

    ``wake``: an eventfd that the gate's thread waits for. ``ended``: the number of ended connections by bound.
    """

    def __init__(self, log: Log, wake: int) -> None:
        self.ended: Counter[str] = Counter()
        self._log = log
        self._wake = wake
        self._asked: deque[DueDisconnect] = deque()
        self._doubtful: deque[DueDisconnect] = deque()
        self._hurried: deque[DueDisconnect] = deque()
        self._lines: dict[str, tuple[float, float]] = {}  # by bound: when the next may come, and the pause before that

    def __len__(self) -> int:
        """Ends that were asked for and are not due."""
        return len(self._asked) + len(self._doubtful)

    # ------------------------------------------------------------ the receiving thread's side

    def ask(self, connection: PeerConnection, bound: str, why: str) -> None:
        """See :meth:`commitmq.network.gate.Gate.end`."""
        if connection.ending:
            return
        connection.ending = True
        ending, now = Disconnect(connection, bound, why), time.monotonic()
        if connection.accepted_s > now - _DOUBT_S:
            self._doubtful.append(DueDisconnect(now + _DOUBT_S, connection.identity, ending))
        else:
            self._asked.append(DueDisconnect(now + _ANSWER_S, connection.identity, ending))
        self._ring()

    def doubt(self, connection: PeerConnection, bound: str, why: str) -> None:
        """A request came under an id that its peer must not have: end ``connection`` if that continues."""
        connection.last_fault_s = now = time.monotonic()
        if not connection.doubted:
            connection.doubted = True
            asked = DueDisconnect(
                now + _DOUBT_S, connection.identity, Disconnect(connection, bound, why), is_doubt=True
            )
            self._doubtful.append(asked)
            self._ring()

    def drop(self, connection: PeerConnection) -> None:
        """A request of an ``ending`` connection was dropped."""
        if connection.hurried or connection.accepted_s > time.monotonic() - _DOUBT_S:
            return
        connection.hurried = True
        ending = Disconnect(connection, "ending", "it sent more requests after the one that ends it")
        self._hurried.append(DueDisconnect(0.0, connection.identity, ending))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the gate's thread

    def hurried(self) -> DueDisconnect | None:
        """The next one that must not wait until it is due."""
        return self._hurried.popleft() if self._hurried else None

    def due(self, now_s: float) -> DueDisconnect | None:
        for waiting in (self._asked, self._doubtful):
            if waiting and waiting[0].at_s <= now_s:
                return waiting.popleft()
        return None

    def holds(self, asked: DueDisconnect) -> bool:
        """Whether an end that is due now still is for this connection."""
        one = asked.ending.connection
        if asked.is_doubt:
            one.doubted = False
            goes_on = one.last_fault_s > asked.at_s - _DOUBT_S + _GOES_ON_S
            return one.identity is None or (one.identity == asked.identity and goes_on)
        return one.identity == asked.identity

    def put_off(self, asked: DueDisconnect, now_s: float) -> None:
        """The gate has not heard of the connection yet."""
        self._asked.append(asked._replace(at_s=now_s + _ANSWER_S))

    def tell(self, ending: Disconnect) -> None:
        """Count a connection that was ended, and write it to the log."""
        self.ended[ending.bound] += 1
        now = time.monotonic()
        next_s, pause_s = self._lines.get(ending.bound, (0.0, 0.0))
        if now >= next_s:
            # A line for each bound, and ever fewer while it continues: a client that breaks one a thousand times, or
            # continues for days, must not fill the log.
            is_new = now > next_s + _LONGEST_LOG_INTERVAL_S
            pause_s = _LOG_INTERVAL_S if is_new else min(2 * pause_s, _LONGEST_LOG_INTERVAL_S)
            self._lines[ending.bound] = now + pause_s, pause_s
            client, in_all = ending.connection.client, self.ended.total()
            self._log.warning("connection ended", bound=ending.bound, why=ending.why, client=client, in_all=in_all)
