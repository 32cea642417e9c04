"""Which client of a group reads which queue: assignments by pull or pop (requests 400 to 402, remoting 5.9), and the locks of
ordered queues (requests 41 and 42, remoting 6.4).

Locks are memory only, as in RocketMQ: after a restart the first client that asks has the lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from commitmq.files import atomic_file
from commitmq.semantics import allocation
from commitmq.semantics.retry import is_retry_topic
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.node import NodeClient
from commitmq_plugins.rocketmq.broker.registry import BROADCASTING
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.bodies import (
    LockBatchRequestBody,
    QueryAssignmentRequestBody,
    SetMessageRequestModeRequestBody,
    assignments,
    lock_answer,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import RemotingMessageQueue, as_map, dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection, place_of

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
    """How groups receive topics, by pull or by pop, and which queues a member gets (remoting 5.9): requests 400 to 402.

    RocketMQ's file ``messageRequestMode.json`` in the store's config folder has the modes. A change is on the device when its
    answer goes out. A group with the mode POP for any topic takes no members of the node's own kind: this server alone shares
    its other topics out.
    """

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        queues_elsewhere: Callable[[str], list[RemotingMessageQueue]],
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

    def set_mode(self, connection: RemotingConnection, command: Command) -> Command:
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

    def all_modes(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 402."""
        return command.answer(body=dumps(self.table.to_json()))

    def assign(self, connection: RemotingConnection, command: Command) -> Command:
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
                queues = [RemotingMessageQueue(*one) for one in strategy(body.client_id, plain, members)]
        return command.answer(body=assignments((queue, mode) for queue in queues))

    def _queues(self, name: str) -> list[RemotingMessageQueue]:
        topic = self._topics.get(name)
        count = 0 if topic is None or not topic.perm & 4 else topic.read_queues
        own = [RemotingMessageQueue(name, self._broker, queue) for queue in range(count)]
        return sorted(own + self._queues_elsewhere(name))


def _popped(
    body: QueryAssignmentRequestBody, queues: list[RemotingMessageQueue], members: list[str], share: int
) -> list[RemotingMessageQueue]:
    """All queues of all brokers, or the own share and those of the next ``share`` members."""
    if share <= 0 or share >= len(members) - 1:
        return [RemotingMessageQueue(body.topic, broker, -1) for broker in sorted({one.broker_name for one in queues})]
    me = members.index(body.client_id)
    if len(members) > len(queues):
        return [queues[me % len(queues)]]
    plain = [allocation.MessageQueue(one.topic, one.broker_name, one.queue_id) for one in queues]
    found: list[RemotingMessageQueue] = []
    for step in range(share + 1):
        member = members[(me + step) % len(members)]
        found += [RemotingMessageQueue(*one) for one in allocation.averagely(member, plain, members)]
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


LEASE_MS: Final = 60_000
_PAUSE_MS: Final = 1_000
"""Between two looks at all locks: a client that has all it may have can ask as often as it wants."""

Queue = tuple[str, int]
Owner = tuple[str, str]
"""User, empty where the node asks for none, and client id, which is the client's own choice."""
_NOBODY: Final[Owner] = ("", "")


class QueueLocks:
    """The locks. Pure: no socket, no clock.

    A lock belongs to a client of a group, which is its user and its id, and lasts ``lease_ms`` after its last renewal. No
    place, as an address, holds more than ``max_of_place``: one client cannot keep all others from locking.

    Per group: queue, owner, time of the last renewal, place that made it.
    """

    def __init__(self, lease_ms: int = LEASE_MS, max_locks: int = 200_000, max_of_place: int = 200_000) -> None:
        self._lease_ms, self._max, self._max_of_place = lease_ms, max_locks, max_of_place
        self._groups: dict[str, dict[Queue, tuple[Owner, int, str]]] = {}
        self._places: Counter[str] = Counter()
        self._count = 0
        self._expired_ms = -_PAUSE_MS

    def __len__(self) -> int:
        return self._count

    def lock(self, group: str, owner: Owner, queues: Iterable[Queue], now_ms: int, place: str = "") -> list[Queue]:
        """The queues of ``queues`` that ``owner`` has now. No more than ``max_locks`` are kept in all."""
        table = self._groups.setdefault(group, {})
        taken = []
        for queue in queues:
            holder, at, made_at = table.get(queue, (_NOBODY, -self._lease_ms - 1, place))
            if holder not in (_NOBODY, owner) and now_ms - at <= self._lease_ms:
                continue
            if queue not in table:
                if self._is_full(place) and now_ms - self._expired_ms >= _PAUSE_MS:
                    self.expire(now_ms)
                    table = self._groups.setdefault(group, table)
                if self._is_full(place):
                    break
                self._count += 1
                self._places[place] += 1
            table[queue] = owner, now_ms, made_at
            taken.append(queue)
        if not table:
            self._groups.pop(group, None)
        return taken

    def unlock(self, group: str, owner: Owner, queues: Iterable[Queue]) -> None:
        """Remove the locks of ``owner``; those of others stay."""
        table = self._groups.get(group, {})
        for queue in queues:
            if table.get(queue, (_NOBODY,))[0] == owner:
                self._drop(table, queue)
        if not table:
            self._groups.pop(group, None)

    def is_held(self, group: str, now_ms: int) -> bool:
        """Whether any lock of ``group`` is alive: its consumers are ordered ones (remoting 3.6)."""
        return any(now_ms - at <= self._lease_ms for _, at, _ in self._groups.get(group, {}).values())

    def expire(self, now_ms: int) -> None:
        """Drop the locks that are over."""
        self._expired_ms = now_ms
        for group, table in list(self._groups.items()):
            for queue in [queue for queue, (_, at, _) in table.items() if now_ms - at > self._lease_ms]:
                self._drop(table, queue)
            if not table:
                del self._groups[group]

    def _is_full(self, place: str) -> bool:
        return self._count >= self._max or self._places[place] >= self._max_of_place

    def _drop(self, table: dict[Queue, tuple[Owner, int, str]], queue: Queue) -> None:
        place = table.pop(queue)[2]
        self._count -= 1
        self._places[place] -= 1
        if not self._places[place]:
            del self._places[place]


class LockRequests:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ (remoting 6.4)."""

    def __init__(self, locks: QueueLocks, broker_name: str) -> None:
        self._locks, self._broker_name = locks, broker_name
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
        }

    def lock(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 41."""
        body = LockBatchRequestBody.decode(command.body)
        wanted = [(one.topic, one.queue_id) for one in body.queues]
        now_ms = time.monotonic_ns() // 1_000_000
        owner = connection.user, body.client_id
        taken = self._locks.lock(body.consumer_group, owner, wanted, now_ms, place_of(connection.peer[0]))
        return command.answer(
            body=lock_answer(RemotingMessageQueue(topic, self._broker_name, queue) for topic, queue in taken)
        )

    def unlock(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 42."""
        body = LockBatchRequestBody.decode(command.body)
        owner = connection.user, body.client_id
        self._locks.unlock(body.consumer_group, owner, [(one.topic, one.queue_id) for one in body.queues])
        return command.answer()
