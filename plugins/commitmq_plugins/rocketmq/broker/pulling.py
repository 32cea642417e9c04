"""Pulls: PULL_MESSAGE and LITE_PULL_MESSAGE (remoting 4). Bodies are sent from the mapped log."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

import numpy as np

from commitmq.client.receiving.part import SegmentMaps
from commitmq.control import Word
from commitmq.errors import ProtocolError, StoreError
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq_plugins.rocketmq.broker.broker_config import BrokerConfig
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import (
    FAQ,
    Answer,
    LineLostError,
    NodeClient,
    filter_refusal,
    refusal_of,
    response_code,
)
from commitmq_plugins.rocketmq.broker.offsets import GroupReads, Offsets, Returning
from commitmq_plugins.rocketmq.broker.registry import BROADCASTING
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import MAX_NAME_CHARACTERS
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.headers import PullMessageRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

_COMMIT: Final = 1
_SUSPEND: Final = 2
_SUBSCRIPTION: Final = 4
_MOST_MESSAGES: Final = 1_024
_SMALL_BYTES: Final = 256 * 1024
_LARGE_BYTES: Final = 4 * 1024 * 1024
_USUAL_MESSAGES: Final = 32
_PATIENCE_S: Final = 5.0
_FEW_UNITS: Final = 40 * UNIT_STRUCT.size  # below it a loop is quicker than arrays
_READABLE: Final = 4
_MOST_PULLED: Final = 100_000
"""Queues whose last pull is remembered for administration."""

_GROUP_READS: Final = int(Word.GROUP_READS)  # plain ints for speed: each pull looks
_TOPICS_VERSION: Final = int(Word.TOPICS_VERSION)
_CODES: Final = {
    "FOUND": ResponseCode.SUCCESS,
    "NO_MATCHED_MESSAGE": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "MESSAGE_WAS_REMOVING": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "OFFSET_OVERFLOW_ONE": ResponseCode.PULL_NOT_FOUND,
    "OFFSET_OVERFLOW_BADLY": ResponseCode.PULL_OFFSET_MOVED,
    "OFFSET_TOO_SMALL": ResponseCode.PULL_OFFSET_MOVED,
}


class _PullRefused(Exception):
    def __init__(self, code: int, remark: str, forbidden_type: int = 0) -> None:
        super().__init__(remark)
        self.code, self.remark, self.forbidden_type = code, remark, forbidden_type

    def answer(self, command: Command) -> Command:
        """The answer to ``command``, which was refused."""
        fields = {"suggestWhichBrokerId": "0", "nextBeginOffset": "0", "minOffset": "0", "maxOffset": "0"}
        if self.forbidden_type:
            fields["forbiddenType"] = str(self.forbidden_type)
        return command.answer(self.code, self.remark, ext_fields=fields)


class PullMessageProcessor:
    """The pull requests."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        offsets: Offsets,
        returning: Returning,
        counting: Counting,
        reads: GroupReads,
        settings: BrokerConfig,
        max_waiting: int,
    ) -> None:
        """``max_waiting``: pulls of one connection that wait for messages."""
        self._most_waiting = max_waiting
        self._waiting: dict[RemotingConnection, int] = {}
        self._returning, self._counting, self._reads, self._settings = returning, counting, reads, settings
        self._node, self._topics, self._clients, self._offsets = node, topics, clients, offsets
        self._max_wait_ms = node.config.reader.max_wait_ms
        self._maps: SegmentMaps | None = None
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.PULL_MESSAGE: self.handle,
            RequestCode.LITE_PULL_MESSAGE: self.handle,
        }
        self.pulled: dict[tuple[str, str, int], int] = {}
        """Group, topic and queue: the offset behind the last messages that were read (``pullOffset`` of 208)."""

    def handle(self, connection: RemotingConnection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Take one pull. Its answer is sent when there are messages, or when its time is over."""
        header = PullMessageRequestHeader.decode(command.ext_fields)
        if self._reads.is_current and not self._reads.may_be_missing(header.consumer_group):
            return self._handle(connection, command, header)
        return self._handle_known(connection, command, header)

    async def _handle_known(
        self, connection: RemotingConnection, command: Command, header: PullMessageRequestHeader
    ) -> Command | None:
        """Take a pull when it is known what its group may read, and that it is there if groups are not made by themselves."""
        group = header.consumer_group
        await self._reads.refresh()
        try:
            is_missing = self._reads.may_be_missing(group) and await self._reads.is_missing(group)
        except ProtocolError as error:
            return command.answer(*refusal_of(error), ext_fields=_fields({}))
        if is_missing:
            remark = f"subscription group [{group:.{MAX_NAME_CHARACTERS}}] does not exist, {FAQ}"
            return command.answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark, ext_fields=_fields({}))
        return self._handle(connection, command, header)

    def _handle(
        self, connection: RemotingConnection, command: Command, header: PullMessageRequestHeader
    ) -> Command | None:
        try:
            expression, kind = self._checked(connection, header)
        except _PullRefused as refusal:
            return refusal.answer(command)
        reset = self._offsets.take_reset(header.consumer_group, header.topic, header.queue_id)
        if reset is not None:
            return command.answer(
                ResponseCode.PULL_OFFSET_MOVED,
                "OFFSET_RESET",
                ext_fields=_fields({"next_offset": reset, "min_offset": 0, "max_offset": reset}),
            )
        if header.sys_flag & _COMMIT:
            self._offsets.note(connection, header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        self._clients.pulls(connection, header.consumer_group, header.topic, header.queue_id)
        self._pull(connection, command, header, expression, kind)
        return None

    def forget(self, group: str) -> None:
        self.pulled = {key: offset for key, offset in self.pulled.items() if key[0] != group}

    def _pull(
        self,
        connection: RemotingConnection,
        command: Command,
        header: PullMessageRequestHeader,
        expression: str | None,
        kind: str,
    ) -> None:
        most = max(1, min(header.max_msg_nums, _MOST_MESSAGES))
        fields: dict[str, Any] = {
            "topic": header.topic,
            "queue": header.queue_id,
            "offset": max(0, header.queue_offset),
            "max_messages": most,
            "max_bytes": _SMALL_BYTES if most <= _USUAL_MESSAGES else _LARGE_BYTES,
            "mode": "ranges",
            "group": header.consumer_group,
            "client": connection.name,
        }
        generation = self._returning.of_pull(header.consumer_group, header.topic, header.queue_id)
        if generation is not None:
            fields["log_generation"] = generation
        if self._node.quotas.bounds_pulls and connection.user:
            fields |= self._node.on_behalf_of("pull", connection.user)
        wait_ms = 0
        if header.sys_flag & _SUSPEND and header.queue_offset >= 0:
            wanted_ms = (
                header.suspend_timeout_millis if self._settings.long_polling else self._settings.short_polling_ms
            )
            wait_ms = fields["wait_ms"] = max(0, min(wanted_ms, self._max_wait_ms))
        if wait_ms:
            waiting = self._waiting.get(connection, 0)
            if waiting >= self._most_waiting:
                remark = (
                    f"{waiting} pulls of this connection wait for messages, which is the limit"
                    " (plugins.rocketmq.max_waiting_pulls_per_connection)"
                )
                fields = _fields({"next_offset": header.queue_offset})
                connection.send(command.answer(ResponseCode.FLOW_CONTROL, remark, ext_fields=fields))
                return
            self._waiting[connection] = waiting + 1
        if expression is not None:
            fields["filter"] = expression
            if kind != "TAG":
                fields["filter_type"] = kind
        line = self._node.reader_of(header.topic, header.queue_id)
        since = self._rules() if wait_ms else None
        line.call(
            "pull",
            fields,
            lambda answer: self._read(connection, command, header, kind, answer, since),
            timeout_s=wait_ms / 1_000 + _PATIENCE_S,
        )

    def _checked(self, connection: RemotingConnection, header: PullMessageRequestHeader) -> tuple[str | None, str]:
        """Expression and type of the filter. Raises _PullRefused, in RocketMQ's order (remoting 4.2)."""
        if len(header.consumer_group) > MAX_NAME_CHARACTERS:
            remark = f"a group's name has at most {MAX_NAME_CHARACTERS} characters, not {len(header.consumer_group)}"
            raise _PullRefused(ResponseCode.INVALID_PARAMETER, remark)
        if not self._reads.may_consume(header.consumer_group):
            remark = f"subscription group no permission, {header.consumer_group}"
            raise _PullRefused(ResponseCode.NO_PERMISSION, remark, 2)
        topic = self._topics.get(header.topic)
        if topic is None:
            raise _PullRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please! {FAQ}"
            )
        if not topic.perm & _READABLE:
            raise _PullRefused(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden", 3)
        if not 0 <= header.queue_id < topic.read_queues:
            raise _PullRefused(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] topicConfig.readQueueNums:"
                f"[{topic.read_queues}] consumer:[{connection.peer[0]}:{connection.peer[1]}]",
            )
        if header.sys_flag & _SUBSCRIPTION:
            kind = header.expression_type or "TAG"
            return _expression(header.subscription, kind), kind
        group = self._clients.registry.groups.get(header.consumer_group)
        if group is None:
            raise _PullRefused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist{FAQ}")
        if group.message_model == BROADCASTING and not self._clients.may_broadcast(header.consumer_group):
            remark = f"the consumer group[{header.consumer_group}] can not consume by broadcast way"
            raise _PullRefused(ResponseCode.NO_PERMISSION, remark, 4)
        if not self._reads.may_read(header.consumer_group, header.topic):
            remark = f"the consumer group[{header.consumer_group}] is forbidden for topic[{header.topic}]"
            raise _PullRefused(ResponseCode.NO_PERMISSION, remark, 5)
        subscription = group.subscriptions.get(header.topic)
        if subscription is None:
            raise _PullRefused(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{FAQ}")
        if subscription.sub_version < header.sub_version:
            raise _PullRefused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        kind = subscription.expression_type or "TAG"
        return _expression(subscription.sub_string, kind), kind

    # ------------------------------------------------------------ answers

    def _read(
        self,
        connection: RemotingConnection,
        command: Command,
        header: PullMessageRequestHeader,
        kind: str,
        found: Answer | LineLostError,
        since: tuple[int, int] | None,
    ) -> None:
        """Send the answer to a pull that the reader has answered. ``since``: the rules when it began, if it might wait."""
        if since is not None:
            left = self._waiting[connection] - 1
            if left:
                self._waiting[connection] = left
            else:
                del self._waiting[connection]
        if since in (None, self._rules()) or isinstance(found, LineLostError):
            self._answer(connection, command, header, kind, found)
        else:  # RocketMQ checks a pull that has waited once more (spec 9.5)
            self._reads.when_current(lambda: self._judge(connection, command, header, kind, found))

    def _rules(self) -> tuple[int, int]:
        """Changes with what groups may read, and with topics."""
        control = self._node.control
        return control.get(_GROUP_READS), control.get(_TOPICS_VERSION)

    def _judge(
        self,
        connection: RemotingConnection,
        command: Command,
        header: PullMessageRequestHeader,
        kind: str,
        found: Answer,
    ) -> None:
        try:
            self._checked(connection, header)
        except _PullRefused as refusal:
            connection.send(refusal.answer(command))
        else:
            self._answer(connection, command, header, kind, found)

    def _answer(
        self,
        connection: RemotingConnection,
        command: Command,
        header: PullMessageRequestHeader,
        kind: str,
        found: Answer | LineLostError,
    ) -> None:
        if isinstance(found, LineLostError):
            connection.send(command.answer(ResponseCode.SYSTEM_ERROR, f"the reader does not answer: {found}",
                                           ext_fields=_fields({"next_offset": header.queue_offset})))  # fmt: skip
            return
        answer, frames = found
        self._clients.pulled(connection, header.consumer_group, header.topic, header.queue_id)
        if connection.is_closed:
            return  # nobody has read anything
        if not answer["ok"]:
            name, remark = str(answer.get("code")), str(answer.get("error"))
            code, remark = filter_refusal(name, remark, kind) or (response_code(name), remark)
            if code == ResponseCode.SYSTEM_BUSY:  # clients pull again after a moment
                code = int(ResponseCode.FLOW_CONTROL)
            connection.send(command.answer(code, remark, ext_fields=_fields({"next_offset": header.queue_offset})))
            return
        if self._returning.is_again(header.consumer_group, header.topic, header.queue_id, answer):
            if (refused := self._handle(connection, command, header)) is not None:
                connection.send(refused)
            return
        status = "OFFSET_TOO_SMALL" if header.queue_offset < 0 else str(answer["status"])
        if status in ("NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE"):
            code = ResponseCode.PULL_OFFSET_MOVED if header.queue_offset else ResponseCode.PULL_NOT_FOUND
        else:
            code = _CODES.get(status, ResponseCode.PULL_NOT_FOUND)
        if code == ResponseCode.PULL_NOT_FOUND:
            answer["next_offset"] = header.queue_offset
        elif header.queue_offset < 0:
            answer["next_offset"] = answer["min_offset"]
        if len(self.pulled) >= _MOST_PULLED:
            self.pulled.pop(next(iter(self.pulled)))
        self.pulled[header.consumer_group, header.topic, header.queue_id] = int(answer["next_offset"])
        body: list[bytes | memoryview] = []
        if code == ResponseCode.SUCCESS:
            try:
                body = frames if answer.get("mode") == "bytes" else self._views(frames[0])  # type: ignore[assignment]
            except (OSError, StoreError):
                code, status = ResponseCode.PULL_RETRY_IMMEDIATELY, "MESSAGE_WAS_REMOVING"
                answer["next_offset"] = header.queue_offset
        if body:
            size = sum(len(piece) for piece in body)
            self._counting.read(header.consumer_group, header.topic, int(answer.get("count", 1)), size)
        else:
            self._counting.missed()
        connection.send(command.answer(code, status, ext_fields=_fields(answer)), body)

    def _views(self, units: bytes) -> list[bytes | memoryview]:
        """The records of ConsumeQueue units where they lie in the mapped log; neighbours are one view. Raises OSError."""
        if self._maps is None:
            self._maps = SegmentMaps(self._node.layout.root, self._node.config.commit_log.segment_bytes, max_mapped=64)
        size = self._maps.segment_bytes
        views: list[bytes | memoryview] = []
        if len(units) > _FEW_UNITS:
            for begin, end in _neighbours(units, size):
                views.append(self._view(begin, end, size))
            return views
        begin = end = -1
        for offset, length, _ in UNIT_STRUCT.iter_unpack(units):
            if offset == end and offset % size:
                end += length
                continue
            if begin >= 0:
                views.append(self._view(begin, end, size))
            begin, end = offset, offset + length
        if begin >= 0:
            views.append(self._view(begin, end, size))
        return views

    def _view(self, begin: int, end: int, size: int) -> memoryview:
        assert self._maps is not None
        base = begin - begin % size
        return memoryview(self._maps.map(base))[begin - base : end - base]


def _neighbours(units: bytes, segment_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of each part of the log in which the records of ``units`` lie side by side, within one segment."""
    found = np.frombuffer(units, UNIT)
    begins = found["physical_offset"].astype(np.int64)
    ends = begins + found["size"]
    is_first = np.ones(begins.size, bool)
    is_first[1:] = (begins[1:] != ends[:-1]) | (begins[1:] % segment_bytes == 0)
    first = np.flatnonzero(is_first)
    return list(zip(begins[first].tolist(), ends[np.append(first[1:], begins.size) - 1].tolist(), strict=True))


def _expression(text: str | None, kind: str) -> str | None:
    """The filter of a subscription; None for all messages."""
    if kind == "TAG" and (text is None or text.strip() in ("", "*")):
        return None
    return text or ""


def _fields(answer: dict[str, Any]) -> dict[str, str]:
    """The fields that every answer to a pull needs (remoting 4.3)."""
    return {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(answer.get("next_offset", 0)),
        "minOffset": str(answer.get("min_offset", 0)),
        "maxOffset": str(answer.get("max_offset", 0)),
        "topicSysFlag": "0",
        "groupSysFlag": "0",
    }
