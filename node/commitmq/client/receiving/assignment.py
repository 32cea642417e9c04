"""Which queues a consumer reads, where it stands in each, and what a thread may change of it while another polls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from commitmq.client import checks
from commitmq.client.bell import Bell
from commitmq.client.receiving.room import Room
from commitmq.errors import RequestError
from commitmq.protocol.connection import Channel

if TYPE_CHECKING:
    from commitmq.client.receiving.batch import MessageBatch, Part

Queue = tuple[str, int]  # topic, queue id
Start = str | datetime | int


class Gap(NamedTuple):
    """A consumer could not read on where it stood: it went from ``from_offset`` to ``to_offset`` because of ``reason``.

    ``reason`` is the node's status: OFFSET_TOO_SMALL (messages expired), OFFSET_OVERFLOW_BADLY (the offset was beyond
    the queue's end), MESSAGE_WAS_REMOVING, NO_MATCHED_LOGIC_QUEUE.
    """

    topic: str
    queue: int
    from_offset: int
    to_offset: int
    reason: str


@dataclass(slots=True, eq=False)
class Chunk:
    """An answer, or what is left of it, that was not handed out yet. ``next_offset`` is where the queue goes on behind it.

    ``is_taken``: a batch with all of it was made, so what comes behind it may be asked for.
    """

    parts: list[Part]
    count: int
    next_offset: int
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class QueueState:
    """One queue. Offsets are queue offsets, each the *next* message's.

    ``delivered``: behind what poll has returned; ``confirmed``: what ``delivered`` was when poll was last called, so what
    the program has certainly seen and worked on; ``committed``: what the group's offset was last known to be (-1: never
    committed); ``sent``: what was last asked to be committed, whatever became of it; ``settled``: what ``delivered`` was at
    the last commit or at the start, so nothing handed out is uncommitted while the two are equal. ``incarnation``: of the
    topic that all of these are offsets in (-1: not known); it is told with every pull and commit, so that none of them can
    mean another topic of the name.
    """

    topic: str
    queue_id: int
    delivered: int
    confirmed: int
    committed: int
    settled: int
    sent: int = -1
    request: int = -1  # id of the pull under way
    channel: int = -1  # reader that got it
    answer_by: float = 0.0
    retry_at: float = 0.0
    chunks: deque[Chunk] = field(default_factory=deque)  # what came and was not handed out; two at most
    end: int = -1  # the queue's end as the last answer told it
    use_bytes: bool = False  # this queue's segments cannot be mapped here
    careful_until: int = -1  # below this queue offset one message is asked for at a time: one of them is damaged
    revoked_at: float = 0.0  # time.monotonic() when the coordinator asked for it back
    incarnation: int = -1
    is_proven: bool = True  # False while `delivered` is what somebody said, and the node did not confirm that it exists
    is_announced: bool = False  # on_assign has been told of it
    is_paused: bool = False
    room: Room | None = None  # no more than that is handed out now; None: no limit

    @property
    def key(self) -> Queue:
        return self.topic, self.queue_id

    @property
    def position(self) -> int:
        """The next to ask the node for."""
        return self.chunks[-1].next_offset if self.chunks else self.delivered

    def move_to(self, offset: int) -> None:
        """The queue goes on at ``offset``; what is skipped, if anything, counts as handed out with what is before it."""
        if self.chunks:
            self.chunks[-1].next_offset = offset
        else:
            self.delivered = offset

    def forget(self) -> None:
        """What was pulled is not wanted any more."""
        self.request = -1
        self.chunks.clear()


class Portion(NamedTuple):
    """What a batch has of one queue: all of ``chunk``, or all but ``rest``, before which ``delivered`` is reached."""

    state: QueueState
    chunk: Chunk
    rest: Chunk | None = None
    delivered: int = -1

    def hand_out(self) -> None:
        """Count it as handed out. Doing it twice is the same as once."""
        chunks = self.state.chunks
        if not chunks or chunks[0] is not self.chunk:
            return
        # In this order: whoever is interrupted between the two does both again.
        if self.rest is None:
            self.state.delivered = self.chunk.next_offset
            chunks.popleft()
        else:
            self.state.delivered = self.delivered
            self.rest.next_offset = self.chunk.next_offset
            chunks[0] = self.rest


class Taken(NamedTuple):
    """A batch, and what it is made of. It counts as handed out from the moment when it is ``Assignment.returned``."""

    batch: MessageBatch
    portions: list[Portion]

    def has(self, state: QueueState) -> bool:
        return any(portion.state is state for portion in self.portions)


@dataclass
class Assignment:
    """The queues of one consumer. ``lock`` guards everything; :meth:`ring` wakes a poll that waits.

    A batch is handed out by one store: ``returned`` is set in the statement before poll returns it. Until then nothing
    of what it was made of has changed, so that an exception from anywhere (Ctrl-C, a signal handler, no descriptors)
    leaves it to the next poll; what follows from it is done by :meth:`settle`, which comes first in whatever looks.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    owned: dict[Queue, QueueState] = field(default_factory=dict)
    ready: dict[Queue, QueueState] = field(default_factory=dict)  # those with chunks, the next in turn first
    making: Taken | None = None  # the last batch that was made, handed out or not
    returned: Taken | None = None
    lost: list[Queue] = field(default_factory=list)  # announced, and given back without the program
    tells: bool = False  # the program wants to be told before a queue is given back
    polled_at: float = field(default_factory=time.monotonic)
    is_polling: bool = False
    room: Room | None = None  # of the queues that are added

    def __post_init__(self) -> None:
        self.bell = Bell()

    def ring(self) -> None:
        with self.lock:
            self.bell.ring()

    def close(self) -> None:
        with self.lock:
            self.bell.close()

    def settle(self) -> None:
        """What follows from the last batch that poll returned."""
        with self.lock:
            taken = self.returned
            if taken is None:
                return
            for portion in taken.portions:
                portion.hand_out()
                state = portion.state
                # Its turn is over: others come first. (A state of a former assignment is in nobody's way.)
                if self.ready.get(state.key) is state:
                    del self.ready[state.key]
                if state.chunks and self.owned.get(state.key) is state:
                    self.ready[state.key] = state
            self.making = self.returned = None

    def confirm(self) -> None:
        """The program is done with all it was given."""
        with self.lock:
            self.settle()
            for state in self.owned.values():
                if state.is_proven:
                    state.confirmed = state.delivered

    def is_in_hand(self, state: QueueState) -> bool:
        """Whether something was handed out, or is about to be, that is not committed."""
        with self.lock:
            self.settle()
            return state.delivered != state.settled or (self.making is not None and self.making.has(state))

    def drop(self, state: QueueState, *, told: bool = False) -> None:
        """Read the queue no longer; unless the program was ``told``, it will be."""
        with self.lock:
            if self.owned.get(state.key) is state:
                del self.owned[state.key]
                if state.is_announced and not told:
                    self.lost.append(state.key)
            if self.ready.get(state.key) is state:
                del self.ready[state.key]
            state.forget()

    def add(self, states: Iterable[QueueState]) -> None:
        with self.lock:
            for state in states:
                state.room = self.room
                self.owned[state.key] = state
        self.ring()

    def keys(self) -> list[Queue]:
        with self.lock:
            return list(self.owned)

    def of_old_incarnations(self, incarnations: Mapping[str, int]) -> list[Queue]:
        """The queues of topics that were deleted and made anew: ``incarnations`` are today's."""
        with self.lock:
            return [
                key
                for key, state in self.owned.items()
                if state.incarnation >= 0 and incarnations.get(key[0], state.incarnation) != state.incarnation
            ]

    def incarnations(self, queues: Iterable[Queue]) -> dict[str, int]:
        """The incarnations that the offsets in these queues belong to, where they are known."""
        with self.lock:
            states = [self.owned[key] for key in queues if key in self.owned]
        return {state.topic: state.incarnation for state in states if state.incarnation >= 0}


class Begin(NamedTuple):
    """Where to begin in a queue: ``offset`` was asked for; ``committable`` is the same, or the queue's end before it."""

    offset: int
    committable: int


def start_offsets(
    reader: Channel, queues: Iterable[Queue], start: Start, *, timeout_s: float, incarnations: Mapping[str, int]
) -> dict[Queue, Begin]:
    """Where to begin in ``queues`` that have no committed offset, of topics of these ``incarnations``, where they are known.

    In a queue that the reader does not know yet everything is to come. Raises ProtocolError.
    """
    by_topic: dict[str, list[int]] = {}
    for topic, queue in queues:
        by_topic.setdefault(topic, []).append(queue)
    result: dict[Queue, Begin] = {}
    for topic, ids in by_topic.items():
        fields: dict[str, Any] = {"topic": topic, "queues": ids}
        if isinstance(start, datetime):
            fields["timestamp"] = max(int(start.timestamp() * 1000), 0)
        if topic in incarnations:
            fields["incarnation"] = incarnations[topic]
        try:
            try:
                answer, _ = reader.request("offsets", fields, timeout_s=timeout_s)
            except RequestError as error:
                if error.code != "INVALID_PARAMETER":
                    raise
                # The topic got more queues, or fewer, and the two we ask do not know of it at the same time.
                answer, _ = reader.request("offsets", {**fields, "queues": None}, timeout_s=timeout_s)
        except RequestError as error:
            if error.code != "TOPIC_NOT_EXIST":
                raise
            # The coordinator knows it, the reader is about to: it is new, so everything in it is to come.
            result.update({(topic, queue): Begin(0, 0) for queue in ids})
            continue
        for queue, low, high, by_time in answer["queues"]:
            if isinstance(start, int):
                result[topic, queue] = Begin(start, min(start, high))
                continue
            if isinstance(start, datetime):
                offset = by_time if by_time is not None else low
            else:
                offset = high if start == "latest" else low
            result[topic, queue] = Begin(offset, offset)
        for queue in ids:
            result.setdefault((topic, queue), Begin(0, 0))
    return result


def for_new_queues(start: Start) -> Start:
    """Where to begin in a queue that came after ``start`` was said: all of it is new, and none of it is skipped."""
    return start if isinstance(start, datetime) else "earliest"


def check_start(start: Start) -> Start:
    """``start`` itself if it is one. Raises ValueError."""
    if isinstance(start, bool) or not isinstance(start, str | datetime | int):
        raise ValueError(f"start must be 'earliest', 'latest', a datetime or an offset, not {start!r}")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise ValueError(f"start must be 'earliest', 'latest', a datetime or an offset, not {start!r}")
    if isinstance(start, int):
        return checks.offset("a start offset", start)
    if isinstance(start, datetime):
        try:
            start.timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(f"start must be a time that the clock can tell, not {start!r}: {error}") from None
    return start


def new_state(queue: Queue, offset: int, committed: int, incarnation: int = -1, *, proven: bool = True) -> QueueState:
    """A queue that is read from ``offset`` on. Unless that is ``proven`` to be a place in it, it is not committed."""
    confirmed = offset if proven else committed
    return QueueState(
        queue[0], queue[1], offset, confirmed, committed, offset, incarnation=incarnation, is_proven=proven
    )
