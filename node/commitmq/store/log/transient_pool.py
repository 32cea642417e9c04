"""The transient store pool (spec 11.3): buffers in shared memory that take appends before these are in the log's files.

    FOLDER/head          a page of PoolWord, then two words for each buffer
    FOLDER/buffer-<n>    as large as a segment, fully allocated: a store into it cannot be SIGBUS
    FOLDER/owner         JSON: the pool's identity, written last; a folder without it is not, or no longer, a pool
    commitmq/transient_pool.json   in the store: the identity and the folder of the store's pool

The writer appends to the buffer of a segment, the flush process copies the records to the segment's file (it *commits*
them), and all other processes read the files and see only committed records. So the writer never waits for the file
system, and its records outlive every process, because they are in shared memory.

Invariants
    * Every word and every byte has one writing process at a time. The writer stores ``TAKEN`` of a buffer when it takes
      it for a segment, the flush process ``RETURNED`` when all of that segment is committed: the buffer is free while
      the two are equal. In between the writer stores only at or above ``written``, the flush process only below
      ``COMMITTED``.
    * ``COMMITTED`` (here and in the control block) moves after the bytes are in the file, at record boundaries only.
    * Below ``COMMITTED`` and at or above ``written`` a buffer is zero: the flush process zeroes what it has committed,
      and a free buffer is entirely zero. So stale bytes can neither become part of a later record nor be taken for one,
      not even where a killed writer left the first half of a record; that records contain their own physical offset is
      only the second guard.

Failure cases
    * A process dies: the words above are the whole state. The writer zeroes what its predecessor left unpublished; the
      flush process zeroes below ``COMMITTED``, returns the buffers it should have, and commits the rest.
    * The whole node dies: the next start, with the pool switched on or not, checks the records at ``COMMITTED`` and
      behind it and writes them to the log before it looks for the log's end
      (:mod:`commitmq.store.recovery.store_recovery`).
    * The machine dies: the pool is gone. Flushed records are in the log; the note in the store names another boot.
    * Files of the pool are deleted under a running node (a login manager that empties /dev/shm): the node continues
      with its mappings; if it is then killed, uncommitted records are lost, and the next start reports the loss.
    * The note is written before the first buffer is made and removed when the last one is gone, so no memory is ever
      forgotten.

This module has no loop and needs no numpy: the supervisor removes the pool of a stopped node.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import sync_folder
from commitmq.store.layout import StoreLayout
from commitmq.store.shared_memory import (
    PAGE_BYTES,
    SharedPage,
    available_bytes,
    check_private,
    claim,
    recorded_folder,
)

_MAGIC: Final = 0x434D_5150_4F00_0001
_ZEROS: Final = memoryview(bytes(256 * 1024))
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module has no name for it yet
_HUGE_SHMEM: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class PoolWord(IntEnum):
    """Words of the head; the comments name the one process that writes each word."""

    MAGIC = 0
    BUFFERS = 1  # recovery, when the pool is made
    SEGMENT_BYTES = 2  # recovery
    HAS_CRC = 3  # recovery: every record in it has a __CRC32#
    COMMITTED = 4  # flush (recovery sets its first value): everything below is in the log's files
    FIRST_BUFFER = 8  # from here on, TAKEN and RETURNED of each buffer


MAX_BUFFERS: Final = (PAGE_BYTES // 8 - PoolWord.FIRST_BUFFER) // 2
_NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class PoolNote:
    """The store's note about its pool. ``device`` and ``inode`` are the store's own: a copy of a store has no pool."""

    folder: str
    id: str
    boot: str
    device: int
    inode: int

    @classmethod
    def load(cls, layout: StoreLayout) -> PoolNote | None:
        """The note; None without one. Raises StoreError for one that cannot be parsed."""
        path = note_path(layout)
        try:
            data = orjson.loads(path.read_bytes())
            note = cls(**data)
        except FileNotFoundError:
            return None
        except (OSError, TypeError, orjson.JSONDecodeError) as error:
            sentence = "the note about the transient store pool cannot be read; remove it to continue without the pool"
            raise StoreError(sentence, path=path) from error
        return note


class TransientPool:
    """A pool as one process sees it: all buffers mapped from the start on. Not thread-safe."""

    def __init__(self, folder: Path, *, writable: bool = True) -> None:
        """Map the pool in ``folder``. Raises StoreError when there is none."""
        self.folder = folder
        self._maps: list[mmap.mmap] = []
        try:
            self._head = SharedPage(folder / "head", _MAGIC, writable=writable)
            self.segment_bytes = self._head.get(PoolWord.SEGMENT_BYTES)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            for number in range(self._head.get(PoolWord.BUFFERS)):
                fd = os.open(folder / f"buffer-{number}", os.O_RDWR if writable else os.O_RDONLY)
                try:
                    if os.fstat(fd).st_size != self.segment_bytes:
                        raise StoreError("this buffer of the transient store pool has the wrong size", path=folder)
                    self._maps.append(mmap.mmap(fd, self.segment_bytes, prot=access))
                finally:
                    os.close(fd)
        except OSError as error:
            sentence = f"the transient store pool cannot be used: {error.strerror}"
            raise StoreError(sentence, path=folder) from error

    @property
    def has_crc(self) -> bool:
        return bool(self._head.get(PoolWord.HAS_CRC))

    @property
    def committed(self) -> int:
        """Everything below this offset of the log is in its files."""
        return self._head.get(PoolWord.COMMITTED)

    def set_committed(self, offset: int) -> None:
        """For the flush process only, after the bytes are in the file."""
        self._head.put(PoolWord.COMMITTED, offset)

    def in_use(self) -> list[tuple[int, mmap.mmap]]:
        """``(base offset of its segment, buffer)`` of each buffer that is not free, in the order of the log."""
        found = []
        for number, buffer in enumerate(self._maps):
            taken, returned = self._words(number)
            if taken != returned:
                found.append((taken, buffer))
        return sorted(found, key=lambda one: one[0])

    def find(self, base: int) -> mmap.mmap | None:
        """The buffer of the segment at ``base``; None when there is none."""
        for number, buffer in enumerate(self._maps):
            taken, returned = self._words(number)
            if taken == base != returned:
                return buffer
        return None

    def take(self, base: int) -> mmap.mmap | None:
        """For the writer: the buffer of the segment at ``base``, or a free one; None while none is free."""
        found = self.find(base)
        if found is not None:
            return found
        best, newest = -1, _NEVER - 1
        for number in range(len(self._maps)):
            taken, returned = self._words(number)
            # Prefer the buffer that was used last: its pages are already in this process's page table.
            if taken == returned > newest:
                best, newest = number, returned
        if best < 0:
            return None
        self._head.put(PoolWord.FIRST_BUFFER + 2 * best, base)
        if failpoints.ACTIVE:
            failpoints.hit("pool.after_take")
        return self._maps[best]

    def give_back(self, base: int) -> None:
        """For the flush process: free the buffer of the segment at ``base``, which is entirely zero."""
        for number in range(len(self._maps)):
            taken, returned = self._words(number)
            if taken == base != returned:
                self._head.put(PoolWord.FIRST_BUFFER + 2 * number + 1, base)

    def zero_from(self, position: int) -> None:
        """For a restarted writer: zero every buffer at and behind ``position``, the published end."""
        for base, buffer in self.in_use():
            if base + self.segment_bytes > position:
                zero(buffer, max(0, position - base), self.segment_bytes)

    def advise_huge(self) -> None:
        """Ask for huge pages, where the system gives them to shared memory; has no effect elsewhere."""
        for buffer in self._maps:
            with contextlib.suppress(OSError):
                buffer.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap the buffers without views."""
        for buffer in self._maps:
            with contextlib.suppress(BufferError):
                buffer.close()
        self._maps.clear()
        self._head.close()

    def _words(self, number: int) -> tuple[int, int]:
        at = PoolWord.FIRST_BUFFER + 2 * number
        return self._head.get(at), self._head.get(at + 1)


def zero(buffer: mmap.mmap, start: int, end: int) -> None:
    """Zero ``buffer[start:end]``."""
    with memoryview(buffer) as view:
        for at in range(start, end, len(_ZEROS)):
            stop = min(end, at + len(_ZEROS))
            view[at:stop] = _ZEROS[: stop - at]


# ---------------------------------------------------------------- the folder and its owner


def pool_folder(layout: StoreLayout) -> Path:
    """The folder of a store's pool, which need not exist."""
    return (recorded_folder(layout) or layout.run) / "pool"


def note_path(layout: StoreLayout) -> Path:
    return layout.own / "transient_pool.json"


def boot_id() -> str:
    """Identifies this boot of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def owner_id(folder: Path) -> str:
    """The id in ``owner``; empty when there is none."""
    try:
        data: Any = orjson.loads((folder / "owner").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return ""
    return str(data.get("id", "")) if isinstance(data, dict) else ""


# ---------------------------------------------------------------- making and removing


def make(
    layout: StoreLayout, parent: str, *, buffers: int, segment_bytes: int, properties_crc: bool, committed: int
) -> None:
    """Make the pool of a starting node, with every buffer allocated; ``committed`` is the log's end. An earlier node's
    pool must already be taken over or given up. Raises StoreError when there is no room for the new one.
    """
    claim(layout, parent)
    folder = pool_folder(layout)
    if os.path.lexists(folder):
        check_private(folder)
        shutil.rmtree(folder)
    _check_room(folder.parent, buffers, segment_bytes)
    root = layout.root.stat()
    note = PoolNote(str(folder), secrets.token_hex(16), boot_id(), root.st_dev, root.st_ino)
    try:
        # Before the note: if a note names a pool without its folder, something deleted the pool.
        folder.mkdir(mode=0o700)
        atomic_file.replace(note_path(layout), orjson.dumps(asdict(note)), "pool_note", mode=0o600)
        if failpoints.ACTIVE:
            failpoints.hit("pool.before_make")
        for number in range(buffers):
            _allocate(folder / f"buffer-{number}", segment_bytes)
        head = SharedPage(folder / "head", _MAGIC, create=True)
        head.put(PoolWord.BUFFERS, buffers)
        head.put(PoolWord.SEGMENT_BYTES, segment_bytes)
        head.put(PoolWord.HAS_CRC, int(properties_crc))
        head.put(PoolWord.COMMITTED, committed)
        for word in range(PoolWord.FIRST_BUFFER, PoolWord.FIRST_BUFFER + 2 * buffers):
            head.put(word, _NEVER)
        head.close()
        if failpoints.ACTIVE:
            failpoints.hit("pool.before_owner")
        owner = {"id": note.id, "store": str(layout.root.resolve())}
        atomic_file.replace(folder / "owner", orjson.dumps(owner), "pool_owner", durable=False, mode=0o600)
    except OSError as error:
        remove(layout)
        sentence = f"cannot make the transient store pool of {buffers} x {segment_bytes} bytes: {error.strerror}"
        raise StoreError(sentence, path=folder) from error


def _check_room(parent: Path, buffers: int, segment_bytes: int) -> None:
    wanted = buffers * segment_bytes + PAGE_BYTES
    advice = (
        "make commit_log.transient_store_pool_size or commit_log.segment_bytes smaller (a store keeps the latter), or do"
        " without commit_log.transient_store_pool"
    )
    try:
        found = os.statvfs(parent)
    except OSError as error:
        sentence = f"there is no folder for the transient store pool: {error.strerror} (memory.folder)"
        raise StoreError(sentence, path=parent) from error
    room = found.f_bavail * found.f_frsize
    if wanted > room:
        raise StoreError(
            f"the transient store pool takes {wanted} bytes, the file system has {room} left: make it larger (containers:"
            f" --shm-size), set memory.folder, or {advice}",
            path=parent,
        )
    available = available_bytes()
    if wanted > available:
        raise StoreError(
            f"the transient store pool takes {wanted} bytes of memory, {available} are available: {advice}", path=parent
        )


def _allocate(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        if _huge_pages_wanted():
            with mmap.mmap(fd, size) as buffer, contextlib.suppress(OSError):
                # Existing pages keep their size, so the advice must come before the first one.
                buffer.madvise(mmap.MADV_HUGEPAGE)
                buffer.madvise(_MADV_POPULATE_WRITE)
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _huge_pages_wanted() -> bool:
    try:
        setting = _HUGE_SHMEM.read_text(encoding="ascii")
    except OSError:
        return False
    return "[never]" not in setting and "[deny]" not in setting


def remove(layout: StoreLayout) -> None:
    """Remove the store's pool, whose records are all in the log, and the note; does nothing without a note. A pool that
    belongs to another store stays.
    """
    note = PoolNote.load(layout)
    if note is None:
        return
    folder = Path(note.folder)
    if os.path.lexists(folder) and owner_id(folder) in (note.id, ""):
        check_private(folder)
        # Without its owner file it is no pool: a death while the rest is removed leaves nothing that could be taken
        # over.
        (folder / "owner").unlink(missing_ok=True)
        if failpoints.ACTIVE:
            failpoints.hit("pool.inside_remove")
        for name in os.listdir(folder):
            (folder / name).unlink()
    forget(layout)
    with contextlib.suppress(OSError):
        folder.rmdir()  # not empty if it is another store's


def forget(layout: StoreLayout) -> None:
    """Remove the note, durably; the pool that it names stays if there is one."""
    note_path(layout).unlink(missing_ok=True)
    sync_folder(layout.own)
