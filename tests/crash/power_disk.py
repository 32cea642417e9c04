"""The disk that a power cut leaves, made from a record of what a node did (see power_recorder).

What is certain at a moment
    * the content and size that a file had at its last sync;
    * the names of a folder as they were at the folder's last sync, and the folder itself if its own name is.

Everything else is the device's choice, and every choice is tried by chance: of each page of 4096 bytes that was written
since, the synced version, the newest one, one in between, or a mixture of two of them by sectors of 512 bytes; any size
the file has had since (a page that is missing then reads as zeros); each creation, rename and deletion done or not done.
A rename is one step: never both names gone. A name that depends on an earlier change of the same name needs that one.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
_SECTOR_BYTES = 512
_FOLDER = 0
_ZEROS = -1

Event = dict[str, Any]
Pages = dict[int, int]


@dataclass
class File:
    """One file: pages by number, as positions in the record's ``pages``."""

    synced: Pages = field(default_factory=dict)
    synced_size: int = 0
    base: Pages = field(default_factory=dict)  # what ``synced`` became by cuts that are not synced yet
    now: Pages = field(default_factory=dict)
    size: int = 0
    versions: dict[int, list[int]] = field(default_factory=dict)  # of pages written since the sync, oldest first
    sizes: list[int] = field(default_factory=list)  # since the sync
    cut: bool = False

    def write(self, size: int, pages: list[list[int]]) -> None:
        for number, place in pages:
            self.now[number] = place
            self.versions.setdefault(number, []).append(place)
        if size != self.size:
            self.size = size
            self.sizes.append(size)

    def shorten(self, size: int) -> None:
        kept = -(-size // PAGE_BYTES)
        self.cut = True
        self.base = {number: place for number, place in self.base.items() if number < kept}
        self.now = {number: place for number, place in self.now.items() if number < kept}
        self.versions = {number: places for number, places in self.versions.items() if number < kept}
        self.size = size
        self.sizes = [size]

    def sync(self) -> None:
        self.synced, self.base, self.synced_size = dict(self.now), dict(self.now), self.size
        self.versions.clear()
        self.sizes.clear()
        self.cut = False

    def left_by_chance(self, chance: random.Random, pages: memoryview) -> dict[int, bytes] | None:
        """The pages that are not zero, with the size under key -1; None for as it was synced, undisturbed."""
        if self.cut and chance.random() < 0.4:
            return _contents(self.synced, self.synced_size, pages)
        sizes = [*([] if self.cut else [self.synced_size]), *self.sizes]
        size = sizes[-1] if chance.random() < 0.6 else chance.choice(sizes)
        bold = chance.choice((0.0, 0.1, 0.5, 0.5, 0.9, 1.0))
        left = _contents(self.base, size, pages)
        for number, places in self.versions.items():
            if chance.random() >= bold:
                continue
            place = places[-1] if chance.random() < 0.7 else chance.choice(places)
            page = _page(place, pages)
            if chance.random() < 0.2:
                other = _page(chance.choice([self.base.get(number, _ZEROS), *places]), pages)
                page = b"".join(
                    (page if chance.random() < 0.5 else other)[at : at + _SECTOR_BYTES]
                    for at in range(0, PAGE_BYTES, _SECTOR_BYTES)
                )
            left[number] = page
        return left

    def as_cached(self, pages: memoryview) -> dict[int, bytes]:
        """The same for the page cache's content: what a kill leaves."""
        return _contents(self.now, self.size, pages)


def _page(place: int, pages: memoryview) -> bytes:
    return bytes(PAGE_BYTES) if place == _ZEROS else bytes(pages[place : place + PAGE_BYTES])


def _contents(places: Pages, size: int, pages: memoryview) -> dict[int, bytes]:
    found = {number: _page(place, pages) for number, place in places.items() if place != _ZEROS}
    found[-1] = size.to_bytes(8, "big")
    return found


@dataclass(frozen=True)
class Change:
    """A change of names that is not durable yet: (name, file or None) pairs that happen together."""

    names: tuple[tuple[str, int | None], ...]

    @property
    def folders(self) -> set[str]:
        return {os.path.dirname(name) for name, _ in self.names}


class Disk:
    """Device and page cache of one store while events are applied to them."""

    def __init__(self, pages: memoryview) -> None:
        self._pages = pages
        self._files: dict[int, File] = {}
        self._durable: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._pending: list[Change] = []

    def apply(self, event: Event) -> None:
        """One event of the record."""
        op, path = event["op"], event.get("path", "")
        if op == "look":
            for name, (size, pages) in event["files"].items():
                # A file that is not known by name was made by another way; the record says so in ``missed``.
                self._files[self._names[name]].write(size, pages)
        elif op == "sync":
            file = self._files[self._names[path]]
            if event["pages"] or event["size"] != file.size:
                file.write(event["size"], event["pages"])
            file.sync()
        elif op == "cut":
            self._files[self._names[path]].shorten(event["size"])
        elif op == "syncdir":
            self._sync_folder(path)
        elif op == "create":
            number = len(self._files) + 1
            self._files[number] = File()
            self._change((path, number))
        elif op == "mkdir":
            self._change((path, _FOLDER))
        elif op == "rename":
            self._change((path, None), (event["to"], self._names[path]))
        else:
            self._change((path, None))

    def _change(self, *names: tuple[str, int | None]) -> None:
        self._pending.append(Change(names))
        _put(self._names, names)

    def _sync_folder(self, folder: str) -> None:
        wanted: set[int] = set()
        for index, change in enumerate(self._pending):
            if folder in change.folders:
                wanted |= self._with_what_it_needs(index)
        for index in sorted(wanted):
            _put(self._durable, self._pending[index].names)
        self._pending = [change for index, change in enumerate(self._pending) if index not in wanted]

    def _with_what_it_needs(self, index: int) -> set[int]:
        needed, open_names = {index}, {name for name, _ in self._pending[index].names}
        for earlier in range(index - 1, -1, -1):
            names = {name for name, _ in self._pending[earlier].names}
            if names & open_names:
                needed.add(earlier)
                open_names |= names
        return needed

    def write_image(self, folder: Path, chance: random.Random) -> None:
        """Make ``folder`` the store as a power cut now may leave it; ``chance`` chooses."""
        names = dict(self._durable)
        share = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        chosen: set[int] = set()
        for index in range(len(self._pending)):
            if chance.random() < share:
                chosen |= self._with_what_it_needs(index)
        for index in sorted(chosen):
            _put(names, self._pending[index].names)
        self._write(folder, names, lambda file: file.left_by_chance(chance, self._pages))

    def write_cached(self, folder: Path) -> None:
        """Make ``folder`` the store as the page cache has it: what SIGKILL of every process leaves."""
        self._write(folder, self._names, lambda file: file.as_cached(self._pages))

    def _write(self, folder: Path, names: dict[str, int], content_of: Any) -> None:
        folder.mkdir(parents=True)
        there = {""}
        for name in sorted(names):
            if os.path.dirname(name) not in there:
                continue  # the folder's own name did not reach the disk
            path = f"{folder}/{name}"
            if names[name] == _FOLDER:
                os.mkdir(path)
                there.add(name)
                continue
            content: dict[int, bytes] = content_of(self._files[names[name]])
            size = int.from_bytes(content.pop(-1), "big")
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                for number, page in content.items():
                    if number * PAGE_BYTES < size:
                        os.pwrite(fd, page[: size - number * PAGE_BYTES], number * PAGE_BYTES)
                os.ftruncate(fd, size)
            finally:
                os.close(fd)


def _put(names: dict[str, int], changes: tuple[tuple[str, int | None], ...]) -> None:
    for name, file in changes:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


class Record:
    """A record that was made: its events, and disks at any of them."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "journal", "rb") as file:
            self.events: list[Event] = [json.loads(line) for line in file]
        self._pages = memoryview((folder / "pages").read_bytes())
        self.missed = (folder / "missed").read_text()

    def disks(self, moments: list[int]) -> Iterator[tuple[int, Disk]]:
        """The disk after each of ``moments`` (event numbers, ascending)."""
        disk = Disk(self._pages)
        done = 0
        for moment in moments:
            while done <= moment:
                disk.apply(self.events[done])
                done += 1
            yield moment, disk
