"""Files of a memory file system that outlive the process that made them: their folder, their owner, pages of words.

Memory topics and the transient store pool are outside the store (under /dev/shm), in one folder with a random name that
only its owner can open and that the store remembers (:func:`claim`).

    FOLDER/memory    memory topics: :mod:`commitmq.store.memory_files`
    FOLDER/pool      :mod:`commitmq.store.log.transient_pool`
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import sync_folder
from commitmq.files.disk_space import is_private
from commitmq.store.layout import StoreLayout

DEFAULT_FOLDER: Final = "/dev/shm"
PAGE_BYTES: Final = 4096


class SharedPage:
    """One page of single aligned 8-byte words, as in the control block; word 0 is its magic."""

    def __init__(self, path: Path, magic: int, *, create: bool = False, writable: bool = False) -> None:
        """Raises FileNotFoundError, or StoreError for a file that is not such a page."""
        flags = os.O_RDWR if create or writable else os.O_RDONLY
        fd = os.open(path, flags | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, PAGE_BYTES)
            elif os.fstat(fd).st_size != PAGE_BYTES:
                raise StoreError("not a page of shared words", path=path)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if create or writable else 0)
            self._map = mmap.mmap(fd, PAGE_BYTES, prot=access)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")
        if create:
            self._words[0] = magic
        elif self._words[0] != magic:
            raise StoreError("this page of shared words was made by another version", path=path)

    def get(self, word: int) -> int:
        return self._words[word]

    def put(self, word: int, value: int) -> None:
        self._words[word] = value

    def close(self) -> None:
        self._words.release()
        self._map.close()


@dataclass(frozen=True, slots=True)
class _FolderRecord:
    """``commitmq/shared_memory.json``: the folder in shared memory that belongs to this store. ``device`` and ``inode``
    are the store's own: a copy of a store has no such folder, and a store in another container does not have this one.
    """

    folder: str
    device: int
    inode: int


def claim(layout: StoreLayout, parent: str) -> Path:
    """The folder of the store under ``parent`` (empty: DEFAULT_FOLDER), made if necessary. The caller holds the store's
    lock.

    Every account may make folders there. So the name is random, and the store, which others cannot read, records it
    before the folder is made: nobody can make that folder first, and the next node finds everything that a killed one
    left. Raises StoreError.
    """
    base = Path(parent or DEFAULT_FOLDER)
    known = recorded_folder(layout)
    if known is not None:
        if known.parent == base and is_private(known):
            return known
        forsake(known)
    root = layout.root.stat()
    while True:
        folder = base / f"commitmq-{secrets.token_hex(10)}"
        try:
            _write_record(layout, _FolderRecord(str(folder), root.st_dev, root.st_ino))
        except OSError as error:
            sentence = f"the place of the node's files in shared memory cannot be written down: {error.strerror}"
            raise StoreError(sentence, path=layout.own) from error
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            sentence = f"there is no folder for the node's files in shared memory: {error.strerror} (memory.folder)"
            raise StoreError(sentence, path=base) from error
        return folder


def release(layout: StoreLayout) -> None:
    """Remove the store's folder and its record if the folder is empty, at the end. The caller holds the store's lock."""
    folder = recorded_folder(layout)
    if folder is None:
        return
    with contextlib.suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError:
            return  # a pool with records that are not in the log is kept for the next start
    _record_path(layout).unlink(missing_ok=True)
    sync_folder(layout.own)


def forsake(folder: Path) -> None:
    """Free the memory that a killed node left in ``folder``, if it is this account's alone; never a transient pool."""
    if is_private(folder):
        shutil.rmtree(folder / "memory", ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def recorded_folder(layout: StoreLayout) -> Path | None:
    """The folder that :func:`claim` gave the store; None without one."""
    try:
        record = _FolderRecord(**orjson.loads(_record_path(layout).read_bytes()))
        root = layout.root.stat()
    except (OSError, TypeError, orjson.JSONDecodeError):
        return None
    return Path(record.folder) if (record.device, record.inode) == (root.st_dev, root.st_ino) else None


def memory_folder(layout: StoreLayout) -> Path:
    """The folder of the store's memory topics, which need not exist."""
    return (recorded_folder(layout) or layout.run) / "memory"


def _record_path(layout: StoreLayout) -> Path:
    return layout.own / "shared_memory.json"


def _write_record(layout: StoreLayout, record: _FolderRecord) -> None:
    atomic_file.replace(_record_path(layout), orjson.dumps(asdict(record)), "shared_memory", mode=0o600)


def check_private(folder: Path) -> None:
    """Raise StoreError unless ``folder`` is a real folder of this account and closed to others."""
    if not is_private(folder):
        raise StoreError(
            "this path in shared memory is not a folder that only this account can use; remove it", path=folder
        )


def available_bytes() -> int:
    """Memory that could be taken now: the machine's, or the rest of this control group's if that is less."""
    # Not by psutil: the store imports no package about processes (a test of the project checks that).
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit.isdecimal():
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available
