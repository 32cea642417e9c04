"""The results of a run as one JSON document, which is on disk after every measurement; their medians and ratios."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.figures import figures_of
from bench.system import BenchError

FORMAT: Final = 1
FILE: Final = "results.json"


@dataclass(frozen=True, order=True)
class Row:
    """The key of one median: the same workload, durability, system and variant in all rounds."""

    workload: str
    durability: str
    system: str
    variant: str = ""


@dataclass(frozen=True)
class Spread:
    """One figure of several rounds."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError without values."""
        if not values:
            raise ValueError("a median needs at least one value")
        return cls(median(values), min(values), max(values), len(values))


class Results:
    """The document of one run. An interrupted run repeats whole sessions: it does an unfinished session again."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder = folder
        self.document = document

    @classmethod
    def new(cls, folder: Path, **about: Any) -> Results:
        """The document of a new run. Raises BenchError when ``folder`` already has one."""
        if (folder / FILE).exists():
            raise BenchError(f"{folder / FILE} exists: give another folder, or --resume it")
        folder.mkdir(parents=True, exist_ok=True)
        empty: dict[str, Any] = {"systems": {}, "sessions": [], "measurements": []}
        results = cls(folder, {"format": FORMAT, **about, **empty})
        results.save()
        return results

    @classmethod
    def load(cls, folder: Path) -> Results:
        """The document of a former run. Raises BenchError when it cannot be read."""
        try:
            document = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchError(f"{folder / FILE} cannot be read: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise BenchError(f"{folder / FILE} has another format than {FORMAT}")
        return cls(folder, document)

    def save(self) -> None:
        """Replace the file at once, so that an interruption leaves the old or the new one."""
        path = self.folder / FILE
        new = path.with_suffix(".new")
        with open(new, "w", encoding="utf-8") as file:
            json.dump(self.document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    # ------------------------------------------------------------ writing

    def add(self, session: dict[str, Any], workload: str, variant: str, **what: Any) -> None:
        """One measurement of ``session``: its job, and a result or an error."""
        self.measurements.append({**_key(session), "workload": workload, "variant": variant, **what})
        self.save()

    def is_done(self, session: dict[str, Any]) -> bool:
        """True when the session was finished by an earlier run."""
        return any(_key(one) == _key(session) for one in self.document["sessions"])

    def begin(self, session: dict[str, Any]) -> None:
        """Forget the measurements that an interrupted run left of this session."""
        key = _key(session)
        self.document["measurements"] = [
            one for one in self.measurements if any(one[name] != value for name, value in key.items())
        ]

    def finish(self, session: dict[str, Any]) -> None:
        """Note that the session is complete; it may have more fields, like the load."""
        self.document["sessions"].append(session)
        self.save()

    # ------------------------------------------------------------ reading

    @property
    def measurements(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["measurements"]
        return found

    def rows(self) -> dict[Row, dict[int, dict[str, float]]]:
        """The figures of each row by round, from the measurements with a result."""
        rows: dict[Row, dict[int, dict[str, float]]] = {}
        for one in self.measurements:
            row = _row(one)
            figures = rows.setdefault(row, {})
            if "result" in one:
                figures[one["round"]] = figures_of(one["work"], one["result"])
        return rows

    def errors(self) -> dict[Row, list[str]]:
        """The reasons of missing measurements, and failed sends within others."""
        found: dict[Row, list[str]] = {}
        for one in self.measurements:
            if "error" in one:
                found.setdefault(_row(one), []).append(one["error"])
            elif one["result"].get("errors"):
                text = f"{one['result']['errors']} messages failed or did not arrive"
                found.setdefault(_row(one), []).append(text)
        return found

    def spread(self, row: Row, figure: str) -> Spread | None:
        """Median, lowest and highest of ``figure`` over the rounds; None without any."""
        values = [figures[figure] for figures in self.rows().get(row, {}).values() if figure in figures]
        return Spread.of(values) if values else None

    def ratio(self, ours: tuple[Row, str], theirs: tuple[Row, str]) -> Spread | None:
        """Our figure divided by theirs: the ratio of the medians, with the lowest and highest ratio of one round."""
        rows = self.rows()
        return ratio(_by_round(rows.get(ours[0], {}), ours[1]), _by_round(rows.get(theirs[0], {}), theirs[1]))


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> Spread | None:
    """The ratio of the medians of two figures; low and high come from the rounds that have both.

    None when one is missing, or when theirs is 0.
    """
    if not ours or not theirs or not median(theirs.values()):
        return None
    whole = median(ours.values()) / median(theirs.values())
    within = [ours[one] / theirs[one] for one in ours.keys() & theirs.keys() if theirs[one]]
    return Spread(whole, min(within, default=whole), max(within, default=whole), len(within))


def _by_round(rounds: dict[int, dict[str, float]], figure: str) -> dict[int, float]:
    return {number: figures[figure] for number, figures in rounds.items() if figure in figures}


def _row(measurement: dict[str, Any]) -> Row:
    return Row(*(measurement[name] for name in ("workload", "durability", "system", "variant")))


def _key(session: dict[str, Any]) -> dict[str, Any]:
    return {name: session[name] for name in ("round", "part", "durability", "system")}


def systems_of(rows: Iterable[Row]) -> list[str]:
    """The systems of ``rows``, each once, in the order in which they come."""
    return list(dict.fromkeys(row.system for row in rows))
