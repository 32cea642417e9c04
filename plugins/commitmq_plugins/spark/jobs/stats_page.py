"""The figures of :mod:`commitmq_plugins.spark.jobs.stats` as one HTML page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from commitmq.cli.output import human_bytes
from commitmq_plugins.spark.jobs import svg
from commitmq_plugins.spark.jobs.stats import ERRORS, Group, Stats, about, iso

_MOST_ROWS: Final = 24
_UNITS: Final = ((86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second"))
_STYLE: Final = (
    "body{font:14px/1.5 system-ui,sans-serif;color:#222;max-width:820px;margin:2em auto;padding:0 1em}"
    "h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2.2em;border-top:1px solid #ccc;padding-top:.8em}"
    "h3{font-size:1em;margin:1.4em 0 .3em}svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#444}"
    "table{border-collapse:collapse;margin:.6em 0}td,th{padding:.15em .7em;text-align:right;border-bottom:1px solid #eee}"
    "td:first-child,th:first-child{text-align:left}.note{color:#777}"
)


def page(found: Stats) -> str:
    """A whole HTML document; it loads no other resource."""
    total = found.total
    parts = ["<h1>Messages of ", escape(", ".join(found.sources)), "</h1>"]
    if total is None:
        parts.append("<p>There is no message.</p>")
    else:
        parts.append(f"<p>Stored between {iso(total.first_stored_ms)} and {iso(total.last_stored_ms)}.</p>")
        parts.append(
            _table("Topic", [("all", total), *((_name(one.of["topic"]), one) for one in found.groups["topics"])])
        )
        parts.append(f'<p class="note">{escape(ERRORS)} Delay: from born to stored. Times are UTC.</p>')
        for one in found.groups["topics"]:
            parts += _topic(found, one)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Messages</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _topic(found: Stats, topic: Group) -> list[str]:
    name = topic.of["topic"]
    steps = [one for one in found.steps if one.of["topic"] == name]
    queues, tags = ([one for one in found.groups[kind] if one.of["topic"] == name] for kind in ("queues", "tags"))
    parts = [f"<h2>{escape(name)}</h2>"]
    if steps and found.total is not None:
        axis = svg.TimeAxis.of(found.total.first_stored_ms, found.total.last_stored_ms, found.step_ms)
        by = f"by {_unit(found.step_ms)}"
        times = [int(one.of["step"]) for one in steps]
        counts, sizes = [one.messages for one in steps], [one.log_bytes for one in steps]
        parts += [f"<h3>Messages {by}</h3>", svg.columns_chart(axis, times, counts, show=_count)]
        parts += [
            f"<h3>Bytes in the log {by}</h3>",
            svg.columns_chart(axis, times, sizes, show=_bytes, colour=svg.COLOURS[2]),
        ]
        for title, member, show in (
            (f"Size of bodies {by}", "body_size", _bytes),
            (f"Delay {by}", "delay_ms", _milliseconds),
        ):
            series = {about(which): [getattr(one, member)[which] for one in steps] for which in ("p50", "p95", "p99")}
            parts += [f"<h3>{title}</h3>", svg.lines_chart(axis, times, series, show=show)]
    for title, groups, column, colour in (
        ("Messages by queue", queues, "queue_id", svg.COLOURS[0]),
        ("Messages by tag", tags, "tag", svg.COLOURS[1]),
    ):
        most = sorted(groups, key=lambda one: -one.messages)[:_MOST_ROWS]
        if column == "queue_id":
            most.sort(key=lambda one: int(one.of["queue_id"]))
        more = f" (the largest {len(most)} of {len(groups)})" if len(most) < len(groups) else ""
        names = [_name(one.of[column]) for one in most]
        parts.append(f"<h3>{title}{more}</h3>")
        parts.append(svg.rows_chart(names, [one.messages for one in most], show=_count, colour=colour))
        parts.append(_table(column.removesuffix("_id"), list(zip(names, most, strict=True))))
    return parts


def _table(first: str, groups: Sequence[tuple[str, Group]]) -> str:
    heads = (first, "messages", "log", "body p50", "p95", "p99", "delay p50", "p95", "p99", "keys")
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for name, one in groups:
        cells = [name, _count(one.messages), _bytes(one.log_bytes)]
        cells += [about(_bytes(one.body_size[which])) for which in ("p50", "p95", "p99")]
        cells += [about(_milliseconds(one.delay_ms[which])) for which in ("p50", "p95", "p99")]
        cells.append(about(_count(one.distinct_keys)) if one.with_key else _count(0))
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _unit(step_ms: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if step_ms >= unit)
    return name if step_ms == unit else f"{step_ms // unit} {name}s"


def _name(value: object) -> str:
    return "(none)" if value is None else str(value)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _bytes(value: float) -> str:
    return human_bytes(round(value))


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if abs(value) < 10_000 else f"{value / 1000:.0f} s"
