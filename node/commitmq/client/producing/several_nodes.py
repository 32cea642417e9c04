"""The producer with several nodes: one producer for each, and for every send the choice of one (RocketMQ's DefaultMQProducer).

A program makes it as ``Producer("tcp://a:7310,tcp://b:7310")``, which then becomes an object of a class with this part. So
a producer of one node pays nothing for it.

Messages and batches of a producer with several nodes that are on their way, and the thread that moves them between nodes.

A try at a node is a future of that node's producer. When it fails, the SendAttempts decide. The outcome comes in the sending
thread of one node, which must not wait for the room of another. So a separate failover thread makes each further try.

The parts of one batch that go to different nodes, because the sharding keys of its messages have different homes.

A batch without sharding keys has one part. The messages of a batch that have no key go together, to any node.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.closing import OwnClient
from commitmq.client.message import Message, check_topic
from commitmq.client.producing.choice import PAUSE_S, Affinity, NodeSet, ProducerNode, SendAttempts
from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.results import BatchResult, BatchSendError, RunAck, SendResult
from commitmq.client.routes import not_stored
from commitmq.client.sending.options import (
    BatchOptions,
    MessageOptions,
    OnDelivery,
    ProducerOptions,
    check_ack,
    check_retries,
    keys_of_batch,
    tell_delivery,
)
from commitmq.client.sending.outbox import NoRoom, Waiters
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import CommitMQError, InvalidMessageError, SendError
from commitmq.format.constants import Property

_LONG_S: Final = 60.0
_JOIN_S: Final = 1.0
_T = TypeVar("_T")
_B = TypeVar("_B", BatchResult, BatchSendError)
_log = logging.getLogger("commitmq.client")

HandOver = Callable[[ProducerNode, float], "Future[_T]"]
"""Gives the message to the producer of a node, which has this many seconds for it. May block for room, and raises as
``send_async``."""
PlaceResult = Callable[[_T, ProducerNode], _T]
"""The result with the node in it."""


class FailoverSend(Future[_T], Generic[_T]):
    """The future of the program. Cancelling it withdraws a message that was not passed to a connection yet."""

    def __init__(
        self, attempts: SendAttempts, hand_over: HandOver[_T], place: PlaceResult[_T], failovers: FailoverSends
    ) -> None:
        super().__init__()
        self.attempts = attempts
        self.tried: Future[_T] | None = None
        """The present try; None between two."""
        self._hand_over = hand_over
        self._place = place
        self._failovers = failovers

    def try_next(self) -> float:
        """Hand the message to its next node, until one takes it. Returns 0, or the pause before the next try.

        Raises the error of a message that no node takes.
        """
        attempts = self.attempts
        while True:
            node = attempts.next()
            try:
                tried = self._hand_over(node, attempts.time_s(time.monotonic()))
            except SendError as error:
                pause_s = attempts.failed(error, time.monotonic())
                if pause_s:
                    return pause_s
                continue
            self.tried = tried
            tried.add_done_callback(self._done)
            return 0.0

    def _done(self, tried: Future[_T]) -> None:
        """The present try has its outcome. Called in the sending thread of its node."""
        attempts = self.attempts
        node = attempts.node
        assert node is not None
        try:
            result = tried.result(0)
        except CancelledError:
            self._cancelled()
            return
        except SendError as error:
            if isinstance(error, BatchSendError):
                placed_batch(error, node)
            if not may_move(error):
                self.fail(error)
                return
            try:
                pause_s = attempts.failed(error, time.monotonic())
            except SendError as last:
                self.fail(last)
            else:
                self.tried = None
                self._failovers.put(self, pause_s)
            return
        except BaseException as error:
            self.fail(error)
            return
        self.finish(lambda: self.set_result(self._place(result, node)))

    def fail(self, error: BaseException) -> None:
        """The message has failed."""
        self.finish(lambda: self.set_exception(error))

    def finish(self, tell: Callable[[], None]) -> None:
        """Tell the outcome, which a cancelled future does not take."""
        try:
            if not self.done() and self.set_running_or_notify_cancel():
                tell()
        finally:
            self._failovers.ended(self)

    def cancel(self) -> bool:
        tried = self.tried
        if tried is not None:
            return tried.cancel()  # (its callback cancels this one)
        return self.cancelled() or (self._failovers.withdraw(self) and self._cancelled())

    def _cancelled(self) -> bool:
        """The message was withdrawn."""
        self._failovers.ended(self)
        return super().cancel() and not self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> _T:
        self._hurry()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._hurry()
        return super().exception(timeout)

    def _hurry(self) -> None:
        """A thread waits: end the linger of the node's messages."""
        tried = self.tried
        if isinstance(tried, SendFuture) and not tried.done():
            outbox: Any = tried.sender
            with outbox.lock:
                outbox.end_linger()


def may_move(error: SendError) -> bool:
    """Whether all of what failed with ``error`` may go to another node: no part of a batch is known to be stored."""
    return not (isinstance(error, BatchSendError) and error.stored)


class FailoverSends:
    """The sends without an outcome, and the failover thread for their next attempts. Any thread may call the methods."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        self.open: set[FailoverSend[Any]] = set()
        """What has no outcome yet."""
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, FailoverSend[Any]]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None
        self._bell = threading.Event()
        self._closed = False

    def begin(self, send: FailoverSend[_T]) -> FailoverSend[_T]:
        """Make the first try, in the calling thread. Raises the error of a message that no node takes."""
        self.open.add(send)
        try:
            pause_s = send.try_next()
        except BaseException:
            self.ended(send)
            raise
        if pause_s:
            self.put(send, pause_s)
        return send

    def put(self, send: FailoverSend[Any], pause_s: float) -> None:
        """Make the next try of ``send`` after ``pause_s``, in the failover thread."""
        with self._lock:
            if not self._closed:
                heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._count), send))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="commitmq-producer-failover", daemon=True)
                    self._thread.start()
                self._bell.set()
                return
        send.fail(_closed())

    def withdraw(self, send: FailoverSend[Any]) -> bool:
        """Take ``send`` out of the line; False when it does not wait there."""
        with self._lock:
            left = [one for one in self._due if one[2] is not send]
            found = len(left) < len(self._due)
            heapq.heapify(left)
            self._due = left
        return found

    def ended(self, send: FailoverSend[Any]) -> None:
        """``send`` has its outcome."""
        self.open.discard(send)
        if self.waiters.tickets:
            with self.waiters.lock:
                self.waiters.told()

    def flush(self, deadline: float) -> bool:
        """Wait until everything has its outcome; False when ``deadline`` passed before that."""
        return self.waiters.wait_until(lambda: not self.open, deadline)

    def is_failover_thread(self) -> bool:
        """True in the failover thread. A wait for a send could last for ever there."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread, and fail the messages between two nodes, as not stored."""
        with self._lock:
            self._closed = True
            left, self._due = self._due, []
            self._bell.set()
        for _, _, send in left:
            send.fail(_closed())
        if self._thread is not None and not self.is_failover_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._bell.clear()
                now = time.monotonic()
                send = heapq.heappop(self._due)[2] if self._due and self._due[0][0] <= now else None
                left_s = self._due[0][0] - now if self._due else _LONG_S
            if send is None:
                self._bell.wait(max(left_s, 0))
                continue
            try:
                self._move(send)
            except Exception as error:
                _log.exception("a message could not be moved to another node", extra={"fields": {}})
                send.fail(error)

    def _move(self, send: FailoverSend[Any]) -> None:
        if send.done():
            self.ended(send)
            return
        if time.monotonic() >= send.attempts.deadline:
            send.fail(send.attempts.out_of_time())
            return
        try:
            pause_s = send.try_next()
        except NoRoom:
            pause_s = PAUSE_S  # of a producer that must not wait for room
        except Exception as error:
            send.fail(error)
            return
        if pause_s:
            self.put(send, pause_s)


def _closed() -> SendError:
    return not_stored("CLIENT_CLOSED", "the producer was closed before the message was sent")


def placed_batch(result: _B, node: ProducerNode) -> _B:
    """``result`` with the node that has its messages."""
    for ack in result.acks:
        ack.node = node.address
    return result


def placed(result: SendResult, node: ProducerNode) -> SendResult:
    """``result`` with the node that has the message."""
    return result._replace(node=node.address)


_LISTS = ("tags", "keys", "sharding_keys")


class BatchPart(NamedTuple):
    """The messages of one part, their places in the batch, the fields of their send, and what keeps them at a node."""

    places: Sequence[int]
    messages: Sequence[bytes | Message]
    fields: dict[str, Any]
    affinity: Affinity
    name: str


def parts_of(
    nodes: NodeSet, topic: str, messages: Sequence[bytes | Message], fields: Mapping[str, Any]
) -> list[BatchPart]:
    """The parts of a batch. ``fields`` are those of ``send_batch``. Raises InvalidMessageError."""
    given = dict(fields)
    keys, sharding_keys = keys_of_batch(given.pop("key", None), given.get("keys"), given.get("sharding_keys"), messages)
    given.update(keys=keys, sharding_keys=sharding_keys)
    every = range(len(messages))
    if given.get("queue") is not None:
        return [BatchPart(every, messages, given, *nodes.affinity(topic, given["queue"], None))]
    own = [_sharding_key(one) for one in messages] if sharding_keys is None else list(sharding_keys)
    if not any(own) or len(own) != len(messages):  # (the send itself refuses lists of another length)
        return [BatchPart(every, messages, given, Affinity.FREE, "")]
    places: dict[tuple[Affinity, ProducerNode | None], list[int]] = {}
    for at, key in enumerate(own):
        affinity, name = nodes.affinity(topic, None, key)
        home = None if affinity is Affinity.FREE else nodes.home(name, only_reachable=affinity is Affinity.KEY)
        places.setdefault((affinity, home), []).append(at)
    if len(places) == 1:
        (affinity, _), _ = next(iter(places.items()))
        return [BatchPart(every, messages, given, affinity, _name_of(own, every))]
    _check_whole(topic, messages, given)  # before the first part leaves
    return [
        BatchPart(chosen, [messages[at] for at in chosen], _chosen(given, chosen), affinity, _name_of(own, chosen))
        for (affinity, _), chosen in places.items()
    ]


def _check_whole(topic: str, messages: Sequence[bytes | Message], fields: Mapping[str, Any]) -> None:
    """Raise InvalidMessageError for a batch with a message that no node takes."""
    from commitmq.client.sending.batch import plan_batch

    names = ("tags", "keys", "properties", "sharding_keys")
    plan_batch(topic, messages, **{name: fields.get(name) for name in names}, compressed=None)


def _sharding_key(message: bytes | Message) -> str | None:
    return message.properties.get(Property.SHARDING_KEY) if isinstance(message, Message) else None


def _name_of(keys: Sequence[str | None], places: Sequence[int]) -> str:
    """The key of the part's first message: all keys of a part have the same home."""
    return next((key for at in places if (key := keys[at])), "")


def _chosen(fields: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """``fields`` for the messages at ``places``."""
    chosen = dict(fields)
    for name in _LISTS:
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            chosen[name] = [value[at] for at in places]
    return chosen


def joined(parts: Sequence[BatchPart], results: Sequence[BatchResult]) -> BatchResult:
    """The result of the whole batch, in the order of its messages."""
    if len(parts) == 1:
        return results[0]
    acks: list[RunAck] = []
    order: list[tuple[int, int]] = [(0, 0)] * sum(map(len, results))
    for part, result in zip(parts, results, strict=True):
        first = len(acks)
        acks += result.acks
        for at, (run, within) in zip(part.places, result.places(), strict=True):
            order[at] = (first + run, within)
    return BatchResult(acks, order)


def joined_error(parts: Sequence[BatchPart], outcomes: Sequence[BatchResult | BaseException]) -> BaseException:
    """The error of a batch of which some parts failed: it counts what is stored and unknown of the whole."""
    first = next(one for one in outcomes if isinstance(one, BaseException))
    if len(parts) == 1 or any(isinstance(one, BaseException) and not isinstance(one, SendError) for one in outcomes):
        return next(
            (one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, SendError)), first
        )
    acks: list[RunAck] = []
    stored = unknown = 0
    for one in outcomes:
        if isinstance(one, BatchResult):
            acks += one.acks
            stored += len(one)
        elif isinstance(one, BatchSendError):
            acks += one.acks
            stored += one.stored
            unknown += one.unknown
    assert isinstance(first, SendError)
    total = sum(len(part.messages) for part in parts)
    return BatchSendError(first, acks=acks, stored=stored, unknown=unknown, total=total, stored_prefix=0)


_R = TypeVar("_R")
_kinds: dict[type[OwnClient], type[OwnClient]] = {}
_OWN: Final = ("retries", "retry_may_store_twice", "fault_strategy")


def become_several(
    producer: OwnClient, kind: type[OwnClient], addresses: Sequence[str], given: Mapping[str, Any]
) -> None:
    """Make ``producer``, a new object of ``kind``, one with several nodes. Raises as the producer of one node does.

    ``given``: the arguments of its constructor, among others. It gets another class, so that a producer of
    one node need not ask before each send how many nodes it has.
    """
    made: Any = _kind_of_several(type(producer))
    producer.__class__ = made
    settings = {name: given[name] for name in ProducerOptions.__annotations__}
    made.take_nodes(producer, addresses, settings, kind)


def _kind_of_several(kind: type[OwnClient]) -> type[OwnClient]:
    made = _kinds.get(kind)
    if made is None:
        made = _kinds[kind] = type("NodesProducer", (SeveralNodes, kind), {})
    return made


def node_set(addresses: Iterable[str], settings: Mapping[str, Any]) -> tuple[NodeSet, ProducerOptions]:
    """The nodes of a producer with ``settings``, and the settings of the producer of each."""
    strategy = settings.get("fault_strategy")
    retries = settings.get("retries", 2)
    check_retries(retries, strategy)
    nodes = NodeSet(
        addresses,
        retries=retries,
        may_store_twice=bool(settings.get("retry_may_store_twice", False)),
        strategy=strategy if strategy is not None else FaultStrategy(),
        is_idempotent=settings.get("delivery") is not None,
    )
    rest: Any = {name: value for name, value in settings.items() if name not in _OWN}
    return nodes, rest


class SeveralNodes(OwnClient):
    """A part of a :class:`commitmq.Producer` that was given several nodes. It comes before the part for one node."""

    def take_nodes(self, addresses: Sequence[str], settings: Mapping[str, Any], kind: Callable[..., OwnClient]) -> None:
        """``kind`` makes the producer of one node. Raises as it does."""
        self._closed = True
        self._pid = os.getpid()
        self._nodes, own = node_set(addresses, settings)
        self._ack = check_ack(own.get("ack", "flushed"))
        self._timeout_s = checks.seconds("timeout_s", own.get("timeout_s", 10.0))
        self._failovers = FailoverSends()
        made: list[OwnClient] = []
        try:
            for node in self._nodes.nodes:
                made.append(kind(node.address, **own))
                self._nodes.attach(node, made[-1])
        except BaseException:
            for producer in made:
                producer._forgotten()
            raise
        self._closed = False

    def __repr__(self) -> str:
        return f"Producer({[node.address for node in self._nodes.nodes]!r}, ack={self._ack!r})"

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)

    # ------------------------------------------------------------ messages

    def send(
        self,
        topic: str,
        body: bytes | Message,
        *,
        multi_dispatch: Iterable[str] | None = None,
        **fields: Any,
    ) -> SendResult:
        """See :meth:`commitmq.Producer.send`."""
        if multi_dispatch is not None:
            fields["multi_dispatch"] = list(multi_dispatch)
        attempts = self._attempts(topic, body, fields)

        def send_at(node: ProducerNode, left_s: float) -> SendResult:
            began = time.monotonic()
            call = object()
            try:
                node.calls[call] = began
                result = node.producer.send(topic, body, timeout_s=left_s, **fields)
            finally:
                node.calls.pop(call, None)
            node.faults.answered(time.monotonic() - began)
            return placed(result, node)

        return self._at_a_node(attempts, send_at)

    def _at_a_node(self, attempts: SendAttempts, send_at: Callable[[ProducerNode, float], _R]) -> _R:
        """Try ``send_at(node, seconds)`` at one node after the other. Raises the last error."""
        self._check_usable()
        self._check_may_wait()
        while True:
            node = attempts.next()
            now = time.monotonic()
            try:
                return send_at(node, attempts.time_s(now))
            except SendError as error:
                pause_s = attempts.failed(error, time.monotonic())
            if pause_s:
                time.sleep(pause_s)
            if self._closed:
                self._check_usable()

    def send_async(
        self, topic: str, body: bytes | Message, *, on_delivery: OnDelivery | None = None, **fields: Any
    ) -> Future[SendResult]:
        """See :meth:`commitmq.Producer.send_async`."""
        self._check_usable()
        if on_delivery is not None:
            checks.callback("on_delivery", on_delivery)

        def hand_over(node: ProducerNode, left_s: float) -> Future[SendResult]:
            sent: Future[SendResult] = node.producer.send_async(topic, body, timeout_s=left_s, **fields)
            return sent

        send = FailoverSend(self._attempts(topic, body, fields), hand_over, placed, self._failovers)
        if on_delivery is not None:
            send.add_done_callback(partial(tell_delivery, on_delivery))
        return self._failovers.begin(send)

    def _send_at_once(self, topic: str, body: bytes | Message, fields: MessageOptions) -> Future[SendResult]:
        """See :class:`commitmq.Producer`. Only the failover thread waits: it makes every try but the first."""
        given: dict[str, Any] = dict(fields)

        def hand_over(node: ProducerNode, left_s: float) -> Future[SendResult]:
            sent: Future[SendResult]
            if self._failovers.is_failover_thread():
                sent = node.producer.send_async(topic, body, timeout_s=left_s, **given)
            else:
                sent = node.producer._send_at_once(topic, body, {**given, "timeout_s": left_s})
            return sent

        return self._failovers.begin(
            FailoverSend(self._attempts(topic, body, given), hand_over, placed, self._failovers)
        )

    def _look_up(self, topic: str, body: bytes | Message, fields: MessageOptions, deadline: float) -> None:
        attempts = self._nodes.attempts(topic, *self._nodes.affinity_of(topic, body, dict(fields)), deadline)
        self._at_a_node(
            attempts, lambda node, left_s: node.producer._look_up(topic, body, fields, time.monotonic() + left_s)
        )

    def _never_wait_for_room(self, tell: Callable[[], None]) -> None:
        for node in self._nodes.nodes:
            node.producer._never_wait_for_room(tell)

    def _attempts(self, topic: str, body: bytes | Message, fields: dict[str, Any]) -> SendAttempts:
        """The attempts of one message. Takes the time of the call out of ``fields``."""
        deadline = time.monotonic() + self._limit(fields.pop("timeout_s", None))
        return self._nodes.attempts(check_topic(topic), *self._nodes.affinity_of(topic, body, fields), deadline)

    # ------------------------------------------------------------ batches

    def send_batch(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> BatchResult:
        """See :meth:`commitmq.Producer.send_batch`."""
        self._check_usable()
        self._check_may_wait()
        return self.send_batch_async(topic, messages, **fields).result()

    def send_batch_async(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> Future[BatchResult]:
        """See :meth:`commitmq.Producer.send_batch_async`. A batch whose sharding keys have several homes is cut into parts."""
        self._check_usable()
        given = dict(fields)
        limit_s = self._limit(given.pop("timeout_s", None))  # type: ignore[arg-type]
        if not messages:
            nothing: Future[BatchResult] = self._nodes.nodes[0].producer.send_batch_async(topic, messages)
            return nothing
        parts = parts_of(self._nodes, check_topic(topic), messages, given)
        sent = [self._send_part(topic, part, limit_s) for part in parts]
        return sent[0] if len(sent) == 1 else JoinedBatch(parts, sent)

    def _send_part(self, topic: str, part: BatchPart, limit_s: float) -> Future[BatchResult]:
        attempts = self._nodes.attempts(topic, part.affinity, part.name, time.monotonic() + limit_s)

        def hand_over(node: ProducerNode, left_s: float) -> Future[BatchResult]:
            producer = node.producer
            sent: Future[BatchResult] = producer.send_batch_async(topic, part.messages, timeout_s=left_s, **part.fields)
            return sent

        send = FailoverSend(attempts, hand_over, placed_batch, self._failovers)
        try:
            return self._failovers.begin(send)
        except SendError as error:  # another part may be under way: the outcome of all is in the future
            send.fail(error)
            return send

    # ------------------------------------------------------------ what stays at one node

    def _one(self, topic: str, body: bytes | Message, fields: Mapping[str, Any]) -> Any:
        self._check_usable()
        return self._attempts(topic, body, dict(fields)).next().producer

    def _check_replies(self) -> None:
        raise InvalidMessageError(
            "a message does not name its node: reply with message.reply(body) in a handler, or by a producer of the one node"
        )

    @property
    def late_replies(self) -> int:
        """See :attr:`commitmq.Producer.late_replies`: of all nodes."""
        return sum(node.producer.late_replies for node in self._nodes.nodes)

    def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """See :meth:`commitmq.Producer.cancel`. The receipt has to be a SendResult of such a producer: it names the node."""
        self._check_usable()
        node_of_receipt(self._nodes, receipt).producer.cancel(receipt, timeout_s=timeout_s)

    # ------------------------------------------------------------ the end

    def _pending(self) -> int:
        return len(self._failovers.open)

    def _flush(self, deadline: float) -> bool:
        for node in self._nodes.nodes:
            outbox = node.producer._lanes.writer.outbox
            with outbox.lock:
                outbox.end_linger()
        return self._failovers.flush(deadline)

    def close(self, timeout_s: float | None = None) -> None:
        """See :meth:`commitmq.Producer.close`."""
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + limit
        if not self._in_pump():
            self._flush(deadline)
        self._failovers.close()
        self._nodes.detector.close()
        for node in self._nodes.nodes:
            node.producer.close(max(deadline - time.monotonic(), 0))

    def _in_pump(self) -> bool:
        return self._failovers.is_failover_thread() or any(node.producer._lanes.in_pump() for node in self._nodes.nodes)

    def _check_may_wait(self) -> None:
        if self._in_pump():
            raise CommitMQError("a callback of a send must not wait for a send; use send_async")


class JoinedBatch(Future[BatchResult]):
    """The outcome of a batch in several parts. It cannot be cancelled."""

    def __init__(self, parts: Sequence[BatchPart], sent: Sequence[Future[BatchResult]]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._parts = parts
        self._sent = sent
        self._left = set(map(id, sent))
        for one in sent:
            one.add_done_callback(self._arrived)

    def _arrived(self, one: Future[BatchResult]) -> None:
        with self._condition:
            self._left.discard(id(one))
            if self._left:
                return
            self._left = {0}  # told once
        outcomes = [done.exception(0) or done.result(0) for done in self._sent]
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            self.set_exception(joined_error(self._parts, outcomes))
        else:
            self.set_result(joined(self._parts, [done.result(0) for done in self._sent]))


def node_of_receipt(nodes: NodeSet, receipt: SendResult | str) -> ProducerNode:
    """The node that has the message of ``receipt``. Raises InvalidMessageError when it names none of ``nodes``."""
    node = nodes.of_address(receipt.node) if isinstance(receipt, SendResult) else None
    if node is None:
        raise InvalidMessageError(
            "the receipt names no node of this producer: cancel with the SendResult of a producer that has several nodes, "
            "or by a producer of the message's own node"
        )
    return node
