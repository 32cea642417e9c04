"""A batch: the messages of one call, their runs, and the outcome of each run.

The pump sends batches in the order of their submission. It begins a batch after it has passed on all runs of the one
before. So two batches to one queue are stored in that order unless the first one fails. A run that a connection did not
take continues the next connection. After the loss of a run its batch sends no further run.

The outcome goes to a :class:`BatchFuture` for an asynchronous send, and to a :class:`commitmq.client.sending.line.Wait`
for a thread that waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commitmq.client.message import Message, check_body, content_of
from commitmq.client.properties import Keys, build_properties
from commitmq.client.results import BatchResult, BatchSendError, RunAck
from commitmq.client.sending.asked import SystemProperties
from commitmq.client.sending.inner_batch import MAX_MESSAGES, encode_batch, message_bytes
from commitmq.client.sending.line import Wait
from commitmq.client.sending.options import shard
from commitmq.client.sending.run import NEVER_S, MakeError, NotYet, SendRun
from commitmq.client.sending.run_encoder import (
    MAX_RUN_MESSAGES,
    EncodedRun,
    RunLayout,
    encode_run,
    encode_user_properties,
)
from commitmq.errors import InvalidMessageError, Outcome, SendError
from commitmq.format.constants import Property
from commitmq.protocol import wire

if TYPE_CHECKING:
    from commitmq.client.sending.pump import Pump


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
    """The plan of a batch: its bodies and encoded properties as columns, checked, and cut into runs.

    The columns of a batch, one entry a message. ``properties``, ``flags`` and ``sys_flags`` may be one value for all.
    """

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
    asked: SystemProperties | None = None,
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
    for index, (tag, key, shard_key) in enumerate(zip(each_tags, each_keys, each_shard, strict=True)):
        try:
            # Tags and sharding keys repeat, and each pair of them is encoded once. A key is one short string.
            same = known.get((tag, shard_key))
            if same is None:
                same = known[tag, shard_key] = encode_user_properties(
                    build_properties(tag, None, properties, shard_key)
                )
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


_log = logging.getLogger("commitmq.client")


class BatchFuture(Future[BatchResult]):
    """The outcome of an asynchronous batch. The outbox has its room back before the callbacks run: they may send more."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch

    def _invoke_callbacks(self) -> None:
        self._batch.settle()
        super()._invoke_callbacks()  # type: ignore[misc]

    def start(self) -> bool:
        """The batch's first run is about to be sent; False when the batch was cancelled."""
        return self.set_running_or_notify_cancel()

    def done_with(self, result: BatchResult | None, error: Exception | None) -> None:
        """Tell the outcome: exactly one of both is not None."""
        try:
            if result is None:
                self.set_exception(error)
            else:
                self.set_result(result)
        except BaseException:  # raised by a callback; the other batches must have their outcomes too
            _log.exception("a callback of a batch failed", extra={"fields": {}})


class BatchRun(SendRun):
    """One run of a batch; ``number`` is its place in the batch."""

    __slots__ = ("batch", "encoded", "is_open", "number", "planned")

    def __init__(
        self, batch: Batch, number: int, planned: PlannedRun, encoded: EncodedRun, fields: dict[str, Any]
    ) -> None:
        super().__init__(encoded.topic, encoded.queue, encoded.count, fields, encoded.data)
        self.batch = batch
        self.number = number
        self.planned = planned
        self.encoded = encoded
        self.is_open = True

    def stored(self, answer: dict[str, Any]) -> None:
        if self._close():
            self.batch.note_stored(self, answer)

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        if self._close():
            self.batch.note_failed(self, make_error(), answer)

    def expire(self, now: float, make_error: MakeError) -> float:
        if self.is_open and self.batch.deadline <= now:
            self.failed(make_error)
        return self.batch.deadline if self.is_open else NEVER_S

    def give_back(self) -> None:
        if self._close():
            self.batch.take_back(self)

    def _close(self) -> bool:
        was_open, self.is_open = self.is_open, False
        return was_open


class Batch:
    """The messages of one call, and the outcome of each of their runs. Only the owner of the connection uses a batch
    once it is submitted.

    ``inner``: the topic is a BatchCQ topic, so messages travel and are stored as inner batches instead of records.
    With ``queue`` None the sharding keys pick the queues, or the turn does. ``limit_s`` bounds the wait for each answer.
    """

    def __init__(
        self,
        pump: Pump,
        plan: BatchPlan,
        *,
        ack: str,
        limit_s: float,
        inner: bool,
        queue: int | None,
        is_async: bool = False,
    ) -> None:
        self._sink: BatchFuture | Wait[BatchResult] = BatchFuture(self) if is_async else Wait(self.settle)
        self.is_counted = False
        """Whether it takes room in the outbox; the outbox's lock is held to read and to set it."""
        self.size_bytes = int(plan.body_sizes.sum())
        self.in_flight = 0
        """Runs that were passed on and have no outcome yet."""
        self.pump = pump
        self._lane = pump.lane
        self._outbox = pump.outbox
        self._plan = plan
        self._ack = ack
        self._limit_s = limit_s
        self._inner = inner
        self._queue = queue
        self._is_free = queue is None and plan.sharding_keys is None
        self._born = time.time_ns() // 1_000_000
        self._planned: list[PlannedRun] = []
        self._left: deque[int] | None = None  # numbers of runs to be sent; None until it is planned
        self._acks: dict[int, RunAck] = {}
        self._stored = 0
        self._unknown = 0
        self._problem: SendError | None = None
        self._refusal: Exception | None = None
        self._is_running: bool | None = None
        self._is_told = False
        self.deadline = 0.0
        """In seconds of ``time.monotonic()``. Before it the first run has to be sent, later the next answer has to come."""
        self._extend()

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def topic(self) -> str:
        return self._plan.topic

    @property
    def future(self) -> BatchFuture:
        """The outcome of an asynchronous batch."""
        assert isinstance(self._sink, BatchFuture)
        return self._sink

    def wait(self) -> BatchResult:
        """Wait for the outcome of a synchronous batch. Raises BatchSendError or InvalidMessageError."""
        assert isinstance(self._sink, Wait)
        return self._sink.wait()

    @property
    def more(self) -> bool:
        """Whether the batch has another run to send."""
        return self._problem is None and self._refusal is None and (self._left is None or bool(self._left))

    @property
    def may_move(self) -> bool:
        """Whether another node may take all of it."""
        untouched = not (self.in_flight or self._acks or self._stored or self._unknown)
        return self._is_free and untouched

    def settle(self) -> None:
        """Give the batch's room back."""
        self._outbox.settle_batch(self)

    # ------------------------------------------------------------ its runs

    def next_run(self, put_deadline: float, *, only: bool = False) -> BatchRun | None:
        """The next run, encoded for this connection; None when there is none, or ``only`` is set and it is not the only one.

        Raises NotYet while the node does not name the topic's queues. A fault of the batch itself ends this batch only.
        """
        try:
            if self._left is None and not self._begin(put_deadline):
                return None
            if not self._left or (only and len(self._left) > 1):
                return None
            number = self._left[0]
            run = self._encoded(number, put_deadline)
        except SendError as error:
            if error.code == "NODE_UNAVAILABLE":
                raise NotYet(error.message) from error
            self._problem = error
            return None
        except Exception as error:
            self._refusal = error
            return None
        self._left.popleft()
        self.in_flight += 1
        self._extend()
        return run

    def take_back(self, run: BatchRun) -> None:
        """``run`` is not stored. It is the next run again, unless the batch has failed in the meantime."""
        self.in_flight -= 1
        assert self._left is not None
        self._left.appendleft(run.number)
        if self.more:
            self._outbox.put_back_batch(self)
        else:
            self._outbox.finish_batch(self)

    def note_stored(self, run: BatchRun, answer: dict[str, Any]) -> None:
        """The node has stored ``run``."""
        self.in_flight -= 1
        self._acks[run.number] = run.encoded.acknowledged(self._ack, answer)
        self._stored += run.count
        self._extend()
        self._outbox.finish_batch(self)

    def note_failed(self, run: BatchRun, error: SendError, answer: dict[str, Any] | None) -> None:
        """``run`` has failed: the batch sends no further run."""
        self.in_flight -= 1
        self._problem = self._problem or error
        if error.outcome is Outcome.STORED:
            self._stored += run.count
            if answer is not None and "queue_offset" in answer:
                self._acks[run.number] = run.encoded.acknowledged("memory", answer)
        elif error.outcome is Outcome.UNKNOWN:
            self._unknown += run.count
        self._extend()
        self._outbox.finish_batch(self)

    def fail(self, error: SendError) -> None:
        """The batch sends no further run."""
        self._problem = self._problem or error

    def finish(self) -> None:
        """Tell the outcome: nothing is in flight, and no further run will be sent."""
        if not self._run() or self._is_told:
            return
        self._is_told = True
        result: BatchResult | None = None
        error = self._refusal
        if error is None and self._problem is not None:
            error = self._account(self._problem)
        if error is None:
            result = BatchResult([self._acks[number] for number in range(len(self._planned))], self._order())
        self._sink.done_with(result, error)

    # ------------------------------------------------------------ steps

    def _extend(self) -> None:
        self.deadline = time.monotonic() + self._limit_s

    def _run(self) -> bool:
        """Make the batch one that cannot be cancelled; False when it was cancelled before."""
        if self._is_running is None:
            self._is_running = self._sink.start()
            if not self._is_running:
                self.settle()
        return self._is_running

    def _begin(self, deadline: float) -> bool:
        """Plan the runs for this connection; False for a cancelled batch. Raises SendError and InvalidMessageError."""
        if not self._run():
            self._left = deque()
            return False
        self._plan.check_sizes(self._lane.max_message_bytes, inner=self._inner)
        self._planned = list(self._runs(deadline))
        self._left = deque(range(len(self._planned)))
        return True

    def _runs(self, deadline: float) -> Iterator[PlannedRun]:
        """The batch in runs, each of one queue and of a size that the node takes. Raises SendError."""
        lane, plan = self._lane, self._plan
        groups = [(-1 if self._queue is None else self._queue, 0, len(plan))]
        if self._queue is None and plan.sharding_keys is not None:
            count = lane.routes.queues(plan.topic, deadline)
            groups = plan.sort_by_queue([shard(key, count) if key else -1 for key in plan.sharding_keys])
        if self._inner:
            return plan.inner_batches(groups, lane.max_message_bytes)
        return plan.runs(lane.layout(plan.topic), groups, int(lane.hello["max_run_bytes"]))

    def _encoded(self, number: int, deadline: float) -> BatchRun:
        """Run ``number`` in the layout of this connection. Raises SendError without known queues, or without free numbers."""
        lane, topic, planned = self._lane, self._plan.topic, self._planned[number]
        queue = planned.queue if planned.queue >= 0 else lane.routes.next_queue(topic, deadline)
        part = self._plan.slice(planned)
        fields: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "op": "batch" if self._inner else "append",
            "topic": topic,
            "queue": queue,
            "count": planned.stop - planned.start,
            "ack": self._ack,
        }
        if self._inner:
            del part["sys_flags"]  # an inner batch has no flags for single bodies, so these are not compressed
            data, unique = encode_batch(unique_ids=lane.ids, **part)
            fields.update(born=self._born, properties=self._record_properties(planned))
            # The messages share one record, so the next one is 0 bytes away.
            encoded = EncodedRun(topic, queue, data, [0] * (planned.stop - planned.start), unique)
            return self._run_of(number, planned, encoded, fields)
        with lane.delivery.numbered(topic, queue, fields) as sequence:
            encoded = encode_run(
                lane.layout(topic), queue, unique_ids=lane.ids, born=self._born, sequence=sequence, **part
            )
        run = self._run_of(number, planned, encoded, fields)
        run.sequence = sequence
        return run

    def _run_of(self, number: int, planned: PlannedRun, encoded: EncodedRun, fields: dict[str, Any]) -> BatchRun:
        run = BatchRun(self, number, planned, encoded, fields)
        # (A batch goes to another node as a whole or not at all.)
        run.is_free = self._is_free and len(self._planned) == 1
        return run

    def _record_properties(self, planned: PlannedRun) -> dict[str, str]:
        """The properties of the record of an inner batch: an id, and the common tag of its messages for the tag filter."""
        tag = self._plan.common_tag(planned)
        return {Property.UNIQUE_KEY: self._lane.ids.next(), **({Property.TAGS: tag} if tag else {})}

    def _order(self) -> list[tuple[int, int]] | None:
        """(run, index in the run) of each message, in the caller's order; None where sharding did not sort the messages."""
        places = self._plan.order
        if places is None:
            return None
        order: list[tuple[int, int]] = [(0, 0)] * len(places)
        for number, run in enumerate(self._planned):
            for within, at in enumerate(range(run.start, run.stop)):
                order[places[at]] = (number, within)
        return order

    def _account(self, problem: SendError) -> BatchSendError:
        prefix = 0
        if self._plan.order is None:
            for number, run in enumerate(self._planned):
                if number not in self._acks:
                    break
                prefix = run.stop
        return BatchSendError(
            problem,
            acks=[self._acks[number] for number in sorted(self._acks)],
            stored=self._stored,
            unknown=self._unknown,
            total=len(self._plan),
            stored_prefix=prefix,
        )
