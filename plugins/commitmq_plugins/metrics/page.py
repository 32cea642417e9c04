"""One answer to a scrape: metrics with their samples, as Prometheus text and as OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from commitmq.counting.families import Kind

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
_HELP_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n"})
_TOTAL: Final = "_total"


def label_text(labels: Mapping[str, str]) -> str:
    """``a="1",b="2"``, without braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())


def number(value: float) -> str:
    """As both formats write a value: whole numbers without a point."""
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return repr(float(value))


@dataclass(slots=True)
class _Metric:
    kind: Kind
    help: str
    lines: list[str] = field(default_factory=list)


class Page:
    """See the module. Beyond ``max_series`` samples further ones are left out, and ``dropped`` counts them.

    The samples of a metric come together, whatever the order of the calls; those of a later metric are left out first.
    """

    def __init__(self, max_series: int) -> None:
        self._left = max_series
        self.dropped = 0
        self._metrics: dict[str, _Metric] = {}

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have samples."""
        return [name for name, metric in self._metrics.items() if metric.lines]

    def reserve(self, count: int) -> None:
        """Let so many further samples in, whatever was left out before."""
        self._left = max(self._left, count)

    def put(self, name: str, kind: Kind, text: str, value: float | None, labels: str = "") -> None:
        """One sample of a counter or gauge. ``labels`` is a :func:`label_text`; a value of None is not known, so absent."""
        if value is None:
            return
        if self._left <= 0:
            self.dropped += 1
            return
        self._left -= 1
        shown = f"{name}{{{labels}}}" if labels else name
        self._metric(name, kind, text).lines.append(f"{shown} {number(value)}\n")

    def put_histogram(
        self, name: str, text: str, bounds: Iterable[float], values: list[int], scale: float, labels: str = ""
    ) -> None:
        """One histogram. ``values``: count, sum, then the observations of each bucket, +Inf last."""
        if self._left < len(values):
            self.dropped += len(values)
            return
        self._left -= len(values)
        total, behind = 0, f",{labels}" if labels else ""
        lines = self._metric(name, Kind.HISTOGRAM, text).lines
        for bound, count in zip([*map(float, bounds), float("inf")], values[2:], strict=True):
            total += count
            shown = "+Inf" if bound == float("inf") else repr(bound)
            lines.append(f'{name}_bucket{{le="{shown}"{behind}}} {total}\n')
        braces = f"{{{labels}}}" if labels else ""
        # The buckets may be a moment ahead of the count: +Inf must be equal to it.
        lines.append(f"{name}_sum{braces} {number(values[1] * scale)}\n")
        lines.append(f"{name}_count{braces} {total}\n")

    def _metric(self, name: str, kind: Kind, text: str) -> _Metric:
        found = self._metrics.get(name)
        if found is None:
            found = self._metrics[name] = _Metric(kind, text)
        return found

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return self._written(openmetrics=False).encode()

    def openmetrics(self) -> bytes:
        """OpenMetrics 1.0."""
        return (self._written(openmetrics=True) + "# EOF\n").encode()

    def _written(self, *, openmetrics: bool) -> str:
        parts = []
        for name, metric in self._metrics.items():
            shown = name.removesuffix(_TOTAL) if openmetrics and metric.kind is Kind.COUNTER else name
            help_text = metric.help.translate(_ESCAPES if openmetrics else _HELP_ESCAPES)
            parts.append(f"# HELP {shown} {help_text}\n# TYPE {shown} {metric.kind}\n")
            parts += metric.lines
        return "".join(parts)
