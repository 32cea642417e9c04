"""Pull requests, and parked pulls (long polls): by queue for wake-ups, by deadline for time-outs, counted by client.

An answered pull leaves its heap entry behind. The heap is rebuilt when such entries outnumber the live ones, so memory
follows the number of parked pulls, not of all pulls ever parked.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from commitmq.config import ReaderConfig
from commitmq.errors import ProtocolError
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.workers.reader.filters import Filters

QueueKey = tuple[str, int]
Owner = bytes | str

# A deadline further away than this is rounded up to whole steps, so that thousands of idle pulls cause few wake-ups.
_COARSE_FROM_MS = 1_000
_COARSE_STEP_MS = 200
_LIMIT = 1 << 63
# A filter takes this many bytes, and more for each character of its expression.
_FILTER_BYTES = 1_024
_CHARACTER_BYTES = 4
# One client may park this share of all pulls that the reader parks, so that one client cannot keep others from waiting.
_CLIENT_SHARE = 4
_OWNER_CHARACTERS = 255


@dataclass(slots=True, eq=False)
class Pull:
    """One pull request. ``offset`` moves on over messages that the filter rejects; ``asked`` is the requested offset.

    ``client`` gets the answer. ``owner`` is the client whose limits hold: the same, or one of a gateway of this node.
    """

    client: bytes
    request: int
    topic: str
    queue: int
    offset: int
    asked: int
    max_messages: int
    max_bytes: int
    wait_ms: int
    ranges: bool
    wanted: RecordFilter | None
    in_memory: bool = False  # the last read found a memory topic
    log_end: int = 0  # of the log, when the pull came; known once its offset was beyond its queue's end
    group: str | None = None
    incarnation: int | None = None  # of the wanted topic; None: any incarnation
    log_generation: int | None = None  # in which the offset was learnt; -1: not known, or judged; None: not asked for
    deadline_ms: int = 0
    done: bool = False
    awaits_log: bool = False  # a parked pull for a topic in the log, not for a memory topic
    filter_bytes: int = 0  # upper bound of its filter's memory
    is_woken: bool = False  # it will be looked at again in this or the next turn
    owner: Owner = b""
    user: str | None = None  # whose quotas hold; known only while there are rates

    def __post_init__(self) -> None:
        self.owner = self.owner or self.client

    @property
    def key(self) -> QueueKey:
        return self.topic, self.queue


def parse_pull(
    client: bytes, header: dict[str, Any], limits: ReaderConfig, filters: Filters, *, is_local: bool = False
) -> Pull:
    """The pull that ``header`` asks for, its values cut down to ``limits``. Whoever is ``is_local`` may pull for others.

    Raises ProtocolError: INVALID_PARAMETER, or FILTER_FAILED for a plugin's failure.
    """
    mode = header.get("mode", "bytes")
    if mode not in ("bytes", "ranges"):
        raise ProtocolError("INVALID_PARAMETER", "mode must be bytes or ranges")
    expression, kind = header.get("filter"), header.get("filter_type")
    group = header.get("group")
    for name, value in (("filter", expression), ("filter_type", kind), ("group", group)):
        if value is not None and type(value) is not str:
            raise ProtocolError("INVALID_PARAMETER", f"{name} must be a string")
    offset = integer_field(header, "offset")
    return Pull(
        client=client,
        request=header["id"],
        topic=text_field(header, "topic"),
        queue=integer_field(header, "queue"),
        offset=offset,
        asked=offset,
        max_messages=min(limits.max_pull_messages, integer_field(header, "max_messages", limits.max_pull_messages, 1)),
        max_bytes=min(limits.max_pull_bytes, integer_field(header, "max_bytes", limits.max_pull_bytes, 1)),
        wait_ms=min(limits.max_wait_ms, integer_field(header, "wait_ms", 0, 0)),
        ranges=mode == "ranges",
        wanted=filters.get(kind, expression),
        group=group,
        filter_bytes=_FILTER_BYTES + _CHARACTER_BYTES * len(expression) if expression else 0,
        incarnation=incarnation_field(header),
        log_generation=None
        if header.get("log_generation") is None
        else integer_field(header, "log_generation", least=-1),
        owner=text_field(header, "client")[:_OWNER_CHARACTERS] if is_local and "client" in header else b"",
    )


def integer_field(header: dict[str, Any], name: str, default: int | None = None, least: int | None = None) -> int:
    """An integer of a request, ``default`` when it is absent. Raises ProtocolError INVALID_PARAMETER.

    All such integers are offsets, times (ms), sizes or counts, which have 63 bits everywhere in the store.
    """
    value = header.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise ProtocolError("INVALID_PARAMETER", f"{name} must be an integer")
    if not -_LIMIT <= value < _LIMIT:
        raise ProtocolError("INVALID_PARAMETER", f"{name} is out of range")
    if least is not None and value < least:
        raise ProtocolError("INVALID_PARAMETER", f"{name} must be {least} or more, not {value}")
    return value


def incarnation_field(header: dict[str, Any]) -> int | None:
    """The incarnation of a topic that a request names, or None. Raises ProtocolError INVALID_PARAMETER."""
    return None if header.get("incarnation") is None else integer_field(header, "incarnation", least=0)


def text_field(header: dict[str, Any], name: str) -> str:
    """A non-empty string of a request. Raises ProtocolError INVALID_PARAMETER."""
    value = header.get(name)
    if type(value) is not str or not value:
        raise ProtocolError("INVALID_PARAMETER", f"{name} must be a string")
    return value


@dataclass(slots=True)
class ParkedPulls:
    """The parked pulls of one reader: at most ``limit``, with filters of ``limit_bytes``; a quarter of both for one
    client.
    """

    limit: int
    limit_bytes: int
    _by_queue: dict[QueueKey, list[Pull]] = field(default_factory=dict)
    _heap: list[tuple[int, int, Pull]] = field(default_factory=list)
    _by_client: dict[Owner, int] = field(default_factory=dict)
    _bytes_by_client: dict[Owner, int] = field(default_factory=dict)
    _bytes: int = 0
    _count: int = 0
    _log_count: int = 0
    _used: bool = False
    _serial: int = 0
    woken: deque[Pull] = field(default_factory=deque)
    """Pulls to look at again; some may have been answered meanwhile."""

    def __len__(self) -> int:
        return self._count

    @property
    def awaits_log(self) -> bool:
        """Whether any pull waits for messages of the log (messages of memory topics do not go through reput)."""
        return self._log_count > 0

    def has_room(self, pull: Pull) -> bool:
        client, size = pull.owner, pull.filter_bytes
        return (
            self._count < self.limit
            and self._by_client.get(client, 0) < max(1, self.limit // _CLIENT_SHARE)
            and (
                not size
                or (
                    self._bytes + size <= self.limit_bytes
                    and self._bytes_by_client.get(client, 0) + size <= self.limit_bytes // _CLIENT_SHARE
                )
            )
        )

    def add(self, pull: Pull, now_ms: int) -> None:
        """Park ``pull`` for its ``wait_ms``."""
        deadline = now_ms + pull.wait_ms
        if pull.wait_ms >= _COARSE_FROM_MS:
            deadline = -(-deadline // _COARSE_STEP_MS) * _COARSE_STEP_MS
        pull.deadline_ms = deadline
        self._by_queue.setdefault(pull.key, []).append(pull)
        self._by_client[pull.owner] = self._by_client.get(pull.owner, 0) + 1
        if pull.filter_bytes:
            self._bytes += pull.filter_bytes
            self._bytes_by_client[pull.owner] = self._bytes_by_client.get(pull.owner, 0) + pull.filter_bytes
        self._count += 1
        pull.awaits_log = not pull.in_memory
        self._log_count += pull.awaits_log
        self._used = True
        self._serial += 1
        heapq.heappush(self._heap, (deadline, self._serial, pull))

    def was_used(self) -> bool:
        """Whether any pull is parked, or was parked since the last call."""
        used = self._used or self._count > 0
        self._used = False
        return used

    def waiting(self, key: QueueKey) -> list[Pull]:
        """The pulls that wait for a queue, oldest first (a copy: they may be removed meanwhile)."""
        found = self._by_queue.get(key)
        return [] if found is None else list(found)

    def queues(self) -> list[QueueKey]:
        """Queues that a pull waits for."""
        return list(self._by_queue)

    def wake(self, key: QueueKey) -> None:
        """Have the pulls that wait for a queue looked at again."""
        for pull in self.waiting(key):
            if not pull.is_woken:
                pull.is_woken = True
                self.woken.append(pull)

    def wake_topics(self, names: set[str]) -> None:
        """Have the pulls that wait for a queue of these topics looked at again."""
        for key in self.queues():
            if key[0] in names:
                self.wake(key)

    def remove(self, pull: Pull) -> None:
        """Take a parked pull out; it is about to be answered."""
        pull.done = True
        waiting = self._by_queue[pull.key]
        waiting.remove(pull)
        if not waiting:
            del self._by_queue[pull.key]
        left = self._by_client[pull.owner] - 1
        if left:
            self._by_client[pull.owner] = left
        else:
            del self._by_client[pull.owner]
        if pull.filter_bytes:
            self._bytes -= pull.filter_bytes
            left_bytes = self._bytes_by_client[pull.owner] - pull.filter_bytes
            if left_bytes:
                self._bytes_by_client[pull.owner] = left_bytes
            else:
                del self._bytes_by_client[pull.owner]
        self._count -= 1
        self._log_count -= pull.awaits_log
        if len(self._heap) > 2 * self._count + 1_024:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)

    def next_deadline_ms(self) -> int | None:
        """When the next pull's time is up."""
        heap = self._heap
        while heap and heap[0][2].done:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_ms: int) -> Iterator[Pull]:
        """Remove and give the pulls whose time is up, in the order of their deadlines."""
        while (deadline := self.next_deadline_ms()) is not None and deadline <= now_ms:
            pull = heapq.heappop(self._heap)[2]
            self.remove(pull)
            yield pull
