"""Goal: heartbeats that a gateway sends together do what each would do alone, and say only what is new.

Method: the real service without sockets; members of two groups, quiet, changed, unknown and wrong ones in one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_crowds import Coordinator

from commitmq.errors import ProtocolError


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path / "store")
    made.ask("topic.create", topic="orders", queues=2)
    yield made
    made.service.close()
    made.control.close()


def test_only_members_with_news_are_in_the_answer(coordinator: Coordinator) -> None:
    first = coordinator.ask("group.join", group="g", member="a", instance="i", topics=["orders"])
    other = coordinator.ask("group.join", group="h", member="b", instance="i", topics=["orders"])
    beats = [
        {"group": "g", "member": "a", "generation": first["generation"], "owned": listed(first)},
        {"group": "h", "member": "b", "generation": other["generation"], "owned": listed(other)},
        {"group": "g", "member": "unknown", "generation": 0},
    ]
    answer = coordinator.ask("group.heartbeats", instance="i", members=beats)
    assert answer["changed"] == []
    assert [one[:2] for one in answer["refused"]] == [(2, "UNKNOWN_MEMBER")]
    coordinator.ask("group.join", group="g", member="c", instance="x", topics=["orders"])
    quiet = [{name: value for name, value in one.items() if name != "owned"} for one in beats[:2]]
    (changed,) = coordinator.ask("group.heartbeats", instance="i", members=quiet)["changed"]
    assert changed[0] == 0
    assert changed[1]["revoke"] == [("orders", 1)]
    assert changed[1]["members"] == [["a", "i"], ["c", "x"]]


def test_a_heartbeat_without_queues_keeps_those_of_the_last_one(coordinator: Coordinator) -> None:
    first = coordinator.ask("group.join", group="g", member="a", instance="i", topics=["orders"])
    one = {"group": "g", "member": "a", "generation": first["generation"]}
    for owned in ({"owned": listed(first)}, {}, {}):
        assert coordinator.ask("group.heartbeats", instance="i", members=[{**one, **owned}])["changed"] == []
    second = coordinator.ask("group.join", group="g", member="c", instance="x", topics=["orders"])
    assert second["assigned"] == []
    given = {**one, "owned": [["orders", 0]]}
    (changed,) = coordinator.ask("group.heartbeats", instance="i", members=[given])["changed"]
    given["generation"] = changed[1]["generation"]
    coordinator.ask("group.heartbeats", instance="i", members=[given])
    beat = {"group": "g", "member": "c", "generation": second["generation"], "owned": []}
    (changed,) = coordinator.ask("group.heartbeats", instance="x", members=[beat])["changed"]
    assert changed[1]["assigned"] == [("orders", 1)]


def test_another_instance_is_fenced(coordinator: Coordinator) -> None:
    joined = coordinator.ask("group.join", group="g", member="a", instance="i", topics=["orders"])
    beat = {"group": "g", "member": "a", "generation": joined["generation"]}
    answer = coordinator.ask("group.heartbeats", instance="other", members=[beat])
    assert [one[:2] for one in answer["refused"]] == [(0, "FENCED")]


@pytest.mark.parametrize("members", [None, {}, [1], [{}] * 1_001])
def test_wrong_members_refuse_the_whole_request(coordinator: Coordinator, members: object) -> None:
    with pytest.raises(ProtocolError, match="members must be a list of at most 1000 objects"):
        coordinator.ask("group.heartbeats", members=members)


def test_a_member_of_a_wrong_kind_harms_no_other(coordinator: Coordinator) -> None:
    joined = coordinator.ask("group.join", group="g", member="a", topics=["orders"])
    good = {"group": "g", "member": "a", "generation": joined["generation"]}
    answer = coordinator.ask("group.heartbeats", members=[{"group": 1}, good, {**good, "generation": "x"}])
    assert [one[:2] for one in answer["refused"]] == [(0, "INVALID_PARAMETER"), (2, "INVALID_PARAMETER")]


def listed(joined: dict[str, Any]) -> list[list[Any]]:
    """The queues of an answer, as a request has them."""
    return [list(queue) for queue in joined["assigned"]]
