"""The plan of a batch: its bodies and encoded properties as columns, checked, and cut into runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np

from commitmq.client.message import Message, check_body, content_of
from commitmq.client.properties import Keys, build_properties
from commitmq.client.sending.asked import Asked
from commitmq.client.sending.inner_batch import MAX_MESSAGES, message_bytes
from commitmq.client.sending.run_encoder import MAX_RUN_MESSAGES, RunLayout, encode_user_properties
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property

# Large enough that a run's fixed cost vanishes, small enough that the node works on one while the next is encoded.
TARGET_RUN_BYTES: Final = 2 * 1024 * 1024

_Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class PlannedRun:
    """Messages ``start`` to ``stop`` in the plan's order. ``queue`` -1 means any queue."""

    queue: int
    start: int
    stop: int


@dataclass(slots=True)
class BatchPlan:
    """The columns of a batch, one entry a message. ``properties``, ``flags`` and ``sys_flags`` may be one value for all."""

    topic: str
    bodies: Sequence[bytes]
    body_sizes: _Integers
    properties: bytes | list[bytes]
    flags: int | list[int]
    sys_flags: int | list[int]
    sharding_keys: Sequence[str | None] | None
    tags: str | Sequence[str | None] | None = None
    order: list[int] | None = None  # of the caller's messages, once they were sorted by queue

    def __len__(self) -> int:
        return len(self.bodies)

    def check_sizes(self, max_message_bytes: int, *, inner: bool = False) -> None:
        """Raise InvalidMessageError when a body is larger than the node allows.

        ``inner``: the messages go into inner batches. The limit then applies to a message with its properties.
        """
        if inner:
            sizes = message_bytes(self.body_sizes, self._property_sizes())
            if int(sizes.max()) > max_message_bytes:
                index = int(sizes.argmax())
                raise InvalidMessageError(
                    f"message {index} takes {int(sizes[index])} bytes in its batch, the node allows {max_message_bytes}"
                    " (commit_log.max_message_bytes); nothing of the batch was sent"
                )
            return
        largest = int(self.body_sizes.max())
        if largest > max_message_bytes:
            index = int(self.body_sizes.argmax())
            raise InvalidMessageError(
                f"message {index}: the body has {largest} bytes, the node allows {max_message_bytes}"
                " (commit_log.max_message_bytes); nothing of the batch was sent"
            )

    def sort_by_queue(self, queues: Sequence[int]) -> list[tuple[int, int, int]]:
        """Sort the messages by queue and keep their order in each queue; returns (queue, start, stop) of each queue.

        ``queues`` has the queue of every message, -1 for any queue.
        """
        numbers = np.asarray(queues)
        order = np.argsort(numbers, kind="stable")
        places = order.tolist()
        self.bodies = [self.bodies[index] for index in places]
        self.body_sizes = self.body_sizes[order]
        if isinstance(self.properties, list):
            self.properties = [self.properties[index] for index in places]
        if isinstance(self.flags, list):
            self.flags = [self.flags[index] for index in places]
        if isinstance(self.sys_flags, list):
            self.sys_flags = [self.sys_flags[index] for index in places]
        if self.tags is not None and not isinstance(self.tags, str):
            self.tags = [self.tags[index] for index in places]
        self.order = places
        values, starts = np.unique(numbers[order], return_index=True)
        bounds = [*starts.tolist(), len(places)]
        return [(int(value), bounds[at], bounds[at + 1]) for at, value in enumerate(values)]

    def runs(self, layout: RunLayout, groups: list[tuple[int, int, int]], max_run_bytes: int) -> Iterator[PlannedRun]:
        """Cut each (queue, start, stop) of ``groups`` into runs within the limits."""
        sizes = self.body_sizes + self._property_sizes() + layout.record_bytes(0, 0)
        return _cut(sizes, groups, min(max_run_bytes, TARGET_RUN_BYTES), MAX_RUN_MESSAGES)

    def inner_batches(self, groups: list[tuple[int, int, int]], max_message_bytes: int) -> Iterator[PlannedRun]:
        """Cut each (queue, start, stop) of ``groups`` into batches that become one record each."""
        sizes = message_bytes(self.body_sizes, self._property_sizes())
        return _cut(sizes, groups, min(max_message_bytes, TARGET_RUN_BYTES), MAX_MESSAGES)

    def common_tag(self, run: PlannedRun) -> str | None:
        """The tag of all messages of ``run``; None when their tags differ, or there are none."""
        if self.tags is None or isinstance(self.tags, str):
            return self.tags
        found = set(self.tags[run.start : run.stop])
        return found.pop() if len(found) == 1 else None

    def _property_sizes(self) -> Any:
        if isinstance(self.properties, bytes):
            return len(self.properties)
        return np.fromiter(map(len, self.properties), np.int64, len(self.properties))

    def slice(self, run: PlannedRun) -> dict[str, Any]:
        """The arguments of :func:`encode_run` for one run."""
        part = slice(run.start, run.stop)
        return {
            "bodies": self.bodies[part],
            "body_sizes": self.body_sizes[part],
            "properties": self.properties if isinstance(self.properties, bytes) else self.properties[part],
            "flags": self.flags[part] if isinstance(self.flags, list) else self.flags,
            "sys_flags": self.sys_flags[part] if isinstance(self.sys_flags, list) else self.sys_flags,
        }


def _cut(
    sizes: _Integers, groups: list[tuple[int, int, int]], max_bytes: int, max_messages: int
) -> Iterator[PlannedRun]:
    ends = np.cumsum(sizes)
    for queue, begin, end in groups:
        start = begin
        while start < end:
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + max_bytes, side="right"))
            stop = min(max(stop, start + 1), end, start + max_messages)
            yield PlannedRun(queue, start, stop)
            start = stop


def plan_batch(
    topic: str,
    messages: Sequence[bytes | Message],
    *,
    tags: str | Sequence[str | None] | None,
    keys: Sequence[Keys | None] | None,
    properties: Mapping[str, str] | None,
    sharding_keys: Sequence[str | None] | None,
    compressed: Callable[[bytes], tuple[bytes, int]] | None,
    asked: Asked | None = None,
) -> BatchPlan:
    """Check all arguments of a batch and encode the properties. Raises InvalidMessageError with the message's index.

    ``compressed`` maps a body to its stored form and the sysFlag bits of the compression. The plan keeps copies of the
    caller's lists, because the caller may change them while the batch is on its way.
    """
    if isinstance(messages, bytes | str | Message):
        raise InvalidMessageError("a batch must be a sequence of messages, not a single one")
    count = len(messages)
    for name, values in (("tags", tags), ("keys", keys), ("sharding_keys", sharding_keys)):
        if isinstance(values, str) and name != "tags":
            raise InvalidMessageError(f"{name} must be a list with one entry a message, not a string")
        if values is not None and not isinstance(values, str) and len(values) != count:
            raise InvalidMessageError(f"{name} has {len(values)} entries for {count} messages")

    flags: int | list[int] = 0
    encoded: bytes | list[bytes]
    bodies: Sequence[bytes]
    if set(map(type, messages)) == {bytes}:
        bodies = list(messages)  # type: ignore[arg-type]
        if not all(bodies):
            _body(bodies.index(b""), b"")
        encoded = _encode_columns(count, tags, keys, properties, sharding_keys)
    else:
        bodies, encoded, flags, sharding_keys = _from_objects(messages, tags, keys, properties, sharding_keys)
        if tags is None:
            tags = [one.tags if isinstance(one, Message) else None for one in messages]
    if asked is not None:
        more = asked.encoded
        encoded = encoded + more if isinstance(encoded, bytes) else [own + more for own in encoded]
    tags = tags if tags is None or isinstance(tags, str) else list(tags)
    sharding_keys = None if sharding_keys is None else list(sharding_keys)
    sizes = np.fromiter(map(len, bodies), np.int64, count)
    sys_flags: int | list[int] = 0
    if compressed is not None:
        pairs = [compressed(body) for body in bodies]
        bodies = [body for body, _ in pairs]
        sys_flags = [flag for _, flag in pairs]
        sizes = np.fromiter(map(len, bodies), np.int64, count)
    return BatchPlan(topic, bodies, sizes, encoded, flags, sys_flags, sharding_keys, tags)


def _encode_columns(
    count: int,
    tags: str | Sequence[str | None] | None,
    keys: Sequence[Keys | None] | None,
    properties: Mapping[str, str] | None,
    sharding_keys: Sequence[str | None] | None,
) -> bytes | list[bytes]:
    """The properties of plain bodies: one encoding for all messages where nothing differs, else one encoding a message."""
    if keys is None and sharding_keys is None and (tags is None or isinstance(tags, str)):
        return encode_user_properties(build_properties(tags, None, properties, None))
    each_tags = repeat(tags, count) if tags is None or isinstance(tags, str) else tags
    each_keys = repeat(None, count) if keys is None else keys
    each_shard = repeat(None, count) if sharding_keys is None else sharding_keys
    known: dict[tuple[str | None, str | None], bytes] = {}
    result: list[bytes] = []
    for index, (tag, key, shard) in enumerate(zip(each_tags, each_keys, each_shard, strict=True)):
        try:
            # Tags and sharding keys repeat, and each pair of them is encoded once. A key is one short string.
            same = known.get((tag, shard))
            if same is None:
                same = known[tag, shard] = encode_user_properties(build_properties(tag, None, properties, shard))
                if len(known) > 10_000:
                    known.clear()
            if key:
                if type(key) is str and key.isalnum():
                    same += b"KEYS\x01%b\x02" % key.encode()
                else:
                    same += encode_user_properties(build_properties(None, key, None, None))
            result.append(same)
        except InvalidMessageError as error:
            raise InvalidMessageError(f"message {index}: {error}") from error
    return result


def _from_objects(
    messages: Sequence[Any],
    tags: str | Sequence[str | None] | None,
    keys: Sequence[Keys | None] | None,
    properties: Mapping[str, str] | None,
    sharding_keys: Sequence[str | None] | None,
) -> tuple[list[bytes], list[bytes], list[int], Sequence[str | None] | None]:
    """The columns of a batch with Message objects. These have their own properties, so no others are allowed beside them."""
    if tags is not None or keys is not None or properties is not None or sharding_keys is not None:
        if any(isinstance(one, Message) for one in messages):
            raise InvalidMessageError(
                "Message objects carry their own tags, keys, properties and sharding key: the call must not name any"
            )
        bodies = [_body(index, one) for index, one in enumerate(messages)]
        encoded = _encode_columns(len(bodies), tags, keys, properties, sharding_keys)
        return (
            bodies,
            [encoded] * len(bodies) if isinstance(encoded, bytes) else encoded,
            [0] * len(bodies),
            sharding_keys,
        )
    bodies = []
    result = []
    flags = []
    shards: list[str | None] = []
    for index, one in enumerate(messages):
        if isinstance(one, Message):
            try:
                body, own, flag = content_of(one)
                result.append(encode_user_properties(own))
            except InvalidMessageError as error:
                raise InvalidMessageError(f"message {index}: {error}") from error
            bodies.append(body)
            flags.append(flag)
            shards.append(own.get(Property.SHARDING_KEY))
        else:
            bodies.append(_body(index, one))
            result.append(b"")
            flags.append(0)
            shards.append(None)
    return bodies, result, flags, shards if any(shards) else None


def _body(index: int, body: Any) -> bytes:
    """``body`` as bytes. Raises InvalidMessageError with the message's ``index``."""
    try:
        return check_body(body)
    except InvalidMessageError as error:
        raise InvalidMessageError(f"message {index}: {error}") from error
