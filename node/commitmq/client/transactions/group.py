"""A producer as a member of its group: its link to the transaction process, and its answers to questions."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import inspect
import itertools
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
import zmq

from commitmq.client.checks import Bell
from commitmq.client.results import SendResult
from commitmq.client.sending.asked import SystemProperties
from commitmq.client.transactions.half_message import HalfMessage, Listener, TransactionState, state_of
from commitmq.errors import (
    CommitMQError,
    InvalidMessageError,
    Outcome,
    ProtocolError,
    RequestError,
    SendError,
    send_error,
)
from commitmq.format.constants import Property
from commitmq.format.record import decode_record
from commitmq.log import get_log
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel, check_fork
from commitmq.protocol.directory import Directory
from commitmq.store.metadata.topic_config import validate_group

if TYPE_CHECKING:
    from commitmq.client.tracing import Tracer


_log = get_log("producer")
_THREADS: Final = 2
_MOST_CHECKS: Final = 2_000  # as RocketMQ's producer; a question that finds no room comes again
_MOST_DECISIONS: Final = 10_000

Check = Callable[[HalfMessage], object]


@dataclass(frozen=True, slots=True)
class Question:
    """A half message, and the place that an answer must name."""

    message: HalfMessage
    queue_offset: int
    physical_offset: int


Reply = Callable[[Question, TransactionState], None]


class TransactionChecker:
    """Answers the node's questions: from what this producer knows, else by the program's listener, in a few threads.

    ``listener`` may be None: then only transactions that this producer ended itself are answered.
    """

    def __init__(self, listener: Check | None, reply: Reply) -> None:
        self._listener, self._reply = listener, reply
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._decisions: OrderedDict[str, TransactionState] = OrderedDict()
        self._waiting: queue.Queue[Question | None] = queue.Queue(_MOST_CHECKS)
        self._threads = 0

    def begin(self, unique_id: str) -> None:
        """The program is at work on this transaction: a question has to wait."""
        with self._lock:
            self._running.add(unique_id)

    def decide(self, unique_id: str, state: TransactionState) -> None:
        """The program has decided. The node may not know it yet. UNKNOWN: it has not, and is done with it."""
        with self._lock:
            self._running.discard(unique_id)
            if state is not TransactionState.UNKNOWN:
                self._decisions[unique_id] = state
                if len(self._decisions) > _MOST_DECISIONS:
                    self._decisions.popitem(last=False)

    def settle(self, unique_id: str) -> None:
        """The node knows."""
        with self._lock:
            self._decisions.pop(unique_id, None)

    def ask(self, question: Question) -> None:
        """Answer now, later in a thread, or not at all. Does not wait."""
        unique_id = question.message.unique_id
        with self._lock:
            if unique_id in self._running:
                return
            state = self._decisions.get(unique_id)
        if state is not None:
            self._reply(question, state)
            return
        if self._listener is None:
            return
        try:
            self._waiting.put_nowait(question)
        except queue.Full:
            return
        if self._threads < _THREADS:
            self._threads += 1
            name = f"commitmq-transaction-check-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """Ask the listener no more. A call under way continues."""
        self._listener = None
        for _ in range(self._threads):
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                return  # the threads see that there is no listener

    def _work(self) -> None:
        while (question := self._waiting.get()) is not None and (listener := self._listener) is not None:
            try:
                found = listener(question.message)
                if inspect.isawaitable(found):
                    found = asyncio.run(_awaited(found))
                state = state_of("check", found)
            except Exception:
                _log.exception("the check of a transaction failed", unique_id=question.message.unique_id)
                continue
            if state is not TransactionState.UNKNOWN:
                self._reply(question, state)


async def _awaited(found: Awaitable[object]) -> object:
    return await found


_ROLE: Final = "transaction"
_CONNECT_S: Final = 1.0
_PAUSE_S: Final = 0.2
_LOOK_S: Final = 1.0
_FIRST_INTERVAL_S: Final = 5.0
_MOST_WAITING: Final = 10_000
_FEW: Final = 1_000
_numbers = itertools.count()


@dataclass(slots=True)
class _AskedEnd:
    fields: dict[str, Any]
    future: Future[dict[str, Any]]
    deadline: float
    request: int = 0
    """The request that waits for its answer; 0 while none does."""
    is_done: bool = False


class _Moments:
    """Ends by a moment at which something is due for them. An end costs the logarithm of their number at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _AskedEnd]] = []
        """Moment, a number that no other one has, end. Those that are done by then count no more."""
        self._compact_at = _FEW

    def add(self, when: float, end: _AskedEnd) -> None:
        if len(self._heap) >= self._compact_at:  # those that are done would stay until their moments come
            self._heap = [one for one in self._heap if not one[2].is_done]
            heapq.heapify(self._heap)
            self._compact_at = max(_FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (when, next(_numbers), end))

    def first(self) -> float | None:
        """The next moment; None without one."""
        while self._heap and self._heap[0][2].is_done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> _AskedEnd | None:
        """An end whose moment has come; None without one."""
        first = self.first()
        return None if first is None or first > now else heapq.heappop(self._heap)[2]

    def clear(self) -> list[_AskedEnd]:
        """Forget all; returns those that are not done."""
        ends = [end for *_, end in self._heap if not end.is_done]
        self._heap.clear()
        return ends


class TransactionLink:
    """The connection of a producer to the node's transaction process, with a thread of its own.

    It registers the producer with its group, again and again, so that the node can ask it. It sends ends and delivers
    their answers. An end may be sent twice: the node says of the second one that it knows it. So after a lost
    connection, or a death of the process, every end without an answer is sent again until its time is over.

    ``ask`` is called in the thread for each question of the node; it must not wait.
    """

    def __init__(self, node: str | None, group: str, ask: Callable[[Question], None]) -> None:
        self._directory = Directory(node)
        self._group, self._ask = group, ask
        self._lock = threading.Lock()
        self._new: deque[_AskedEnd] = deque()
        self._ready: deque[_AskedEnd] = deque()
        """To be sent now."""
        self._later = _Moments()
        """To be sent at a moment: the node asked to wait."""
        self._deadlines = _Moments()
        """Of all ends without an answer."""
        self._sent: dict[int, _AskedEnd] = {}
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._channel: Channel | None = None
        self._register_at = 0.0
        self._interval_s = _FIRST_INTERVAL_S
        self._next_try = 0.0

    def start(self) -> None:
        """Connect and register, if that has not begun."""
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="commitmq-transactions", daemon=True)
                self._thread.start()

    def end(self, fields: dict[str, Any], deadline: float) -> Future[dict[str, Any]]:
        """Send an end. The future gets the node's answer or a SendError, at ``deadline`` (monotonic) at the latest."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._closing or len(self._new) >= _MOST_WAITING:
                why = "the producer is closed" if self._closing else f"{_MOST_WAITING} ends of transactions are pending"
                future.set_exception(send_error("CLIENT_BUSY", why, Outcome.UNKNOWN))
                return future
            self._new.append(_AskedEnd(fields, future, deadline))
            self._bell.ring()  # with the lock: the thread closes the bell with it
        self.start()
        return future

    def close(self, timeout_s: float) -> None:
        """End the thread. Ends without an answer fail."""
        with self._lock:
            self._closing = True
            thread = self._thread
            self._bell.ring()
        if thread is None:
            self._bell.close()
        elif thread is not threading.current_thread():
            thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except CommitMQError as error:
                    self._lose()
                    self._next_try = time.monotonic() + _PAUSE_S
                    if isinstance(error, ProtocolError) and not error.retryable:
                        self._fail_all(error)
                except Exception as error:  # nobody else would end the waits for an answer
                    _log.exception("the connection to the transaction process failed", error=repr(error))
                    self._lose()
                    self._next_try = time.monotonic() + _PAUSE_S
        finally:
            self._leave()
            self._fail_all(RequestError("CLIENT_CLOSED", "the producer was closed before the node answered"))
            self._directory.close()
            with self._lock:
                self._bell.close()

    def _turn(self) -> None:
        self._take_new()
        now = time.monotonic()
        self._expire(now)
        if self._channel is not None and self._channel.lost():
            self._lose()
        if self._channel is None:
            if now < self._next_try:
                self._wait(self._next_try - now)
                return
            self._connect(now)
        self._register(now)
        self._send(now)
        self._wait(self._pause(now))
        while self._receive():
            pass

    def _take_new(self) -> None:
        with self._lock:
            new = list(self._new)
            self._new.clear()
        for end in new:
            self._deadlines.add(end.deadline, end)
        self._ready.extend(new)

    def _connect(self, now: float) -> None:
        self._directory.request("mover.start", {"role": _ROLE}, timeout_s=_CONNECT_S)
        self._channel, _ = self._directory.connect(_ROLE, now + _CONNECT_S)
        self._register_at = 0.0

    def _register(self, now: float) -> None:
        if now >= self._register_at and self._put({"op": "transaction.register", "id": 0, "group": self._group}):
            self._register_at = now + self._interval_s

    def _send(self, now: float) -> None:
        while (end := self._later.pop(now)) is not None:
            self._ready.append(end)
        assert self._channel is not None
        while self._ready:
            end = self._ready.popleft()
            if end.is_done:
                continue
            number = self._channel.next_id()
            if not self._put({"op": "transaction.end", "id": number, **end.fields}):
                self._ready.appendleft(end)
                return
            end.request = number
            self._sent[number] = end

    def _put(self, header: dict[str, Any]) -> bool:
        assert self._channel is not None
        try:
            self._channel.socket.send(wire.pack(header), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> bool:
        assert self._channel is not None
        try:
            frames = self._channel.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        header = wire.parse_answer(frames[0]) if len(frames) == 1 else _question_header(frames)
        if len(frames) > 1:
            self._hear(header, frames[1])
        elif header.get("id") == 0:
            if not header["ok"]:
                self._register_at = time.monotonic() + self._interval_s
            else:
                self._interval_s = max(0.05, int(header["session_timeout_ms"]) / 3_000)
                self._register_at = min(self._register_at, time.monotonic() + self._interval_s)
        elif (end := self._sent.pop(header.get("id", -1), None)) is not None:
            self._answered(end, header)
        return True

    def _hear(self, header: dict[str, Any], record: bytes) -> None:
        try:
            message = HalfMessage.of(decode_record(record))
            question = Question(message, int(header["queue_offset"]), int(header["physical_offset"]))
        except (CommitMQError, KeyError, ValueError, TypeError) as error:
            _log.warning("the node asked about a transaction in a form that is not understood", error=repr(error))
            return
        self._ask(question)

    def _answered(self, end: _AskedEnd, answer: dict[str, Any]) -> None:
        wanted = end.fields["decision"]
        if answer["ok"] or (answer.get("code") == "TRANSACTION_ENDED" and answer.get("decision") == wanted):
            _finish(end, answer)
            return
        retry_ms = answer.get("retry_after_ms")
        if retry_ms is not None and time.monotonic() + retry_ms / 1000 < end.deadline:
            end.request = 0
            self._later.add(time.monotonic() + retry_ms / 1000, end)
            return
        _finish(end, _refused(answer, wanted))

    def _pause(self, now: float) -> float:
        moments = [self._register_at, now + _LOOK_S, self._deadlines.first(), self._later.first()]
        if self._ready:  # the connection takes no more at the moment
            moments.append(now + 0.01)
        return max(0.0, min(one for one in moments if one is not None) - now)

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        if self._channel is not None:
            poller.register(self._channel.socket, zmq.POLLIN)
        if self._bell.fd in dict(poller.poll(int(seconds * 1000) + 1)):
            self._bell.clear()

    def _expire(self, now: float) -> None:
        while (end := self._deadlines.pop(now)) is not None:
            self._sent.pop(end.request, None)
            _finish(end, _overdue())

    def _lose(self) -> None:
        """The connection ended: what was not answered is sent again over the next one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for end in self._sent.values():
            end.request = 0
        self._ready.extendleft(reversed(self._sent.values()))
        self._sent.clear()

    def _fail_all(self, error: RequestError) -> None:
        self._take_new()
        self._sent.clear()
        self._ready.clear()
        self._later.clear()
        for end in self._deadlines.clear():
            _finish(end, send_error(error.code, error.message, Outcome.UNKNOWN))

    def _leave(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(zmq.ZMQError):
                if self._put({"op": "transaction.leave", "id": 0}):
                    self._channel.socket.poll(100)
            self._channel.close()
            self._channel = None


def _question_header(frames: list[bytes]) -> dict[str, Any]:
    try:
        header = orjson.loads(frames[0])
    except orjson.JSONDecodeError:
        header = None
    return header if isinstance(header, dict) else {}


def _finish(end: _AskedEnd, outcome: dict[str, Any] | SendError) -> None:
    end.is_done = True
    if not end.future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, SendError):
        end.future.set_exception(outcome)
    else:
        end.future.set_result(outcome)


def _overdue() -> SendError:
    return send_error(
        "TIMEOUT", "the node did not answer in time; how the transaction ends is not known", Outcome.UNKNOWN
    )


def _refused(answer: dict[str, Any], wanted: str) -> SendError:
    code = str(answer.get("code", "SYSTEM_ERROR"))
    ended = code == "TRANSACTION_ENDED" and answer.get("decision") is not None
    gone = code == "TOPIC_NOT_EXIST"
    outcome = Outcome.UNKNOWN
    if ended or gone:
        outcome = Outcome.STORED if answer.get("decision") == "commit" else Outcome.NOT_STORED
    sentence = str(answer.get("error", "the node gave no reason"))
    return send_error(code, f"{wanted}: {sentence}", outcome, retry_after_ms=answer.get("retry_after_ms"))


Content = Callable[[], tuple[bytes, Mapping[str, str]]]
"""Body and properties of a transaction's message."""


class TransactionGroup:
    """``listener`` answers for transactions of the group; with one the producer registers at once. ``tracer``: tells of
    ends.
    """

    def __init__(self, node: str | None, group: str, listener: Listener | None, tracer: Tracer | None = None) -> None:
        """Raises InvalidMessageError for a bad name, TypeError for a listener that cannot check."""
        validate_group(group)
        self.group = group
        self._tracer = tracer
        self.listener = listener
        self.checks = TransactionChecker(_check_of(listener), self._reply)
        self._link = TransactionLink(node, group, self.checks.ask)
        self._pid = os.getpid()
        if listener is not None:
            self._link.start()

    def check_process(self) -> None:
        """Raise CommitMQError in a forked child, whose parent has the threads and their locks."""
        check_fork(self._pid, "producer")

    def asked(self, delay: SystemProperties | None) -> SystemProperties:
        """What a half message asks of the node; ``delay``: what comes into effect at the commit."""
        mine = SystemProperties.of(
            "transaction", {Property.TRANSACTION_PREPARED: "true", Property.PRODUCER_GROUP: self.group}
        )
        if delay is None:
            return mine
        return SystemProperties(f"{mine.key} {delay.key}", mine.encoded + delay.encoded, mine.json + delay.json)

    def end(self, half: SendResult, state: TransactionState, deadline: float) -> Future[dict[str, Any]]:
        """Tell the node how the transaction of ``half`` ends."""
        return self._end(half.queue_offset, half.physical_offset, state, deadline, ack=half.ack)

    def trace_end(self, half: SendResult, content: Content, state: TransactionState) -> None:
        """The transaction of ``half`` has ended so: a record of the trace, if there is one."""
        if self._tracer is not None:
            _, properties = content()
            self._tracer.ended(self.group, half.topic, half.unique_id, properties, state.value, msg_id=half.msg_id)

    def check_executes(self) -> None:
        """Raise InvalidMessageError unless the listener has ``execute``."""
        if not callable(getattr(self.listener, "execute", None)):
            raise InvalidMessageError("send_in_transaction needs a producer whose transaction_listener has execute")

    def execute(self, half: SendResult, body: bytes, properties: Mapping[str, str], argument: Any) -> TransactionState:
        """Run the listener's local transaction. Raises what it raises, and ValueError for what is no state."""
        message = HalfMessage(half.topic, half.queue, body, half.unique_id, dict(properties))
        return state_of("execute", self.listener.execute(message, argument))  # type: ignore[union-attr]

    async def execute_async(
        self, half: SendResult, body: bytes, properties: Mapping[str, str], argument: Any
    ) -> TransactionState:
        """As :meth:`execute`, for a listener whose ``execute`` may be a coroutine function."""
        message = HalfMessage(half.topic, half.queue, body, half.unique_id, dict(properties))
        state = self.listener.execute(message, argument)  # type: ignore[union-attr]
        return state_of("execute", await state if inspect.isawaitable(state) else state)

    def close(self, timeout_s: float) -> None:
        """End the threads."""
        self.checks.close()
        self._link.close(timeout_s)

    def _reply(self, question: Question, state: TransactionState) -> None:
        deadline = time.monotonic() + 3.0  # a later question comes anyway
        sent = self._end(question.queue_offset, question.physical_offset, state, deadline, from_check=True)
        sent.add_done_callback(lambda done: None if done.exception() else self._replied(question, state))

    def _replied(self, question: Question, state: TransactionState) -> None:
        message = question.message
        self.checks.settle(message.unique_id)
        if self._tracer is not None:
            self._tracer.ended(
                self.group, message.topic, message.unique_id, message.properties, state.value, from_check=True
            )

    def _end(
        self, queue_offset: int, physical_offset: int, state: TransactionState, deadline: float, **more: Any
    ) -> Future[dict[str, Any]]:
        fields = {
            "group": self.group,
            "queue_offset": queue_offset,
            "physical_offset": physical_offset,
            "decision": state.value,
            **more,
        }
        return self._link.end(fields, deadline)


def _check_of(listener: Listener | None) -> Check | None:
    if listener is None:
        return None
    check = getattr(listener, "check", listener)
    if not callable(check):
        raise TypeError(f"transaction_listener must be a function or have check, not {type(listener).__name__}")
    found: Check = check
    return found
