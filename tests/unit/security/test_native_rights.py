"""Goal: no operation of the native protocol is without a rule, and each rule asks for what docs/security.md says.

Method: the operations of every process are found in its source, and compared with the table of rights; then single
requests against a table of expectations, hostile shapes among them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import commitmq
from commitmq.security.native_rights import CHANGES, NEEDS, needs_of
from commitmq.security.policy import Action

NODE = Path(commitmq.__file__).parent
SOURCES = {
    "admin": ("supervision/supervisor.py", "supervision/live_settings.py"),
    "writer": ("workers/writer/process.py",),
    "memory": ("workers/memory.py",),
    "reader": ("workers/reader/process.py",),
    "coordinator": ("coordination/operations.py",),
    "pop": ("workers/pop/process.py",),
    "transaction": ("workers/transaction/process.py",),
    "cleanup": ("workers/cleanup.py", "workers/cleanup.py"),
    "dispatcher": ("workers/dispatcher/process.py",),
}


def handled(paths: tuple[str, ...]) -> set[str]:
    """Names of operations in a source: keys of tables whose values are methods, and what ``op`` is compared with."""
    found: set[object] = set()
    for path in paths:
        for one in ast.walk(ast.parse((NODE / path).read_text(encoding="utf-8"))):
            if isinstance(one, ast.Dict):
                found |= {
                    key.value
                    for key, value in zip(one.keys, one.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                    if isinstance(value, ast.Attribute | ast.Name) and re.fullmatch(r"[a-z_.]+", key.value)
                    if not isinstance(value, ast.Name) or value.id == "pull"
                }
            elif isinstance(one, ast.Compare) and ast.unparse(one.left) in ("op", "header['op']"):
                for other in one.comparators:
                    found |= {item.value for item in ast.walk(other) if isinstance(item, ast.Constant)}
            elif isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "_SENDS":
                found |= {item.value for item in ast.walk(one.value) if isinstance(item, ast.Constant)}
    return {one for one in found if isinstance(one, str)}


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_every_operation_has_a_rule_and_no_rule_is_for_none(kind: str) -> None:
    found = handled(SOURCES[kind])
    known = set(NEEDS[kind])
    assert known, kind
    text = "".join((NODE / path).read_text(encoding="utf-8") for path in SOURCES[kind])
    assert not [one for one in known if f'"{one}"' not in text], "a rule for an operation that nobody has"
    further = {one for one in found - known if one not in _NO_OPERATIONS}
    assert not further, f"{kind} takes operations without a rule: {further}"


_NO_OPERATIONS = {
    "life",
    "retry_after_ms",
    "epoch",
    "admin",
    "revoke",
    "broker",
    "max_retries",
    "priority_factor",
    "kept",
    "assigned",
    "generation",
    "position",
    "id",
    "queue_offset",
    "physical_offset",
    "overrode",
    "kept_because",
    "held_bytes",
    "last_round",
    "disk_bytes",
    "dry_run",
    "from_offset",
    "needed_by",
    "tag",
    "unique",
    "key",
    "log_generation",
    "born",
    "body_bytes",
    "session_timeout_ms",
}
"""Fields of answers in the same sources."""


def test_an_unknown_process_or_operation_is_a_super_users() -> None:
    assert needs_of("reader", {"op": "rewrite"}, "c") is None
    assert needs_of("gardener", {"op": "pull"}, "c") is None
    assert needs_of("coordinator", {"op": "group.share"}, "c") is None


@pytest.mark.parametrize("field", ["moved", "forwarded", "client"])
def test_only_super_users_speak_for_others(field: str) -> None:
    assert needs_of("writer", {"op": "append", "topic": "t", field: 4}, "c") is None
    assert needs_of("writer", {"op": "append", "topic": "t", field: None}, "c") is None
    assert needs_of("reader", {"op": "pull", "topic": "t", field: "x"}, "c") is None


@pytest.mark.parametrize(
    ("kind", "header", "wanted"),
    [
        ("admin", {"op": "metadata"}, []),
        ("admin", {"op": "stop"}, ["Cluster:c Update"]),
        ("writer", {"op": "send", "topic": "t"}, ["Topic:t Pub"]),
        ("writer", {"op": "send", "topic": "%RETRY%g"}, ["Group:g Sub"]),
        (
            "writer",
            {"op": "send", "topic": "t", "properties": {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b"}},
            ["Topic:t Pub", "Topic:%LMQ%a Pub", "Topic:%LMQ%b Pub"],
        ),
        ("reader", {"op": "pull", "topic": "t"}, ["Topic:t Get|Sub"]),
        ("reader", {"op": "pull", "topic": "t", "group": "g"}, ["Topic:t Sub", "Group:g Sub"]),
        ("reader", {"op": "pull", "topic": "SCHEDULE_TOPIC_XXXX"}, ["Cluster:* Update"]),
        ("reader", {"op": "query", "topic": "rmq_sys_wheel_timer"}, ["Cluster:* Update"]),
        ("pop", {"op": "pop", "group": "g", "topics": ["RMQ_SYS_TRANS_HALF_TOPIC"]}, ["Group:g Sub", "Cluster:* Update"]),
        ("reader", {"op": "view", "physical_offset": 0, "topic": "t"}, ["Topic:* Get|Sub"]),
        ("coordinator", {"op": "group.join", "group": "g", "topics": ["a", "b", "a"]},
         ["Group:g Sub", "Topic:a Sub", "Topic:b Sub"]),
        ("coordinator", {"op": "offset.commit", "group": "g", "offsets": [["a", 0, 1], ["b", 1, 1]]},
         ["Group:g Sub|Update", "Topic:a Sub|Update", "Topic:b Sub|Update"]),
        ("coordinator", {"op": "offset.commit", "group": "g", "offsets": [["a", 0, 1]], "reset": True},
         ["Group:g Update", "Topic:a Sub|Update"]),
        ("pop", {"op": "ack", "group": "g", "receipts": [["a", "0 1"]]}, ["Group:g Sub", "Topic:a Sub"]),
        ("pop", {"op": "in_flight", "group": "g"}, ["Group:g Get|Sub"]),
        ("coordinator", {"op": "group.delete", "group": "g", "unused": True}, ["Group:g Delete"]),
        ("transaction", {"op": "transaction.end", "group": "g"}, ["Group:g Pub|Sub"]),
        ("transaction", {"op": "transaction.end", "group": "g", "by_person": True}, ["Cluster:c Update"]),
        ("dispatcher", {"op": "query"}, ["Cluster:c Update"]),
    ],
)  # fmt: skip
def test_what_requests_need(kind: str, header: dict[str, Any], wanted: list[str]) -> None:
    found = needs_of(kind, header, "c")
    assert found is not None
    assert [f"{resource} {'|'.join(sorted(actions))}" for resource, actions in found] == wanted


@pytest.mark.parametrize(
    "value", [None, 1, "", "text", [], [1], [[]], [[1]], {}, {"a": 1}, [None], [{"group": []}], True]
)
def test_no_shape_of_a_field_fails(value: Any) -> None:
    for kind, operations in NEEDS.items():
        for op in operations:
            header = {"op": op, **dict.fromkeys(("topic", "topics", "group", "groups", "offsets", "members"), value)}
            header |= dict.fromkeys(("receipts", "queues", "properties", "set", "reset", "member", "by_person"), value)
            needs_of(kind, header, "c")


def test_every_operation_that_needs_the_right_to_change_goes_to_the_audit_log() -> None:
    header = {
        **dict.fromkeys(("topic", "group"), "x"),
        "set": {},
        "reset": True,
        "readable": True,
        "update": True,
        "by_person": True,
        "id": 1,
    }
    changing = {Action.CREATE, Action.UPDATE, Action.DELETE}
    found = {
        op
        for kind, operations in NEEDS.items()
        for op in operations
        if any(set(actions) <= changing for _, actions in needs_of(kind, {**header, "op": op}, "c") or [])
    }
    # A commit is a change by hand with ``reset`` only, an end with ``by_person``; a query changes nothing.
    assert found - {"offset.commit", "transaction.end", "query"} == CHANGES
