"""The offsets journal: the group commits acknowledged between two writings of ``consumerOffset.json``.

File ``commitmq/offsets.journal``, a :mod:`commitmq.store.metadata.journal`. A record is the list of all changes of one turn
of the coordinator's loop, ``["set", group, topic, [[queue, next offset], …]]``, ``["drop", topic]`` or
``["forget", group]``, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from commitmq.store.metadata.journal import Journal


class SetOffsets(NamedTuple):
    """The next offsets of ``group`` in queues of ``topic``: ``(queue, next offset)`` pairs."""

    group: str
    topic: str
    offsets: tuple[tuple[int, int], ...]


class DropTopic(NamedTuple):
    """All groups forgot their offsets of ``topic``: it was deleted."""

    topic: str


class DropGroup(NamedTuple):
    """The group forgot all its offsets: it was deleted with them."""

    group: str


Change = SetOffsets | DropTopic | DropGroup


class OffsetsJournal(Journal[Change]):
    """See the module."""

    kind = "offsets journal"
    place = "journal"
    snapshot_name = "consumerOffset.json"

    @classmethod
    def encode(cls, changes: Sequence[Change]) -> list[Any]:
        return [_to_json(change) for change in changes]

    @classmethod
    def decode(cls, payload: list[Any]) -> list[Change]:
        return [_change_from_json(entry) for entry in payload]


def _to_json(change: Change) -> list[Any]:
    match change:
        case DropTopic(topic):
            return ["drop", topic]
        case DropGroup(group):
            return ["forget", group]
        case SetOffsets(group, topic, offsets):
            return ["set", group, topic, offsets]


def _change_from_json(entry: Any) -> Change:
    match entry:
        case ["drop", str(topic)]:
            return DropTopic(topic)
        case ["forget", str(group)]:
            return DropGroup(group)
        case ["set", str(group), str(topic), list(pairs)]:
            return SetOffsets(group, topic, tuple((int(queue), int(offset)) for queue, offset in pairs))
    raise ValueError(f"unknown change {entry!r}")
