"""The consumer that shares queues: :class:`ShareConsumer`.

The connection of a share consumer to the process ``pop`` of its node, which it asks the node to start.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from commitmq.client import checks
from commitmq.client.closing import Closing
from commitmq.client.handling.settings import Handler, HandlerCounts, Middleware, OnError, chained
from commitmq.client.sharing.receipt import Receipt, receipt_of
from commitmq.client.sharing.share_engine import RunSettings, ShareOptions, ShareRunOptions, ShareSettings
from commitmq.errors import CommitMQError, NodeUnavailableError, ProtocolError
from commitmq.log import get_log
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory
from commitmq.semantics.pop import ReceiptHandle
from commitmq.semantics.retry import DEFAULT_MAX_RETRIES

if TYPE_CHECKING:
    from datetime import timedelta

    from commitmq.client.message import Message
    from commitmq.client.sharing.share_engine import ShareEngine


CLOSE_S: Final = 2.0
_PAUSE_S: Final = 0.2
_PASSING: Final = ("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY")


class ShareLine:
    """One request at a time; any thread may make one."""

    def __init__(self, node: str | None) -> None:
        self._directory = Directory(node)
        self.address = self._directory.address
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._user = 0
        """The thread whose request is under way."""
        self._is_closed = False

    def connect(self, timeout_s: float) -> None:
        """Raises NodeUnavailableError without a node, ProtocolError when it refuses."""
        with self._lock:
            self._connect(time.monotonic() + timeout_s)

    def request(
        self, op: str, fields: dict[str, Any], *, timeout_s: float, wait_s: float = 0.0
    ) -> tuple[dict[str, Any], list[Any]]:
        """The answer and its frames. Repeats the request while the node is away or busy, for ``timeout_s`` at most; the
        node may take ``wait_s`` more to answer. Raises NodeUnavailableError, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        if self._user == threading.get_ident():
            raise CommitMQError("a request is under way: a signal handler must not make another one")
        try:
            with self._lock:
                self._user = threading.get_ident()
                try:
                    return self._answer(op, fields, deadline, wait_s)
                finally:
                    self._user = 0
        finally:
            if self._is_closed:
                self._end(0)

    def _answer(
        self, op: str, fields: dict[str, Any], deadline: float, wait_s: float
    ) -> tuple[dict[str, Any], list[Any]]:
        while True:
            if self._is_closed:
                raise CommitMQError("the consumer is closed")
            try:
                channel = self._connect(deadline)
                left_s = max(deadline - time.monotonic(), 0.01)
                answer, frames = channel.request(op, fields, timeout_s=left_s + wait_s)
                return answer, [frame.buffer for frame in frames]
            except NodeUnavailableError:
                self._drop()
                if time.monotonic() + _PAUSE_S >= deadline:
                    raise
                time.sleep(_PAUSE_S)
            except ProtocolError as error:
                pause_s = max((error.retry_after_ms or 0) / 1000, _PAUSE_S)
                if error.code not in _PASSING or time.monotonic() + pause_s >= deadline:
                    raise
                time.sleep(pause_s)
            except BaseException:
                self._drop()  # interrupted: a late answer must not be taken for another one
                raise

    def _connect(self, deadline: float) -> Channel:
        if self._channel is not None and self._channel.lost():
            self._drop()
        if self._channel is None:
            self._directory.metadata(timeout_s=max(deadline - time.monotonic(), 0.01))
            self._directory.request(
                "mover.start", {"role": "pop"}, timeout_s=max(deadline - time.monotonic(), 0.01)
            )  # a node that was started again runs no movers
            self._channel, _ = self._directory.connect("pop", deadline)
        return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def close(self) -> None:
        """Close the connection. A request under way ends first, and closes it where this does not wait for that: in a signal
        handler, which may interrupt the request, and after CLOSE_S.
        """
        self._is_closed = True
        if self._user != threading.get_ident():
            self._end(CLOSE_S)

    def _end(self, wait_s: float) -> None:
        if self._lock.acquire(timeout=wait_s):
            try:
                self._drop()
                self._directory.close()
            finally:
                self._lock.release()


_SLICE_S: Final = 1.0
_MOST_RECEIPTS: Final = 500
_LOOK_S: Final = 0.3  # between two looks for topics that do not exist

_log = get_log("consumer")


class ShareConsumer(Closing):
    """Receives messages that the consumers of a group share: ``ShareConsumer("orders", group="mailers")``. RocketMQ's
    POP.

    All consumers of the group receive from all queues, so there may be more consumers than queues. Each message goes to
    one of them, and is then invisible to the others for ``invisible_s`` (60). The consumer acknowledges it in that
    time, or it comes back to the group: with ``reconsume_times`` + 1, and as a dead letter of the group after the
    group's ``retryMaxTimes`` (16). Messages of a queue do not come in order.

    With ``ordered`` they do: a queue delivers up to 32 messages, and nothing more until all of them are acknowledged.
    One that is returned, or that timed out, comes again in its place, before the messages behind it. All consumers of a
    group are ordered, or none.

    ``start`` says where the group begins in a queue in which it has no offset: ``earliest`` (the default) or
    ``latest``. ``filter`` is a tag expression or a selector. ``check_crc`` compares the CRC of every record.
    ``timeout_s`` (10) bounds each request. ``node`` is the admin address, by default the environment's COMMITMQ_NODE,
    else tcp://127.0.0.1:7310.

    A group is shared, or its members have queues of their own (:class:`commitmq.Consumer`); the node refuses the second
    kind. Any thread may call any method. docs/sharing.md tells more.
    """

    def __init__(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        node: str | None = None,
        **options: Unpack[ShareOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        self._settings = ShareSettings(topics, group, **options)
        self._node = node
        self._receiver = ShareLine(node)
        self._settler = ShareLine(node)
        self._owner: ShareConsumer | None = self  # of the receipts; an asyncio twin has none
        self._closed = False
        self._engine: ShareEngine | None = None
        self._receiving = threading.Lock()
        self._attempt = ""
        """Of an ordered receive whose answer has not come: it is repeated with this, and gets the same messages."""
        self._max_retries = DEFAULT_MAX_RETRIES
        self._late: set[str] = set()
        """Topics that did not exist at a receive: they are read from their first message on."""
        try:
            self._receiver.connect(self._settings.timeout_s)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ receive

    def receive(self, max_messages: int = 32, wait_s: float = 1.0) -> list[Message]:
        """Up to ``max_messages`` messages; an empty list when none came within ``wait_s``. A topic that does not exist
        is waited for; then it begins at its first message.

        Raises NodeUnavailableError when the node is away for longer than ``timeout_s``, ProtocolError when it refuses, and
        CorruptRecordError for a damaged record.
        """
        if checks.integer("max_messages", max_messages) < 1:
            raise ValueError(f"max_messages must be at least 1, not {max_messages}")
        deadline = time.monotonic() + checks.seconds("wait_s", wait_s, zero=True)
        with self._receiving:
            while True:
                self._check_open()
                # In slices, so that a close from another thread is seen.
                part_s = max(0.0, min(_SLICE_S, deadline - time.monotonic()))
                messages = self._receive(max_messages, part_s)
                if messages or time.monotonic() >= deadline or self._closed:
                    return messages

    def _receive(self, max_messages: int, wait_s: float) -> list[Message]:
        settings = self._settings
        fields: dict[str, Any] = {
            "group": settings.group,
            "topics": settings.topics,
            "max_messages": max_messages,
            "invisible_ms": int(settings.invisible_s * 1000),
            "wait_ms": int(wait_s * 1000),
            "start": settings.start,
            "late": sorted(self._late),
            **settings.selector.header(),
        }
        if settings.ordered:
            self._attempt = self._attempt or uuid.uuid4().hex
            fields |= {"ordered": True, "attempt": self._attempt}
        asked = time.monotonic()
        answer, frames = self._receiver.request("pop", fields, timeout_s=settings.timeout_s, wait_s=wait_s)
        if answer["parts"]:
            self._attempt = ""
            self._max_retries = answer.get("max_retries", self._max_retries)
        self._wait_for(answer.get("missing", ()), asked + min(wait_s, _LOOK_S))
        return self._decoded(answer, frames, asked)

    def _wait_for(self, missing: Sequence[str], until: float) -> None:
        """Tell once of topics that do not exist; when there is no other topic, the node has not waited."""
        for topic in missing:
            if topic not in self._late:
                self._late.add(topic)
                sentence = "the topic does not exist yet; the consumer waits for it"
                _log.warning(sentence, group=self._settings.group, topic=topic)
        if len(missing) == len(self._settings.topics):
            time.sleep(max(0.0, until - time.monotonic()))

    def _decoded(self, answer: dict[str, Any], frames: list[Any], asked: float) -> list[Message]:
        # They need numpy.
        from commitmq.client.receiving.batch import MessageBatch
        from commitmq.client.receiving.part import parts_of_records
        from commitmq.client.receiving.record_check import check_bytes, check_places

        messages: list[Message] = []
        at = 0
        for part in answer["parts"]:
            records = parts_of_records(part["stored"], part["queue"], frames[at : at + part["frames"]])
            at += part["frames"]
            for one in records:
                check_places(one, part["start_offset"], part["next_offset"])
                if self._settings.check_crc:
                    check_bytes(one)
            delivery = ReceiptHandle(
                part["start_offset"],
                answer["pop_time"],
                answer["invisible_ms"],
                answer["revive_queue"],
                part["flag"],
                answer["broker"],
                part["queue"],
            )
            common = str(delivery)  # a message's own handle has its offset behind this
            expires_at = asked + answer["invisible_ms"] / 1000
            counts = dict(part.get("counts", ()))
            for message in MessageBatch(records).messages():
                message._receipt = Receipt(self._owner, part["topic"], f"{common} {message.queue_offset}", expires_at)
                if counts:
                    message.reconsume_times = counts.get(message.queue_offset, 0)
                if part["stored"] != part["topic"]:
                    message._stored_topic, message.topic = part["stored"], part["topic"]
                messages.append(message)
        return messages

    # ------------------------------------------------------------ what becomes of messages

    def ack(self, messages: Message | Sequence[Message]) -> list[Message]:
        """These messages are done. The answer comes when that is durable.

        Returns those that came too late: their invisible time was over, or they were acknowledged before. The previous
        come back to the group.
        """
        return self._settle("ack", _listed(messages), {})

    def nack(
        self,
        messages: Message | Sequence[Message],
        delay: float | timedelta | None = None,
        *,
        dead: bool = False,
        untried: bool = False,
    ) -> list[Message]:
        """These messages failed: they come back to the group after ``delay``, seconds or a timedelta; None or 0: at
        once.

        Another delay is rounded up to the node's shortest, 2 s (``pop.min_invisible_ms``). ``dead``: they become dead
        letters of the group instead. Returns those that came too late, as :meth:`ack`. An ordered message holds up its
        queue in the meantime; return those that were received behind it too, with ``untried``: nobody tried them, so
        this delivery does not count in ``reconsume_times``, and they come at once and never as dead letters. Without
        ``ordered`` it is refused.
        """
        delay_s = _seconds("delay", delay)
        many = _listed(messages)
        if untried:
            if dead or delay_s or not self._settings.ordered:
                raise ValueError("untried is for an ordered consumer, without a delay and without dead")
            return self._settle("nack", many, {"untried": True})
        if delay_s > 0 and not dead:
            return self._extend(many, delay_s, rounds_up=True)
        return self._settle("nack", many, {"dead": True} if dead else {})

    def extend(self, messages: Message | Sequence[Message], invisible_s: float | None = None) -> list[Message]:
        """These messages stay invisible for ``invisible_s`` from now on; None: the consumer's own.

        Each message gets a new receipt. Returns those that came too late, as :meth:`ack`.
        """
        wanted = self._settings.invisible_s if invisible_s is None else invisible_s
        return self._extend(_listed(messages), checks.seconds("invisible_s", wanted))

    def _extend(self, messages: list[Message], invisible_s: float, *, rounds_up: bool = False) -> list[Message]:
        late = []
        asked = time.monotonic()
        fields = {"invisible_ms": math.ceil(invisible_s * 1000), **({"rounds_up": True} if rounds_up else {})}
        for answer, many in self._ask("extend", messages, fields):
            for message, handle in zip(many, answer["handles"], strict=True):
                if handle is None:
                    late.append(message)
                else:
                    old = receipt_of(message)
                    message._receipt = Receipt(old.consumer, old.topic, handle, asked + invisible_s)
        return late

    def _settle(self, op: str, messages: list[Message], fields: dict[str, Any]) -> list[Message]:
        return [many[index] for answer, many in self._ask(op, messages, fields) for index in answer["late"]]

    def _ask(
        self, op: str, messages: list[Message], fields: dict[str, Any]
    ) -> Iterable[tuple[dict[str, Any], list[Message]]]:
        self._check_open()
        for at in range(0, len(messages), _MOST_RECEIPTS):
            many = messages[at : at + _MOST_RECEIPTS]
            receipts = [receipt_of(message) for message in many]
            request = {
                "group": self._settings.group,
                "receipts": [[one.topic, one.handle] for one in receipts],
                **fields,
            }
            answer, _ = self._settler.request(op, request, timeout_s=self._settings.timeout_s)
            yield answer, many

    # ------------------------------------------------------------ handlers

    def run(
        self,
        handler: Handler,
        *,
        middleware: Sequence[Middleware] = (),
        on_error: OnError | None = None,
        **options: Unpack[ShareRunOptions],
    ) -> None:
        """Call ``handler(message)`` for every message, until :meth:`close` is called: by any thread, also by a handler.

        Handlers run in ``workers`` threads (20), and ``max_unfinished`` (100) messages are held at most. The consumer
        acknowledges a message whose handler ended with None, True or ``ConsumeResult.DONE``; other results and
        exceptions are those of :meth:`commitmq.Consumer.run`. A failed message comes back to the group after
        ``backoff``: None for RocketMQ's delays (10 s, 30 s, 1 min, … 2 h), seconds, a list of seconds, or a function of
        the retry. 0 is at once; other delays are rounded up as those of :meth:`nack`. While a
        handler runs, the consumer extends the invisible time. An ordered consumer runs one handler for each queue at a
        time; a failed message holds up its queue, and becomes a dead letter after the group's ``retryMaxTimes``. A
        close waits for the handlers that run, at most ``stop_timeout_s`` (30); what they did not begin is returned at
        once.

        Raises what :meth:`receive` raises, but for a node that is away: that is waited for.
        """
        from commitmq.client.handling.pools import ThreadPool

        chain = chained(handler, middleware)
        checks.callback("on_error", on_error)
        engine = self._engine_of(RunSettings(**options))
        self._serve(engine, ThreadPool(engine, chain, on_error, name=self._settings.group, node=self._node))

    def _engine_of(self, settings: RunSettings) -> ShareEngine:
        from commitmq.client.sharing.share_engine import OrderedShareEngine, ShareEngine

        return (OrderedShareEngine if self._settings.ordered else ShareEngine)(_Source(self), settings)

    def _serve(self, engine: ShareEngine, pool: Any) -> None:
        self._check_open()
        if self._engine is not None:
            raise CommitMQError("run() was called already")
        self._engine = engine
        try:
            engine.loop(pool)
        finally:
            self._finish()

    @property
    def handler_counts(self) -> HandlerCounts:
        """What became of the messages of :meth:`run`."""
        return HandlerCounts() if self._engine is None else self._engine.counts

    # ------------------------------------------------------------ the end

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the connections. Messages that are not acknowledged come back after their invisible time.

        It ends :meth:`run`, and waits for that unless a handler calls it. Closing twice is allowed.
        """
        engine = self._engine
        if engine is not None:
            engine.stop()
            engine.wait()
            return
        self._finish()

    def _forgotten(self) -> None:
        self.close()

    def _finish(self) -> None:
        self._closed = True
        self._receiver.close()
        self._settler.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CommitMQError("the consumer is closed")

    def __repr__(self) -> str:
        return f"ShareConsumer({self._settings.topics!r}, group={self._settings.group!r})"


class _Source:
    """A consumer for its engine."""

    def __init__(self, consumer: ShareConsumer) -> None:
        settings = consumer._settings
        self.times = (settings.timeout_s, settings.invisible_s)
        self.max_retries = lambda: consumer._max_retries
        self.take_some = consumer._receive
        self.ack, self.nack, self.extend = consumer.ack, consumer.nack, consumer.extend
        self.give_back = partial(consumer.nack, untried=settings.ordered)


def _listed(messages: Message | Sequence[Message]) -> list[Message]:
    return list(messages) if isinstance(messages, Sequence) else [messages]


def _seconds(name: str, delay: float | timedelta | None) -> float:
    if delay is None:
        return 0.0
    seconds: Callable[[], float] | None = getattr(delay, "total_seconds", None)
    return checks.seconds(name, delay if seconds is None else seconds(), zero=True)
