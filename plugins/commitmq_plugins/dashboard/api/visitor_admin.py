"""An administrator's client that asks on behalf of a visitor: what he may not do is refused, and the node is told his name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commitmq.client.admin import Admin
from commitmq.security.on_behalf import Vouching
from commitmq.semantics.stored_topics import topics_of
from commitmq_plugins.dashboard.api.rights import Rights

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message
    from commitmq.client.transactions.administration import OpenTransaction

_BY_PLACE = ("reader", "view")


class VisitorAdmin(Admin):
    """For one visitor at a time: set ``rights`` before each page. Requests go through :meth:`_request` and :meth:`status`."""

    def __init__(self, node: str, vouching: Vouching, rights: Rights, *, timeout_s: float) -> None:
        super().__init__(node, timeout_s=timeout_s)
        self.rights = rights
        self._vouching = vouching

    def status(self) -> dict[str, Any]:
        self.rights.check("admin", "status", {})
        return super().status()

    def view(self, where: int | str, topic: str | None = None) -> Message:
        """A place does not tell its topic, so what is there decides."""
        found = super().view(where, topic)
        if not all(self.rights.reads_topic(name) for name in topics_of(found.stored_topic, found.properties)):
            self.rights.refuse("view", f"user {self.rights.user} may not read the topic of this message")
        return found

    def open_transactions(self, after: int | None, limit: int) -> tuple[list[OpenTransaction], int | None]:
        """A page of :meth:`transactions`, and where the next one begins."""
        from commitmq.client.transactions.administration import OpenTransaction

        fields = {"limit": limit} if after is None else {"limit": limit, "after": after}
        page = self._ask_transactions("transaction.list", fields)
        return [OpenTransaction.of(one) for one in page["transactions"]], page["next"]

    def end_transaction(self, one: OpenTransaction, decision: str) -> dict[str, Any]:
        """As :meth:`transaction_resolve`, for one that was found. A check may have moved it since."""
        place = {"queue_offset": one.queue_offset, "physical_offset": one.physical_offset}
        return self._ask_transactions("transaction.end", {**place, "decision": decision, "by_person": True})

    def _request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        if (role, op) != _BY_PLACE:
            self.rights.check(role, op, fields)
        told = self._vouching.fields(op, self.rights.actor)
        return super()._request(role, op, {**fields, **told}, payload=payload, timeout_s=timeout_s)
