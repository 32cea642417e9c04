"""The legal names of topics and groups, and the topics that take no plain sends (spec 2.7).

A topic's name is also a folder's name, so a name that breaks these rules must never reach the file system.
"""

from __future__ import annotations

import re

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import (
    DEAD_LETTER_GROUP,
    DLQ_PREFIX,
    LMQ_PREFIX,
    MAX_GROUP_UNITS,
    MAX_LONG_TOPIC_UNITS,
    MAX_TOPIC_UNITS,
    RETRY_PREFIX,
)

FORBIDDEN_TOPICS = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)
"""Topics to which only the node itself may append."""

SYSTEM_GROUPS = frozenset(
    {
        "TOOLS_CONSUMER",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
    }
)
"""RocketMQ's predefined consumer groups (spec 1.5), besides those of the prefix."""

_SYSTEM_PREFIX = "rmq_sys_"
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
_TIMER_TOPIC = "rmq_sys_wheel_timer"
_REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
_ALLOWED = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)
_POP_RETRY_V2 = re.compile(rf"{RETRY_PREFIX}[^+]+\+[^+]+")


def validate_topic(topic: str) -> None:
    """Raise InvalidMessageError unless ``topic`` is a legal name: ``% | a-z A-Z 0-9 _ -``, 1 to 127 characters (255 for
    a group's retry and dead-letter topics and for light message queues, which are not stored as a record's topic).

    A pop retry topic of the second form has one ``+``, between group and topic (spec 12.6).
    """
    if topic.startswith(RETRY_PREFIX) and "+" in topic:
        if not _POP_RETRY_V2.fullmatch(topic):
            raise InvalidMessageError(
                f"topic {topic!r} is no {RETRY_PREFIX}group+topic: one +, with a name on each side"
            )
        topic = topic.replace("+", "_")
    long_name = topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))
    _validate("topic", topic, MAX_LONG_TOPIC_UNITS if long_name else MAX_TOPIC_UNITS)


def validate_group(group: str) -> None:
    """Raise InvalidMessageError unless ``group`` is a legal name: the same characters, 1 to 120 of them."""
    _validate("group", group, MAX_GROUP_UNITS)


def is_send_forbidden(topic: str) -> bool:
    """True for a system topic that takes no plain sends: the node does what its messages say.

    RocketMQ takes sends to its timer topic, and stumbles over them. It takes them to its revive topic too: who forges a check
    point there makes the node copy messages of any topic into a retry topic.
    """
    return topic in FORBIDDEN_TOPICS or topic == _TIMER_TOPIC or topic.startswith(_REVIVE_PREFIX)


def is_nodes_own(topic: str) -> bool:
    """True for a topic into which movers put messages, though the topic table need not name it."""
    return is_send_forbidden(topic) or topic.startswith(_SYSTEM_PREFIX)


def is_system_group(group: str) -> bool:
    """True for a consumer group of RocketMQ's or of the node's own parts, which no program of a user belongs to."""
    return group in SYSTEM_GROUPS or group.startswith(_SYSTEM_GROUP_PREFIX) or group == DEAD_LETTER_GROUP


def _validate(kind: str, name: str, limit: int) -> None:
    if not name:
        raise InvalidMessageError(f"the {kind} name is empty")
    # All allowed characters are ASCII, so there are equally many characters, UTF-16 units and bytes.
    if not _ALLOWED.fullmatch(name):
        raise InvalidMessageError(f"{kind} {name!r} has characters other than % | a-z A-Z 0-9 _ -")
    if len(name) > limit:
        raise InvalidMessageError(f"{kind} {name!r} has {len(name)} characters, at most {limit} are allowed")
