"""What the messages of a topic are: RocketMQ keeps delayed, half, retried and dead messages in topics of their own.

The columns ``state`` and ``real_topic``, which a read has with ``option("state", "true")`` or when its schema names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX, Property
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.pop_revive import REVIVE_TOPIC_PREFIX
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC
from commitmq_plugins.spark.columns import Numbers, Rows

NORMAL: Final = "normal"
_TOPICS: Final = {
    SCHEDULE_TOPIC: "delayed",
    TIMER_TOPIC: "timer",
    HALF_TOPIC: "half",
    OP_TOPIC: "op",
    DISCARD_TOPIC: "discarded_half",
    TRACE_TOPIC: "trace",
}
_PREFIXES: Final = {RETRY_PREFIX: "retry", DLQ_PREFIX: "dead_letter", REVIVE_TOPIC_PREFIX: "pop"}
STATES: Final = (NORMAL, *_TOPICS.values(), *_PREFIXES.values())
"""Every value of the column."""
_HAVE_REAL_TOPIC: Final = {
    "delayed": Property.REAL_TOPIC,
    "timer": Property.REAL_TOPIC,
    "half": Property.REAL_TOPIC,
    "discarded_half": Property.REAL_TOPIC,
    "retry": Property.RETRY_TOPIC,
    "dead_letter": Property.RETRY_TOPIC,
}


def state_of(topic: str) -> str:
    """What the messages of ``topic`` are."""
    if topic in _TOPICS:
        return _TOPICS[topic]
    return next((state for prefix, state in _PREFIXES.items() if topic.startswith(prefix)), NORMAL)


def real_topic_property(topic: str) -> str | None:
    """The property of a message of ``topic`` that names its real topic: where it is to be delivered, or where it was sent
    first. None where ``topic`` is the real one.
    """
    return _HAVE_REAL_TOPIC.get(state_of(topic))


def real_topics(rows: Rows, topics: Sequence[str], numbers: Numbers, own: pa.Array) -> pa.Array:
    """The real topic of each row. Row i is of topic ``topics[numbers[i]]``, which is ``own[i]`` too; a message that names
    no other topic keeps that.
    """
    of_topic = np.array([real_topic_property(one) or "" for one in topics])
    wanted = of_topic[numbers]
    for name in sorted(set(of_topic.tolist()) - {""}):
        named = rows.properties_named([name])[0]
        own = pc.if_else(pa.array(wanted == name), pc.coalesce(named, own), own)
    return own
