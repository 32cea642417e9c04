"""Pictures of a run, as PNG and SVG: rates as bars, latencies as percentile curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.ticker import LogLocator, MaxNLocator

from bench.results import Results, Row
from bench.workloads import FULL, OURS, Workload

# The place of a percentile: each step to the right leaves a tenth of the samples.
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999}
_BARS: Final = ("pipeline", "batch", "read", "mixed")
_CURVES: Final = ("send", "end_to_end", "push")
_COLOURS: Final = ("#c8102e", "#7a7a7a", "#1f5f99", "#d58a00", "#3a8f5c", "#7b4fa3")
_COLUMNS: Final = 3
_INCHES: Final = (5.2, 3.4)  # of one picture in the grid


def draw(results: Results) -> list[Path]:
    """Both pictures in both formats, if there are figures to draw; returns the files."""
    written = []
    for name, works, panel in (("throughput", _BARS, _bars), ("latency", _CURVES, _curves)):
        written += _grid(results, name, works, panel)
    return written


def _grid(results: Results, name: str, works: Sequence[str], panel: Callable[..., None]) -> list[Path]:
    rows = results.rows()
    panels = [
        (workload, durability, found)
        for workload in FULL
        if workload.work in works
        for durability in workload.durabilities
        if (
            found := [
                row for row in rows if (row.workload, row.durability) == (workload.name, durability) and rows[row]
            ]
        )
    ]
    if not panels:
        return []
    height = -(-len(panels) // _COLUMNS)
    size = (_INCHES[0] * _COLUMNS, _INCHES[1] * height)
    figure, axes = pyplot.subplots(height, _COLUMNS, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (workload, durability, found) in zip(axes.flat, panels, strict=False):
        panel(axis, results, workload, found)
        axis.set_title(f"{workload.title}\nack {durability}", fontsize=8)
        axis.tick_params(labelsize=7)
    written = []
    for kind in ("png", "svg"):
        path = results.folder / f"{name}.{kind}"
        # Without date and random ids, the same results give the same file.
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(path, dpi=110, metadata={"Date": None} if kind == "svg" else None)
        written.append(path)
    pyplot.close(figure)
    return written


def _bars(axis: Any, results: Results, _workload: Workload, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: _place(results, row))
    for height, row in enumerate(reversed(rows)):
        spread = results.spread(row, "rate")
        if spread is None:
            continue
        error = [[spread.median - spread.low], [spread.high - spread.median]]
        axis.barh(height, spread.median, xerr=error, color=_colour(results, row), error_kw={"lw": 0.8, "capsize": 2})
    axis.set_yticks(range(len(rows)), [_label(row) for row in reversed(rows)])
    axis.set_xlabel("messages a second", fontsize=7)
    axis.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")
    axis.xaxis.set_major_locator(MaxNLocator(5))


def _curves(axis: Any, results: Results, _workload: Workload, rows: Sequence[Row]) -> None:
    every = results.rows()
    for row in sorted(rows, key=lambda row: _place(results, row)):
        points = []
        for name, share in _SHARES.items():
            values = [figures[name] for figures in every[row].values() if name in figures]
            if values:
                points.append((1 / (1 - share), median(values)))
        style = "--" if row.variant else "-"
        axis.plot(*zip(*points, strict=True), style, marker=".", label=_label(row), color=_colour(results, row))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks([1 / (1 - share) for share in _SHARES.values()], list(_SHARES))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _position: f"{value:,.10g}")
    axis.minorticks_off()
    axis.set_ylabel("µs", fontsize=7)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6)


def _place(results: Results, row: Row) -> int:
    return list(results.document["systems"]).index(row.system)


def _colour(results: Results, row: Row) -> str:
    return _COLOURS[0] if row.system == OURS else _COLOURS[1 + (_place(results, row) - 1) % (len(_COLOURS) - 1)]


def _label(row: Row) -> str:
    return f"{row.system}, {row.variant}" if row.variant else row.system
