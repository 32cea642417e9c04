"""Acknowledgements of popped messages, and changes of their invisible time (remoting 5.5).

Acks of one turn of the loop go to the process ``pop`` as one request for each group.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Iterator
from typing import Any, Final

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.log import Log
from commitmq.semantics.pop import ReceiptHandle, topic_of_flag
from commitmq.semantics.retry import popped_topic
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies.pop import BatchAck, decode_batch_acks
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.pop import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_MOST_BITS: Final = 4_096
_PARTS: Final = 8
_MOST_BITS_A_REQUEST: Final = 65_536
_Key = tuple[str, bool]
"""A group, and whether the messages were popped in order."""


class Receipts:
    """See the module."""

    def __init__(self, node: Node, topics: Topics, offsets: Offsets, loop: asyncio.AbstractEventLoop, log: Log,
                 counting: Counting) -> None:  # fmt: skip
        self._node, self._topics, self._offsets, self._loop, self._log = node, topics, offsets, loop, log
        self._counting = counting
        self._limits = node.config.pop
        self._broker = node.config.network.broker_name
        self._noted: dict[_Key, list[tuple[list[str], asyncio.Future[bool]]]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.ACK_MESSAGE: self.ack,
            RequestCode.BATCH_ACK_MESSAGE: self.ack_many,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self.change,
        }

    # ------------------------------------------------------------ acks

    async def ack(self, connection: Connection, command: Command) -> Command:
        """Request 200051."""
        header = AckMessageRequestHeader.decode(command.ext_fields)
        refused = self._wrong(command, connection, header.topic, header.queue_id)
        if refused is not None:
            return refused
        handle = self._handle(header.extra_info, header.offset)
        acked = await self._acked(header.consumer_group, self._pair(header.topic, header.consumer_group, handle))
        if not acked:
            least, end, _ = await self._offsets.bounds(header.topic, header.queue_id)
            if not least <= header.offset <= end:
                key = f"{header.topic}@{header.queue_id}"
                remark = f"offset is illegal, key:{key}, commit:{header.offset}, store:{least}~{end}"
                return command.answer(ResponseCode.NO_MESSAGE, remark)
        if not handle.is_ordered:  # as in RocketMQ, which counts late ones too
            self._counting.acked(header.consumer_group, header.topic)
        return command.answer()  # also for one that came too late (remoting 5.5)

    async def ack_many(self, connection: Connection, command: Command) -> Command:
        """Request 200151."""
        acks = decode_batch_acks(command.body)
        if not acks:
            return command.answer(ResponseCode.NO_MESSAGE)
        bits = sum(min(6 * len(one.bits), _MOST_BITS) for one in acks)
        if bits > _MOST_BITS_A_REQUEST:
            remark = f"the acks have up to {bits} messages, at most {_MOST_BITS_A_REQUEST} are allowed in one request"
            return command.answer(ResponseCode.MESSAGE_ILLEGAL, remark)
        waiting = []
        for one in acks:
            if self._topics.get(one.topic) is None:
                continue
            handles = list(self._handles(one))
            for handle in handles:
                pair = [one.topic, str(handle)]
                waiting.append(self._note((one.consumer_group, handle.is_ordered), pair))
            if handles and not handles[0].is_ordered:
                name = topic_of_flag(one.topic, one.consumer_group, handles[0].flag)
                self._counting.acked(one.consumer_group, name, len(handles))
        for done in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(done, ProtocolError) and done.code == "SERVICE_NOT_AVAILABLE":
                raise done
        return command.answer()

    def _handles(self, ack: BatchAck) -> Iterator[ReceiptHandle]:
        """The receipt handles of a batch's bits."""
        try:
            bits = base64.b64decode(ack.bits, validate=True)[: _MOST_BITS // 8]
        except binascii.Error:
            return
        flag = int(ack.retry) if ack.retry in ("0", "1", "2") else 0
        for index in range(len(bits) * 8):
            if bits[index // 8] >> (index % 8) & 1:
                yield ReceiptHandle(
                    ack.start_offset,
                    ack.pop_time,
                    ack.invisible_time,
                    ack.revive_queue_id,
                    flag,
                    self._broker,
                    ack.queue_id,
                    ack.start_offset + index,
                )

    async def _acked(self, group: str, pair: tuple[list[str], bool]) -> bool:
        return await self._note((group, pair[1]), pair[0])

    def _note(self, key: _Key, pair: list[str]) -> asyncio.Future[bool]:
        """Acknowledge with the others of this turn. The future says whether it came in time."""
        if not self._noted:
            self._loop.call_soon(self._flush)
        future: asyncio.Future[bool] = self._loop.create_future()
        self._noted.setdefault(key, []).append((pair, future))
        return future

    def _flush(self) -> None:
        noted, self._noted = self._noted, {}
        most = self._limits.max_acks
        for (group, _), acks in noted.items():
            for at in range(0, len(acks), most):
                task = self._loop.create_task(self._send(group, acks[at : at + most]))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _send(self, group: str, acks: list[tuple[list[str], asyncio.Future[bool]]]) -> None:
        try:
            answer, _ = await self._node.mover("pop", "ack", group=group, receipts=[pair for pair, _ in acks])
        except ProtocolError as error:
            if error.code == "INVALID_PARAMETER" and len(acks) > 1:
                await asyncio.gather(*(self._send(group, [one]) for one in acks))  # one of them is wrong
                return
            self._log.debug("acks are refused", group=group, code=error.code, error=error.message)
            for _, future in acks:
                if error.code == "INVALID_PARAMETER":
                    _settle(future, False)
                elif not future.done():
                    future.set_exception(error)
            return
        late = set(answer["late"])
        for index, (_, future) in enumerate(acks):
            _settle(future, index not in late)

    # ------------------------------------------------------------ changes

    async def change(self, connection: Connection, command: Command) -> Command:
        """Request 200053."""
        header = ChangeInvisibleTimeRequestHeader.decode(command.ext_fields)
        refused = self._wrong(command, connection, header.topic, header.queue_id)
        if refused is not None:
            return refused
        limits = self._limits
        invisible_ms = max(limits.min_invisible_ms, min(header.invisible_time, limits.max_invisible_ms))
        try:
            handle = self._handle(header.extra_info, header.offset)
            pair, is_ordered = self._pair(header.topic, header.consumer_group, handle)
            fields: dict[str, Any] = {"group": header.consumer_group, "invisible_ms": invisible_ms, "receipts": [pair]}
            answer, _ = await self._node.mover("pop", "extend", **fields)
        except ProtocolError as error:
            code, remark = refusal_of(error)
            return command.answer(ResponseCode.NO_MESSAGE if error.code == "INVALID_PARAMETER" else code, remark)
        text = answer["handles"][0]
        if text is None:  # it is done, or has come back
            if is_ordered:
                return command.answer(ext_fields=ChangeInvisibleTimeResponseHeader(0, 0, 0).encode())
            now_ms = time.time_ns() // 1_000_000
            if handle.expires_ms > now_ms:
                return command.answer(ResponseCode.NO_MESSAGE)
            # Its time was over, so it has come back. RocketMQ takes a late change, and an ack with the new handle.
            late = ChangeInvisibleTimeResponseHeader(now_ms, invisible_ms, handle.revive_queue)
            return command.answer(ext_fields=late.encode())
        if not is_ordered:
            self._counting.acked(header.consumer_group, header.topic)
            self._counting.popped(header.consumer_group, header.topic)
        new = ReceiptHandle.parse(text)
        changed = ChangeInvisibleTimeResponseHeader(new.pop_time, new.invisible_ms, new.revive_queue)
        return command.answer(ext_fields=changed.encode())

    # ------------------------------------------------------------ what they have in common

    def _wrong(self, command: Command, connection: Connection, name: str, queue: int) -> Command | None:
        """The refusal of a request for a queue that is not there."""
        topic = self._topics.get(name)
        if topic is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!")
        if 0 <= queue < topic.read_queues:
            return None
        remark = (
            f"queueId[{queue}] is illegal, topic:[{name}] topicConfig.readQueueNums:[{topic.read_queues}]"
            f" consumer:[{connection.name}]"
        )
        return command.answer(ResponseCode.MESSAGE_ILLEGAL, remark)

    def _handle(self, text: str, offset: int) -> ReceiptHandle:
        """The handle of the message at ``offset``. Raises ProtocolError.

        RocketMQ's proxy puts the message's place in the log behind it.
        """
        try:
            return ReceiptHandle.parse(" ".join(text.split(" ", _PARTS)[:_PARTS]))._replace(queue_offset=offset)
        except InvalidMessageError as error:
            raise ProtocolError("MESSAGE_ILLEGAL", str(error)) from error

    @staticmethod
    def _pair(topic: str, group: str, handle: ReceiptHandle) -> tuple[list[str], bool]:
        """The receipt as the process ``pop`` takes it: with the topic that was asked for."""
        return [popped_topic(topic, group) if handle.flag else topic, str(handle)], handle.is_ordered


def _settle(future: asyncio.Future[bool], acked: bool) -> None:
    if not future.done():
        future.set_result(acked)
