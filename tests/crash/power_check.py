"""Recovers a store as a starting node does, in this process, and holds what is there against what the node had said.

Nothing here is a copy of the node's code: recovery, ConsumeQueue dispatcher, the writer's look at the tail and the
coordinator's loading are the workers' own functions, called in their order on a real control block, without the loops.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq
from power_load import GROUP, PASSING, Said, digest
from traffic import tags_code

from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock, Word, WorkerWord, role_slot
from commitmq.coordination.service import Service
from commitmq.files.fd_cache import FdCache
from commitmq.format.client_batch import decode_client_batch
from commitmq.format.constants import SysFlag
from commitmq.format.index import IndexShape
from commitmq.format.producer_mark import parse_mark
from commitmq.format.record import Record
from commitmq.format.units import UNIT
from commitmq.log import get_log
from commitmq.offline.held_store import HeldStore
from commitmq.offline.verify import verify
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.index.index_reader import IndexReader, KeyKind, KeyQuery
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import ExtensionReader
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import abort_file
from commitmq.supervision import node_files
from commitmq.workers import recovery
from commitmq.workers.dispatcher.dispatch_host import CONSUME_QUEUE, DispatcherHost
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.doorbell import Doorbell
from commitmq.workers.timer.process import Timer
from commitmq.workers.writer.log_tail import recover_tail
from commitmq.workers.writer.producers import ProducerStateManager
from small_disk import room

_zmq: zmq.Context[zmq.Socket[bytes]] | None = None


def config_of(settings: dict[str, Any]) -> NodeConfig:
    """``{"section.key": value}`` as the configuration of a node after a power cut, in which a transient store pool is gone:
    it has none, so that thousands of images need not make one each.
    """
    settings = {**settings, "commit_log.transient_store_pool": False}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return from_mapping(sections)


@contextmanager
def _worker(role: str, layout: StoreLayout, config: NodeConfig, control: ControlBlock, clean: bool) -> Iterator[Any]:
    global _zmq
    if _zmq is None:
        _zmq = zmq.Context()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = Doorbell(layout.doorbell(role))
    context = WorkerContext(role, layout, config, control, theirs, bell, get_log(role), {"clean": clean})
    context._zmq = _zmq
    try:
        yield context
    finally:
        context._epoll.close()
        bell.close()
        ours.close()
        theirs.close()


class Recovered:
    """A store after recovery and redispatch, as far as a node gets before it serves."""

    def __init__(self, store: Path, config: NodeConfig) -> None:
        """Raises StoreError when the start would be refused."""
        layout = StoreLayout(store)
        self.layout, self.config = layout, config
        node_files.make_folders(layout)
        node_files.empty_run_folder(layout)
        node_files.next_epoch(layout)
        clean = not abort_file.exists(layout.abort)
        previous, owner = abort_file.read_token(layout.abort), abort_file.new_token()
        control = ControlBlock(layout.control, create=True)
        control.put_worker(role_slot("supervisor"), WorkerWord.PID, os.getpid())
        try:
            with _worker("recovery", layout, config, control, clean) as context:
                context.params |= {"previous": previous, "owner": owner}
                recovery.run(context)
            abort_file.create(layout.abort, os.getpid(), owner)
            coordinator = Service(layout, config, control, monotonic_ms(), room())
            # Nobody takes sends yet, so nobody has to hear of the deletions that go on.
            coordinator.tell(1)
            control.put(Word.WRITER_TOPICS, 1)
            control.put(Word.MEMORY_TOPICS, 1)
            coordinator.end_turn(monotonic_ms())
            control.put(Word.REPUT, control.get(Word.WRITTEN))
            factories = {CONSUME_QUEUE: "consume_queue:ConsumeQueueDispatcher", "index": "index:IndexDispatcher"}
            for slot, (name, factory) in enumerate(factories.items()):
                with _worker(f"dispatcher-{name}", layout, config, control, clean) as context:
                    context.params |= {"dispatcher_slot": slot, "factory": f"commitmq_dispatchers.{factory}"}
                    host = DispatcherHost(context, name)
                    host.open()
                    assert host.read_log(host.limit()), f"{name} cannot read the recovered log"
                    host.close()
                    if host._publisher is not None:
                        host._publisher.close()
            if (layout.consume_queue / TIMER_TOPIC).is_dir():
                with _worker("timer", layout, config, control, clean) as context:
                    take_in_timers(Timer(context))
            with _worker("writer", layout, config, control, clean) as context:
                self.producers = ProducerStateManager(layout, config, get_log("writer"), room())
                self.queue_offsets, self.end, _stamp = recover_tail(context, self.producers)
            assert self.end == control.get(Word.WRITTEN)
            self.topics = set(coordinator.topics.names())
            self.tombstones = dict(coordinator.topics.deletions.tombstones)
            self.committed = {
                (topic, queue): offset
                for (topic, group), queues in coordinator.offsets.table.offsets.items()
                if group == GROUP
                for queue, offset in queues.items()
            }
            self.groups = {name: dict(queues) for name, queues in coordinator.offsets.table.offsets.items()}
            coordinator.offsets.close()
        finally:
            control.close()

    def verify(self) -> list[str]:
        """What ``store verify`` finds, as after a stop."""
        with HeldStore(self.layout.root, self.config) as held:
            abort = self.layout.abort.read_bytes()
            self.layout.abort.unlink()
            report = verify(held)
            self.layout.abort.write_bytes(abort)
        return [f"{one.kind} {one.file} at {one.offset}: {one.detail}" for one in report.findings if not one.is_note]

    def records(self) -> list[Record]:
        """All of the log; :attr:`min_offset` is where it begins."""
        log = CommitLog(self.layout.commit_log, self.config.commit_log.segment_bytes)
        self.min_offset = log.min_offset
        found = list(log.iter_records(end=self.end))
        log.close()
        return found


def take_in_timers(timer: Timer) -> None:
    """What the timer does before anything is due."""
    timer.resume()
    while not timer._take_in(*timer._bounds()):
        pass
    timer._changed = True
    timer.close(lost=False)


class Stored(NamedTuple):
    """One message that the log has; ``name`` is its body's :func:`digest`."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    name: str


def messages_of(record: Record) -> list[Stored]:
    """The message of a record, or those of its inner batch."""
    bodies = [record.body]
    if record.sys_flag & SysFlag.INNER_BATCH:
        bodies = [element.body for element in decode_client_batch(record.body)]
    return [
        Stored(record.topic, record.queue_id, record.queue_offset + number, record.physical_offset, digest(body))
        for number, body in enumerate(bodies)
    ]


def light_places(record: Record) -> list[tuple[str, int]]:
    """Name and queue offset of each light message queue that the record is in."""
    names = record.properties.get("INNER_MULTI_DISPATCH")
    if not names:
        return []
    offsets = map(int, record.properties["INNER_MULTI_QUEUE_OFFSET"].split(","))
    return list(zip(names.split(","), offsets, strict=True))


def check(store: Recovered, said: Said, before: int, *, until: int | None = None, power: bool = True) -> int:
    """Hold ``store`` against everything said before the time ``before``; returns how many acks were looked for.

    What was asked for before ``until`` (the same, unless it is given) may have been done. Without ``power`` the page cache
    survived: then acks of ``memory`` must be there too.
    """
    until = before if until is None else until
    records = store.records()
    queues: dict[tuple[str, int], list[Stored]] = {}
    units: dict[tuple[str, int], list[tuple[int, Record]]] = {}
    bodies: dict[str, Stored] = {}
    for record in records:
        is_deleted = record.physical_offset < store.tombstones.get(record.topic, 0)
        key = (record.topic, record.queue_id)
        for stored in messages_of(record):
            name = stored.name
            assert name in said.sent, f"nobody sent the body at {record.physical_offset}"
            assert name not in bodies, f"stored twice: {record.physical_offset} and {bodies[name].physical_offset}"
            bodies[name] = stored
            if is_deleted:
                continue
            queue = queues.setdefault(key, [])
            # Older ones may have expired; a queue of which nothing did begins at 0.
            expected = queue[-1].queue_offset + 1 if queue else stored.queue_offset if store.min_offset else 0
            assert stored.queue_offset == expected, f"a gap or a double in {record.topic}/{record.queue_id}"
            queue.append(stored)
        if not is_deleted:
            units.setdefault(key, []).append((record.queue_offset, record))
            for light, number in light_places(record):
                units.setdefault((light, 0), []).append((number, record))
    _check_units(store, units)
    _check_index(store, records)
    _check_producers(store, records)
    nexts = {key: queue[-1].queue_offset + 1 for key, queue in queues.items()}
    nexts |= {key: found[-1][0] + 1 for key, found in units.items() if key not in queues}
    assert nexts.items() <= store.queue_offsets.items(), "queue offsets do not go on where the records end"
    assert store.min_offset or nexts == {key: offset for key, offset in store.queue_offsets.items() if offset}

    faults = store.verify()
    assert not faults, f"{len(faults)} findings: {faults[:3]}"
    checked = 0
    for time, ack, name, topic, queue_id, queue_offset, physical in said.acked:
        if time >= before or physical < store.min_offset:
            continue
        if topic == PASSING and any(said.sent[name] < asked < until for asked, _ in said.deleting):
            continue
        found = bodies.get(name)
        if found is None:
            may_go = power and ack == "memory"
            assert may_go, f"lost: {topic}/{queue_id}@{queue_offset} at {physical}, acked {ack}"
            continue
        checked += 1
        place = (found.topic, found.queue_id, found.queue_offset, found.physical_offset)
        assert place == (topic, queue_id, queue_offset, physical), f"{place} was acknowledged elsewhere"
        mine = queues[topic, queue_id]
        assert mine[queue_offset - mine[0].queue_offset] is found, "it counts as deleted"
    for time, topic, queue_id, offset, name in said.seen:
        if time < before:
            queue = queues.get((topic, queue_id), [])
            first = queue[0].queue_offset if queue else 0
            if store.min_offset and (offset < first or not queue):
                continue
            assert offset - first < len(queue), f"a consumer saw {topic}/{queue_id}@{offset}, which is gone"
            assert queue[offset - first].name == name, f"a consumer saw another body at {topic}/{queue_id}@{offset}"
    _check_topics(store, said, before, bodies)
    _check_commits(store, said, before, until, queues)
    return checked


def _check_units(store: Recovered, wanted: dict[tuple[str, int], list[tuple[int, Record]]]) -> None:
    """``wanted``: by queue, in order, the queue offset and the record of each unit."""
    found = {(topic, queue): folder for topic, queue, folder in list_queues(store.layout.consume_queue)}
    batches = {(topic, queue): folder for topic, queue, folder in list_queues(store.layout.batch_consume_queue)}
    settings = store.config.consume_queue
    extensions = ExtensionReader(store.layout.consume_queue_ext, settings.ext_file_bytes, FdCache(8))
    for key in {*found, *batches, *wanted}:
        units = wanted.get(key, [])
        if key in batches:
            _check_batch_units(batches[key], settings.batch_file_bytes, key, [record for _, record in units])
            continue
        if key not in found:
            assert not units, f"{key} has no ConsumeQueue"
            continue
        queue = ConsumeQueue(found[key], settings.file_bytes)
        queue.refresh()
        if store.min_offset and not units:
            continue
        first = units[0][0] if units else 0
        assert [number for number, _ in units] == list(range(first, first + len(units))), f"{key}: a gap or a double"
        count = queue.max_offset - first
        assert count == len(units), f"{key}: {count} units from {first} on, {len(units)} records"
        data = b""
        while len(data) < 20 * len(units):
            more = queue.read_units(first + len(data) // 20, len(units))
            assert more, f"{key}: unit {first + len(data) // 20} cannot be read"
            data += more
        stored = np.frombuffer(data, UNIT)
        codes = stored["tags_code"].astype(np.int64)
        resolved = extensions.resolve(f"{key[0]}/{key[1]}", codes)
        if resolved is not None:
            codes = resolved.codes
        told = list(zip(stored["physical_offset"].tolist(), stored["size"].tolist(), codes.tolist(), strict=True))
        expected = [(one.physical_offset, one.total_size, tags_code(one)) for _, one in units]
        assert told == expected, f"{key}: units and records differ, {_first_difference(told, expected)}"


def _check_batch_units(folder: Path, file_bytes: int, key: tuple[str, int], records: list[Record]) -> None:
    queue = BatchConsumeQueue(folder, file_bytes)
    queue.refresh()
    units = queue.units(queue.end_index - len(records), len(records))
    names = ("physical_offset", "size", "base_offset", "count")
    told = list(zip(*(units[name].tolist() for name in names), strict=True))
    expected = [(one.physical_offset, one.total_size, one.queue_offset, len(messages_of(one))) for one in records]
    assert told == expected, f"{key}: batch units and records differ, {_first_difference(told, expected)}"


def _first_difference(told: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> str:
    pairs = itertools.zip_longest(told, expected)
    number, (one, other) = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"number {number} of {len(expected)}: {one}, not {other}"


def _check_index(store: Recovered, records: list[Record]) -> None:
    """A few records, the newest among them, are found by their unique key; inner batches have keys of their own."""
    shape = IndexShape(store.config.index.hash_slots, store.config.index.max_items)
    log = CommitLog(store.layout.commit_log, store.config.commit_log.segment_bytes)
    reader = IndexReader(log, store.layout.index, shape)
    for record in records[:: max(1, len(records) // 12)] + records[-3:]:
        if record.sys_flag & SysFlag.INNER_BATCH:
            continue
        query = KeyQuery(record.topic, record.properties["UNIQ_KEY"], KeyKind.UNIQUE)
        found = reader.search(query, bound=store.end, max_messages=5)
        assert found.offsets == [record.physical_offset], f"the index has {found} for {record.physical_offset}"
    reader.close()
    log.close()


def _check_producers(store: Recovered, records: list[Record]) -> None:
    """What is known of idempotent producers is what the records say, no more and no less."""
    nexts: dict[tuple[str, str, int], tuple[int, int]] = {}
    epochs: dict[str, int] = {}
    for record in records:
        mark = parse_mark(record.properties.get("__PSEQ__", ""))
        if mark is None:
            continue
        name, epoch, sequence = mark
        key = (name, record.topic, record.queue_id)
        known_epoch, following = nexts.get(key, (epoch, sequence if store.min_offset else 0))
        expected = following if known_epoch == epoch else 0
        if record.physical_offset >= store.tombstones.get(record.topic, 0):
            assert sequence == expected, f"{key} stored {sequence} of epoch {epoch} after {known_epoch}/{following}"
            nexts[key] = (epoch, sequence + 1)
        epochs[name] = epoch
    for (name, topic, queue), (epoch, following) in nexts.items():
        if epochs[name] == epoch:
            known = store.producers.table.judge(name, epoch, topic, queue, 0, following + 1)
            assert known == following, f"{name} stored {following} in {topic}/{queue}, {known} are known"


def _check_topics(store: Recovered, said: Said, before: int, bodies: dict[str, Stored]) -> None:
    lost = {name for time, name in said.topics if time < before} - store.topics
    assert not lost, f"topics that were acknowledged are gone: {lost}"
    last = max((time for time, _ in said.deleted if time < before), default=0)
    for time, _ack, name, topic, *_ in said.acked:
        if topic == PASSING and time < last and name in bodies:
            assert bodies[name].physical_offset < store.tombstones.get(PASSING, 0), "a deleted message is back"


def _check_commits(
    store: Recovered, said: Said, before: int, until: int, queues: dict[tuple[str, int], list[Stored]]
) -> None:
    """No commit is lost. With asynchronous flushes a consumer may have committed what the power cut took: such an offset is
    lowered to its queue's end, else the group would miss the next messages.
    """
    least: dict[tuple[str, int], int] = {}
    most: dict[tuple[str, int], int] = {}
    for time, topic, queue, offset in said.committed:
        if time < before:
            least[topic, queue] = max(offset, least.get((topic, queue), 0))
    for time, topic, queue, offset in said.committing:
        if time < until:
            most[topic, queue] = max(offset, most.get((topic, queue), 0))
    is_async = store.config.commit_log.flush_mode == "async"
    for key, offset in least.items():
        if is_async and key in queues:
            offset = min(offset, queues[key][-1].queue_offset + 1)
        assert store.committed.get(key, -1) >= offset, f"{key} was committed at {offset}, is {store.committed.get(key)}"
    for key, offset in store.committed.items():
        assert offset <= most.get(key, 0), f"{key} is committed at {offset}, nobody asked for that"


def fresh(folder: Path) -> Path:
    """``folder``, which does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
