"""The kinds of topics, by which an administrator lists them: from their names and attributes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.semantics.reply import REPLY_TOPIC_POSTFIX

if TYPE_CHECKING:
    from commitmq.client.admin_results import TopicInfo

KINDS: Final = ("normal", "batch", "memory", "retry", "dlq", "system")
"""``batch``: BatchCQ topics. ``retry`` and ``dlq``: those of groups. ``system``: the node's own, and those of replies."""


def kind_of(topic: TopicInfo) -> str:
    """One of :data:`KINDS`. A name tells more than an attribute (spec 2.7): a retry topic is one wherever it is kept."""
    if topic.system or topic.name.endswith(REPLY_TOPIC_POSTFIX):
        return "system"
    if topic.name.startswith(RETRY_PREFIX):
        return "retry"
    if topic.name.startswith(DLQ_PREFIX):
        return "dlq"
    if topic.attributes.get("storage.type") == "memory":
        return "memory"
    return "batch" if topic.attributes.get("queue.type") == "BatchCQ" else "normal"
