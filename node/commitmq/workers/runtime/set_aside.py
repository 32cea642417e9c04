"""Messages that a process has *set aside*: no copy of them fits, not even a dead letter
(:mod:`commitmq.semantics.derived`).

Such a message stays where it lies, and the process continues behind it. It is counted and logged once, and it stands in
``commitmq/set_aside/ROLE.json``, from which ``commitmq dlq stuck`` lists it. A process that meets a message a second
time, because it died before its position was written down, knows it by its place.

The file is ``{"count": n, "messages": [{…}]}``: the number of all, and the last MOST_KEPT of them, the oldest first.
The group that has the most there gives way, or the topic where there is no group, so that one cannot push out those of
all others::

    at            when it was set aside (ms)
    why           a sentence
    topic, queue, queue_offset, physical_offset    where it lies; omitted where it cannot be told
    group         the group to which it cannot come back; omitted where there is none
    unique_key    omitted where it has none
    received      when the group received it (ms), where that tells it from one at the same offset of a later topic of
    the name
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq import counting
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.files import atomic_file
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

MOST_KEPT: Final = 1_000
_MOST_LINES: Final = 16  # in the log, in each _LINES_MS
_LINES_MS: Final = 60_000
_WRITE_MS: Final = 200  # between two writes of the file
_PLACE: Final = ("group", "topic", "queue", "queue_offset", "physical_offset", "received")
_NUMBERS: Final = frozenset(("at", "queue", "queue_offset", "physical_offset", "received"))
_MOST: Final = (1 << 63) - 1

Entry = dict[str, Any]


class SetAside:
    """Those of one process. ``count``: how many there were, also in previous runs."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._path = context.layout.set_aside / f"{context.role}.json"
        self.count, entries = _loaded(self._path)
        self._entries = entries[-MOST_KEPT:]
        self._known = {_place(one) for one in self._entries}
        self._is_dirty = False
        self._write_at_ms = self._lines_until_ms = 0
        self._lines = 0
        if self.count:
            context.tell(set_aside=self.count)

    def message(self, record: Record, why: str, *, group: str = "") -> None:
        """Set ``record`` of the log aside."""
        self.note(
            why,
            group=group,
            topic=record.topic,
            queue=record.queue_id,
            queue_offset=record.queue_offset,
            physical_offset=record.physical_offset,
            unique_key=record.properties.get(Property.UNIQUE_KEY, ""),
        )

    def at(self, log: CommitLog, why: str, place: int) -> None:
        """Set the message at ``place`` of the log aside, whether or not it can be read."""
        try:
            self.message(log.record(place, check_crc=False), why)
        except (OffsetOutOfRangeError, CorruptRecordError, ValueError):
            self.note(why, physical_offset=place)

    def note(self, why: str, **place: Any) -> None:
        """Set the message at ``place`` aside (see the module for its members; empty ones are omitted)."""
        entry: Entry = {"at": time.time_ns() // 1_000_000, "why": why}
        entry |= {name: value for name, value in place.items() if value not in ("", -1)}
        if (key := _place(entry)) in self._known:
            return
        self._known.add(key)
        self._entries.append(entry)
        if len(self._entries) > MOST_KEPT:
            owners = [_owner(one) for one in self._entries]
            oldest = owners.index(Counter(owners).most_common(1)[0][0])
            self._known.discard(_place(self._entries.pop(oldest)))
        self.count += 1
        self._is_dirty = True
        self._log(entry)
        self._context.tell(set_aside=self.count)
        if (counts := self._context.counts) is not None:
            counts.count(counting.SET_ASIDE, self._context.role).add()
        self.write_down()

    def _log(self, entry: Entry) -> None:
        now = monotonic_ms()
        if now >= self._lines_until_ms:
            self._lines, self._lines_until_ms = 0, now + _LINES_MS
        self._lines += 1
        if self._lines <= _MOST_LINES:
            self._context.log.error("a message is set aside", **{k: v for k, v in entry.items() if k != "at"})

    def write_down(self, *, at_once: bool = False) -> None:
        """Write the file, if it is time. Call it in each turn. What cannot be written now is written later."""
        now = monotonic_ms()
        if not self._is_dirty or (now < self._write_at_ms and not at_once):
            return
        self._write_at_ms = now + _WRITE_MS
        try:
            self._is_dirty = not self._context.room.try_to("set_aside", self._write)
        except OSError as error:  # perhaps until an operator comes
            self._write_at_ms = now + _LINES_MS
            self._context.log.warning("the list of what is set aside cannot be written", why=str(error))

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        atomic_file.replace(self._path, orjson.dumps({"count": self.count, "messages": self._entries}), "set_aside")


def lower(folder: Path, place: int) -> bool:
    """The log was cut at ``place``: messages behind it are no more, and others may come to lie there. Whether there were any.
    Raises OSError.
    """
    was_behind = False
    for path in sorted(folder.glob("*.json")):
        count, entries = _loaded(path)
        left = [one for one in entries if int(one.get("physical_offset", -1)) < place]
        if len(left) < len(entries):
            was_behind = True
            atomic_file.replace(path, orjson.dumps({"count": count, "messages": left}), "set_aside")
    return was_behind


def listed(folder: Path) -> list[Entry]:
    """The last messages that the processes of a store have set aside, the oldest first, each with its ``process``."""
    found: list[Entry] = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.json")):
            found += [{"process": path.stem, **one} for one in _loaded(path)[1]]
    return sorted(found, key=lambda one: int(one["at"]))[-MOST_KEPT:]


def _loaded(path: Path) -> tuple[int, list[Entry]]:
    """``(count, entries)``; of a file that cannot be read, or has another shape, what is right: it only tells people."""
    try:
        content = orjson.loads(path.read_bytes())
        entries = [one for one in content["messages"] if _is_entry(one)]
        count = content["count"]
        return max(count if type(count) is int and count <= _MOST else 0, len(entries)), entries
    except (OSError, ValueError, KeyError, TypeError):
        return 0, []


def _is_entry(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and "at" in one
        and all(type(value) is (int if name in _NUMBERS else str) for name, value in one.items())
    )


def _owner(entry: Entry) -> str:
    return str(entry.get("group") or entry.get("topic"))


def _place(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in _PLACE)
