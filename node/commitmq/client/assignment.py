"""Which queues a consumer reads, where it stands in each, and what a thread may change of it while another polls."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from commitmq.client.connection import Channel
from commitmq.errors import ProtocolError

if TYPE_CHECKING:
    from commitmq.client.batch import Part

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


@dataclass(slots=True)
class Chunk:
    """An answer that was not handed out yet. ``next_offset`` is where the queue goes on behind it."""

    parts: list[Part]
    count: int
    next_offset: int


@dataclass(slots=True)
class QueueState:
    """One queue. Offsets are queue offsets, each the *next* message's.

    ``position``: the next to ask the node for; ``delivered``: behind what poll has returned; ``confirmed``: what
    ``delivered`` was when poll was last called, so what the program has certainly seen and worked on; ``committed``:
    what the group's offset was last known to be (-1: never committed); ``settled``: what ``delivered`` was at the last
    commit or at the start, so nothing handed out is uncommitted while the two are equal.
    """

    topic: str
    queue_id: int
    position: int
    delivered: int
    confirmed: int
    committed: int
    settled: int
    request: int = -1  # id of the pull under way
    channel: int = -1  # reader that got it
    answer_by: float = 0.0
    retry_at: float = 0.0
    chunk: Chunk | None = None
    end: int = -1  # the queue's end as the last answer told it
    use_bytes: bool = False  # this queue's segments cannot be mapped here
    careful_until: int = -1  # below this queue offset one message is asked for at a time: one of them is damaged
    revoked_at: float = 0.0  # time.monotonic() when the coordinator asked for it back

    @property
    def key(self) -> Queue:
        return self.topic, self.queue_id


@dataclass
class Assignment:
    """The queues of one consumer. ``lock`` guards everything; :meth:`ring` wakes a poll that waits."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    owned: dict[Queue, QueueState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self.bell, 1)

    def clear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def close(self) -> None:
        os.close(self.bell)

    def add(self, states: Iterable[QueueState]) -> None:
        with self.lock:
            for state in states:
                self.owned[state.key] = state
        self.ring()

    def keys(self) -> list[Queue]:
        with self.lock:
            return list(self.owned)


def start_offsets(reader: Channel, queues: Iterable[Queue], start: Start, *, timeout_s: float) -> dict[Queue, int]:
    """Where to begin in ``queues`` that have no committed offset. Raises ProtocolError."""
    by_topic: dict[str, list[int]] = {}
    for topic, queue in queues:
        by_topic.setdefault(topic, []).append(queue)
    result: dict[Queue, int] = {}
    for topic, ids in by_topic.items():
        if isinstance(start, int):
            result.update({(topic, queue): start for queue in ids})
            continue
        fields: dict[str, Any] = {"topic": topic, "queues": ids}
        if isinstance(start, datetime):
            fields["timestamp"] = int(start.timestamp() * 1000)
        try:
            answer, _ = reader.request("offsets", fields, timeout_s=timeout_s)
        except ProtocolError as error:
            if error.code != "TOPIC_NOT_EXIST":
                raise
            # The coordinator knows it, the reader is about to: it is new, so everything in it is to come.
            result.update({(topic, queue): 0 for queue in ids})
            continue
        for queue, low, high, by_time in answer["queues"]:
            if isinstance(start, datetime):
                result[topic, queue] = by_time if by_time is not None else low
            else:
                result[topic, queue] = high if start == "latest" else low
    return result


def check_start(start: Start) -> Start:
    """``start`` itself if it is one. Raises ValueError."""
    if isinstance(start, bool) or not isinstance(start, str | datetime | int):
        raise ValueError(f"start must be 'earliest', 'latest', a datetime or an offset, not {start!r}")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise ValueError(f"start must be 'earliest', 'latest', a datetime or an offset, not {start!r}")
    if isinstance(start, int) and start < 0:
        raise ValueError(f"a start offset must not be negative: {start}")
    return start


def new_state(queue: Queue, offset: int, committed: int) -> QueueState:
    return QueueState(queue[0], queue[1], offset, offset, offset, committed, offset)
