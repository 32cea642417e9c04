"""Small plots as SVG text, for reports that are one file without external resources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Final

COLOURS: Final = ("#2f6f9f", "#d9822b", "#4f9d69", "#b0413e")
APPROXIMATE: Final = "≈"
_WIDTH: Final = 760
_LEFT: Final = 80
_TOP: Final = 14
_PLOT: Final = 150
_BOTTOM: Final = 36
_ROW: Final = 20
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS
_MOST_TICKS: Final = 7
_TICKS_MS: Final = (
    1_000, 5_000, 15_000, 30_000, _MINUTE_MS, 5 * _MINUTE_MS, 10 * _MINUTE_MS, 15 * _MINUTE_MS, 30 * _MINUTE_MS, _HOUR_MS,
    2 * _HOUR_MS, 4 * _HOUR_MS, 6 * _HOUR_MS, 12 * _HOUR_MS, _DAY_MS, 2 * _DAY_MS, 5 * _DAY_MS, 10 * _DAY_MS,
)  # fmt: skip
_NAMES: Final = 220

Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The times (ms since 1970, UTC) that a plot shows: from ``start`` to ``end``, by steps of ``step_ms``."""

    start: int
    end: int
    step_ms: int

    @classmethod
    def of(cls, first: int, last: int, step_ms: int) -> TimeAxis:
        """Whole steps around ``first`` and ``last``."""
        return cls(first - first % step_ms, last - last % step_ms + step_ms, step_ms)

    def x(self, time_ms: float) -> float:
        """The x coordinate of a time."""
        return _LEFT + (_WIDTH - _LEFT) * (time_ms - self.start) / (self.end - self.start)

    @property
    def step_width(self) -> float:
        return (_WIDTH - _LEFT) * self.step_ms / (self.end - self.start)

    def ticks(self) -> list[int]:
        """Round times, at most eight: whole minutes of an hour, hours of a day, days, or first days of months."""
        span = self.end - self.start
        apart = next((one for one in _TICKS_MS if span <= _MOST_TICKS * one), None)
        if apart is not None:
            return list(range(-(-self.start // apart) * apart, self.end + 1, apart))
        first, last = (datetime.fromtimestamp(at / 1000, UTC) for at in (self.start, self.end))
        months = range(first.year * 12 + first.month - 1, last.year * 12 + last.month)
        each = next(
            (one for one in (1, 2, 3, 6, 12, 24, 60, 120) if len(months) <= _MOST_TICKS * one),
            -(-len(months) // _MOST_TICKS),
        )
        times = [datetime(one // 12, one % 12 + 1, 1, tzinfo=UTC).timestamp() for one in months if one % each == 0]
        return [int(one * 1000) for one in times if first.timestamp() <= one <= last.timestamp()]

    def label(self, time_ms: int) -> str:
        """A time with its date, as precise as the axis."""
        return _utc(time_ms, "%Y-%m-%d %H:%M:%S" if self.step_ms < _MINUTE_MS else "%Y-%m-%d %H:%M")


def _utc(time_ms: int, form: str) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime(form)


def columns_chart(
    axis: TimeAxis, times: Sequence[int], values: Sequence[float], *, show: Show, colour: str = COLOURS[0]
) -> str:
    """One upright bar for each of ``values``, over the step that begins at its time. ``show`` formats a value."""
    top = nice_ceiling(max(values, default=0))
    parts = _axis(top, show)
    for time_ms, value in zip(times, values, strict=True):
        height = _PLOT * value / top
        parts.append(
            f'<rect x="{axis.x(time_ms):.1f}" y="{_TOP + _PLOT - height:.1f}" width="{max(axis.step_width - 1, 0.5):.1f}"'
            f' height="{height:.1f}" fill="{colour}"><title>{axis.label(time_ms)}: {escape(show(value))}</title></rect>'
        )
    return _figure(parts + _time_ticks(axis), _TOP + _PLOT + _BOTTOM)


def lines_chart(axis: TimeAxis, times: Sequence[int], series: Mapping[str, Sequence[float]], *, show: Show) -> str:
    """A line for each of ``series`` over the same times, and a legend above. Values below 0 are drawn at 0."""
    top = nice_ceiling(max((max(values, default=0) for values in series.values()), default=0))
    parts = _axis(top, show)
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (axis.x(time_ms + axis.step_ms / 2), _TOP + _PLOT * (1 - max(0.0, value) / top), value)
            for time_ms, value in zip(times, values, strict=True)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        sign = f"{APPROXIMATE} " if name.startswith(APPROXIMATE) else ""
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"><title>{escape(name.removeprefix(sign))},'
            f" {axis.label(time_ms)}: {sign}{escape(show(value))}</title></circle>"
            for (x, y, value), time_ms in zip(places, times, strict=True)
        ]
        x = _LEFT + 8 + number * 80
        parts.append(f'<rect class="legend" x="{x}" y="1" width="10" height="10" fill="{colour}"/>')
        # Set as a style: the page's own style for text has priority over an attribute.
        parts.append(f'<text class="legend" x="{x + 14}" y="10" style="fill:{colour}">{escape(name)}</text>')
    return _figure(parts + _time_ticks(axis), _TOP + _PLOT + _BOTTOM)


def rows_chart(labels: Sequence[str], values: Sequence[float], *, show: Show, colour: str = COLOURS[0]) -> str:
    """One horizontal bar for each of ``values``, with its label before and its value behind it."""
    top = max(max(values, default=0), 1e-9)
    room = _WIDTH - _NAMES - 90
    parts = []
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        y = index * _ROW
        width = room * value / top
        parts.append(f'<text x="{_NAMES - 6}" y="{y + 14}" text-anchor="end">{escape(shortened(label, 32))}</text>')
        parts.append(
            f'<rect x="{_NAMES}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}">'
            f"<title>{escape(label)}</title></rect>"
        )
        parts.append(f'<text x="{_NAMES + width + 5:.1f}" y="{y + 14}">{escape(show(value))}</text>')
    return _figure(parts, max(_ROW, len(values) * _ROW))


def nice_ceiling(value: float) -> float:
    """The least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below ``value``; 1 for a value of 0 or less."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next((step * power for step in (1, 2, 2.5, 5) if step * power >= value * (1 - 1e-12)), 10 * power)


def shortened(text: str, length: int) -> str:
    """``text``, or its beginning and an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _axis(top: float, show: Show) -> list[str]:
    parts = []
    for share in (0, 0.5, 1):
        y = _TOP + _PLOT * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(show(top * share))}</text>')
    return parts


def _time_ticks(axis: TimeAxis) -> list[str]:
    """Round times below the plot; a date below the first one and below every one with another date."""
    parts, shown, bottom = [], "", _TOP + _PLOT
    ticks = axis.ticks()
    apart = min((later - one for one, later in pairwise(ticks)), default=_MINUTE_MS)
    for time_ms in ticks:
        x = axis.x(time_ms)
        form = (
            "%H:%M:%S"
            if apart < _MINUTE_MS
            else "%H:%M"
            if apart < _DAY_MS
            else "%m-%d"
            if apart < 28 * _DAY_MS
            else "%b"
        )
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#999"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_utc(time_ms, form)}</text>'
        )
        around = _utc(time_ms, "%Y-%m-%d" if apart < _DAY_MS else "%Y")
        if around != shown:
            parts.append(f'<text class="date" x="{x:.1f}" y="{bottom + 29}" text-anchor="middle">{around}</text>')
            shown = around
    return parts


def _figure(parts: Sequence[str], height: float) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}" role="img">{body}</svg>'
