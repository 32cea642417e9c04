"""The asyncio producer with several nodes: one :class:`commitmq.AsyncProducer` for each, and the efforts of the synchronous
one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.message import Message, check_topic
from commitmq.client.producing.choice import Effort, Node
from commitmq.client.producing.several_nodes import (
    Part,
    joined,
    joined_error,
    may_move,
    no_reply_here,
    node_of_receipt,
    node_set,
    parts_of,
    placed,
    placed_batch,
)
from commitmq.client.results import BatchResult, BatchSendError, SendResult
from commitmq.client.sending.options import (
    BatchOptions,
    MessageOptions,
    OnDelivery,
    RequestOptions,
    tell_delivery,
)
from commitmq.client.transactions.half_message import TransactionResult
from commitmq.client.transactions.transaction import AsyncTransaction
from commitmq.errors import CommitMQError, SendError

_T = TypeVar("_T")
_kinds: dict[type[Any], type[Any]] = {}


def become_several(producer: Any, kind: type[Any], addresses: Sequence[str], settings: Mapping[str, Any]) -> None:
    """As :func:`commitmq.client.producing.several_nodes.become_several`."""
    made: Any = _kind_of_several(type(producer))
    producer.__class__ = made
    made.take_nodes(producer, addresses, settings, kind)


def _kind_of_several(kind: type[Any]) -> type[Any]:
    made = _kinds.get(kind)
    if made is None:
        made = _kinds[kind] = type("AsyncNodesProducer", (AsyncSeveralNodes, kind), {})
    return made


class AsyncMoving(asyncio.Future[_T], Generic[_T]):
    """The future that the program awaits. Cancelling it withdraws a message that the connection does not have yet."""

    def __init__(
        self,
        effort: Effort,
        hand_over: Callable[[Node, float], asyncio.Future[_T]],
        place: Callable[[_T, Node], _T],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self._effort = effort
        self._hand_over = hand_over
        self._place = place
        self._tried: asyncio.Future[_T] | None = None

    def begin(self) -> None:
        """Make the next try. Raises InvalidMessageError for a message that no node takes."""
        effort = self._effort
        node = effort.next()
        self._tried = self._hand_over(node, effort.time_s(time.monotonic()))
        self._tried.add_done_callback(self._arrived)

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done() and self._tried is not None:
            self._tried.cancel()
        return super().cancel(msg)

    def _arrived(self, tried: asyncio.Future[_T]) -> None:
        self._tried = None
        node = self._effort.node
        assert node is not None
        if tried.cancelled():
            super().cancel()
            return
        error = tried.exception()
        if self.done():
            return
        if error is None:
            self.set_result(self._place(tried.result(), node))
            return
        if isinstance(error, BatchSendError):
            placed_batch(error, node)
        if not isinstance(error, SendError) or not may_move(error):
            self.set_exception(error)
            return
        try:
            pause_s = self._effort.failed(error, time.monotonic())
        except SendError as last:
            self.set_exception(last)
            return
        self.get_loop().call_later(pause_s, self._again)

    def _again(self) -> None:
        if self.done():
            return
        if time.monotonic() >= self._effort.deadline:
            self.set_exception(self._effort.out_of_time())
            return
        try:
            self.begin()
        except Exception as error:
            self.set_exception(error)


class AsyncSeveralNodes:
    """A part of a :class:`commitmq.AsyncProducer` that was given several nodes. It comes before the part for one node."""

    _closing: bool

    def take_nodes(self, addresses: Sequence[str], settings: Mapping[str, Any], kind: Callable[..., Any]) -> None:
        """``kind`` makes the producer of one node, an :class:`commitmq.AsyncProducer`. Raises as it does."""
        self._nodes, own = node_set(addresses, settings)
        self._timeout_s = checks.seconds("timeout_s", own.get("timeout_s", 10.0))
        self._producers: dict[Node, Any] = {}
        self._open: set[asyncio.Future[Any]] = set()
        self._closing = False
        for node in self._nodes.nodes:
            made = self._producers[node] = kind(node.address, **own)
            self._nodes.attach(node, made._producer)

    # ------------------------------------------------------------ messages

    async def send(
        self,
        topic: str,
        body: bytes | Message,
        *,
        multi_dispatch: Iterable[str] | None = None,
        **fields: Unpack[MessageOptions],
    ) -> SendResult:
        """See :meth:`commitmq.AsyncProducer.send`."""
        if multi_dispatch is None:
            return await self.send_async(topic, body, **fields)
        names = list(multi_dispatch)
        given: dict[str, Any] = dict(fields)

        def hand_over(node: Node, left_s: float) -> asyncio.Future[SendResult]:
            made = self._producers[node].send(topic, body, multi_dispatch=names, **{**given, "timeout_s": left_s})
            sent: asyncio.Future[SendResult] = asyncio.ensure_future(made)
            return sent

        return await self._begin(self._effort(topic, body, given), hand_over, placed)

    def send_async(
        self,
        topic: str,
        body: bytes | Message,
        *,
        on_delivery: OnDelivery | None = None,
        **fields: Unpack[MessageOptions],
    ) -> asyncio.Future[SendResult]:
        """See :meth:`commitmq.AsyncProducer.send_async`."""
        given: dict[str, Any] = dict(fields)
        if on_delivery is not None:
            checks.callback("on_delivery", on_delivery)

        def hand_over(node: Node, left_s: float) -> asyncio.Future[SendResult]:
            sent: asyncio.Future[SendResult]
            sent = self._producers[node].send_async(topic, body, **{**given, "timeout_s": left_s})
            return sent

        sent = self._begin(self._effort(topic, body, given), hand_over, placed)
        if on_delivery is not None:
            sent.add_done_callback(partial(tell_delivery, on_delivery))
        return sent

    submit = send_async

    async def send_batch(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> BatchResult:
        """See :meth:`commitmq.AsyncProducer.send_batch`."""
        return await self.send_batch_async(topic, messages, **fields)

    def send_batch_async(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> asyncio.Future[BatchResult]:
        """See :meth:`commitmq.AsyncProducer.send_batch_async`."""
        given: dict[str, Any] = dict(fields)
        limit_s = self._limit(given.pop("timeout_s", None))
        self._check_open()
        parts = parts_of(self._nodes, check_topic(topic), messages, given)
        sent = [self._send_part(topic, part, limit_s) for part in parts]
        return sent[0] if len(sent) == 1 else asyncio.ensure_future(_join(parts, sent))

    def _send_part(self, topic: str, part: Part, limit_s: float) -> asyncio.Future[BatchResult]:
        def hand_over(node: Node, left_s: float) -> asyncio.Future[BatchResult]:
            producer = self._producers[node]
            sent: asyncio.Future[BatchResult]
            sent = producer.send_batch_async(topic, part.messages, **{**part.fields, "timeout_s": left_s})
            return sent

        effort = self._nodes.effort(topic, part.pin, part.name, time.monotonic() + limit_s)
        return self._begin(effort, hand_over, placed_batch)

    def _effort(self, topic: str, body: bytes | Message, given: dict[str, Any]) -> Effort:
        """The effort for one message. Takes the time of the call out of ``given``."""
        deadline = time.monotonic() + self._limit(given.pop("timeout_s", None))
        return self._nodes.effort(check_topic(topic), *self._nodes.pin_of(topic, body, given), deadline)

    def _begin(
        self,
        effort: Effort,
        hand_over: Callable[[Node, float], asyncio.Future[_T]],
        place: Callable[[_T, Node], _T],
    ) -> AsyncMoving[_T]:
        self._check_open()
        moving = AsyncMoving(effort, hand_over, place, asyncio.get_running_loop())
        moving.begin()
        self._open.add(moving)
        moving.add_done_callback(self._open.discard)
        return moving

    # ------------------------------------------------------------ what stays at one node

    def transaction(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> AsyncTransaction:
        """See :meth:`commitmq.Producer.transaction`. It stays at one node."""
        made: AsyncTransaction = self._one(topic, body, fields).transaction(topic, body, **fields)
        return made

    async def send_in_transaction(
        self, topic: str, body: bytes | Message, argument: Any = None, **fields: Unpack[MessageOptions]
    ) -> TransactionResult:
        """See :meth:`commitmq.Producer.send_in_transaction`. It stays at one node."""
        producer = self._one(topic, body, fields)
        result: TransactionResult = await producer.send_in_transaction(topic, body, argument, **fields)
        return result

    async def request(self, topic: str, body: bytes | Message, **fields: Unpack[RequestOptions]) -> Message:
        """See :meth:`commitmq.Producer.request`. It stays at one node."""
        reply: Message = await self._one(topic, body, fields).request(topic, body, **fields)
        return reply

    async def reply(
        self,
        message: Message,
        body: bytes | Message,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> SendResult:
        """Raises InvalidMessageError: a message does not name its node."""
        raise no_reply_here()

    @property
    def late_replies(self) -> int:
        """See :attr:`commitmq.Producer.late_replies`: of all nodes."""
        return sum(one.late_replies for one in self._producers.values())

    async def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """As :meth:`commitmq.Producer.cancel`. The receipt has to be a SendResult of such a producer: it names the node."""
        self._check_open()
        await self._producers[node_of_receipt(self._nodes, receipt)].cancel(receipt, timeout_s=timeout_s)

    def _one(self, topic: str, body: bytes | Message, fields: Any) -> Any:
        """The producer of the node for a message that stays there."""
        self._check_open()
        return self._producers[self._effort(topic, body, dict(fields)).next()]

    # ------------------------------------------------------------ the end

    async def flush(self, timeout_s: float | None = None) -> None:
        """See :meth:`commitmq.AsyncProducer.flush`."""
        limit = self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s, zero=True)
        if not await self._flush(time.monotonic() + limit):
            raise TimeoutError(f"{len(self._open)} sends are still pending after {limit} s")

    async def _flush(self, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        while left := [one for one in self._open if one.get_loop() is loop]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait(left, timeout=left_s)
        return True

    async def close(self, timeout_s: float | None = None) -> None:
        """See :meth:`commitmq.AsyncProducer.close`."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        await self._flush(deadline)
        closing = [one.close(max(deadline - time.monotonic(), 0)) for one in self._producers.values()]
        try:
            for outcome in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        finally:
            await asyncio.get_running_loop().run_in_executor(None, self._nodes.detector.close)

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)

    def _check_open(self) -> None:
        if self._closing:
            raise CommitMQError("the producer is closed")


async def _join(parts: Sequence[Part], sent: Sequence[asyncio.Future[BatchResult]]) -> BatchResult:
    outcomes = await asyncio.gather(*sent, return_exceptions=True)
    if any(isinstance(one, BaseException) for one in outcomes):
        raise joined_error(parts, outcomes)
    return joined(parts, [one for one in outcomes if isinstance(one, BatchResult)])
