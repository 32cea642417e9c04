"""The sizes of a store's files, as the store itself shows them; the sizes have the configuration's names.

    commit_log.segment_bytes          length of the segments; their names must be one length apart
    consume_queue.file_bytes          length of most of the examined files, because one of them may be damaged
    consume_queue.batch_file_bytes    the same, of BatchCQ topics
    consume_queue.ext_file_bytes      the same, of extensions
    index.hash_slots, max_items       by :mod:`commitmq.store.index.index_shape`

RocketMQ makes every file at its full size (spec 1.3), so a file's length is its size, and a file of 0 bytes is just
being made. Only for the index do the files override the sizes in ``commitmq/store.json``, where their items show other
ones: the index is derived, and RocketMQ or an administrator may have rebuilt it. Index files that show nothing are torn,
and the node makes them again. A CommitLog or queues of other sizes than ``store.json`` has are
another store's files, or were cut short.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.files.mapped_file import list_sizes
from commitmq.format.constants import BATCH_UNIT_BYTES, UNIT_BYTES
from commitmq.format.index_header import IndexShape
from commitmq.store.access import refusals_told
from commitmq.store.index.index_shape import find_shape
from commitmq.store.layout import StoreLayout
from commitmq.store.store_file import StoreFile

SEGMENT: Final = "commit_log.segment_bytes"
QUEUE_FILE: Final = "consume_queue.file_bytes"
BATCH_FILE: Final = "consume_queue.batch_file_bytes"
EXT_FILE: Final = "consume_queue.ext_file_bytes"
HASH_SLOTS: Final = "index.hash_slots"
MAX_ITEMS: Final = "index.max_items"
INDEX: Final = (HASH_SLOTS, MAX_ITEMS)
SIZES: Final = (SEGMENT, QUEUE_FILE, BATCH_FILE, EXT_FILE, *INDEX)

_UNIT_BYTES: Final = {QUEUE_FILE: UNIT_BYTES, BATCH_FILE: BATCH_UNIT_BYTES, EXT_FILE: 1}
_MOST_FILES: Final = 1_000  # of each kind of queue: examining 100,000 would take too long
_ROCKETMQ_SHAPE: Final = IndexShape(5_000_000, 20_000_000)


@dataclass(frozen=True, slots=True)
class Geometry:
    """``found``: the sizes that the files show; ``shown_by``: one such file for each. ``remembered``: the sizes in
    store.json.

    ``forgotten`` says why ``remembered`` is missing although there is a store; "" when all is well or the store is new.
    ``index_problem`` says why the index files cannot be used.
    """

    found: Mapping[str, int]
    shown_by: Mapping[str, str]
    remembered: StoreFile | None
    forgotten: str = ""
    index_problem: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the store: remembered, else found. A size known from neither is missing."""
        remembered = {} if self.remembered is None else dict(self.remembered.sizes)
        return {**self.found, **remembered, **{key: self.found[key] for key in INDEX if key in self.found}}

    def disagreements(self, confirmed: Collection[str] = ()) -> list[str]:
        """Clauses of a message: files whose size differs from the remembered one, except those of ``confirmed``, and
        those that the node makes up for.
        """
        if self.remembered is None:
            return []
        return [
            f"the store remembers {key}={size}, but {self.shown_by[key]} has {self.found[key]} bytes"
            for key, size in self.remembered.sizes.items()
            if key not in (*INDEX, EXT_FILE) and key not in confirmed and self.found.get(key, size) != size
        ]


@dataclass(slots=True)
class _Finds:
    sizes: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def note(self, key: str, size: int, file: str) -> None:
        self.sizes[key], self.files[key] = size, file


def look(layout: StoreLayout, *, index: bool = True, likely: Iterable[IndexShape] = ()) -> Geometry:
    """Read the store's sizes from its files. Changes nothing and does not raise for damage: opening the files does
    that.

    ``index``: whether to examine the index. ``likely``: shapes that its files may have, tried first. Raises StoreError
    where this account lacks permission.
    """
    with refusals_told(layout.root):
        return _look(layout, index, likely)


def _look(layout: StoreLayout, index: bool, likely: Iterable[IndexShape]) -> Geometry:
    remembered, forgotten = None, ""
    try:
        remembered = StoreFile.load(layout.store_file)
    except ValueError as error:
        forgotten = f"{layout.store_file} is damaged ({error})"
    finds = _Finds()
    _look_at_log(layout.commit_log, finds)
    for key, folder in (
        (QUEUE_FILE, layout.consume_queue),
        (BATCH_FILE, layout.batch_consume_queue),
        (EXT_FILE, layout.consume_queue_ext),
    ):
        _look_at_queues(folder, key, finds, None if remembered is None else remembered.sizes.get(key))
    problem = ""
    if index:
        known = {} if remembered is None else remembered.sizes
        own = [IndexShape(known[HASH_SLOTS], known[MAX_ITEMS])] if all(key in known for key in INDEX) else []
        shape = find_shape(layout.index, [*own, *likely, _ROCKETMQ_SHAPE])
        # The node's own files are made again where they are torn; only files of an unknown shape are left to a person.
        problem = "" if own else shape.problem
        if shape.shape is not None and (shape.is_shown or not own or shape.shape in own):
            finds.note(HASH_SLOTS, shape.shape.hash_slots, f"{layout.index / shape.file}")
            finds.note(MAX_ITEMS, shape.shape.max_items, f"{layout.index / shape.file}")
    if remembered is None and not forgotten and SEGMENT in finds.sizes:
        forgotten = f"there is no {layout.store_file}"
    return Geometry(finds.sizes, finds.files, remembered, forgotten, problem)


def _look_at_log(folder: Path, finds: _Finds) -> None:
    files = [(base, size) for base, size in list_sizes(folder, 1) if size]
    if not files:
        return
    size = Counter(size for _, size in files).most_common(1)[0][0]
    if len(files) > 1:
        # Of two lengths, take the distance of the names: a segment may have been cut short, but its name is right.
        apart = min(after - before for (before, _), (after, _) in itertools.pairwise(files))
        if any(one == apart for _, one in files):
            size = apart
    base = next(base for base, one in files if one == size)
    finds.note(SEGMENT, size, str(folder / f"{base:020d}"))


def _look_at_queues(folder: Path, key: str, finds: _Finds, wanted: int | None) -> None:
    """The most frequent length that holds whole units; of two equally frequent ones, ``wanted``."""
    lengths: Counter[int] = Counter()
    files: dict[int, str] = {}
    for number, (path, size) in enumerate(_queue_files(folder)):
        if number >= _MOST_FILES:
            break
        if size and size % _UNIT_BYTES[key] == 0:
            lengths[size] += 1
            files.setdefault(size, path)
    if lengths:
        size = max(lengths, key=lambda one: (lengths[one], one == wanted))
        finds.note(key, size, files[size])


def _queue_files(folder: Path) -> Iterator[tuple[str, int]]:
    """``(path, size)`` of files ``topic/queue/20 digits`` below ``folder``."""
    for topic in _scan(folder):
        for queue in _scan(topic.path):
            for file in _scan(queue.path):
                if len(file.name) == 20 and file.name.isascii() and file.name.isdigit():
                    try:
                        yield file.path, file.stat().st_size
                    except FileNotFoundError:
                        continue  # expired meanwhile, in a store with a running node


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
