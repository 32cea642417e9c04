"""What a broker says when it registers with a name server, what it hears, and what is too much (spec 14; remoting 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from commitmq_plugins.rocketmq.remoting.bodies.topic_config import TopicConfig
from commitmq_plugins.rocketmq.remoting.errors import BodyError, RemotingError
from commitmq_plugins.rocketmq.remoting.fastjson import dumps

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
class Registration:
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


class Registered(NamedTuple):
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


class Mapping(NamedTuple):
    """Of a static topic at one broker: which of the topic's queues it has, as JSON. ``size``: in bytes."""

    info: orjson.Fragment
    size: int


def check_names(*names: str) -> None:
    """Raises RouteError for one that is too long."""
    for name in names:
        if len(name) > _MAX_NAME:
            raise RouteError(f"a name of {len(name)} characters is too long, at most {_MAX_NAME} are allowed")


def checked_mappings(infos: dict[str, Any], configs: dict[str, TopicConfig]) -> dict[str, Mapping]:
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
        found[topic] = Mapping(orjson.Fragment(encoded), len(encoded))
    return found
