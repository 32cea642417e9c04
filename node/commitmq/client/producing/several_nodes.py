"""The producer with several nodes: one producer for each, and for every send the choice of one (RocketMQ's DefaultMQProducer).

A program makes it as ``Producer("tcp://a:7310,tcp://b:7310")``, which then becomes an object of a class with this part. So
a producer of one node pays nothing for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.message import Message, check_topic
from commitmq.client.producer_base import ProducerBase
from commitmq.client.producing.batch_parts import Part, joined, joined_error, parts_of
from commitmq.client.producing.effort import Effort
from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.producing.moving import Movers, Moving, placed, placed_batch
from commitmq.client.producing.node import Node
from commitmq.client.producing.node_set import NodeSet
from commitmq.client.results import BatchResult, SendResult
from commitmq.client.sending.arguments import check_ack
from commitmq.client.sending.options import (
    BatchOptions,
    MessageOptions,
    OnDelivery,
    ProducerOptions,
    check_retries,
    tell_delivery,
)
from commitmq.client.transactions.half_message import TransactionResult
from commitmq.client.transactions.transaction import Transaction
from commitmq.errors import CommitMQError, InvalidMessageError, SendError

_R = TypeVar("_R")
_kinds: dict[type[ProducerBase], type[ProducerBase]] = {}
_OWN: Final = ("retries", "retry_may_store_twice", "fault_strategy")


def become_several(
    producer: ProducerBase, kind: type[ProducerBase], addresses: Sequence[str], given: Mapping[str, Any]
) -> None:
    """Make ``producer``, a new object of ``kind``, one with several nodes. Raises as the producer of one node does.

    ``given``: the arguments of its constructor, among others. It gets another class, so that a producer of
    one node need not ask before each send how many nodes it has.
    """
    made: Any = _kind_of_several(type(producer))
    producer.__class__ = made
    settings = {name: given[name] for name in ProducerOptions.__annotations__}
    made.take_nodes(producer, addresses, settings, kind)


def _kind_of_several(kind: type[ProducerBase]) -> type[ProducerBase]:
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


class SeveralNodes(ProducerBase):
    """A part of a :class:`commitmq.Producer` that was given several nodes. It comes before the part for one node."""

    def take_nodes(
        self, addresses: Sequence[str], settings: Mapping[str, Any], kind: Callable[..., ProducerBase]
    ) -> None:
        """``kind`` makes the producer of one node. Raises as it does."""
        self._closed = True
        self._pid = os.getpid()
        self._nodes, own = node_set(addresses, settings)
        self._ack = check_ack(own.get("ack", "flushed"))
        self._timeout_s = checks.seconds("timeout_s", own.get("timeout_s", 10.0))
        self._movers = Movers()
        made: list[ProducerBase] = []
        try:
            for node in self._nodes.nodes:
                made.append(kind(node.address, **own))
                self._nodes.attach(node, made[-1])
        except BaseException:
            for producer in made:
                producer.close(0)
            raise
        self._closed = False

    def __repr__(self) -> str:
        return f"Producer({[node.address for node in self._nodes.nodes]!r}, ack={self._ack!r})"

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
        effort = self._effort(topic, body, fields)

        def send_at(node: Node, left_s: float) -> SendResult:
            began = time.monotonic()
            call = object()
            try:
                node.calls[call] = began
                result = node.producer.send(topic, body, timeout_s=left_s, **fields)
            finally:
                node.calls.pop(call, None)
            node.faults.answered(time.monotonic() - began)
            return placed(result, node)

        return self._at_a_node(effort, send_at)

    def _at_a_node(self, effort: Effort, send_at: Callable[[Node, float], _R]) -> _R:
        """Try ``send_at(node, seconds)`` at one node after the other. Raises the last error."""
        self._check_usable()
        self._check_may_wait()
        while True:
            node = effort.next()
            now = time.monotonic()
            try:
                return send_at(node, effort.time_s(now))
            except SendError as error:
                pause_s = effort.failed(error, time.monotonic())
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

        def hand_over(node: Node, left_s: float) -> Future[SendResult]:
            sent: Future[SendResult] = node.producer.send_async(topic, body, timeout_s=left_s, **fields)
            return sent

        moving = Moving(self._effort(topic, body, fields), hand_over, placed, self._movers)
        if on_delivery is not None:
            moving.add_done_callback(partial(tell_delivery, on_delivery))
        return self._movers.begin(moving)

    def _effort(self, topic: str, body: bytes | Message, fields: dict[str, Any]) -> Effort:
        """The effort for one message. Takes the time of the call out of ``fields``."""
        deadline = time.monotonic() + self._limit(fields.pop("timeout_s", None))
        return self._nodes.effort(check_topic(topic), *self._nodes.pin_of(topic, body, fields), deadline)

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

    def _send_part(self, topic: str, part: Part, limit_s: float) -> Future[BatchResult]:
        effort = self._nodes.effort(topic, part.pin, part.name, time.monotonic() + limit_s)

        def hand_over(node: Node, left_s: float) -> Future[BatchResult]:
            producer = node.producer
            sent: Future[BatchResult] = producer.send_batch_async(topic, part.messages, timeout_s=left_s, **part.fields)
            return sent

        moving = Moving(effort, hand_over, placed_batch, self._movers)
        try:
            return self._movers.begin(moving)
        except SendError as error:  # another part may be under way: the outcome of all is in the future
            moving.fail(error)
            return moving

    # ------------------------------------------------------------ what stays at one node

    def transaction(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> Transaction:
        """See :meth:`commitmq.Producer.transaction`. It stays at one node."""
        made: Transaction = self._one(topic, body, fields).transaction(topic, body, **fields)
        return made

    def send_in_transaction(
        self, topic: str, body: bytes | Message, argument: Any = None, **fields: Unpack[MessageOptions]
    ) -> TransactionResult:
        """See :meth:`commitmq.Producer.send_in_transaction`. It stays at one node."""
        producer = self._one(topic, body, fields)
        result: TransactionResult = producer.send_in_transaction(topic, body, argument, **fields)
        return result

    def request(self, topic: str, body: bytes | Message, **fields: Any) -> Message:
        """See :meth:`commitmq.Producer.request`. It stays at one node."""
        reply: Message = self._one(topic, body, fields).request(topic, body, **fields)
        return reply

    def reply(
        self,
        message: Message,
        body: bytes | Message,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> SendResult:
        """Raises InvalidMessageError: a message does not name its node. ``message.reply(body)`` replies in a handler."""
        raise no_reply_here()

    @property
    def late_replies(self) -> int:
        """See :attr:`commitmq.Producer.late_replies`: of all nodes."""
        return sum(node.producer.late_replies for node in self._nodes.nodes)

    def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """See :meth:`commitmq.Producer.cancel`. The receipt has to be a SendResult of such a producer: it names the node."""
        self._check_usable()
        node_of_receipt(self._nodes, receipt).producer.cancel(receipt, timeout_s=timeout_s)

    def _one(self, topic: str, body: bytes | Message, fields: Any) -> Any:
        """The producer of the node for a message that stays there, a :class:`commitmq.Producer`."""
        self._check_usable()
        return self._effort(topic, body, dict(fields)).next().producer

    # ------------------------------------------------------------ the end

    def flush(self, timeout_s: float | None = None) -> None:
        """See :meth:`commitmq.Producer.flush`."""
        self._check_usable()
        self._check_may_wait()
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if not self._flush(time.monotonic() + limit):
            raise TimeoutError(f"{len(self._movers.open)} sends are still pending after {limit} s")

    def _flush(self, deadline: float) -> bool:
        for node in self._nodes.nodes:
            outbox = node.producer._lanes.writer.outbox
            with outbox.lock:
                outbox.end_linger()
        return self._movers.flush(deadline)

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
        self._movers.close()
        self._nodes.detector.close()
        for node in self._nodes.nodes:
            node.producer.close(max(deadline - time.monotonic(), 0))

    def _in_pump(self) -> bool:
        return self._movers.is_mover() or any(node.producer._lanes.in_pump() for node in self._nodes.nodes)

    def _check_may_wait(self) -> None:
        if self._in_pump():
            raise CommitMQError("a callback of a send must not wait for a send; use send_async")


class JoinedBatch(Future[BatchResult]):
    """The outcome of a batch in several parts. It cannot be cancelled."""

    def __init__(self, parts: Sequence[Part], sent: Sequence[Future[BatchResult]]) -> None:
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


def node_of_receipt(nodes: NodeSet, receipt: SendResult | str) -> Node:
    """The node that has the message of ``receipt``. Raises InvalidMessageError when it names none of ``nodes``."""
    node = nodes.of_address(receipt.node) if isinstance(receipt, SendResult) else None
    if node is None:
        raise InvalidMessageError(
            "the receipt names no node of this producer: cancel with the SendResult of a producer that has several nodes, "
            "or by a producer of the message's own node"
        )
    return node


def no_reply_here() -> InvalidMessageError:
    """The error of a reply by a producer with several nodes."""
    return InvalidMessageError(
        "a message does not name its node: reply with message.reply(body) in a handler, or by a producer of the one node"
    )
