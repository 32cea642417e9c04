"""Connections of groups: the answers to 38, 203, 204 and 328."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from commitmq_plugins.rocketmq.remoting.bodies.heartbeat import SubscriptionData
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps


@dataclass(slots=True)
class ClientConnection:
    """One client of a group. ``client_addr`` is ``ip:port``."""

    client_id: str
    client_addr: str
    language: LanguageCode
    version: int
    last_update_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "clientAddr": self.client_addr,
            "clientId": self.client_id,
            "language": self.language.name,
            "version": self.version,
        }


@dataclass(slots=True)
class ConsumerConnection:
    """A consumer group with its live clients."""

    connections: list[ClientConnection] = field(default_factory=list)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"

    def encode(self) -> bytes:
        return dumps(
            {
                "connectionSet": [one.to_json() for one in self.connections],
                "consumeFromWhere": self.consume_from_where,
                "consumeType": self.consume_type,
                "messageModel": self.message_model,
                "subscriptionTable": {topic: one.to_json() for topic, one in self.subscriptions.items()},
            }
        )


def producer_connection(connections: Iterable[ClientConnection]) -> bytes:
    """The answer to 204."""
    return dumps({"connectionSet": [one.to_json() for one in connections]})


def producer_table(groups: Mapping[str, Iterable[ClientConnection]]) -> bytes:
    """The answer to 328: all producer groups with their clients."""
    return dumps(
        {
            "data": {
                group: [
                    {
                        "clientId": one.client_id,
                        "language": one.language.name,
                        "lastUpdateTimestamp": one.last_update_ms,
                        "remoteIP": f"/{one.client_addr}",
                        "version": one.version,
                    }
                    for one in clients
                ]
                for group, clients in groups.items()
            }
        }
    )


def consumer_list(client_ids: Iterable[str]) -> bytes:
    """The answer to 38."""
    return dumps({"consumerIdList": list(client_ids)})
