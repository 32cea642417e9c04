"""Bodies of POP consumption: batches of acks, assignments of queues, modes (remoting 5.5, 5.9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from commitmq_plugins.rocketmq.remoting.fastjson import (
    MessageQueue,
    as_int,
    as_list,
    as_name,
    as_object,
    as_text,
    dumps,
    load_object,
)


@dataclass(frozen=True, slots=True)
class BatchAck:
    """Acks of one check point. ``bits`` is Base64; bit i stands for ``start_offset`` + i."""

    consumer_group: str
    topic: str
    retry: str
    start_offset: int
    queue_id: int
    revive_queue_id: int
    pop_time: int
    invisible_time: int
    bits: str

    @classmethod
    def from_json(cls, value: Any) -> BatchAck:
        """Members may have their short or their long names."""
        members = as_object(value, "an ack")

        def member(short: str, long: str) -> Any:
            return members.get(short, members.get(long))

        return cls(
            as_name(member("c", "consumerGroup"), "consumerGroup"),
            as_name(member("t", "topic"), "topic"),
            as_text(member("r", "retry") or "0", "retry"),
            as_int(member("so", "startOffset"), "startOffset"),
            as_int(member("q", "queueId"), "queueId"),
            as_int(member("rq", "reviveQueueId"), "reviveQueueId"),
            as_int(member("pt", "popTime"), "popTime"),
            as_int(member("it", "invisibleTime"), "invisibleTime"),
            as_text(member("b", "bitSet"), "bitSet"),
        )


def decode_batch_acks(data: bytes | bytearray | memoryview) -> list[BatchAck]:
    """The body of 200151. Raises BodyError."""
    return [BatchAck.from_json(one) for one in as_list(load_object(data).get("acks"), "acks")]


@dataclass(frozen=True, slots=True)
class QueryAssignmentRequestBody:
    """The body of 400."""

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str
    message_model: str

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> QueryAssignmentRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        return cls(
            as_name(members.get("topic"), "topic"),
            as_name(members.get("consumerGroup"), "consumerGroup"),
            as_name(members.get("clientId"), "clientId"),
            as_text(members.get("strategyName") or "AVG", "strategyName"),
            as_text(members.get("messageModel") or "CLUSTERING", "messageModel"),
        )


def assignments(queues: Iterable[tuple[MessageQueue, str]]) -> bytes:
    """The answer to 400: queues with the mode, POP or PULL, in which they are read."""
    return dumps(
        {"messageQueueAssignments": [{"messageQueue": queue.to_json(), "mode": mode} for queue, mode in queues]}
    )


@dataclass(frozen=True, slots=True)
class SetMessageRequestModeRequestBody:
    """The body of 401."""

    topic: str
    consumer_group: str
    mode: str
    pop_share_queue_num: int

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> SetMessageRequestModeRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        return cls(
            as_name(members.get("topic"), "topic"),
            as_name(members.get("consumerGroup"), "consumerGroup"),
            as_text(members.get("mode") or "PULL", "mode"),
            as_int(members.get("popShareQueueNum", 0), "popShareQueueNum"),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "consumerGroup": self.consumer_group,
            "mode": self.mode,
            "popShareQueueNum": self.pop_share_queue_num,
            "topic": self.topic,
        }
