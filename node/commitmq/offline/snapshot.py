"""``store snapshot``: a copy of the store of a running node, on which a node can be started. Nothing is asked of the
node.

The copy is a state that the store really had, up to an offset E of the log:

1. Positions first: offsets of groups, the progress of movers, idempotent producers. They speak of messages below E.
2. E is a flushed position, at or behind everything that was written when step 1 was done. So it covers every message
that
   was acknowledged as flushed before the snapshot began, and every message that the positions speak of.
3. The log below E. A segment that ends below E never changes any more: it is linked (copied where the file system
cannot
   link). The segment of E is copied up to E. Segments are taken from the newest to the oldest: expiry deletes the
   oldest, so what was taken has no gap.
4. Topics and groups, which are at least as new as the log.

A file that its process replaces whole is copied from one descriptor. Files that belong together are read as one state:
when one of a pair was replaced in the meantime, or expiry or the deletion of a topic came between the steps, all is
read again. A journal is appended to, so the part that was read is an earlier state of it.

ConsumeQueues and index are derived: they are made from the copied log (:mod:`commitmq.offline.rebuild`) and compared
with it, which checks each record. The wheel of the timer is rebuilt by the node (``is_whole`` is false). Dispatchers of
plugins start over.

Everything is made in ``.NAME.partial`` beside the folder that is asked for, synced, and renamed. So a death at any
point, an error or a full disk leaves no folder of the final name; the next snapshot to that name clears the partial one
first.

Copies one state of a running node's store: positions, log and topics; see :mod:`commitmq.offline.snapshot`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, Word
from commitmq.errors import CommitMQError, DiskFullError, StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import open_folder, sync_folder
from commitmq.files.disk_space import is_no_space
from commitmq.format.file_names import segment_name
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import KINDS, rebuild
from commitmq.offline.rebuild_parallel import checked
from commitmq.security.access_file import AccessFile
from commitmq.security.node_keys import load_node_keys
from commitmq.store.access import lock_holder, require_store, umask_of
from commitmq.store.geometry import SEGMENT, look
from commitmq.store.layout import StoreLayout
from commitmq.store.log.expiry import list_bases
from commitmq.store.queues.queue_ends import QueueEnds

_FLUSH_S: Final = 60.0
_TRIES: Final = 50
_PAUSE_S: Final = 0.02
_CHUNK_BYTES: Final = 1 << 20
_LOOKS_S: Final = 0.005

# Below the root of the store. Files of one line belong together.
_POSITIONS: Final = (
    ("config/consumerOffset.json", "commitmq/offsets.journal"),
    ("config/delayOffset.json", "commitmq/schedule.json"),
    ("config/timercheck", "commitmq/timer.json", "config/timermetrics"),
    ("commitmq/pop.json",),
    ("config/consumerOrderInfo.json", "commitmq/orders.journal"),
    ("commitmq/producers",),
    ("commitmq/queue_ends",),
    ("checkpoint",),
)
_TOPICS: Final = (
    ("config/topics.json", "commitmq/topics.journal", "commitmq/deleted_topics.json", "commitmq/deleting_topics.json"),
    ("config/subscriptionGroup.json", "commitmq/group_members.log", "commitmq/makers.log"),
    ("config/consumerFilter.json",),
    ("commitmq/min_offset",),
    ("commitmq/store.json",),
    ("commitmq/cut_history",),
    ("commitmq/epoch",),
    ("commitmq/settings.json",),
)
_GROW: Final = (
    "commitmq/offsets.journal",
    "commitmq/orders.journal",
    "commitmq/topics.journal",
    "commitmq/group_members.log",
    "commitmq/makers.log",
)


class ChangedMeanwhile(Exception):
    """Files that belong together were replaced while they were read; reading them again is right."""


def hit(place: str) -> None:
    if failpoints.ACTIVE:
        failpoints.hit(place)


@dataclass(slots=True)
class Snapshot:
    """The result. Sizes in bytes; ``end`` and ``start`` are offsets of the log."""

    folder: Path
    start: int
    end: int
    linked: int = 0
    copied: int = 0
    copied_bytes: int = 0
    records: int = 0
    verified: bool = False
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "start": self.start,
            "end": self.end,
            "segments_linked": self.linked,
            "segments_copied": self.copied,
            "copied_bytes": self.copied_bytes,
            "records": self.records,
            "verified": self.verified,
            "seconds": round(self.seconds, 3),
        }


def clear(folder: Path) -> None:
    """Remove everything in ``folder``. Raises OSError."""
    for one in folder.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()


def take_state(layout: StoreLayout, partial: Path, config: NodeConfig, *, link: bool) -> Snapshot:
    """Positions, log and topics as one state; again until nothing came between."""
    segment_bytes = look(layout, index=False).sizes.get(SEGMENT, config.commit_log.segment_bytes)
    try:
        control = ControlBlock(layout.control)
    except (OSError, CommitMQError) as error:
        raise StoreError(f"the node that runs here cannot be looked at: {error}", path=layout.control) from error
    try:
        for _ in range(_TRIES):
            try:
                return _one_state(layout, control, partial, segment_bytes, link=link)
            except ChangedMeanwhile:
                clear(partial)
                time.sleep(_PAUSE_S)
    finally:
        control.close()
    raise StoreError(f"files of the store changed during each of {_TRIES} tries; repeat the snapshot", path=layout.root)


def _one_state(
    layout: StoreLayout, control: ControlBlock, partial: Path, segment_bytes: int, *, link: bool
) -> Snapshot:
    epoch, minimum = control.get(Word.EPOCH), control.get(Word.MIN_OFFSET)
    deletions = [_state(layout.root / name) for name in _TOPICS[0][2:]]
    for name in ("commitlog", "config", "commitmq"):
        (partial / name).mkdir()
    _copy_together(layout.root, partial, _POSITIONS)
    hit("snapshot.positions")
    end = _flushed_end(layout, control)
    made = _take_log(layout, partial, end, segment_bytes, link=link)
    hit("snapshot.log")
    _copy_together(layout.root, partial, _TOPICS)
    _copy_rest(layout, partial)
    if not lock_holder(layout.lock) or control.get(Word.EPOCH) != epoch:
        raise StoreError(
            "the node ended, or was started again, while it was copied; repeat the snapshot", path=layout.root
        )
    if control.get(Word.MIN_OFFSET) != minimum or deletions != [_state(layout.root / name) for name in _TOPICS[0][2:]]:
        raise ChangedMeanwhile
    return made


def _flushed_end(layout: StoreLayout, control: ControlBlock) -> int:
    """A flushed position at or behind what is written now."""
    wanted = control.get(Word.WRITTEN)
    deadline = time.monotonic() + _FLUSH_S
    while (flushed := control.get(Word.FLUSHED)) < wanted:
        if control.get(Word.FLUSH_ERRNO):
            raise StoreError(
                "a sync of the log failed, so its end is not durable: start the node again", path=layout.root
            )
        if time.monotonic() >= deadline or not lock_holder(layout.lock):
            raise StoreError(
                f"the node did not flush its log up to {wanted} within {_FLUSH_S:g} s, or ended", path=layout.root
            )
        time.sleep(_LOOKS_S)
    return flushed


def _take_log(layout: StoreLayout, partial: Path, end: int, segment_bytes: int, *, link: bool) -> Snapshot:
    made = Snapshot(partial, end, end)
    folder = partial / "commitlog"
    for base in sorted((base for base in list_bases(layout.commit_log) if base < end), reverse=True):
        if made.start != end and base + segment_bytes != made.start:
            raise StoreError("the log has a gap; `commitmq store verify` tells more", path=layout.commit_log)
        source, copy = layout.commit_log / segment_name(base), folder / segment_name(base)
        try:
            if link and base + segment_bytes <= end and _linked(source, copy):
                made.linked += 1
            else:
                made.copied_bytes += _copy(source, copy, min(end - base, segment_bytes), segment_bytes)
                made.copied += 1
        except FileNotFoundError:
            break  # it expired, and all older ones
        made.start = base
    return made


def _linked(source: Path, copy: Path) -> bool:
    """Link the file; False where the file system, or its limit of links, does not allow it."""
    try:
        os.link(source, copy)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _copy(source: Path, copy: Path, count: int, size: int) -> int:
    """Copy ``count`` bytes to a file of ``size`` bytes, all of which have space: a node maps its last segment for writing."""
    done = 0
    with source.open("rb", buffering=0) as file, copy.open("xb", buffering=0) as into:
        while done < count:
            data = os.pread(file.fileno(), min(_CHUNK_BYTES, count - done), done)
            if not data:
                raise StoreError(f"ends at {done}, {count} bytes are flushed", path=source)
            view = memoryview(data)
            while view:
                view = view[into.write(view) :]
            done += len(data)
            hit("snapshot.chunk")
        os.posix_fallocate(into.fileno(), 0, size)
    return done


# ---------------------------------------------------------------- small files


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _copy_together(root: Path, partial: Path, groups: Iterable[tuple[str, ...]]) -> None:
    """Copy files that belong together. Raises ChangedMeanwhile when one was replaced before all were read."""
    for names in groups:
        before = [_state(root / name)[: 1 if name in _GROW else 3] for name in names]
        for name in names:
            try:
                data = (root / name).read_bytes()
            except FileNotFoundError:
                continue
            (partial / name).write_bytes(_timer_to_be_made(data) if name == "commitmq/timer.json" else data)
        if before != [_state(root / name)[: 1 if name in _GROW else 3] for name in names]:
            raise ChangedMeanwhile


def _timer_to_be_made(data: bytes) -> bytes:
    """The timer's progress without its wheel, which the node makes again."""
    return orjson.dumps({**orjson.loads(data), "is_whole": False})


def _copy_rest(layout: StoreLayout, partial: Path) -> None:
    """The other files of ``config`` (users, RocketMQ's), and those of plugins' workers. Each is replaced whole.
    Positions that came only now are omitted, and RocketMQ's backups of them: they are newer than the log.
    """
    positions = tuple(str(layout.root / name) for names in _POSITIONS for name in names)
    for folder in (layout.config, layout.own / "workers"):
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            target = partial / path.relative_to(layout.root)
            if not path.is_file() or path.is_symlink() or target.exists() or path.name.endswith((".new", ".tmp")):
                continue
            if str(path).startswith(positions):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy(path, target)
            except FileNotFoundError:
                continue


FILE: Final = "snapshot.json"

Progress = Callable[[int, int], None]


def snapshot(
    store: Path, target: Path, config: NodeConfig, *, link: bool = True, progress: Progress = lambda _done, _total: None
) -> Snapshot:
    """Make ``target`` a snapshot of the node's store; see the module. ``target`` must not exist, or be an empty folder.

    Raises StoreError: no node runs, the target cannot be, the node ended in the meantime, the device failed, the copy
    is not sound. DiskFullError when there is no space. Nothing is left under the target's name then.
    """
    began = time.monotonic()
    layout, target = StoreLayout(store.absolute()), target.absolute()
    _check(layout, target)
    before = os.umask(umask_of(layout.root))
    partial = target.with_name(f".{target.name}.partial")
    lock = _hold(partial)
    try:
        made = take_state(layout, partial, config, link=link)
        _check_security(partial)
        hit("snapshot.taken")
        _derive(partial, made, config, progress)
        hit("snapshot.derived")
        made.seconds = time.monotonic() - began
        _write_file(partial, made)
        _sync(partial)
        hit("snapshot.before_name")
        _take_name(partial, target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _explained(error, target) from error
        raise
    finally:
        os.close(lock)
        os.umask(before)
    made.folder = target
    return made


def _explained(error: OSError, target: Path) -> StoreError:
    if is_no_space(error):
        return DiskFullError("no space for the snapshot; nothing of it was left", path=target.parent)
    return StoreError(f"the snapshot failed: {error}; nothing of it was left", path=target)


# ---------------------------------------------------------------- the folders


def _check(layout: StoreLayout, target: Path) -> None:
    require_store(layout)
    if not lock_holder(layout.lock):
        raise StoreError(
            "no node runs on this store: start it, or copy the folder of a stopped one with `cp -a`", path=layout.root
        )
    _check_security(layout.root)
    if target.is_relative_to(layout.root):
        raise StoreError("a snapshot cannot be in the store itself", path=target)
    if not target.parent.is_dir():
        raise StoreError("there is no such folder", path=target.parent)
    _refuse_existing(target)


def _check_security(root: Path) -> None:
    """A start refuses a file of users or of keys that is gone or damaged: a backup must not wait for its restore to say so."""
    AccessFile(root).load()
    load_node_keys(root)


def _refuse_existing(target: Path) -> None:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise StoreError("this exists already; a snapshot overwrites nothing", path=target)


def _hold(partial: Path) -> int:
    """Make the folder ``partial`` and lock it; empty it if a snapshot that died left it. Raises StoreError."""
    try:
        partial.mkdir(exist_ok=not partial.is_symlink())
        fd = open_folder(partial)
    except OSError as error:
        raise StoreError(f"cannot be made: {error.strerror}", path=partial) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino != partial.stat().st_ino:
            raise BlockingIOError
        clear(partial)
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(fd)
        raise StoreError("another snapshot to this name is being made", path=partial) from error
    except OSError as error:
        os.close(fd)
        raise StoreError(f"a snapshot that died cannot be cleared: {error.strerror}", path=partial) from error
    return fd


def _take_name(partial: Path, target: Path) -> None:
    _refuse_existing(target)
    partial.rename(target)  # over an empty folder too; never over one with files
    hit("snapshot.named")
    sync_folder(target.parent)


# ---------------------------------------------------------------- derived files


def _derive(partial: Path, made: Snapshot, config: NodeConfig, progress: Progress) -> None:
    """Make ConsumeQueues and index from the copied log, and compare all of it. Raises StoreError when it is not sound."""
    if made.end == made.start:
        made.verified = True
        return
    with HeldStore(partial, config) as store:
        ends = QueueEnds.load(store.layout.queue_ends) or QueueEnds(made.end, made.start)
        done = checked(store, rebuild(store, KINDS if store.config.index.enable else ("queues",), progress, ends=ends))
        shutil.rmtree(done.kept)
    if done.end != made.end:
        raise StoreError(
            f"the copied log ends at {done.end}, not at {made.end} where the node flushed it", path=partial
        )
    if done.left:
        raise StoreError(f"the copy is not sound, and neither is the store: {done.left[0]}", path=partial)
    made.records, made.verified = done.records, True


def _write_file(partial: Path, made: Snapshot) -> None:
    data = {**made.to_json(), "made_ms": time.time_ns() // 1_000_000}
    del data["folder"]
    atomic_file.replace(partial / "commitmq" / FILE, orjson.dumps(data, option=orjson.OPT_INDENT_2), "snapshot")


def _sync(partial: Path) -> None:
    """Make everything durable; linked segments are."""
    for folder, _, names in os.walk(partial):
        for name in names:
            path = Path(folder, name)
            if path.stat().st_nlink == 1:
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        sync_folder(Path(folder))
