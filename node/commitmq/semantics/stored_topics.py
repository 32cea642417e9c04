"""Whose a stored message is: a request that names it by its place needs the rights to these topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commitmq.format.constants import WAITING_TOPICS, Property
from commitmq.semantics.retry import UNDELIVERED_GROUP, dead_letter_topic

_OF_OTHERS: Final = WAITING_TOPICS | {dead_letter_topic(UNDELIVERED_GROUP)}


def topics_of(topic: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """``topic``, in which the message is stored, and where that is a topic of the node, the one that it was sent to."""
    real = properties.get(Property.REAL_TOPIC) if topic in _OF_OTHERS else None
    return (topic,) if not real or real == topic else (topic, real)
