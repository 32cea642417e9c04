"""The operation ``in_flight``: what the consumers of a group have received and not acknowledged, for an administrator."""

from __future__ import annotations

from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.protocol import wire
from commitmq.semantics.retry import popped_topic
from commitmq.workers.pop.clock import now_ms
from commitmq.workers.pop.orders import Orders
from commitmq.workers.pop.points import Points
from commitmq.workers.pop.revive_queues import ReviveQueues
from commitmq.workers.reader.answers import Answers
from commitmq.workers.reader.parked_pulls import text_field

_MOST_ROWS: Final = 500


class InFlight:
    """See the module. It only reads what the process counts anyway."""

    def __init__(self, points: Points, orders: Orders, queues: ReviveQueues, answers: Answers) -> None:
        self._points, self._orders, self._queues, self._answers = points, orders, queues, answers

    def answer(self, client: bytes, header: dict[str, Any]) -> None:
        """A page of ``[topic, stored topic, queue, messages]``, in the order of stored topics and queues.

        ``revive``: how far messages that nobody acknowledged are from coming back, for all groups together. ``late_ms``:
        for how long the first check point has been due.
        """
        group = text_field(header, "group")
        after = header.get("after")
        if after is not None and (type(after) is not list or [type(one) for one in after] != [str, int]):
            raise ProtocolError("INVALID_PARAMETER", "after must be the value of next in the page before")
        now = now_ms()
        counts = self._points.queues_of(group)
        for queue, count in self._orders.out_of(group).items():
            counts[queue] = counts.get(queue, 0) + count
        behind = sorted(key for key in counts if after is None or key > tuple(after))
        page = behind[:_MOST_ROWS]
        rows = [[popped_topic(topic, group), topic, queue, counts[topic, queue]] for topic, queue in page]
        due = self._points.next_due_ms()
        self._answers.send(
            client,
            wire.ok(
                header["id"],
                queues=rows,
                next=list(page[-1]) if len(behind) > len(page) else None,
                messages=sum(counts.values()),
                revive={**self._queues.lag(), "late_ms": 0 if due is None else max(0, now - due)},
            ),
        )
