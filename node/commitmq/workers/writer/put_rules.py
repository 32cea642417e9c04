"""The rules by which a send is taken: its checks, and where its messages are stored.

A message with a property of message semantics is stored where it waits (spec 12.1, 12.3).

The check of a run tells in a word whether any record carries such a property, so plain runs pay nothing. A run has one
destination: the client puts messages of one delay level into one run, and messages with times of their own into another.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.config.schema import TimerConfig
from commitmq.control import DiskFlag, DispatcherWord, Word
from commitmq.errors import InvalidMessageError
from commitmq.files import disk
from commitmq.format.constants import (
    HOST_BYTES,
    HOST_V6_BYTES,
    LMQ_PREFIX,
    MAX_PROPERTIES_BYTES,
    MULTI_DISPATCH_SEPARATOR,
    RECONSUME_TIMES_OFFSET,
    RETRY_PREFIX,
    SYS_FLAG_OFFSET,
    UNIT_BYTES,
    Property,
    SysFlag,
)
from commitmq.format.message_id import UniqueIds
from commitmq.format.record import parts_of
from commitmq.format.timer import SLOT_BYTES, decode_slot
from commitmq.kernels import codes
from commitmq.kernels.codes import SECTOR_BYTES
from commitmq.kernels.compiled import check_batch
from commitmq.semantics import delay, timer, transaction
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.timer import REQUESTS, TIMER_TOPIC, TimerRules, refused_share, slot_for, slot_index
from commitmq.store.layout import StoreLayout
from commitmq.store.log import dispatch_batch
from commitmq.store.log.append import longs
from commitmq.store.log.dispatch_batch import DispatchBatch, Rows
from commitmq.store.log.readdressing import FoundProperties, NewAddress, find, readdress, sizes_of, starts_of
from commitmq.store.log.run_check import (
    FORBIDDEN_PROPERTIES,
    SPECIAL_PROPERTIES,
    CheckedRun,
    MessageIllegalError,
    RunCheck,
    forbidden_names,
    sentence_of,
)
from commitmq.store.metadata.topic_config import is_nodes_own, is_send_forbidden, validate_topic
from commitmq.store.queues.batch_consume_queue import MAX_INNER_MESSAGES
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicView, TopicViews
from commitmq.workers.writer.local_sockets import Frames

Offsets = dict[tuple[str, int], int]
"""The next queue offset by (topic or LMQ, queue)."""

LMQ_QUEUE: Final = 0
_NEVER_DISPATCHED: Final = (RETRY_PREFIX, "rmq_sys_")


class SpecialSendError(Exception):
    """The send is refused. ``code`` is for the answer."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


def batch_properties(properties: Mapping[str, Any], count: int, base: int) -> dict[str, Any]:
    """The properties of a record that holds ``count`` messages; the first one has queue offset ``base``."""
    return {**properties, Property.INNER_NUM: str(count), Property.INNER_BASE: str(base)}


class FurtherQueues:
    """Sends that are more than one plain message: inner batches (spec 2.8) and messages for further queues (spec 3.10).

    Used by workers.writer.send_requests, in the writer. The queue offsets assigned here (the record's own and those in the
    further queues) are stored in the record's properties. So a writer that dies anywhere leaves either nothing or a record
    from which the next writer continues counting; see :func:`offset_behind`.

    Queue offsets of LMQs, as part of the writer's table.
    """

    def __init__(self, config: NodeConfig, offsets: Offsets) -> None:
        self._config = config.consume_queue
        self._offsets = offsets
        self._known = sum(1 for name, _ in offsets if name.startswith(LMQ_PREFIX))

    def assign(self, topic: str, properties: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The LMQs that ``properties`` name, and the properties to store. Nothing is counted yet. Raises
        SpecialSendError.
        """
        if Property.INNER_MULTI_QUEUE_OFFSET in properties:
            sentence = f"only the node may set the property {Property.INNER_MULTI_QUEUE_OFFSET!r}"
            raise SpecialSendError("MESSAGE_ILLEGAL", sentence)
        names = self._names(topic, properties[Property.INNER_MULTI_DISPATCH])
        offsets = [str(self._offsets.get((name, LMQ_QUEUE), 0)) for name in names]
        stored = {name: value for name, value in properties.items() if name != Property.WAIT}
        stored[Property.INNER_MULTI_QUEUE_OFFSET] = MULTI_DISPATCH_SEPARATOR.join(offsets)
        return names, stored

    def count(self, names: list[str]) -> None:
        """Count a stored message in these LMQs."""
        for name in names:
            key = (name, LMQ_QUEUE)
            self._known += key not in self._offsets
            self._offsets[key] = self._offsets.get(key, 0) + 1

    def _names(self, topic: str, value: Any) -> list[str]:
        if not self._config.enable_multi_dispatch:
            raise SpecialSendError(
                "MESSAGE_ILLEGAL",
                f"property {Property.INNER_MULTI_DISPATCH!r} needs consume_queue.enable_multi_dispatch, which is off",
            )
        if topic.startswith(_NEVER_DISPATCHED) or topic == SCHEDULE_TOPIC:
            raise SpecialSendError("MESSAGE_ILLEGAL", f"messages of {topic!r} cannot go to further queues")
        if type(value) is not str:
            raise SpecialSendError("INVALID_PARAMETER", f"property {Property.INNER_MULTI_DISPATCH!r} must be a string")
        names = value.split(MULTI_DISPATCH_SEPARATOR)
        for name in names:
            if not name.startswith(LMQ_PREFIX) or name == LMQ_PREFIX:
                raise SpecialSendError("MESSAGE_ILLEGAL", f"{name!r} is no LMQ: its name must begin with {LMQ_PREFIX}")
            try:
                validate_topic(name)
            except InvalidMessageError as error:
                raise SpecialSendError("MESSAGE_ILLEGAL", str(error)) from error
        if len(set(names)) != len(names):
            raise SpecialSendError("MESSAGE_ILLEGAL", "an LMQ is named twice")
        new = sum((name, LMQ_QUEUE) not in self._offsets for name in names)
        if self._known + new > self._config.max_lmq_queues:
            raise SpecialSendError(
                "LMQ_CONSUME_QUEUE_NUM_EXCEEDED",
                f"the node has {self._known} LMQs, consume_queue.max_lmq_queues allows {self._config.max_lmq_queues}",
            )
        return names


def offset_behind(row: np.void) -> int:
    """The queue offset behind the record of ``row``. An inner batch counts for all of its messages."""
    base, count = int(row["inner_base"]), int(row["inner_num"])
    if row["sys_flag"] & SysFlag.INNER_BATCH and count > 0 and base >= 0:
        return base + count
    return int(row["queue_offset"]) + 1


def further_offsets(batch: DispatchBatch, rows: Rows) -> Iterator[tuple[tuple[str, int], int]]:
    """For each unit of ``rows`` (of ``batch``) in a further queue: the queue, and its next queue offset."""
    if rows["multi_size"].any():
        for key, offset, units in dispatch_batch.runs(batch, rows):
            yield key, offset + len(units) // UNIT_BYTES


# Plain ints for speed, see workers.writer.process.
_DISK_FLAGS, _FLUSH_ERRNO = int(Word.DISK_FLAGS), int(Word.FLUSH_ERRNO)
_DISPATCHER_FLAGS = int(DispatcherWord.FLAGS)
FORBIDDEN = frozenset(FORBIDDEN_PROPERTIES)
_ZEROS = "\0" * SECTOR_BYTES
_ACKS = ("flushed", "memory")
_MOST_PLAIN = 10_000

WRONG_ENDPOINT = "WRONG_ENDPOINT"  # another process stores the topic; ``endpoint`` in the answer names it


class PutRefusal(Exception):
    """This request is refused; nothing was stored."""

    def __init__(self, code: str, sentence: str, retry_after_ms: int | None = None, *, endpoint: str = "") -> None:
        """``endpoint``: the kind of process that takes this request, when it is another one."""
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.fields: dict[str, Any] = {}
        if retry_after_ms is not None:
            self.fields["retry_after_ms"] = retry_after_ms
        if endpoint:
            self.fields["endpoint"] = endpoint


class SendChecks:
    """The checks of a send before anything is encoded: its topic and queue, its fields, and whether the node takes messages
    now.

    All of them come before the first byte is stored, so a refused request has ``outcome`` not_stored.

    The checks against the topic table and the state of the node. A request without a queue gets one here.
    """

    def __init__(self, context: WorkerContext, topics: TopicViews) -> None:
        self._control = context.control
        self._config = context.config
        self._lmq_enabled = context.config.consume_queue.enable_lmq
        self._topics = topics
        self._unique_ids = UniqueIds()
        self._next_queue: dict[str, int] = {}
        self._plain: dict[str, TopicView] = {}
        """By name, views that were found to take every plain send; a topic that changes gets another view."""

    def checked(self, header: dict[str, Any], frames: Frames) -> tuple[str, int, str]:
        """Topic, queue and ack of a request. Raises PutRefusal."""
        ack = self._ack(header, frames)
        name = header.get("topic")
        if type(name) is not str:
            raise PutRefusal("INVALID_PARAMETER", "topic must be a string")
        topic = self._topics.get(name)
        if topic is None or self._plain.get(name) is not topic or header["op"] == "batch":
            self._check_topic(header, name, topic)
        self._refuse_when_unwritable()
        if topic is None:  # one of the node's own
            return name, integer(header, "queue", -1, 0, 1 << 20), ack
        return name, self._queue_of(header, name, topic), ack

    def _check_topic(self, header: dict[str, Any], name: str, topic: TopicView | None) -> None:
        """Refuse what the topic does not take, and remember one that takes every plain send. Raises PutRefusal."""
        if self.is_lmq(name):
            raise PutRefusal(
                "NO_PERMISSION", f"{name!r} is an LMQ: messages of other topics name it, nothing is sent to it"
            )
        is_own = is_own_topic(header)
        if topic is None:
            if is_own:
                return
            try:
                validate_topic(name)
            except InvalidMessageError as error:
                raise PutRefusal("INVALID_PARAMETER", str(error)) from error
            raise PutRefusal("TOPIC_NOT_EXIST", f"there is no topic {name!r}")
        if is_send_forbidden(name) and not is_own:
            raise PutRefusal("NO_PERMISSION", f"{name!r} is a system topic that takes no sends")
        if not topic.is_writable:
            raise PutRefusal("NO_PERMISSION", f"topic {name!r} is not writable")
        self._check_place(name, topic)
        if topic.is_batch != (header["op"] == "batch"):
            # RocketMQ 5.4.0 takes such a message for a batch of one. Other versions give it no ConsumeQueue unit, so it
            # could never be consumed.
            raise PutRefusal(
                "MESSAGE_ILLEGAL",
                f"topic {name!r} has queue.type=BatchCQ: its messages come in batches (op batch; send_batch in the client)"
                if topic.is_batch
                else f"topic {name!r} has plain queues; a batch that stays one record needs queue.type=BatchCQ",
            )
        if not (topic.is_batch or is_own):
            if len(self._plain) >= _MOST_PLAIN:
                self._plain.clear()
            self._plain[name] = topic

    def checked_ack(self, header: dict[str, Any], frames: Frames) -> str:
        """The ack of a request that names no queue to store in; the node takes messages now. Raises PutRefusal."""
        ack = self._ack(header, frames)
        self._refuse_when_unwritable()
        return ack

    def _ack(self, header: dict[str, Any], frames: Frames) -> str:
        if len(frames) != 2:
            raise PutRefusal(
                "BAD_HEADER", f"{header['op']} takes the header and one payload frame, not {len(frames)} frames"
            )
        ack = header.get("ack", "flushed")
        if ack not in _ACKS:
            raise PutRefusal("INVALID_PARAMETER", f"ack must be one of {', '.join(_ACKS)}, not {ack!r}")
        return str(ack)

    def _queue_of(self, header: dict[str, Any], name: str, topic: TopicView) -> int:
        queue_id = header.get("queue", -1)
        if type(queue_id) is int and 0 <= queue_id < topic.write_queues:
            return queue_id
        queue_id = integer(header, "queue", -1, -1, 1 << 20)
        if queue_id >= max(topic.write_queues, topic.read_queues):
            raise PutRefusal(
                "INVALID_PARAMETER", f"queue {queue_id} of {name!r} does not exist, it has {topic.write_queues}"
            )
        if queue_id < 0:
            if header["op"] == "append":
                raise PutRefusal("INVALID_PARAMETER", "append needs the queue that its records name")
            number = self._next_queue.get(name, 0)
            self._next_queue[name] = number + 1
            queue_id = number % max(1, topic.write_queues)
        return queue_id

    def is_lmq(self, name: str) -> bool:
        """True when ``name`` is a light message queue (LMQ) on this node, and so no topic."""
        return self._lmq_enabled and name.startswith(LMQ_PREFIX)

    def may_be_made(self, header: dict[str, Any], name: str) -> bool:
        """Whether the coordinator is to be asked for the topic ``name``, which the table does not have."""
        return not (self.is_lmq(name) or is_own_topic(header))

    def forget_topic(self, topic: str) -> None:
        """Begin again with the first queue when a topic of this name is created again."""
        self._next_queue.pop(topic, None)
        self._plain.pop(topic, None)

    def _check_place(self, name: str, topic: TopicView) -> None:
        """Refuse a topic that another process stores."""
        if topic.is_memory:
            raise PutRefusal(
                WRONG_ENDPOINT, f"topic {name!r} is kept in memory: send to the memory endpoint", endpoint="memory"
            )

    def _refuse_when_unwritable(self) -> None:
        """Refuse while the disk, the ConsumeQueues or the flush process take nothing."""
        control = self._control
        flags = control.get(_DISK_FLAGS)
        if not (flags or control.dispatcher(0, _DISPATCHER_FLAGS) or control.get(_FLUSH_ERRNO)):
            return
        retry = self._config.disk.check_interval_ms
        if flags & DiskFlag.DISK_FULL:
            raise PutRefusal(
                "SERVICE_NOT_AVAILABLE", "the disk is fuller than disk.warning_ratio allows; reads work", retry
            )
        if control.dispatcher(0, DispatcherWord.FLAGS):
            raise PutRefusal(
                "SERVICE_NOT_AVAILABLE", "ConsumeQueues cannot be written (disk full or failing); reads work", retry
            )
        if control.get(Word.FLUSH_ERRNO):
            raise PutRefusal(
                "SERVICE_NOT_AVAILABLE", "a flush failed; the store is read-only until the node is started again"
            )

    def encoded_properties(self, properties: Any, forbidden: frozenset[str] = FORBIDDEN) -> bytes:
        """The properties as the record has them; ``forbidden`` are those that only the node sets. Raises PutRefusal."""
        if properties is None:
            properties = {}
        if type(properties) is not dict:
            raise PutRefusal("INVALID_PARAMETER", "properties must be an object of strings")
        pieces = []
        for name, value in properties.items():
            if type(value) is not str:
                raise PutRefusal("INVALID_PARAMETER", f"property {name!r} must be a string")
            if name in forbidden:
                raise PutRefusal("MESSAGE_ILLEGAL", f"only the node may set the property {name!r}")
            if not name:
                raise PutRefusal("MESSAGE_ILLEGAL", "a property needs a name")
            if value:  # RocketMQ's decoders drop empty values; storing one would only waste space
                pieces.append(f"{name}\x01{value}\x02")
        if "UNIQ_KEY" not in properties:
            pieces.append(f"UNIQ_KEY\x01{self._unique_ids.next()}\x02")
        text = "".join(pieces)
        if text.count("\x01") != len(pieces) or text.count("\x02") != len(pieces):
            raise PutRefusal(
                "MESSAGE_ILLEGAL", "names and values of properties must not hold the separators 0x01 and 0x02"
            )
        if _ZEROS in text:
            raise PutRefusal(
                "MESSAGE_ILLEGAL",
                f"a property's value holds {len(_ZEROS)} zero bytes in a row, as a sector does that never reached the disk",
            )
        return text.encode()


def is_own_topic(header: dict[str, Any]) -> bool:
    """Whether a mover appends to a topic of the node. It need not be in the table: RocketMQ makes its own ones itself."""
    name = header.get("topic")
    return "moved" in header and header["op"] == "append" and type(name) is str and is_nodes_own(name)


def integer(header: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    """The integer ``key`` of a header. Raises PutRefusal for another value than one of ``low`` to ``high``."""
    value = header.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise PutRefusal("INVALID_PARAMETER", f"{key} must be an integer from {low} to {high}")
    return value


def unnumbered() -> PutRefusal:
    """The refusal of a message of an idempotent producer that the node would copy."""
    return PutRefusal(
        "MESSAGE_ILLEGAL",
        "a delayed message, or one of a transaction, cannot come from an idempotent producer: its copy is no repetition",
    )


_MOST_SLOTS: Final = 65_536
_PRECISION_MS: Final = 1_000
_RETRY_MS: Final = 1_000  # then a delay leads to another slot
_OFF: Final = 2**31 - 1


class SlotLimit:
    """How many messages may be due in the same second: RocketMQ's ``timerCongestNumEachSlot`` (spec 12.2).

    While a slot of the wheel has more messages than the limit, further ones are refused at random, the more the fuller it is;
    with twice the limit all are. The file of the wheel says what a slot had when this writer first saw a message for it. From
    then on the writer counts what it takes itself, for the timer puts messages into the wheel a moment later. A cancellation
    is never refused. Messages that a transaction commits are not counted before they are in the wheel.

    ``wheel`` is the path of the file ``timerwheel``. ``draw`` gives a number from 0 to 1.
    """

    def __init__(self, wheel: Path, limit: int, draw: Callable[[], float] = random.random) -> None:
        self._wheel = wheel
        self._rules = TimerRules(congest_count=limit)
        self._draw = draw
        self._counts: dict[int, int] = {}
        """By the slot's time, in the order in which they were first seen."""

    def take(self, slots_ms: NDArray[np.int64], *, counts: bool = True) -> None:
        """Count messages of one run for the slots ``slots_ms``, all or none. Raises PutRefusal. Without ``counts`` it is a
        look: the messages are not stored in the wheel now.
        """
        limit = self._rules.congest_count
        if limit >= _OFF:
            return
        slots, numbers = np.unique(slots_ms, return_counts=True)
        totals: dict[int, int] = {}
        for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
            before = self._count(slot)
            totals[slot] = before + number
            if totals[slot] > 2 * limit or (before > limit and self._draw() < refused_share(before, self._rules)):
                raise PutRefusal(
                    "WHEEL_TIMER_FLOW_CONTROL",
                    f"{before} messages are due in the same second as {number} of this send; more than {limit}"
                    f" (timer.slot_messages) are refused at random, more than {2 * limit} always",
                    _RETRY_MS,
                )
        if counts:
            self._counts.update(totals)
            if len(self._counts) > _MOST_SLOTS:
                self._forget()

    def _count(self, slot_ms: int) -> int:
        if slot_ms in self._counts:
            return self._counts[slot_ms]
        try:
            with disk.opened(self._wheel, os.O_RDONLY, "timerwheel") as fd:
                raw = os.pread(fd, SLOT_BYTES, slot_index(slot_ms) * SLOT_BYTES)
        except OSError:
            return 0  # the timer has not made it yet
        slot = slot_for(decode_slot(raw, 0), slot_ms) if len(raw) == SLOT_BYTES else None
        return 0 if slot is None else max(0, slot.messages)

    def _forget(self) -> None:
        """Slots that have passed; then, if need be, the oldest half: the file knows them by now."""
        now_ms = time.time_ns() // 1_000_000 - _PRECISION_MS
        kept = [slot for slot in self._counts if slot > now_ms]
        if len(kept) > _MOST_SLOTS // 2:
            kept = kept[len(kept) - _MOST_SLOTS // 2 :]
        self._counts = {slot: self._counts[slot] for slot in kept}


_ILLEGAL: Final = "WHEEL_TIMER_MSG_ILLEGAL"
_MOST_MS: Final = 1 << 50  # further away than any limit, and no sum with it overflows
_NAMES: Final = (*timer.REQUESTS, Property.TIMER_DELETE_KEY)
_SCALES: Final = (1000, 1, 1)


class TimerRule:
    """The put-time rule for messages with a time of their own: they are stored in ``rmq_sys_wheel_timer`` (spec 12.2).

    :mod:`commitmq.semantics.timer` has the rule for one record. Here it is for runs, whose messages may have different times.

    Finds the times of a run's messages, and the properties that they get.
    """

    def __init__(self, config: TimerConfig, wheel: Path) -> None:
        """``wheel``: the path of the file ``timerwheel``."""
        self._config = config
        self._slots = SlotLimit(wheel, config.slot_messages)

    def properties(self, run: CheckedRun, topic: str, queue_id: int, *, is_stored: bool = True) -> list[bytes] | None:
        """The encoded properties that each message of ``run`` gets in the timer topic; None when the times of all have
        passed: then they are plain messages.

        A message whose time has passed goes with the others of its run, and is delivered at once. ``is_stored``: it will be
        stored in the timer topic now. Raises PutRefusal.
        """
        if not self._config.enable:
            raise PutRefusal(
                "WHEEL_TIMER_NOT_ENABLE", "this node delivers no messages at a time (timer.enable is false)"
            )
        found = find(run.data, starts_of(run), sizes_of(run), _NAMES)
        now_ms = time.time_ns() // 1_000_000
        asked = _asked(found, now_ms)
        passed = asked <= now_ms
        if (passed & (found.lengths[3] > 0)).any():
            raise PutRefusal(_ILLEGAL, "a cancellation must come before the time of delivery")
        late_ms = int(asked.max()) - now_ms
        if late_ms > self._config.max_delay_ms:
            sentence = f"the message is due in {late_ms} ms, timer.max_delay_ms allows {self._config.max_delay_ms}"
            raise PutRefusal(_ILLEGAL, sentence)
        if passed.all():
            return None
        exact = asked % _PRECISION_MS == 0
        out = np.where(exact, asked - _PRECISION_MS, asked - asked % _PRECISION_MS)
        self._slots.take(out[~passed & (found.lengths[3] == 0)], counts=is_stored)
        rest = f"{Property.REAL_TOPIC}\x01{topic}\x02{Property.REAL_QUEUE_ID}\x01{queue_id}\x02"
        times, numbers = np.unique(out, return_inverse=True)
        encoded = [f"{Property.TIMER_OUT_MS}\x01{one}\x02{rest}".encode() for one in times.tolist()]
        return [encoded[number] for number in numbers.tolist()]


def due_of(more: bytes) -> int:
    """The slot (ms) in properties that :meth:`TimerRule.properties` has made."""
    return int(more[len(Property.TIMER_OUT_MS) + 1 :].partition(b"\x02")[0])


def _asked(found: FoundProperties, now_ms: int) -> NDArray[np.int64]:
    """When each message is to be delivered. Raises PutRefusal."""
    asked: NDArray[np.int64] = np.zeros(found.starts.shape[1], np.int64)
    known: NDArray[np.bool_] = np.zeros(len(asked), np.bool_)
    for name, (row, scale) in enumerate(zip(timer.REQUESTS, _SCALES, strict=True)):
        there = (found.lengths[name] > 0) & ~known
        if not there.any():
            continue
        values, good = longs(found.data, found.starts[name], np.where(there, found.lengths[name], 0))
        if (there & ~good).any():
            text = found.value(name, int(np.argmax(there & ~good))).decode("utf-8", "replace")
            raise PutRefusal(_ILLEGAL, f"the property {row} is no number: {text!r:.80}")
        times = np.clip(values, -_MOST_MS, _MOST_MS) * scale
        asked[there] = (times if row == Property.TIMER_DELIVER_MS else times + now_ms)[there]
        known |= there
    if not known.all():
        raise PutRefusal(
            "MESSAGE_ILLEGAL",
            f"all messages of a run need a time of delivery, or none: give {', '.join(timer.REQUESTS)}, or send several runs",
        )
    return asked


def without_requests(run: CheckedRun) -> CheckedRun:
    """``run`` without the requests for a timer: a delay level wins over them, and they are not stored."""
    names = tuple(name.encode() + b"\x01" for name in timer.REQUESTS)
    records = [_without(run.data[start:end], names) for start, end in zip(starts_of(run), run.ends, strict=True)]
    ends = np.cumsum([len(one) for one in records], dtype=np.int64)
    return CheckedRun(np.frombuffer(b"".join(records), np.uint8), ends, run.count, run.special, run.moved)


def _without(record: NDArray[np.uint8], names: tuple[bytes, ...]) -> bytes:
    data = record.tobytes()
    parts = parts_of(data)
    at, size = parts.properties, parts.properties_bytes
    pairs = [one for one in data[at : at + size].split(b"\x02") if one and not one.startswith(names)]
    text = b"".join(one + b"\x02" for one in pairs)
    total = at + len(text)
    return total.to_bytes(4, "big") + data[4 : at - 2] + len(text).to_bytes(2, "big") + text


_DELAY = 1 << SPECIAL_PROPERTIES.index(Property.DELAY)
_TRANSACTION = 1 << SPECIAL_PROPERTIES.index(Property.TRANSACTION_PREPARED)
_ROOM_BYTES = 256  # for what checks, a commit, the timer and its rolls add to the properties of a message that waits
_TIMER = sum(1 << SPECIAL_PROPERTIES.index(name) for name in (*REQUESTS, Property.TIMER_DELETE_KEY))


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run and the queue in which it is to be stored. ``due_ms``: when the slot of its first timer message ends."""

    run: CheckedRun
    topic: str
    queue_id: int
    due_ms: int | None = None

    def where(self, asked: str) -> dict[str, str | int]:
        """What an answer says of a place that is none of the topic ``asked``."""
        if self.topic == asked:
            return {}
        place: dict[str, str | int] = {"stored_topic": self.topic, "stored_queue": self.queue_id}
        return place if self.due_ms is None else {**place, "due_ms": self.due_ms}


class PutRules:
    """Rewrites checked runs. ``checker`` says how records of this log look, ``layout`` where the store's files are."""

    def __init__(self, checker: RunCheck, config: NodeConfig, layout: StoreLayout) -> None:
        self._checker = checker
        self._delays = config.schedule.enable
        self._transactions = config.transaction.enable
        self._timer = TimerRule(config.timer, layout.root / "timerwheel")

    def place(self, run: CheckedRun, topic: str, queue_id: int) -> PlacedRun:
        """Where ``run``, which carries special properties, is stored, and in which bytes. Its born hosts stay if they did.

        Raises PutRefusal for a run of several destinations or a property without a meaning, MessageIllegalError when a
        rewritten record would break a limit.
        """
        placed = self._placed(run, topic, queue_id)
        return replace(placed, run=replace(placed.run, moved=True)) if run.moved else placed

    def _placed(self, run: CheckedRun, topic: str, queue_id: int) -> PlacedRun:
        if run.special & _TRANSACTION and (half := self._half(run, topic, queue_id)) is not None:
            return half
        if run.special & _DELAY:
            placed = self._delayed(run, topic, queue_id)
            if placed.topic != topic or not run.special & _TIMER:
                return placed
        if run.special & _TIMER:
            return self._timed(run, topic, queue_id)
        return PlacedRun(run, topic, queue_id)

    def _half(self, run: CheckedRun, topic: str, queue_id: int) -> PlacedRun | None:
        """Half messages in the half topic (spec 12.3); None for messages whose TRAN_MSG is another word than true, and for
        those that are tried again with a delay level: clients before 4.6.1 leave TRAN_MSG in them.

        A delay comes into effect when the transaction is committed.
        """
        starts = starts_of(run)
        names = [Property.TRANSACTION_PREPARED, Property.PRODUCER_GROUP, Property.UNIQUE_KEY, Property.DELAY]
        found = find(run.data, starts, sizes_of(run), names)
        are_halves = {
            found.value(0, index).lower() == b"true"
            and not (_is_delayed(found.value(3, index)) and _tries(run, int(starts[index])))
            for index in range(run.count)
        }
        if True not in are_halves:
            return None
        if False in are_halves:
            raise PutRefusal(
                "MESSAGE_ILLEGAL", "all messages of a run need the same property TRAN_MSG: send them in several"
            )
        if not self._transactions:
            raise PutRefusal("MESSAGE_ILLEGAL", "this node takes no half messages (transaction.enable is false)")
        # What could never be committed is refused now.
        is_delayed = bool(run.special & _DELAY) and self._delayed(run, topic, queue_id).topic != topic
        if run.special & _TIMER and not is_delayed:
            self._timer.properties(run, topic, queue_id, is_stored=False)
        real = f"{Property.REAL_TOPIC}\x01{topic}\x02{Property.REAL_QUEUE_ID}\x01{queue_id}\x02".encode()
        more = []
        for index in range(run.count):
            if not found.value(1, index):
                raise PutRefusal("MESSAGE_ILLEGAL", "a half message needs PGROUP, the group of its producer")
            if not (unique := found.value(2, index)):
                raise PutRefusal("MESSAGE_ILLEGAL", "a half message needs UNIQ_KEY, the id of its transaction")
            more.append(b"%b\x01%b\x02%b" % (Property.TRANSACTION_ID.encode(), unique, real))
        target = self._target(transaction.HALF_TOPIC, 0)
        return PlacedRun(_with_room(readdress(run.data, starts, target, more)), transaction.HALF_TOPIC, 0)

    def place_copy(self, run: CheckedRun, topic: str, queue_id: int, *, delayed: bool) -> PlacedRun:
        """The same for a copy that the node itself made. ``delayed``: it has a delay level. Raises as :meth:`place`."""
        if delayed:
            placed = self._delayed(run, topic, queue_id)
        else:
            placed = PlacedRun(self._readdressed(run, starts_of(run), topic, queue_id, None), topic, queue_id)
        return replace(placed, run=replace(placed.run, moved=True))

    def _delayed(self, run: CheckedRun, topic: str, queue_id: int) -> PlacedRun:
        if not self._delays:
            raise PutRefusal("MESSAGE_ILLEGAL", "this node delivers no delayed messages (schedule.enable is false)")
        found = find(run.data, starts_of(run), sizes_of(run), [Property.DELAY])
        _, firsts = found.alike()
        if len(firsts) > 1:
            raise PutRefusal(
                "MESSAGE_ILLEGAL", "all messages of a run need the same property DELAY: send them in several"
            )
        text = found.value(0, 0)
        try:
            level = delay.parse_level(text.decode("ascii", "replace"))
        except ValueError as error:
            raise PutRefusal("MESSAGE_ILLEGAL", str(error)) from error
        if level == 0:
            return PlacedRun(run, topic, queue_id)
        pairs = {Property.REAL_TOPIC: topic, Property.REAL_QUEUE_ID: str(queue_id)}
        if text != b"%d" % level:
            pairs = {Property.DELAY: str(level), **pairs}
        queue = delay.queue_of(level)
        if run.special & _TIMER or run.moved:  # (nobody looked which properties a copy has)
            run = without_requests(run)
        more = ["".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()]
        moved = self._readdressed(run, starts_of(run), delay.SCHEDULE_TOPIC, queue, more)
        return PlacedRun(moved, delay.SCHEDULE_TOPIC, queue)

    def _timed(self, run: CheckedRun, topic: str, queue_id: int) -> PlacedRun:
        more = self._timer.properties(run, topic, queue_id)
        if more is None:
            return PlacedRun(run, topic, queue_id)
        moved = _with_room(self._readdressed(run, starts_of(run), TIMER_TOPIC, 0, more))
        return PlacedRun(moved, TIMER_TOPIC, 0, due_of(more[0]))

    def _readdressed(
        self, run: CheckedRun, starts: NDArray[np.int64], topic: str, queue_id: int, more: Sequence[bytes] | None
    ) -> CheckedRun:
        return readdress(run.data, starts, self._target(topic, queue_id), more)

    def _target(self, topic: str, queue_id: int) -> NewAddress:
        checker = self._checker
        return NewAddress(topic.encode(), queue_id, len(checker.store_host) == 20, checker.properties_crc)


def _is_delayed(text: bytes) -> bool:
    """Whether a property DELAY asks for a level; :meth:`PutRules._delayed` refuses one that is no number."""
    try:
        return delay.parse_level(text.decode("ascii", "replace")) > 0
    except ValueError:
        return False


def _tries(run: CheckedRun, start: int) -> int:
    """reconsumeTimes of the record at ``start``."""
    flags = int(run.data[start + SYS_FLAG_OFFSET + 3])
    hosts = sum(HOST_V6_BYTES if flags & wide else HOST_BYTES for wide in (SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6))
    at = start + RECONSUME_TIMES_OFFSET + hosts
    return int.from_bytes(run.data[at : at + 4].tobytes(), "big")


def _with_room(run: CheckedRun) -> CheckedRun:
    """``run``, whose messages get more properties later. Raises MessageIllegalError for one that has no room for them."""
    most = MAX_PROPERTIES_BYTES - _ROOM_BYTES
    for index in np.flatnonzero(sizes_of(run) > most).tolist():
        start = int(run.ends[index - 1]) if index else 0
        size = parts_of(run.data[start : int(run.ends[index])].tobytes()).properties_bytes
        if size > most:
            raise MessageIllegalError(
                f"record {index}: its properties have {size} bytes where it waits; {most} leave room for what is added later",
                code="PROPERTIES_SIZE_EXCEEDED",
            )
    return run


_names, _name_ends = forbidden_names()


def count_messages(data: Any) -> int:
    """Number of messages in the client batch ``data`` (any buffer), after checking all of them.

    Raises MessageIllegalError that names the bad message, or for more than MAX_INNER_MESSAGES.

    Checks an inner batch before it is stored: a client batch (spec 2.8) that becomes the body of one record.

    The messages inside are stored exactly as the client encoded them, and nothing reads them again before a consumer does.
    So everything that a separate record is refused for is refused here too.
    """
    out = np.zeros(2, np.int64)
    reason = check_batch(np.frombuffer(data, np.uint8), _names, _name_ends, out)
    count, position = (int(value) for value in out)
    if reason != codes.OK:
        raise MessageIllegalError(f"message {count} of the batch, at byte {position}: {sentence_of(reason)}")
    if count > MAX_INNER_MESSAGES:
        raise MessageIllegalError(f"the batch holds {count} messages, at most {MAX_INNER_MESSAGES} fit one record")
    return count
