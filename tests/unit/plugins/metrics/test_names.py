"""Goal: the page of metrics is true, and names follow Prometheus' rules. Method: the tables are made anew and compared."""

from __future__ import annotations

import re
from pathlib import Path

from commitmq.counting import Kind
from commitmq_plugins.metrics import exposition

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"
ALL = exposition.OWN | exposition.COUNTED | exposition.NATIVE | exposition.EXPORTER
UNITS = ("_seconds", "_bytes", "_total", "_info")


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.endswith(exposition.tables()), "make it anew: python -m commitmq_plugins.metrics.exposition"


def test_no_name_is_used_twice() -> None:
    assert len(ALL) == sum(map(len, (exposition.OWN, exposition.COUNTED, exposition.NATIVE, exposition.EXPORTER)))


def test_own_names_follow_the_rules_of_prometheus() -> None:
    for one in (exposition.OWN | exposition.COUNTED).values():
        assert re.fullmatch(r"commitmq_[a-z_]+", one.name)
        assert (one.kind is Kind.COUNTER) == one.name.endswith("_total"), one.name
        assert not re.search(r"(milli|micro|nano|_ms|_kb|_mb|percent)", one.name), one.name
        if one.kind is Kind.HISTOGRAM:
            assert one.name.endswith((*UNITS, "_messages")), one.name
    for one in ALL.values():
        assert one.help.endswith("."), one.name
        assert "|" not in one.help
