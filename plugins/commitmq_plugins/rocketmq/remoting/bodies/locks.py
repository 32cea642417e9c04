"""Locks of ordered queues: the bodies of 41 and 42 (remoting 6.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue, as_bool, as_list, as_name, dumps, load_object


@dataclass(slots=True)
class LockBatchRequestBody:
    """Which queues ``client_id`` locks or unlocks for its group."""

    consumer_group: str
    client_id: str
    queues: list[MessageQueue] = field(default_factory=list)
    only_this_broker: bool = False

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> LockBatchRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        return cls(
            as_name(members.get("consumerGroup"), "consumerGroup"),
            as_name(members.get("clientId"), "clientId"),
            [MessageQueue.from_json(one) for one in as_list(members.get("mqSet"), "mqSet")],
            as_bool(members.get("onlyThisBroker"), "onlyThisBroker"),
        )


def lock_answer(queues: Iterable[MessageQueue]) -> bytes:
    """The body of the answer to 41: the queues that the client has locked."""
    return dumps({"lockOKMQSet": [queue.to_json() for queue in queues]})
