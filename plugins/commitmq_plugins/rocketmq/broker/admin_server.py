"""Administration of the server: its settings and state, its clients and users.

GET_BROKER_RUNTIME_INFO's table: every key of remoting 1.10 in the form that tools parse. Pure.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from commitmq.control import DispatcherWord, Word
from commitmq.errors import ProtocolError, StoreError
from commitmq.format.message_id import parse_offset_message_id
from commitmq.format.record import decode_record
from commitmq.plugin import Actor
from commitmq.security.access_file import AccessFile, AccessTable
from commitmq.security.native_rights import SUB
from commitmq.security.policy import Policies, PolicyEntry, ResourcePattern, Secret, User, check_name
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.retry import topics_of
from commitmq.store.metadata import json_config
from commitmq_plugins.rocketmq.broker.admin_store import Queues, topics_of_group
from commitmq_plugins.rocketmq.broker.broker_config import LOCKED, BrokerConfig, BrokerConfigError, parse_properties
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import Counting, PutTimes
from commitmq_plugins.rocketmq.broker.node import NodeClient
from commitmq_plugins.rocketmq.broker.registry import ClientChannelInfo
from commitmq_plugins.rocketmq.broker.rights import Access, actor_of
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.bodies import (
    ClientConnection,
    ConsumerConnection,
    RemotingDataVersion,
    kv_table,
    producer_connection,
    producer_table,
    topic_list,
)
from commitmq_plugins.rocketmq.remoting.codes import VERSION, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import (
    as_list,
    as_object,
    as_text,
    dumps,
    load_object,
    queue_map,
    without_none,
)
from commitmq_plugins.rocketmq.remoting.frame import Command, PeerGoneError, PeerSilentError, RemotingError, request
from commitmq_plugins.rocketmq.remoting.headers import (
    AclRequestHeader,
    ConsumeMessageDirectlyResultRequestHeader,
    ConsumerGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    GroupRequestHeader,
    GroupTopicRequestHeader,
    Header,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    ProducerGroupRequestHeader,
    TopicRequestHeader,
    UserRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

_RELAY_S: Final = 10.0
_STATUS_S: Final = 5.0


class AdminClients:
    """Administration of connected clients: requests 203, 204, 223, 300, 307, 309, 328, 343 and 345 (remoting 1.9).

    307 and 309 are passed on to the client, and its answer is passed back unread.
    """

    def __init__(
        self, node: NodeClient, topics: TopicConfigManager, clients: ClientManager, access: Access, address: str
    ) -> None:
        self._node, self._topics, self._clients, self._address = node, topics, clients, address
        self._access = access
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.all_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    # ------------------------------------------------------------ lists

    def consumers(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 203."""
        name = ConsumerGroupRequestHeader.decode(command.ext_fields).consumer_group
        group = self._clients.registry.groups.get(name)
        if group is None:
            return command.answer(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        body = ConsumerConnection(
            [_client(link, member) for link, member in group.members.items()],
            dict(group.subscriptions),
            group.consume_type,
            group.message_model,
            group.consume_from_where,
        )
        return command.answer(body=body.encode())

    def producers(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 204."""
        name = ProducerGroupRequestHeader.decode(command.ext_fields).producer_group
        members = self._clients.registry.producers.get(name)
        if not members:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return command.answer(body=producer_connection(_client(link, one) for link, one in members.items()))

    def all_producers(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 328."""
        table = {
            group: [_client(link, one) for link, one in members.items()]
            for group, members in self._clients.registry.producers.items()
        }
        return command.answer(body=producer_table(table))

    async def groups_of_topic(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 300: groups that subscribe to a topic, or have offsets in it."""
        topic = TopicRequestHeader.decode(command.ext_fields).topic
        found = {name for name, group in self._clients.registry.groups.items() if topic in group.subscriptions}
        try:
            found.update((await self._node.ask("coordinator", "topic.describe", topic=topic))["topic"]["groups"])
        except ProtocolError as error:
            if error.code != "TOPIC_NOT_EXIST":
                raise
        return command.answer(body=dumps({"groupList": sorted(found)}))

    async def topics_of_group(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 343."""
        group = GroupRequestHeader.decode(command.ext_fields).group
        found = await topics_of_group(self._node, group)
        return command.answer(body=topic_list(found, self._address))

    def subscription(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 345."""
        header = GroupTopicRequestHeader.decode(command.ext_fields)
        group = self._clients.registry.groups.get(header.group)
        found = None if group is None else group.subscriptions.get(header.topic)
        body = {
            "group": header.group,
            "subscriptionData": None if found is None else found.to_json(),
            "topic": header.topic,
        }
        return command.answer(body=dumps(without_none(body)))

    # ------------------------------------------------------------ questions to clients

    async def status(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 223: asks each client of a group where it is in the queues of a topic."""
        header = GetConsumerStatusRequestHeader.decode(command.ext_fields)
        group = self._clients.registry.groups.get(header.group)
        if group is None:
            remark = f"No Any Consumer online in the consumer group: [{header.group}]"
            return command.answer(ResponseCode.SYSTEM_ERROR, remark)
        members = [
            (link, one) for link, one in group.members.items() if header.client_addr in (None, "", one.client_id)
        ]
        fields = {"topic": header.topic, "group": header.group}
        asked = [
            link.request(request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, fields), _STATUS_S) for link, _ in members
        ]
        table = {}
        for (_, member), answer in zip(members, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, Command) and answer.code == ResponseCode.SUCCESS:
                offsets = load_object(answer.body).get("messageQueueTable") or {}
                table[member.client_id] = queue_map(offsets)
            elif isinstance(answer, BaseException) and not isinstance(answer, RemotingError):
                raise answer
        return command.answer(body=dumps({"consumerTable": table, "messageQueueTable": {}}))

    async def running_info(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 307."""
        header = GetConsumerRunningInfoRequestHeader.decode(command.ext_fields)
        return await self._relay(command, header.consumer_group, header.client_id, header, b"")

    async def consume_directly(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 309: a client handles one message now."""
        header = ConsumeMessageDirectlyResultRequestHeader.decode(command.ext_fields)
        header.broker_name = self._node.config.network.broker_name
        topic = self._topics.get(header.topic) if header.topic else None
        if topic is not None:
            header.topic_sys_flag = topic.sys_flag
        try:
            answer = await self._node.ask("coordinator", "group.config", group=header.consumer_group)
            header.group_sys_flag = int(answer["config"].get("groupSysFlag", 0))
            _, offset = parse_offset_message_id(header.msg_id or "")
            line = self._node.line("reader-0")
            _, frames = await self._node.exchange(line, "view", {"physical_offset": offset})
            stored = decode_record(b"".join(frames), check_crc=False)
            topics = topics_of(stored.topic, stored.properties)
            if (refused := self._access.lacks(connection, command, topics, SUB)) is not None:
                return refused
        except ValueError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"the message id is wrong: {error}")
        except ProtocolError as error:
            if error.code != "GROUP_NOT_EXIST":
                return command.answer(ResponseCode.SYSTEM_ERROR, error.message)
            frames = []
        return await self._relay(command, header.consumer_group, header.client_id or "", header, b"".join(frames))

    async def _relay(self, command: Command, group: str, client_id: str, header: Header, body: bytes) -> Command:
        """Ask the client, with the fields of ``header`` and no other field of the request: with its signature the client could
        act as the one who asks. (RocketMQ's broker passes all of them on.)
        """
        link = self._clients.registry.member(group, client_id)
        if link is None:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        try:
            answer = await link.request(request(RequestCode(command.code), header.encode(), body), _RELAY_S)
        except (PeerGoneError, PeerSilentError) as error:
            remark = f"consumer <{group}> <{client_id}> Timeout: {error}"
            return command.answer(ResponseCode.CONSUME_MSG_TIMEOUT, remark)
        return command.answer(answer.code, answer.remark, ext_fields=dict(answer.ext_fields), body=answer.body)


def _client(link: RemotingConnection, member: ClientChannelInfo) -> ClientConnection:
    ago_ms = time.monotonic_ns() // 1_000_000 - member.heard_ms
    heard_ms = time.time_ns() // 1_000_000 - ago_ms
    return ClientConnection(member.client_id, link.name, member.language, member.version, heard_ms)


_SUBJECT: Final = "User:"
_CUSTOM: Final = "Custom"
_DEFAULT: Final = "Default"


class _AdminRefusal(Exception):
    """What is asked for is not possible; the text is the answer's remark."""


class AdminUsers:
    """Requests about users and policies (remoting 1.11): those of mqadmin's createUser to copyAcl, 3001 to 3010.

    Only super users get here (:mod:`.rights`). A node without users refuses them: the first user is made on the node's
    machine. Unlike RocketMQ no answer has a user's secret. A change is on the device when its answer goes out.
    """

    def __init__(self, file: AccessFile) -> None:
        self._file = file
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.AUTH_CREATE_USER: self._told(self.create_user),
            RequestCode.AUTH_UPDATE_USER: self._told(self.update_user),
            RequestCode.AUTH_DELETE_USER: self._told(self.delete_user),
            RequestCode.AUTH_GET_USER: self._told(self.get_user),
            RequestCode.AUTH_LIST_USER: self._told(self.list_users),
            RequestCode.AUTH_CREATE_ACL: self._told(self.put_acl),
            RequestCode.AUTH_UPDATE_ACL: self._told(self.put_acl),
            RequestCode.AUTH_DELETE_ACL: self._told(self.delete_acl),
            RequestCode.AUTH_GET_ACL: self._told(self.get_acl),
            RequestCode.AUTH_LIST_ACL: self._told(self.list_acls),
        }

    @staticmethod
    def _told(handle: Callable[[Command, Actor], bytes]) -> Handler:
        """``handle`` in a thread, because it waits for the device; it gets who asks, and returns the answer's body."""

        async def answer(connection: RemotingConnection, command: Command) -> Command:
            command.body = bytes(command.body)
            try:
                return command.answer(body=await asyncio.to_thread(handle, command, actor_of(connection, command)))
            except _AdminRefusal as error:
                return command.answer(ResponseCode.NO_PERMISSION, str(error))
            except ValueError as error:
                return command.answer(ResponseCode.INVALID_PARAMETER, str(error))
            except StoreError as error:
                return command.answer(ResponseCode.SYSTEM_ERROR, str(error))

        def start(connection: RemotingConnection, command: Command) -> Awaitable[Command]:
            return answer(connection, command)

        return start

    def _load(self) -> AccessTable:
        table = self._file.load()
        if table.is_open:
            raise _AdminRefusal("the node has no users; make the first with `commitmq user add NAME --super`")
        return table

    def _change(self, apply: Callable[[AccessTable], None], by: Actor) -> bytes:
        def checked(table: AccessTable) -> None:
            if table.is_open:
                self._load()
            apply(table)

        self._file.change(checked, by)
        return b""

    # ------------------------------------------------------------ users

    def create_user(self, command: Command, by: Actor) -> bytes:
        """Request 3001."""
        name = _user_name(command)
        members = load_object(command.body)
        if not members.get("password"):
            raise ValueError("password can not be blank")
        user = _changed(User(name, Secret(as_text(members["password"], "password"))), members)

        def apply(table: AccessTable) -> None:
            if name in table.users:
                raise _AdminRefusal("The user is existed")
            table.users[name] = user

        return self._change(apply, by)

    def update_user(self, command: Command, by: Actor) -> bytes:
        """Request 3002. Members that are missing stay as they are."""
        name = _user_name(command)
        members = load_object(command.body)

        def apply(table: AccessTable) -> None:
            if name not in table.users:
                raise _AdminRefusal("The user is not exist")
            table.users[name] = _changed(table.users[name], members)

        return self._change(apply, by)

    def delete_user(self, command: Command, by: Actor) -> bytes:
        """Request 3003."""
        name = _user_name(command)

        def apply(table: AccessTable) -> None:
            if set(table.users) == {name}:
                raise _AdminRefusal(
                    f"{name} is the last user, and without users everybody is let in; disable it instead"
                )
            table.users.pop(name, None)
            table.policies.pop(name, None)

        return self._change(apply, by)

    def get_user(self, command: Command, _by: Actor) -> bytes:
        """Request 3004: no body for one that does not exist."""
        user = self._load().users.get(_user_name(command))
        return b"" if user is None else dumps(_user_info(user))

    def list_users(self, command: Command, _by: Actor) -> bytes:
        """Request 3005: those whose name has the filter in it."""
        wanted = ListUsersRequestHeader.decode(command.ext_fields).filter or ""
        found = [_user_info(one) for name, one in self._load().users.items() if wanted in name]
        return dumps(found) if found else b""

    # ------------------------------------------------------------ policies

    def put_acl(self, command: Command, by: Actor) -> bytes:
        """Requests 3006 and 3007: each entry replaces the one for the same resources, as with RocketMQ."""
        name = _subject(command)
        policies = as_list(load_object(command.body).get("policies"), "policies")
        if not policies:
            raise _AdminRefusal("The policies is empty.")
        custom: list[PolicyEntry] = []
        default: list[PolicyEntry] = []
        for policy in policies:
            members = as_object(policy, "a policy")
            entries = [_entry(as_object(one, "an entry")) for one in as_list(members.get("entries"), "entries")]
            if not entries:
                raise _AdminRefusal("The policy entries is empty.")
            (default if members.get("policyType") == _DEFAULT else custom).extend(entries)

        def apply(table: AccessTable) -> None:
            if name not in table.users:
                raise _AdminRefusal(f"The subject of {_SUBJECT}{name} is not exist.")
            known = table.policies.get(name, Policies())
            table.policies[name] = Policies(_merged(known.custom, custom), _merged(known.default, default))

        return self._change(apply, by)

    def delete_acl(self, command: Command, by: Actor) -> bytes:
        """Request 3008: one resource's entry of one kind, or all entries of a user."""
        name, header = _subject(command), AclRequestHeader.decode(command.ext_fields)
        pattern = ResourcePattern.parse(header.resource) if header.resource else None
        is_default = header.policy_type == _DEFAULT

        def apply(table: AccessTable) -> None:
            if name not in table.users:
                raise _AdminRefusal("The subject is not exist.")
            known = table.policies.get(name)
            if known is None:
                raise _AdminRefusal("The acl is not exist.")
            if pattern is None:
                left = Policies()
            elif is_default:
                left = replace(known, default=tuple(one for one in known.default if one.pattern != pattern))
            else:
                left = replace(known, custom=tuple(one for one in known.custom if one.pattern != pattern))
            if left.custom or left.default:
                table.policies[name] = left
            else:
                del table.policies[name]

        return self._change(apply, by)

    def get_acl(self, command: Command, _by: Actor) -> bytes:
        """Request 3009: no body for a user without policies."""
        name, table = _subject(command), self._load()
        if name not in table.users:
            raise _AdminRefusal("The subject is not exist.")
        known = table.policies.get(name)
        return b"" if known is None else dumps(_acl_info(name, known))

    def list_acls(self, command: Command, _by: Actor) -> bytes:
        """Request 3010: of subjects with the filter in their name, entries whose resource has the other filter in it."""
        header = ListAclsRequestHeader.decode(command.ext_fields)
        subject, resource = header.subject_filter or "", header.resource_filter or ""
        found = []
        for name, known in self._load().policies.items():
            left = Policies(
                tuple(one for one in known.custom if resource in str(one.pattern)),
                tuple(one for one in known.default if resource in str(one.pattern)),
            )
            if subject in _SUBJECT + name and (left.custom or left.default):
                found.append(_acl_info(name, left))
        return dumps(found) if found else b""


def _user_name(command: Command) -> str:
    name = UserRequestHeader.decode(command.ext_fields).username
    if not name or not name.strip():
        raise ValueError("The username is blank")
    return check_name(name)


def _subject(command: Command) -> str:
    subject = AclRequestHeader.decode(command.ext_fields).subject or ""
    if not subject.startswith(_SUBJECT):
        raise _AdminRefusal("The subject type is null.")
    return check_name(subject.removeprefix(_SUBJECT))


def _changed(user: User, members: dict[str, Any]) -> User:
    """The user with the members of a UserInfo that are there. Raises ValueError."""
    kind, status, password = members.get("userType"), members.get("userStatus"), members.get("password")
    if kind not in (None, "Super", "Normal"):
        raise ValueError(f"the user's type is Super or Normal, not {kind!r:.100}")
    if status not in (None, "enable", "disable"):
        raise ValueError(f"the user's status is enable or disable, not {status!r:.100}")
    return replace(
        user,
        secret=Secret(as_text(password, "password")) if password else user.secret,
        is_super=user.is_super if kind is None else kind == "Super",
        is_enabled=user.is_enabled if status is None else status == "enable",
    )


def _user_info(user: User) -> dict[str, str]:
    shown = user.shown()
    return {"userStatus": shown["status"], "userType": shown["type"], "username": user.name}


def _entry(members: dict[str, Any]) -> PolicyEntry:
    try:
        return PolicyEntry.from_json(
            {
                "resource": members.get("resource") or "",
                "actions": as_list(members.get("actions"), "actions"),
                "from": as_list(members.get("sourceIps"), "sourceIps"),
                "decision": members.get("decision"),
            }
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the entry is not in RocketMQ's shape: {error}") from None


def _merged(known: tuple[PolicyEntry, ...], changes: list[PolicyEntry]) -> tuple[PolicyEntry, ...]:
    found = {one.pattern: one for one in known}
    found.update({one.pattern: one for one in changes})
    return tuple(found.values())


def _acl_info(name: str, policies: Policies) -> dict[str, Any]:
    kinds = ((_CUSTOM, policies.custom), (_DEFAULT, policies.default))
    return {
        "policies": [
            {"entries": [_entry_info(one) for one in entries], "policyType": kind} for kind, entries in kinds if entries
        ],
        "subject": _SUBJECT + name,
    }


def _entry_info(entry: PolicyEntry) -> dict[str, Any]:
    members = entry.to_json()
    return without_none(
        {
            "actions": members["actions"],
            "decision": members["decision"],
            "resource": members["resource"],
            "sourceIps": members.get("from"),
        }
    )


_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_CAPACITIES: Final = {"send": 10_000, "pull": 100_000, "litePull": 100_000, "query": 20_000, "ack": 100_000}
_END_CAPACITY: Final = 100_000
"""RocketMQ's usual sizes of queues that this server does not have: dashboards show a share of them."""
_POOL_BUFFERS: Final = 2_147_483_647


@dataclass(slots=True)
class RuntimeFigures:
    """What the table is made of. Times in ms, rates per second over 10 s, 60 s and 600 s."""

    boot_ms: int
    now_ms: int
    put_total: int
    put_bytes: int
    puts: PutTimes
    clock_s: float
    """The monotonic time."""
    put_rates: tuple[float, float, float]
    found_rates: tuple[float, float, float]
    missed_rates: tuple[float, float, float]
    log_begin: int
    log_end: int
    flushed: int
    dispatched: int
    earliest_ms: int
    disk_total: int
    disk_free: int
    log_folder: str
    delay_offsets: dict[int, tuple[int, int]]
    today: tuple[int, int]
    """Messages that users sent and got, until now; ``mornings``: when yesterday and when today began."""
    mornings: tuple[tuple[int, int], tuple[int, int]]


def runtime_table(figures: RuntimeFigures) -> dict[str, str]:
    """The table of KVTable."""
    used = 1 - figures.disk_free / figures.disk_total if figures.disk_total else 0.0
    mean = figures.put_bytes / figures.put_total if figures.put_total else 0.0
    total = [found + missed for found, missed in zip(figures.found_rates, figures.missed_rates, strict=True)]
    table = {
        "bootTimestamp": str(figures.boot_ms),
        "runtime": _duration(figures.now_ms - figures.boot_ms),
        "putMessageEntireTimeMax": str(figures.puts.longest_ms),
        "putMessageTimesTotal": str(max(1, figures.put_total)),
        "putMessageFailedTimes": str(figures.puts.failed),
        "putMessageSizeTotal": str(figures.put_bytes),
        "putMessageDistributeTime": figures.puts.classes(figures.clock_s),
        "putMessageAverageSize": str(mean),
        "dispatchMaxBuffer": "0",
        "getMessageEntireTimeMax": "0",
        "putTps": _rates(figures.put_rates),
        "getFoundTps": _rates(figures.found_rates),
        "getMissTps": _rates(figures.missed_rates),
        "getTotalTps": _rates(total),
        "getTransferredTps": _rates(figures.found_rates),
        "putLatency99": f"{figures.puts.share_ms(0.99, figures.clock_s):.2f}",
        "putLatency999": f"{figures.puts.share_ms(0.999, figures.clock_s):.2f}",
        "commitLogDiskRatio": str(used),
        f"commitLogDiskRatio_{figures.log_folder}": str(used),
        "consumeQueueDiskRatio": str(used),
        "commitLogMinOffset": str(figures.log_begin),
        "commitLogMaxOffset": str(figures.log_end),
        "brokerActive": "true",
        "brokerVersionDesc": "V5_4_0",
        "brokerVersion": str(VERSION),
        "dispatchBehindBytes": str(max(0, figures.log_end - figures.dispatched)),
        "pageCacheLockTimeMills": "0",
        "earliestMessageTimeStamp": str(figures.earliest_ms),
        "startAcceptSendRequestTimeStamp": "0",
        "timerReadBehind": "0",
        "timerOffsetBehind": "0",
        "timerCongestNum": "0",
        "timerEnqueueTps": "0.0",
        "timerDequeueTps": "0.0",
        "remainTransientStoreBufferNumbs": str(_POOL_BUFFERS),
        "remainHowManyDataToFlush": human_bytes(max(0, figures.log_end - figures.flushed)),
        "commitLogDirCapacity": f"Total : {human_bytes(figures.disk_total)}, Free : {human_bytes(figures.disk_free)}.",
        "EndTransactionQueueSize": "0",
        "EndTransactionThreadPoolQueueCapacity": str(_END_CAPACITY),
    }
    yesterday, today = figures.mornings
    for at, kind in enumerate(("Put", "Get")):
        table[f"msg{kind}TotalYesterdayMorning"] = str(yesterday[at])
        table[f"msg{kind}TotalTodayMorning"] = str(today[at])
        table[f"msg{kind}TotalTodayNow"] = str(figures.today[at])
    for kind, capacity in _CAPACITIES.items():
        table[f"{kind}ThreadPoolQueueSize"] = table[f"{kind}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        table[f"{kind}ThreadPoolQueueCapacity"] = str(capacity)
    for level, (offset, end) in figures.delay_offsets.items():
        table[f"scheduleMessageOffset_{level}"] = f"{offset},{end}"
    return table


def human_bytes(count: int) -> str:
    """As RocketMQ shows a number of bytes: ``0 B``, ``1.5 KiB``."""
    if count < 1_024:
        return f"{count} B"
    value, unit = float(count), -1
    while value >= 1_024 and unit + 1 < len(_UNITS):
        value, unit = value / 1_024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def _duration(ms: int) -> str:
    seconds = max(0, ms) // 1_000
    days, hours, minutes = seconds // 86_400, seconds // 3_600 % 24, seconds // 60 % 60
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]"


def _rates(rates: tuple[float, ...] | list[float]) -> str:
    return " ".join(str(float(rate)) for rate in rates)


class AdminBroker:
    """Administration of the broker itself: requests 25, 26, 28, 45, 306, 316, 329, 402 and 907 (remoting 1.10)."""

    def __init__(self, node: NodeClient, settings: BrokerConfig, counting: Counting, queues: Queues) -> None:
        self._node, self._settings, self._counting, self._queues = node, settings, counting, queues
        self._started_ms = time.time_ns() // 1_000_000
        self._changes = 0
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.UPDATE_BROKER_CONFIG: self.update,
            RequestCode.GET_BROKER_CONFIG: self.config,
            RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            RequestCode.GET_ALL_DELAY_OFFSET: self.delay_offsets,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clean,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.expire,
            RequestCode.GET_BROKER_HA_STATUS: self.ha_status,
        }

    # ------------------------------------------------------------ settings

    def update(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 25."""
        try:
            wanted = parse_properties(bytes(command.body).decode())
            if not LOCKED.isdisjoint(wanted):
                return command.answer(ResponseCode.NO_PERMISSION, "Can not update config in black list.")
            self._settings.change(wanted)
        except (UnicodeDecodeError, BrokerConfigError) as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        self._changes += 1
        return command.answer()

    def config(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 26."""
        version = dumps(RemotingDataVersion(self._started_ms, self._changes).to_json()).decode()
        return command.answer(ext_fields={"version": version}, body=self._settings.text().encode())

    # ------------------------------------------------------------ state

    async def runtime_info(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 28."""
        control, counting = self._node.control, self._counting
        disk = shutil.disk_usage(self._node.layout.root)
        rates = {}
        for name in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS", "BROKER_GET_MISS"):
            minute = counting.broker(name).tps
            rates[name] = (minute, minute, minute)
        figures = RuntimeFigures(
            boot_ms=self._started_ms,
            now_ms=time.time_ns() // 1_000_000,
            put_total=counting.broker_total("BROKER_PUT_NUMS"),
            put_bytes=counting.broker_total("BROKER_PUT_SIZE"),
            puts=counting.puts,
            clock_s=time.monotonic(),
            put_rates=rates["BROKER_PUT_NUMS"],
            found_rates=rates["BROKER_GET_NUMS"],
            missed_rates=rates["BROKER_GET_MISS"],
            log_begin=control.get(Word.MIN_OFFSET),
            log_end=control.get(Word.WRITTEN),
            flushed=control.get(Word.FLUSHED),
            dispatched=control.dispatcher(0, DispatcherWord.DISPATCHED),
            earliest_ms=await self._earliest_ms(),
            disk_total=disk.total,
            disk_free=disk.free,
            log_folder=str(self._node.layout.root / "commitlog"),
            delay_offsets=await self._delay_progress(),
            today=counting.now(),
            mornings=counting.mornings(),
        )
        return command.answer(body=kv_table(runtime_table(figures)))

    async def _earliest_ms(self) -> int:
        """When the oldest message of the log was stored; -1 for an empty log."""
        begin = self._node.control.get(Word.MIN_OFFSET)
        if begin >= self._node.control.get(Word.WRITTEN):
            return -1
        try:
            line = self._node.line("reader-0")
            _, frames = await self._node.exchange(line, "view", {"physical_offset": begin})
        except ProtocolError:
            return -1
        record = b"".join(frames)
        width = 20 if record[39] & 0x10 else 8
        return int.from_bytes(record[48 + width : 56 + width], "big")

    def _delays(self) -> dict[int, int]:
        """Next queue offset of each delay level, as the mover last wrote it."""
        try:
            found = json_config.load(self._node.layout.config / "delayOffset.json") or {}
            return {int(level): int(offset) for level, offset in (found.get("offsetTable") or {}).items()}
        except (StoreError, ValueError, AttributeError):
            return {}

    async def _delay_progress(self) -> dict[int, tuple[int, int]]:
        """Next queue offset and end of each delay level that was used."""
        delays = self._delays()
        if not delays:
            return {}
        try:
            bounds = await self._queues.bounds(SCHEDULE_TOPIC, max(delays))
        except ProtocolError:
            bounds = {}
        return {level: (at, max(at, bounds.get(level - 1, (0, 0))[1])) for level, at in delays.items()}

    def delay_offsets(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 45."""
        return command.answer(body=dumps({"offsetTable": {str(level): at for level, at in self._delays().items()}}))

    def ha_status(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 907: this broker is a master without slaves."""
        client = {"activated": False, "lastReadTimestamp": 0, "lastWriteTimestamp": 0, "masterFlushOffset": 0,
                  "maxOffset": 0, "transferredByteInSecond": 0}  # fmt: skip
        body = {
            "haClientRuntimeInfo": client,
            "haConnectionInfo": [],
            "inSyncSlaveNums": 0,
            "master": True,
            "masterCommitLogMaxOffset": self._node.control.get(Word.WRITTEN),
        }
        return command.answer(body=dumps(body))

    # ------------------------------------------------------------ cleaning

    def clean(self, connection: RemotingConnection, command: Command) -> Command:
        """Requests 306 and 316: the node removes the files of what expired, or was deleted, by itself."""
        return command.answer()

    async def expire(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 329: segments of the log that are too old go now, at any hour."""
        await self._node.ask("cleanup", "expire", timeout_s=30.0)
        return command.answer()
