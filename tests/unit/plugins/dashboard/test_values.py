"""Goal: a request's values are what their types and limits say, or a sentence names the wrong one.

Method: a schema with every kind of field, good values, and one wrong value at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from commitmq_plugins.dashboard.api.node import BadValueError, moment, take, value


@dataclass(frozen=True, slots=True)
class Asked:
    """Every kind of field."""

    name: str = value(doc="needed", longest=5)
    kind: str = value("a", choices=("a", "b"))
    many: tuple[int, ...] = value((), low=1, longest=3)
    number: int | None = value(None, low=1, high=9)
    text: str | None = value(None)
    flag: bool = value(False)


def test_values_have_the_types_of_their_fields() -> None:
    assert take(Asked, {"name": ["x"]}) == Asked("x", "a", (), None, None, False)
    given: dict[str, list[Any]] = {
        "name": ["y", "x"],
        "kind": ["b"],
        "many": ["1", 2],
        "number": ["9"],
        "text": ["t"],
        "flag": ["1"],
    }
    assert take(Asked, given) == Asked("x", "b", (1, 2), 9, "t", True)
    assert take(Asked, {"name": ["x"], "number": [""], "text": [""], "flag": [False]}) == Asked("x")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "name is missing"),
        ({"name": []}, "name is missing"),
        ({"name": [None]}, "name is missing"),
        ({"name": ["x"], "nam": ["x"]}, "'nam'"),
        ({"name": ["123456"]}, "name has 5 characters"),
        ({"name": [5]}, "name is a text"),
        ({"name": [{"x": 1}]}, "name is a text"),
        ({"name": ["x"], "kind": ["c"]}, "kind is one of a, b"),
        ({"name": ["x"], "number": ["10"]}, "number is between 1 and 9"),
        ({"name": ["x"], "number": ["0"]}, "number is between"),
        ({"name": ["x"], "number": ["1.0"]}, "whole number"),
        ({"name": ["x"], "number": [1.5]}, "whole number"),
        ({"name": ["x"], "number": [True]}, "whole number"),
        ({"name": ["x"], "number": ["١"]}, "whole number"),
        ({"name": ["x"], "number": ["9" * 5_000]}, "whole number"),
        ({"name": ["x"], "many": [1, 2, 3, 4]}, "many has 3 entries"),
        ({"name": ["x"], "many": [0]}, "many is between"),
        ({"name": ["x"], "flag": ["maybe"]}, "flag is true or false"),
    ],
)
def test_a_wrong_value_is_named(given: dict[str, Any], word: str) -> None:
    with pytest.raises(BadValueError) as raised:
        take(Asked, given)
    assert word in str(raised.value)
    assert len(str(raised.value)) < 400


def test_times() -> None:
    noon = datetime(2026, 6, 1, 12, tzinfo=UTC)
    assert moment("time", "2026-06-01T12:00") == noon
    assert moment("time", "2026-06-01T14:00+02:00") == noon.astimezone(timezone(timedelta(hours=2)))
    assert moment("time", str(int(noon.timestamp() * 1000))) == noon
    for wrong in ("", "soon", "2026-13-01", "9" * 19, "-" * 3):
        with pytest.raises(BadValueError, match="time is a time"):
            moment("time", wrong)
