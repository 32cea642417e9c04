"""What a request needs: a resource, and actions of which one must be allowed. The words of the tables of rights, one of each
protocol (:mod:`.native_rights`, and the RocketMQ server's).
"""

from __future__ import annotations

from typing import Final, TypeAlias

from commitmq.format.constants import RETRY_PREFIX, WAITING_TOPICS
from commitmq.security.policy import Action
from commitmq.security.resource import Resource, ResourceType

Actions: TypeAlias = frozenset[Action]
Need: TypeAlias = tuple[Resource, Actions]

ALL_NAMES: Final = "*"
"""The name of a resource that only patterns of a whole type match."""

PUB: Final = frozenset((Action.PUB,))
SUB: Final = frozenset((Action.SUB,))
GET: Final = frozenset((Action.GET,))
CREATE: Final = frozenset((Action.CREATE,))
UPDATE: Final = frozenset((Action.UPDATE,))
DELETE: Final = frozenset((Action.DELETE,))
PUB_SUB: Final = PUB | SUB
SUB_GET: Final = SUB | GET
SUB_UPDATE: Final = SUB | UPDATE
LIST: Final = frozenset((Action.LIST, Action.GET))
SEEN: Final = PUB | SUB | GET
SHOWN: Final = SUB_GET | CREATE | UPDATE | DELETE
"""Who may make, change or delete something may look at it too: the verbs look first."""
_CHANGES: Final = CREATE | UPDATE | DELETE


def topic_need(name: str, actions: Actions) -> Need:
    """The need of a topic; for a group's retry topic that of the group.

    Who consumes in the group also sends to it and reads it. Only who may make, change or delete the group may do so with it.
    """
    if name.startswith(RETRY_PREFIX):
        changes = actions & _CHANGES
        wanted = changes if changes == actions else changes | SUB
        return Resource(ResourceType.GROUP, name.removeprefix(RETRY_PREFIX)), wanted
    return Resource(ResourceType.TOPIC, name), actions


def read_need(name: str, actions: Actions) -> Need:
    """The need of the messages of a topic. Those of all topics wait in a few of the node, which no entry of topics opens."""
    if name in WAITING_TOPICS:
        return Resource(ResourceType.CLUSTER, ALL_NAMES), UPDATE
    return topic_need(name, actions)
