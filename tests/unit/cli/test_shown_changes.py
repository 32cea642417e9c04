"""Goal: a line of the audit log says in words what changed, and is never long.

Method: what the log has of changes of each kind.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.cli.shown_changes import change_text, entry_lines

PUB = {"resource": "Topic:orders", "actions": ["Pub", "Sub"], "decision": "Allow"}
SUB = {"resource": "Group:g", "actions": ["Sub"], "decision": "Deny", "from": ["10.1.0.0/16"]}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (None, None, ""),
        (None, {"queues": 2, "perm": 6}, "queues 2, perm 6"),
        ({"perm": 6, "write_queues": 4, "name": "t"}, {"perm": 6, "write_queues": 8}, "write_queues 4 -> 8"),
        ({"value": "INFO"}, None, "value=INFO -> -"),
        (
            {"offsets": [["t", 0, -1], ["t", 1, 5]]},
            {"from": "other", "offsets": [["t", 0, 3], ["t", 1, 0]]},
            "from other, t/0 - -> 3, t/1 5 -> 0",
        ),
        ({"consumeEnable": True}, {"consumeEnable": False}, "consumeEnable true -> false"),
        (
            {"custom": [PUB]},
            {"custom": [SUB]},
            "custom Topic:orders Allow Pub,Sub -> Group:g Deny Sub from 10.1.0.0/16",
        ),
        ({"custom": [PUB]}, {}, "custom Topic:orders Allow Pub,Sub -> -"),
        ({"cut": "x"}, {"offsets": 7}, "offsets 7"),
        (7, [8, 9], "7 -> 8,9"),
    ],
)
def test_a_change_in_words(before: Any, after: Any, text: str) -> None:
    assert change_text(before, after) == text


def test_it_is_short() -> None:
    assert change_text({"a": "b" * 9_000}, {"a": "c" * 9_000}) == f"a {'b' * 79}… -> {'c' * 79}…"
    assert len(change_text(None, {str(number): number for number in range(1_000)})) == 300


def test_entries_are_lines() -> None:
    assert entry_lines({"custom": [PUB], "default": [SUB]}) == [
        "Topic:orders Allow Pub,Sub",
        "Group:g Deny Sub from 10.1.0.0/16 (Default)",
    ]
