"""The sending side of a producer: its connection, the messages that wait, and the thread that moves them.

Who owns the connection (whose ticket is the first in ``line``, see :mod:`commitmq.client.sending.line`):

* the calling thread of a synchronous send, for the time of its round trip: no thread hop is on that path;
* the pump thread, while asynchronous sends or batches are pending. Synchronous sends that find the connection taken become
  pending ones, so that many sending threads coalesce into runs like asynchronous sends do.

The pump sends the first pending message at once. While runs are in flight, what arrives is collected: the next run goes
when an answer comes back, or when :data:`FULL_RUN_BYTES` are there and fewer than :data:`WINDOW` runs are in flight. So
a lone message waits for nobody, and a stream of them travels in runs. A thin stream would make thin runs, each of which
costs the node and its consumers as much as a thick one: so what comes within ``linger_s`` of the last runs waits until that
is over, unless it is :data:`FULL_RUN_BYTES` or a thread waits for a result, for a flush or for space.

Pending batches are runs already: each goes as soon as fewer than that many are in flight, in turn with the single messages'.
The window is wide enough that the node always has the next runs to store while it syncs those before; where
``max_pending_bytes`` is small it is narrower, so that the copies in flight never take more than that (or than
:data:`LEAST_WINDOW` runs).

When the connection ends, sends that were handed to it go as the delivery policy says
(:mod:`commitmq.client.sending.delivery`): they fail as of *unknown* fate, or an idempotent producer repeats them. Sends that
were not handed over stay pending, are sent on the next connection, and fail as *not stored* when their time is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson
import zmq

from commitmq.client.bell import Bell
from commitmq.client.routes import Routes, not_stored, unknown
from commitmq.client.sending.delivery import LEAST_WINDOW, AtMostOnce, no_answer
from commitmq.client.sending.line import Line, Ticket, wake_all
from commitmq.client.sending.run import NEVER_S, MakeError, MessagesRun, NotYet, Run
from commitmq.client.sending.run_encoder import RunLayout, encode_messages
from commitmq.client.sending.send_future import SendFuture, fail_all, run_callbacks
from commitmq.errors import (
    CommitMQError,
    InvalidMessageError,
    NodeUnavailableError,
    Outcome,
    ProtocolError,
    SendError,
    send_error,
)
from commitmq.protocol import wire
from commitmq.protocol.connection import Channel, ConnectionLost, Directory, check_fork
from commitmq.protocol.local_packet import LocalSocket, local_path
from commitmq.store.log.unique_ids import UniqueIds

if TYPE_CHECKING:
    from commitmq.client.sending.batch import Batch

FULL_RUN_BYTES: Final = 256 * 1024
MAX_PUMP_RUN_BYTES: Final = 1024 * 1024
MAX_PUMP_RUN_MESSAGES: Final = 4096
_TICK_MS: Final = 50
_LONG_S: Final = 1.0
_FAIL_STEP: Final = 256
_NEVER: Final = 1 << 62
_ANY: Final = -_NEVER
WRONG_ENDPOINT: Final = "WRONG_ENDPOINT"

_T = TypeVar("_T")
_Group = tuple[str, int, str]  # topic, queue or -1, ack

# What a message costs besides its body and properties, for the bound on pending bytes; it need not be exact.
OVERHEAD_BYTES: Final = 512

_new = object.__new__
_time_ns = time.time_ns
_log = logging.getLogger("commitmq.client")


def too_large(size_bytes: int, limit: int) -> InvalidMessageError:
    """The error for a body of ``size_bytes``."""
    return InvalidMessageError(
        f"the body has {size_bytes} bytes, the node allows {limit} (commit_log.max_message_bytes)"
    )


class NoRoom(Exception):
    """Too much is pending for a caller that must not wait. ``pending``: that many messages."""

    def __init__(self, pending: int) -> None:
        super().__init__(pending)
        self.pending = pending


class SendCore:
    """See the module. Methods that say "connection owned" must be called by its owner."""

    def __init__(
        self,
        node: str | None,
        *,
        timeout_s: float,
        max_pending: int,
        max_pending_bytes: int,
        linger_s: float = 0.0,
        ids: UniqueIds | None = None,
        delivery: AtMostOnce | None = None,
        primary: SendCore | None = None,
    ) -> None:
        """The primary core sends to the writer. One made with a ``primary`` sends memory topics to the memory process."""
        self.pid = os.getpid()
        self.directory = Directory(node)
        self.routes: Routes = Routes(node) if primary is None else primary.routes
        self.role = "writer" if primary is None else "memory"
        self.is_primary = primary is None
        self.primary = self if primary is None else primary
        self.elsewhere: dict[str, SendCore] = {}  # of the primary: topics that another core sends; lock held to change
        self.timeout_s = timeout_s
        self.max_pending = max_pending
        self.max_pending_bytes = max_pending_bytes
        self.linger_s = linger_s
        # (Runs of batches have up to twice the bytes of the pump's own.)
        self.delivery = delivery or AtMostOnce()
        self.window = max(LEAST_WINDOW, min(self.delivery.window, max_pending_bytes // (2 * MAX_PUMP_RUN_BYTES)))
        self.line = Line()
        # One lock for both cores: a message must not be overtaken while its topic changes over. (One that can be taken
        # again: concurrent.futures' helpers take the condition of each future that they wait for, which is this one.)
        self.lock: threading.RLock = threading.RLock() if primary is None else primary.lock
        self.ids = ids or UniqueIds()
        self.channel: Channel | None = None
        self.local: LocalSocket | None = None  # the short way beside it, for single synchronous sends
        self.local_path = ""  # where that can be had, until it was tried
        self.hello: dict[str, Any] = {}
        self.max_message_bytes = 0
        self.outstanding = 0  # messages pending or in flight; lock held to change
        self.closed = False
        self._outstanding_bytes = 0
        self._waiting: list[Ticket] = []  # of threads that wait for space or for a flush; lock held to wake them
        # Of the primary, for whoever must not wait for space: called, in whatever thread, with the lock held, when
        # something is not pending any more after a NoRoom.
        self.room: Callable[[], None] | None = None
        self._room_wanted = False
        self.hurried: set[Ticket] = set()  # of threads that wait for a result
        self._groups: dict[_Group, deque[SendFuture]] = {}
        self._pending_bytes = 0
        self._flying: dict[int, Run] = {}  # by request id
        self._flying_messages = 0  # runs of single messages among them
        self._batches: deque[Batch] = deque()  # that have something to send; lock held to change
        self._singles_next = True
        self._earliest = float("inf")
        self._thread: threading.Thread | None = None  # the pump, since it runs
        self._has_pump = False  # it was started
        self._wakes_at = _ANY  # pending bytes at which a send must wake the pump (or start it)
        self._lingering: Ticket | None = None  # what the pump sleeps on while messages gather
        self._gathered_at = 0.0  # when the last runs of single messages began to leave
        self._gathered = 0  # groups that were pending then, and have not left yet
        self._memory: SendCore | None = None
        self._node = node
        self._bell = Bell()
        self._layouts: dict[str, RunLayout] = {}

    # ------------------------------------------------------------ the connection (by its owner)

    def connected(self, deadline: float) -> Channel:
        """The channel to the writer (or the memory process), connecting if need be.

        Raises SendError (not stored) when there is none in time.
        """
        channel = self.channel
        if channel is not None:
            if not channel.lost_while_idle():
                return channel
            # The next connection counts its requests from one again: no run of this one may stay behind.
            self._lose("the connection ended before the answer")
        try:
            channel, hello = self.directory.connect(self.role, deadline, hello=True)
        except ProtocolError as error:
            raise not_stored(error.code, error.message) from error
        self.hello = hello
        self.max_message_bytes = int(hello["max_message_bytes"])
        self.local_path = local_path(hello, channel.endpoint)
        self._layouts.clear()
        self.channel = channel  # last: whoever sees it may use the rest
        return channel

    def open_local(self) -> LocalSocket | None:
        """Connect to the local socket that the writer told of; None when it takes no more. Tried once a connection."""
        path, self.local_path = self.local_path, ""
        with contextlib.suppress(OSError):
            self.local = LocalSocket(path)
        return self.local

    def disconnect(self) -> None:
        """Close the connection; nothing that was queued in it is sent any more."""
        self.disown()
        self.local_path = ""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def disown(self) -> None:
        """Close the local connection; all that a forked child may do, where it would stay open at the node otherwise."""
        if self.local is not None:
            self.local.close()
            self.local = None

    def exchange(self, header: Callable[[int], bytes], body: bytes, deadline: float) -> dict[str, Any]:
        """One request and its answer on an otherwise quiet connection; ``header`` makes the header for a request id.

        Raises SendError with the outcome.
        """
        while True:
            channel = self.connected(deadline)
            identity = channel.next_id()
            try:
                channel.put([header(identity), body], deadline)
                break
            except NodeUnavailableError as error:
                self.disconnect()
                if time.monotonic() >= deadline:
                    raise not_stored(error.code, error.message) from error
            except BaseException:
                self.disconnect()  # interrupted: half of it may be in the socket
                raise
        return self.answer(channel, identity, deadline)

    def answer(self, channel: Channel, identity: int, deadline: float) -> dict[str, Any]:
        """The answer to request ``identity``, which was handed over. Raises SendError."""
        try:
            while True:
                answer = wire.parse_answer(channel.wait(deadline))
                if answer.get("id") in (identity, None):
                    break
        except ConnectionLost as error:
            self.disconnect()
            raise unknown(error.message) from error
        except BaseException:
            # Interrupted (Ctrl-C) with an answer on its way: the next request must not meet it.
            self.disconnect()
            raise
        if not answer["ok"]:
            raise wire.send_refusal(answer)
        return answer

    def layout(self, topic: str) -> RunLayout:
        """How records of ``topic`` are laid out for this connection's node."""
        layout = self._layouts.get(topic)
        if layout is None:
            hello = self.hello
            layout = self._layouts[topic] = RunLayout(
                topic,
                born_v6=bool(hello["born_host"]["v6"]),
                store_v6=bool(hello["store_host"]["v6"]),
                properties_crc=bool(hello["properties_crc"]),
                mark=self.delivery.mark,
            )
        return layout

    def forget_layouts(self) -> None:
        """Records will carry another mark from now on."""
        self._layouts.clear()

    def in_turn(self, work: Callable[[], _T], deadline: float) -> _T:
        """Do ``work`` as the owner of the connection; the pump steps aside when what it has in flight is answered.

        Raises SendError (not stored) when its turn does not come until ``deadline``.
        """
        line, ticket = self.line, Line.ticket()
        try:
            line.append(ticket)
            if not line.wait(ticket, deadline):
                raise not_stored("CLIENT_BUSY", "other sends of this producer held its connection for too long")
            return work()
        finally:
            line.remove(ticket)
            line.wake()

    # ------------------------------------------------------------ memory topics

    def memory_core(self) -> SendCore:
        """The core for memory topics, made at first use (primary only; lock held)."""
        if self._memory is None:
            self._memory = SendCore(
                self._node,
                timeout_s=self.timeout_s,
                max_pending=self.max_pending,
                max_pending_bytes=self.max_pending_bytes,
                linger_s=self.linger_s,
                ids=self.ids,
                primary=self,
            )
        return self._memory

    def core_for(self, topic: str, deadline: float) -> SendCore:
        """Who sends ``topic``; asks the coordinator the first time (primary only)."""
        core = self.elsewhere.get(topic)
        if core is not None:
            return core
        if self.routes.is_memory(topic, deadline):
            self.redirect(topic, self.memory_core)
            return self.elsewhere[topic]
        return self

    def corrected(self, topic: str, error: SendError) -> bool:
        """After a refused send: whether it went to the wrong process, so that it may be sent once more (primary only)."""
        if error.code != WRONG_ENDPOINT or error.outcome is not Outcome.NOT_STORED:
            return False
        if topic in self.elsewhere:
            self.restore(topic)
        else:
            self.routes.forget(topic)
            self.redirect(topic, self.memory_core)
        return True

    def all_in_flight(self) -> int:
        """Messages pending or in flight in this core and its memory core."""
        return self.outstanding + (0 if self._memory is None else self._memory.outstanding)

    # ------------------------------------------------------------ submitting

    def submit(
        self,
        topic: str,
        queue: int,
        ack: str,
        body: bytes,
        about: tuple[bytes, int, int] | None,
        deadline: float,
    ) -> SendFuture:
        """Add a message to what the pump sends. Blocks while too much is pending; raises SendError when that lasts. Where
        ``room`` is set it raises NoRoom instead.

        Raises InvalidMessageError for a body that is known to be larger than the node allows. ``about``: as of SendFuture.

        All of this is written out, because a stream of sends goes no faster than it does. What is counted changes between
        two calls: an interruption (Ctrl-C) comes after one, and must leave the counts right.
        """
        future: SendFuture = _new(SendFuture)
        future.body = body
        future.about = about
        future.born = _time_ns() // 1_000_000
        size = len(body) + OVERHEAD_BYTES
        if about is not None:
            size += len(about[0])
        future.size_bytes = size
        future.deadline = deadline
        future._state = "PENDING"
        future._run = future._watch = None
        group = (topic, queue, ack)
        while True:
            with self.lock:
                core = self
                if core.elsewhere:
                    core = core.elsewhere.get(topic, core)
                if len(body) > core.max_message_bytes > 0:
                    raise too_large(len(body), core.max_message_bytes)
                if core.outstanding < core.max_pending and core._outstanding_bytes < core.max_pending_bytes:
                    if core.closed:
                        raise CommitMQError("the producer is closed")
                    waiting = core._groups.get(group)
                    if waiting is None:
                        waiting = deque()
                        core._groups[group] = waiting
                    future.sender = core
                    core.outstanding += 1
                    core._outstanding_bytes += size
                    core._pending_bytes += size
                    if deadline < core._earliest:
                        core._earliest = deadline
                    waiting.append(future)
                    if core._pending_bytes >= core._wakes_at:
                        core._wake()
                    return future
                if self.room is not None:
                    self._room_wanted = True
                    raise NoRoom(core.outstanding)
            core._wait_for_space(deadline)

    def submit_batch(self, batch: Batch) -> None:
        """Add a batch to what the pump sends. Blocks while too much is pending; raises SendError when that lasts."""
        while True:
            with self.lock:
                if self.closed:
                    raise CommitMQError("the producer is closed")
                if not self._is_full:
                    self.outstanding += len(batch)
                    self._outstanding_bytes += batch.size_bytes
                    self._earliest = min(self._earliest, batch.deadline)
                    self._batches.append(batch)
                    if self._wakes_at < _NEVER:
                        self._wake()
                    return
            self._wait_for_space(batch.deadline)

    def _enqueue(self, group: _Group, future: SendFuture) -> None:
        """Add one that another core had (lock held)."""
        future.sender = self
        self.outstanding += 1
        size = future.size_bytes
        self._outstanding_bytes += size
        self._pending_bytes += size
        if future.deadline < self._earliest:
            self._earliest = future.deadline
        waiting = self._groups.get(group)
        if waiting is None:
            waiting = self._groups[group] = deque()
        waiting.append(future)
        if self._pending_bytes >= self._wakes_at:
            self._wake()

    def hurry(self, ticket: Ticket) -> None:
        """A thread begins to wait for a result (lock held). It takes its ticket out of ``hurried`` when it has ended."""
        self.hurried.add(ticket)
        if self._lingering is not None or not self._has_pump:
            self._wake()

    def _wake(self) -> None:
        """Have a pump, and one that is awake (lock held)."""
        if self._lingering is not None:
            wake_all([self._lingering])
        else:
            self._bell.ring()
        if not self._has_pump:
            check_fork(self.pid, "producer")
            # Whoever is interrupted in here may have started one, or not: the first that runs is the pump.
            threading.Thread(target=self._pump, name=f"commitmq-producer-{self.role}", daemon=True).start()
            self._has_pump = True
        self._wakes_at = _NEVER

    def redirect(self, topic: str, make_core: Callable[[], SendCore]) -> None:
        """From now on another core sends ``topic``; what is pending of it moves there, in order (primary only)."""
        with self.lock:
            if topic not in self.elsewhere:
                self.elsewhere[topic] = make_core()
            other = self.elsewhere[topic]
            for group in [group for group in self._groups if group[0] == topic]:
                moved = [one for one in self._groups.pop(group) if one._state == "PENDING"]
                size = sum(one.size_bytes for one in moved)
                self._pending_bytes -= size
                self._settle(len(moved), size)
                for future in moved:
                    other._enqueue(group, future)

    def restore(self, topic: str) -> None:
        """Undo :meth:`redirect` for what comes from now on."""
        with self.lock:
            self.elsewhere.pop(topic, None)
        self.routes.forget(topic)

    def forget(self, future: SendFuture) -> None:
        """A pending message was cancelled (lock held)."""
        self._settle(1, future.size_bytes)
        self._pending_bytes -= future.size_bytes

    def in_pump(self) -> bool:
        """True in a pump's own thread, where waiting for a send would wait for itself."""
        me = threading.current_thread()
        return me is self._thread or (self._memory is not None and me is self._memory._thread)

    def flush(self, deadline: float) -> bool:
        """Wait until nothing is pending or in flight; False when ``deadline`` passed before that."""
        return self._wait_until(lambda: not self.all_in_flight(), deadline)

    @property
    def _is_full(self) -> bool:
        return self.outstanding >= self.max_pending or self._outstanding_bytes >= self.max_pending_bytes

    def _wait_for_space(self, deadline: float) -> None:
        """Raises SendError (not stored) when there is none until ``deadline`` (lock not held)."""
        if self.in_pump() or not self._wait_until(lambda: not self._is_full, deadline):
            raise not_stored("CLIENT_BUFFER_FULL", f"{self.outstanding} messages of this producer are still pending")

    def _wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait for something that becomes true when sends are settled; False when ``deadline`` passed (lock not held)."""
        ticket = Line.ticket()
        waiting = self._waiting
        try:
            waiting.append(ticket)
            with self.lock:
                for core in (self, self._memory):
                    if core is not None and core.outstanding and (core._lingering is not None or not core._has_pump):
                        core._wake()
            while not holds():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                ticket.acquire(timeout=min(left_s, _LONG_S))
            return True
        finally:
            waiting.remove(ticket)

    def _settle(self, count: int, size_bytes: int) -> None:
        self.outstanding -= count
        self._outstanding_bytes -= size_bytes
        if self._waiting:
            wake_all(self._waiting)
        if self.primary._waiting and self.primary is not self:
            wake_all(self.primary._waiting)
        if self.primary._room_wanted and self.primary.room is not None:
            self.primary._room_wanted = False
            self.primary.room()

    # ------------------------------------------------------------ the pump

    def _pump(self) -> None:
        with self.lock:
            if self._thread is not None or self.closed:
                return  # there is one: who started this one was interrupted before it could know
            self._thread = threading.current_thread()
            self._has_pump = True
        line, ticket = self.line, Line.ticket()
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        while True:
            with self.lock:
                idle = not self._groups and not self._batches
                if self.closed and not self._groups:
                    return
                self._wakes_at = _ANY if idle else _NEVER
            if idle:
                poller.poll()
                self._bell.clear()
                continue
            self._linger()
            # As in_turn, written out: for a lone message this is a good part of the work.
            try:
                line.append(ticket)
                if line[0] is not ticket:
                    line.wait(ticket, float("inf"))
                self._drive()
            except Exception as error:
                # Nothing here should raise; if it does, no future may be left hanging.
                _log.exception("the producer's sending thread failed", extra={"fields": {}})
                self._give_up(f"the client failed: {error!r}")
                self._fail_pending(True, "CLIENT_ERROR", f"the client failed: {error!r}")
                self._fail_batches(True, "CLIENT_ERROR", f"the client failed: {error!r}")
            finally:
                line.remove(ticket)
                if line:
                    line.wake()

    def _linger(self) -> None:
        """Let messages gather for what is left of the time."""
        while True:
            with self.lock:
                left_s = self._linger_left_s()
                if self.closed or left_s <= 0:
                    self._lingering = None
                    self._wakes_at = _NEVER
                    return
                ticket = self._lingering = Line.ticket()
                self._wakes_at = FULL_RUN_BYTES
            ticket.acquire(timeout=left_s)

    def _linger_left_s(self) -> float:
        """How long the single messages that are pending may still wait for more of them."""
        if not self.linger_s or self._gathered > 0 or self._pending_bytes >= FULL_RUN_BYTES:
            return 0.0
        if self.hurried or self._waiting or self.primary.hurried or self.primary._waiting:
            return 0.0
        if self._batches or len(self._flying) > self._flying_messages:
            return 0.0  # the connection is in use, and nobody would look when the time is over
        return min(self._gathered_at + self.linger_s, self._earliest) - time.monotonic()

    def _drive(self) -> None:
        """Send and receive until nothing is in flight and nothing may be sent now (connection owned)."""
        line = self.line
        owed = True  # those that come behind it without an end must not keep the pump from its turn
        while not self.closed:
            if owed or len(line) < 2 or self.delivery.is_repeating:
                self._fill()
                owed = False
            with self.lock:
                if not self._flying:
                    nothing = not (self._groups or self._batches) or self._linger_left_s() > 0
                    if not self.delivery.is_repeating and (nothing or len(line) > 1):
                        break
                    continue
                self._wakes_at = _NEVER
                if len(self._flying) < self.window and len(line) < 2:
                    self._wakes_at = FULL_RUN_BYTES if self._flying_messages else _ANY
            self._receive()
            if time.monotonic() >= self._earliest:
                self._expire()
        if time.monotonic() >= self._earliest:
            self._expire()

    @property
    def is_flying(self) -> bool:
        """Whether a run was handed over and not answered (connection owned)."""
        return bool(self._flying)

    def _fill(self) -> None:
        if not self.delivery.may_send(self):
            return
        while len(self._flying) < self.window:
            singles = bool(self._groups) and (not self._flying_messages or self._pending_bytes >= FULL_RUN_BYTES)
            singles = singles and self._linger_left_s() <= 0
            if not singles and not self._batches:
                return
            if self._flying and self.channel is not None and self.channel.lost():
                self._lose("the connection ended before the answer")
                return
            now = time.monotonic()
            try:
                channel = self.connected(now + 0.5)
            except SendError as error:
                # Stay pending: the node may come back within their time.
                everything = error.code not in ("NODE_UNAVAILABLE", "SERVICE_NOT_AVAILABLE")
                self._fail_pending(everything, error.code, error.message)
                self._fail_batches(everything, error.code, error.message)
                return
            if not self._groups and not self._batches:
                return  # the connection was found lost meanwhile, and they with it
            if self._batches and not (singles and self._singles_next and not self.delivery.in_submission_order):
                self._singles_next = True
                if not self._send_batch(channel, now + 0.5):
                    return
                continue
            if not self._groups:
                return
            self._singles_next = False
            if self._gathered <= 0:
                self._gathered, self._gathered_at = len(self._groups), time.monotonic()
            self._gathered -= 1
            group = next(iter(self._groups))
            topic, queue, ack = group
            if self.is_primary and self.routes.is_memory(topic, now + 1.0):
                self.redirect(topic, self.memory_core)
                continue
            if queue < 0:
                try:
                    queue = self.routes.next_queue(topic, now + 1.0)
                except SendError as error:
                    if error.code == "NODE_UNAVAILABLE":
                        self._fail_pending(False, error.code, error.message)
                    else:
                        self._fail_group(group, error)
                    continue
            futures = self._take(group)
            if futures:
                self._send_run(channel, topic, queue, ack, group, futures)
                if self.channel is not channel:
                    return

    def _take(self, group: _Group) -> list[SendFuture]:
        """The next messages of ``group``, now running; those too large for the node fail here."""
        futures: list[SendFuture] = []
        refused: list[SendFuture] = []
        limit = self.max_message_bytes
        left = MAX_PUMP_RUN_BYTES
        with self.lock:
            waiting = self._groups.pop(group)
            while waiting and len(futures) < MAX_PUMP_RUN_MESSAGES:
                future = waiting[0]
                left -= future.size_bytes
                if left < 0 and futures:
                    left += future.size_bytes
                    break
                waiting.popleft()
                if future._state != "PENDING":
                    left += future.size_bytes
                elif future.size_bytes > limit and len(future.body) > limit:
                    left += future.size_bytes
                    self._pending_bytes -= future.size_bytes
                    future._state = "RUNNING"  # it cannot be cancelled any more, and so is taken off the count once
                    refused.append(future)
                else:
                    future._state = "RUNNING"
                    futures.append(future)
            self._pending_bytes -= MAX_PUMP_RUN_BYTES - left
            if waiting:
                self._groups[group] = waiting  # at the end: other topics and queues have their turn first
        if refused:
            self.fail(
                refused, lambda: not_stored("MESSAGE_ILLEGAL", f"the body is larger than the {limit} bytes allowed")
            )
        return futures

    def _send_run(
        self, channel: Channel, topic: str, queue: int, ack: str, group: _Group, futures: list[SendFuture]
    ) -> None:
        fields = {
            "v": wire.PROTOCOL_VERSION,
            "op": "append",
            "topic": topic,
            "queue": queue,
            "count": len(futures),
            "ack": ack,
        }
        unique = self.ids.block(len(futures))
        try:
            with self.delivery.numbered(topic, queue, fields) as sequence:
                sizes, data = encode_messages(self.layout(topic), queue, futures, unique, sequence)
        except SendError as error:
            # (Bound: the name goes with the except block.)
            code, sentence = error.code, error.message
            self.fail(futures, lambda: not_stored(code, sentence))
            return
        except Exception as error:
            # What a message may be was checked when it was sent. Should one get this far, its run ends with it, and no more.
            reason = f"the messages cannot be encoded: {error!r}"
            self.fail(futures, lambda: not_stored("CLIENT_ERROR", reason))
            return
        run = MessagesRun(self, group, queue, futures, sizes, unique, fields, data)
        run.sequence = sequence
        self._hand_over(channel, run)

    def _send_batch(self, channel: Channel, put_deadline: float) -> bool:
        """Send the next run of the first batch that waits; False when there is no use in going on at once."""
        batch = self._batches[0]
        try:
            run = batch.next_run(put_deadline)
        except NotYet as error:
            self._fail_batches(False, "NODE_UNAVAILABLE", str(error))
            return False
        if run is not None and not self._hand_over(channel, run):
            return False
        self.finish_batch(batch)
        return self.channel is channel

    def _hand_over(self, channel: Channel, run: Run) -> bool:
        """Send ``run``; one that the connection does not take waits for the next one, before what came after it."""
        try:
            self.put(channel, run)
        except NodeUnavailableError as error:
            self.delivery.not_taken(run)
            self._lose(error.message)
            return False
        self.delivery.handed_over(run)
        return True

    def put(self, channel: Channel, run: Run) -> None:
        """Hand ``run`` to the connection (connection owned). Raises NodeUnavailableError: it did not take it."""
        identity = channel.next_id()
        channel.put([orjson.dumps({**run.fields, "id": identity}), run.data], time.monotonic() + 0.5)
        self._flying[identity] = run
        self._flying_messages += isinstance(run, MessagesRun)

    def put_back(self, group: _Group, futures: list[SendFuture]) -> None:
        """Messages of a run that is certainly not stored wait again, before those that came after them."""
        with self.lock:
            waiting = self._groups.setdefault(group, deque())
            for one in reversed(futures):
                if one._state == "RUNNING":
                    one._state = "PENDING"
                    self._pending_bytes += one.size_bytes
                    self._earliest = min(self._earliest, one.deadline)
                    waiting.appendleft(one)
            if not waiting:
                del self._groups[group]

    def put_back_batch(self, batch: Batch) -> None:
        """A run of ``batch`` is to be sent again, before other batches'."""
        with self.lock:
            if batch not in self._batches:
                self._batches.appendleft(batch)
                self._earliest = min(self._earliest, batch.deadline)

    def finish_batch(self, batch: Batch) -> None:
        """Let go of a batch that has nothing more to send, and tell its outcome when all of it has one."""
        if batch.more:
            return
        with self.lock, contextlib.suppress(ValueError):
            self._batches.remove(batch)
        if not batch.in_flight:
            batch.finish()

    def settle_batch(self, batch: Batch) -> None:
        """It has its outcome or was cancelled: it takes no room any more."""
        with self.lock:
            if not batch.is_settled:
                batch.is_settled = True
                self._settle(len(batch), batch.size_bytes)

    def _receive(self) -> None:
        """Wait for answers, a ring of the bell or one tick; take all answers that are there."""
        channel = self.channel
        assert channel is not None
        poller = zmq.Poller()
        poller.register(channel.socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        ready = {sock for sock, _ in poller.poll(_TICK_MS)}
        if self._bell.fd in ready:
            self._bell.clear()
        if not ready and channel.lost():
            self._lose("the connection ended before the answer")
            return
        if channel.socket not in ready:
            return
        while True:
            try:
                frame = channel.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                answer = wire.parse_answer(frame)
            except ProtocolError as error:
                self._lose(error.message)
                return
            self._take_answer(answer)
            if not self._flying:
                return

    def _take_answer(self, answer: dict[str, Any]) -> None:
        run = self._flying.pop(answer.get("id", -1), None)
        if run is None:
            if not answer["ok"] and answer.get("id") is None:
                self._lose(f"the node could not read a request: {answer.get('error')}")
            return
        self._flying_messages -= isinstance(run, MessagesRun)
        if answer["ok"]:
            run.stored(answer)
        else:
            self.delivery.refused(self, run, answer)

    def refuse(self, run: Run, answer: dict[str, Any]) -> None:
        """The node has refused ``run`` for good (connection owned)."""
        self.routes.forget(run.topic)
        if answer.get("code") == WRONG_ENDPOINT and not self.is_primary:
            self.primary.restore(run.topic)
        run.failed(lambda: wire.send_refusal(answer), answer)

    def resolve(
        self,
        futures: list[SendFuture],
        finish: Callable[[list[SendFuture]], tuple[list[SendFuture], list[SendFuture]]],
    ) -> None:
        """Resolve the futures of a stored run by ``finish``, which returns as send_future.finish_run."""
        size_bytes = sum([one.size_bytes for one in futures])
        with self.lock:
            # Some may have run out of time before: they are settled already.
            called, before = finish(futures)
            self._settle(len(futures) - len(before), size_bytes - sum([one.size_bytes for one in before]))
        if called:
            run_callbacks(called)

    def _lose(self, sentence: str) -> None:
        """The connection is of no more use; the delivery policy says what becomes of the runs in flight."""
        self.disconnect()
        self.delivery.lost(self._take_flying(), sentence)

    def _take_flying(self) -> list[Run]:
        flying, self._flying, self._flying_messages = self._flying, {}, 0
        return list(flying.values())

    def _give_up(self, sentence: str) -> None:
        """Nothing that is in flight will be asked about again."""
        self.disconnect()
        self.delivery.give_up(self._take_flying(), sentence)

    def _expire(self) -> None:
        """Fail what is out of time; a run of which nobody waits any more takes the connection with it."""
        now = time.monotonic()
        self._fail_pending(False, "TIMEOUT", "not sent in time")
        self._fail_batches(False, "TIMEOUT", "not sent in time")
        deadlines = [run.expire(now, no_answer) for run in list(self._flying.values())]
        if NEVER_S in deadlines:
            self._lose("no answer in time")
        earliest = min([*deadlines, self.delivery.expire(now)], default=NEVER_S)
        with self.lock:
            pending = min((one.deadline for waiting in self._groups.values() for one in waiting), default=NEVER_S)
            batches = min((one.deadline for one in self._batches), default=NEVER_S)
            self._earliest = min(earliest, pending, batches)

    def _fail_pending(self, everything: bool, code: str, sentence: str) -> None:
        """Fail pending messages as not stored: ``everything``, else those out of time."""
        now = time.monotonic()
        failed: list[SendFuture] = []
        with self.lock:
            if not everything and now < self._earliest:
                return  # whoever sends waits for this lock
            for group, waiting in list(self._groups.items()):
                late = [one for one in waiting if everything or one.deadline <= now]
                if not late:
                    continue
                gone = set(map(id, late))
                left = deque(one for one in waiting if id(one) not in gone)
                if left:
                    self._groups[group] = left
                else:
                    del self._groups[group]
                late = [one for one in late if one._state == "PENDING"]
                for one in late:
                    one._state = "RUNNING"
                    self._pending_bytes -= one.size_bytes
                failed += late
        self.fail(failed, lambda: not_stored(code, sentence))

    def _fail_batches(self, everything: bool, code: str, sentence: str) -> None:
        """As :meth:`_fail_pending`, for batches none of whose runs is in flight (connection owned)."""
        now = time.monotonic()
        for batch in list(self._batches):
            if not batch.in_flight and (everything or batch.deadline <= now):
                batch.fail(not_stored(code, sentence))
                self.finish_batch(batch)

    def _fail_group(self, group: _Group, error: SendError) -> None:
        with self.lock:
            waiting = [one for one in self._groups.pop(group, ()) if one._state == "PENDING"]
            for one in waiting:
                one._state = "RUNNING"
                self._pending_bytes -= one.size_bytes
        self.fail(
            waiting,
            lambda: send_error(error.code, error.message, error.outcome, error.retry_after_ms),
        )

    def fail(self, futures: list[SendFuture], make_error: MakeError) -> None:
        """Fail messages, each with an error of its own; those that are done already stay as they are."""
        # In small steps: whoever sends, an event loop perhaps, waits for the lock.
        for start in range(0, len(futures), _FAIL_STEP):
            with self.lock:
                live = [one for one in futures[start : start + _FAIL_STEP] if not one.done()]
                called = fail_all(live, make_error)
                self._settle(len(live), sum(one.size_bytes for one in live))
            run_callbacks(called)

    # ------------------------------------------------------------ the end

    def close(self, deadline: float) -> None:
        """Send what is pending until ``deadline``, fail the rest, end the thread, close every socket."""
        if self._memory is not None:
            self._memory.close(deadline)
        if self.pid != os.getpid():
            self.closed = True  # the sockets are the parent's
            return
        with self.lock:
            if self.closed:
                return
        if not self.in_pump():
            self.flush(deadline)
        with self.lock:
            self.closed = True
            thread = self._thread
            self._bell.ring()
        self._fail_pending(True, "CLIENT_CLOSED", "the producer was closed before the message was sent")
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        ticket = Line.ticket()
        try:
            self.line.append(ticket)
            # Another thread's send may wait for its answer until its time is over, and a socket must not be closed meanwhile.
            if not self.line.wait(ticket, time.monotonic() + self.timeout_s + 1.0):
                _log.warning("the producer was closed while a send was under way", extra={"fields": {}})
                return
            self._give_up("the producer was closed before the answer")
            self._fail_batches(True, "CLIENT_CLOSED", "the producer was closed before the batch was sent")
            self.directory.close()
            if self.is_primary:
                self.routes.close()
            if thread is None or not thread.is_alive():
                self._bell.close()
        finally:
            self.line.remove(ticket)
            self.line.wake()
