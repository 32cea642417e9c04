"""The index files of a store by name: their headers, and which of them are known durable.

``files.json`` (:mod:`commitmq.store.index.index_state`) is on the device before the first byte of a file changes.
"""

from __future__ import annotations

from pathlib import Path

from commitmq.files import disk
from commitmq.format.index_header import IndexHeader
from commitmq.store.index.index_state import SavedState


class IndexListing:
    """``names`` of all files under ``folder``, oldest first, and the known facts about them. One thread."""

    def __init__(self, folder: Path, state_path: Path) -> None:
        self.folder = folder
        self._state_path = state_path
        self.names: list[str] = []
        self.headers: dict[str, IndexHeader] = {}
        """The headers of all files that no longer grow."""
        self.saved = SavedState()
        """The content of ``files.json``."""
        self.durable: set[str] = set()
        self.lowered = False
        """A file that was durable is so no longer."""

    def save(self, *, clean: bool, position: int = -1, newest_end: int = -1) -> None:
        """Write ``files.json``; without a ``position`` that and the newest file stay as they were."""
        count = self.durable_count()
        durable = self.names[count - 1] if count else ""
        newest = self.names[-1] if self.names else ""
        if clean and position < 0:
            position, newest, newest_end = self.saved.position, self.saved.newest, self.saved.newest_end
        saved = SavedState(durable, clean, position, newest, newest_end)
        saved.save(self._state_path)
        self.saved = saved

    def durable_count(self) -> int:
        """Number of files, from the oldest on, that are durable without a gap."""
        return next((number for number, name in enumerate(self.names) if name not in self.durable), len(self.names))

    def forget_durable(self, first: str) -> None:
        """Mark the files from ``first`` on as no longer durable; the mark is on the device before they change."""
        if any(name >= first for name in self.durable):
            self.durable = {name for name in self.durable if name < first}
            self.lowered = True
            self.save(clean=False)

    def delete_from(self, number: int) -> None:
        """Delete the files from ``number`` on, newest first, so that a death in between leaves no gap."""
        for name in reversed(self.names[number:]):
            disk.unlink(self.folder / name, "index", missing_ok=True)
            self.headers.pop(name, None)
            self.durable.discard(name)
        del self.names[number:]
