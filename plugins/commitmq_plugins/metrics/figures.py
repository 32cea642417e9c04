"""Everything that one answer is made of, gathered at one time, and the node's health.

* what all processes of the node have counted: their tables, added up where several count the same;
* answers of processes, asked one after the other, each with a deadline;
* processor time, memory, descriptors, restarts and heartbeats of processes. Proportional memory is what ``status``
  says: the kernel finds it by walking all pages of a process, so the supervisor measures it for a small share of its
  time;
* how far groups are behind: in messages, and in time, from the store time of the oldest message that waits. Read from
  the ConsumeQueues and the log themselves, as a reader does, so it costs the node's processes nothing. A figure that
  cannot be read (a queue under repair, a record that expired in the meantime) is None, and not shown.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import psutil
import zmq

from commitmq.control import WORKER_SLOTS, ControlBlock, DiskFlag, DispatcherWord, Word, WorkerState, WorkerWord
from commitmq.counting import SUFFIX, CountReader, Described
from commitmq.errors import CommitMQError, NodeUnavailableError, StoreError
from commitmq.plugin import WorkerContext
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory_files import MemoryTopics
from commitmq.store.metadata.topic_files import WatchedTable
from commitmq.store.queues.batch_consume_queue import BatchQueueReader
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import PullStatus
from commitmq.store.shared_memory import memory_folder

_NAMES: Final = ("topic", "group", "consumer_group")

Labels = tuple[str, ...]


@dataclass(slots=True)
class CountedMetric:
    """One metric: what it is, and the values of each row by the values of its labels."""

    described: Described
    rows: dict[Labels, list[int]] = field(default_factory=dict)

    @property
    def is_of_names(self) -> bool:
        """Whether there is a row for each topic or group: clients can make any number of these."""
        return any(label in _NAMES for label in self.described.labels)

    def labels(self, values: Labels) -> dict[str, str]:
        return dict(zip(self.described.labels, values, strict=True))


@dataclass(slots=True)
class _CountSample:
    values: int
    at_s: float


class CountFiles:
    """The tables in ``folder``. Not thread-safe."""

    def __init__(self, folder: Path, idle_after_s: float) -> None:
        self._folder, self._idle_after_s = folder, idle_after_s
        self._readers: dict[Path, CountReader] = {}
        self._seen: dict[tuple[str, Labels], _CountSample] = {}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def read(self, now_s: float) -> dict[str, CountedMetric]:
        """All metrics by name. Rows of a topic or a group that did not change for long are omitted."""
        found: dict[str, CountedMetric] = {}
        for reader in self._tables():
            for _, described, values in reader.rows():
                metric = found.get(described.name)
                if metric is None:
                    metric = found[described.name] = CountedMetric(described)
                elif (
                    tuple(metric.described.labels) != tuple(described.labels)
                    or metric.described.bounds != described.bounds
                ):
                    continue  # two workers have different metrics of one name: the first one's is shown
                labels = tuple(described.labels.values())
                known = metric.rows.get(labels)
                if known is not None:
                    values = [one + other for one, other in zip(known, values, strict=True)]
                metric.rows[labels] = values
        self._leave_out(found, now_s)
        return found

    def _tables(self) -> Iterable[CountReader]:
        paths = set(self._folder.glob(f"*{SUFFIX}"))
        for path in [path for path, reader in self._readers.items() if path not in paths or not reader.is_current]:
            self._readers.pop(path).close()
        for path in paths - self._readers.keys():
            with contextlib.suppress(OSError, ValueError):
                self._readers[path] = CountReader(path)
        return [self._readers[path] for path in sorted(self._readers)]

    def _leave_out(self, found: dict[str, CountedMetric], now_s: float) -> None:
        seen: dict[tuple[str, Labels], _CountSample] = {}
        for name, metric in found.items():
            if not metric.is_of_names:
                continue
            for labels, values in list(metric.rows.items()):
                former = self._seen.get((name, labels))
                if former is None or former.values != values[0]:
                    former = _CountSample(values[0], now_s)
                seen[name, labels] = former
                is_waiting = metric.described.kind == "gauge" and values[0] != 0
                if now_s - former.at_s >= self._idle_after_s and not is_waiting:
                    del metric.rows[labels]
        self._seen = seen


DEADLINE_S: Final = 2.0


class ProcessLines:
    """A connection to each process that was asked. For one thread."""

    def __init__(self, context: WorkerContext, deadline_s: float = DEADLINE_S) -> None:
        self._context, self._deadline_s = context, deadline_s
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._number = 0

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close(0)
        self._sockets.clear()

    def ask(self, role: str, op: str, **fields: Any) -> dict[str, Any]:
        """The answer of ``role``, or of the supervisor (``admin``).

        Raises NodeUnavailableError without an answer in time, ProtocolError for a refusal, and StoreError, KeyError or
        IndexError while the supervisor's address is not known.
        """
        endpoint = self._context.admin_ipc if role == "admin" else self._context.layout.ipc(role)
        sock = self._sockets.get(endpoint)
        if sock is None:
            sock = self._sockets[endpoint] = self._opened(endpoint)
        self._number += 1
        deadline = time.monotonic() + self._deadline_s
        try:
            sock.send(wire.pack({"op": op, "id": self._number, **fields}), zmq.NOBLOCK)
            while (left_ms := (deadline - time.monotonic()) * 1000) > 0 and sock.poll(max(1, int(left_ms))):
                answer = wire.parse_answer(sock.recv())
                if answer.get("id") == self._number:
                    if not answer["ok"]:
                        raise wire.refusal(answer)
                    return answer
        except zmq.ZMQError as error:
            self._drop(endpoint)
            raise NodeUnavailableError(f"{role} takes no requests at present: {error}") from error
        self._drop(endpoint)
        raise NodeUnavailableError(f"{role} did not answer {op} within {self._deadline_s:g} s")

    def pages(self, role: str, op: str, name: str, most: int) -> Iterator[Any]:
        """The entries of the list ``name`` on all pages, up to ``most``. Raises as :meth:`ask`."""
        after: Any = None
        while most > 0:
            page = self.ask(role, op, after=after)
            yield from page[name][:most]
            most -= len(page[name])
            after = page["next"]
            if after is None:
                return

    def _opened(self, endpoint: str) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.zmq.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.ROUTING_ID, new_routing_id())
        sock.connect(endpoint)
        return sock

    def _drop(self, endpoint: str) -> None:
        self._sockets.pop(endpoint).close(0)


@dataclass(slots=True)
class ProcessFigures:
    """One process. A figure that cannot be read is None. Sizes in bytes."""

    role: str
    is_ready: bool
    restarts: int
    cpu_s: float | None = None
    resident: int | None = None
    proportional: int | None = None
    descriptors: int | None = None
    heartbeat_age_s: float | None = None


class ProcessMeter:
    """Measures them."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self._known: dict[int, psutil.Process] = {}
        self._before: dict[tuple[str, int], float] = {}
        self._ended: dict[str, float] = {}

    def measure(self, rows: list[dict[str, Any]]) -> list[ProcessFigures]:
        """The processes of ``rows``, as ``status`` lists them."""
        now_s = time.monotonic()
        pids = {int(row["pid"]) for row in rows if row["pid"]}
        self._known = {pid: one for pid, one in self._known.items() if pid in pids}
        beats = self._heartbeats(now_s)
        found = []
        for row in rows:
            figures = ProcessFigures(str(row["role"]), row["state"] == "ready", int(row["restarts"] or 0))
            pid = int(row["pid"] or 0)
            if pid:
                self._look(pid, figures)
                figures.proportional = row.get("memory_bytes")
                figures.heartbeat_age_s = beats.get(pid)
            figures.cpu_s = self._cpu_of_role(figures.role, pid, figures.cpu_s)
            found.append(figures)
        return found

    def has_lost_one(self) -> bool:
        """Whether a process that was measured has ended since: ``status`` knows its successor."""
        return any(not process.is_running() for process in self._known.values())

    def _look(self, pid: int, figures: ProcessFigures) -> None:
        try:
            process = self._known.get(pid)
            if process is None:
                process = self._known[pid] = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                figures.cpu_s = times.user + times.system
                figures.resident = process.memory_info().rss
            figures.descriptors = process.num_fds()
        except (psutil.Error, OSError):
            figures.is_ready = False

    def _cpu_of_role(self, role: str, pid: int, seconds: float | None) -> float | None:
        """The time of this process and of those that had the role before: a counter does not fall."""
        if seconds is None:
            return None
        for key in [key for key in self._before if key[0] == role and key[1] != pid]:
            self._ended[role] = self._ended.get(role, 0.0) + self._before.pop(key)
        self._before[role, pid] = seconds
        return self._ended.get(role, 0.0) + seconds

    def _heartbeats(self, now_s: float) -> dict[int, float]:
        control = self._control
        slots = ((control.worker(slot, WorkerWord.PID), slot) for slot in range(WORKER_SLOTS))
        return {
            pid: max(0.0, now_s - control.worker(slot, WorkerWord.HEARTBEAT_MS) / 1000) for pid, slot in slots if pid
        }


_MAX_FILES: Final = 256
_MAX_MAPPED: Final = 4
_MOST_KEPT: Final = 50_000


class Position(NamedTuple):
    """The next message of a queue that ``group`` will read."""

    group: str
    topic: str
    queue: int
    offset: int


@dataclass(frozen=True, slots=True)
class QueueLag:
    """``messages`` from ``offset`` to the queue's end; ``since_ms``: when the first of them was stored, None without one."""

    group: str
    topic: str
    queue: int
    offset: int
    end: int
    messages: int
    since_ms: int | None


class _QueueSource(NamedTuple):
    queues: QueueReader | BatchQueueReader
    log: CommitLog
    bound: int
    floor: int


class Lags:
    """The view of one process. Not thread-safe."""

    def __init__(self, context: WorkerContext) -> None:
        config, layout = context.config, context.layout
        self._control = context.control
        self._log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, _MAX_MAPPED)
        self._queues = QueueReader(
            self._log,
            layout.consume_queue,
            config.consume_queue.file_bytes,
            ext_file_bytes=config.consume_queue.ext_file_bytes,
            max_open_files=_MAX_FILES,
        )
        self._batches = BatchQueueReader(
            layout.batch_consume_queue, config.consume_queue.batch_file_bytes, max_open_files=_MAX_FILES
        )
        self._memory_folder: Path = memory_folder(layout)
        self._memory = MemoryTopics(self._memory_folder)
        self._tombstones = WatchedTable(layout.tombstones)
        self._topics: Mapping[str, Mapping[str, Any]] = {}
        self._since: dict[tuple[str, int, int, int], int] = {}

    def close(self) -> None:
        self._queues.close()
        self._batches.close()
        self._memory.close()
        self._log.close()

    def begin(self, topics: Mapping[str, Mapping[str, Any]]) -> None:
        """Before each look: ``topics`` as the coordinator describes them. Lets go of expired files."""
        self._log.release_below(self._control.get(Word.MIN_OFFSET))
        self._queues.drop_deleted_files()
        self._batches.drop_deleted_files()
        self._memory.release_evicted()
        for name in self._topics.keys() - topics.keys():
            self._queues.forget(name)
            self._batches.forget(name)
        self._topics = topics
        if len(self._since) > _MOST_KEPT:
            self._since.clear()

    def bounds(self, topic: str, queue: int) -> tuple[int, int] | None:
        """Offsets of the queue's first message and of its next one; None while they are not known."""
        try:
            place = self._place(topic)
            if place is None:
                return None
            return place.queues.bounds(topic, queue, bound=place.bound, floor=place.floor) or (0, 0)
        except (StoreError, OSError):
            return None

    def of(self, positions: Iterable[Position], most: int) -> list[QueueLag]:
        """The ``most`` largest lags of positions whose queues can be read. The log is read for these alone."""
        ends: dict[tuple[str, int], tuple[int, int] | None] = {}  # many groups read one queue
        behind: list[tuple[int, int, int, Position]] = []
        for one in positions:
            place = one.topic, one.queue
            if place not in ends:
                ends[place] = self.bounds(*place)
            if (bounds := ends[place]) is not None:
                first = max(one.offset, bounds[0])
                behind.append((max(0, bounds[1] - first), first, bounds[1], one))
        if len(behind) > most:
            behind = heapq.nlargest(most, behind, key=lambda one: one[0])
        return [
            QueueLag(*one, end, messages, self._stored_ms(one.topic, one.queue, first) if messages else None)
            for messages, first, end, one in behind
        ]

    def oldest_ms(self) -> int | None:
        """When the oldest message of the log was stored."""
        begin = self._control.get(Word.MIN_OFFSET)
        key = ("", 0, 0, begin)
        if begin >= self._control.get(Word.FLUSHED):
            return None
        if key not in self._since:
            try:
                self._since[key] = self._log.record(begin, check_crc=False).store_timestamp
            except (StoreError, OSError):
                return None
        return self._since[key]

    def _place(self, name: str) -> _QueueSource | None:
        topic = self._topics.get(name)
        if topic is None:
            return None
        attributes = topic["attributes"]
        if attributes.get("storage.type") == "memory":
            found = self._memory.get(name, topic["incarnation"])
            if found is None:
                return None
            bound = found.bound
            return _QueueSource(found.queues, found.log, bound, found.floor)
        bound = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
        if bound < self._control.get(Word.RECOVERED_END):
            return None  # after a crash the queues are being rebuilt
        floor = max(self._control.get(Word.MIN_OFFSET), self._tombstones.load().get(name, 0))
        queues = self._batches if attributes.get("queue.type") == "BatchCQ" else self._queues
        return _QueueSource(queues, self._log, bound, floor)

    def _stored_ms(self, topic: str, queue: int, offset: int) -> int | None:
        incarnation = self._topics[topic]["incarnation"]
        key = (topic, incarnation, queue, offset)
        known = self._since.get(key)
        if known is not None:
            return known
        try:
            place = self._place(topic)
            if place is None:
                return None
            result = place.queues.read(
                topic, queue, offset, bound=place.bound, floor=place.floor, max_messages=1, max_bytes=1
            )
            if result.status is not PullStatus.FOUND:
                return None
            unit = result.units[0]
            stored = place.log.store_timestamp(int(unit["physical_offset"]), int(unit["size"]))
        except (StoreError, OSError):
            return None
        if stored < 0:
            return None
        self._since[key] = stored
        return stored


_STATUS_EVERY_S: Final = 15.0
_STATUS_LEAST_S: Final = 1.0
_MOST_NAMES: Final = 100_000
_LISTED: Final = 10
"""Times ``metrics.max_positions``: the positions that are looked at to find those that lag most."""

_Found = TypeVar("_Found")
Row = dict[str, Any]


@dataclass(slots=True)
class GroupLag:
    """A group in a topic: the sum of its queues, and when the oldest message that waits was stored."""

    messages: int = 0
    since_ms: int | None = None
    offset: int = 0

    def add(self, one: QueueLag) -> None:
        self.messages += one.messages
        self.offset += one.offset
        if one.since_ms is not None and (self.since_ms is None or one.since_ms < self.since_ms):
            self.since_ms = one.since_ms


@dataclass(slots=True)
class Figures:
    """All that an answer is made of. What could not be had in time is None or empty; ``errors`` counts it."""

    at_ms: int
    counted: dict[str, CountedMetric]
    words: dict[str, int]
    disk_total: int | None = None
    disk_used: int | None = None
    segments: int | None = None
    oldest_ms: int | None = None
    topics: dict[str, Row] | None = None
    groups: dict[str, Row] | None = None
    queue_lags: list[QueueLag] = field(default_factory=list)
    group_lags: dict[tuple[str, str], GroupLag] = field(default_factory=dict)
    positions_left_out: int = 0
    processes: list[ProcessFigures] = field(default_factory=list)
    dispatchers: list[Row] = field(default_factory=list)
    log_cuts: int | None = None
    positions_lowered: int | None = None

    def count(self, name: str) -> CountedMetric | None:
        return self.counted.get(name)

    def furthest_behind(self) -> list[tuple[str, str, GroupLag]]:
        """Group, topic and lag: the largest lag first, so an answer that cannot have all has those that matter."""
        found = [(group, topic, lag) for (group, topic), lag in self.group_lags.items()]
        return sorted(found, key=lambda one: -one[2].messages)

    def by_label(self, name: str, *labels: str) -> dict[tuple[str, ...], int]:
        """The counter or gauge ``name``, added up by these labels."""
        found: dict[tuple[str, ...], int] = defaultdict(int)
        counted = self.counted.get(name)
        if counted is not None:
            for values, words in counted.rows.items():
                shown = counted.labels(values)
                found[tuple(shown.get(label, "") for label in labels)] += words[0]
        return dict(found)


class FigureCollector:
    """Gathers. For one thread; nothing of it is used between two calls, so without a scrape it costs nothing."""

    def __init__(self, context: WorkerContext, deadline_s: float = DEADLINE_S) -> None:
        """``deadline_s``: of each question to a process of the node."""
        self._context, self._control = context, context.control
        self._settings = context.config.metrics
        self.line = ProcessLines(context, deadline_s)
        self.lags = Lags(context)
        self._files = CountFiles(context.layout.run, self._settings.idle_after_s)
        self._processes = ProcessMeter(context.control)
        self._topics: dict[str, Row] | None = None
        self._topics_version = -1
        self._status: Row = {}
        self._status_at_s = -_STATUS_EVERY_S
        self._is_late = False
        self.errors = 0
        """Questions that no process answered in time, since the start."""

    def close(self) -> None:
        self.line.close()
        self.lags.close()
        self._files.close()

    def gather(self) -> Figures:
        now_s = time.monotonic()
        self._is_late = False
        figures = Figures(time.time_ns() // 1_000_000, self._files.read(now_s), self._words())
        self._look_at_disk(figures)
        figures.topics = self._topics_now()
        figures.groups = self._tried(self._groups_now)
        self._look_at_lags(figures)
        age_s = now_s - self._status_at_s
        if age_s >= _STATUS_EVERY_S or (age_s >= _STATUS_LEAST_S and self._processes.has_lost_one()):
            status = self._tried(lambda: self.line.ask("admin", "status"))
            if status is not None:
                self._status, self._status_at_s = status, now_s
        figures.processes = self._processes.measure(self._status.get("processes", []))
        figures.dispatchers = self._status.get("dispatchers", [])
        node = self._status.get("node", {})
        figures.log_cuts, figures.positions_lowered = node.get("log_cuts"), node.get("positions_lowered")
        return figures

    def topics(self) -> dict[str, Row] | None:
        """The topics alone, by name: one question, and only when they have changed. None when they are not known."""
        self._is_late = False
        return self._topics_now()

    def _tried(self, work: Callable[[], _Found]) -> _Found | None:
        if self._is_late:
            return None  # one silence is enough for one answer
        try:
            return work()
        except (CommitMQError, KeyError, IndexError) as error:
            self._is_late = isinstance(error, NodeUnavailableError)
            self.errors += 1
            self._context.log.debug("a figure is missing", why=str(error))
            return None

    def _words(self) -> dict[str, int]:
        control = self._control
        words = {word.name.lower(): control.get(word) for word in Word}
        words["visible"] = control.visible(self._context.config.sync_flush)
        words["dispatched"] = control.dispatcher(0, DispatcherWord.DISPATCHED)
        words["dispatched_durable"] = control.dispatcher(0, DispatcherWord.DURABLE)
        return words

    def _look_at_disk(self, figures: Figures) -> None:
        layout = self._context.layout
        try:
            used = shutil.disk_usage(layout.root)
            figures.disk_total, figures.disk_used = used.total, used.total - used.free
            figures.segments = len(os.listdir(layout.commit_log))
        except OSError:
            self.errors += 1

    def _topics_now(self) -> dict[str, Row] | None:
        version = self._control.get(Word.TOPICS_VERSION)
        if self._topics is None or version != self._topics_version:
            found = self._tried(lambda: list(self.line.pages("coordinator", "topic.list", "topics", _MOST_NAMES)))
            if found is None:
                return self._topics
            self._topics, self._topics_version = {row["name"]: row for row in found}, version
        return self._topics

    def _groups_now(self) -> dict[str, Row]:
        groups: dict[str, Row] = {}
        for row in self.line.pages("coordinator", "group.list", "groups", self._settings.max_positions):
            known = groups.setdefault(row["name"], row)
            if known is not row:
                known["topics"] += row["topics"]
        return groups

    def _look_at_lags(self, figures: Figures) -> None:
        self.lags.begin(figures.topics or {})
        figures.oldest_ms = self.lags.oldest_ms()
        most = self._settings.max_positions
        pages = self.line.pages("coordinator", "group.positions", "positions", most * _LISTED + 1)
        rows = self._tried(lambda: list(pages))
        if rows is None:
            return
        figures.positions_left_out = max(0, len(rows) - most)
        figures.queue_lags = self.lags.of((Position(*row) for row in rows[: most * _LISTED]), most)
        for one in figures.queue_lags:
            figures.group_lags.setdefault((one.group, one.topic), GroupLag()).add(one)


_WRITER: Final = "writer"
_NEEDED: Final = ("coordinator", "dispatcher-consume_queue", "reput", "flush", "allocate", _WRITER, "cleanup")
_LATE_S: Final = 10.0


class Health:
    """Whether the node lives, and whether it takes and gives messages: from the control block alone, so no process is
    asked."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._control = context, context.control
        readers = [f"reader-{number}" for number in range(context.config.reader.count)]
        self._needed = [*_NEEDED, *readers, *(["dispatcher-memory"] if context.config.memory.enable else [])]

    def reasons(self) -> list[str]:
        """Why the node is not ready: a sentence each; none when it is."""
        control = self._control
        found = [why for role in self._needed if (why := self._why_down(role))]
        if number := control.get(Word.FLUSH_ERRNO):
            found.append(f"the device refused a sync: {os.strerror(number)}; the store is read-only")
        flags = control.get(Word.DISK_FLAGS)
        found += [f"sends are refused: {flag.name}" for flag in DiskFlag if flags & flag]
        return found

    def may_write(self) -> bool:
        """Whether sends are taken: the writer turns, the node is not drained, and device and disk are well."""
        control = self._control
        bad = control.get(Word.FLUSH_ERRNO) or control.get(Word.DISK_FLAGS) or self._why_down(_WRITER)
        return not (bad or self.notes())

    def notes(self) -> list[str]:
        """What is meant so, and no reason to be not ready: a sentence each."""
        if self._context.config.flow.refuse_sends:
            return ["sends are refused: the node is drained (flow.refuse_sends), until `commitmq drain off`"]
        return []

    def answer(self) -> dict[str, object]:
        """The answer of ``/health/ready``."""
        reasons = self.reasons()
        return {"ready": not reasons, "reasons": reasons, "takes_sends": self.may_write(), "notes": self.notes()}

    def _why_down(self, role: str) -> str:
        """Why the process ``role`` does not work: a sentence; empty when it does."""
        control, slot = self._control, self._context.slot_of(role)
        state, pid = control.worker(slot, WorkerWord.STATE), control.worker(slot, WorkerWord.PID)
        if state != WorkerState.READY or not _lives(pid):
            return f"the process {role} is not ready"
        age_s = (time.monotonic_ns() // 1_000_000 - control.worker(slot, WorkerWord.HEARTBEAT_MS)) / 1000
        return f"the loop of {role} has not turned for {age_s:.0f} s" if age_s > _LATE_S else ""


def _lives(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
