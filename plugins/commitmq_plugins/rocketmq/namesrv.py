"""rocketmq-namesrv: RocketMQ's name server, for this node and for any other broker that registers (remoting 7).

Owns the file of stored texts, ``kvConfig.json`` in its folder, and its certificate beside it (:mod:`.remoting.tls`). A
death loses the routes (:mod:`.route_table`): brokers register again within 30 s, those of this node at once, and clients go
on with the routes that they have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from commitmq.errors import CommitMQError
from commitmq.files import atomic_file
from commitmq.log import LimitedLog, Log
from commitmq.plugin import WorkerContext, failpoints, run_async
from commitmq_plugins.rocketmq import RocketMQSettings
from commitmq_plugins.rocketmq.remoting import headers
from commitmq_plugins.rocketmq.remoting.bodies import (
    RegisterBrokerBody,
    RemotingDataVersion,
    Steps,
    TopicRouteData,
    begin,
    beside_others,
    crc32,
    kv_table,
    topic_list,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import as_map, as_text, dumps, load_object, loads
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError
from commitmq_plugins.rocketmq.remoting.headers import TopicRequestHeader
from commitmq_plugins.rocketmq.remoting.server import RemotingConnection, RemotingServer, limits_of, tls_of
from commitmq_plugins.rocketmq.route_table import (
    DEFAULT_EXPIRY_MS,
    BrokerKey,
    BrokerRegistration,
    RouteError,
    RouteLimits,
    RouteTable,
)

BLACK_LIST: Final = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})


class BlackListError(RemotingError):
    """A setting that no tool may change."""


@dataclass(slots=True)
class NamesrvConfig:
    """The settings that change what this name server does. The others of RocketMQ's have their values there."""

    order_message_enable: bool = False
    return_order_topic_config_to_broker: bool = True
    enable_all_topic_list: bool = True
    enable_topic_list: bool = True
    scan_not_active_broker_interval: int = 5_000
    listen_port: int = 9876
    kv_config_path: str = ""

    def to_text(self) -> str:
        """Lines ``key=value``, in the order of their keys."""
        values = {_java_name(one.name): getattr(self, one.name) for one in fields(self)}
        values |= {
            "clusterTest": False,
            "configBlackList": "configBlackList;configStorePath;kvConfigPath",
            "deleteTopicWithBrokerRegistration": False,
            "needWaitForService": False,
            "notifyMinBrokerIdChanged": False,
            "productEnvName": "center",
            "supportActingMaster": False,
        }
        texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
        return "".join(f"{key}={texts[key]}\n" for key in sorted(texts))

    def update(self, text: str) -> None:
        """Take the switches among the lines ``key=value``; unknown keys are ignored. Raises BlackListError."""
        values = dict(parse_properties(text))
        if not BLACK_LIST.isdisjoint(values):
            raise BlackListError("Can not update config in black list.")
        for one in fields(self):
            value = values.get(_java_name(one.name))
            if value is not None and isinstance(getattr(self, one.name), bool):
                setattr(self, one.name, value.lower() == "true")


def parse_properties(text: str) -> list[tuple[str, str]]:
    """The pairs in a text of Java's properties: ``key=value`` or ``key: value``, comments after ``#`` or ``!``."""
    pairs = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        at = min((found for mark in "=:" if (found := line.find(mark)) >= 0), default=len(line))
        pairs.append((line[:at].strip(), line[at + 1 :].strip()))
    return pairs


def _java_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
MAX_BYTES: Final = 1 << 20


class KVConfigFullError(RemotingError):
    """The texts together would have more bytes than allowed."""


class KVConfig:
    """All texts. A change is on the device when its call returns; a file that cannot be written raises OSError."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Reads the file. Raises BodyError if it has another content, OSError if it cannot be read."""
        self._path, self._max_bytes = path, max_bytes
        self._table: dict[str, dict[str, str]] = {}
        if path.exists():
            members = load_object(path.read_bytes())
            self._table = as_map(
                members.get("configTable"),
                "configTable",
                lambda one: as_map(one, "a namespace", lambda text: as_text(text, "a value")),
            )

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All texts of a namespace, None if there never was one."""
        found = self._table.get(namespace)
        return None if found is None else dict(found)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Raises KVConfigFullError."""
        table = {name: dict(texts) for name, texts in self._table.items()}
        table.setdefault(namespace, {})[key] = value
        self._store(table)

    def delete(self, namespace: str, key: str) -> None:
        """Nothing happens for a key that is not there."""
        if key in self._table.get(namespace, {}):
            table = {name: dict(texts) for name, texts in self._table.items()}
            del table[namespace][key]
            self._store(table)

    def _store(self, table: dict[str, dict[str, str]]) -> None:
        data = dumps({"configTable": table})
        if len(data) > self._max_bytes:
            raise KVConfigFullError(
                f"the stored texts would take {len(data)} bytes, at most {self._max_bytes} are allowed"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.replace(self._path, data, "namesrv.kv_config")
        self._table = table


_ZONE: Final = "__ZONE_NAME"
_FAQ: Final = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
_UNIT: Final = 1
_UNIT_SUB: Final = 2
_MAX_EXPIRY_MS: Final = 24 * 3_600_000
_DISABLED: Final = "disable"
_LONG_BYTES: Final = 65_536
"""Of a registration that is not begun at once."""

Answerer = Callable[[Hashable, Command], Command | Awaitable[Command]]


class NamesrvRequests:
    """Answers requests; ``channel`` stands for the connection a request came on. ``now_ms`` is any clock."""

    def __init__(
        self,
        routes: RouteTable,
        kv: KVConfig,
        config: NamesrvConfig,
        now_ms: Callable[[], int],
        log: Log,
        *,
        max_body_bytes: int = 16 << 20,
    ) -> None:
        """``max_body_bytes``: the size of a registration after decompression."""
        self.routes, self._kv, self.config, self._now_ms, self._log = routes, kv, config, now_ms, log
        self._max_body_bytes = max_body_bytes
        self._turn = asyncio.Lock()
        self._slow: set[Hashable] = set()
        self._answerers: dict[int, Answerer] = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster_info,
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.QUERY_DATA_VERSION: self._query_data_version,
            RequestCode.BROKER_HEARTBEAT: self._broker_heartbeat,
            RequestCode.GET_BROKER_MEMBER_GROUP: self._member_group,
            RequestCode.PUT_KV_CONFIG: self._put_kv,
            RequestCode.GET_KV_CONFIG: self._get_kv,
            RequestCode.DELETE_KV_CONFIG: self._delete_kv,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._kv_list,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write_perm,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._all_topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_by_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._update_config,
            RequestCode.GET_NAMESRV_CONFIG: self._get_config,
        }

    def handle(self, channel: Hashable, command: Command) -> Command | Awaitable[Command]:
        """The answer to any request; an awaitable for a registration of many topics: each turn of the event loop takes some.
        Never raises, and neither does the awaitable.
        """
        answerer = self._answerers.get(command.code)
        if answerer is None:
            return command.not_supported()
        if failpoints.ACTIVE:
            failpoints.hit(f"namesrv.read.{RequestCode(command.code).name}")
        try:
            answer = answerer(channel, command)
            if failpoints.ACTIVE:
                failpoints.hit(f"namesrv.done.{RequestCode(command.code).name}")
            return answer
        except Exception as error:
            return self._failed(command, error)

    def _failed(self, command: Command, error: Exception) -> Command:
        """The answer to a request that raised ``error``, which is being handled."""
        if isinstance(error, CommitMQError):
            self._log.debug("a request is refused", code=command.code, error=str(error))
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        self._log.exception("a request failed", code=command.code, error=repr(error))
        return command.answer(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")

    def channel_closed(self, channel: Hashable) -> list[BrokerKey]:
        """End the brokers that registered on ``channel`` last, and registrations that came on it. Returns the brokers."""
        self._slow.discard(channel)
        return self.routes.channel_closed(channel)

    # ------------------------------------------------------------ routes

    def _route(self, _channel: Hashable, command: Command) -> Command:
        topic = TopicRequestHeader.decode(command.ext_fields).topic
        order = self._kv.get(ORDER_TOPIC_CONFIG, topic) if self.config.order_message_enable else None
        if order is None:
            body = self.routes.encoded_route(topic)
        else:
            route = self.routes.route(topic)
            body = None if route is None else replace(route, order_topic_conf=order).encode()
        if body is None:
            remark = f"No topic route info in name server for the topic: {topic}{_FAQ}"
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, remark)
        return command.answer(body=body)

    def _cluster_info(self, _channel: Hashable, command: Command) -> Command:
        return command.answer(body=self.routes.cluster_info().encode())

    def _all_topics(self, _channel: Hashable, command: Command) -> Command:
        if not self.config.enable_all_topic_list:
            return command.answer(ResponseCode.SYSTEM_ERROR, _DISABLED)
        return command.answer(body=topic_list(self.routes.topics()))

    def _topics_by_cluster(self, _channel: Hashable, command: Command) -> Command:
        if not self.config.enable_topic_list:
            return command.answer(ResponseCode.SYSTEM_ERROR, _DISABLED)
        cluster = headers.GetTopicsByClusterRequestHeader.decode(command.ext_fields).cluster
        return command.answer(body=topic_list(self.routes.topics_of_cluster(cluster)))

    def _system_topics(self, _channel: Hashable, command: Command) -> Command:
        return command.answer(body=topic_list(*self.routes.system_topics()))

    def _unit_topics(self, _channel: Hashable, command: Command) -> Command:
        if not self.config.enable_topic_list:
            return command.answer(ResponseCode.SYSTEM_ERROR, _DISABLED)
        flags = _UNIT if command.code == RequestCode.GET_UNIT_TOPIC_LIST else _UNIT_SUB
        without = _UNIT if command.code == RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST else 0
        return command.answer(body=topic_list(self.routes.topics_with(flags, without)))

    def _delete_topic(self, _channel: Hashable, command: Command) -> Command:
        header = headers.DeleteTopicFromNamesrvRequestHeader.decode(command.ext_fields)
        self.routes.delete_topic(header.topic, header.cluster_name or None)
        return command.answer()

    def _register_topic(self, _channel: Hashable, command: Command) -> Command:
        topic = TopicRequestHeader.decode(command.ext_fields).topic
        route = TopicRouteData.from_json(loads(command.body)) if len(command.body) else TopicRouteData()
        self.routes.put_topic(topic, route.queue_datas)
        return command.answer()

    # ------------------------------------------------------------ brokers

    def _register(self, channel: Hashable, command: Command) -> Command | Awaitable[Command]:
        steps = self._registering(channel, command)
        is_short = len(command.body) < _LONG_BYTES and channel not in self._slow
        if is_short and (done := begin(steps)) is not None:
            return done[0]
        self._slow.add(channel)  # its registrations keep their order
        return self._register_beside_others(channel, command, steps)

    async def _register_beside_others(self, channel: Hashable, command: Command, steps: Steps[Command]) -> Command:
        async with self._turn:
            try:
                return await beside_others(self._while_open(channel, steps))
            except Exception as error:
                return self._failed(command, error)

    def _while_open(self, channel: Hashable, steps: Steps[Command]) -> Steps[Command]:
        while channel in self._slow:
            try:
                yield next(steps)
            except StopIteration as done:
                answer: Command = done.value
                return answer
        raise RouteError("the connection of the broker has ended")

    def _registering(self, channel: Hashable, command: Command) -> Steps[Command]:
        header = headers.RegisterBrokerRequestHeader.decode(command.ext_fields)
        if header.body_crc32 and header.body_crc32 != crc32(command.body):
            self._log.warning("a registration is damaged", broker=header.broker_addr)
            return command.answer(ResponseCode.SYSTEM_ERROR, "crc32 not match")
        body = yield from RegisterBrokerBody.decoding(
            command.body, compressed=header.compressed, version=command.version, max_bytes=self._max_body_bytes
        )
        key = BrokerKey(header.cluster_name, header.broker_addr)
        expiry_ms = header.heartbeat_timeout_millis
        registration = BrokerRegistration(
            key,
            header.broker_name,
            header.broker_id,
            header.ha_server_addr or "",
            command.ext_fields.get(_ZONE),
            DEFAULT_EXPIRY_MS if expiry_ms is None else max(0, min(expiry_ms, _MAX_EXPIRY_MS)),
            header.enable_acting_master,
            bool(header.whole_topic_table),
        )
        is_new = self.routes.version_of(key) is None
        try:
            found = yield from self.routes.registering(registration, body, channel, self._now_ms())
        except RouteError as error:
            self._log.warning("a broker is refused", broker=header.broker_addr, error=str(error))
            self.routes.touch(key, self._now_ms())  # what it registered before stays
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        if found.replaced:
            self._log.warning(
                "another address takes a broker's place",
                broker=header.broker_name,
                address=header.broker_addr,
                before=found.replaced,
            )
        if is_new:
            self._log.info("a broker registers", broker=header.broker_name, address=header.broker_addr)
        answer = headers.RegisterBrokerResponseHeader(found.ha_address, found.master_address)
        table = self._kv.namespace(ORDER_TOPIC_CONFIG) if self.config.return_order_topic_config_to_broker else None
        return command.answer(ext_fields=answer.encode(), body=b"" if table is None else kv_table(table))

    def _unregister(self, _channel: Hashable, command: Command) -> Command:
        header = headers.BrokerRequestHeader.decode(command.ext_fields)
        self.routes.unregister(BrokerKey(header.cluster_name, header.broker_addr), header.broker_name)
        self._log.info("a broker leaves", broker=header.broker_name, address=header.broker_addr)
        return command.answer()

    def _query_data_version(self, _channel: Hashable, command: Command) -> Command:
        header = headers.BrokerRequestHeader.decode(command.ext_fields)
        key = BrokerKey(header.cluster_name, header.broker_addr)
        known = self.routes.version_of(key)
        is_changed = known is None or known != RemotingDataVersion.from_json(
            loads(command.body) if len(command.body) else None
        )
        self.routes.touch(key, self._now_ms())
        fields = headers.QueryDataVersionResponseHeader(is_changed).encode()
        return command.answer(ext_fields=fields, body=b"" if known is None else dumps(known.to_json()))

    def _broker_heartbeat(self, _channel: Hashable, command: Command) -> Command:
        header = headers.BrokerHeartbeatRequestHeader.decode(command.ext_fields)
        self.routes.touch(BrokerKey(header.cluster_name, header.broker_addr), self._now_ms())
        return command.answer()

    def _member_group(self, _channel: Hashable, command: Command) -> Command:
        header = headers.GetBrokerMemberGroupRequestHeader.decode(command.ext_fields)
        group = {
            "brokerAddrs": self.routes.members(header.broker_name),
            "brokerName": header.broker_name,
            "cluster": header.cluster_name,
        }
        return command.answer(body=dumps({"brokerMemberGroup": group}))

    def _wipe_write_perm(self, _channel: Hashable, command: Command) -> Command:
        name = headers.BrokerNameRequestHeader.decode(command.ext_fields).broker_name
        count = self.routes.set_writable(name, writable=False)
        return command.answer(ext_fields=headers.WipeWritePermOfBrokerResponseHeader(count).encode())

    def _add_write_perm(self, _channel: Hashable, command: Command) -> Command:
        name = headers.BrokerNameRequestHeader.decode(command.ext_fields).broker_name
        count = self.routes.set_writable(name, writable=True)
        return command.answer(ext_fields=headers.AddWritePermOfBrokerResponseHeader(count).encode())

    # ------------------------------------------------------------ stored texts and settings

    def _put_kv(self, _channel: Hashable, command: Command) -> Command:
        header = headers.PutKVConfigRequestHeader.decode(command.ext_fields)
        if header.namespace is None or header.key is None:
            return command.answer(ResponseCode.SYSTEM_ERROR, "namespace or key is null")
        self._kv.put(header.namespace, header.key, header.value or "")
        return command.answer()

    def _get_kv(self, _channel: Hashable, command: Command) -> Command:
        header = headers.KVConfigRequestHeader.decode(command.ext_fields)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return command.answer(ResponseCode.QUERY_NOT_FOUND, remark)
        return command.answer(ext_fields=headers.GetKVConfigResponseHeader(value).encode())

    def _delete_kv(self, _channel: Hashable, command: Command) -> Command:
        header = headers.KVConfigRequestHeader.decode(command.ext_fields)
        self._kv.delete(header.namespace, header.key)
        return command.answer()

    def _kv_list(self, _channel: Hashable, command: Command) -> Command:
        namespace = headers.NamespaceRequestHeader.decode(command.ext_fields).namespace
        table = self._kv.namespace(namespace)
        if table is None:
            return command.answer(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return command.answer(body=kv_table(table))

    def _update_config(self, _channel: Hashable, command: Command) -> Command:
        try:
            self.config.update(bytes(command.body).decode("utf-8", "replace"))
        except BlackListError as error:
            return command.answer(ResponseCode.NO_PERMISSION, str(error))
        return command.answer()

    def _get_config(self, _channel: Hashable, command: Command) -> Command:
        return command.answer(body=self.config.to_text().encode())


_MS: Final = 1_000_000


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings: RocketMQSettings = context.params["settings"]
    log = LimitedLog(context.log)
    path = context.folder / "kvConfig.json"
    config = NamesrvConfig(listen_port=settings.namesrv_port, kv_config_path=str(path))
    routes = RouteTable(RouteLimits(settings.max_brokers, settings.max_topic_routes, settings.max_route_bytes))
    requests = NamesrvRequests(routes, KVConfig(path), config, _now_ms, log)

    def closed(connection: RemotingConnection) -> None:
        for key in requests.channel_closed(connection):
            log.warning("a broker's connection ended", address=key.address)

    tls = tls_of(settings, context.folder, log)
    server = RemotingServer(requests.handle, closed, log, limits_of(settings), tls)
    port = await server.listen(settings.host, settings.namesrv_port)
    context.ready(endpoints=[f"tcp://{settings.host}:{port}"])
    context.log.info("RocketMQ's name server serves", host=settings.host, port=port)
    scanning = asyncio.create_task(_scan(routes, config, context))
    try:
        await stopping.wait()
    finally:
        scanning.cancel()
        await server.close()


async def _scan(routes: RouteTable, config: NamesrvConfig, context: WorkerContext) -> None:
    while True:
        await asyncio.sleep(config.scan_not_active_broker_interval / 1_000)
        for key, channel in routes.expire(_now_ms()):
            context.log.warning("a broker does not register any more", address=key.address)
            if isinstance(channel, RemotingConnection):
                channel.close()


def _now_ms() -> int:
    return time.monotonic_ns() // _MS
