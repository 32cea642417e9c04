"""Offsets of queues and rates: the answers to 202, 208, 222, 315 and 317."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue, dumps, queue_map


@dataclass(frozen=True, slots=True)
class TopicOffset:
    """One queue of a topic: offsets, and the time of its newest message in ms (0 without one)."""

    min_offset: int
    max_offset: int
    last_update_timestamp: int

    def to_json(self) -> dict[str, Any]:
        return {
            "lastUpdateTimestamp": self.last_update_timestamp,
            "maxOffset": self.max_offset,
            "minOffset": self.min_offset,
        }


def topic_stats_table(offsets: Mapping[MessageQueue, TopicOffset], put_tps: float = 0.0) -> bytes:
    """The answer to 202."""
    table = queue_map({queue: one.to_json() for queue, one in offsets.items()})
    return dumps({"offsetTable": table, "topicPutTps": put_tps})


@dataclass(frozen=True, slots=True)
class OffsetWrapper:
    """The progress of a group in one queue; ``last_timestamp`` is the time of the last consumed message in ms."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp: int

    def to_json(self) -> dict[str, Any]:
        return {
            "brokerOffset": self.broker_offset,
            "consumerOffset": self.consumer_offset,
            "lastTimestamp": self.last_timestamp,
            "pullOffset": self.pull_offset,
        }


@dataclass(slots=True)
class ConsumeStats:
    """The answer to 208."""

    offset_table: dict[MessageQueue, OffsetWrapper] = field(default_factory=dict)
    consume_tps: float = 0.0

    def to_json(self) -> dict[str, Any]:
        table = queue_map({queue: one.to_json() for queue, one in self.offset_table.items()})
        return {"consumeTps": self.consume_tps, "offsetTable": table}

    def encode(self) -> bytes:
        return dumps(self.to_json())


def reset_offset_body(offsets: Mapping[MessageQueue, int]) -> bytes:
    """The answer to 222 and the body of 220."""
    return dumps({"offsetTable": queue_map(offsets)})


def consumer_status_body(table: Mapping[str, Mapping[MessageQueue, int]]) -> bytes:
    """The answer to 223: offsets of each client."""
    return dumps({"consumerTable": {client: queue_map(offsets) for client, offsets in table.items()}})


@dataclass(frozen=True, slots=True)
class StatsItem:
    """A count within a window: ``tps`` its rate, ``avgpt`` its mean value."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"avgpt": self.avgpt, "sum": self.sum, "tps": self.tps}


def broker_stats_data(minute: StatsItem, hour: StatsItem, day: StatsItem) -> bytes:
    """The answer to 315."""
    return dumps({"statsDay": day.to_json(), "statsHour": hour.to_json(), "statsMinute": minute.to_json()})
