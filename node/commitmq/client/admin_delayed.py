"""The methods of an administrator's client for messages that wait for their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commitmq.errors import TopicNotFoundError

if TYPE_CHECKING:
    import zmq

    from commitmq.client.delayed import DelayedMessages
    from commitmq.client.message import Message
    from commitmq.client.receiving.query import QueryResult

_MOST_READ = 100_000
_MOST_BYTES = 256 << 20


class DelayedAdmin:
    """A part of :class:`commitmq.Admin`."""

    def delayed(
        self,
        topic: str | None = None,
        *,
        max_messages: int = 64,
        most_read: int = _MOST_READ,
        most_bytes: int = _MOST_BYTES,
        most_s: float | None = None,
    ) -> DelayedMessages:
        """The ``max_messages`` messages that are due first among those that wait; with ``topic`` only those for it.

        The call reads at most ``most_read`` messages and about ``most_bytes`` of the topics in which messages wait, and begins
        no further request after ``most_s`` seconds; ``complete`` of the result says whether that was everything. The list is a
        look at a moving thing: a message that was delivered or cancelled in the last seconds may be in it, and one that was
        sent a moment ago may be missing.
        """
        from commitmq.client.delayed import Positions, ReadBounds, WaitingMessages

        if max_messages < 1 or most_read < 1 or most_bytes < 1:
            raise ValueError("max_messages, most_read and most_bytes must be at least 1")
        bounds = ReadBounds.of(most_read, most_bytes, most_s)
        return WaitingMessages(self._request, Positions.of(self.status()), topic, bounds).first(max_messages)

    def delayed_recall(self, which: str) -> str:
        """Cancel a waiting message: no consumer will get it. Returns its recall handle.

        ``which`` is the recall handle, or the unique id of a message that was sent with ``delay`` or ``deliver_at``. A second
        call does no harm. Raises ProtocolError: ILLEGAL_OPERATION when it is due in less than half a second, or was delivered;
        INVALID_PARAMETER when no message waits with this id. Raises InvalidMessageError for a message at a delay level.
        """
        from commitmq.client.delayed import Positions, handle_for
        from commitmq.client.sending.cancelling import cancel_fields

        handle = handle_for(which, self._with_unique_key, Positions.of(self.status()).broker)
        fields = {name: value for name, value in cancel_fields(handle).items() if name not in ("v", "op")}
        self._request("writer", "recall", {**fields, "by_person": True}, payload=[b"0"])
        return handle

    def _with_unique_key(self, topic: str, unique_key: str) -> list[Message]:
        try:
            return list(self.query(topic, unique_key=unique_key))
        except TopicNotFoundError:
            return []

    def status(self) -> dict[str, Any]:
        raise NotImplementedError

    def query(self, topic: str, *, unique_key: str | None = None) -> QueryResult:
        raise NotImplementedError

    def _request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        raise NotImplementedError
