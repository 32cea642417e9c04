"""Goal: settings that cannot be written were never changed, and a queue that was reset is begun anew by its holder once.

Method: groups over a folder whose file cannot be replaced for a while; a membership and the generations that a member reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.config import NodeConfig
from commitmq.coordination.groups import GroupCoordinator
from commitmq.coordination.membership import Membership
from commitmq.coordination.operations import GroupConfigOperations, begin_anew, to_begin_anew
from commitmq.errors import ProtocolError, StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import GroupConfig, GroupTable


def _full(*_: object) -> None:
    raise StoreError("the disk is full")


def _load(layout: StoreLayout) -> GroupCoordinator:
    return GroupCoordinator.load(layout, lambda _: [0, 1], NodeConfig().groups, first_generation=1, now_ms=0)


def test_settings_that_cannot_be_written_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir(parents=True)
    layout.own.mkdir(parents=True)
    groups = _load(layout)
    groups.configure("old", {"retryMaxTimes": 3})
    groups.write(0)
    with monkeypatch.context() as full:
        full.setattr(json_config, "persist", _full)
        groups.configure("old", {"retryMaxTimes": 9})
        groups.configure("new", {"consumeEnable": False})
        assert groups.is_configured
        with pytest.raises(StoreError):
            groups.write(0)
    assert (groups.config_of("old").max_retries, groups.exists("new"), groups.is_configured) == (3, False, False)
    assert list(groups.names_from("")) == ["old"]
    groups.write(0, at_once=True)
    assert _load(layout).config_of("old").max_retries == 3


def test_what_a_group_must_not_read_is_taken_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir(parents=True)
    layout.own.mkdir(parents=True)
    groups = _load(layout)
    operations = GroupConfigOperations(groups).operations

    def ask(op: str, **fields: object) -> None:
        operations[op]({"id": 1, "group": "old", **fields}, 0)

    ask("group.forbid", topic="t1", readable=False)
    groups.write(0)
    size = groups.table.object_bytes
    changes: list[Callable[[], None]] = [
        lambda: ask("group.forbid", topic="t2", readable=False),
        lambda: ask("group.forbid", topic="t1", readable=True),
        lambda: ask("group.delete"),
        lambda: ask("group.forbid", group="new", topic="t2", readable=False),
        lambda: groups.configure("old", {"attributes": {"a": "b"}}),
    ]
    for change in changes:
        with monkeypatch.context() as full:
            full.setattr(json_config, "persist", _full)
            change()
            with pytest.raises(StoreError):
                groups.write(0)
        assert groups.table.forbidden == {"old": {"t1": 4}}
        assert groups.table.object_bytes == size
    groups.write(0, at_once=True)
    assert _load(layout).table.forbidden == {"old": {"t1": 4}}


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.sampled_from("xy"), st.booleans()), max_size=12)
)
def test_each_change_of_what_groups_may_read_counts(steps: list[tuple[int, str, str, bool]]) -> None:
    table = GroupTable()
    for kind, name, topic, flag in steps:
        before, reads = _unreadable(table), table.reads
        if kind == 0:
            table.put(GroupConfig(name).changed({"consumeEnable": flag, "retryMaxTimes": 3}))
        elif kind == 1:
            table.remove(name)
        elif kind == 2:
            table.forbid(name, topic, readable=flag)
        else:
            table.put_forbidden(name, {topic: 4} if flag else None)
        assert (table.reads != reads) is (_unreadable(table) != before)
        assert table.disabled == {one.name for one in table.groups.values() if not one.consume_enabled}
        assert GroupTable.from_json(table.to_json()).disabled == table.disabled


def _unreadable(table: GroupTable) -> object:
    return set(table.disabled), {name: dict(topics) for name, topics in table.forbidden.items()}


def test_the_list_of_groups_that_must_not_read_everything(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir(parents=True)
    layout.own.mkdir(parents=True)
    groups = _load(layout)
    operations = GroupConfigOperations(groups).operations
    for name in ("a", "b", "c", "d"):
        groups.configure(name, {"consumeEnable": name != "b"})
    operations["group.forbid"]({"group": "d", "topic": "x", "readable": False}, 0)
    page = operations["group.configs"]({"unreadable": True, "limit": 1}, 0).fields()
    assert ([one["groupName"] for one in page["configs"]], page["next"]) == (["b"], "b")
    rest = operations["group.configs"]({"unreadable": True, "after": "b"}, 0).fields()
    assert ([one["groupName"] for one in rest["configs"]], rest["forbidden"]) == (["d"], {"d": {"x": 4}})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("attributes", {"a": {}}), ("attributes", {"a": []}), ("groupRetryPolicy", {"x": [[[[[[[[[]]]]]]]]]})],
)
def test_settings_are_not_nested(tmp_path: Path, setting: str, value: object) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir(parents=True)
    layout.own.mkdir(parents=True)
    groups = _load(layout)
    with pytest.raises(ProtocolError, match=f"{setting} is nested"):
        groups.configure("g", {setting: value})
    assert not groups.exists("g")
    groups.configure("g", {"groupRetryPolicy": {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 5}}})


def test_the_size_of_settings_is_limited(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir(parents=True)
    layout.own.mkdir(parents=True)
    config = replace(NodeConfig().groups, max_group_settings_bytes=2_000, max_settings_bytes=3_000)
    groups = GroupCoordinator.load(layout, lambda _: [0, 1], config, first_generation=1, now_ms=0)

    def refused(limit: str, act: Callable[[], object]) -> None:
        before = groups.table.object_bytes
        with pytest.raises(ProtocolError, match=limit) as info:
            act()
        assert info.value.code == "LIMIT_EXCEEDED"
        assert groups.table.object_bytes == before, "nothing has changed"

    refused("max_group_settings_bytes", lambda: groups.configure("a", {"attributes": {"x": "y" * 2_000}}))
    assert not groups.exists("a")
    groups.configure("a", {"attributes": {"x": "y" * 1_900}})
    refused("max_settings_bytes", lambda: groups.configure("b", {"attributes": {"x": "y" * 1_900}}))
    operations = GroupConfigOperations(groups)

    def forbid(topic: str, *, readable: bool = False) -> None:
        operations.operations["group.forbid"]({"id": 1, "group": "b", "topic": topic, "readable": readable}, 0)

    for number in range(4):
        forbid(f"{number}" * 250)
    refused("max_settings_bytes", lambda: forbid("4" * 250))
    forbid("0" * 250)  # it is forbidden already
    groups.configure("a", {"attributes": {"x": "y" * 100}})  # smaller is always allowed
    for number in range(4, 7):
        forbid(f"{number}" * 250)
    refused("max_group_settings_bytes", lambda: forbid("7" * 250))
    groups.write(0)
    sizes = groups.table.object_bytes
    assert _load(layout).table.object_bytes == sizes > 1_700
    for number in range(9):
        forbid(f"{number}" * 250, readable=True)
    groups.unwritten.remove(groups.table, "a")
    assert groups.table.object_bytes == 0


def test_members_of_the_file_that_nobody_knows_stay(tmp_path: Path) -> None:
    known = GroupConfig.from_json("g", {"groupName": "g", "retryMaxTimes": 16, "ofTomorrow": {"a": [1]}})
    assert known.changed({"retryMaxTimes": 2}).to_json() == {
        "groupName": "g",
        "ofTomorrow": {"a": [1]},
        "retryMaxTimes": 2,
    }
    table = GroupTable()
    table.put(known.changed({"consumeEnable": False}))
    table.persist(tmp_path / "subscriptionGroup.json")
    assert GroupTable.load(tmp_path / "subscriptionGroup.json").groups["g"].settings["ofTomorrow"] == {"a": [1]}


def test_a_holder_hears_of_a_reset_until_it_has_read_it() -> None:
    group = Membership("g", lambda _: [0, 1])
    first = group.join("m", ["t"], [], 1_000, 0)
    member, queue = group.member_of("m"), ("t", 0)
    begin_anew(group, ("t", 7))  # nobody holds it
    assert to_begin_anew(member, first.generation) == []
    begin_anew(group, queue)
    with pytest.raises(ProtocolError, match="has not read that answer yet"):
        group.check_owner("m", queue, first.generation)
    group.check_owner("m", ("t", 1), first.generation)
    second = group.heartbeat("m", first.generation, first.assigned, 1)
    assert second.generation > first.generation
    assert second.assigned == first.assigned
    assert to_begin_anew(member, first.generation) == [queue]
    assert to_begin_anew(member, first.generation) == [queue], "the answer was lost"
    assert to_begin_anew(member, second.generation) == []
    group.check_owner("m", queue, second.generation)
