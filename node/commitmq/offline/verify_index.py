"""The index files of a store against its log: every key of a record has its item, in order, and the chains are whole.

The items of all files, one after the other, are the keys of all indexed records in the log's order (spec 4.2). So what
a batch must have is made by the same kernel that writes the files, and compared with what comes next in them. RocketMQ
indexes the record at which a rebuild began twice; such doubles are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.errors import CommitMQError
from commitmq.kernels import index as kernel
from commitmq.store.dispatch_batch import DispatchBatch
from commitmq.store.index_file import HEADER_BYTES, ITEM_BYTES, SLOT_BYTES, IndexHeader, IndexShape
from commitmq.store.index_files import list_index_files
from commitmq.store.index_reader import MappedIndex
from commitmq.store.layout import StoreLayout

Tell = Callable[..., None]

_ITEM: Final = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_KEY: Final = np.dtype([("hash", np.int64), ("offset", np.int64)])
_ROWS_AT_ONCE: Final = 1024
_SCRATCH_ITEMS: Final = 1 << 16


class IndexCheck:
    """See the module's text. Nothing is compared when there is no index at all, or it is switched off."""

    def __init__(self, layout: StoreLayout, config: NodeConfig, log_start: int, tell: Tell) -> None:
        self._folder = layout.index
        self._tell = tell
        self._names = list_index_files(self._folder) if self._folder.is_dir() else []
        self._shape = IndexShape(config.index.hash_slots, config.index.max_items)
        self._is_on = config.index.enable and bool(self._names)
        self._file = -1
        self._items: NDArray[np.void] = np.empty(0, _ITEM)
        self._at = 0
        self._total = 0
        self._behind = 0
        self._first_missing = -1
        self._log_start = log_start
        # One slot: chains of the scratch file are of no interest.
        self._scratch = np.zeros(HEADER_BYTES // 4 + 1 + 5 * _SCRATCH_ITEMS, np.int32)
        self._base = -1
        self._segment = np.empty(0, np.uint8)

    # ------------------------------------------------------------ the files

    def _next_file(self) -> bool:
        """Go on to the next file that can be read; its chains are checked as a whole."""
        while self._file + 1 < len(self._names):
            self._file += 1
            path = self._folder / self._names[self._file]
            try:
                mapped = MappedIndex(path, self._shape)
            except (CommitMQError, OSError) as error:
                self._tell("file.unreadable", path, 0, 0, str(error))
                continue
            header = mapped.header
            count = max(1, min(header.count, self._shape.max_items))
            start = HEADER_BYTES + SLOT_BYTES * self._shape.hash_slots
            items = np.frombuffer(mapped.map, _ITEM, count, start)
            self._check_chains(mapped, header, items)
            self._items, self._at = items, 1
            self._total += count - 1
            if count > 1:
                return True
        return False

    def _check_chains(self, mapped: MappedIndex, header: IndexHeader, items: NDArray[np.void]) -> None:
        path = self._folder / self._names[self._file]
        slots = np.frombuffer(mapped.map, ">i4", self._shape.hash_slots, HEADER_BYTES)
        used = int(np.count_nonzero(slots))
        if header.slots_used != used:
            self._tell("index.header", path, 32, 4, f"the header counts {header.slots_used} slots in use, {used} are")
        if header.count > self._shape.max_items or header.count < 1:
            self._tell("index.header", path, 36, 4, f"the header counts {header.count} items")
        numbers = np.arange(1, len(items))
        slot = items["hash"][1:].astype(np.int64) % self._shape.hash_slots
        order = np.argsort(slot, kind="stable")
        in_order = slot[order]
        previous = np.zeros(len(numbers), np.int64)
        same = np.concatenate(([False], in_order[1:] == in_order[:-1])) if len(numbers) else np.empty(0, np.bool_)
        previous[order] = np.where(same, np.concatenate(([0], numbers[order][:-1])) if len(numbers) else 0, 0)
        wrong = np.flatnonzero(items["previous"][1:] != previous)
        item_start = HEADER_BYTES + SLOT_BYTES * self._shape.hash_slots
        for index in wrong[:100].tolist():
            number = index + 1
            self._tell(
                "index.chain",
                path,
                item_start + ITEM_BYTES * number,
                ITEM_BYTES,
                f"item {number} leads to {int(items['previous'][number])}, its slot's item before it is {previous[index]}",
            )
        heads = np.zeros(self._shape.hash_slots, np.int64)
        heads[in_order] = numbers[order]  # the last one of each slot stays
        for number in np.flatnonzero(slots != heads)[:100].tolist():
            self._tell(
                "index.chain",
                path,
                HEADER_BYTES + SLOT_BYTES * number,
                SLOT_BYTES,
                f"slot {number} leads to item {int(slots[number])}, its newest is {heads[number]}",
            )

    # ------------------------------------------------------------ the records

    def take(self, batch: DispatchBatch) -> None:
        """Compare the items of the batch's records with those that come next."""
        if not self._is_on or batch.log is None:
            return
        base = batch.start - batch.start % batch.log.segment_bytes
        if base != self._base:
            self._segment = np.frombuffer(batch.log.read(base, batch.log.segment_bytes), np.uint8)
            self._base = base
        for start in range(0, len(batch), _ROWS_AT_ONCE):
            self._compare(self._keys(batch.rows[start : start + _ROWS_AT_ONCE]))

    def _keys(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """``hash`` and ``offset`` of every item that the rows must have."""
        parts = []
        state = np.zeros(kernel.STATE_WORDS, np.int64)
        state[kernel.STATE_LAST_OFFSET] = -1
        rows = np.ascontiguousarray(rows)
        rows.flags.writeable = False
        while True:
            state[kernel.STATE_COUNT] = 1
            result = kernel.insert(
                self._scratch, 1, _SCRATCH_ITEMS, _SCRATCH_ITEMS, self._segment, self._base, rows, state
            )
            count = int(state[kernel.STATE_COUNT])
            items = self._scratch[HEADER_BYTES // 4 + 1 :].view(_ITEM)[1:count]
            keys = np.empty(len(items), _KEY)
            keys["hash"], keys["offset"] = items["hash"], items["offset"]
            parts.append(keys)
            if result == kernel.INSERT_DONE:
                return np.concatenate(parts)

    def _compare(self, wanted: NDArray[np.void]) -> None:
        at = 0
        while at < len(wanted):
            if self._at >= len(self._items) and not self._next_file():
                self._note_missing(wanted[at:])
                return
            count = min(len(wanted) - at, len(self._items) - self._at)
            have = self._items[self._at : self._at + count]
            want = wanted[at : at + count]
            same = (have["hash"] == want["hash"]) & (have["offset"] == want["offset"])
            good = count if same.all() else int(np.argmin(same))
            self._at += good
            at += good
            if good < count:
                at += self._resolve(wanted[at])

    def _resolve(self, want: Any) -> int:
        """One item that is not the wanted one: passes over it, or over the wanted key; returns keys passed over."""
        item = self._items[self._at]
        offset = int(item["offset"])
        path = self._folder / self._names[self._file]
        position = HEADER_BYTES + SLOT_BYTES * self._shape.hash_slots + ITEM_BYTES * self._at
        if offset < self._log_start or offset < int(want["offset"]):
            if self._log_start <= offset and not self._is_double(offset):
                self._tell("index.wrong", path, position, ITEM_BYTES, f"item {self._at} stands for no key of a record")
            self._at += 1
            return 0
        if offset > int(want["offset"]):
            self._tell("index.missing", path, position, 0, f"a key of the record at {int(want['offset'])} has no item")
            return 1
        self._tell(
            "index.wrong",
            path,
            position,
            ITEM_BYTES,
            f"item {self._at} has the hash {int(item['hash'])}, the record at {offset} has {int(want['hash'])}",
        )
        self._at += 1
        return 1

    def _is_double(self, offset: int) -> bool:
        """Whether the item repeats one of the record with which the file before it ended."""
        earlier = self._items[1 : self._at]["offset"]
        return bool(self._at == 1 or (earlier == offset).any() or offset == int(self._items["offset"][1]))

    def _note_missing(self, wanted: NDArray[np.void]) -> None:
        if self._first_missing < 0:
            self._first_missing = int(wanted["offset"][0])
        self._behind += len(wanted)

    def finish(self, was_open: bool) -> tuple[int, int]:
        """Tell what was missing at the end; returns the number of files and of items."""
        if self._behind:
            newest = self._folder / self._names[-1]
            self._tell(
                "index.missing",
                newest,
                0,
                0,
                f"{self._behind} keys have no item, the first belongs to the record at {self._first_missing}",
                was_open,
            )
        while self._is_on and (self._at < len(self._items) or self._next_file()):
            rest = self._items[self._at :]
            path = self._folder / self._names[self._file]
            position = HEADER_BYTES + SLOT_BYTES * self._shape.hash_slots + ITEM_BYTES * self._at
            self._tell(
                "index.wrong",
                path,
                position,
                len(rest) * ITEM_BYTES,
                f"{len(rest)} item(s) stand for nothing in the log; the first is for the offset {int(rest['offset'][0])}",
                was_open,
            )
            self._at = len(self._items)
        return len(self._names), self._total
