"""The two clients that read: the consumer, a member of a group, and the reader, which reads alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Unpack

from commitmq.client import checks
from commitmq.client.handling.settings import Handler, HandlerCounts, Middleware, OnError, RunOptions, Settings, chained
from commitmq.client.receiving.assignment import Queue
from commitmq.client.receiving.base_consumer import BaseConsumer
from commitmq.client.receiving.settings import GroupOptions, ReadOptions, RebalanceCallback
from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from commitmq.client.handling.engine import Engine
    from commitmq.client.handling.run import Pool

__all__ = ["Consumer", "GroupOptions", "HandlerCounts", "ReadOptions", "Reader", "RebalanceCallback", "RunOptions"]

_SEND_BACK_S: Final = 5.0
_END_S: Final = 0.5
_MOST_MESSAGES: Final = 10_000


class Consumer(BaseConsumer):
    """A member of a consumer group: ``Consumer("orders", group="kitchen")``. One thread polls; any thread may
    :meth:`close`.

    The members of a group share the queues of their topics: one member reads each queue. The node keeps the group's
    offsets. A consumer waits for a topic that does not exist yet, and a warning in the log says so.

    ``node`` is the admin address. Its default is the environment's COMMITMQ_NODE, else tcp://127.0.0.1:7310.
    ``timeout_s`` (10) bounds each request.

    ``start`` says where to begin in a queue in which the group has no offset: ``earliest`` (the default), ``latest``, a
    queue offset, or a datetime for the first message stored then or later. A datetime without a time zone is local
    time. A queue or topic that comes later is read from its first message, or with a datetime from that time.

    ``filter`` is a tag expression, ``TagA || TagB`` or ``*``, or a selector such as ``Sql("price > 10 AND region =
    'eu'")``.

    With ``auto_commit`` (the default) the consumer commits a batch when the program polls again, when it gives a queue
    back, and in ``close``; in polls at most every ``auto_commit_interval_s`` (1). So a message counts as processed when
    its whole batch is, and after a crash it is delivered again: at least once. A ``with`` block that ends by an
    exception does not commit the last batch. An exception during a poll, such as Ctrl-C, loses nothing: the next poll
    returns the batch. Without ``auto_commit`` call :meth:`commit`.

    ``poll`` calls ``on_assign`` with a list of new queues before it returns their first message. It calls ``on_revoke``
    with a list of queues that it is about to return, which is the time to :meth:`commit`. ``close`` calls ``on_revoke``
    too. When the group took a queue away because the program did not poll in time, ``on_revoke`` is called afterwards.
    If a callback raises, poll raises the same, and the next poll calls the callback again.

    A member that does not poll for ``max_poll_interval_s`` (300; None means for ever) leaves its group until it polls
    again. Others get its queues and its uncommitted messages. A second consumer with the same ``member`` name takes the
    place of the first one, and a poll of the first one raises FencedError. ``session_timeout_ms`` (default: the node's)
    is how long a member may be silent. ``rebalance_timeout_s`` (10) is how long it may take to give a queue back.

    ``strategy`` says how the members share the queues: ``AVG`` (without any: consecutive queues each),
    ``AVG_BY_CIRCLE`` (dealt out one by one), ``CONSISTENT_HASH`` (few move when a member comes or goes),
    ``MACHINE_ROOM:a,b`` (only of a node that is named ``a@…`` or ``b@…``), ``CONFIG:m=0,1;n=2`` (the queues that it
    names for each ``member``). The first member that names one sets it, and a member that names another is refused.

    With ``broadcasting`` every consumer of the group reads all queues. It keeps its positions itself, in the file
    ``member/group/offsets.json`` of ``positions_folder`` (default: ``~/.commitmq/positions``), which has RocketMQ's
    shape. ``member`` (default: ``DEFAULT``) tells the consumers of one folder apart; a second one with the same file is
    refused. A failed message of a handler counts as done. docs/handlers.md tells more.

    On the node's own host the consumer reads messages from the node's mapped files without a copy (``mode="auto"``).
    With ``mode="bytes"`` the node sends them, at most ``max_pull_bytes`` (2 MiB) in one answer. When its offset falls
    out of the log, the consumer continues at the nearest message, and ``gaps`` tells of it. The consumer compares the
    CRC of every record, which takes about 0.3 µs a message; ``check_crc=False`` leaves the comparison out.
    """

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        group: str,
        node: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        super().__init__(topics, group=group, node=node, on_assign=on_assign, on_revoke=on_revoke, **options)

    def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Commit offsets, and return the offset that the node now has for each of the queues.

        Without ``offsets`` every message that a poll returned counts as done. An offset is that of the next message to
        read. The node stores the queue's end instead of an offset behind it. The answer comes when the offsets are
        durable.

        Raises FencedError, and commits nothing, when another member has one of the queues by now, when a topic was
        recreated, or when an offset was reset in the meantime.
        """
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
        trace: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Call ``handler(message)`` for every message, until :meth:`close` is called: by any thread, also by a handler.

        Handlers run in ``workers`` threads (20). The consumer is closed when this returns. docs/handlers.md tells more.

        The handler's return value says what becomes of the message. None, True or ``ConsumeResult.DONE``: it is done.
        False or ``ConsumeResult.RETRY``: it comes again after the back-off. ``ConsumeResult.DEAD``: it becomes a dead
        letter. An exception means RETRY, and ``on_error(message, error)`` is told of it (without it the log).
        ``RetryLater(delay)``, which ``message.retry_later(delay)`` raises, means RETRY after that delay. Delays of
        messages that come again are rounded up to the next of RocketMQ's 18 levels, the last of which is 2 h; a longer
        one is a ValueError.

        A message that comes again is stored in the group's retry topic in the meantime, and ``run`` reads that topic
        too. The message has its first ``topic``; ``stored_topic`` is the retry topic. It becomes a dead letter after
        ``max_retries`` (16; None: the group's own number) retries. ``backoff`` is None for RocketMQ's delays (10 s, 30
        s, 1 min, … 2 h), seconds, a list of seconds, or a function of the retry (0 is the first) that returns seconds.
        A message that cannot be sent back is tried again here 5 s later.

        The committed offset of a queue is its lowest message that is not done. So after a crash handlers may see a
        message again: at least once. A queue with ``max_unfinished`` (1000) messages, ``max_unfinished_bytes`` (100
        MiB) or a span of ``max_unfinished_span`` (2000) offsets that are not done is not fetched until there is room;
        other queues are. A handler may take its time: the consumer stays a member.

        ``ordered``: the handlers of each queue run one at a time, in the queue's order. A failed message is tried again
        here after the back-off (1 s), of any length and not rounded, and its queue waits for it.

        ``middleware`` are functions ``m(message, next)`` around the handler, the first one outermost. A close waits for
        the handlers that run, at most ``stop_timeout_s`` (30).

        ``trace`` writes RocketMQ's trace records of each call of the handler into ``RMQ_SYS_TRACE_TOPIC``, in the
        background; a record that finds no room is dropped. ``commitmq trace`` reads them.

        Raises what a poll raises, but for a damaged record: ``on_error(None, error)`` is told of it, and the other
        queues go on. Raises ValueError for settings, and without ``auto_commit``.
        """
        from commitmq.client.handling.pools import ThreadPool
        from commitmq.client.producer import Producer
        from commitmq.client.tracing import Tracer, traced

        group = str(self._settings.group)
        tracer = Tracer(partial(Producer, self._directory.address)) if trace else None
        chain = chained(handler, middleware if tracer is None else [traced(tracer, group), *middleware])
        checks.callback("on_error", on_error)
        engine = self._engine(Settings(**options))
        longest_s = engine.settings.longest_delay_s
        pool = ThreadPool(engine, chain, on_error, name=group, node=self._directory.address, longest_delay_s=longest_s)
        try:
            self._serve(engine, pool)
        finally:
            if tracer is not None:
                tracer.close()

    @property
    def handler_counts(self) -> HandlerCounts:
        """What became of the messages of :meth:`run`."""
        return HandlerCounts() if self._handling is None else self._handling.counts

    def _engine(self, settings: Settings) -> Engine:
        # They need numpy, as the puller does.
        from commitmq.client.handling.engine import Engine
        from commitmq.client.handling.send_back import PassOver, SendBack

        self._check_usable()
        if not self._settings.auto_commit:
            raise ValueError("run() commits by itself: leave auto_commit on")
        if self._settings.broadcasting:
            return Engine(settings, PassOver())
        patience_s = min(self._settings.timeout_s, _SEND_BACK_S)
        return Engine(settings, SendBack(self._directory.address, str(self._settings.group), timeout_s=patience_s))

    def _serve(self, engine: Engine, pool: Pool) -> None:
        """Run until the consumer is closed. In the thread of a poll."""
        self._using(partial(self._handle, engine, pool))

    def _handle(self, engine: Engine, pool: Pool) -> None:
        from commitmq.client.handling.run import HandlerRun, HandlerSource

        member = self._member
        deadline = time.monotonic() + self._settings.timeout_s
        most, retry = 16, []  # what broadcasts has no retry topic
        if member is not None:
            topics = self._committer.ask("group.retry_topics", {"group": member.group}, deadline)
            most, retry = int(topics["max_retries"]), [topics["retry"]]
        fetch = partial(self._fetch, max_messages=_MOST_MESSAGES)
        run = HandlerRun(engine, pool, HandlerSource(self._assignment, fetch, self._puller.wait, lambda: self._closing))
        self._handling = run
        try:
            engine.start(most)
            if member is not None:
                member.subscribe(retry)
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
    """Reads topics without a group, and commits nothing: ``Reader("orders")``.

    It reads all queues of its topics, or only ``queues``, which are pairs of a topic and a queue:
    ``Reader(queues=[("orders", 0)])``. ``start`` says where to begin in each queue. The other settings and the methods are
    those of a :class:`Consumer`.
    """

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        queues: Iterable[Queue] | None = None,
        node: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        super().__init__(
            topics, group=None, queues=queues, node=node, on_assign=on_assign, on_revoke=on_revoke, **options
        )
