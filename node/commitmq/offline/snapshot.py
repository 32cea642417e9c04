"""``store snapshot``: a copy of the store of a running node, on which a node can be started. Nothing is asked of the node.

The copy is a state that the store really had, up to an offset E of the log:

1. Positions first: offsets of groups, the progress of movers, idempotent producers. They speak of messages below E.
2. E is a flushed position, at or behind everything that was written when step 1 was done. So it covers every message that
   was acknowledged as flushed before the snapshot began, and every message that the positions speak of.
3. The log below E. A segment that ends below E never changes any more: it is linked (copied where the file system cannot
   link). The segment of E is copied up to E. Segments are taken from the newest to the oldest: expiry deletes the
   oldest, so what was taken has no gap.
4. Topics and groups, which are at least as new as the log.

A file that its process replaces whole is copied from one descriptor. Files that belong together are read as one state:
when one of a pair was replaced meanwhile, or expiry or the deletion of a topic came between the steps, all is read again.
A journal is appended to, so the part that was read is an earlier state of it.

ConsumeQueues and index are derived: they are made from the copied log (:mod:`commitmq.offline.rebuild`) and compared with it,
which checks each record. The wheel of the timer is made again by the node (``is_whole`` is false). Dispatchers of plugins
begin anew.

Everything is made in ``.NAME.partial`` beside the folder that is asked for, synced, and renamed. So a death at any point, an
error or a full disk leaves no folder of the final name; the next snapshot to that name clears the partial one first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import orjson

from commitmq.config import NodeConfig
from commitmq.errors import DiskFullError, StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import open_folder, sync_folder
from commitmq.files.no_space import is_no_space
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import KINDS, rebuild
from commitmq.offline.rebuild_check import checked
from commitmq.offline.snapshot_state import Snapshot, clear, hit, take_state
from commitmq.security.access_file import AccessFile
from commitmq.security.node_keys import load_node_keys
from commitmq.store.access import require_store, umask_of
from commitmq.store.layout import StoreLayout
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.store.store_lock import lock_holder

FILE: Final = "snapshot.json"

Progress = Callable[[int, int], None]


def snapshot(
    store: Path, target: Path, config: NodeConfig, *, link: bool = True, progress: Progress = lambda _done, _total: None
) -> Snapshot:
    """Make ``target`` a snapshot of the node's store; see the module. ``target`` must not exist, or be an empty folder.

    Raises StoreError: no node runs, the target cannot be, the node ended meanwhile, the device failed, the copy is not
    sound. DiskFullError when there is no space. Nothing is left under the target's name then.
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
