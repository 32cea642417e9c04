"""A measurement saved in a file, and the comparison of a later one with it.

The file is JSON: the figures, their settings, the machine, and the floors of that moment
(:mod:`commitmq.bench.floors`). A later measurement is compared only when its settings are the same. A ratio says how
many times better the later figure is, in every unit: 1.1 is a tenth more messages a second or a tenth less time. For
the corrected ratio both figures are divided by their own run's floor first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from commitmq.bench.figures import Spread
from commitmq.bench.floors import Floors
from commitmq.errors import CommitMQError
from commitmq.files import atomic_file

FORMAT: Final = "commitmq-bench-baseline-1"


class BaselineError(CommitMQError):
    """A baseline cannot be read, or is of another measurement."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One result of several runs. ``floor``: the floor it depends on most, see :mod:`commitmq.bench.floors`."""

    name: str
    unit: str
    value: Spread
    more_is_better: bool
    floor: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of one measurement. ``settings``: everything that must be equal for a comparison."""

    bench: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    floors: Floors
    figures: tuple[Figure, ...]
    taken: str = ""

    def save(self, path: Path) -> None:
        """Write the file, or leave an existing one unchanged. Raises OSError."""
        taken = self.taken or datetime.now(UTC).isoformat(timespec="seconds")
        report = {"format": FORMAT, **asdict(self), "taken": taken}
        atomic_file.replace(
            path, (json.dumps(report, indent=2) + "\n").encode("ascii"), "baseline", durable=False, mode=0o600
        )

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read a file of :meth:`save`. Raises BaselineError, OSError."""
        try:
            report = json.loads(path.read_bytes())
            if report.pop("format") != FORMAT:
                raise ValueError("another format")
            figures = tuple(Figure(**{**one, "value": Spread(**one["value"])}) for one in report.pop("figures"))
            return cls(**report | {"floors": Floors(**report["floors"]), "figures": figures})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BaselineError(f"{path} is no baseline of `commitmq bench --save` ({error!r})") from error


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure then and now, medians. ``corrected`` is None when the floor could not be measured in both runs."""

    name: str
    unit: str
    before: float
    now: float
    ratio: float
    corrected: float | None

    @property
    def judged(self) -> float:
        """The ratio that shows whether CommitMQ itself became slower."""
        return self.ratio if self.corrected is None else self.corrected


def check_comparable(before: Baseline, bench: str, settings: dict[str, Any]) -> None:
    """Raises BaselineError when ``before`` has other settings. Call it before the measurement takes its time."""
    if before.bench != bench:
        raise BaselineError(f"the baseline is one of `bench {before.bench}`, this is `bench {bench}`")
    other = sorted(key for key in before.settings.keys() | settings if before.settings.get(key) != settings.get(key))
    if other:
        told = ", ".join(f"{key} {before.settings.get(key)!r} then and {settings.get(key)!r} now" for key in other)
        raise BaselineError(f"the baseline was measured with other settings: {told}")


def compare(before: Baseline, now: Baseline) -> list[Compared]:
    """Each figure that both have. Raises BaselineError as :func:`check_comparable`, or when they share none."""
    check_comparable(before, now.bench, now.settings)
    known = {figure.name: figure for figure in before.figures}
    found = [_compare(known[one.name], before.floors, one, now.floors) for one in now.figures if one.name in known]
    if not found:
        raise BaselineError("the baseline has none of this measurement's figures")
    return found


def _compare(old: Figure, old_floors: Floors, new: Figure, new_floors: Floors) -> Compared:
    before, now = old.value.median, new.value.median
    old_floor, new_floor = old_floors.of(new.floor), new_floors.of(new.floor)
    corrected = None
    if old_floor and new_floor:
        corrected = round(_ratio(before / old_floor, now / new_floor, new.more_is_better), 3)
    return Compared(new.name, new.unit, before, now, round(_ratio(before, now, new.more_is_better), 3), corrected)


def _ratio(before: float, now: float, more_is_better: bool) -> float:
    return now / before if more_is_better else before / now
