"""The producer: the facade of :mod:`commitmq.client.sending`.

A lone synchronous send, or batch of one run, is sent by the calling thread. All other sends go through a pump. The quick way
of a single send is written out: each call would cost latency.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack, cast

import orjson

from commitmq.client import checks
from commitmq.client.closing import OwnClient
from commitmq.client.message import Message, check_alone, check_body, check_flag, check_topic, content_of
from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.properties import Keys, both_keys, build_properties, check_properties_size, join_queue_names
from commitmq.client.requesting.reply_reader import ReplyReader, no_reply, reply_message, request_message
from commitmq.client.results import BatchResult, BatchSendError, SendResult
from commitmq.client.routes import not_stored, unknown
from commitmq.client.sending.asked import SystemProperties, asked_time
from commitmq.client.sending.delivery import AtMostOnce, IdempotentDelivery, Sequences, is_busy
from commitmq.client.sending.lane import Lane
from commitmq.client.sending.options import (
    BatchOptions,
    ExactlyOnce,
    HalfOptions,
    MessageOptions,
    OnDelivery,
    RequestOptions,
    check_ack,
    check_queue,
    check_settings,
    has_sharding_keys,
    json_content,
    keys_of_batch,
    needs_queue,
    nothing_stored,
    shard,
    tell_delivery,
)
from commitmq.client.sending.outbox import too_large
from commitmq.client.sending.pump import Lanes
from commitmq.client.sending.run_encoder import encode_user_properties
from commitmq.client.sending.send_future import SendFuture
from commitmq.client.transactions.half_message import Listener
from commitmq.errors import CommitMQError, InvalidMessageError, SendError
from commitmq.format.compression import compress, compression_flags
from commitmq.format.constants import Property
from commitmq.format.message_id import UniqueIds
from commitmq.format.producer_mark import MAX_MARK_BYTES
from commitmq.protocol import wire
from commitmq.protocol.channel import WAIT_SLICE_S
from commitmq.protocol.node_address import several_addresses

if TYPE_CHECKING:
    from commitmq.client.sending.batch import Batch, BatchPlan
    from commitmq.client.transactions.group import TransactionGroup
    from commitmq.client.transactions.half_message import TransactionResult
    from commitmq.client.transactions.transaction import Transaction


_MAX_CORRECTIONS: Final = 4
_MAX_STARTS: Final = 10_000

_dumps = orjson.dumps
_monotonic = time.monotonic
_time_ns = time.time_ns
_new_tuple = tuple.__new__  # what a NamedTuple calls, without its own call


class TopicUnknownError(Exception):
    """The coordinator has to be asked for the queues of the topic."""


class _BatchFields(NamedTuple):
    """The arguments of a batch. ``options`` are those of its messages; ``deadline`` is in monotonic seconds."""

    options: dict[str, Any]
    queue: int | None
    ack: str
    limit_s: float
    deadline: float


_live: weakref.WeakSet[Producer] = weakref.WeakSet()


def _disown() -> None:
    """Mark the parent's producers as closed in a forked child. So no send has to check for a fork."""
    for producer in _live:
        producer._closed = True
        producer._lanes.disown()


os.register_at_fork(after_in_child=_disown)


class Producer(OwnClient):
    """Sends messages to one node. Thread-safe; threads that send at the same time share runs.

    The first send connects. ``node`` is the admin address (default: the environment's COMMITMQ_NODE, else
    tcp://127.0.0.1:7310). A send waits for its ``ack``: ``flushed`` (survives power loss) or ``memory`` (survives the
    death of any process). ``timeout_s`` bounds each send. A send that fails raises SendError; its ``outcome`` says
    whether the message is stored. Where the node did not answer, the error is a NodeUnavailableError too. ``compress``
    (zlib, lz4 or zstd) applies to bodies of more than ``compress_over_bytes`` that become smaller by it.
    ``max_pending`` and ``max_pending_bytes`` bound the pending messages of asynchronous sends; beyond them
    ``send_async`` blocks. ``max_requests`` bounds the requests that wait for their replies.

    ``linger_ms``: an asynchronous send that comes within this time after the last run waits until the time is over. So
    a thin stream travels in fewer and larger runs, and each run costs the node and its consumers the same. A send goes
    at once after a pause, while a thread waits in ``result``, ``flush`` or ``send``, and as soon as 256 KiB are
    pending. 0 turns the wait off. (Kafka's producer has ``linger.ms``, by default 5.)

    A thread of the producer sends the asynchronous messages. While the program's own threads compute without a pause, it
    waits for the interpreter several times a run, each time up to ``sys.getswitchinterval()`` (5 ms); a shorter interval
    shortens the way of a message (measured at 10,000 a second: 16 ms, with an interval of 0.5 ms 6 ms).

    ``trace=True`` writes RocketMQ's trace records of all stored messages but those of memory topics, in the background and in
    batches, into ``RMQ_SYS_TRACE_TOPIC``; a record that finds no room is dropped. ``commitmq trace`` reads them.

    Order: messages that one thread sends to one queue are stored in that order. Without ``queue`` or ``sharding_key`` a
    message may go to any queue.

    ``delivery=ExactlyOnce()`` makes an idempotent producer. It numbers each message, and the node stores each number once.
    After the death of the node or the end of the connection the producer sends such a message again, until its ``timeout_s``
    is over; set that to more than a restart of the node takes. After that the outcome of the message is unknown. The
    node remembers a producer for ``producers.expiry_ms``. Memory topics, BatchCQ topics and ``multi_dispatch`` take no
    idempotent sends. With a ``producer_id`` a program can repeat itself after its own death; see :class:`ExactlyOnce`.

    ``group`` is for transactions (:meth:`transaction`). The node asks any live producer of the group about a transaction
    without an end, and the producer asks its ``transaction_listener``: a function of a :class:`HalfMessage` that returns a
    :class:`TransactionState`, or an object with ``check`` and ``execute`` (:class:`TransactionListener`). A listener is
    called in threads of the producer, two at most.

    ``node`` may name several nodes, with commas between or as a list: each message goes to one of them. A node that is slow,
    refuses or does not answer is avoided (``fault_strategy``). A message that is not stored goes to another node,
    ``retries`` times after a refusal; with ``retry_may_store_twice=True`` also one whose outcome is unknown. Messages with a
    queue or a sharding key, transactions, requests and idempotent messages stay at a node. Each node has ``max_pending``.
    """

    _kind = "producer"

    def __init__(
        self,
        node: str | Iterable[str] | None = None,
        *,
        ack: str = "flushed",
        timeout_s: float = 10.0,
        compress: str | None = None,
        compress_over_bytes: int = 4096,
        max_pending: int = 100_000,
        max_pending_bytes: int = 128 * 1024 * 1024,
        max_requests: int = 10_000,
        linger_ms: float = 2.0,
        delivery: ExactlyOnce | None = None,
        trace: bool = False,
        group: str | None = None,
        transaction_listener: Listener | None = None,
        retries: int = 2,
        retry_may_store_twice: bool = False,
        fault_strategy: FaultStrategy | None = None,
    ) -> None:
        """Raises ValueError for a setting out of range; nothing is connected yet."""
        timeout_s = checks.seconds("timeout_s", timeout_s)
        check_settings(max_pending, max_pending_bytes, max_requests, linger_ms, retries, fault_strategy)
        addresses = several_addresses(node)
        if addresses is not None:
            from commitmq.client.producing.several_nodes import become_several

            become_several(self, Producer, addresses, locals())
            return
        assert isinstance(node, str | None)
        self._closed = True  # until all of it is made: __del__ must not warn of a producer whose __init__ raised
        self._ack = check_ack(ack)
        self._timeout_s = timeout_s
        self._compress = compress
        self._compress_flags = 0 if compress is None else compression_flags(compress)
        self._compress_over = compress_over_bytes
        self._ids = UniqueIds()
        self._sequences = None
        self._may_be_plain = compress is None and delivery is None
        limits: dict[str, Any] = {
            "timeout_s": timeout_s,
            "max_pending": max_pending,
            "max_pending_bytes": max_pending_bytes,
            "linger_s": linger_ms / 1000,
            "ids": self._ids,
        }
        policy = AtMostOnce()
        if delivery is not None:
            self._sequences = Sequences(delivery.producer_id, delivery.epoch)
            policy = IdempotentDelivery(self._sequences)
        self._lanes = Lanes(node, **limits, delivery=policy)
        self._outbox = self._lanes.writer.outbox
        self._tracer = None
        if trace:
            from commitmq.client.tracing import Tracer

            self._tracer = self._lanes.writer.lane.trace = Tracer(partial(Producer, node), group)
        self._transactions = None
        if group is not None:
            from commitmq.client.transactions.group import TransactionGroup

            self._transactions = TransactionGroup(node, group, transaction_listener, self._tracer)
        elif transaction_listener is not None:
            raise ValueError("transaction_listener needs a group: the node asks any producer of the group")
        self._pid = self._lanes.pid
        self._replies = ReplyReader(node, self._lanes.routes, max_waiting=max_requests, timeout_s=timeout_s)
        self._starts: dict[tuple[str, str | None], str] = {}
        self._closed = False
        _live.add(self)

    # ------------------------------------------------------------ one message

    def send(
        self,
        topic: str,
        body: bytes | Message,
        *,
        tags: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        key: str | None = None,
        queue: int | None = None,
        flag: int = 0,
        delay: float | timedelta | None = None,
        delay_level: int | None = None,
        deliver_at: datetime | int | None = None,
        multi_dispatch: Iterable[str] | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> SendResult:
        """Send one message and wait for its ack.

        ``keys`` find messages: one key, several with spaces between, or a list. ``queue`` picks the queue, else the
        hash of ``sharding_key`` (as RocketMQ's hash selector), else the node's round robin. Messages of one sharding
        key keep their order. ``key`` is key and sharding key in one. A Message object has all of these itself, so the
        call may name none of them. ``multi_dispatch`` names light message queues (``%LMQ%…``) that get the message
        too. Consumers get the message later with ``delay`` (a timedelta or seconds), at ``deliver_at`` (a datetime with a
        time zone, or milliseconds since 1970; at once when that has passed), or after the delay of RocketMQ's
        ``delay_level`` (1 to 18: 1 s to 2 h). :meth:`cancel` takes the result of one with ``delay`` or ``deliver_at``.
        Raises InvalidMessageError for a message that cannot be sent, SendError for one without an ack.
        """
        timeout_s = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)
        if key is not None:
            keys, sharding_key = both_keys(key, keys, sharding_key)
        asked = None
        if delay is not None or delay_level is not None or deliver_at is not None:
            asked = self._asked(delay, delay_level, deliver_at, multi_dispatch)
        now = _monotonic()
        deadline = now + timeout_s
        if self._closed:
            self._check_usable()
        if multi_dispatch is not None:
            own: MessageOptions = {"tags": tags, "keys": keys, "properties": properties, "sharding_key": sharding_key}
            message = Message.of(body, {**own, "flag": flag})
            return self._send_to_further_queues(topic, message, queue, multi_dispatch, deadline, ack)
        if queue is None and (sharding_key or type(body) is not bytes):
            # Before the connection is taken: this may ask the coordinator, and other threads must not wait for that.
            queue = self._queue_of_key(topic, body, sharding_key, deadline)
        lanes = self._lanes
        pump = lanes.pump_of_topic.get(topic, lanes.writer) if lanes.pump_of_topic else lanes.writer
        lane = pump.lane
        line = lane.line
        if not (line or pump.outbox.outstanding or self._sequences is not None):
            ticket = object()
            try:
                line.append(ticket)
                if line[0] is ticket:
                    result = self._send_alone(
                        lane, topic, body, tags, keys, properties, sharding_key, queue, flag, ack, asked, now, deadline
                    )
                    if result is not None:
                        return result
            except SendError as error:
                if not lanes.corrected(topic, error, pump):
                    raise  # else nothing is stored, and another process takes this topic
            finally:
                line.remove(ticket)  # first in the finally: an exception can come before any later call
                if line:
                    line.wake()
        return self._send_along(topic, body, tags, keys, properties, sharding_key, queue, flag, ack, asked, deadline)

    def _send_alone(
        self,
        lane: Lane,
        topic: str,
        body: bytes | Message,
        tags: str | None,
        keys: Keys | None,
        properties: Mapping[str, str] | None,
        sharding_key: str | None,
        queue: int | None,
        flag: int,
        ack: str | None,
        asked: SystemProperties | None,
        now: float,
        deadline: float,
    ) -> SendResult | None:
        """Send one message in the calling thread, which owns the connection; None when the connection did not take it.

        All of this is on the latency of every send, so it is written out: a call costs, and more so with cold caches.
        """
        channel = lane.channel
        if channel is None or (now - channel.last_use > WAIT_SLICE_S and channel.lost()):
            channel = lane.connect(deadline)
        channel.last_use = now
        own = ""
        if not (type(body) is bytes and body and properties is None and tags is keys is sharding_key is None):
            body, own, flag = json_content(body, tags, keys, properties, sharding_key, flag)
        if asked is not None:
            own += asked.json
        more = f',"flag":{check_flag(flag)}' if flag else ""
        if self._compress is not None:
            body, sys_flag = self._compressed(body)
            more += f',"sys_flag":{sys_flag}'
        size_bytes = len(body)
        if size_bytes > lane.max_message_bytes:
            raise too_large(size_bytes, lane.max_message_bytes)
        if queue is not None:
            more += f',"queue":{check_queue(queue)}'
        start = self._starts.get((topic, ack)) or self._start_of(topic, ack)
        born = _time_ns() // 1_000_000
        unique_id = self._ids.at(born)
        fields = f'{start},"born":{born},"properties":{{{own}"UNIQ_KEY":"{unique_id}"}}{more}'
        answer = lane.call(channel, fields, body, size_bytes, deadline)
        if answer is None:
            return None
        if answer["ok"] is not True:
            if is_busy(answer) and (queue is not None or not lane.gives_back):
                lane.delivery.busy.note(answer)
                return None  # the pump sends it after a rest
            raise wire.send_refusal(answer)
        if lane.trace is not None:
            lane.trace.stored(topic, fields, body, answer, now)
        return _new_tuple(
            SendResult,
            (
                topic,
                answer["queue"],
                answer["queue_offset"],
                answer["physical_offset"],
                answer["store_timestamp"],
                answer["msg_id"],
                unique_id,
                answer["ack"],
                False,
                answer.get("stored_topic"),
                None,
            ),
        )

    def send_async(
        self,
        topic: str,
        body: bytes | Message,
        *,
        tags: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        key: str | None = None,
        queue: int | None = None,
        flag: int = 0,
        delay: float | timedelta | None = None,
        delay_level: int | None = None,
        deliver_at: datetime | int | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> Future[SendResult]:
        """Send one message without waiting; the future gets a SendResult or a SendError. Arguments as of :meth:`send`.

        ``on_delivery`` is for a program that keeps no futures. It is called with ``(error, result)``, one of which is
        None. It is not called for a cancelled message.

        Raises InvalidMessageError at once for a message that cannot be sent. Blocks while ``max_pending`` messages are
        pending. Cancelling the future withdraws a message that was not passed to the connection yet. Callbacks run in
        the producer's thread: they may send asynchronously, but must not wait for a send.
        """
        if self._closed:
            self._check_usable()
        if timeout_s is not None:
            timeout_s = checks.seconds("timeout_s", timeout_s)
        if key is not None:
            keys, sharding_key = both_keys(key, keys, sharding_key)
        if on_delivery is not None:
            checks.callback("on_delivery", on_delivery)
        deadline = _monotonic() + (timeout_s or self._timeout_s)
        if (
            type(body) is bytes
            and body
            and tags is None
            and keys is None
            and properties is None
            and sharding_key is None
            and not flag
            and ack is None
            and delay is None
            and delay_level is None
            and deliver_at is None
            and self._may_be_plain
        ):
            # The same as below for a message that is only a body, without the checks of all else.
            check_topic(topic)
            queue = -1 if queue is None else check_queue(queue)
            sent = self._outbox.submit(topic, queue, self._ack, body, None, deadline)
        else:
            asked = None
            if delay is not None or delay_level is not None or deliver_at is not None:
                asked = self._asked(delay, delay_level, deliver_at)
            sent = self._submit(topic, body, tags, keys, properties, sharding_key, queue, flag, ack, asked, deadline)
        if on_delivery is not None:
            sent.add_done_callback(partial(tell_delivery, on_delivery))
        return sent

    def _start_of(self, topic: str, ack: str | None) -> str:
        """The beginning of the header, the same for every send to ``topic`` with ``ack``."""
        check_topic(topic)
        name = _dumps(topic).decode()
        start = f'{{"v":{wire.PROTOCOL_VERSION},"op":"send","topic":{name},"ack":"{check_ack(ack or self._ack)}"'
        if len(self._starts) >= _MAX_STARTS:
            self._starts.clear()
        self._starts[topic, ack] = start
        return start

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every asynchronous send has its outcome.

        Raises TimeoutError when that takes longer than ``timeout_s`` (default: the producer's).
        """
        self._check_usable()
        self._check_may_wait()
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if not self._flush(time.monotonic() + limit):
            raise TimeoutError(f"{self._pending()} messages are still pending after {limit} s")

    def _flush(self, deadline: float) -> bool:
        return self._lanes.flush(deadline)

    # ------------------------------------------------------------ batches

    def send_batch(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> BatchResult:
        """Send many messages and wait for all acks. The fastest way in: the messages are encoded and stored as runs.

        ``tags`` is one tag for all messages or a list; ``keys`` and ``sharding_keys`` are lists; a list has one entry a
        message. ``key``, one for all messages or a list, sets keys and sharding keys. ``properties`` apply to all messages.
        Message objects have all of these themselves. A run goes to one queue: ``queue``, or the queue of the sharding key,
        else the next in turn. To a topic with ``queue.type=BatchCQ`` the messages go as inner batches without compression;
        the node keeps each inner batch as one record. ``delay``, ``delay_level`` and ``deliver_at`` are for all messages; see
        :meth:`send`.
        ``timeout_s`` bounds the wait for each answer of the node.
        Raises InvalidMessageError before anything is sent, BatchSendError when a message was not acknowledged.
        """
        self._check_usable()
        if not messages:
            return BatchResult([])
        asked = self._batch_fields(messages, **fields)
        self._check_may_wait()
        try:
            self._flush_before(messages, asked)
            corrections = 0
            while True:
                plan, inner = self._plan(topic, messages, asked)
                batch = self._submit_batch(plan, inner, asked)
                try:
                    return batch.wait()
                except BatchSendError as error:
                    # The topic is of another kind than the producer knew, and nothing is stored: send it all the other way.
                    corrections += 1
                    if corrections > _MAX_CORRECTIONS or not (
                        self._lanes.routes.guessed_wrong(topic, error, asked.deadline)
                        or self._lanes.corrected(topic, error, batch.pump)
                    ):
                        raise
        except BatchSendError:
            raise
        except SendError as error:
            raise nothing_stored(error, len(messages)) from error

    def send_batch_async(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> Future[BatchResult]:
        """As :meth:`send_batch`, without waiting: the next batch is encoded and sent while the node stores this one.

        The future gets a BatchResult or a BatchSendError (InvalidMessageError for a body larger than the node allows).
        Batches are stored in the order of the calls, unless one fails. Between batches and single sends there is no order
        without a :meth:`flush`. Raises InvalidMessageError at once for a batch that no node takes. Blocks while
        ``max_pending`` messages are pending. A batch of an idempotent producer also waits for earlier single messages.
        """
        self._check_usable()
        if not messages:
            done: Future[BatchResult] = Future()
            done.set_result(BatchResult([]))
            return done
        asked = self._batch_fields(messages, **fields)
        if self._sequences is not None:
            # Numbers count in the order of the calls.
            self._flush_before(messages, asked)
        # This asks for the topic's queues here, so that the producer's thread does not wait for the coordinator.
        plan, inner = self._plan(topic, messages, asked)
        if self._lanes.routes.is_guess(topic):
            # The kind of topic is a guess, and no thread could correct a wrong one later: ask, or fail.
            try:
                self._lanes.routes.queues(topic, asked.deadline)
            except SendError as error:
                failed: Future[BatchResult] = Future()
                failed.set_exception(nothing_stored(error, len(messages)))
                return failed
            plan, inner = self._plan(topic, messages, asked)
        return self._submit_batch(plan, inner, asked, is_async=True).future

    def _batch_fields(
        self,
        messages: Sequence[bytes | Message],
        *,
        tags: str | Sequence[str | None] | None = None,
        keys: Sequence[Keys | None] | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_keys: Sequence[str | None] | None = None,
        key: str | Sequence[str | None] | None = None,
        queue: int | None = None,
        delay: float | timedelta | None = None,
        delay_level: int | None = None,
        deliver_at: datetime | int | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> _BatchFields:
        """The arguments of a batch, checked. Raises InvalidMessageError."""
        limit_s = self._limit(timeout_s)
        keys, sharding_keys = keys_of_batch(key, keys, sharding_keys, messages)
        options: dict[str, Any] = {"tags": tags, "keys": keys, "properties": properties, "sharding_keys": sharding_keys}
        if delay is not None or delay_level is not None or deliver_at is not None:
            options["asked"] = self._asked(delay, delay_level, deliver_at)
        return _BatchFields(
            options,
            None if queue is None else check_queue(queue),
            self._ack if ack is None else check_ack(ack),
            limit_s,
            time.monotonic() + limit_s,
        )

    def _flush_before(self, messages: Sequence[bytes | Message], asked: _BatchFields) -> None:
        """Wait for the messages that were sent before a batch, if the batch names its queues: they come first there.

        Raises SendError.
        """
        named = asked.queue is not None or asked.options["sharding_keys"] is not None or has_sharding_keys(messages)
        if self._lanes.all_in_flight() and named and not self._lanes.flush(asked.deadline):
            raise not_stored("CLIENT_BUSY", "messages that were sent before the batch are still pending")

    def _plan(self, topic: str, messages: Sequence[bytes | Message], asked: _BatchFields) -> tuple[BatchPlan, bool]:
        """The batch with its properties, and whether it goes as inner batches. Raises InvalidMessageError."""
        # Only batches need numpy: a producer of single messages starts without it.
        from commitmq.client.sending.batch import plan_batch

        inner = self._lanes.routes.takes_inner_batches(check_topic(topic), asked.deadline)
        if inner and self._sequences is not None:
            raise InvalidMessageError(f"topic {topic!r} has queue.type=BatchCQ, which takes no idempotent sends")
        if inner and "asked" in asked.options:
            raise InvalidMessageError(f"topic {topic!r} has queue.type=BatchCQ, whose inner batches cannot be delayed")
        compressed = None if self._compress is None or inner else self._compressed
        plan = plan_batch(topic, messages, **asked.options, compressed=compressed)
        if (
            asked.queue is None
            and self._sequences is not None
            and not self._sequences.is_own
            and (plan.sharding_keys is None or not all(plan.sharding_keys))
        ):
            raise needs_queue()
        return plan, inner

    def _submit_batch(self, plan: BatchPlan, inner: bool, asked: _BatchFields, *, is_async: bool = False) -> Batch:
        """Send a batch, or give it to the pump. Raises SendError (not stored) while too much is pending, and for an
        idempotent producer that cannot continue.
        """
        from commitmq.client.sending.batch import Batch

        if self._sequences is not None:
            self._sequences.check()
            self._check_takes_numbers(plan.topic, min(asked.deadline, time.monotonic() + 1.0))
        pump = self._lanes.of(plan.topic, asked.deadline)
        batch = Batch(
            pump, plan, ack=asked.ack, limit_s=asked.limit_s, inner=inner, queue=asked.queue, is_async=is_async
        )
        if is_async:
            pump.outbox.submit_batch(batch)
        else:
            pump.send_waiting(batch)
        return batch

    # ------------------------------------------------------------ requests and cancellations

    def request(
        self,
        topic: str,
        body: bytes | Message,
        **fields: Unpack[RequestOptions],
    ) -> Message:
        """Send one message, wait for the reply of the consumer that handles it, and return the reply.

        ``timeout_s`` (default: the producer's) is for both. Other arguments as of :meth:`send`. A request is a plain message
        with RocketMQ's marks: it may be handled although nobody waits any more, and each group of the topic may reply; the
        first reply counts.

        Raises RequestTimeoutError without a reply, SendError for a request that was not acknowledged or while
        ``max_requests`` wait.
        """
        self._check_usable()
        self._check_may_wait()
        limit = self._limit(fields.get("timeout_s"))
        deadline = time.monotonic() + limit
        producer = self._one(topic, body, fields)
        producer._replies.start(deadline)
        waiting = producer._replies.open(limit)
        try:
            message = request_message(body, fields, waiting.marks)
            left_s = max(deadline - time.monotonic(), 0.001)
            producer.send(topic, message, queue=fields.get("queue"), timeout_s=left_s, ack=fields.get("ack"))
            return waiting.reply.result(max(deadline - time.monotonic(), 0))
        except FutureTimeoutError:
            raise no_reply(topic, waiting, limit) from None
        finally:
            producer._replies.drop(waiting)

    def reply(
        self,
        message: Message,
        body: bytes | Message,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> SendResult:
        """Reply to the request ``message``: its requester gets ``body``. Raises as :meth:`send`, and InvalidMessageError
        when ``message`` is no request. In a handler ``message.reply(body)`` does the same.
        """
        self._check_replies()
        made = reply_message(message, body, properties)
        limit = self._limit(timeout_s)
        queue = made.queue
        if queue is None:
            queue = shard(made.client_id, self._lanes.routes.queues(check_topic(made.topic), time.monotonic() + limit))
        return self.send(made.topic, made.message, queue=queue, timeout_s=limit, ack=ack)

    @property
    def late_replies(self) -> int:
        """Replies that came when nobody waited for them any more. They are dropped."""
        return self._replies.late

    def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """Cancel a message that waits for its time: no consumer will get it.

        ``receipt`` is the result of its send with ``delay`` or ``deliver_at``, or RocketMQ's recall handle. That is possible
        until half a second before the second in which it is due. Later the node refuses (SendError with the code
        ILLEGAL_OPERATION). A cancellation of unknown outcome may be repeated. Raises InvalidMessageError for a message that
        does not wait for a time of its own.
        """
        from commitmq.client.sending.lone import LoneMessage
        from commitmq.client.sending.options import cancel_fields

        self._check_usable()
        self._check_may_wait()
        fields = cancel_fields(receipt)
        deadline = time.monotonic() + self._limit(timeout_s)
        lone = LoneMessage(self._lanes.writer, fields, b"0", deadline)
        self._lanes.writer.send_waiting(lone)
        lone.wait()

    # ------------------------------------------------------------ transactions

    def transaction(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> Transaction:
        """A message that others see only if the block of a ``with`` succeeds; ``fields`` as in :meth:`send`.

        The producer needs a ``group``. See :class:`commitmq.Transaction`. A ``delay`` begins with the commit.
        """
        from commitmq.client.transactions.transaction import Transaction

        producer = self._one(topic, body, fields)
        group, limit = producer._transaction_group(), self._limit(fields.get("timeout_s"))
        return Transaction(
            group, limit, partial(producer._send_half, topic, body, fields), partial(content_for_listener, body, fields)
        )

    def send_in_transaction(
        self, topic: str, body: bytes | Message, argument: Any = None, **fields: Unpack[MessageOptions]
    ) -> TransactionResult:
        """Send a half message, call the listener's ``execute(message, argument)``, and end the transaction as it says.

        With UNKNOWN, and when ``execute`` raises, the transaction stays open: the node asks later. Raises what ``execute``
        raises, SendError, and InvalidMessageError without a listener that has ``execute``.
        """
        from commitmq.client.transactions.half_message import TransactionResult, TransactionState

        made = self.transaction(topic, body, **fields)
        group = made._group
        group.check_executes()
        with made as transaction:
            try:
                state = group.execute(transaction.half, *content_for_listener(body, fields), argument)
            except BaseException:
                transaction.unknown()
                raise
            if state is TransactionState.COMMIT:
                transaction.commit()
            elif state is TransactionState.ROLLBACK:
                transaction.rollback()
            else:
                transaction.unknown()
        return TransactionResult(transaction.half, state, transaction.committed)

    def _transaction_group(self) -> TransactionGroup:
        self._check_usable()
        if self._transactions is None:
            raise InvalidMessageError(
                "a transaction needs Producer(group=…): the node asks a producer of the group about it"
            )
        if self._sequences is not None:
            raise InvalidMessageError("an idempotent producer's messages cannot be part of a transaction")
        return self._transactions

    def _send_half(self, topic: str, body: bytes | Message, fields: MessageOptions) -> SendResult:
        """Send a half message, and wait until the node keeps it."""
        self._check_may_wait()
        deadline = time.monotonic() + self._limit(fields.get("timeout_s"))
        return self._wait_for(self._submit_half(topic, body, self._half_options(fields), deadline), deadline)

    def _half_options(self, fields: MessageOptions) -> HalfOptions:
        """``fields`` with what the half message asks of the node. Raises InvalidMessageError."""
        delay, level, at = fields.get("delay"), fields.get("delay_level"), fields.get("deliver_at")
        later = None if delay is None and level is None and at is None else self._asked(delay, level, at)
        plain = {name: value for name, value in fields.items() if name not in ("delay", "delay_level", "deliver_at")}
        return cast(HalfOptions, {**plain, "half": self._transaction_group().asked(later)})

    def _submit_half(
        self, topic: str, body: bytes | Message, fields: HalfOptions, deadline: float | None = None
    ) -> SendFuture:
        """Give a half message to the pump. Raises InvalidMessageError, NoRoom."""
        self._check_usable()
        if deadline is None:
            deadline = time.monotonic() + self._limit(fields.get("timeout_s"))
        message, queue, ack = Message.of(body, fields), fields.get("queue"), fields.get("ack")
        return self._submit(topic, message, None, None, None, None, queue, 0, ack, fields["half"], deadline)

    # ------------------------------------------------------------ the end

    def close(self, timeout_s: float | None = None) -> None:
        """Send the pending messages (for at most ``timeout_s``, default the producer's), then close every connection.

        Sends that are still pending then fail: as not stored if the connection did not take them, as unknown otherwise.
        Closing twice is allowed.
        """
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + limit
        self._replies.close()
        self._lanes.close(deadline)
        if self._transactions is not None:
            self._transactions.close(max(deadline - time.monotonic(), 0))
        if self._tracer is not None:
            self._tracer.close(limit)

    def _forgotten(self) -> None:
        self.close(timeout_s=0)

    def __repr__(self) -> str:
        return f"Producer({self._lanes.writer.lane.directory.address!r}, ack={self._ack!r})"

    # ------------------------------------------------------------ steps

    def _limit(self, timeout_s: float | None) -> float:
        """The time of one call, in seconds."""
        return self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)

    def _one(self, topic: str, body: bytes | Message, fields: Mapping[str, Any]) -> Producer:
        """The producer of the node that has all steps of a request or of a transaction: this one has one node."""
        return self

    def _check_replies(self) -> None:
        """Whether a reply is possible: this producer's node is the one of the request."""

    def _pending(self) -> int:
        """How many sends have no outcome yet."""
        return self._lanes.all_in_flight()

    # What follows is for a caller that must not wait, an event loop.

    def _never_wait_for_room(self, tell: Callable[[], None]) -> None:
        """From now on a send raises NoRoom instead; ``tell`` is called when there may be room again, in any thread."""
        self._lanes.waiters.room = tell

    def _send_at_once(self, topic: str, body: bytes | Message, fields: MessageOptions) -> Future[SendResult]:
        """As :meth:`send_async`; raises NoRoom, or TopicUnknownError where that would ask the coordinator."""
        if self._would_ask(check_topic(topic), body, fields):
            raise TopicUnknownError
        if "half" in fields:
            return self._submit_half(topic, body, cast(HalfOptions, fields))
        return self.send_async(topic, body, **fields)

    def _look_up(self, topic: str, body: bytes | Message, fields: MessageOptions, deadline: float) -> None:
        """Ask for what :meth:`_send_at_once` did not know. Raises SendError."""
        self._lanes.routes.queues(topic, deadline)

    def _queue_of_key(self, topic: str, body: bytes | Message, sharding_key: str | None, deadline: float) -> int | None:
        """The queue that the message's sharding key picks, None without one. May ask the coordinator; raises SendError."""
        if isinstance(body, Message):
            sharding_key = sharding_key or body.properties.get(Property.SHARDING_KEY)
        if not sharding_key:
            return None
        if type(sharding_key) is not str:
            raise InvalidMessageError(f"sharding_key must be a string, not {type(sharding_key).__name__}")
        return shard(sharding_key, self._lanes.routes.queues(check_topic(topic), deadline))

    def _asked(
        self,
        delay: float | timedelta | None,
        delay_level: int | None,
        deliver_at: datetime | int | None,
        multi_dispatch: object = None,
    ) -> SystemProperties:
        """What a send with a delay or a time of delivery asks for. Raises InvalidMessageError."""
        if self._sequences is not None:
            raise InvalidMessageError("an idempotent producer's messages cannot be delayed")
        if multi_dispatch is not None:
            raise InvalidMessageError("a message for further queues cannot be delayed")
        return asked_time(delay, delay_level, deliver_at)

    def _would_ask(self, topic: str, body: bytes | Message, fields: Mapping[str, Any]) -> bool:
        """Whether ``send_async`` of this message would ask the coordinator, and wait for the answer."""
        if self._sequences is None:
            if fields.get("queue") is not None:
                return False
            if not (fields.get("sharding_key") or fields.get("key") or isinstance(body, Message)):
                return False
            if isinstance(body, Message) and not body.sharding_key:
                return False
        return not self._lanes.routes.fresh(topic)

    def _check_may_wait(self) -> None:
        if self._lanes.in_pump():
            raise CommitMQError("a callback of a send must not wait for a send; use send_async")

    def _compressed(self, body: bytes) -> tuple[bytes, int]:
        """``body`` as it is stored, and the sysFlag bits of its compression."""
        if self._compress is None or len(body) <= self._compress_over:
            return body, 0
        smaller = compress(body, self._compress)
        return (smaller, self._compress_flags) if len(smaller) < len(body) else (body, 0)

    def _submit(
        self,
        topic: str,
        body: bytes | Message,
        tags: str | None,
        keys: Keys | None,
        properties: Mapping[str, str] | None,
        sharding_key: str | None,
        queue: int | None,
        flag: int,
        ack: str | None,
        asked: SystemProperties | None,
        deadline: float,
    ) -> SendFuture:
        if isinstance(body, Message):
            check_alone(tags, keys, properties, sharding_key, None, flag)
            body, own, flag = content_of(body)
            sharding_key = own.get(Property.SHARDING_KEY)
            encoded = encode_user_properties(own)
        else:
            if type(body) is not bytes or not body:
                body = check_body(body)
            if tags is None and keys is None and properties is None and sharding_key is None:
                encoded = b""
            else:
                encoded = encode_user_properties(build_properties(tags, keys, properties, sharding_key))
        if asked is not None:
            encoded += asked.encoded
            check_properties_size(len(encoded))
        if flag:
            check_flag(flag)
        check_topic(topic)
        if self._sequences is not None:
            self._check_numbered(topic, queue, sharding_key, len(encoded), deadline)
        if queue is not None:
            queue = check_queue(queue)
        elif sharding_key:
            queue = self._queue_of_key(topic, body, sharding_key, deadline)
        sys_flag = 0
        if self._compress is not None:
            body, sys_flag = self._compressed(body)
        extras = (encoded, flag, sys_flag) if encoded or flag or sys_flag else None
        queue = -1 if queue is None else queue
        group = "" if asked is None else asked.key
        return self._outbox.submit(
            topic, queue, self._ack if ack is None else check_ack(ack), body, extras, deadline, group
        )

    def _check_numbered(
        self, topic: str, queue: int | None, sharding_key: str | None, properties_bytes: int, deadline: float
    ) -> None:
        assert self._sequences is not None
        check_properties_size(properties_bytes + MAX_MARK_BYTES)
        if queue is None and not sharding_key and not self._sequences.is_own:
            raise needs_queue()
        self._sequences.check()
        self._check_takes_numbers(topic, min(deadline, time.monotonic() + 1.0))

    def _check_takes_numbers(self, topic: str, deadline: float) -> None:
        if self._lanes.routes.is_memory(topic, deadline):
            raise InvalidMessageError(f"topic {topic!r} is kept in memory: memory topics take no idempotent sends")

    def _send_to_further_queues(
        self,
        topic: str,
        message: Message,
        queue: int | None,
        names: Iterable[str],
        deadline: float,
        ack: str | None,
    ) -> SendResult:
        """Send a message with ``multi_dispatch``, behind all earlier messages."""
        if self._sequences is not None:
            raise InvalidMessageError("an idempotent producer's messages cannot go to further queues")
        self._check_may_wait()
        if self._lanes.routes.is_memory(check_topic(topic), min(deadline, time.monotonic() + 1.0)):
            raise InvalidMessageError(f"topic {topic!r} is kept in memory: its messages cannot go to further queues")
        body, own, flag = content_of(message)
        sharding_key = own.get(Property.SHARDING_KEY)
        own[Property.INNER_MULTI_DISPATCH] = join_queue_names(names)
        own[Property.UNIQUE_KEY] = self._ids.next()
        body, sys_flag = self._compressed(body)
        if queue is None and sharding_key:
            queue = shard(sharding_key, self._lanes.routes.queues(topic, deadline))
        fields = {
            "v": wire.PROTOCOL_VERSION,
            "op": "send",
            "topic": check_topic(topic),
            "ack": self._ack if ack is None else check_ack(ack),
            "born": time.time_ns() // 1_000_000,
            "properties": own,
            "flag": check_flag(flag),
            "sys_flag": sys_flag,
            "queue": -1 if queue is None else check_queue(queue),
        }
        from commitmq.client.sending.lone import LoneMessage

        if self._lanes.all_in_flight():
            self._lanes.flush(deadline)
        lone = LoneMessage(self._lanes.writer, fields, body, deadline)
        self._lanes.writer.send_waiting(lone)
        return lone.wait()

    def _send_along(self, *arguments: Any) -> SendResult:
        """Send through the pump, and wait for the outcome.

        Others are sending, and to join their runs is faster than to take turns; or the message gets a number, which is the
        pump's task; or there is no connection at the moment, and the pump makes one.
        """
        self._check_usable()
        self._check_may_wait()
        deadline: float = arguments[-1]
        return self._wait_for(self._submit(*arguments), deadline)

    def _wait_for(self, future: SendFuture, deadline: float) -> SendResult:
        """The outcome of a message that the pump has."""
        try:
            # The pump fails it at its deadline. The further 0.25 s are for a pump that waits for a connection.
            return future.result_by(deadline + 0.25)
        except FutureTimeoutError:
            if future.done():
                return future.result(0)
            if future.cancel():
                raise not_stored("TIMEOUT", "other sends of this producer held its connection for too long") from None
            raise unknown("no answer in time", "TIMEOUT") from None
        except BaseException:
            future.cancel()
            raise


def content_for_listener(body: bytes | Message, fields: MessageOptions) -> tuple[bytes, dict[str, str]]:
    """Body and properties of a message, as a listener gets them."""
    content, own, _ = content_of(Message.of(body, fields))
    return content, own
