"""The findings of a verification: faults of each part, combined into one report, however the work was divided.

Each part reports :class:`Fault` s, and adjacent faults of neighbouring parts belong together: a hundred missing units
are one fault, even if a part of the log ends among them. So runs (of units, of index items) are reported as such, and
become a :class:`StoreFinding` with its sentence only when all parts are done. Findings have one order, whichever part found
them when: small files, the log, queues, index, the timer; within each by place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Protocol, Self

from commitmq.format.constants import BATCH_UNIT_BYTES, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.index import ITEM_BYTES

MAX_FINDINGS: Final = 10_000
_SHOWN: Final = 50

Order = tuple[Any, ...]
"""A finding's place in the report: a group, and the sort key within it."""

SMALL_FILES, LOG, QUEUES, INDEX, CHAINS, TIMER = range(6)


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """One fault of the store. ``offset`` and ``extent`` are bytes of ``file`` (relative to the store)."""

    kind: str
    file: str
    offset: int
    extent: int
    detail: str
    is_note: bool = False


@dataclass(slots=True)
class Report:
    """The amount of data read, and the findings. Findings beyond :data:`MAX_FINDINGS` are counted in ``untold``."""

    segments: int = 0
    log_bytes: int = 0
    records: int = 0
    queues: int = 0
    units: int = 0
    index_files: int = 0
    index_items: int = 0
    seconds: float = 0.0
    findings: list[StoreFinding] = field(default_factory=list)
    untold: int = 0

    @property
    def is_sound(self) -> bool:
        return not self.untold and all(one.is_note for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"sound": self.is_sound, **asdict(self)}

    def lines(self, most: int = _SHOWN) -> list[str]:
        """The report for users: ``most`` findings, and the amount of data read."""
        lines = [
            f"{'note' if one.is_note else one.kind}: {one.file} at {one.offset}: {one.detail}"
            for one in self.findings[:most]
        ]
        untold = len(self.findings[most:]) + self.untold
        if untold > 0:
            lines.append(f"and {untold} more; --json lists them")
        lines.append(
            f"{'sound' if self.is_sound else 'DAMAGED'}: {self.records} records in {self.segments} segments, "
            f"{self.units} units of {self.queues} queues, {self.index_items} items in {self.index_files} index files"
        )
        return lines


@dataclass(frozen=True, slots=True)
class VerifyTotals:
    """Values that only all parts together give, for the sentences: sizes of queue files, whether the store was left
    open, the end of the log's last whole record, and the index files with the number of items before each, the sum
    last.
    """

    file_bytes: int
    batch_file_bytes: int
    was_open: bool
    log_end: int = 0
    index_names: tuple[str, ...] = ()
    index_starts: tuple[int, ...] = (0,)
    item_position: int = 0


class Fault(Protocol):
    """One fault, or a run of equal faults."""

    @property
    def order(self) -> Order: ...

    def joined(self, following: Any) -> Self | None:
        """This fault and the ``following`` one (in order) as one; None when they are not adjacent."""
        ...

    def to_finding(self, outcome: VerifyTotals) -> StoreFinding: ...


@dataclass(frozen=True, slots=True)
class Single:
    """A fault that is never joined with others."""

    order: Order
    finding: StoreFinding

    def joined(self, following: Any) -> None:
        return None

    def to_finding(self, outcome: VerifyTotals) -> StoreFinding:
        return self.finding


@dataclass(frozen=True, slots=True)
class UnitRun:
    """``count`` units of a queue, from number ``number`` on, that are missing or wrong (``kind``). ``expected`` and
    ``found`` describe the first unit, ``physical_offset`` is that of its record.
    """

    kind: str
    is_batch: bool
    topic: str
    queue_id: int
    number: int
    count: int
    physical_offset: int
    expected: str
    found: str

    @property
    def order(self) -> Order:
        # Sorted by queue first, so that adjacent runs are neighbours.
        return QUEUES, self.is_batch, self.topic, self.queue_id, 0, self.kind, self.number * self._unit_bytes

    @property
    def _unit_bytes(self) -> int:
        return BATCH_UNIT_BYTES if self.is_batch else UNIT_BYTES

    def joined(self, following: Any) -> UnitRun | None:
        if (
            isinstance(following, UnitRun)
            and (following.kind, following.is_batch, following.topic, following.queue_id)
            == (self.kind, self.is_batch, self.topic, self.queue_id)
            and following.number == self.number + self.count
        ):
            return replace(self, count=self.count + following.count)
        return None

    def to_finding(self, outcome: VerifyTotals) -> StoreFinding:
        at = self.number * self._unit_bytes
        base = at - at % (outcome.batch_file_bytes if self.is_batch else outcome.file_bytes)
        folder = "batchconsumequeue" if self.is_batch else "consumequeue"
        file = f"{folder}/{self.topic}/{self.queue_id}/{segment_name(base)}"
        what = f"units {self.number} to {self.number + self.count - 1}" if self.count > 1 else f"unit {self.number}"
        what = f"{what} of {self.topic} queue {self.queue_id}"
        is_note = self.kind == "queue.extension"
        if is_note:
            detail = f"the extension units of {what} are lost: readers look at the records"
        elif self.kind == "queue.missing":
            detail = f"{what} are not there; the first record is at {self.physical_offset}"
            is_note = outcome.was_open
        else:
            detail = f"{what}: the first is {self.found}, its record is {self.expected}"
        return StoreFinding(self.kind, file, at - base, self.count * self._unit_bytes, detail, is_note)


@dataclass(frozen=True, slots=True)
class ItemRun:
    """``count`` keys without an item, or items without a key (``kind``); ``at`` numbers the items of all files from 0.

    ``at`` is the first such item, or the one before which the missing ones belong; ``physical_offset`` is that of its
    record.
    """

    kind: str
    at: int
    count: int
    physical_offset: int
    last_offset: int

    @property
    def order(self) -> Order:
        return INDEX, self.kind, self.at, self.physical_offset

    def joined(self, following: Any) -> ItemRun | None:
        if isinstance(following, ItemRun) and following.kind == self.kind:
            next_one = self.at if self.kind == "index.missing" else self.at + self.count
            if following.at == next_one:
                return replace(self, count=self.count + following.count, last_offset=following.last_offset)
        return None

    def to_finding(self, outcome: VerifyTotals) -> StoreFinding:
        is_behind = self.at >= outcome.index_starts[-1]
        number = len(outcome.index_names) - 1
        if not is_behind:
            number = max(index for index, start in enumerate(outcome.index_starts[:-1]) if start <= self.at)
        file = f"index/{outcome.index_names[number]}" if outcome.index_names else "index"
        position = 0 if is_behind else outcome.item_position + ITEM_BYTES * (self.at - outcome.index_starts[number])
        first = self.physical_offset
        if self.kind == "index.missing":
            detail = f"{self.count} key(s) have no item, the first belongs to the record at {first}"
            return StoreFinding(self.kind, file, position, 0, detail, is_behind and outcome.was_open)
        detail = f"{self.count} item(s) stand for no key of a record; the first is for the offset {first}"
        return StoreFinding(
            self.kind, file, position, ITEM_BYTES * self.count, detail, outcome.was_open and first >= outcome.log_end
        )


class Faults:
    """Faults of one part, or of many; keeps the first :data:`MAX_FINDINGS` in order, and counts the others."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults: list[Fault] = list(faults)
        self.untold = 0

    def add(self, fault: Fault) -> None:
        """Note ``fault``; it is joined with the newest one if it continues that."""
        joined = self.faults[-1].joined(fault) if self.faults else None
        if joined is not None:
            self.faults[-1] = joined
            return
        self.faults.append(fault)
        if len(self.faults) >= 2 * MAX_FINDINGS:
            self._settle()

    def take(self, other: Faults) -> None:
        """Add the faults of another part."""
        self.faults += other.faults
        self.untold += other.untold
        if len(self.faults) >= 2 * MAX_FINDINGS:
            self._settle()

    def _settle(self) -> None:
        """Sort the faults, join adjacent ones, and keep no more than MAX_FINDINGS."""
        self.faults.sort(key=lambda one: one.order)
        joined: list[Fault] = []
        for fault in self.faults:
            both = joined[-1].joined(fault) if joined else None
            if both is not None:
                joined[-1] = both
            else:
                joined.append(fault)
        self.untold += len(joined[MAX_FINDINGS:])
        self.faults = joined[:MAX_FINDINGS]

    def findings(self, outcome: VerifyTotals) -> list[StoreFinding]:
        self._settle()
        return [fault.to_finding(outcome) for fault in self.faults]
