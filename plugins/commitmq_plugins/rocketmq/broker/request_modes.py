"""How groups receive topics, by pull or by pop, and which queues a member gets (remoting 5.9): requests 400 to 402.

RocketMQ's file ``messageRequestMode.json`` in the store's config folder has the modes. A change is on the device when its
answer goes out. A group with the mode POP for any topic takes no members of the node's own kind: this server alone shares its
other topics out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from commitmq.files import atomic_file
from commitmq.semantics import allocation
from commitmq.semantics.retry import is_retry_topic
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.registry import BROADCASTING
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies import (
    QueryAssignmentRequestBody,
    SetMessageRequestModeRequestBody,
    assignments,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue, as_map, dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

POP: Final = "POP"
PULL: Final = "PULL"
_FILE: Final = "messageRequestMode.json"
_MOST: Final = 100_000
_STRATEGIES: Final = {"AVG": allocation.averagely, "AVG_BY_CIRCLE": allocation.averagely_by_circle}


class ModeTable:
    """The modes by topic and group. A file that cannot be written raises OSError."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises BodyError if it has another content, OSError if it cannot be read."""
        self._path = path
        self._table: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}
        if path.exists():
            self._table = as_map(
                load_object(path.read_bytes()).get("messageRequestModeMap"),
                "messageRequestModeMap",
                lambda topic: as_map(topic, "a topic", _mode),
            )
        self._popping = _popping(self._table)

    def get(self, topic: str, group: str) -> SetMessageRequestModeRequestBody | None:
        return self._table.get(topic, {}).get(group)

    def pops(self, group: str) -> bool:
        """Whether the group pops any topic."""
        return group in self._popping

    def put(self, mode: SetMessageRequestModeRequestBody) -> bool:
        """False when there are too many."""
        known = self.get(mode.topic, mode.consumer_group)
        if known == mode:
            return True
        if known is None and sum(map(len, self._table.values())) >= _MOST:
            return False
        table = {topic: dict(groups) for topic, groups in self._table.items()}
        table.setdefault(mode.topic, {})[mode.consumer_group] = mode
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.replace(self._path, dumps(_json(table)), "rocketmq.request_modes")
        self._table, self._popping = table, _popping(table)
        return True

    def to_json(self) -> dict[str, Any]:
        return _json(self._table)


class RequestModes:
    """See the module."""

    def __init__(
        self, node: Node, topics: Topics, clients: Clients, queues_elsewhere: Callable[[str], list[MessageQueue]]
    ) -> None:
        """``queues_elsewhere``: the queues of a topic that other brokers have. Raises BodyError, OSError when the file
        cannot be read.
        """
        self._topics, self._clients = topics, clients
        self._broker = node.config.network.broker_name
        self.table = ModeTable(node.layout.root / "config" / _FILE)
        self._queues_elsewhere = queues_elsewhere
        clients.pops = self.table.pops
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.QUERY_ASSIGNMENT: self.assign,
            RequestCode.SET_MESSAGE_REQUEST_MODE: self.set_mode,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.all_modes,
        }

    def set_mode(self, connection: Connection, command: Command) -> Command:
        """Request 401."""
        mode = SetMessageRequestModeRequestBody.decode(command.body)
        if is_retry_topic(mode.topic):
            return command.answer(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        if self._topics.get(mode.topic) is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"topic[{mode.topic}] not exist")
        if mode.mode not in (POP, PULL):
            return command.answer(ResponseCode.INVALID_PARAMETER, f"the mode is POP or PULL, not {mode.mode!r:.100}")
        try:
            if not self.table.put(mode):
                return command.answer(ResponseCode.SYSTEM_ERROR, f"{_MOST} modes are stored, which is the limit")
        except OSError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"the mode cannot be stored: {error}")
        self._clients.pops_changed(mode.consumer_group)
        return command.answer()

    def all_modes(self, connection: Connection, command: Command) -> Command:
        """Request 402."""
        return command.answer(body=dumps(self.table.to_json()))

    def assign(self, connection: Connection, command: Command) -> Command:
        """Request 400: the queues of one member of a group, and how it receives them."""
        body = QueryAssignmentRequestBody.decode(command.body)
        set_mode = self.table.get(body.topic, body.consumer_group)
        mode = PULL if set_mode is None or is_retry_topic(body.topic) else set_mode.mode
        queues = self._queues(body.topic)
        if not queues:
            return command.answer(body=dumps({}))
        if body.message_model != BROADCASTING:
            members = allocation.sorted_members(self._clients.member_ids(body.consumer_group))
            strategy = _STRATEGIES.get(body.strategy_name)
            if body.client_id not in members or strategy is None:
                return command.answer(body=dumps({}))  # no list: the client keeps what it has
            if mode == POP and set_mode is not None:
                queues = _popped(body, queues, members, set_mode.pop_share_queue_num)
            else:
                plain = [allocation.MessageQueue(one.topic, one.broker_name, one.queue_id) for one in queues]
                queues = [MessageQueue(*one) for one in strategy(body.client_id, plain, members)]
        return command.answer(body=assignments((queue, mode) for queue in queues))

    def _queues(self, name: str) -> list[MessageQueue]:
        topic = self._topics.get(name)
        count = 0 if topic is None or not topic.perm & 4 else topic.read_queues
        own = [MessageQueue(name, self._broker, queue) for queue in range(count)]
        return sorted(own + self._queues_elsewhere(name))


def _popped(
    body: QueryAssignmentRequestBody, queues: list[MessageQueue], members: list[str], share: int
) -> list[MessageQueue]:
    """All queues of all brokers, or the own share and those of the next ``share`` members."""
    if share <= 0 or share >= len(members) - 1:
        return [MessageQueue(body.topic, broker, -1) for broker in sorted({one.broker_name for one in queues})]
    me = members.index(body.client_id)
    if len(members) > len(queues):
        return [queues[me % len(queues)]]
    plain = [allocation.MessageQueue(one.topic, one.broker_name, one.queue_id) for one in queues]
    found: list[MessageQueue] = []
    for step in range(share + 1):
        member = members[(me + step) % len(members)]
        found += [MessageQueue(*one) for one in allocation.averagely(member, plain, members)]
    return found


def _popping(table: dict[str, dict[str, SetMessageRequestModeRequestBody]]) -> set[str]:
    """Groups that pop any topic."""
    return {group for groups in table.values() for group, mode in groups.items() if mode.mode == POP}


def _mode(value: Any) -> SetMessageRequestModeRequestBody:
    return SetMessageRequestModeRequestBody.decode(dumps(value))


def _json(table: dict[str, dict[str, SetMessageRequestModeRequestBody]]) -> dict[str, Any]:
    return {
        "messageRequestModeMap": {
            topic: {group: mode.to_json() for group, mode in groups.items()} for topic, groups in table.items()
        }
    }
