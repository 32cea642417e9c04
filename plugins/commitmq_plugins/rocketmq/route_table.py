"""The routes of a name server: brokers, clusters and topics, as brokers register them (spec 14; remoting 7).

Pure: no socket, no clock. A broker lives as long as it registers within its expiry, and as long as the connection on
which it registered last. An address belongs to one name, and a name to one cluster: the newest registration is right, and
takes the place of others. The number of addresses and of topics, and their bytes, are limited; what is beyond is refused,
and the rest stays.

Encoded routes. Clients ask for them all the time, so they are kept until they change, as far as there is room.

What a broker says when it registers with a name server, what it hears, and what is too much (spec 14; remoting 7).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import orjson

from commitmq_plugins.rocketmq.remoting.bodies import (
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    ClusterInfo,
    QueueData,
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    Steps,
    TopicRouteData,
    finish,
    in_steps,
)
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import BodyError, RemotingError


class RouteCache:
    """Bodies by topic, of ``max_bytes`` at most: when there is no room for one more, all are forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._bodies: dict[str, bytes] = {}

    def get(self, topic: str) -> bytes | None:
        return self._bodies.get(topic)

    def put(self, topic: str, body: bytes) -> None:
        """A body that alone has more than ``max_bytes`` is not kept."""
        self.drop(topic)
        if self._bytes + len(body) > self._max_bytes:
            self.clear()
        if len(body) <= self._max_bytes:
            self._bodies[topic] = body
            self._bytes += len(body)

    def drop(self, topic: str) -> None:
        """The route of ``topic`` has changed."""
        self._bytes -= len(self._bodies.pop(topic, b""))

    def clear(self) -> None:
        """Any route may have changed."""
        self._bodies.clear()
        self._bytes = 0


MASTER_ID: Final = 0
DEFAULT_EXPIRY_MS: Final = 120_000
_MAX_MAPPING_BYTES: Final = 65_536
MAX_MAPPINGS_BYTES: Final = 1 << 20
"""Of one topic at all brokers: its route must stay readable for clients."""
_MAX_NAME: Final = 1_024


class RouteError(RemotingError):
    """A registration that the name server does not take."""


class BrokerKey(NamedTuple):
    """One process of a broker."""

    cluster: str
    address: str


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """What one REGISTER_BROKER says beside its topics. ``acting_master`` is None for a broker below 5.0.

    ``is_whole``: the topics are all that the broker has, so others of it are gone. RocketMQ's brokers do not say it.
    """

    key: BrokerKey
    name: str
    broker_id: int
    ha_address: str = ""
    zone: str | None = None
    expiry_ms: int = DEFAULT_EXPIRY_MS
    acting_master: bool | None = None
    is_whole: bool = False


class RegistrationResult(NamedTuple):
    """For a slave: where its master is. ``replaced``: the address that had the same name and id until now."""

    master_address: str | None = None
    ha_address: str | None = None
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Most addresses of brokers; most entries of topics, one for each topic of each broker; and the memory of these entries
    with the mappings of static topics, a quarter of which encoded routes may take besides.
    """

    max_brokers: int = 1_000
    max_topics: int = 200_000
    max_bytes: int = 128 << 20


class TopicQueueMapping(NamedTuple):
    """Of a static topic at one broker: which of the topic's queues it has, as JSON. ``size``: in bytes."""

    info: orjson.Fragment
    size: int


def check_names(*names: str) -> None:
    """Raises RouteError for one that is too long."""
    for name in names:
        if len(name) > _MAX_NAME:
            raise RouteError(f"a name of {len(name)} characters is too long, at most {_MAX_NAME} are allowed")


def checked_mappings(infos: dict[str, Any], configs: dict[str, RemotingTopicConfig]) -> dict[str, TopicQueueMapping]:
    """The mappings of the topics in ``configs``. Raises RouteError.

    They are a part of the routes of their topics, which every client gets.
    """
    found = {}
    for topic, info in infos.items():
        if topic not in configs:
            continue
        try:
            encoded = dumps(info)
        except BodyError as error:
            raise RouteError(f"the mapping of topic {topic!r:.100}: {error}") from error
        if len(encoded) > _MAX_MAPPING_BYTES:
            raise RouteError(f"the mapping of topic {topic!r:.100} has {len(encoded)} bytes of {_MAX_MAPPING_BYTES}")
        found[topic] = TopicQueueMapping(orjson.Fragment(encoded), len(encoded))
    return found


_ENTRY_BYTES: Final = 256
"""Of memory for a topic of a broker, beside its name and its mapping."""


@dataclass(slots=True)
class _LiveBroker:
    """A broker's process. Its address is in the ``broker_addrs`` of broker ``name``, and nowhere else."""

    name: str
    seen_ms: int
    expiry_ms: int
    version: RemotingDataVersion
    channel: Hashable
    ha_address: str


class RouteTable:
    """The routes of a name server. ``channel`` of a registration is whatever stands for its connection."""

    def __init__(self, limits: RouteLimits | None = None) -> None:
        self._limits = limits or RouteLimits()
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, dict[str, None]] = {}
        self._live: dict[BrokerKey, _LiveBroker] = {}
        self._topics_of: dict[str, dict[str, None]] = {}
        """By broker, so that one broker costs no look at the topics of others."""
        self._mappings: dict[str, dict[str, TopicQueueMapping]] = {}
        self._entries = self._bytes = 0
        self._encoded = RouteCache(self._limits.max_bytes // 4)

    # ------------------------------------------------------------ brokers

    def register(
        self, registration: BrokerRegistration, body: RegisterBrokerBody, channel: Hashable, now_ms: int
    ) -> RegistrationResult:
        """Take a broker's registration. Raises RouteError, and nothing is changed then."""
        return finish(self.registering(registration, body, channel, now_ms))

    def registering(
        self, registration: BrokerRegistration, body: RegisterBrokerBody, channel: Hashable, now_ms: int
    ) -> Steps[RegistrationResult]:
        """:meth:`register` in steps, between which anything may happen. A broker that ends, or registers again, between
        them ends this registration.
        """
        key, name, broker_id = registration.key, registration.name, registration.broker_id
        configs: dict[str, RemotingTopicConfig] = {}
        for config in in_steps(body.topics.topic_config_table.values()):
            if config is None:
                yield
            else:
                configs[config.topic_name] = config
        mappings = checked_mappings(body.topics.mapping_info, configs)
        yield from self._check_limits(registration, configs, mappings)
        broker = self._brokers.get(name)
        addresses = {} if broker is None else broker.broker_addrs
        if self._is_older(registration, addresses, body):
            self._end([key])
            return RegistrationResult()
        if broker_id not in addresses and len(configs) == 1:
            # An increment of a broker that the name server does not know, as after a restart (spec 14).
            raise RouteError("register broker failed")
        before = self._make_way(registration)
        broker = self._brokers.get(name)
        if broker is None:
            broker = self._brokers[name] = BrokerData(key.cluster, name)
        self._clusters.setdefault(key.cluster, {})[name] = None
        is_first = self._place(broker, registration)
        live = self._live.get(key)
        is_changed = is_first or live is None or live.version != body.topics.data_version
        live = self._live[key] = _LiveBroker(
            name, now_ms, registration.expiry_ms, body.topics.data_version, channel, registration.ha_address
        )
        if self._tells_topics(broker, registration):
            for _ in self._take_topics(broker, registration, configs, is_changed=is_changed):
                yield
                if self._live.get(key) is not live:
                    return RegistrationResult()
            if is_changed:
                for topic, mapping in mappings.items():
                    self._bytes += mapping.size - self._mapping_bytes(topic, name)
                    self._mappings.setdefault(topic, {})[name] = mapping
                    self._encoded.drop(topic)
        return self._master_of(broker, registration)._replace(replaced=before)

    def _make_way(self, registration: BrokerRegistration) -> str | None:
        """End what has the name, the id or the address otherwise. Returns the address that had the name and id."""
        key, name = registration.key, registration.name
        live = self._live.get(key)
        if live is not None and live.name != name:
            self._end([key])
        broker = self._brokers.get(name)
        if broker is None:
            return None
        before = broker.broker_addrs.get(registration.broker_id)
        if broker.cluster != key.cluster:
            self._end([BrokerKey(broker.cluster, one) for one in broker.broker_addrs.values()])
            return before
        if before is None or before == key.address:
            return None
        del self._live[BrokerKey(key.cluster, before)]  # its topics stay: the newcomer is the same broker
        return before

    def _check_limits(
        self,
        registration: BrokerRegistration,
        configs: dict[str, RemotingTopicConfig],
        mappings: dict[str, TopicQueueMapping],
    ) -> Steps[None]:
        key, name = registration.key, registration.name
        check_names(name, key.cluster, key.address, registration.ha_address, registration.zone or "")
        new = more = 0
        for topic in in_steps(configs):
            if topic is None:
                yield
                continue
            check_names(topic)
            if name not in self._topics.get(topic, ()):
                new += 1
                more += _entry_bytes(topic)
        if key not in self._live and len(self._live) >= self._limits.max_brokers:
            raise RouteError(f"the name server has {len(self._live)} brokers already, which is its limit (max_brokers)")
        for topic, one in mappings.items():
            size = sum(other.size for owner, other in self._mappings.get(topic, {}).items() if owner != name) + one.size
            if size > MAX_MAPPINGS_BYTES:
                raise RouteError(f"the mappings of topic {topic!r:.100} have {size} bytes of {MAX_MAPPINGS_BYTES}")
        more += sum(one.size - self._mapping_bytes(topic, name) for topic, one in mappings.items())
        self._check_room(new, more)

    def _check_room(self, new: int, more: int) -> None:
        """For ``new`` entries, and ``more`` bytes."""
        if self._entries + new > self._limits.max_topics:
            raise RouteError(
                f"{new} new topics are too many: the name server has {self._entries} of {self._limits.max_topics}"
                " (plugins.rocketmq.max_topic_routes)"
            )
        if more > 0 and self._bytes + more > self._limits.max_bytes:
            raise RouteError(
                f"{more} more bytes of routes are too many: the name server has {self._bytes} of {self._limits.max_bytes}"
                " (plugins.rocketmq.max_route_bytes)"
            )

    def _mapping_bytes(self, topic: str, name: str) -> int:
        found = self._mappings.get(topic, {}).get(name)
        return 0 if found is None else found.size

    def _is_older(self, registration: BrokerRegistration, addresses: dict[int, str], body: RegisterBrokerBody) -> bool:
        """Whether another process with the same broker id has a newer state."""
        other = addresses.get(registration.broker_id)
        if other is None or other == registration.key.address:
            return False
        live = self._live.get(BrokerKey(registration.key.cluster, other))
        return live is not None and live.version.state_version > body.topics.data_version.state_version

    def _place(self, broker: BrokerData, registration: BrokerRegistration) -> bool:
        """Put the address under its id, and nowhere else. Whether the id is new."""
        address, addresses = registration.key.address, broker.broker_addrs
        before = (dict(addresses), broker.enable_acting_master, broker.zone_name)
        broker.enable_acting_master = bool(registration.acting_master)
        broker.zone_name = registration.zone
        for broker_id in [one for one, text in addresses.items() if text == address and one != registration.broker_id]:
            del addresses[broker_id]
        is_first = not addresses.get(registration.broker_id)
        addresses[registration.broker_id] = address
        if before != (addresses, broker.enable_acting_master, broker.zone_name):
            self._encoded.clear()
        return is_first

    @staticmethod
    def _tells_topics(broker: BrokerData, registration: BrokerRegistration) -> bool:
        """The master's topics count, or those of the first slave of a broker of 5.0 or later."""
        if registration.broker_id == MASTER_ID:
            return True
        return registration.acting_master is not None and registration.broker_id == min(broker.broker_addrs)

    def _take_topics(
        self,
        broker: BrokerData,
        registration: BrokerRegistration,
        configs: dict[str, RemotingTopicConfig],
        *,
        is_changed: bool,
    ) -> Steps[None]:
        name = broker.broker_name
        wiped = PERM_WRITE if registration.broker_id != MASTER_ID and broker.enable_acting_master else 0
        for config in in_steps(configs.values()):
            if config is None:
                yield
                continue
            queues = self._topics.get(config.topic_name)
            if is_changed or queues is None or name not in queues:
                data = QueueData(
                    name,
                    config.read_queue_nums,
                    config.write_queue_nums,
                    config.perm & ~wiped,
                    config.topic_sys_flag,
                )
                self._put(config.topic_name, data)
        if registration.is_whole:
            gone = self._topics_of.get(name, {}).keys() - configs.keys()
            for topic in in_steps(gone):
                if topic is None:
                    yield
                elif name in self._topics.get(topic, ()):
                    self._drop(topic, name)

    def _master_of(self, broker: BrokerData, registration: BrokerRegistration) -> RegistrationResult:
        master = broker.broker_addrs.get(MASTER_ID)
        if registration.broker_id == MASTER_ID or master is None:
            return RegistrationResult()
        live = self._live.get(BrokerKey(registration.key.cluster, master))
        return RegistrationResult() if live is None else RegistrationResult(master, live.ha_address)

    def unregister(self, key: BrokerKey, name: str) -> None:
        """The process of broker ``name`` at this address ends. One of another name there stays."""
        live = self._live.get(key)
        if live is None or live.name != name:
            return
        del self._live[key]
        broker = self._brokers[name]
        for broker_id in [one for one, text in broker.broker_addrs.items() if text == key.address]:
            del broker.broker_addrs[broker_id]
        self._encoded.clear()
        if broker.broker_addrs:
            if broker.enable_acting_master and MASTER_ID not in broker.broker_addrs:
                for data in self._queues_of(name):
                    data.perm &= ~PERM_WRITE
            return
        del self._brokers[name], self._clusters[key.cluster][name]
        if not self._clusters[key.cluster]:
            del self._clusters[key.cluster]
        for topic in list(self._topics_of.get(name, ())):
            self._drop(topic, name)

    def channel_closed(self, channel: Hashable) -> list[BrokerKey]:
        """Unregister the brokers that registered on ``channel`` last. Returns them."""
        return self._end(key for key, live in self._live.items() if live.channel is channel)

    def expire(self, now_ms: int) -> list[tuple[BrokerKey, Hashable]]:
        """Unregister the brokers that did not register in time. Returns them, with their channels."""
        late = {key: live.channel for key, live in self._live.items() if live.seen_ms + live.expiry_ms < now_ms}
        self._end(late)
        return list(late.items())

    def _end(self, keys: Iterable[BrokerKey]) -> list[BrokerKey]:
        ended = list(keys)
        for key in ended:
            if (live := self._live.get(key)) is not None:
                self.unregister(key, live.name)
        return ended

    def version_of(self, key: BrokerKey) -> RemotingDataVersion | None:
        """The version of the topics that the broker registered last."""
        live = self._live.get(key)
        return None if live is None else live.version

    def touch(self, key: BrokerKey, now_ms: int) -> None:
        """The broker lives, and has nothing new."""
        live = self._live.get(key)
        if live is not None:
            live.seen_ms = now_ms

    def set_writable(self, name: str, *, writable: bool) -> int:
        """Let no producer send to broker ``name``, or let them again. The number of its topics."""
        count = 0
        for data in self._queues_of(name):
            data.perm = PERM_READ | PERM_WRITE if writable else data.perm & ~PERM_WRITE
            count += 1
        self._encoded.clear()
        return count

    def _queues_of(self, name: str) -> list[QueueData]:
        return [self._topics[topic][name] for topic in self._topics_of.get(name, ())]

    # ------------------------------------------------------------ topics

    def put_topic(self, topic: str, queue_datas: Iterable[QueueData]) -> None:
        """Add queues of known brokers to ``topic``; nothing if one of them is unknown. Raises RouteError."""
        datas = list(queue_datas)
        if any(data.broker_name not in self._brokers for data in datas):
            return
        check_names(topic)
        self._check_room(len(datas), len(datas) * _entry_bytes(topic))
        for data in datas:
            self._put(topic, data)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget ``topic``, or what the brokers of ``cluster`` have of it."""
        queues = self._topics.get(topic, {})
        for name in [one for one in queues if cluster is None or one in self._clusters.get(cluster, ())]:
            self._drop(topic, name)

    def _put(self, topic: str, data: QueueData) -> None:
        queues = self._topics.setdefault(topic, {})
        old = queues.get(data.broker_name)
        if old != data:
            self._entries += old is None
            self._bytes += _entry_bytes(topic) if old is None else 0
            self._topics_of.setdefault(data.broker_name, {})[topic] = None
            queues[data.broker_name] = data
            self._encoded.drop(topic)

    def _drop(self, topic: str, name: str) -> None:
        queues = self._topics[topic]
        del queues[name]
        self._entries -= 1
        self._bytes -= _entry_bytes(topic) + self._mapping_bytes(topic, name)
        del self._topics_of[name][topic]
        if not self._topics_of[name]:
            del self._topics_of[name]
        mappings = self._mappings.get(topic, {})
        mappings.pop(name, None)
        if not mappings:
            self._mappings.pop(topic, None)
        if not queues:
            del self._topics[topic]
        self._encoded.drop(topic)

    # ------------------------------------------------------------ answers

    def route(self, topic: str) -> TopicRouteData | None:
        """The route of ``topic``, None without a broker."""
        queues = self._topics.get(topic)
        if not queues:
            return None
        brokers = [self._brokers[name] for name in queues if name in self._brokers]
        if not brokers:
            return None
        mappings = self._mappings.get(topic)
        return TopicRouteData(
            [replace(data) for data in queues.values()],
            [replace(broker, broker_addrs=dict(broker.broker_addrs)) for broker in brokers],
            topic_queue_mapping_by_broker=None
            if mappings is None
            else {name: one.info for name, one in mappings.items()},
        )

    def encoded_route(self, topic: str) -> bytes | None:
        """The body of :meth:`route`."""
        found = self._encoded.get(topic)
        if found is None:
            route = self.route(topic)
            if route is None:
                return None
            found = route.encode()
            self._encoded.put(topic, found)
        return found

    def topics(self) -> list[str]:
        """All topics."""
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """The topics that brokers of ``cluster`` have."""
        names = self._clusters.get(cluster, {})
        return [topic for topic, queues in self._topics.items() if not names.keys().isdisjoint(queues)]

    def topics_with(self, flags: int, without: int = 0) -> list[str]:
        """Topics whose system flag has all ``flags`` and none of ``without``."""
        firsts = ((topic, next(iter(queues.values())).topic_sys_flag) for topic, queues in self._topics.items())
        return [topic for topic, flag in firsts if flag & flags == flags and not flag & without]

    def cluster_info(self) -> ClusterInfo:
        """All brokers and clusters."""
        return ClusterInfo(dict(self._brokers), {name: list(brokers) for name, brokers in self._clusters.items()})

    def members(self, name: str) -> dict[int, str]:
        """The addresses of broker ``name`` by id."""
        broker = self._brokers.get(name)
        return {} if broker is None else dict(broker.broker_addrs)

    def system_topics(self) -> tuple[list[str], str | None]:
        """Names of clusters and brokers, which are topics too, and the address of a broker that knows the others."""
        names: list[str] = []
        for cluster, brokers in self._clusters.items():
            names += [cluster, *brokers]
        addresses = (address for broker in self._brokers.values() for address in broker.broker_addrs.values())
        return names, next(addresses, None)


def _entry_bytes(topic: str) -> int:
    return _ENTRY_BYTES + len(topic.encode(errors="replace"))
