"""The consumer, a member of a group, and the reader, which reads alone; and the names of their settings."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from commitmq.client import checks
from commitmq.client.handling.chain import Handler, Middleware, OnError, chained
from commitmq.client.handling.counts import HandlerCounts
from commitmq.client.handling.settings import RunOptions, Settings
from commitmq.client.receiving.assignment import Queue, Start
from commitmq.client.receiving.base_consumer import BaseConsumer, Told
from commitmq.client.selector import MessageSelector
from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from commitmq.client.handling.engine import Engine
    from commitmq.client.handling.run import Pool

__all__ = ["Consumer", "GroupOptions", "HandlerCounts", "ReadOptions", "Reader", "RunOptions", "Told"]

_SEND_BACK_S: Final = 5.0
_END_S: Final = 0.5
_MOST_MESSAGES: Final = 10_000


class ReadOptions(TypedDict, total=False):
    """How a consumer or a reader reads; see :class:`Consumer`."""

    start: Start
    filter: str | MessageSelector
    mode: str
    max_pull_bytes: int
    check_crc: bool
    timeout_s: float


class GroupOptions(ReadOptions, total=False):
    """How a member of a group reads; see :class:`Consumer`."""

    auto_commit: bool
    auto_commit_interval_s: float
    session_timeout_ms: int | None
    rebalance_timeout_s: float
    max_poll_interval_s: float | None
    member: str | None


class Consumer(BaseConsumer):
    """A member of a consumer group: ``Consumer("orders", group="kitchen")``. One thread polls; any thread may :meth:`close`.

    The members of a group share the queues of their topics, each queue is read by one of them, and the group's offsets are
    kept by the node. A topic that does not exist yet is waited for; a warning in the log says so.

    ``node`` is the admin address (default: the environment's COMMITMQ_NODE, else tcp://127.0.0.1:7310). ``start`` says where
    to begin in a queue for which the group has no offset: ``earliest`` (the default), ``latest``, a datetime (first message
    stored then or later; without a time zone it is local time) or a queue offset. Queues and topics that come later are read
    from their first message (with a datetime: from that time). ``filter`` is a tag expression, ``TagA || TagB`` or ``*``, or a
    selector: ``Sql("price > 10 AND region = 'eu'")``. ``timeout_s`` (10) bounds each request.

    ``auto_commit`` (on): what a poll returned is committed when poll is called again (at most every
    ``auto_commit_interval_s``, 1), when a queue is given back, and by ``close``. So a message counts as processed when its
    batch was, and after a crash it is delivered again: at least once. An exception that comes while a poll is under way
    (Ctrl-C) loses nothing: what it would have returned is returned by the next one. A ``with`` block that ends by an
    exception does not commit the batch that raised it. Without ``auto_commit`` call :meth:`commit`.

    ``on_assign`` and ``on_revoke`` are called with a list of queues, in poll: before the first message of them comes, and
    when they are to be given back, which is the time to :meth:`commit`. ``on_revoke`` is called by ``close`` too, and
    afterwards when a queue was taken away because nobody polled in time. What they raise, poll raises, and they are called
    again by the next one.

    A member that does not poll for ``max_poll_interval_s`` (300; None: for ever) leaves its group until it does; its queues go
    to others, and what it did not commit is delivered to them. A second consumer with the same ``member`` name takes the
    place of the first one, whose polls then raise FencedError. ``session_timeout_ms`` (default: the node's) is how long a
    member may be silent, ``rebalance_timeout_s`` (10) how long it may take to give a queue back.

    On the node's own host messages are read from its mapped files without a copy (``mode="auto"``); ``mode="bytes"``
    has them sent, at most ``max_pull_bytes`` (2 MiB) in one answer. When offsets fell out of the log, reading goes on at the
    nearest message there is; ``gaps`` tells. Every record's CRC is compared, which costs some 0.3 µs a message;
    ``check_crc=False`` leaves it.
    """

    def __init__(
        self,
        topics: str | Iterable[str] | None = (),
        of_group: str | Iterable[str] | None = None,
        *,
        group: str | None = None,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings.

        ``Consumer(group, topics)``, the order of former versions, still works, and warns.
        """
        topics, group = topics_and_group(topics, of_group, group)
        super().__init__(topics, group=group, node=node, on_assign=on_assign, on_revoke=on_revoke, **options)

    def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Commit how far the group got; returns what the node now holds for each queue.

        Without ``offsets`` everything that was polled counts as done. An offset is that of the next message to read; one
        behind the queue's end is stored as that end. The answer comes when it is durable. Raises FencedError when a queue
        is no longer this consumer's (it was given to another member), its topic is another one by now, or its offset was
        reset meanwhile: nothing was committed then.
        """
        if self._group is None:  # made in the words of former versions
            self._check_usable()
            raise CommitMQError("a consumer without a group has no offsets to commit")
        if self._handling is not None and not self._closed:
            raise CommitMQError("run() commits by itself, behind what its handlers have done")
        return self._using(partial(self._commit, offsets))

    # ------------------------------------------------------------ handlers

    def run(
        self,
        handler: Handler,
        *,
        middleware: Sequence[Middleware] = (),
        on_error: OnError | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        """Call ``handler(message)`` for every message, until :meth:`close` is called: by any thread, also by a handler.

        Handlers run in ``workers`` threads (20). The consumer is closed when this returns. docs/handlers.md tells more.

        The handler's return value says what becomes of the message. None, True or ``ConsumeResult.DONE``: it is done. False
        or ``ConsumeResult.RETRY``: it comes again after the back-off. ``ConsumeResult.DEAD``: it becomes a dead letter. An
        exception means RETRY, and ``on_error(message, error)`` is told of it (without it the log). ``RetryLater(delay)``,
        which ``message.retry_later(delay)`` raises, means RETRY after that delay.

        A message that comes again is stored in the group's retry topic meanwhile, and ``run`` reads that topic too. The
        message has its first ``topic``; ``stored_topic`` is the retry topic. It becomes a dead letter after ``max_retries``
        (16; None: the group's own number) retries. ``backoff`` is None for RocketMQ's delays (10 s, 30 s, 1 min, … 2 h),
        seconds, a list of seconds, or a function of the retry (0 is the first) that returns seconds. A message that cannot
        be sent back is tried again here 5 s later.

        The committed offset of a queue is its lowest message that is not done. So after a crash handlers may see a message
        again: at least once. A queue with ``max_unfinished`` (1000) messages, ``max_unfinished_bytes`` (100 MiB) or a span of
        ``max_unfinished_span`` (2000) offsets that are not done is not fetched until there is room; other queues are. A
        handler may take its time: the consumer stays a member.

        ``ordered``: the handlers of each queue run one at a time, in the queue's order. A failed message is tried again here
        after the back-off (1 s), and its queue waits for it.

        ``middleware`` are functions ``m(message, next)`` around the handler, the first one outermost. A close waits for the
        handlers that run, at most ``stop_timeout_s`` (30).

        Raises what a poll raises, but for a damaged record: ``on_error(None, error)`` is told of it, and the other queues go
        on. Raises ValueError for settings, and without ``auto_commit``.
        """
        chain = chained(handler, middleware)
        checks.callback("on_error", on_error)
        engine = self._engine(Settings(**options))
        from commitmq.client.handling.threads import ThreadPool

        self._serve(engine, ThreadPool(engine, chain, on_error, name=str(self._group)))

    @property
    def handler_counts(self) -> HandlerCounts:
        """What became of the messages of :meth:`run`."""
        return HandlerCounts() if self._handling is None else self._handling.counts

    def _engine(self, settings: Settings) -> Engine:
        # They need numpy, as the puller does.
        from commitmq.client.handling.engine import Engine
        from commitmq.client.handling.send_back import SendBack

        self._check_usable()
        if self._group is None:  # made in the words of former versions
            raise CommitMQError("run() needs a consumer with a group")
        if not self._auto_commit:
            raise ValueError("run() commits by itself: leave auto_commit on")
        patience_s = min(self._timeout_s, _SEND_BACK_S)
        return Engine(settings, SendBack(self._directory.address, self._group, timeout_s=patience_s))

    def _serve(self, engine: Engine, pool: Pool) -> None:
        """Run until the consumer is closed. In the thread of a poll."""
        self._using(partial(self._handle, engine, pool))

    def _handle(self, engine: Engine, pool: Pool) -> None:
        from commitmq.client.handling.run import Run, Source

        member = self._member
        assert member is not None
        deadline = time.monotonic() + self._timeout_s
        topics = self._committer.ask("group.retry_topics", {"group": member.group}, deadline)
        fetch = partial(self._fetch, max_messages=_MOST_MESSAGES)
        run = Run(engine, pool, Source(self._assignment, fetch, self._puller.wait, lambda: self._closing))
        self._handling = run
        try:
            engine.start(int(topics["max_retries"]))
            member.subscribe([topics["retry"]])
            pool.start()
            run.loop()
        finally:
            self._stop_waiting()
            if self._close_after is None:
                self._close_after = True  # _using closes the consumer
            try:
                run.stop()
            finally:
                engine.close()
                pool.end(time.monotonic() + _END_S)


class Reader(BaseConsumer):
    """Reads all queues of topics, or ``queues``, without a group: ``Reader("orders")``. Nothing is committed.

    ``queues`` are pairs of a topic and a queue, ``Reader(queues=[("orders", 0)])``. ``start`` says where to begin in each
    queue; all other settings, and what reading is like, are a :class:`Consumer`'s.
    """

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        queues: Iterable[Queue] | None = None,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        super().__init__(
            topics, group=None, queues=queues, node=node, on_assign=on_assign, on_revoke=on_revoke, **options
        )


def topics_and_group(
    topics: str | Iterable[str] | None, of_group: str | Iterable[str] | None, group: str | None
) -> tuple[str | Iterable[str], str | None]:
    """Topics and group from what a consumer was given, in today's order or that of former versions, which warns."""
    if of_group is None:
        if group is None or topics is None:
            raise TypeError("a consumer is a member of a group: give it group=…; a Reader reads without one")
        return topics, group
    if group is not None or not (topics is None or isinstance(topics, str)):
        raise TypeError(f"several topics are a list: [{topics!r}, {of_group!r}]")
    warnings.warn(
        "Consumer(group, topics) is deprecated: say Consumer(topics, group=…), or Reader(topics) without a group",
        DeprecationWarning,
        stacklevel=3,
    )
    return of_group, topics
