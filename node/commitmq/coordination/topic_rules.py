"""The rules for topics: names, attributes and their combinations, and which topics belong to the system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import DEAD_LETTER_PASSES
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC
from commitmq.store.metadata.topic_config import (
    MESSAGE_TYPE,
    MESSAGE_TYPE_PRIORITY,
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    QUEUE_TYPE_SIMPLE,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    is_send_forbidden,
    validate_topic,
)

MAX_QUEUES: Final = 4_096  # of one topic; an assignment of all its queues must fit a header
PERM_LIMIT: Final = 8  # RocketMQ's valid permissions are below its priority bit (spec 1.4)
MAX_SYS_FLAG: Final = (1 << 31) - 1
FILTER_TYPES: Final = ("SINGLE_TAG", "MULTI_TAG")
TRANSACTION_TOPICS: Final = (HALF_TOPIC, OP_TOPIC, DISCARD_TOPIC)
"""RocketMQ makes them when it starts; here they are made before the first transaction."""
_SYSTEM_PREFIX: Final = "rmq_sys_"
MADE_BY_CLIENTS: Final = frozenset({TRACE_TOPIC, DEAD_LETTER_PASSES})
"""System topics that a client makes, when it first needs them."""
_SYSTEM_TOPICS: Final = frozenset({"TBW102", "BenchmarkTest", *MADE_BY_CLIENTS})

# RocketMQ's attributes (spec 1.4) and one of CommitMQ, with the values that this node serves; None: any integer.
# RocketMQ loads a topics.json with an unknown attribute and keeps it: to RocketMQ, a memory topic is a topic without
# messages.
_ATTRIBUTES: Final[Mapping[str, frozenset[str] | None]] = {
    STORAGE_TYPE: frozenset({"log", STORAGE_MEMORY}),
    "queue.type": frozenset({QUEUE_TYPE_SIMPLE, QUEUE_TYPE_BATCH}),
    "cleanup.policy": frozenset({"DELETE"}),
    MESSAGE_TYPE: frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", MESSAGE_TYPE_PRIORITY}),
    "reserve.time": None,
}
# How and where a topic's messages are kept cannot change later: fixed when the topic is created, with these defaults.
FIXED_ATTRIBUTES: Final[Mapping[str, str]] = {
    STORAGE_TYPE: "log",
    QUEUE_TYPE: QUEUE_TYPE_SIMPLE,
    "cleanup.policy": "DELETE",
}
# The other attributes that a memory topic may have: plain queues of plain messages.
_KEPT_IN_MEMORY: Final[Mapping[str, tuple[str, ...]]] = {
    QUEUE_TYPE: (QUEUE_TYPE_SIMPLE,),
    MESSAGE_TYPE: ("NORMAL", "UNSPECIFIED", "FIFO"),
}


def is_system(name: str) -> bool:
    """True for topics that the node or RocketMQ made for itself: clients cannot create or delete them."""
    return is_send_forbidden(name) or name.startswith(_SYSTEM_PREFIX) or name in _SYSTEM_TOPICS


def check_name(name: str) -> None:
    """ProtocolError INVALID_PARAMETER unless ``name`` is a legal topic name."""
    try:
        validate_topic(name)
    except InvalidMessageError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


def check_attributes(attributes: Mapping[str, str]) -> None:
    """ProtocolError INVALID_PARAMETER unless the node serves each of ``attributes``."""
    for name, value in attributes.items():
        if name not in _ATTRIBUTES:
            raise ProtocolError(
                "INVALID_PARAMETER", f"attribute {name!r} is unknown; known are {', '.join(_ATTRIBUTES)}"
            )
        served = _ATTRIBUTES[name]
        if served is None:
            try:
                int(value)
            except ValueError:
                raise ProtocolError("INVALID_PARAMETER", f"attribute {name}={value!r} must be an integer") from None
        elif value not in served:
            raise ProtocolError(
                "INVALID_PARAMETER", f"attribute {name}={value!r}: this node serves {', '.join(sorted(served))}"
            )


def check_combination(attributes: Mapping[str, str]) -> None:
    """ProtocolError INVALID_PARAMETER for attributes that exclude each other."""
    if attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
        for name, kept in _KEPT_IN_MEMORY.items():
            if attributes.get(name, kept[0]) not in kept:
                raise ProtocolError("INVALID_PARAMETER", f"a memory topic cannot have {name}={attributes[name]}")


def check_fixed(topic: str, had: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """ProtocolError INVALID_PARAMETER when ``wanted`` changes an attribute that cannot change."""
    for key, default in FIXED_ATTRIBUTES.items():
        if wanted.get(key, default) != had.get(key, default):
            raise ProtocolError(
                "INVALID_PARAMETER",
                f"attribute {key} of topic {topic} is {had.get(key, default)} and cannot change;"
                " delete the topic and make it again",
            )
