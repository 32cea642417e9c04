"""What a visitor may do: decided by the table of the native protocol's operations and by the node's policies.

A visitor who is a user may do here what a client of the native protocol may do as this user, and sees no more. So each
question of a page to the node is an operation with its needs (:mod:`commitmq.security.native_rights`), and the function that
decides is the one of every other protocol.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from commitmq.errors import ProtocolError
from commitmq.format.constants import DEAD_LETTER_GROUP, DEAD_LETTER_PASSES, DLQ_PREFIX
from commitmq.plugin import Actor, AuditLog, Event
from commitmq.security.access_table import AccessTable
from commitmq.security.native_rights import CHANGES, needs_of
from commitmq.security.policy import Action
from commitmq.security.resource import ResourceType

ONLY_SUPER: Final = ("node", "everything")
"""A question that only super users may ask, as :meth:`Rights.may` takes it."""
_TOPICS: Final = (ResourceType.TOPIC, ResourceType.ANY)


class NotAllowedError(ProtocolError):
    """The visitor may not do this."""

    def __init__(self, reason: str) -> None:
        super().__init__("NO_PERMISSION", reason)


class Rights:
    """Of one visitor, by the policies of one moment. ``actor``: who he is, for the audit log.

    ``user`` is None for whoever may do everything: the account that owns the store, and everybody on a node without users.
    """

    def __init__(self, actor: Actor, user: str | None, table: AccessTable, cluster: str, audit: AuditLog) -> None:
        self.actor, self.user = actor, user
        self.table, self._cluster, self._audit = table, cluster, audit
        found = None if user is None else table.users.get(user)
        self.everything = user is None or (found is not None and found.is_super and found.is_enabled)

    def may(self, kind: str, op: str, **fields: Any) -> bool:
        """Whether he may ask a process of ``kind`` for this; for what a page shows."""
        return self.everything or self._refusal(kind, op, fields) is None

    def check(self, role: str, op: str, fields: dict[str, Any]) -> None:
        """Before the question is asked. Raises NotAllowedError, and writes that to the audit log."""
        kind = role.partition("-")[0]
        if not self.everything and (refusal := self._refusal(kind, op, fields)) is not None:
            self.refuse(op, *refusal)
        self._note_use(op, fields)

    def refuse(self, op: str, reason: str, resource: str = "") -> NoReturn:
        """Raises NotAllowedError, and writes that to the audit log."""
        self._audit.refused(self.actor, op, resource, reason)
        raise NotAllowedError(reason)

    def sees_topic(self, name: str) -> bool:
        """Whether he may know of a topic."""
        return self.may("coordinator", "topic.describe", topic=name)

    def reads_topic(self, name: str) -> bool:
        """Whether he may read a topic's messages, without a group."""
        return self.may("reader", "pull", topic=name)

    def sees_group(self, name: str) -> bool:
        """Whether he may know of a group."""
        return self.may("coordinator", "group.describe", group=name)

    @property
    def may_create(self) -> bool:
        """Whether there is a topic that he could create."""
        if self.everything:
            return True
        policies = self.table.policies.get(self.user or "")
        entries = () if policies is None else (*policies.custom, *policies.default)
        return any(one.allow and one.does((Action.CREATE,)) and one.pattern.type in _TOPICS for one in entries)

    def may_resend(self, group: str) -> bool:
        """Whether he may do all that a resend of a group's dead letters does, but for their topics."""
        topic = DLQ_PREFIX + group
        moves = {"group": DEAD_LETTER_GROUP, "offsets": [[topic, 0, 0]]}
        return (
            self.reads_topic(topic)
            and self.may("coordinator", "offset.commit", **moves)
            and self.may("writer", "append", topic=DEAD_LETTER_PASSES)
        )

    def _refusal(self, kind: str, op: str, fields: dict[str, Any]) -> tuple[str, str] | None:
        """Reason and resource; None when it is allowed."""
        needs = needs_of(kind, {**fields, "op": op}, self._cluster)
        if needs is None:
            return "only super users may ask for this", ""
        for resource, actions in needs:
            decision = self.table.decide(self.user or "", resource, actions, self.actor.address)
            if not decision.allowed:
                return f"{decision.reason}; from {self.actor.address}", str(resource)
        return None

    def _note_use(self, op: str, fields: dict[str, Any]) -> None:
        """Write the first use of a topic, or of a group, by a user in an hour, as the native protocol does."""
        topic = fields.get("topic")
        name = fields.get("group") if topic is None else topic
        if self.user is None or type(name) is not str or op in CHANGES or fields.get("reset"):
            return
        if self._audit.is_first(self.user, op, name):
            self._audit.used(Event(self.actor, op, f"{'Group' if topic is None else 'Topic'}:{name}"))
