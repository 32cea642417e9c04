"""Read-only mappings of the node's segments, for consumers on the same host."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path

from commitmq.errors import SegmentSizeError
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout


class SegmentMaps:
    """At most ``max_mapped`` mappings; the least recently used one goes first. Not thread-safe.

    The mappings belong to one store and one epoch of its node.

    This class only forgets a mapping. Batches from it keep it alive, and it is unmapped when the last of them goes. The same
    holds when the node deletes a segment: the pages of the file live on in the mapping.
    """

    def __init__(self, store: Path, segment_bytes: int, *, max_mapped: int = 16) -> None:
        self._folder = StoreLayout(store).commit_log
        self._segment_bytes = segment_bytes
        self._max_mapped = max_mapped
        self._maps: OrderedDict[int, tuple[mmap.mmap, tuple[int, int]]] = (
            OrderedDict()
        )  # with the file's device and inode

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    def map(self, base_offset: int) -> mmap.mmap:
        """The mapping of the segment that starts at ``base_offset``.

        Raises OSError when the segment cannot be opened (deleted, no permission), SegmentSizeError when it does not have the
        size that the node gives.
        """
        found = self._maps.get(base_offset)
        if found is not None:
            self._maps.move_to_end(base_offset)
            return found[0]
        path = self._folder / segment_name(base_offset)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            size = status.st_size
            if size != self._segment_bytes:
                raise SegmentSizeError(f"the segment has {size} bytes, the node says {self._segment_bytes}", path=path)
            made = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.drop_deleted()
        self._maps[base_offset] = made, (status.st_dev, status.st_ino)
        while len(self._maps) > self._max_mapped:
            self._maps.popitem(last=False)
        return made

    def drop_deleted(self) -> None:
        """Forget the mappings of deleted segments, and of segments whose name belongs to another file by now.

        Such a mapping keeps disk space of the node in use, and its bytes are not the node's segment any more.
        """
        for base_offset, (_, identity) in list(self._maps.items()):
            try:
                status = os.stat(self._folder / segment_name(base_offset))
            except OSError:
                del self._maps[base_offset]
                continue
            if (status.st_dev, status.st_ino) != identity:
                del self._maps[base_offset]

    def close(self) -> None:
        """Forget all mappings. A mapping in use lives as long as its batches."""
        self._maps.clear()
