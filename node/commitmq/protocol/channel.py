"""A client's connection to one process of a node: requests, answers, and lost connections.

A socket never holds a request back unseen: it is connected with ``IMMEDIATE``, so a request is accepted only while the
connection stands, and it is closed with ``LINGER`` 0 as soon as an answer is overdue or the connection is lost. So "the
socket did not take it" means *not sent*, and "taken, no answer" means *unknown*; also of the writer's Unix socket on the same
host (:class:`LocalSocket`).

ZeroMQ's monitor reports lost connections. It is read only when an answer takes longer than one wait slice, or when the
socket was idle that long before a request, so it costs a fast request nothing.

The ZeroMQ context of a process has one I/O thread for all its clients, and ends when the last of them is closed. It belongs to
the process that made it: a forked child makes its own, and :func:`check_fork` refuses a client of the parent.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson
import zmq

from commitmq.errors import AuthenticationError, CommitMQError, NodeUnavailableError, ProtocolError, RequestError
from commitmq.protocol import wire
from commitmq.protocol.node_address import Profile

_REFUSED_S: Final = 0.2
_SILENT_S: Final = 0.25
_MOST_DOUBLINGS: Final = 4
_MOST_ENDPOINTS: Final = 4_096

# By endpoint: the address that the last connection came to. A further one begins there.
_first: dict[str, str] = {}


class NameAddresses:
    """The addresses behind the host name of an endpoint: a client tries one after the other until one takes its connection.

    ZeroMQ itself takes the first address of a name, and IPv4 alone unless it is told otherwise. So ``localhost`` would never
    lead to a node that listens on ``::1``, nor any name to a host of which one address is out of reach.

    Of one connection. Not thread-safe. A name is looked up again after each round: its host may be elsewhere by then.
    """

    __slots__ = ("_addresses", "_at", "_has_stood", "_is_reached", "_is_refused", "_rounds", "_since_s", "endpoint")

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._addresses: list[str] = []
        self._at = self._rounds = -1
        self._is_reached = self._is_refused = self._has_stood = False
        self._since_s = 0.0

    @staticmethod
    def has_name(endpoint: str) -> bool:
        """Whether the host of ``endpoint`` is a name; else it is an address, or a file."""
        if not endpoint.startswith("tcp://") or "[" in endpoint:
            return False
        host, _, _ = endpoint.removeprefix("tcp://").rpartition(":")
        return not host.replace(".", "").isdigit()

    def next(self, now_s: float) -> str:
        """The endpoint to try from now on, with an address; with the name itself when it has none, which ZeroMQ reports."""
        self._at += 1
        if self._at >= len(self._addresses):
            self._addresses, self._at = self._look_up(), 0
            self._rounds += 1
        self._since_s, self._is_reached, self._is_refused = now_s, False, False
        self._remember(self._at)
        return self._addresses[self._at]

    def is_over(self, now_s: float) -> bool:
        """Whether it is time for the next address: this one refused the connection, or is silent."""
        if self._is_reached:
            return False
        passed_s = now_s - self._since_s
        if self._is_refused:
            return not self._rounds or passed_s >= _REFUSED_S
        # The way to a host may be long: each round has more patience than the one before.
        return passed_s >= _SILENT_S * (1 << min(self._rounds, _MOST_DOUBLINGS))

    def note(self, event: int) -> bool:
        """Take note of an event of ZeroMQ's monitor. True when it says nothing else."""
        if event == zmq.EVENT_CONNECTED:
            self._is_reached = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._is_refused, self._is_reached = True, False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_stood = True
        elif event == zmq.EVENT_DISCONNECTED and not self._has_stood:
            self._remember(self._at + 1)  # another program has this port of this address
        return event in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_RETRIED)

    def _remember(self, at: int) -> None:
        if len(_first) >= _MOST_ENDPOINTS:
            _first.clear()
        _first[self.endpoint] = self._addresses[at % len(self._addresses)]

    def _look_up(self) -> list[str]:
        """From the address on that the last connection came to; IPv4 before IPv6 otherwise, as most nodes listen."""
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return [self.endpoint]
        found.sort(key=lambda one: one[0] != socket.AF_INET)
        hosts = dict.fromkeys(str(one[4][0]) for one in found)
        addresses = [f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in hosts]
        first = _first.get(self.endpoint, "")
        at = addresses.index(first) if first in addresses else 0
        return [*addresses[at:], *addresses[:at]] or [self.endpoint]


ZmqContext = zmq.Context[zmq.Socket[bytes]]

_context_lock = threading.Lock()
_context: ZmqContext | None = None
_context_users = 0
_context_pid = 0


def _forget_context() -> None:
    """In a forked child: the context is the parent's, and a thread that is not here may hold the lock."""
    global _context_lock, _context
    _context_lock = threading.Lock()
    _context = None


os.register_at_fork(after_in_child=_forget_context)


def acquire_context() -> ZmqContext:
    """The context all clients of this process share; pair with :func:`release_context`."""
    global _context, _context_users, _context_pid
    with _context_lock:
        if _context is None or _context_pid != os.getpid():
            # After a fork the parent's context is unusable: its I/O thread does not exist here.
            _context = zmq.Context(io_threads=1)
            _context_users = 0
            _context_pid = os.getpid()
        _context_users += 1
        return _context


def release_context() -> None:
    """Give the context back. The last user ends it (all sockets must be closed by then)."""
    global _context, _context_users
    if sys.is_finalizing():
        return  # a thread that no longer runs may hold the lock; the process's end closes everything
    with _context_lock:
        if _context_pid != os.getpid() or _context is None:
            return
        _context_users -= 1
        if _context_users:
            return
        context, _context = _context, None
    context.term()  # waits for the I/O thread: without the lock


def check_fork(pid: int, what: str) -> None:
    """Raise CommitMQError when this process is not the one that made ``what``."""
    if pid != os.getpid():
        raise CommitMQError(
            f"this {what} was made before a fork, in process {pid}; its connections and threads do not exist in"
            f" process {os.getpid()}. Make a new {what} in the child."
        )


WAIT_SLICE_MS: Final = 50
WAIT_SLICE_S: Final = WAIT_SLICE_MS / 1000
_ROUTING_ID_BYTES: Final = 16
_EVENTS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS_OF_NAMES: Final = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
_OTHER_MECHANISM: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

Frames = Sequence[bytes | memoryview]


class ConnectionLost(NodeUnavailableError):
    """The connection ended, or the time was over, after the request was passed on: its fate is unknown."""


def new_routing_id() -> bytes:
    """A name for one connection that cannot be guessed: another client with the same name would take its answers."""
    return b"c" + os.urandom(_ROUTING_ID_BYTES)


def set_keys(sock: zmq.Socket[bytes], keys: Profile) -> None:
    """Let the next connection of ``sock`` be encrypted, to the node and as the user of the profile."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.node_key.encode())
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())


def _not_opened(sentence: str, error: OSError | zmq.ZMQError) -> RequestError:
    """The error for a socket that could not be opened: of this program, when it may open no more files."""
    if error.errno in _NO_DESCRIPTOR:
        return RequestError("CLIENT_ERROR", f"{sentence}: this program may open no more files (`ulimit -n`)")
    return NodeUnavailableError(f"{sentence}: {error}")


class Channel:
    """A DEALER socket to one endpoint. Not thread-safe: the owner serialises its use."""

    __slots__ = (
        "_addresses",
        "_connect_by",
        "_has_stood",
        "_holds_context",
        "_keys",
        "_lost",
        "_monitor",
        "_next_id",
        "_refusal",
        "endpoint",
        "last_use",
        "receive",
        "send",
        "socket",
    )

    def __init__(self, endpoint: str, patience_s: float = math.inf, *, keys: Profile | None = None) -> None:
        """Start to connect to ``endpoint``, over tcp with ``keys`` if there are any. A request waits for the connection, but
        never longer than ``patience_s`` from now: a restarted node may be elsewhere.
        """
        self.endpoint = endpoint
        self._keys = keys
        self._refusal: NodeUnavailableError | None = None
        self._addresses = NameAddresses(endpoint) if NameAddresses.has_name(endpoint) else None
        self._next_id = 0
        self._lost = False
        self.last_use = time.monotonic()
        self._has_stood = False
        self._connect_by = self.last_use + patience_s  # infinite once the connection stood
        context = acquire_context()
        self._holds_context = True
        try:
            self._open(context)
        except BaseException:
            self._holds_context = False
            release_context()
            raise

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the socket, and begin to connect to the endpoint, or to the next address behind its name."""
        try:
            self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            try:
                self._connect(self.endpoint if self._addresses is None else self._addresses.next(time.monotonic()))
            except BaseException:
                self.socket.close(0)
                raise
        except zmq.ZMQError as error:
            raise _not_opened(f"cannot connect to {self.endpoint}", error) from error

    def _connect(self, address: str) -> None:
        option = self.socket.setsockopt
        option(zmq.ROUTING_ID, new_routing_id())
        option(zmq.LINGER, 0)
        option(zmq.IMMEDIATE, 1)
        option(zmq.RCVTIMEO, WAIT_SLICE_MS)
        option(zmq.SNDTIMEO, WAIT_SLICE_MS)
        option(zmq.RCVHWM, 0)  # answers are bounded by the requests this client has outstanding
        option(zmq.SNDHWM, 64)
        option(zmq.RECONNECT_IVL, 10)
        option(zmq.RECONNECT_IVL_MAX, 200)
        if address.startswith("tcp"):
            if "[" in address:
                option(zmq.IPV6, 1)
            # Missing pongs reveal a node that vanished without closing (power, cable).
            option(zmq.HEARTBEAT_IVL, 5_000)
            option(zmq.HEARTBEAT_TIMEOUT, 15_000)
        if self._keys is not None:
            set_keys(self.socket, self._keys)
        # The methods below zmq.Socket's own Python code: one call less for each frame of a single send.
        self.send = super(zmq.Socket, self.socket).send
        self.receive = super(zmq.Socket, self.socket).recv
        events = _EVENTS if self._addresses is None else _EVENTS | _EVENTS_OF_NAMES
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(events)
        try:
            self._monitor.setsockopt(zmq.LINGER, 0)
            self.socket.connect(address)
        except BaseException:
            self.socket.disable_monitor()
            self._monitor.close(0)
            raise

    def close(self) -> None:
        """Close now; queued requests are not sent any more."""
        if not self._holds_context:
            return
        self._holds_context = False
        if not self.socket.closed:
            self._close_socket()
        release_context()

    def _close_socket(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)

    @property
    def closed(self) -> bool:
        return bool(self.socket.closed)

    def next_id(self) -> int:
        """A request id that this channel has not used."""
        self._next_id += 1
        return self._next_id

    def lost(self) -> bool:
        """True once the connection has ended, even if ZeroMQ has made a new one since; then close this channel."""
        while not self._lost:
            try:
                event = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            kind = int.from_bytes(event[0][:2], "little")
            if self._addresses is not None and self._addresses.note(kind):
                continue
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusal = None
            elif kind != zmq.EVENT_DISCONNECTED:
                self._note_refusal(kind, int.from_bytes(event[0][2:6], "little"))
                continue
            self._has_stood, self._connect_by = True, math.inf
            if kind == zmq.EVENT_DISCONNECTED:
                self._lost = True
        return self._lost

    def _note_refusal(self, kind: int, detail: int) -> None:
        """A handshake failed: tell what is known of the reason."""
        keys, where = self._keys, self.endpoint
        if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH and keys is not None:
            self._refusal = AuthenticationError(f"the node at {where} does not know the key of the profile {keys.name}")
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and detail == _OTHER_MECHANISM:
            self._refusal = AuthenticationError(
                f"the node at {where} has no keys, and the profile {keys.name} needs the node's: the node's owner makes"
                " them with `commitmq keys init`"
                if keys is not None
                else f"the peer at {where} lets nobody in without keys: connect with a profile, commitmq://PROFILE@host:port;"
                " on its own machine its owner may use ipc://STORE"
            )
        elif self._refusal is None and keys is not None:
            self._refusal = NodeUnavailableError(
                f"{where} ended the handshake: it may not have the node key of the profile {keys.name}, or not run yet"
            )

    def lost_while_idle(self) -> bool:
        """Like :meth:`lost`, but looks only when the channel was not used for a wait slice: cheap before each request."""
        now = time.monotonic()
        idle = now - self.last_use
        self.last_use = now
        return self._lost or (idle > WAIT_SLICE_S and self.lost())

    def put(self, frames: Frames, deadline: float) -> None:
        """Hand over one request. ``deadline`` is in ``time.monotonic()`` seconds. Raises NodeUnavailableError when the
        connection does not take it in time: then it was not sent.
        """
        sock = self.socket
        while True:
            try:
                sock.send_multipart(frames)
                return
            except zmq.Again:
                if self.lost():
                    raise self._refusal or NodeUnavailableError(f"the connection to {self.endpoint} ended") from None
                if not self._has_stood:
                    self._require_descriptor()
                    if self._moves_on():
                        sock = self.socket
                if time.monotonic() >= min(deadline, self._connect_by):
                    raise NodeUnavailableError(f"no connection to {self.endpoint}") from None
            except BaseException:
                # Interrupted: a request of more than one frame may be half sent, and the next one would continue behind
                # that half.
                self._lost |= len(frames) > 1
                raise

    def _moves_on(self) -> bool:
        """Try the next address behind the name, when it is time. True when the socket is another one now."""
        if self._addresses is None or not self._addresses.is_over(time.monotonic()):
            return False
        self._close_socket()
        self._open(self.socket.context)
        return True

    def _require_descriptor(self) -> None:
        """Raises RequestError when this program may open no more files: ZeroMQ would try to connect for ever."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise _not_opened(f"cannot connect to {self.endpoint}", error) from None

    def wait(self, deadline: float) -> bytes:
        """First frame of the next answer. Raises ConnectionLost when the connection ends or the time is over."""
        while True:
            try:
                return self.socket.recv()
            except zmq.Again:
                if self.lost():
                    # The answer may have come between the two looks, as the last message of a process that ends.
                    with contextlib.suppress(zmq.Again):
                        return self.socket.recv(zmq.NOBLOCK)
                    raise ConnectionLost(f"the connection to {self.endpoint} ended before its answer") from None
                if time.monotonic() >= deadline:
                    raise ConnectionLost(f"no answer from {self.endpoint} in time") from None

    def rest(self) -> list[zmq.Frame]:
        """The further frames of the answer whose first one was just read, without copying them."""
        frames = []
        try:
            while self.socket.getsockopt(zmq.RCVMORE):
                frames.append(self.socket.recv(copy=False))
        except BaseException:
            self._lost = True  # the rest would be taken for the next answer
            raise
        return frames

    def request(
        self, op: str, fields: dict[str, Any] | None = None, payload: Frames = (), *, timeout_s: float
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        """Send one request and return its answer. Answers to earlier requests of this channel are dropped.

        Raises ProtocolError for a refusal, ConnectionLost without an answer, NodeUnavailableError if it was not sent. A
        value that a request cannot carry (a string that is no valid Unicode, as bytes of a command line may be; a
        number beyond 64 bits) counts as refused.
        """
        deadline = time.monotonic() + timeout_s
        identity = self.next_id()
        try:
            header = orjson.dumps({"v": wire.PROTOCOL_VERSION, "op": op, "id": identity, **(fields or {})})
        except orjson.JSONEncodeError as error:
            raise ProtocolError("INVALID_PARAMETER", f"a value cannot be sent: {error}") from error
        self.last_use = time.monotonic()
        self.put([header, *payload], deadline)
        while True:
            answer = wire.parse_answer(self.wait(deadline))
            frames = self.rest()
            if answer.get("id") not in (identity, None):
                continue
            self.last_use = time.monotonic()
            if not answer["ok"]:
                raise wire.refusal(answer)
            return answer, frames


MAX_PACKET_BYTES: Final = 65_536
HEADER_LENGTH: Final = 4  # bytes, big-endian, before the header
GREETING: Final = b'{"v":1,"id":null,"ok":true}'
_GREETING_S: Final = 0.5
_HEADER_ROOM: Final = 4_096
_SLICE: Final = struct.pack("@ll", 0, WAIT_SLICE_MS * 1000)


class LocalSocket:
    """The client's end of the writer's Unix socket on the same host (see commitmq.workers.writer.local_sockets).

    One request and its answer at a time; the owner serialises its use.

    A connection to the local socket of one writer.
    """

    #: Larger headers and bodies do not fit into a packet.
    MAX_HEADER_BYTES: Final = _HEADER_ROOM - HEADER_LENGTH
    MAX_BODY_BYTES: Final = MAX_PACKET_BYTES - _HEADER_ROOM

    __slots__ = ("_socket", "path", "receive", "send")

    def __init__(self, path: str) -> None:
        """Connect to the writer's socket. Raises OSError when no writer listens there, or it takes no more connections."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Time-outs in the kernel: Python's own cost one more system call each.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
            self._socket.connect(path)
            # Wait for the greeting: without it the outcome of a request to a node that closes the connection at once
            # would be unknown.
            self._greeted(time.monotonic() + _GREETING_S)
        except BaseException:
            self._socket.close()
            raise
        self.send, self.receive = self._socket.sendmsg, self._socket.recv

    def _greeted(self, deadline: float) -> None:
        while True:
            try:
                if self._socket.recv(MAX_PACKET_BYTES) != GREETING:
                    raise ConnectionRefusedError(f"{self.path} takes no more connections")
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise

    def request(self, header: bytes, body: bytes, deadline: float) -> bytes:
        """The answer to one request. ``deadline`` is in ``time.monotonic()`` seconds.

        Raises NodeUnavailableError when it was not sent, ConnectionLost when it was sent and no answer came. After
        either, and after an interruption, the connection is unusable.
        """
        packet = (len(header).to_bytes(HEADER_LENGTH, "big"), header, body)
        taken = False
        while True:
            try:
                if not taken:
                    self.send(packet)
                    taken = True
                answer = self.receive(MAX_PACKET_BYTES)
            except OSError as error:
                if error.errno is None:
                    raise  # not the socket's: a signal handler of the program raised it (TimeoutError is one)
                if error.errno == errno.EAGAIN:
                    if time.monotonic() < deadline:
                        continue
                    sentence = f"no answer from {self.path} in time" if taken else f"{self.path} takes no requests"
                else:
                    sentence = f"the connection to {self.path} ended: {error}"
                raise (ConnectionLost if taken else NodeUnavailableError)(sentence) from None
            if not answer:
                raise ConnectionLost(f"the connection to {self.path} ended before its answer")
            return answer

    def close(self) -> None:
        self._socket.close()


def local_path(hello: dict[str, Any], endpoint: str) -> str:
    """The local socket of the writer that answered ``hello`` at ``endpoint``; empty when it cannot be used from here."""
    path = hello.get("local_socket")
    usable = type(path) is str and endpoint.startswith("ipc://") and os.access(path, os.W_OK)
    return str(path) if usable else ""
