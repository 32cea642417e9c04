"""The parts of one batch that go to different nodes, because the sharding keys of its messages have different homes.

A batch without sharding keys has one part. The messages of a batch that have no key go together, to any node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from commitmq.client.message import Message
from commitmq.client.producing.effort import Pin
from commitmq.client.producing.node import Node
from commitmq.client.producing.node_set import NodeSet
from commitmq.client.results import BatchResult, BatchSendError, RunAck
from commitmq.client.sending.arguments import keys_of_batch
from commitmq.errors import SendError
from commitmq.format.constants import Property

_LISTS = ("tags", "keys", "sharding_keys")


class Part(NamedTuple):
    """The messages of one part, their places in the batch, the fields of their send, and what keeps them at a node."""

    places: Sequence[int]
    messages: Sequence[bytes | Message]
    fields: dict[str, Any]
    pin: Pin
    name: str


def parts_of(nodes: NodeSet, topic: str, messages: Sequence[bytes | Message], fields: Mapping[str, Any]) -> list[Part]:
    """The parts of a batch. ``fields`` are those of ``send_batch``. Raises InvalidMessageError."""
    given = dict(fields)
    keys, sharding_keys = keys_of_batch(given.pop("key", None), given.get("keys"), given.get("sharding_keys"), messages)
    given.update(keys=keys, sharding_keys=sharding_keys)
    every = range(len(messages))
    if given.get("queue") is not None:
        return [Part(every, messages, given, *nodes.pin(topic, given["queue"], None))]
    own = [_sharding_key(one) for one in messages] if sharding_keys is None else list(sharding_keys)
    if not any(own) or len(own) != len(messages):  # (the send itself refuses lists of another length)
        return [Part(every, messages, given, Pin.FREE, "")]
    places: dict[tuple[Pin, Node | None], list[int]] = {}
    for at, key in enumerate(own):
        pin, name = nodes.pin(topic, None, key)
        home = None if pin is Pin.FREE else nodes.home(name, only_reachable=pin is Pin.KEY)
        places.setdefault((pin, home), []).append(at)
    if len(places) == 1:
        (pin, _), _ = next(iter(places.items()))
        return [Part(every, messages, given, pin, _name_of(own, every))]
    _check_whole(topic, messages, given)  # before the first part leaves
    return [
        Part(chosen, [messages[at] for at in chosen], _chosen(given, chosen), pin, _name_of(own, chosen))
        for (pin, _), chosen in places.items()
    ]


def _check_whole(topic: str, messages: Sequence[bytes | Message], fields: Mapping[str, Any]) -> None:
    """Raise InvalidMessageError for a batch with a message that no node takes."""
    from commitmq.client.sending.batch_plan import plan_batch

    names = ("tags", "keys", "properties", "sharding_keys")
    plan_batch(topic, messages, **{name: fields.get(name) for name in names}, compressed=None)


def _sharding_key(message: bytes | Message) -> str | None:
    return message.properties.get(Property.SHARDING_KEY) if isinstance(message, Message) else None


def _name_of(keys: Sequence[str | None], places: Sequence[int]) -> str:
    """The key of the part's first message: all keys of a part have the same home."""
    return next((key for at in places if (key := keys[at])), "")


def _chosen(fields: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """``fields`` for the messages at ``places``."""
    chosen = dict(fields)
    for name in _LISTS:
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            chosen[name] = [value[at] for at in places]
    return chosen


def joined(parts: Sequence[Part], results: Sequence[BatchResult]) -> BatchResult:
    """The result of the whole batch, in the order of its messages."""
    if len(parts) == 1:
        return results[0]
    acks: list[RunAck] = []
    order: list[tuple[int, int]] = [(0, 0)] * sum(map(len, results))
    for part, result in zip(parts, results, strict=True):
        first = len(acks)
        acks += result.acks
        for at, (run, within) in zip(part.places, result.places(), strict=True):
            order[at] = (first + run, within)
    return BatchResult(acks, order)


def joined_error(parts: Sequence[Part], outcomes: Sequence[BatchResult | BaseException]) -> BaseException:
    """The error of a batch of which some parts failed: it counts what is stored and unknown of the whole."""
    first = next(one for one in outcomes if isinstance(one, BaseException))
    if len(parts) == 1 or any(isinstance(one, BaseException) and not isinstance(one, SendError) for one in outcomes):
        return next(
            (one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, SendError)), first
        )
    acks: list[RunAck] = []
    stored = unknown = 0
    for one in outcomes:
        if isinstance(one, BatchResult):
            acks += one.acks
            stored += len(one)
        elif isinstance(one, BatchSendError):
            acks += one.acks
            stored += one.stored
            unknown += one.unknown
    assert isinstance(first, SendError)
    total = sum(len(part.messages) for part in parts)
    return BatchSendError(first, acks=acks, stored=stored, unknown=unknown, total=total, stored_prefix=0)
