"""Asks the coordinator for the positions of all consumer groups; cleanup must not delete unread messages."""

from __future__ import annotations

import time
from typing import Any, Final

import zmq

from commitmq.errors import NodeUnavailableError
from commitmq.protocol import wire
from commitmq.protocol.connection import new_routing_id
from commitmq.store.queues.slowest_group import GroupPosition
from commitmq.workers.runtime.context import WorkerContext

_PATIENCE_S: Final = 10.0


def group_positions(context: WorkerContext) -> list[GroupPosition]:
    """Committed offsets of all groups, and offset 0 for queues that a member reads without having committed.

    Raises NodeUnavailableError when the coordinator does not answer in time, ProtocolError when it refuses.
    """
    dealer: zmq.Socket[bytes] = context.zmq.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, new_routing_id())
    try:
        dealer.connect(context.layout.ipc("coordinator"))
        found: list[GroupPosition] = []
        after: Any = None
        while True:
            page = _ask(context, dealer, {"op": "group.positions", "id": len(found), "after": after})
            found += [GroupPosition(*row) for row in page["positions"]]
            after = page["next"]
            if after is None:
                return found
    finally:
        dealer.close()


def _ask(context: WorkerContext, dealer: zmq.Socket[bytes], question: dict[str, Any]) -> dict[str, Any]:
    dealer.send(wire.pack(question))
    deadline = time.monotonic() + _PATIENCE_S
    while not dealer.poll(200):
        context.heartbeat()
        if time.monotonic() >= deadline:
            raise NodeUnavailableError("the coordinator does not answer")
    context.heartbeat()
    answer = wire.parse_answer(dealer.recv())
    if not answer["ok"]:
        raise wire.refusal(answer)
    return answer
