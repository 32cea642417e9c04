"""Files of a memory file system that outlive the process that made them: where they lie, whose they are, pages of words.

Memory topics and the transient store pool lie outside the store (under /dev/shm), in folders named after the store's
place in the file system, open to their owner only.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout

DEFAULT_FOLDER: Final = "/dev/shm"
PAGE_BYTES: Final = 4096


class SharedPage:
    """One page of single aligned 8-byte words, as in the control block; word 0 is its magic."""

    def __init__(self, path: Path, magic: int, *, create: bool = False, writable: bool = False) -> None:
        """Raises FileNotFoundError, or StoreError for something else than such a page."""
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


def memory_folder(layout: StoreLayout, parent: str) -> Path:
    """The folder of a store's memory topics under ``parent`` (empty: DEFAULT_FOLDER), whether it exists or not.

    Two stores never share one, also where containers with the same paths share the memory file system: device and
    inode of the store's root are in the name.
    """
    root = layout.root.resolve()
    found = root.stat()
    digest = hashlib.sha256(os.fsencode(root) + f"\0{found.st_dev}\0{found.st_ino}".encode()).hexdigest()[:20]
    return Path(parent or DEFAULT_FOLDER) / f"commitmq-{os.getuid()}-{digest}"


def check_private(folder: Path) -> None:
    """Raise StoreError unless ``folder`` is a real folder, ours, and closed to others: it lies where all may create."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StoreError("this folder in shared memory is not ours alone; remove it", path=folder)


def available_bytes() -> int:
    """Memory that could be taken now: the machine's, or what is left to this control group if that is less."""
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
