"""Asks the coordinator where every consumer group stands; for cleanup, which must not delete what is unread."""

from __future__ import annotations

import time
from typing import Any, Final

import zmq

from commitmq.client import wire
from commitmq.errors import NodeUnavailableError
from commitmq.store.unconsumed import GroupPosition
from commitmq.workers.runtime import WorkerContext

_PATIENCE_S: Final = 10.0
_AT_ONCE: Final = 128


def group_positions(context: WorkerContext) -> list[GroupPosition]:
    """Committed offsets of all groups, and offset 0 of the queues that a member reads without having committed any.

    Raises NodeUnavailableError when the coordinator does not answer in time, ProtocolError when it refuses.
    """
    dealer: zmq.Socket[bytes] = context.zmq.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(context.layout.ipc("coordinator"))
        deadline = time.monotonic() + _PATIENCE_S
        listed = _ask(context, dealer, [{"op": "group.list"}], deadline)[0]
        names = [str(row["name"]) for row in listed["groups"]]
        found: list[GroupPosition] = []
        for first in range(0, len(names), _AT_ONCE):
            questions = [{"op": "group.describe", "group": name} for name in names[first : first + _AT_ONCE]]
            for answer in _ask(context, dealer, questions, deadline):
                found += _positions(answer.get("group"))
        return found
    finally:
        dealer.close()


def _positions(group: dict[str, Any] | None) -> list[GroupPosition]:
    if group is None:
        return []  # it was deleted since it was listed
    name = str(group["name"])
    committed = {(topic, queue): offset for topic, queue, offset in group["offsets"]}
    unread = {(topic, queue): 0 for topic, queue, _member in group["queues"]}
    return [GroupPosition(name, topic, queue, offset) for (topic, queue), offset in {**unread, **committed}.items()]


def _ask(
    context: WorkerContext, dealer: zmq.Socket[bytes], questions: list[dict[str, Any]], deadline: float
) -> list[dict[str, Any]]:
    """The answers, in the order of the questions; an empty one for a group that does not exist any more."""
    for number, question in enumerate(questions):
        dealer.send(wire.pack({**question, "id": number}))
    answers: dict[int, dict[str, Any]] = {}
    while len(answers) < len(questions):
        context.heartbeat()
        if not dealer.poll(200):
            if time.monotonic() >= deadline:
                raise NodeUnavailableError("the coordinator does not answer")
            continue
        answer = wire.parse_answer(dealer.recv())
        if not answer["ok"] and answer.get("code") != "GROUP_NOT_EXIST":
            raise wire.refusal(answer)
        answers[int(answer["id"])] = answer if answer["ok"] else {}
    return [answers[number] for number in range(len(questions))]
