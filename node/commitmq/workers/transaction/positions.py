"""The positions in the half topic and in the op topic: offsets of the group CID_RMQ_SYS_TRANS, as in RocketMQ (spec 12.3).

``config/consumerOffset.json`` belongs to the coordinator. This process asks it, as a client does.
"""

from __future__ import annotations

from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.semantics.transaction import CHECK_GROUP, HALF_TOPIC, OP_TOPIC
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.coordinator_line import CoordinatorLine
from commitmq.workers.transaction.ends import QUEUE

_ANSWER_S: Final = 1.0


class Positions:
    """The two offsets at the coordinator."""

    def __init__(self, context: WorkerContext) -> None:
        self._line = CoordinatorLine(context, patience_s=_ANSWER_S)

    def fetch(self) -> tuple[int, int] | None:
        """(half offset, op offset), -1 for one that was never committed; None when the coordinator does not answer.

        The topics exist afterwards.
        """
        if self._ask("topic.own") is None:
            return None
        answer = self._ask("offset.fetch", queues=[[HALF_TOPIC, QUEUE], [OP_TOPIC, QUEUE]])
        if answer is None:
            return None
        found = {topic: offset for topic, _, offset in answer["offsets"]}
        return int(found[HALF_TOPIC]), int(found[OP_TOPIC])

    def commit(self, half_offset: int, op_offset: int) -> bool:
        """Commit both. False when the coordinator did not answer: the same call may be repeated."""
        return (
            self._ask("offset.commit", offsets=[[HALF_TOPIC, QUEUE, half_offset], [OP_TOPIC, QUEUE, op_offset]])
            is not None
        )

    def _ask(self, op: str, **fields: Any) -> dict[str, Any] | None:
        """The answer, None without one in time. Raises ProtocolError for a refusal."""
        try:
            return self._line.one({"op": op, "group": CHECK_GROUP, **fields})
        except ProtocolError as error:
            if error.code == "SERVICE_NOT_AVAILABLE":
                return None
            raise

    def close(self) -> None:
        self._line.close()
