"""The states of ordered receives in their files: RocketMQ's ``config/consumerOrderInfo.json``, and a journal of the changes
since.

RocketMQ keeps the states in memory and writes the file at intervals, so a death of its broker loses the last ones. Here a
state is durable before the answer that depends on it. Written whole for each turn, the file would cost what the table has,
and not what changes. So each turn appends its changes to ``commitmq/orders.journal``, a
:mod:`commitmq.store.metadata.journal`, and the file follows at intervals and at a stop. A record is a list of ``["put",
topic, group, queue, {state}]``, ``["drop", topic, group, queue]`` and ``["topic", topic, incarnation]``. The last one says of
which topic of that name the states are: RocketMQ's file does not, and a state of a deleted topic would acknowledge messages of
the next one. The head of the journal has the same of all topics at the time of the snapshot.

A file that the journal does not know is RocketMQ's, which used the store after a crash. Then of both states of a queue that
of the later receive counts, and of the same receive RocketMQ's, with the messages that either of them has as acked, or as
given back untried. A state that only one of them has counts too: at worst it blocks its queue until its time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.semantics.pop_order import OrderState, table_from_json
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.journal import Journal, Replay

States = dict[tuple[str, str], dict[int, OrderState]]
"""(topic, group) and queue."""


class OrderChange(NamedTuple):
    """The new state of a queue in a group; None for none."""

    topic: str
    group: str
    queue: int
    state: OrderState | None


class TopicSeen(NamedTuple):
    """The states of ``topic`` are those of the topic with this incarnation."""

    topic: str
    incarnation: int


class OrdersJournal(Journal[OrderChange | TopicSeen]):
    """See the module."""

    kind = "journal of ordered receives"
    place = "orders"
    snapshot_name = "consumerOrderInfo.json"

    @classmethod
    def encode(cls, changes: Sequence[OrderChange | TopicSeen]) -> list[Any]:
        return [_to_json(change) for change in changes]

    @classmethod
    def decode(cls, payload: list[Any]) -> list[OrderChange | TopicSeen]:
        return [_change_from_json(entry) for entry in payload]


def _to_json(change: OrderChange | TopicSeen) -> list[Any]:
    if isinstance(change, TopicSeen):
        return ["topic", *change]
    place = [change.topic, change.group, change.queue]
    if change.state is None:
        return ["drop", *place]
    values = change.state.to_json()
    for name in ("oc", "ot"):  # standard JSON has no keys that are integers
        if name in values:
            values[name] = {str(offset): number for offset, number in values[name].items()}
    return ["put", *place, values]


def _change_from_json(entry: Any) -> OrderChange | TopicSeen:
    try:
        match entry:
            case ["topic", str(topic), int(incarnation)]:
                return TopicSeen(topic, incarnation)
            case ["drop", str(topic), str(group), int(queue)]:
                return OrderChange(topic, group, queue, None)
            case ["put", str(topic), str(group), int(queue), dict(values)]:
                return OrderChange(topic, group, queue, OrderState.from_json(values))
    except InvalidMessageError as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"unknown change {entry!r}")


def journal_path(layout: StoreLayout) -> Path:
    return layout.own / "orders.journal"


def snapshot_path(layout: StoreLayout) -> Path:
    return layout.config / "consumerOrderInfo.json"


def load_snapshot(layout: StoreLayout) -> tuple[States, str]:
    """``consumerOrderInfo.json`` or its ``.bak``, and its name; an empty table when neither exists.

    Raises StoreError, or InvalidMessageError for a file with something else in it.
    """
    content, name = json_config.load_named(snapshot_path(layout))
    return ({} if content is None else table_from_json(content)), name


Content = Replay[OrderChange | TopicSeen]


def incarnations(journal: Content, snapshot: str) -> dict[str, int]:
    """Of which topics the states are, by name; nothing is known beside a ``snapshot`` that the journal does not know."""
    if journal.since(snapshot) is None:
        return {}
    first = journal.head.get("topics")
    found = {str(name): int(one) for name, one in first.items()} if isinstance(first, dict) else {}
    return found | {one.topic: one.incarnation for one in journal.changes if isinstance(one, TopicSeen)}


def replay(table: States, journal: Content, snapshot: str) -> None:
    """Merge the journal into ``table``, a snapshot of this name, by the module's rules."""
    since = journal.since(snapshot)
    # Changes name whole states, so of each queue the last one counts.
    last = {
        (change.topic, change.group, change.queue): change
        for change in (journal.changes if since is None else since)
        if isinstance(change, OrderChange)
    }
    for change in last.values():
        states = table.setdefault((change.topic, change.group), {})
        if change.state is not None:
            states[change.queue] = change.state if since is not None else _later(states.get(change.queue), change.state)
        elif since is not None:
            states.pop(change.queue, None)


def _later(there: OrderState | None, ours: OrderState) -> OrderState:
    """Which of two states of one queue counts."""
    if there is None or ours.pop_time > there.pop_time:
        return ours
    if ours.pop_time == there.pop_time and ours.offsets == there.offsets:
        return replace(there, acked_bits=there.acked_bits | ours.acked_bits, untried=there.untried | ours.untried)
    return there


def read(layout: StoreLayout) -> States:
    """All states of a store, which a node may be using; changes nothing. Raises as :func:`load_snapshot`."""
    table, name = load_snapshot(layout)
    journal = OrdersJournal.read(journal_path(layout))
    if journal is not None:
        replay(table, journal, name)
    return {names: states for names, states in table.items() if states}
