"""Connections of a client to the processes of a node.

* :func:`acquire_context` / :func:`release_context`: one ZeroMQ context (one I/O thread) for all clients of a process,
  ended when the last of them is closed.
* :class:`Directory`: the node's admin address and the addresses of the other processes from its ``metadata``.
* :class:`Channel`: one DEALER socket to one process: requests, answers, and lost connections.

A socket never holds a request back unseen: it is connected with ``IMMEDIATE``, so a request is accepted only while the
connection stands, and it is closed with ``LINGER`` 0 as soon as an answer is overdue or the connection is lost. So "the
socket did not take it" means *not sent*, and "taken, no answer" means *unknown*.

ZeroMQ's monitor reports lost connections. It is read only when an answer takes longer than one wait slice, or when the
socket was idle that long before a request, so it costs a fast request nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
import zmq

from commitmq.errors import CommitMQError, NodeAddressError, NodeUnavailableError, ProtocolError, RequestError
from commitmq.protocol import wire

DEFAULT_NODE: Final = "tcp://127.0.0.1:7310"
WAIT_SLICE_MS: Final = 50
WAIT_SLICE_S: Final = WAIT_SLICE_MS / 1000
_CONNECT_ATTEMPT_S: Final = 1.0
_ROUTING_ID_BYTES: Final = 16
_RETRY_PAUSE_S: Final = 0.05
_ONE_SILENCE_S: Final = 0.25
_WORTH_A_RETRY: Final = ("SERVICE_NOT_AVAILABLE", "BAD_ANSWER")

ZmqContext = zmq.Context[zmq.Socket[bytes]]
Frames = Sequence[bytes | memoryview]


class ConnectionLost(NodeUnavailableError):
    """The connection ended, or the time was over, after the request was handed over: its fate is unknown."""


# ---------------------------------------------------------------- the process's context

_context_lock = threading.Lock()
_context: ZmqContext | None = None
_context_users = 0
_context_pid = 0


def _forget_context() -> None:
    """In a forked child: the context belongs to the parent, and the lock may be held by a thread that does not exist
    here.
    """
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


def node_address(node: str | None) -> str:
    """``node``, else the environment's COMMITMQ_NODE, else the local default. Raises NodeAddressError for nonsense."""
    address = node or os.environ.get("COMMITMQ_NODE") or DEFAULT_NODE
    told = f"node address {address!r}" + (" (from COMMITMQ_NODE)" if address == os.environ.get("COMMITMQ_NODE") else "")
    if "://" not in address:
        address = f"tcp://{address}"
    scheme = address.partition("://")[0]
    if scheme not in ("tcp", "ipc"):
        raise NodeAddressError(f"{told} must start with tcp:// or ipc://, for example {DEFAULT_NODE}")
    if scheme == "tcp":
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise NodeAddressError(f"{told}: {error}") from error
        if not host or not port:
            raise NodeAddressError(f"{told} needs a host and a port, for example {DEFAULT_NODE}")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise NodeAddressError(f"{told} has more than a host and a port, for example {DEFAULT_NODE}")
    return address


# ---------------------------------------------------------------- one socket


def new_routing_id() -> bytes:
    """A name for one connection that cannot be guessed: another client with the same name would take its answers."""
    return b"c" + os.urandom(_ROUTING_ID_BYTES)


def wants_ipv6(endpoint: str) -> bool:
    """Whether the host of a tcp ``endpoint`` has an IPv6 address only; ZeroMQ uses IPv4 by default."""
    if "[" in endpoint:
        return True
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host.replace(".", "").isdigit():
        return False
    try:
        families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False  # the connect reports what is wrong with the name
    return socket.AF_INET6 in families and socket.AF_INET not in families


class Channel:
    """A DEALER socket to one endpoint. Not thread-safe: the owner serialises its use."""

    __slots__ = ("_connect_by", "_lost", "_monitor", "_next_id", "endpoint", "last_use", "receive", "send", "socket")

    def __init__(self, endpoint: str, patience_s: float = math.inf) -> None:
        """Start to connect to ``endpoint``. A request waits for the connection, but never longer than ``patience_s``
        from now: a restarted node may be elsewhere.
        """
        self.endpoint = endpoint
        self._next_id = 0
        self._lost = False
        self.last_use = time.monotonic()
        self._connect_by = self.last_use + patience_s  # infinite once the connection stood
        context = acquire_context()
        try:
            self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        except BaseException as error:
            release_context()
            if isinstance(error, zmq.ZMQError):
                raise NodeUnavailableError(f"cannot open a socket to {endpoint}: {error}") from error
            raise
        try:
            self._open()
        except BaseException as error:
            self.socket.close(0)
            release_context()
            if isinstance(error, zmq.ZMQError):
                raise NodeUnavailableError(f"cannot connect to {endpoint}: {error}") from error
            raise

    def _open(self) -> None:
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
        if self.endpoint.startswith("tcp"):
            if wants_ipv6(self.endpoint):
                option(zmq.IPV6, 1)
            # Missing pongs reveal a node that vanished without closing (power, cable).
            option(zmq.HEARTBEAT_IVL, 5_000)
            option(zmq.HEARTBEAT_TIMEOUT, 15_000)
        # The methods below zmq.Socket's own Python code: one call less for each frame of a single send.
        self.send = super(zmq.Socket, self.socket).send
        self.receive = super(zmq.Socket, self.socket).recv
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        try:
            self._monitor.setsockopt(zmq.LINGER, 0)
            self.socket.connect(self.endpoint)
        except BaseException:
            self.socket.disable_monitor()
            self._monitor.close(0)
            raise

    def close(self) -> None:
        """Close now; queued requests are not sent any more."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)
        release_context()

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
            self._connect_by = math.inf
            if int.from_bytes(event[0][:2], "little") == zmq.EVENT_DISCONNECTED:
                self._lost = True
        return self._lost

    def lost_while_idle(self) -> bool:
        """Like :meth:`lost`, but looks only when the channel was not used for a wait slice: cheap before each request."""
        now = time.monotonic()
        idle = now - self.last_use
        self.last_use = now
        return self._lost or (idle > WAIT_SLICE_S and self.lost())

    def put(self, frames: Frames, deadline: float) -> None:
        """Hand over one request. ``deadline`` is in ``time.monotonic()`` seconds.

        Raises NodeUnavailableError when the connection does not take it in time: then it was not sent.
        """
        sock = self.socket
        while True:
            try:
                sock.send_multipart(frames)
                return
            except zmq.Again:
                if self.lost():
                    raise NodeUnavailableError(f"the connection to {self.endpoint} ended") from None
                if time.monotonic() >= min(deadline, self._connect_by):
                    raise NodeUnavailableError(f"no connection to {self.endpoint}") from None
            except BaseException:
                # Interrupted: a request of more than one frame may be half sent, and the next one would continue behind
                # that half.
                self._lost |= len(frames) > 1
                raise

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


# ---------------------------------------------------------------- the node


@dataclass(frozen=True, slots=True)
class Metadata:
    """The node's description of itself, and whether it is on this host."""

    node: str
    epoch: int
    store: Path
    segment_bytes: int
    properties_crc: bool
    same_host: bool
    endpoints: dict[str, list[list[str]]]
    raw: dict[str, Any]

    @property
    def store_id(self) -> str:
        """The id that tells the store from every other one; empty when the node sends none."""
        return str(self.raw.get("store_id", ""))

    def is_same_host_still(self) -> bool:
        """``same_host``, checked again: a node that was stopped or started since has another token."""
        return self.same_host and _token_matches(self.store, str(self.raw["token"]))

    def endpoint(self, role: str, index: int = 0) -> str:
        """The best endpoint of the ``index``-th process of ``role`` (modulo their number): ipc on the same host, else
        tcp.
        """
        choices = self.endpoints.get(role) or []
        if not choices:
            raise NodeUnavailableError(f"the node {self.node} has no {role} at the moment")
        tcp_or_ipc = choices[index % len(choices)]
        if self.same_host:
            for one in tcp_or_ipc:
                if one.startswith("ipc://") and os.access(one.removeprefix("ipc://"), os.W_OK):
                    return one
        for one in tcp_or_ipc:
            if one.startswith("tcp://"):
                return one
        raise NodeUnavailableError(f"the {role} of the node {self.node} cannot be reached from this host")

    def count(self, role: str) -> int:
        """Number of processes of ``role``."""
        return len(self.endpoints.get(role) or [])


class _Silences(threading.local):
    """For each address at which this thread got no answer: the first and the last time of that.

    It is not part of a directory: a batch asks for its topic's queues over one directory and connects to the writer
    over another, in turn.
    """

    def __init__(self) -> None:
        self.of: dict[str, tuple[float, float]] = {}


_silences = _Silences()


class Directory:
    """The admin endpoint of one node and its last metadata. Not thread-safe."""

    def __init__(self, node: str | None) -> None:
        self.address = node_address(node)
        self._channel: Channel | None = None
        self._metadata: Metadata | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def request(self, op: str, fields: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """One request to the supervisor. Raises NodeUnavailableError or ProtocolError."""
        began = time.monotonic()
        try:
            return self._request(op, fields, timeout_s=timeout_s)
        except NodeUnavailableError as error:
            raise self._no_answer(error.message, time.monotonic() - began) from error

    def _no_answer(self, reason: str, waited_s: float) -> NodeUnavailableError:
        return NodeUnavailableError(
            f"no answer from the node at {self.address} within {waited_s:.1f} s; is it started? ({reason})"
        )

    def _request(self, op: str, fields: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        if self._channel is None or self._channel.lost():
            self.close()
            self._channel = Channel(self.address)
        try:
            return self._channel.request(op, fields, timeout_s=timeout_s)[0]
        except RequestError as error:
            if not isinstance(error, NodeUnavailableError):
                if error.code == "BAD_ANSWER":
                    self.close()
                raise
            self.close()
            raise

    def metadata(self, *, timeout_s: float, refresh: bool = False) -> Metadata:
        """The node's metadata; asks the node unless it is known and ``refresh`` is false.

        The call waits for a starting node, also for one that dies meanwhile and is started again. Raises
        NodeUnavailableError or ProtocolError at the end of ``timeout_s``.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        while self._metadata is None or refresh:
            try:
                left_s = max(deadline - time.monotonic(), _RETRY_PAUSE_S)
                self._metadata = self._parse(self._request("metadata", timeout_s=left_s))
                break
            except RequestError as error:
                is_away = isinstance(error, NodeUnavailableError)
                is_over = time.monotonic() + _RETRY_PAUSE_S >= deadline
                if is_away and is_over:
                    raise self._no_answer(error.message, time.monotonic() - began) from error
                if is_over or not (is_away or error.code == "SERVICE_NOT_AVAILABLE"):
                    raise
            time.sleep(_RETRY_PAUSE_S)
        return self._metadata

    def connect(
        self, role: str, deadline: float, *, index: int = 0, hello: bool = False
    ) -> tuple[Channel, dict[str, Any]]:
        """A channel to a process of ``role``, trying until ``deadline`` (``time.monotonic()`` seconds).

        With ``hello`` the process is asked ``hello`` and its answer is returned. A restarting node keeps its addresses:
        if the supervisor does not answer, the last known address is tried too. A caller without ``hello`` has to
        connect again when the channel takes nothing: the address may have belonged to a node that is gone.
        """
        problem: RequestError | None = None
        silent = False  # True when it is the supervisor that does not answer
        began = time.monotonic()
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0 and problem is not None:
                waited_s = self._silent_for(began)
                raise (
                    self._no_answer(problem.message, waited_s) if silent else NodeUnavailableError(problem.message)
                ) from problem
            attempt_s = min(max(remaining, 0.01), _CONNECT_ATTEMPT_S)
            channel: Channel | None = None
            try:
                try:
                    metadata = self._metadata = self._parse(self._request("metadata", timeout_s=attempt_s))
                    silent = False
                except NodeUnavailableError:
                    silent = True
                    if self._metadata is None:
                        raise
                    metadata = self._metadata
                channel = Channel(metadata.endpoint(role, index), _CONNECT_ATTEMPT_S)
                answer = channel.request("hello", timeout_s=attempt_s)[0] if hello else {}
                _silences.of.pop(self.address, None)
                return channel, answer
            except RequestError as error:
                problem = error
                if channel is not None:
                    channel.close()
                # BAD_ANSWER: while no process listens on a port of the system's own range, the kernel may connect a
                # client to itself, and the client then receives its own requests.
                if not isinstance(error, NodeUnavailableError) and error.code not in _WORTH_A_RETRY:
                    raise
            except BaseException:
                if channel is not None:
                    channel.close()
                raise
            time.sleep(min(_RETRY_PAUSE_S, max(deadline - time.monotonic(), 0)))

    def _silent_for(self, began: float) -> float:
        """For how long (seconds) the node was unreachable: a caller that tries for a long time does so in short turns."""
        now = time.monotonic()
        since, last = _silences.of.get(self.address, (began, began))
        if began - last > _ONE_SILENCE_S:
            since = began
        _silences.of[self.address] = (since, now)
        return now - since

    def _parse(self, answer: dict[str, Any]) -> Metadata:
        store = Path(answer["store"])
        endpoints: dict[str, list[list[str]]] = {}
        for role, value in answer["endpoints"].items():
            # A single process is given as [tcp, ipc], several processes of a role as a list of such pairs.
            several = value if value and isinstance(value[0], list) else [value]
            endpoints[role] = [[self._reachable(one) for one in pair if one] for pair in several if pair]
        return Metadata(
            node=str(answer["node"]),
            epoch=int(answer["epoch"]),
            store=store,
            segment_bytes=int(answer["segment_bytes"]),
            properties_crc=bool(answer["properties_crc"]),
            same_host=_token_matches(store, str(answer["token"])),
            endpoints=endpoints,
            raw=answer,
        )

    def _reachable(self, endpoint: str) -> str:
        """``endpoint`` with the host under which this client knows the node, when the node only says that it listens
        everywhere.
        """
        for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
            if endpoint.startswith(wildcard) and self.address.startswith("tcp://"):
                host = self.address.removeprefix("tcp://").rpartition(":")[0]
                return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
        return endpoint


def _token_matches(store: Path, token: str) -> bool:
    """True when the store's token file can be read here and equals the node's token: same host, same file system.

    The token is random for each start of the node, so a copy of the store on another host does not match.
    """
    try:
        return bool(token) and (store / "run" / "token").read_text(encoding="ascii").strip() == token
    except (OSError, UnicodeDecodeError):
        return False
