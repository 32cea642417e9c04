"""Goal: batches are checked as a whole before anything is sent, and cut into runs within limits, in order.

Method: plans are made of lists of messages without a node, and their runs are read back.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq import InvalidMessageError, Message
from commitmq.client.sending.batch import BatchPlan, plan_batch
from commitmq.client.sending.run_encoder import MAX_RUN_MESSAGES, RunLayout, encode_user_properties
from commitmq.format.properties import decode_properties

LAYOUT = RunLayout("T", born_v6=False, store_v6=False, properties_crc=True)


def plan(messages: Any, **fields: Any) -> BatchPlan:
    every: dict[str, Any] = dict.fromkeys(("tags", "keys", "properties", "sharding_keys", "compressed"))
    return plan_batch("T", messages, **{**every, **fields})


def properties_of(made: BatchPlan) -> list[dict[str, str]]:
    encoded = made.properties
    return [decode_properties(one) for one in ([encoded] * len(made) if isinstance(encoded, bytes) else encoded)]


def test_plain_bodies_share_one_encoding() -> None:
    made = plan([b"a", b"b"], tags="T", properties={"p": "q"})
    assert made.properties == encode_user_properties({"p": "q", "TAGS": "T"})


def test_columns() -> None:
    made = plan(
        [b"a", b"b", b"c"],
        tags=["x", None, "x"],
        keys=["k1", ["k2", "k3"], None],
        sharding_keys=["s", None, "t"],
        properties={"p": "q"},
    )
    assert properties_of(made) == [
        {"p": "q", "TAGS": "x", "__SHARDINGKEY": "s", "KEYS": "k1"},
        {"p": "q", "KEYS": "k2 k3"},
        {"p": "q", "TAGS": "x", "__SHARDINGKEY": "t"},
    ]


def test_message_objects_bring_their_own() -> None:
    made = plan([Message(b"a", tags="x", flag=5), b"b", Message(b"c", sharding_key="s")])
    assert properties_of(made) == [{"TAGS": "x"}, {}, {"__SHARDINGKEY": "s"}]
    assert made.flags == [5, 0, 0]
    assert made.sharding_keys == [None, None, "s"]


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        (b"abc", {}, "a sequence of messages"),
        ([b"a", b""], {}, "message 1: the body is empty"),
        ([b"a", "b"], {}, "message 1: a body must be bytes"),
        ([b"a", b"b"], {"keys": ["k"]}, "keys has 1 entries for 2 messages"),
        ([b"a", b"b"], {"keys": "kk"}, "keys must be a list"),
        ([b"a", b"b"], {"tags": ["x", "a\x01b"]}, "message 1: tags contains"),
        ([b"a", b"b"], {"keys": ["x", ["a b"]]}, "message 1: key"),
        ([Message(b"a")], {"tags": "x"}, "carry their own"),
    ],
)
def test_what_is_wrong_is_named(messages: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidMessageError, match=reason):
        plan(messages, **fields)


def test_a_body_beyond_the_nodes_limit_is_named() -> None:
    with pytest.raises(InvalidMessageError, match="message 1: the body has 11 bytes, the node allows 10"):
        plan([b"a", b"b" * 11, b"c"]).check_sizes(10)


def test_runs_are_cut_by_bytes() -> None:
    made = plan([b"x" * 1000] * 100)
    record = LAYOUT.record_bytes(1000, 0)
    runs = list(made.runs(LAYOUT, [(-1, 0, 100)], record * 7 + record // 2))
    assert [run.stop - run.start for run in runs] == [7] * 14 + [2]
    assert [run.start for run in runs] == list(range(0, 100, 7))


def test_a_record_beyond_the_limit_is_a_run_of_its_own() -> None:
    runs = list(plan([b"x", b"y" * 5000, b"z"]).runs(LAYOUT, [(3, 0, 3)], 1000))
    assert [(run.queue, run.start, run.stop) for run in runs] == [(3, 0, 1), (3, 1, 2), (3, 2, 3)]


def test_runs_are_cut_by_count() -> None:
    runs = list(plan([b"x"] * (MAX_RUN_MESSAGES + 1)).runs(LAYOUT, [(-1, 0, MAX_RUN_MESSAGES + 1)], 1 << 30))
    assert max(run.stop - run.start for run in runs) <= MAX_RUN_MESSAGES
    assert sum(run.stop - run.start for run in runs) == MAX_RUN_MESSAGES + 1


def test_sorting_by_queue_keeps_each_queues_order() -> None:
    made = plan([b"%d" % index for index in range(6)], keys=[f"k{index}" for index in range(6)])
    groups = made.sort_by_queue([2, 0, 2, -1, 0, 2])
    assert groups == [(-1, 0, 1), (0, 1, 3), (2, 3, 6)]
    assert made.bodies == [b"3", b"1", b"4", b"0", b"2", b"5"]
    assert [one["KEYS"] for one in properties_of(made)] == ["k3", "k1", "k4", "k0", "k2", "k5"]
    assert made.order == [3, 1, 4, 0, 2, 5]


def test_compression_marks_what_it_made_smaller() -> None:
    made = plan([b"a", b"b" * 100], compressed=lambda body: (body[:5], 0x301) if len(body) > 50 else (body, 0))
    assert made.sys_flags == [0, 0x301]
    assert made.body_sizes.tolist() == [1, 5]
