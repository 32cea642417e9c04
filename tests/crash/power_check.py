"""Recovers a store as a starting node does, in this process, and holds what is there against what the node had said.

Nothing here is a copy of the node's code: recovery, ConsumeQueue dispatcher, the writer's look at the tail and the
coordinator's loading are the workers' own functions, called in their order on a real control block, without the loops.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from power_load import GROUP, PASSING, Said, digest
from traffic import tags_code

from commitmq import node_files
from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock, Word, WorkerWord
from commitmq.coordination.service import Service
from commitmq.log import get_log
from commitmq.store import abort_file
from commitmq.store.commit_log import CommitLog
from commitmq.store.consume_queue import ConsumeQueue, list_queues
from commitmq.store.index_file import IndexShape
from commitmq.store.index_reader import IndexReader, KeyKind, KeyQuery
from commitmq.store.layout import StoreLayout
from commitmq.store.record import Record
from commitmq.workers import recovery
from commitmq.workers.dispatch_host import CONSUME_QUEUE, DispatcherHost
from commitmq.workers.doorbell import Doorbell
from commitmq.workers.runtime import WorkerContext, monotonic_ms, role_slot
from commitmq.workers.writer import recover_tail

_zmq: zmq.Context[zmq.Socket[bytes]] | None = None


def config_of(settings: dict[str, Any]) -> NodeConfig:
    """``{"section.key": value}`` as a node's configuration."""
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
        previous = abort_file.read_pid(layout.abort)
        control = ControlBlock(layout.control, create=True)
        control.put_worker(role_slot("supervisor"), WorkerWord.PID, os.getpid())
        if clean:
            abort_file.create(layout.abort, os.getpid())
        try:
            with _worker("recovery", layout, config, control, clean) as context:
                context.params["previous_pid"] = previous
                recovery.run(context)
            if not clean:
                abort_file.create(layout.abort, os.getpid())
            coordinator = Service(layout, config, control, monotonic_ms())
            coordinator.end_turn(monotonic_ms())
            control.put(Word.REPUT, control.get(Word.WRITTEN))
            for slot, name in enumerate((CONSUME_QUEUE, "index")):
                with _worker(f"dispatcher-{name}", layout, config, control, clean) as context:
                    context.params["dispatcher_slot"] = slot
                    host = DispatcherHost(context, name)
                    host.open()
                    assert host.read_log(host.limit()), f"{name} cannot read the recovered log"
                    host.close()
                    if host._publisher is not None:
                        host._publisher.close()
            with _worker("writer", layout, config, control, clean) as context:
                self.queue_offsets, self.end, _stamp = recover_tail(context)
            assert self.end == control.get(Word.WRITTEN)
            self.topics = set(coordinator.topics.names())
            self.tombstones = dict(coordinator.topics.tombstones)
            self.committed = {
                (topic, queue): offset
                for (topic, group), queues in coordinator.offsets.table.offsets.items()
                if group == GROUP
                for queue, offset in queues.items()
            }
            coordinator.offsets.close()
        finally:
            control.close()

    def records(self) -> list[Record]:
        """All of the log; :attr:`min_offset` is where it begins."""
        log = CommitLog(self.layout.commit_log, self.config.commit_log.segment_bytes)
        self.min_offset = log.min_offset
        found = list(log.iter_records(end=self.end))
        log.close()
        return found


def check(store: Recovered, said: Said, before: int, *, power: bool = True) -> int:
    """Hold ``store`` against everything said before the time ``before``; returns how many acks were looked for.

    Without ``power`` the page cache survived: then acks of ``memory`` must be there too.
    """
    records = store.records()
    queues: dict[tuple[str, int], list[Record]] = {}
    bodies: dict[str, Record] = {}
    for record in records:
        name = digest(record.body)
        assert name in said.sent, f"nobody sent the body at {record.physical_offset}"
        assert name not in bodies, f"stored twice: {record.physical_offset} and {bodies[name].physical_offset}"
        bodies[name] = record
        if record.physical_offset >= store.tombstones.get(record.topic, 0):
            queue = queues.setdefault((record.topic, record.queue_id), [])
            # Older ones may have expired; a queue of which nothing did begins at 0.
            expected = queue[-1].queue_offset + 1 if queue else record.queue_offset if store.min_offset else 0
            assert record.queue_offset == expected, f"a gap or a double in {record.topic}/{record.queue_id}"
            queue.append(record)
    _check_units(store, queues)
    _check_index(store, records)
    nexts = {key: queue[-1].queue_offset + 1 for key, queue in queues.items()}
    assert nexts.items() <= store.queue_offsets.items(), "queue offsets do not go on where the records end"
    assert store.min_offset or nexts == {key: offset for key, offset in store.queue_offsets.items() if offset}

    checked = 0
    for time, ack, name, topic, queue_id, queue_offset, physical in said.acked:
        if time >= before or physical < store.min_offset:
            continue
        if topic == PASSING and any(said.sent[name] < asked < before for asked, _ in said.deleting):
            continue
        found = bodies.get(name)
        if found is None:
            may_go = power and ack == "memory"
            assert may_go, f"lost: {topic}/{queue_id}@{queue_offset} at {physical}, acked {ack}"
            continue
        checked += 1
        place = (found.topic, found.queue_id, found.queue_offset, found.physical_offset)
        assert place == (topic, queue_id, queue_offset, physical), f"{place} was acknowledged elsewhere"
        assert found in queues[topic, queue_id], "it counts as deleted"
    for time, topic, queue_id, offset, name in said.seen:
        if time < before:
            queue = queues.get((topic, queue_id), [])
            first = queue[0].queue_offset if queue else 0
            if store.min_offset and (offset < first or not queue):
                continue
            assert offset - first < len(queue), f"a consumer saw {topic}/{queue_id}@{offset}, which is gone"
            body = queue[offset - first].body
            assert digest(body) == name, f"a consumer saw another body at {topic}/{queue_id}@{offset}"
    _check_topics(store, said, before, bodies)
    _check_commits(store, said, before)
    return checked


def _check_units(store: Recovered, queues: dict[tuple[str, int], list[Record]]) -> None:
    found = {(topic, queue): folder for topic, queue, folder in list_queues(store.layout.consume_queue)}
    for key in {*found, *queues}:
        records = queues.get(key, [])
        if key not in found:
            assert not records, f"{key} has no ConsumeQueue"
            continue
        queue = ConsumeQueue(found[key], store.config.consume_queue.file_bytes)
        queue.refresh()
        if store.min_offset and not records:
            continue
        first = records[0].queue_offset if records else 0
        count = queue.max_offset - first
        assert count == len(records), f"{key}: {count} units from {first} on, {len(records)} records"
        units = b""
        while len(units) < 20 * len(records):
            more = queue.read_units(first + len(units) // 20, len(records))
            assert more, f"{key}: unit {first + len(units) // 20} cannot be read"
            units += more
        expected = b"".join(
            one.physical_offset.to_bytes(8, "big")
            + one.total_size.to_bytes(4, "big")
            + tags_code(one).to_bytes(8, "big", signed=True)
            for one in records
        )
        assert units == expected, f"{key}: units and records differ"


def _check_index(store: Recovered, records: list[Record]) -> None:
    """A few records, the newest among them, are found by their unique key."""
    shape = IndexShape(store.config.index.hash_slots, store.config.index.max_items)
    log = CommitLog(store.layout.commit_log, store.config.commit_log.segment_bytes)
    reader = IndexReader(log, store.layout.index, shape)
    for record in records[:: max(1, len(records) // 12)] + records[-3:]:
        query = KeyQuery(record.topic, record.properties["UNIQ_KEY"], KeyKind.UNIQUE)
        found = reader.search(query, bound=store.end, max_messages=5)
        assert found.offsets == [record.physical_offset], f"the index has {found} for {record.physical_offset}"
    reader.close()
    log.close()


def _check_topics(store: Recovered, said: Said, before: int, bodies: dict[str, Record]) -> None:
    lost = {name for time, name in said.topics if time < before} - store.topics
    assert not lost, f"topics that were acknowledged are gone: {lost}"
    last = max((time for time, _ in said.deleted if time < before), default=0)
    for time, _ack, name, topic, *_ in said.acked:
        if topic == PASSING and time < last and name in bodies:
            assert bodies[name].physical_offset < store.tombstones.get(PASSING, 0), "a deleted message is back"


def _check_commits(store: Recovered, said: Said, before: int) -> None:
    least: dict[tuple[str, int], int] = {}
    most: dict[tuple[str, int], int] = {}
    for time, topic, queue, offset in said.committed:
        if time < before:
            least[topic, queue] = max(offset, least.get((topic, queue), 0))
    for time, topic, queue, offset in said.committing:
        if time < before:
            most[topic, queue] = max(offset, most.get((topic, queue), 0))
    for key, offset in least.items():
        assert store.committed.get(key, -1) >= offset, f"{key} was committed at {offset}, is {store.committed.get(key)}"
    for key, offset in store.committed.items():
        assert offset <= most.get(key, 0), f"{key} is committed at {offset}, nobody asked for that"


def fresh(folder: Path) -> Path:
    """``folder``, which does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
