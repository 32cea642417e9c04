"""RECALL_MESSAGE: a message that waits for its time shall not come (remoting 3.8)."""

from __future__ import annotations

import time
from typing import Final

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.semantics.recall import RECALL_BODY, RecallHandle
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.sending import RecallMessageRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_TIMEOUT_S: Final = 10.0
_REGION: Final = {"MSG_REGION": "DefaultRegion"}
_ILLEGAL: Final = ResponseCode.ILLEGAL_OPERATION


class Recalls:
    """See the module. ``enable`` is RocketMQ's ``recallMessageEnable``."""

    def __init__(self, node: Node, topics: Topics, *, enable: bool) -> None:
        self._node, self._topics, self._enable = node, topics, enable
        self._most_ms = node.config.timer.max_delay_ms
        self.handlers: dict[RequestCode, Handler] = {RequestCode.RECALL_MESSAGE: self.recall}

    async def recall(self, connection: Connection, command: Command) -> Command:
        """Request 370."""
        header = RecallMessageRequestHeader.decode(command.ext_fields)
        code, remark, unique = await self._recall(header)
        fields = dict(_REGION)
        if unique:
            fields["msgId"] = unique
        return command.answer(code, remark, ext_fields=fields)

    async def _recall(self, header: RecallMessageRequestHeader) -> tuple[int, str | None, str]:
        """Code and remark, and with SUCCESS the unique key of the message. In RocketMQ's order."""
        if not self._enable:
            return ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden", ""
        if self._topics.get(header.topic) is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{header.topic}] not exist", ""
        try:
            handle = RecallHandle.decode(header.recall_handle)
        except InvalidMessageError:
            return _ILLEGAL, "recall handle is invalid", ""
        if handle.topic != header.topic:
            return _ILLEGAL, "recall failed, topic not match", ""
        if handle.broker_name != self._node.config.network.broker_name:
            return _ILLEGAL, "recall failed, broker service not available", ""
        left_ms = handle.deliver_ms - time.time_ns() // 1_000_000
        if not 0 < left_ms < self._most_ms:
            return _ILLEGAL, "recall failed, timestamp invalid", ""
        fields = {"topic": header.topic, "handle": header.recall_handle}
        if header.producer_group:
            fields["group"] = header.producer_group
        line = self._node.line("writer")
        try:
            await self._node.exchange(line, "recall", fields, (RECALL_BODY,), timeout_s=_TIMEOUT_S)
        except ProtocolError as error:
            if error.code == "ILLEGAL_OPERATION":  # too late for the timer to see it in time
                return _ILLEGAL, "recall failed, timestamp invalid", ""
            return *refusal_of(error), ""
        return ResponseCode.SUCCESS, None, handle.unique_key
