"""Goal: an answer is what both formats of Prometheus allow, and no longer than its limit. Method: a strict reader of both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.counting import Kind
from commitmq_plugins.metrics.exposition import Exposition, label_text
from exposition import parse, selectors


def page_of(topic: str = "orders") -> Exposition:
    page = Exposition(1_000)
    page.put("sent_total", Kind.COUNTER, 'Sent, "so to say".\nReally.', 3, label_text({"topic": topic}))
    page.put("open", Kind.GAUGE, "Open.", 0.25)
    page.put("sent_total", Kind.COUNTER, "Sent.", 1 << 60, label_text({"topic": "other" + topic}))
    page.put("unknown", Kind.GAUGE, "Not known.", None)
    page.put_histogram("times_seconds", "Times.", (0.5, 1.0), [3, 4_000, 1, 1, 1], 1e-3, label_text({"a": topic}))
    return page


def test_both_formats_have_the_same_samples() -> None:
    page = page_of()
    text, open_text = parse(page.text().decode()), parse(page.openmetrics().decode(), openmetrics=True)
    assert list(text) == ["sent_total", "open", "times_seconds"]
    assert list(open_text) == ["sent", "open", "times_seconds"]
    assert [metric.samples for metric in text.values()] == [metric.samples for metric in open_text.values()]
    assert text["sent_total"].value(topic="orders") == 3
    assert text["sent_total"].value(topic="otherorders") == 1 << 60
    times = text["times_seconds"].samples
    assert times["times_seconds_bucket", (("le", "0.5"), ("a", "orders"))] == 1
    assert times["times_seconds_bucket", (("le", "+Inf"), ("a", "orders"))] == 3
    assert times["times_seconds_sum", (("a", "orders"),)] == 4.0


@given(st.text())
def test_any_text_may_be_a_label(name: str) -> None:
    page = page_of(name)
    assert parse(page.text().decode())["sent_total"].value(topic=name) == 3


def test_an_answer_has_no_more_series_than_allowed() -> None:
    page = Exposition(10)
    for number in range(30):
        page.put("open", Kind.GAUGE, "Open.", 1, label_text({"a": str(number)}))
    page.put_histogram("times", "Times.", (1.0,), [1, 1, 1, 0], 1.0)
    assert len(parse(page.text().decode())["open"].samples) == 10
    assert page.dropped == 24
    page.reserve(1)
    page.put("last", Kind.GAUGE, "Last.", 1)
    assert page.names == ["open", "last"]


@pytest.mark.parametrize(
    "text",
    [
        "# HELP a A.\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a A.\n# TYPE a counter\na 1\n",
        '# HELP a A.\n# TYPE a gauge\na{b="1",b="2"} 1\n',
        '# HELP a A.\n# TYPE a gauge\na{b="x"y"} 1\n',
        "# HELP a A.\n# TYPE a gauge\na 1",
        "# HELP a A.\n# TYPE a gauge\n",
        '# HELP a A.\n# TYPE a histogram\na_bucket{le="1.0"} 2\na_bucket{le="+Inf"} 1\na_sum 1\na_count 1\n',
    ],
)
def test_the_reader_is_strict(text: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        parse(text)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum(rate(a_total{x="1",y=~"b.*"}[5m])) by (topic, le) > 3', ["a_total"]),
        ('a / on(topic) group_left(group) sum by (topic) (b{c="d e"}) and c unless d offset 5m', ["a", "b", "c", "d"]),
        ("histogram_quantile(0.99, sum by (le) (rate(t_bucket[$__rate_interval])))", ["t_bucket"]),
    ],
)
def test_the_names_of_an_expression_are_found(expression: str, names: list[str]) -> None:
    assert [one.name for one in selectors(expression)] == names
