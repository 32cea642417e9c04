"""POP_MESSAGE, and the acks of its messages, which the consumers of a group share (remoting 5.1 to 5.3, 5.6).

The process ``pop`` of the node delivers messages and lets requests wait. This server passes requests on, each client's
over one of several lines, because that process limits what one peer may have. Messages for a client that has gone in the
meantime are returned at once.

A plain record goes out as it is stored; the client makes its receipt handle from the texts of the answer. A record of a
retry topic is encoded again, with the topic that was asked for and with its handle as the property POP_CK. So is a record
of a queue from which one pop got several check points, because the texts have one of each queue.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import QUEUE_OFFSET_OFFSET
from commitmq.format.record import decode_record, encode_record
from commitmq.log import Log
from commitmq.semantics.pop import (
    Delivered,
    ReceiptHandle,
    message_offset_info,
    order_count_info,
    start_offset_info,
    topic_of_flag,
)
from commitmq.semantics.retry import popped_topic
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import FAQ, NodeClient, filter_refusal, refusal_of
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.bodies import BatchAck, decode_batch_acks
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.headers import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    GroupQueueRequestHeader,
    PopMessageRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

Body = list["bytes | bytearray | memoryview"]

_HANDLE: Final = "POP_CK"
_CRC: Final = "__CRC32#"


class PoppedQueue(NamedTuple):
    """What came from one queue; ``size`` in bytes. ``flag``: of which topic (:func:`commitmq.semantics.pop.topic_of_flag`)."""

    flag: int
    messages: int
    size: int


class Popped:
    """The messages of one answer of the process ``pop``, or of a look without receipt handles."""

    def __init__(self, answer: dict[str, Any], frames: list[bytes]) -> None:
        self.body: Body = []
        self.parts: list[PoppedQueue] = []
        self.handles: list[tuple[str, str]] = []
        """Topic and receipt handle of each message, as an ack names it."""
        self._answer = answer
        self._queues: dict[tuple[int, int], Delivered] = {}
        self._counts: list[str] = []
        at = 0
        for part in answer["parts"]:
            self._add(part, frames[at : at + part["frames"]])
            at += part["frames"]

    def texts(self) -> dict[str, str]:
        """The fields that say which messages the body has."""
        queues = list(self._queues.values())
        fields = {"startOffsetInfo": start_offset_info(queues), "msgOffsetInfo": message_offset_info(queues)}
        if self._counts:
            fields["orderCountInfo"] = ";".join(self._counts)
        return fields

    def _add(self, part: dict[str, Any], frames: list[bytes]) -> None:
        flag, queue, start = int(part["flag"]), int(part["queue"]), int(part["start_offset"])
        known = self._queues.get((flag, queue))
        made_anew = flag or known is not None
        handle = ReceiptHandle(
            start,
            self._answer["pop_time"],
            self._answer["invisible_ms"],
            self._answer["revive_queue"],
            flag,
            self._answer["broker"],
            queue,
        )
        offsets = []
        for record in (one for frame in frames for one in records_of(frame)):
            offset = queue_offset(record)
            offsets.append(offset)
            text = str(handle._replace(queue_offset=offset))
            self.handles.append((part["topic"], text))
            self.body.append(_with_handle(record, part["topic"], text) if made_anew else record)
        self.parts.append(PoppedQueue(flag, len(offsets), sum(map(len, frames))))
        before = () if known is None else known.offsets
        first = start if known is None else known.start_offset
        self._queues[flag, queue] = Delivered(flag, queue, first, (*before, *offsets))
        if "counts" in part:
            counts = [(int(offset), int(times)) for offset, times in part["counts"]]
            self._counts.append(order_count_info(flag, queue, counts, len(offsets)))


def records_of(frame: bytes) -> Iterator[memoryview]:
    """The records of a frame."""
    view, at = memoryview(frame), 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        yield view[at : at + size]
        at += size


def queue_offset(record: bytes | memoryview) -> int:
    """The queue offset of a record."""
    return int.from_bytes(record[QUEUE_OFFSET_OFFSET : QUEUE_OFFSET_OFFSET + 8], "big")


def _with_handle(record: memoryview, topic: str, handle: str) -> bytes:
    decoded = decode_record(bytes(record), check_crc=False)
    properties = {name: value for name, value in decoded.properties.items() if name != _CRC}
    properties.setdefault(_HANDLE, handle)
    return encode_record(replace(decoded, topic=topic, properties=properties), buckets=None)


_MOST_BITS: Final = 4_096
_PARTS: Final = 8
_MOST_BITS_A_REQUEST: Final = 65_536
_Key = tuple[str, bool]
"""A group, and whether the messages were popped in order."""


class AckMessageProcessor:
    """Acknowledgements of popped messages, and changes of their invisible time (remoting 5.5).

    Acks of one turn of the loop go to the process ``pop`` as one request for each group.
    """

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        offsets: Offsets,
        loop: asyncio.AbstractEventLoop,
        log: Log,
        counting: Counting,
    ) -> None:
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

    async def ack(self, connection: RemotingConnection, command: Command) -> Command:
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

    async def ack_many(self, connection: RemotingConnection, command: Command) -> Command:
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

    async def change(self, connection: RemotingConnection, command: Command) -> Command:
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

    def _wrong(self, command: Command, connection: RemotingConnection, name: str, queue: int) -> Command | None:
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


MOST_MESSAGES: Final = 32
_LANES: Final = 16
_PATIENCE_S: Final = 5.0
_MARGIN_MS: Final = 50
_READABLE: Final = 4
_WAITING_OF_QUEUE: Final = 1_024
"""RocketMQ's popPollingSize: waiting requests of one group, topic and queue."""
_WAITING: Final = 100_000
"""RocketMQ's maxPopPollingSize."""
_FROM_MINIMUM: Final = 0
_NOTHING: Final = "NO_MESSAGE_IN_QUEUE"


class PopRefused(Exception):
    """The request is refused with this code and remark."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code, self.remark = code, remark


class PopMessageProcessor:
    """The pop requests."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        offsets: Offsets,
        log: Log,
        counting: Counting,
        max_waiting: int,
    ) -> None:
        """``max_waiting``: pops of one connection that wait for messages."""
        self._node, self._topics, self._clients, self._offsets = node, topics, clients, offsets
        self._log, self._counting = log, counting
        config = node.config
        self._limits, self._timers = config.pop, config.timer.enable
        self._host = config.network.store_host
        self._waiting: Counter[tuple[str, str, int]] = Counter()
        self._most_of_one = max_waiting
        self._waiting_of: Counter[RemotingConnection] = Counter()
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.POP_MESSAGE: self.pop,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    async def pop(self, connection: RemotingConnection, command: Command) -> Command | None:
        """Request 200050."""
        header = PopMessageRequestHeader.decode(command.ext_fields)
        try:
            self._check(connection, header)
            self._charge(connection, header.consumer_group)
        except PopRefused as refusal:
            return self._empty(command, header, refusal.code, refusal.remark)
        self._take_resets(header)
        wait_ms = self.wait_ms(header.poll_time, header.born_time)
        key = header.consumer_group, header.topic, header.queue_id
        if wait_ms and (
            self._waiting[key] >= _WAITING_OF_QUEUE
            or self._waiting.total() >= _WAITING
            or self._waiting_of[connection] >= self._most_of_one
        ):
            return self._empty(command, header, ResponseCode.POLLING_FULL, _NOTHING)
        self._waiting[key] += 1
        self._waiting_of[connection] += 1
        try:
            answer, frames = await self._node.mover(
                "pop",
                "pop",
                lane=hash(connection) % _LANES,
                timeout_s=wait_ms / 1_000 + _PATIENCE_S,
                **self._fields(connection, header, wait_ms),
            )
        except ProtocolError as error:
            return self._refused(command, header, error)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
            self._waiting_of[connection] -= 1
            if not self._waiting_of[connection]:
                del self._waiting_of[connection]
        if not answer["parts"]:
            rest = int(answer.get("rest", 0))
            return self._empty(command, header, ResponseCode.POLLING_TIMEOUT, _NOTHING, rest)
        popped = Popped(answer, frames)
        if connection.is_closed:
            await self._give_back(header.consumer_group, popped.handles)
            return None
        fields = {
            "popTime": str(answer["pop_time"]),
            "invisibleTime": str(answer["invisible_ms"]),
            "reviveQid": str(answer["revive_queue"]),
            "restNum": str(answer.get("rest", 0)),
            **popped.texts(),
        }
        self._count(header, popped)
        connection.send(command.answer(remark="FOUND", ext_fields=fields), popped.body)
        return None

    def _count(self, header: PopMessageRequestHeader, popped: Popped) -> None:
        """RocketMQ counts what was read under the topic where it lies, and the check points under the one asked for."""
        group, topic = header.consumer_group, header.topic
        for part in popped.parts:
            name = topic_of_flag(topic, group, part.flag)
            self._counting.read(group, name, part.messages, part.size)
            if not header.order:
                self._counting.popped(group, topic)

    def _take_resets(self, header: PopMessageRequestHeader) -> None:
        """The pop begins at the offsets that were set for its queues: from now on commits count again (remoting 5.2)."""
        topic = self._topics.get(header.topic)
        if self._offsets.has_resets and topic is not None:
            for queue in range(topic.read_queues) if header.queue_id < 0 else (header.queue_id,):
                self._offsets.take_reset(header.consumer_group, header.topic, queue)

    def check_queue(self, topic_name: str, queue: int, peer: str) -> TopicConfig:
        """The topic. Raises PopRefused."""
        topic = self._topics.get(topic_name)
        if topic is None:
            raise PopRefused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic_name}] not exist, apply first please! {FAQ}")
        if not topic.perm & _READABLE:
            raise PopRefused(ResponseCode.NO_PERMISSION, f"the topic[{topic_name}] peeking message is forbidden")
        if queue >= topic.read_queues:
            raise PopRefused(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{queue}] is illegal, topic:[{topic_name}] topicConfig.readQueueNums:[{topic.read_queues}]"
                f" consumer:[{peer}]",
            )
        return topic

    def _check(self, connection: RemotingConnection, header: PopMessageRequestHeader) -> None:
        """Raises PopRefused, in RocketMQ's order. (The client's clock is not compared: only its wait depends on it.)"""
        host = self._host
        if header.max_msg_nums > MOST_MESSAGES:
            remark = f"the broker[{host}] pop message's num is greater than {MOST_MESSAGES}"
            raise PopRefused(ResponseCode.INVALID_PARAMETER, remark)
        if not self._timers:
            remark = f"the broker[{host}] pop message is forbidden because timerWheelEnable is false"
            raise PopRefused(ResponseCode.SYSTEM_ERROR, remark)
        self.check_queue(header.topic, header.queue_id, connection.name)

    def _charge(self, connection: RemotingConnection, group: str) -> None:
        """Raises PopRefused."""
        try:
            self._clients.charge(connection, group)
        except ProtocolError as error:
            raise PopRefused(*refusal_of(error)) from error

    def wait_ms(self, poll_ms: int, born_ms: int) -> int:
        """How long a request may wait, by the client's clock as far as that is likely."""
        late_ms = time.time_ns() // 1_000_000 - born_ms if born_ms > 0 else 0
        wait_ms = poll_ms - _MARGIN_MS - max(0, min(late_ms, 1_000))
        return max(0, min(wait_ms, poll_ms, self._limits.max_wait_ms))

    @property
    def _has_rates(self) -> bool:
        """Whether each client may receive so much a second."""
        flow = self._node.config.flow
        return bool(flow.client_pull_messages_per_s or flow.client_pull_bytes_per_s)

    def _fields(self, connection: RemotingConnection, header: PopMessageRequestHeader, wait_ms: int) -> dict[str, Any]:
        limits = self._limits
        fields: dict[str, Any] = {
            "group": header.consumer_group,
            "topics": [header.topic],
            "max_messages": max(1, header.max_msg_nums),
            "invisible_ms": max(limits.min_invisible_ms, min(header.invisible_time, limits.max_invisible_ms)),
            "wait_ms": wait_ms,
            "rest": True,
            "start": "earliest" if header.init_mode == _FROM_MINIMUM else "last",
        }
        if self._has_rates:
            fields["client"] = connection.name
        quotas = self._node.quotas
        if connection.user and (quotas.bounds_pulls or quotas.bounds_names):
            fields |= self._node.on_behalf_of("pop", connection.user)
        if header.queue_id >= 0:
            fields["queue"] = header.queue_id
        if header.order:
            fields["ordered"] = fields["repeats_acked"] = True
            if header.attempt_id:
                fields["attempt"] = header.attempt_id
        kind, expression = header.exp_type or "TAG", header.exp
        if kind != "TAG" or (expression is not None and expression.strip() not in ("", "*")):
            fields["filter"] = expression or ""
            if kind != "TAG":
                fields["filter_type"] = kind
        return fields

    def _refused(self, command: Command, header: PopMessageRequestHeader, error: ProtocolError) -> Command:
        code, remark = refusal_of(error)
        refused = filter_refusal(error.code, error.message, header.exp_type or "TAG")
        if refused is not None:
            code, remark = refused
        elif error.code == "SYSTEM_BUSY":
            code, remark = ResponseCode.POLLING_FULL, _NOTHING
        else:
            self._log.debug("a pop is refused", group=header.consumer_group, code=error.code, error=error.message)
        return self._empty(command, header, code, remark)

    @staticmethod
    def _empty(command: Command, header: PopMessageRequestHeader, code: int, remark: str, rest: int = 0) -> Command:
        """An answer without messages has all fields too (remoting 5.3)."""
        fields = {"popTime": str(time.time_ns() // 1_000_000), "invisibleTime": str(header.invisible_time),
                  "reviveQid": "0", "restNum": str(rest), "startOffsetInfo": "", "msgOffsetInfo": ""}  # fmt: skip
        return command.answer(code, remark, ext_fields=fields)

    async def _give_back(self, group: str, handles: list[tuple[str, str]]) -> None:
        try:
            receipts = [list(one) for one in handles]
            await self._node.mover("pop", "nack", group=group, receipts=receipts, untried=True)
        except ProtocolError as error:
            self._log.debug("messages come back when their time is over", group=group, error=error.message)

    def polling_info(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 200055: how many requests wait."""
        header = GroupQueueRequestHeader.decode(command.ext_fields)
        count = self._waiting[header.consumer_group, header.topic, header.queue_id]
        return command.answer(ext_fields={"pollingNum": str(count)})
