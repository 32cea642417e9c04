"""Makes runs for other queues from records of the log (:class:`RunMaker`), and appends them
(:class:`Delivery`, by :mod:`commitmq.workers.runtime.run_mover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.errors import OffsetOutOfRangeError, ProtocolError
from commitmq.format.constants import SYS_FLAG_OFFSET, Property, SysFlag
from commitmq.format.properties import decode_properties, encode_properties
from commitmq.semantics.derived import TIMES_OF_TIMER, without
from commitmq.semantics.retry import UNDELIVERED_GROUP, UNDELIVERED_TOPIC
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.readdressing import NewAddress, find, readdress, starts_of
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.run_mover import (
    CoordinatorLine,
    MovedRun,
    PutMessageResult,
    RunMover,
    is_of_message,
    isolated,
)
from commitmq.workers.runtime.topic_view import DeletedTopics

Integers = NDArray[np.int64]
Report = Callable[[str, int], None]
"""Sets a message aside: told why it is not moved, and its physical offset."""

_Made: TypeAlias = tuple[NewAddress, CheckedRun, Sequence[int]]
"""A run, for where, and where in the log its messages come from."""

_MOST_RUN_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 16 << 20
_GROWTH_BYTES: Final = 256  # of a record: its topic's name, a CRC, some properties
_HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"


def few_enough(sizes: Integers) -> int:
    """How many of the first messages are few enough bytes to be taken at once: they are copied several times on their way."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return max(1, int(np.searchsorted(ends, _MOST_BYTES, side="right"))) if len(sizes) else 0


class RunMaker:
    """Makes runs from the records of ``log``.

    A message whose copy does not fit goes without what is optional, or else to ``%DLQ%CMQ_UNDELIVERED`` as it is
    (:mod:`commitmq.semantics.derived`). One that cannot be moved at all is set aside by ``report``. One whose topic was
    ``deleted`` since it was stored is dropped.
    """

    def __init__(
        self, log: CommitLog, config: NodeConfig, report: Report, deleted: DeletedTopics | None = None
    ) -> None:
        self._log = log
        self._report = report
        self._deleted = deleted
        self._store_v6 = ":" in config.network.store_host
        self._properties_crc = config.commit_log.append_properties_crc
        self._max_run_bytes = min(_MOST_RUN_BYTES, config.commit_log.max_run_bytes)

    def by_segment(
        self, places: Integers, *, silent: bool = False
    ) -> Iterator[tuple[int, NDArray[np.uint8], Integers]]:
        """``(base, data, which)`` of each segment that is still there; ``which`` are the indices of its records.
        ``silent``: another look at the same records reports those that have expired.
        """
        bases = places - places % self._log.segment_bytes
        for base in np.unique(bases).tolist():
            which = np.flatnonzero(bases == base)
            try:
                data = np.frombuffer(self._log.read(base, self._log.segment_bytes), np.uint8)
            except OffsetOutOfRangeError:
                for place in [] if silent else places[which].tolist():
                    self._report("its record has expired", place)
                continue
            yield base, data, which

    def runs(
        self,
        base: int,
        data: NDArray[np.uint8],
        positions: Integers,
        sizes: Integers,
        *,
        more: Sequence[bytes] | None = None,
        to: tuple[str, int] | None = None,
    ) -> Iterator[MovedRun]:
        """The messages at ``positions`` of ``data``, the segment at ``base``, as runs, each of one queue and host layout.

        A message goes ``to`` a topic and queue, or to its REAL_TOPIC and REAL_QID. ``more``: encoded properties to put
        into those of each message; the properties are then in the order of a Java HashMap.
        """
        lives = self._lives(base, data, positions, sizes)
        if lives is not None:
            positions, sizes = positions[lives], sizes[lives]
            more = None if more is None else [more[index] for index in np.flatnonzero(lives).tolist()]
        if not len(positions):
            return
        found = find(data, positions, sizes, [Property.REAL_TOPIC, Property.REAL_QUEUE_ID])
        if to is None:
            numbers, firsts = found.alike()
        else:
            numbers, firsts = np.zeros(len(positions), np.int64), [0]
        wide = (data[positions + SYS_FLAG_OFFSET + 3] & SysFlag.BORN_HOST_V6) != 0
        for number, first in enumerate(firsts):
            topic, queue = _address(found.value(0, first), found.value(1, first)) if to is None else to
            for born_v6 in (False, True):
                mine = (numbers == number) & (wide == born_v6)
                good = mine & found.whole
                if topic is None or topic == _HALF_TOPIC:
                    good &= False
                for place in positions[mine & ~good].tolist():
                    self._report("its record does not say where it belongs", base + place)
                which = np.flatnonzero(good)
                for part in _parts(sizes[which], self._max_run_bytes):
                    added = None if more is None else [more[index] for index in which[part].tolist()]
                    for aim, run, places in self._readdressed(
                        base, data, positions[which][part], self._target(topic or "", queue), added
                    ):
                        yield MovedRun(aim.topic.decode(), aim.queue_id, run, born_v6, places)

    def _lives(
        self, base: int, data: NDArray[np.uint8], positions: Integers, sizes: Integers
    ) -> NDArray[np.bool_] | None:
        """Which of the messages did not go with their topic; None for all. A message that was sent back belongs to the topic
        that it came from first, too.
        """
        floors = {} if self._deleted is None else self._deleted.floors()
        if self._deleted is None or not floors or not len(positions):
            return None
        found = find(data, positions, sizes, [Property.REAL_TOPIC, Property.RETRY_TOPIC])
        numbers, firsts = found.alike()
        names = ([found.value(which, first).decode("utf-8", "replace") for which in (0, 1)] for first in firsts)
        least = np.array([max(floors.get(name, 0) for name in pair) for pair in names], np.int64)
        lives: NDArray[np.bool_] = positions + base >= least[numbers]
        if dropped := len(lives) - int(lives.sum()):
            self._deleted.drop(dropped)
        return lives

    def _target(self, topic: str, queue: int) -> NewAddress:
        return NewAddress(topic.encode(), queue, self._store_v6, self._properties_crc)

    def _readdressed(
        self, base: int, data: NDArray[np.uint8], positions: Integers, target: NewAddress, more: Sequence[bytes] | None
    ) -> list[_Made]:
        """The messages as one run for ``target``; around one that does not fit, as several, and that one as what fits."""
        others: list[_Made] = []

        def made(which: Sequence[int], aim: NewAddress, added: Sequence[bytes] | None) -> _Made:
            chosen = positions[which[0] : which[-1] + 1]
            run = readdress(data, np.ascontiguousarray(chosen), aim, added)
            return aim, run, (chosen + base).tolist()

        def together(which: Sequence[int]) -> list[_Made]:
            return [made(which, target, None if more is None else [more[index] for index in which])]

        def alone(index: int, error: Exception) -> None:
            tries = [] if more is None else [(target, one) for one in _lighter(more[index])]
            for aim, added in (*tries, (self._target(UNDELIVERED_TOPIC, 0), None)):
                try:
                    others.append(made([index], aim, None if added is None else [added]))
                    return
                except Exception as failure:
                    if not is_of_message(failure):
                        raise
            self._report(str(error) or repr(error), base + int(positions[index]))

        return isolated(range(len(positions)), together, alone) + others


def _lighter(more: bytes) -> list[bytes]:
    """Encoded properties that are to be added, without what is optional of them."""
    found = without(decode_properties(more), TIMES_OF_TIMER)
    return [encode_properties(one, buckets=None) for one in found]


def _address(topic: bytes, queue: bytes) -> tuple[str | None, int]:
    try:
        return (topic.decode() or None), int(queue)
    except ValueError:
        return None, 0


def _parts(sizes: Integers, max_run_bytes: int) -> Iterator[slice]:
    """Cuts into runs."""
    ends = np.cumsum(sizes + _GROWTH_BYTES)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_run_bytes, side="right")))
        yield slice(start, stop)
        start = stop


def one_by_one(one: MovedRun) -> Iterator[MovedRun]:
    start = 0
    for number, end in enumerate(one.run.ends.tolist()):
        run = CheckedRun(one.run.data[start:end], np.array([end - start], np.int64), 1)
        yield MovedRun(one.topic, one.queue_id, run, one.born_v6, one.places[number : number + 1])
        start = end


def unique_key(one: MovedRun) -> str:
    """The unique key of the first message of a run, for people who look for it."""
    found = find(one.run.data, np.zeros(1, np.int64), one.run.ends[:1], [Property.UNIQUE_KEY])
    return found.value(0, 0).decode("utf-8", "replace")


RETRY_MS: Final = 100
_MAX_REPORTS: Final = 16  # in the log, between two times that positions are written
_OF_THE_QUEUE: Final = ("TOPIC_NOT_EXIST", "NO_PERMISSION", "INVALID_PARAMETER")


class Delivery:
    """Appends what a mover delivers, and keeps what the node refuses permanently: as dead letters of the group
    CMQ_UNDELIVERED.

    A topic may take a message no more when its time comes: it is not writable, or has fewer queues. RocketMQ logs such
    a message and drops it. Here it goes to ``%DLQ%CMQ_UNDELIVERED``, with its properties, among them REAL_TOPIC and
    REAL_QID. It counts as delivered then, also for a mover that looks into the log for what it has moved: a dead letter
    has a copy's key. A message of which the node takes no dead letter either is set aside.

    ``mover`` is the way to the writer. ``delivered`` and ``dead_letters`` count messages.
    """

    def __init__(self, context: WorkerContext, name: str, report: Report) -> None:
        """``name``: that of the failpoints. ``report`` sets a message aside."""
        self._context, self._report = context, report
        self._name = name
        self.mover = RunMover(context)
        self._line = CoordinatorLine(context)
        self.delivered = self.dead_letters = 0
        self._reports = 0
        self._retry_at_ms = 0

    @property
    def may_try_again(self) -> bool:
        """Whether it is time to append what was refused."""
        return monotonic_ms() >= self._retry_at_ms

    def append(self, runs: Sequence[MovedRun]) -> list[MovedRun]:
        """Append ``runs``, and wait until the last one is flushed. Returns those to append later. Raises WriterLost."""
        if failpoints.ACTIVE:
            failpoints.hit(f"{self._name}.before_put")
        left: list[MovedRun] = []
        for one, put in zip(runs, self.mover.put(runs), strict=True):
            if not put.code:
                self._count(one)
            elif put.retry:
                left.append(one)
            else:
                left += self._refused(one, put)
        if failpoints.ACTIVE:
            failpoints.hit(f"{self._name}.after_put")
        if left:
            self._retry_at_ms = monotonic_ms() + RETRY_MS
        return left

    def _count(self, one: MovedRun) -> None:
        if one.topic != UNDELIVERED_TOPIC:
            self.delivered += one.run.count
            return
        self.dead_letters += one.run.count
        self._context.tell(dead_letters=self.dead_letters)

    def _refused(self, one: MovedRun, put: PutMessageResult) -> Iterable[MovedRun]:
        """What to append instead of ``one``, which was refused permanently."""
        if one.run.count > 1 and put.code not in _OF_THE_QUEUE:
            return one_by_one(one)  # one of them is not as it should be
        why = f"{put.code}: {put.sentence}"
        if one.topic == UNDELIVERED_TOPIC and put.code != "TOPIC_NOT_EXIST":
            return self._set_aside(one, why)
        try:
            if not self._make_topic() and one.topic == UNDELIVERED_TOPIC:
                return self._set_aside(one, why)
            letter = one if one.topic == UNDELIVERED_TOPIC else self._letter(one)
        except ProtocolError:  # the coordinator is away
            return [one]
        except MessageIllegalError as error:
            if one.run.count > 1:
                return one_by_one(one)
            return self._set_aside(one, f"{why}; {error}")
        self._tell(f"{why}; the first one's unique key is {unique_key(one)}", one)
        return [letter]

    def _letter(self, one: MovedRun) -> MovedRun:
        config = self._context.config
        has_crc = config.commit_log.append_properties_crc
        aim = NewAddress(UNDELIVERED_TOPIC.encode(), 0, ":" in config.network.store_host, has_crc)
        return MovedRun(UNDELIVERED_TOPIC, 0, readdress(one.run.data, starts_of(one.run), aim), one.born_v6, one.places)

    def _set_aside(self, one: MovedRun, why: str) -> list[MovedRun]:
        for place in one.places:
            self._report(why, place)
        return []

    def _make_topic(self) -> bool:
        """Whether the topic of dead letters is there, as it should be. Raises ProtocolError when it may be made later."""
        (answer,) = self._line.ask([{"op": "topic.create", "topic": UNDELIVERED_TOPIC, "queues": 1}])
        if not answer.get("ok") and "retry_after_ms" in answer:
            raise ProtocolError(str(answer.get("code")), str(answer.get("error")))
        return bool(answer.get("ok"))

    def _tell(self, why: str, one: MovedRun) -> None:
        self._reports += 1
        if self._reports <= _MAX_REPORTS and one.topic != UNDELIVERED_TOPIC:
            self._context.log.error(
                f"messages become dead letters of {UNDELIVERED_GROUP}", topic=one.topic, count=one.run.count, why=why
            )

    def report_again(self) -> None:
        """The log may have further reports."""
        self._reports = 0

    def close(self) -> None:
        self.mover.close()
        self._line.close()
