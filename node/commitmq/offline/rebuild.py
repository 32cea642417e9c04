"""``store rebuild``: makes ConsumeQueues and index again from the CommitLog alone, with the node's own dispatchers.

The new files are made in ``commitmq/rebuild`` and replace the old ones when they are complete and durable; the old ones
are kept in ``commitmq/before-rebuild-TIME``. A process that dies before the exchange leaves the store as it was, and
the next rebuild begins again. The exchange removes the recovery sidecar first: a node that starts on a half exchanged
store then dispatches the whole log again, which produces the same files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files.disk import sync_folder
from commitmq.format.constants import BATCH_UNIT_BYTES, PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.units import UNIT
from commitmq.log import get_log
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_damage import refuse_damage, trusted_ends
from commitmq.plugin import loading as plugins
from commitmq.plugin.hookspecs import Dispatcher, DispatcherView
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.metadata.topic_files import load_tombstones
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue, make_units
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.store.queues.queue_files import close_shared_files, list_queues
from commitmq.store.recovery.scan import scan_to_end

KINDS: Final = ("queues", "index")
_DISPATCHERS: Final = {"queues": "consume_queue", "index": "index"}
_FOLDERS: Final = {"queues": ("consumequeue", "batchconsumequeue", "consumequeue_ext"), "index": ("index",)}

Progress = Callable[[int, int], None]
"""Called with the bytes of the log done, and all of them."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Result of a rebuild: ``start`` and ``end`` in bytes of the log, ``records``, seconds, the folder of the old
    files, and ``left``, the faults that remain (see :mod:`commitmq.offline.rebuild_parallel`).
    """

    start: int
    end: int
    records: int
    seconds: float
    kept: Path
    left: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "end": self.end,
            "records": self.records,
            "seconds": round(self.seconds, 3),
            "kept": str(self.kept),
            "sound": not self.left,
            "left": list(self.left),
        }

    def left_lines(self, most: int = 20) -> list[str]:
        """The remaining faults, for users; empty when there are none."""
        more = [f"and {len(self.left) - most} more; --json lists them"] if len(self.left) > most else []
        head = ["the rebuilt files do not show the whole log. Their faults:"] if self.left else []
        return [*head, *self.left[:most], *more]

    def line(self, only: str | None) -> str:
        """The result, for users; ``only`` is the kind when only one was rebuilt."""
        rate = (self.end - self.start) / max(self.seconds, 1e-6) / 1e6
        what = only or "queues and index"
        return f"rebuilt {what} from {self.records} records in {self.seconds:.1f} s ({rate:.0f} MB/s)"


def rebuild(
    store: HeldStore,
    kinds: tuple[str, ...] = KINDS,
    progress: Progress = lambda _done, _total: None,
    *,
    ends: QueueEnds | None = None,
) -> Rebuilt:
    """Rebuild ``kinds`` (of :data:`KINDS`). Raises StoreError; CorruptRecordError when the log itself is damaged.

    ``ends``: the ends of queues whose files may be gone, when the caller knows them better than the store's own record
    does: a start that has recovered the log.
    """
    begun = time.perf_counter()
    layout, config = store.layout, store.config
    beside = StoreLayout(layout.own / "rebuild")
    shutil.rmtree(beside.root, ignore_errors=True)
    (beside.run).mkdir(parents=True)
    log = CommitLog(layout.commit_log, config.commit_log.segment_bytes)
    try:
        bases = log.segments()
        start = bases[0] if bases else 0
        end = scan_to_end(log, start).end if bases else 0
        if ends is None:
            refuse_damage(store, log)
        records = _dispatch(store, beside, log, kinds, start, end, progress)
    finally:
        log.close()
    if "queues" in kinds:
        keep_ends(store, beside, start, trusted_ends(store) if ends is None else ends)
    kept = exchange(layout, beside, kinds)
    return Rebuilt(start, end, records, time.perf_counter() - begun, kept)


def keep_ends(store: HeldStore, beside: StoreLayout, log_start: int, ends: QueueEnds | None) -> None:
    """Copy to ``beside`` the facts that only the old queues, or the record of their ends, have: the ends of queues
    without a record in the log, and places at a queue's end that a repair left.
    """
    layout = store.layout
    deleted = load_tombstones(layout)
    _keep_ends(layout.consume_queue, beside.consume_queue, UNIT_BYTES, log_start, deleted)
    _keep_ends(layout.batch_consume_queue, beside.batch_consume_queue, BATCH_UNIT_BYTES, log_start, deleted)
    _keep_lost_places(layout.consume_queue, beside.consume_queue, store.config.consume_queue.file_bytes)
    _keep_recorded_ends(store, beside, log_start, ends)


def staged_folders(kinds: tuple[str, ...]) -> list[str]:
    """Names of the store's folders that hold ``kinds``."""
    return [name for kind in kinds for name in _FOLDERS[kind]]


def refuse_without_index(store: HeldStore, kinds: tuple[str, ...]) -> None:
    """Raise StoreError when an index is requested but switched off in the configuration."""
    if "index" in kinds and not store.config.index.enable:
        raise StoreError("no index is made: index.enable is off", path=store.layout.root)


def _dispatch(
    store: HeldStore,
    beside: StoreLayout,
    log: CommitLog,
    kinds: tuple[str, ...],
    start: int,
    end: int,
    progress: Progress,
) -> int:
    deleted = load_tombstones(store.layout)
    dispatchers = [_dispatcher(_DISPATCHERS[kind], store) for kind in kinds]
    # Units are complete without extensions, which would be in a separate folder; the node adds them to new units.
    config = replace(store.config, consume_queue=replace(store.config.consume_queue, enable_ext=False))
    for name, dispatcher in dispatchers:
        view = DispatcherView(
            beside, config, get_log(f"rebuild-{name}"), log, start, lambda: deleted, lambda _queues: None,
            topic_attributes=_attributes(store), clean=True, name=name, node_clean=True, log_end=end,
        )  # fmt: skip
        position = dispatcher.open(view)
        if position != start:
            raise StoreError(f"the {name} dispatcher begins at {position}, not at {start}", path=beside.root)
    walker = LogWalker(log, max_rows=store.config.dispatch.batch_messages, max_bytes=store.config.dispatch.batch_bytes)
    records = 0
    position = start
    while position < end:
        batch = walker.walk(position, end)
        for _, dispatcher in dispatchers:
            dispatcher.dispatch(batch)
        records += len(batch)
        position = batch.end
        progress(position - start, end - start)
    walker.release()
    for _, dispatcher in dispatchers:
        dispatcher.flush(thorough=True)
        dispatcher.close()
    return records


def _keep_ends(old: Path, new: Path, unit_bytes: int, log_start: int, deleted: Mapping[str, int]) -> None:
    """Copy the last file of every queue that has no record in the log any more: only this file tells the next offset.

    Both kinds of units begin with physical offset i8 and size i4. A queue whose last unit is not below the log's
    beginning is omitted, because that unit points at nothing. So is a queue whose topic was ``deleted``: the next
    topic of the name counts from 0.
    """
    for topic, queue_id, folder in list_queues(old):
        target = new / topic / str(queue_id)
        files = sorted(path for path in folder.iterdir() if len(path.name) == 20 and path.name.isdecimal())
        if not files or target.exists():
            continue
        data = files[-1].read_bytes()
        units = len(data.rstrip(b"\0")) + unit_bytes - 1
        last = data[units // unit_bytes * unit_bytes - unit_bytes :][:12] if units >= unit_bytes else b""
        offset, size = int.from_bytes(last[:8], "big", signed=True), int.from_bytes(last[8:12], "big", signed=True)
        if 0 < size < PREBLANK_SIZE and deleted.get(topic, -1) < offset + size <= log_start:
            target.mkdir(parents=True)
            with (target / files[-1].name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            for made in (target, target.parent, new):
                sync_folder(made)


def _keep_lost_places(old: Path, new: Path, file_bytes: int) -> None:
    """Copy the places that a repair left at a queue's end for lost messages: the log does not know that they are taken."""
    for topic, queue_id, folder in list_queues(old):
        queue = ConsumeQueue(folder, file_bytes)
        made = ConsumeQueue(new / topic / str(queue_id), file_bytes)
        try:
            end, made_end = queue.refresh(), made.refresh()
        except StoreError:
            continue  # the queue is unreadable, and so it is rebuilt
        units = np.frombuffer(queue.read_units(made_end, end - made_end) if made_end < end else b"", UNIT)
        if made.has_files and len(units) and bool((units["size"] == PREBLANK_SIZE).all()):
            made.recover()
            made.pad_to(end)
            made.flush()


def _keep_recorded_ends(store: HeldStore, beside: StoreLayout, log_start: int, ends: QueueEnds | None) -> None:
    """Restore the ends of queues whose files are gone: no queue offset may be given out a second time."""
    deleted = load_tombstones(store.layout)
    config = store.config.consume_queue
    for end in ends.queues if ends is not None else ():
        if end.last_end <= deleted.get(end.topic, 0):
            continue
        has_expired = end.last_end <= log_start
        if end.kind == queue_ends.BATCH:
            batches = BatchConsumeQueue(
                beside.batch_consume_queue / end.topic / str(end.queue_id), config.batch_file_bytes
            )
            if batches.refresh() < end.next_offset and not batches.has_files and has_expired:
                batches.append_units(make_units([end.last_end - 1], [1], [0], [0], [end.next_offset - 1], [1]))
                batches.flush()
            continue
        queue = ConsumeQueue(beside.consume_queue / end.topic / str(end.queue_id), config.file_bytes)
        if queue.refresh() >= end.next_offset:
            continue
        if queue.max_physical_offset >= 0:
            queue.recover()
            queue.pad_to(end.next_offset)
        elif has_expired:
            # A unit of an expired record: a queue without units would count as one that never had messages.
            queue.append_units(end.next_offset - 1, np.array([(end.last_end - 1, 1, 0)], UNIT).tobytes())
        if queue.is_dirty:
            queue.flush()


def _attributes(store: HeldStore) -> Callable[[str], dict[str, str] | None]:
    def of(topic: str) -> dict[str, str] | None:
        try:
            return store.topic_attributes(topic)
        except StoreError:
            return None  # without topics.json the records decide

    return of


def _dispatcher(name: str, store: HeldStore) -> tuple[str, Dispatcher]:
    own = plugins.load_each(one for one in plugins.candidates() if one.distribution == plugins.OWN_DISTRIBUTION)
    for _, spec in own.dispatchers(store.config):
        if spec.name == name:
            factory: Any = plugins.resolve(spec.factory)
            return name, factory()
    raise StoreError(f"there is no built-in dispatcher {name!r}; is index.enable off?", path=store.layout.root)


def exchange(layout: StoreLayout, beside: StoreLayout, kinds: tuple[str, ...]) -> Path:
    """Move the new folders to the place of the old ones; returns where the old ones went."""
    kept = layout.own / f"before-rebuild-{time.time_ns() // 1_000_000}"
    kept.mkdir(parents=True)
    layout.sidecar.unlink(missing_ok=True)
    if "queues" in kinds:
        queue_ends.forget(layout.queue_ends)
    sync_folder(layout.own)
    for kind in kinds:
        for name in _FOLDERS[kind]:
            _replace(layout.root / name, beside.root / name, kept / name)
        state = Path("commitmq") / "dispatchers" / _DISPATCHERS[kind]
        (kept / "dispatchers").mkdir(exist_ok=True)
        _replace(layout.root / state, beside.root / state, kept / "dispatchers" / state.name)
        # The node's remembered position belongs to the old files.
        (layout.own / "dispatchers" / f"{_DISPATCHERS[kind]}.json").unlink(missing_ok=True)
    for folder in (layout.root, layout.own, kept):
        sync_folder(folder)
    close_shared_files()  # those of the old files, whose names the new files have now
    shutil.rmtree(beside.root)
    return kept


def _replace(old: Path, new: Path, kept: Path) -> None:
    if failpoints.ACTIVE:
        failpoints.hit("rebuild.before_exchange")
    try:
        if old.exists():
            old.rename(kept)
        if new.exists():
            old.parent.mkdir(parents=True, exist_ok=True)
            new.rename(old)
            sync_folder(old.parent)
    except OSError as error:
        raise StoreError(f"cannot be replaced by the rebuilt files: {error.strerror}", path=old) from error
