"""Goal: compiled filters are shared and bounded, and what is wrong is blamed on the expression or on the plugin.

Method: filters are asked for by expression, with RocketMQ's tags, with SQL92, and with filters that fail.
"""

from __future__ import annotations

import re

import pytest

from commitmq.errors import ProtocolError
from commitmq.store.queues.tag_filter import TagFilter
from commitmq.workers.reader.filters import MAX_EXPRESSION_CHARACTERS, ExpressionFilter, Filters

SQL = {"type": "SQL92", "factory": "commitmq_plugins.sql92.evaluator:SqlFilter", "plugin": "sql"}


def test_tags_need_no_plugin() -> None:
    filters = Filters([], limit=4)
    assert filters.types == ["TAG"]
    assert filters.get(None, None) is filters.get("TAG", "*") is None
    found = filters.get("TAG", "A || B")
    assert isinstance(found, TagFilter)
    assert found.tags == ["A", "B"]
    assert len(filters) == 0


def test_an_expression_is_compiled_once_and_few_are_kept() -> None:
    filters = Filters([SQL], limit=3)
    first = filters.get("SQL92", "a = 1")
    for number in range(2, 4):
        filters.get("SQL92", f"a = {number}")
    assert filters.get("SQL92", "a = 1") is first
    filters.get("SQL92", "a = 4")  # drops a = 2, the one that was not used for longest
    assert len(filters) == 3
    assert filters.get("SQL92", "a = 1") is first
    for number in range(1_000):
        filters.get("SQL92", f"b = {number}")
    assert len(filters) == 3


@pytest.mark.parametrize(
    ("kind", "expression", "code", "reason"),
    [
        ("SQL93", "a = 1", "INVALID_PARAMETER", "no filter type 'SQL93'; it has TAG, BROKEN, SQL92"),
        ("SQL92", None, "INVALID_PARAMETER", "needs an expression"),
        ("SQL92", "a = ", "INVALID_PARAMETER", "at character 5"),
        ("SQL92", "a" * (MAX_EXPRESSION_CHARACTERS + 1), "INVALID_PARAMETER", "characters"),
        ("TAG", "||", "INVALID_PARAMETER", "names no tag"),
        ("BROKEN", "x", "FILTER_FAILED", "BROKEN of plugin odd failed: it raised ModuleNotFoundError"),
    ],
)
def test_refusals(kind: str, expression: str | None, code: str, reason: str) -> None:
    broken = {"type": "BROKEN", "factory": "no_such_module:X", "plugin": "odd"}
    filters = Filters([SQL, broken], limit=3)
    with pytest.raises(ProtocolError, match=re.escape(reason)) as refusal:
        filters.get(kind, expression)
    assert refusal.value.code == code
    assert len(filters) == 0
    assert isinstance(filters.get("SQL92", "a = 1"), ExpressionFilter)
