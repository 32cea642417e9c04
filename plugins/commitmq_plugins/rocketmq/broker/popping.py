"""POP_MESSAGE: messages of queues that the consumers of a group share (remoting 5.1 to 5.3, 5.6).

The process ``pop`` of the node hands out messages and lets requests wait. This server passes requests on, each client's over
one of some lines, because that process limits what one peer may have. Messages for a client that has gone meanwhile are given
back at once.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq.semantics.pop import topic_of_flag
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.codes import filter_refusal, refusal_of
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.popped import Popped
from commitmq_plugins.rocketmq.broker.send_refusal import FAQ
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.pop import PollingInfoRequestHeader, PopMessageRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

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


class Pops:
    """See the module."""

    def __init__(
        self,
        node: Node,
        topics: Topics,
        clients: Clients,
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
        self._waiting_of: Counter[Connection] = Counter()
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.POP_MESSAGE: self.pop,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    async def pop(self, connection: Connection, command: Command) -> Command | None:
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

    def _check(self, connection: Connection, header: PopMessageRequestHeader) -> None:
        """Raises PopRefused, in RocketMQ's order. (The client's clock is not compared: only its wait depends on it.)"""
        host = self._host
        if header.max_msg_nums > MOST_MESSAGES:
            remark = f"the broker[{host}] pop message's num is greater than {MOST_MESSAGES}"
            raise PopRefused(ResponseCode.INVALID_PARAMETER, remark)
        if not self._timers:
            remark = f"the broker[{host}] pop message is forbidden because timerWheelEnable is false"
            raise PopRefused(ResponseCode.SYSTEM_ERROR, remark)
        self.check_queue(header.topic, header.queue_id, connection.name)

    def _charge(self, connection: Connection, group: str) -> None:
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

    def _fields(self, connection: Connection, header: PopMessageRequestHeader, wait_ms: int) -> dict[str, Any]:
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

    def polling_info(self, connection: Connection, command: Command) -> Command:
        """Request 200055: how many requests wait."""
        header = PollingInfoRequestHeader.decode(command.ext_fields)
        count = self._waiting[header.consumer_group, header.topic, header.queue_id]
        return command.answer(ext_fields={"pollingNum": str(count)})
