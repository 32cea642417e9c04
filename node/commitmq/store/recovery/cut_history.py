"""``commitmq/cut_history``: at which moments the log ended earlier than somebody may have seen it, and where.

A power cut takes what was not flushed; a repair, an allowed cut and a copy of an earlier moment take even more. Whoever knows
a place that lay behind that end must go back to it, before messages stored since make the place look right. So each such
moment, a *cut*, begins a new *generation* of the store, and a place is judged by the generation in which it was learnt: it is
lowered to the lowest end of all cuts that came later (:meth:`CutHistory.end_since`). A place below that end is as it was. The
end in bytes is enough for queues too: a queue's end at the cut is behind its last unit whose record ends at or below it.

    line 1    ``CMQCUTS1``, a space, CRC-32 of line 2 in 8 hexadecimal digits
    line 2    JSON:
        generation   int   of the store now; 0 only without a file
        lowered      int   all places in the store's own files are lowered for the cuts up to this generation
        served       int   the generation in which the node served before its last start
        home         int   inode of the store's folder; 0: of a copy that an offline verb changed before its first start
        saved_ms     int   when the file was written
        total        int   number of cuts ever
        positions    int   number of committed offsets ever lowered
        cuts         list  the newest MOST_CUTS, oldest first, each an object:
            generation   int   the one that it began: larger than every earlier one, and no smaller than the time in ms
            time_ms      int   of the cut, by the clock
            by           str   "first use", "copied store", "recovery", "allow-cut" or "repair --cut"
            end          int   physical offset where the log ended
            cut_id       int   the same cut in the journal of cut bytes (:mod:`commitmq.store.recovery.cut_record`), 0 for none
            lowered      dict  what was lowered in the store's files: number of groups, positions and messages

A cut that takes nothing is harmless: it lowers no place. So one is written down whenever something *may* be missing: at the
first use of a store, also one that RocketMQ used since; of a copied folder, because the original may have gone on; and after
a death, unless it is known that the log still has all that was written (:func:`commitmq.store.recovery.cut_record`). Because a
generation is no smaller than the clock, a copy never gets one that the original had.

The folder of a copy has another inode, or by chance the same one, where it took the place of the original. But the time at
which a file was changed last (``ctime``) belongs to the file system, and no program can copy it. So this file is of a copy too
when it was changed at another time than ``saved_ms``; and the sidecar, which is written in place, when it was changed at
another time than its content was.

Beyond MOST_CUTS the oldest two become one, with the later generation and the lower end: who knows a generation before them is
sent back further than necessary, and misses nothing.

Whoever cuts replaces the file, durably, before anyone is served or appends: recovery, or an offline verb. A damaged file
counts as none, so the next recovery begins a generation of its own.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson

from commitmq.files import atomic_file
from commitmq.files.disk_space import kind_of
from commitmq.store.layout import StoreLayout

MOST_CUTS: Final = 256
NO_CUT: Final = -1
BY_PERSON: Final = ("allow-cut", "repair --cut")
_MAGIC: Final = b"CMQCUTS1 "
_AT_ONCE_MS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a cut has lowered in the store's files: committed ``positions`` of ``groups``, by so many ``messages``."""

    groups: int = 0
    positions: int = 0
    messages: int = 0


@dataclass(frozen=True, slots=True)
class LogCut:
    """One cut; see the module's text."""

    generation: int
    time_ms: int
    by: str
    end: int
    cut_id: int = 0
    lowered: Lowered = field(default_factory=Lowered)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class CutHistory:
    """The file's content; see the module's text."""

    generation: int = 0
    lowered: int = 0
    served: int = 0
    home: int = 0
    total: int = 0
    positions: int = 0
    cuts: list[LogCut] = field(default_factory=list)
    is_copy: bool = False
    """Whether a copy of the store has it, and no generation was begun there yet."""

    @classmethod
    def load(cls, layout: StoreLayout) -> CutHistory:
        """The history of a store; one without any generation when there is no file, or a damaged one. Raises OSError."""
        try:
            head, _, data = layout.cut_history.read_bytes().partition(b"\n")
        except (FileNotFoundError, IsADirectoryError):
            return cls()
        try:
            if not head.startswith(_MAGIC) or int(head[len(_MAGIC) :], 16) != zlib.crc32(data):
                return cls()
            found = orjson.loads(data)
            numbers = {
                name: int(found[name]) for name in ("generation", "lowered", "served", "home", "total", "positions")
            }
            is_copy = numbers["home"] != home_of(layout) or _is_copied(layout, int(found["saved_ms"]))
            return cls(**numbers, cuts=[_cut(one) for one in found["cuts"]], is_copy=is_copy)
        except (ValueError, KeyError, TypeError):
            return cls()

    def save(self, layout: StoreLayout) -> None:
        """Replace the file, durably. Raises StoreError (DiskFullError); then it has the old or the new content."""
        self.home = 0 if self.is_copy else home_of(layout)
        members = asdict(self) | {"saved_ms": _now_ms()}
        del members["is_copy"]
        data = orjson.dumps(members)
        path = layout.cut_history
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.make_way(path)
            atomic_file.replace(path, b"%s%08x\n%s" % (_MAGIC, zlib.crc32(data), data), "cut_history")
        except OSError as error:
            kind = kind_of(error)
            raise kind(f"cannot write down where the log was cut: {error.strerror}", path=path) from error

    def add(self, end: int, by: str, cut_id: int = 0) -> LogCut:
        """Begin a generation: the log ends at ``end`` now, and may have ended later. :meth:`save` comes next."""
        self.is_copy, now_ms = False, _now_ms()
        self.generation = max(self.generation + 1, now_ms)
        cut = LogCut(self.generation, now_ms, by, end, cut_id)
        self.cuts.append(cut)
        self.total += 1
        if len(self.cuts) > MOST_CUTS:
            first, second = self.cuts[:2]
            self.cuts[:2] = [LogCut(second.generation, second.time_ms, second.by, min(first.end, second.end))]
        return cut

    def forget(self, cut_id: int) -> None:
        """The bytes of this cut are in the log again: nothing has to be lowered for it any more. The generation stays."""
        self.cuts = [one for one in self.cuts if not cut_id or one.cut_id != cut_id]

    def has(self, cut_id: int) -> bool:
        """Whether a cut of the journal of cut bytes is written down here."""
        return any(one.cut_id == cut_id for one in self.cuts)

    def end_since(self, generation: int) -> int:
        """The lowest end of the log since ``generation`` was learnt: a place behind it is lowered to it. NO_CUT when the log
        was not cut since.

        A generation that this store never had comes from another copy of it, and every cut counts.
        """
        if generation == self.generation:
            return NO_CUT
        known = generation if generation < self.generation else -1
        return min((cut.end for cut in self.cuts if cut.generation > known), default=NO_CUT)

    @property
    def pending_end(self) -> int:
        """:meth:`end_since` for the store's own files."""
        return self.end_since(self.lowered)

    def has_lowered(self, what: Lowered) -> None:
        """All places in the store's files are lowered; ``what`` belongs to the newest cut."""
        self.lowered = self.generation
        self.positions += what.positions
        if self.cuts:
            last = self.cuts[-1]
            self.cuts[-1] = LogCut(last.generation, last.time_ms, last.by, last.end, last.cut_id, what)


def home_of(layout: StoreLayout) -> int:
    """What a copy of the store's folder does not share with it: the inode of the folder."""
    return layout.root.stat().st_ino


def _is_copied(layout: StoreLayout, saved_ms: int) -> bool:
    """Whether a program made this file, or the sidecar, from one of another place or time."""
    if abs(layout.cut_history.stat().st_ctime_ns // 1_000_000 - saved_ms) > _AT_ONCE_MS:
        return True
    with contextlib.suppress(OSError):
        sidecar = layout.sidecar.stat()
        return sidecar.st_ctime_ns != sidecar.st_mtime_ns
    return False


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def note_cut(layout: StoreLayout, end: int, by: str, cut_id: int) -> None:
    """Write down, durably and once, that the log is about to be cut at ``end``. Raises StoreError, OSError."""
    history = CutHistory.load(layout)
    if not history.has(cut_id):
        history.add(end, by, cut_id)
        history.save(layout)


def note_restored(layout: StoreLayout, cut_id: int) -> None:
    """Write down, durably, that the bytes of a cut are in the log again. Raises StoreError, OSError."""
    history = CutHistory.load(layout)
    if history.has(cut_id):
        history.forget(cut_id)
        history.save(layout)


def _cut(found: dict[str, Any]) -> LogCut:
    lowered = Lowered(**found["lowered"])
    generation, time_ms, end, cut_id = (int(found[name]) for name in ("generation", "time_ms", "end", "cut_id"))
    return LogCut(generation, time_ms, str(found["by"]), end, cut_id, lowered)
