"""The loop of ``ShareConsumer.run``: it receives, delivers to a pool of handlers, and settles what they say.

A thread of the engine's own acknowledges, returns and extends, many messages in one request, so that no handler waits
for the node.

The settings of a share consumer and of its handlers: names, types, checks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypedDict

from commitmq.client import checks
from commitmq.client.handling.consume_result import Backoff, ConsumeResult, HandlerResult, check_backoff, delay_of
from commitmq.client.handling.settings import HandlerCounts
from commitmq.client.selector import MessageSelector, selector
from commitmq.client.sharing.receipt import receipt_of
from commitmq.errors import CorruptRecordError, NodeUnavailableError, ProtocolError, RequestError
from commitmq.log import get_log
from commitmq.store.metadata.topic_config import validate_group, validate_topic

if TYPE_CHECKING:
    from commitmq.client.message import Message


_MOST_WORKERS: Final = 10_000
BACKOFF_S: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's delays of a message that a POP consumer failed on (remoting 5.10)."""


class ShareOptions(TypedDict, total=False):
    """How a share consumer receives; see :class:`commitmq.ShareConsumer`."""

    invisible_s: float
    ordered: bool
    start: str
    filter: str | MessageSelector
    check_crc: bool
    timeout_s: float


class ShareRunOptions(TypedDict, total=False):
    """How messages are passed to a handler; see :meth:`commitmq.ShareConsumer.run`."""

    workers: int
    backoff: Backoff
    max_unfinished: int
    stop_timeout_s: float


class ShareSettings:
    """Checked :class:`ShareOptions`."""

    def __init__(
        self,
        topics: str | Iterable[str],
        group: str,
        *,
        invisible_s: float = 60.0,
        ordered: bool = False,
        start: str = "earliest",
        filter: str | MessageSelector = "*",
        check_crc: bool = True,
        timeout_s: float = 10.0,
    ) -> None:
        """Raises ValueError that names a wrong setting."""
        self.topics = list(dict.fromkeys([topics] if isinstance(topics, str) else topics))
        if not self.topics:
            raise ValueError("a share consumer needs at least one topic")
        for topic in self.topics:
            validate_topic(topic)
        validate_group(group)
        self.group = group
        self.invisible_s = checks.seconds("invisible_s", invisible_s)
        if not isinstance(ordered, bool):
            raise ValueError(f"ordered must be True or False, not {ordered!r}")
        self.ordered = ordered
        if start not in ("earliest", "latest"):
            raise ValueError(f"start must be earliest or latest, not {start!r}")
        self.start = start
        self.selector = selector(filter)
        self.check_crc = check_crc
        self.timeout_s = checks.seconds("timeout_s", timeout_s)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """:class:`ShareRunOptions` with the defaults."""

    workers: int = 20
    backoff: Backoff = None
    max_unfinished: int = 100
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no setting."""
        for name in ("workers", "max_unfinished"):
            if checks.integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.workers > _MOST_WORKERS:
            raise ValueError(f"workers must be at most {_MOST_WORKERS}, not {self.workers}")
        checks.seconds("stop_timeout_s", self.stop_timeout_s, zero=True)
        backoff = BACKOFF_S if self.backoff is None else self.backoff
        object.__setattr__(self, "backoff", check_backoff(backoff))


_WAIT_S: Final = 1.0
_AWAY_S: Final = 1.0
_LOOK_S: Final = 0.5
_AT_ONCE: Final = 200

_log = get_log("consumer")


class SharePool(Protocol):
    """Who calls the handler."""

    def start(self) -> None: ...
    def is_inside(self) -> bool: ...
    def report(self, message: Message | None, error: BaseException) -> None: ...
    def end(self, deadline: float) -> None: ...


class ShareSource(Protocol):
    """The consumer, as far as the engine uses it."""

    @property
    def times(self) -> tuple[float, float]: ...
    def max_retries(self) -> int: ...
    def take_some(self, max_messages: int, wait_s: float) -> list[Message]: ...
    def ack(self, messages: list[Message]) -> list[Message]: ...
    def nack(self, messages: list[Message], delay: float | None = None, *, dead: bool = False) -> list[Message]: ...
    def give_back(self, messages: list[Message]) -> list[Message]: ...
    def extend(self, messages: list[Message]) -> list[Message]: ...


@dataclass(slots=True, eq=False)
class UnsettledMessage:
    """A message that was received and is not settled."""

    message: Message
    verdict: HandlerResult | None = None
    is_untried: bool = False
    """Whether it comes back without a handler having had it."""


class ShareEngine:
    """The loop of ``ShareConsumer.run``. ``lock`` guards everything; a pool's condition shares it."""

    def __init__(self, consumer: ShareSource, settings: RunSettings) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.wake: Callable[[int], None] = lambda count: None
        self.is_stopping = False
        self._consumer = consumer
        self._ready: deque[UnsettledMessage] = deque()
        self._held: dict[UnsettledMessage, None] = {}
        self._judged: deque[UnsettledMessage] = deque()
        self._running = self._handled = self._failed = self._dead = 0
        self._is_over = False
        self._changed = threading.Condition(self.lock)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="commitmq-share-settle", daemon=True)
        self._pool: SharePool | None = None
        self._looper = 0
        self.finished: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ the loop

    def loop(self, pool: SharePool) -> None:
        """Until :meth:`stop`. Raises what a receive raises, but for a node that is away."""
        self._pool, self._looper = pool, threading.get_ident()
        self._thread.start()
        pool.start()
        try:
            while not self.is_stopping:
                room = self._room()
                if room < 1:
                    continue
                try:
                    messages = self._consumer.take_some(room, _WAIT_S)
                except NodeUnavailableError as error:
                    _log.warning("the node is away, receiving again", error=error.message)
                    self._pause(_AWAY_S)
                    continue
                except CorruptRecordError as error:
                    pool.report(None, error)
                    self._pause(_AWAY_S)
                    continue
                self._add(messages)
        finally:
            self._end(pool)

    def _end(self, pool: SharePool) -> None:
        self.stop()
        with self.lock:
            self._give_back(self._ready)
            self._ready.clear()
        deadline = time.monotonic() + self.settings.stop_timeout_s
        with self.lock:
            while (self._running or self._judged) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK_S))
            if self._running:
                _log.warning("handlers still run at the end of stop_timeout_s", running=self._running)
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(self._consumer.times[0])
        pool.end(time.monotonic() + _LOOK_S)
        self._ended.set()

    def _room(self) -> int:
        with self.lock:
            room = min(_AT_ONCE, self.settings.max_unfinished - len(self._held))
            if room < 1:
                self._changed.wait(_LOOK_S)
            return room

    def _pause(self, seconds: float) -> None:
        with self.lock:
            if not self.is_stopping:
                self._changed.wait(seconds)

    def _add(self, messages: list[Message]) -> None:
        with self.lock:
            for message in messages:
                held = UnsettledMessage(message)
                self._held[held] = None
                self._ready.append(held)
            self.wake(len(messages))

    def stop(self) -> None:
        """Start nothing more."""
        with self.lock:
            self.is_stopping = True
            self.wake(self.settings.workers)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until the loop has ended. A handler does not wait for itself, nor does a signal handler in the loop's thread."""
        if threading.get_ident() != self._looper and (self._pool is None or not self._pool.is_inside()):
            self._ended.wait()

    @property
    def counts(self) -> HandlerCounts:
        with self.lock:
            return HandlerCounts(self._handled, self._failed, self._dead, self._running, len(self._held))

    # ------------------------------------------------------------ the pool's side

    def take(self) -> UnsettledMessage | None:
        """The next message, for a handler that runs from now on. The lock is held by the caller."""
        if self.is_stopping or not self._ready:
            return None
        self._running += 1
        return self._ready.popleft()

    def judge(self, entry: UnsettledMessage, verdict: HandlerResult) -> None:
        """The handler that had ``entry`` has ended."""
        if verdict.result is ConsumeResult.RETRY and verdict.delay_s is None:
            verdict = verdict._replace(delay_s=self._delay_of(entry.message))
        with self.lock:
            self._running -= 1
            if verdict.result is ConsumeResult.DONE:
                self._handled += 1
            else:
                self._failed += 1
            entry.verdict = verdict
            self._judged.append(entry)
            self._changed.notify_all()

    def abandon(self, entry: UnsettledMessage) -> None:
        """The handler that had ``entry`` was cancelled: its message comes back."""
        with self.lock:
            self._running -= 1
            entry.verdict = HandlerResult(ConsumeResult.RETRY, 0.0)
            self._judged.append(entry)
            self._changed.notify_all()

    def _give_back(self, many: Iterable[UnsettledMessage]) -> None:
        """No handler had them, and none will: they come back at once. The lock is held by the caller."""
        for held in many:
            held.verdict, held.is_untried = HandlerResult(ConsumeResult.RETRY, 0.0), True
            self._judged.append(held)
        self._changed.notify_all()

    def _delay_of(self, message: Message) -> float:
        try:
            return delay_of(self.settings.backoff, message.reconsume_times) or 0.0
        except Exception:
            _log.exception("backoff failed, the message comes back at once")
            return 0.0

    # ------------------------------------------------------------ settling

    def _keep(self) -> None:
        """The engine's thread."""
        while True:
            with self.lock:
                if not self._judged and not self._is_over:
                    self._changed.wait(_LOOK_S)
                many = list(self._judged)
                if not many and self._is_over:
                    return
                expiring = [] if self._is_over else self._expiring()
            try:
                self._settle(many)
                if expiring:
                    self._consumer.extend(expiring)
            except RequestError as error:
                # What is not acknowledged comes back: nothing is lost.
                _log.warning("messages cannot be acknowledged now", error=str(error))
                with self.lock:
                    if self._is_over:
                        return
                    self._changed.wait(_AWAY_S)
            except Exception:
                _log.exception("messages cannot be acknowledged")
                self._forget(many)

    def _expiring(self) -> list[Message]:
        """The messages without a verdict whose invisible time is half over."""
        soon = time.monotonic() + self._consumer.times[1] / 2
        return [
            held.message for held in self._held if held.verdict is None and receipt_of(held.message).expires_at < soon
        ]

    def _settle(self, many: list[UnsettledMessage]) -> None:
        by_way: dict[tuple[ConsumeResult, float, bool], list[UnsettledMessage]] = {}
        for held in many:
            assert held.verdict is not None
            way = held.verdict.result, held.verdict.delay_s or 0.0, held.is_untried
            by_way.setdefault(way, []).append(held)
        for (result, delay_s, is_untried), group in by_way.items():
            messages = [held.message for held in group]
            try:
                if result is ConsumeResult.DONE:
                    late = self._consumer.ack(messages)
                elif result is ConsumeResult.DEAD:
                    late = self._consumer.nack(messages, dead=True)
                    with self.lock:
                        self._dead += len(messages) - len(late)
                elif is_untried:
                    late = self._consumer.give_back(messages)
                else:
                    late = self._consumer.nack(messages, delay_s)
            except ProtocolError as error:
                if error.retryable or error.retry_after_ms is not None:
                    raise
                # For good, as a delay beyond pop.max_invisible_ms: the others do not wait for it.
                _log.error(
                    "the node refuses what was decided, the messages come back after their invisible time",
                    error=str(error), result=result.value, delay_s=delay_s, messages=len(messages),
                )  # fmt: skip
                late = []
            if late:
                _log.warning("the invisible time of messages was over before they were settled", messages=len(late))
            self._forget(group)

    def _forget(self, many: list[UnsettledMessage]) -> None:
        gone = set(many)
        with self.lock:
            for held in many:
                self._held.pop(held, None)
            self._judged = deque(held for held in self._judged if held not in gone)
            self._changed.notify_all()


_Queue = tuple[str, int]


class OrderedShareEngine(ShareEngine):
    """The loop of an ordered share consumer: one handler for each queue at a time, in the order of the queue.

    The node delivers nothing more of a queue while messages of it are out. So a message that failed comes again before
    those behind it, if these are returned unhandled, which counts as no try.

    Of each queue the first message is ready, or its handler runs; the others are behind it.
    """

    def __init__(self, consumer: ShareSource, settings: RunSettings) -> None:
        super().__init__(consumer, settings)
        self._behind: dict[_Queue, deque[UnsettledMessage]] = {}

    def _add(self, messages: list[Message]) -> None:
        with self.lock:
            for message in messages:
                held = UnsettledMessage(message)
                self._held[held] = None
                behind = self._behind.get(_queue(held))
                if behind is None:
                    self._behind[_queue(held)] = deque()
                    self._ready.append(held)
                else:
                    behind.append(held)
            self.wake(len(messages))

    def judge(self, entry: UnsettledMessage, verdict: HandlerResult) -> None:
        is_last = entry.message.reconsume_times >= self._consumer.max_retries()
        if verdict.result is ConsumeResult.RETRY and is_last:
            verdict = verdict._replace(result=ConsumeResult.DEAD)
        super().judge(entry, verdict)
        self._go_on(entry, is_over=verdict.result is not ConsumeResult.RETRY)

    def abandon(self, entry: UnsettledMessage) -> None:
        super().abandon(entry)
        self._go_on(entry, is_over=False)

    def _go_on(self, entry: UnsettledMessage, *, is_over: bool) -> None:
        """The next message of the queue; without ``is_over`` they come again behind this one."""
        with self.lock:
            behind = self._behind.pop(_queue(entry), deque())
            if not is_over or self.is_stopping:
                self._give_back(behind)
            elif behind:
                self._ready.append(behind.popleft())
                self._behind[_queue(entry)] = behind
                self.wake(1)

    def _end(self, pool: SharePool) -> None:
        self.stop()
        with self.lock:
            for behind in self._behind.values():
                self._give_back(behind)
            self._behind.clear()
        super()._end(pool)


def _queue(held: UnsettledMessage) -> _Queue:
    return held.message.topic, held.message.queue_id
