"""Small plots as SVG text, for reports that are one file and need nothing from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

COLOURS: Final = ("#2f6f9f", "#d9822b", "#4f9d69", "#b0413e")
_WIDTH: Final = 760
_LEFT: Final = 80
_TOP: Final = 14
_PLOT: Final = 150
_BOTTOM: Final = 34
_ROW: Final = 20
_NAMES: Final = 220

Show = Callable[[float], str]


def columns_chart(labels: Sequence[str], values: Sequence[float], *, show: Show, colour: str = COLOURS[0]) -> str:
    """One upright bar for each of ``values``. ``show`` writes a value; labels beyond what fits are left out."""
    top = nice_ceiling(max(values, default=0))
    step = (_WIDTH - _LEFT) / max(1, len(values))
    parts = _axis(top, show)
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = _PLOT * value / top
        parts.append(
            f'<rect x="{_LEFT + index * step:.1f}" y="{_TOP + _PLOT - height:.1f}" width="{max(step - 1, 0.5):.1f}"'
            f' height="{height:.1f}" fill="{colour}"><title>{escape(label)}: {escape(show(value))}</title></rect>'
        )
    return _figure(parts + _labels(labels, step), _TOP + _PLOT + _BOTTOM)


def lines_chart(labels: Sequence[str], series: Mapping[str, Sequence[float]], *, show: Show) -> str:
    """A line for each of ``series`` over the same labels, with its name in its colour. Values below 0 are drawn at 0."""
    top = nice_ceiling(max((max(values, default=0) for values in series.values()), default=0))
    step = (_WIDTH - _LEFT) / max(1, len(labels))
    parts = _axis(top, show)
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (_LEFT + (index + 0.5) * step, _TOP + _PLOT * (1 - max(0.0, value) / top), value)
            for index, value in enumerate(values)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"><title>{escape(name)}, {escape(label)}:'
            f" {escape(show(value))}</title></circle>"
            for (x, y, value), label in zip(places, labels, strict=True)
        ]
        parts.append(f'<text x="{_LEFT + 8 + number * 60}" y="{_TOP + 2}" fill="{colour}">{escape(name)}</text>')
    return _figure(parts + _labels(labels, step), _TOP + _PLOT + _BOTTOM)


def rows_chart(labels: Sequence[str], values: Sequence[float], *, show: Show, colour: str = COLOURS[0]) -> str:
    """One lying bar for each of ``values``, with its label before and its value behind it."""
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
    """The least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below ``value``; 1 for what is not above 0."""
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


def _labels(labels: Sequence[str], step: float) -> list[str]:
    every = max(1, ceil(110 / step))
    return [
        f'<text x="{_LEFT + (index + 0.5) * step:.1f}" y="{_TOP + _PLOT + 18}" text-anchor="middle">{escape(label)}</text>'
        for index, label in enumerate(labels)
        if index % every == 0
    ]


def _figure(parts: Sequence[str], height: float) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}" role="img">{body}</svg>'
