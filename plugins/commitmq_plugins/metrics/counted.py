"""What all processes of the node have counted: their tables, added up where several count the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.counting.table import SUFFIX, CountReader, Described

_NAMES: Final = ("topic", "group", "consumer_group")

Labels = tuple[str, ...]


@dataclass(slots=True)
class Counted:
    """One metric: what it is, and the values of each row by the values of its labels."""

    described: Described
    rows: dict[Labels, list[int]] = field(default_factory=dict)

    @property
    def is_of_names(self) -> bool:
        """Whether there is a row for each topic or group: clients can make any number of these."""
        return any(label in _NAMES for label in self.described.labels)

    def labels(self, values: Labels) -> dict[str, str]:
        return dict(zip(self.described.labels, values, strict=True))


@dataclass(slots=True)
class _Seen:
    values: int
    at_s: float


class CountFiles:
    """The tables in ``folder``. Not thread-safe."""

    def __init__(self, folder: Path, idle_after_s: float) -> None:
        self._folder, self._idle_after_s = folder, idle_after_s
        self._readers: dict[Path, CountReader] = {}
        self._seen: dict[tuple[str, Labels], _Seen] = {}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def read(self, now_s: float) -> dict[str, Counted]:
        """All metrics by name. Rows of a topic or a group that did not change for long are left out."""
        found: dict[str, Counted] = {}
        for reader in self._tables():
            for _, described, values in reader.rows():
                metric = found.get(described.name)
                if metric is None:
                    metric = found[described.name] = Counted(described)
                elif (
                    tuple(metric.described.labels) != tuple(described.labels)
                    or metric.described.bounds != described.bounds
                ):
                    continue  # two workers have different metrics of one name: the first one's is shown
                labels = tuple(described.labels.values())
                known = metric.rows.get(labels)
                if known is not None:
                    values = [one + other for one, other in zip(known, values, strict=True)]
                metric.rows[labels] = values
        self._leave_out(found, now_s)
        return found

    def _tables(self) -> Iterable[CountReader]:
        paths = set(self._folder.glob(f"*{SUFFIX}"))
        for path in [path for path, reader in self._readers.items() if path not in paths or not reader.is_current]:
            self._readers.pop(path).close()
        for path in paths - self._readers.keys():
            with contextlib.suppress(OSError, ValueError):
                self._readers[path] = CountReader(path)
        return [self._readers[path] for path in sorted(self._readers)]

    def _leave_out(self, found: dict[str, Counted], now_s: float) -> None:
        seen: dict[tuple[str, Labels], _Seen] = {}
        for name, metric in found.items():
            if not metric.is_of_names:
                continue
            for labels, values in list(metric.rows.items()):
                former = self._seen.get((name, labels))
                if former is None or former.values != values[0]:
                    former = _Seen(values[0], now_s)
                seen[name, labels] = former
                is_waiting = metric.described.kind == "gauge" and values[0] != 0
                if now_s - former.at_s >= self._idle_after_s and not is_waiting:
                    del metric.rows[labels]
        self._seen = seen
