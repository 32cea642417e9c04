"""The report of a run in Markdown: goals, one table a workload, gaps, settings, load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bench import goals
from bench.figures import FIGURES, Figure
from bench.results import Results, Row, Spread
from bench.workloads import FULL, OURS, RESTART, Workload

FILE: Final = "README.md"
_MET = {None: "not measured", True: "met", False: "**missed**"}
_WITHOUT_ACKS = ("idle", "floor", "connections")
_DURABILITY = {"memory": "ack from memory", "flushed": "ack after the device has it"}


def write(results: Results, *, plots: bool) -> list[Path]:
    """Write tables, and plots, into the folder of ``results``; returns the written files."""
    pictures: list[Path] = []
    if plots:
        # Only plots need matplotlib.
        from bench.plots import draw

        pictures = draw(results)
    path = results.folder / FILE
    path.write_text(markdown(results, [one.name for one in pictures]), encoding="utf-8")
    return [path, *pictures]


def markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """The whole report; ``pictures`` are file names beside it."""
    parts = [
        *_head(results),
        *_goals(results),
        *(f"![{name.removesuffix('.png')}]({name})\n" for name in pictures if name.endswith(".png")),
        *_tables(results),
        *_gaps(results),
        *_settings(results),
        *_load(results),
    ]
    return "\n".join(parts)


def _head(results: Results) -> Iterable[str]:
    about, machine = results.document, results.document["machine"]
    rounds = about["options"]["rounds"]
    yield "# CommitMQ beside other systems\n"
    yield f"`{about['command']}`, {about['started']} to {about.get('ended', '(not finished)')}.\n"
    yield (
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']},"
        f" {machine['filesystem']}, Python {machine['python']}. Clients and servers share it, over loopback.\n"
    )
    yield from _table(
        ["system", "version"],
        [
            [name, facts.get("version", f"left out: {_line(facts.get('missing', ''))}")]
            for name, facts in about["systems"].items()
        ],
    )
    yield (
        f"Figures are medians of {rounds} rounds, with the lowest and highest in brackets. In each round the systems take"
        " turns, and each round begins with another one. Ratios are CommitMQ's figure divided by the other's, of the medians,"
        " with the lowest and highest within one round: above 1 is good for rates, below 1 for times. The clock of what is"
        " produced stops when a consumer could read the last message. Raw figures of each round: `results.json`.\n"
    )


def _goals(results: Results) -> Iterable[str]:
    yield "## Goals\n"
    rows = []
    for one in goals.judge(results):
        row, figure = one.peer
        peer = row.system if row.system != OURS else figure.replace("_", " ")
        wanted = f"{one.goal.relation} {_number(one.goal.factor)} ×"
        theirs, ratio = _spread(one.theirs), _spread(one.ratio)
        rows.append([one.goal.title, peer, _spread(one.ours), theirs, ratio, wanted, _MET[one.met]])
    yield from _table(["work", "peer", "CommitMQ", "peer's", "ratio", "goal", ""], rows)
    yield from _bounds(results)


def _bounds(results: Results) -> Iterable[str]:
    """The bounds, with the jobs that were measured: a quick run has fewer messages."""
    rows = []
    for one in goals.judge_bounds(results):
        bound = one.bound
        unit = bound.unit
        wanted = f"{bound.relation} {_number(bound.value)} {unit}" + (", in each round" if bound.always else "")
        rows.append([bound.title, _messages(results, bound.ours[0]), _spread(one.ours), wanted, _MET[one.met]])
    yield from _table(["work", "messages", "CommitMQ", "goal", ""], rows)


def _messages(results: Results, row: Row) -> str:
    """How many messages the measurements of ``row`` had."""
    wanted = [row.workload, row.durability, row.system]
    counts = {
        one["result"]["messages"]
        for one in results.measurements
        if "messages" in one.get("result", {})
        and [one[name] for name in ("workload", "durability", "system")] == wanted
    }
    return ", ".join(f"{count:,}" for count in sorted(counts))


def _tables(results: Results) -> Iterable[str]:
    yield "## Figures\n"
    rows = results.rows()
    for workload in (*FULL, RESTART):
        for durability in workload.durabilities:
            found = [row for row in rows if (row.workload, row.durability) == (workload.name, durability)]
            if found:
                yield from _workload(results, workload, durability, found)


def _workload(results: Results, workload: Workload, durability: str, rows: list[Row]) -> Iterable[str]:
    yield f"### {workload.title}" + ("" if workload.work in _WITHOUT_ACKS else f" ({_DURABILITY[durability]})")
    yield ""
    figures = [one for one in FIGURES[workload.work] if any(results.spread(row, one.name) is not None for row in rows)]
    order = list(results.document["systems"])
    rows = sorted(rows, key=lambda row: order.index(row.system) if row.system in order else len(order))
    ours = next((row for row in rows if row.system == OURS), None)
    lines = []
    for row in rows:
        cells = [_spread(results.spread(row, one.name)) for one in figures]
        ratio = None
        if ours is not None and row.system != OURS and figures:
            ratio = results.ratio((ours, figures[0].name), (row, figures[0].name))
        lines.append([_name(row), *cells, "" if row.system == OURS else _spread(ratio)])
    heads = [f"{one.title}, {one.unit}" for one in figures]
    yield from _table(["system", *heads, _ratio_head(ours, figures)], lines)


def _ratio_head(ours: Row | None, figures: Sequence[Figure]) -> str:
    if ours is None or not figures:
        return ""
    return f"CommitMQ{f' ({ours.variant})' if ours.variant else ''} ÷ this, {figures[0].title}"


def _gaps(results: Results) -> Iterable[str]:
    errors = results.errors()
    if not errors:
        return
    yield "## Gaps\n"
    for row, texts in sorted(errors.items()):
        yield f"* {row.workload}, {row.durability}, {_name(row)}, {len(texts)} times: {_line(texts[0])}"
    yield ""


def _settings(results: Results) -> Iterable[str]:
    yield "## Settings\n"
    yield "All other settings have their defaults.\n"
    for name, about in results.document["systems"].items():
        both = about.get("settings")
        if not both:
            continue
        yield f"### {name} {about['version']}\n"
        keys = list(dict.fromkeys([*both["memory"], *both["flushed"]]))
        rows = [[f"`{key}`", *(f"`{both[one][key]}`" if key in both[one] else "" for one in both)] for key in keys]
        yield from _table(["setting", *(_DURABILITY[one] for one in both)], rows)


def _load(results: Results) -> Iterable[str]:
    yield "## Load average of the machine before and after each session\n"
    rows = [
        [one["round"], one["part"], one["durability"], one["system"], one["load_before"], one["load_after"]]
        for one in results.document["sessions"]
    ]
    yield from _table(["round", "part", "ack", "system", "before", "after"], rows)


# ---------------------------------------------------------------- Markdown


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


def _name(row: Row) -> str:
    return f"{row.system} ({row.variant})" if row.variant else row.system


def _line(text: str) -> str:
    """The first line of ``text``, and no more than fits a table."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= 160 else first[:159] + "…"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if spread.count < 2:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)}–{_number(spread.high)})"


def _number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
