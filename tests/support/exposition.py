"""A strict reader of Prometheus' text format and of OpenMetrics, and of the names in PromQL, for tests.

It takes only what both formats allow, so what it takes every scraper takes. It knows nothing of the code that writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
_KINDS = ("counter", "gauge", "histogram")
_WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}
_LISTS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Metric:
    """``samples`` by the name of the series and its labels, in the order of the text."""

    name: str
    kind: str = ""
    help: str = ""
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def value(self, **labels: str) -> float:
        """The one sample that has these labels, among others."""
        found = [value for (_, there), value in self.samples.items() if labels.items() <= dict(there).items()]
        assert len(found) == 1, f"{self.name}{labels}: {len(found)} samples of {len(self.samples)}"
        return found[0]


def parse(text: str, *, openmetrics: bool = False) -> dict[str, Metric]:
    """All metrics by name. Raises AssertionError with the line that breaks a rule."""
    assert text.endswith("\n"), "the last line has no end"
    lines = text.split("\n")[:-1]
    if openmetrics:
        assert lines[-1] == "# EOF", lines[-1]
        lines.pop()
    found: dict[str, Metric] = {}
    current: Metric | None = None
    for line in lines:
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert _NAME.fullmatch(name), line
            if word == "HELP":
                assert name not in found, f"the samples of a metric are not together: {line}"
                current = found[name] = Metric(name, help=rest)
            else:
                assert word == "TYPE", line
                assert current is not None, line
                assert current.name == name, line
                assert not current.samples, line
                assert rest in _KINDS, line
                current.kind = rest
            continue
        assert current is not None, line
        series, labels, value = sample(line)
        check_name(current, series, labels, openmetrics)
        assert (series, labels) not in current.samples, f"twice: {line}"
        current.samples[series, labels] = value
    for metric in found.values():
        assert metric.samples, f"{metric.name} has no sample"
        if metric.kind == "histogram":
            check_histogram(metric)
    return found


def sample(line: str) -> tuple[str, Labels, float]:
    """Name, labels and value of one line."""
    match = _SAMPLE.fullmatch(line)
    assert match, f"no sample: {line!r}"
    text, labels, at = match[2] or "", [], 0
    while at < len(text):
        label = _LABEL.match(text, at)
        assert label, f"no label at {text[at:]!r}: {line}"
        value = re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), label[2])
        labels.append((label[1], value))
        at = label.end()
    assert len({name for name, _ in labels}) == len(labels), f"a label is there twice: {line}"
    return match[1], tuple(labels), float(match[3])


def check_name(metric: Metric, series: str, labels: Labels, openmetrics: bool) -> None:
    """Whether a sample of this name belongs to the metric."""
    if metric.kind == "histogram":
        assert series in {f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")}, series
        assert (series == f"{metric.name}_bucket") == ("le" in dict(labels)), series
    elif openmetrics and metric.kind == "counter":
        assert series == f"{metric.name}_total", series
    else:
        assert series == metric.name, series
        assert metric.kind != "counter" or series.endswith("_total"), f"{series} is a {metric.kind}"


def check_histogram(metric: Metric) -> None:
    """Buckets ascend and do not fall; the last one is +Inf and equals the count."""
    rows: dict[Labels, list[tuple[float, float]]] = {}
    for (series, labels), value in metric.samples.items():
        if series.endswith("_bucket"):
            rest = tuple(one for one in labels if one[0] != "le")
            rows.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    for labels, buckets in rows.items():
        assert [bound for bound, _ in buckets] == sorted({bound for bound, _ in buckets}), metric.name
        assert [count for _, count in buckets] == sorted(count for _, count in buckets), metric.name
        assert buckets[-1][0] == float("inf"), metric.name
        assert metric.samples[f"{metric.name}_count", labels] == buckets[-1][1], metric.name
        assert (f"{metric.name}_sum", labels) in metric.samples, metric.name


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric that an expression names, with the labels that it wants to be equal to something."""

    name: str
    equal: tuple[tuple[str, str], ...]


def selectors(expression: str) -> Iterator[Selector]:
    """The metrics that a PromQL expression names."""
    text = _LISTS.sub(" ", expression)
    for match in re.finditer(r"(?<!\w)([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?\s*(\(?)", text):
        name, braces, call = match[1], match[2] or "", match[3]
        before = text[: match.start()]
        inside = before.count("{") > before.count("}") or before.count("[") > before.count("]")
        if call or inside or name in _WORDS or before.count('"') % 2:
            continue
        equal = tuple(
            (label, value)
            for label, value in re.findall(r'([a-zA-Z_]\w*)\s*=\s*"([^"]*)"', braces)
            if not value.startswith("$")
        )
        yield Selector(name, equal)


def grouped_labels(expression: str) -> set[str]:
    """The labels by which an expression groups or joins."""
    return {
        name.strip()
        for word, names in _LISTS.findall(expression)
        if word in ("by", "on", "group_left", "group_right")
        for name in names.split(",")
        if name.strip()
    }


def missing(expression: str, series: dict[str, list[dict[str, str]]]) -> list[str]:
    """Why ``expression`` has no value: the selectors without a series that has the labels wanted, and grouped by."""
    found = []
    wanted = list(selectors(expression))
    if not wanted:
        found.append(f"no metric in {expression!r}")
    for one in wanted:
        there = [labels for labels in series.get(one.name, ()) if set(one.equal) <= set(labels.items())]
        if not there:
            found.append(f"nothing has {one.name} {dict(one.equal)}: {expression}")
    labels = grouped_labels(expression) - {"le"}
    if wanted and not any(labels <= set(shown) for one in wanted for shown in series.get(one.name, ())):
        found.append(f"nothing has the labels {sorted(labels)}: {expression}")
    return found


def series_of(metrics: dict[str, Metric]) -> dict[str, list[dict[str, str]]]:
    """The labels of each series, by the name that PromQL knows it by."""
    found: dict[str, list[dict[str, str]]] = {}
    for metric in metrics.values():
        for series, labels in metric.samples:
            found.setdefault(series, []).append(dict(labels))
    return found
