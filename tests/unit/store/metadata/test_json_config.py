"""Goal: RocketMQ's JSON dialect is read and written exactly, and no crash leaves less than one whole generation.

Method: generated documents; the pretty form of spec 1.4 spelled out; files damaged in the ways a crash can.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import ConsumerOffsets, GroupConfig, GroupTable
from commitmq.store.metadata.json_config import DataVersion
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(-(2**63), 2**63 - 1)
scalars = st.none() | st.booleans() | numbers | text
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(text | numbers, inner, max_size=4)
        | st.dictionaries(numbers, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(documents)
def test_round_trip_with_integer_keys(document: object) -> None:
    found = json_config.loads(json_config.dumps(document))
    assert found == document
    # 1 == True and 1 == 1.0 in Python: the texts must be equal too.
    assert json_config.dumps(found) == json_config.dumps(document)


@given(st.dictionaries(text, st.dictionaries(text, numbers, max_size=3), max_size=3))
def test_without_integer_keys_it_is_ordinary_json(document: object) -> None:
    assert json.loads(json_config.dumps(document)) == document
    assert json_config.loads(json.dumps(document)) == document


def test_the_pretty_form() -> None:
    data = {"a": {}, "b": {0: 1, -12: [2, {"c": None}]}, "d": 'q"\\\n\tü🚀', "e": [], "f": True}
    assert json_config.dumps(data) == (
        '{\n\t"a":{\n\t\t\n\t},\n\t"b":{\n\t\t0:1,\n\t\t-12:[\n\t\t\t2,\n\t\t\t{\n\t\t\t\t"c":null\n\t\t\t}\n\t\t]\n\t},'
        '\n\t"d":"q\\"\\\\\\n\\tü🚀",\n\t"e":[],\n\t"f":true\n}'
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{0:123,1:456}", {0: 123, 1: 456}),
        ('{"0":123, "1":456}', {"0": 123, "1": 456}),
        ("{ 0 : 1 ,\n\t-7\t: 2}", {0: 1, -7: 2}),
        ('{"a":"{0:1,2:3}"}', {"a": "{0:1,2:3}"}),
        ('{"a\\"{1:":2}', {'a"{1:': 2}),
        ("[1,2,{3:[4]}]", [1, 2, {3: [4]}]),
        ('{"\\u0000i5":1,5:"\\u0000i5","\\u0000":2}', {"\0i5": 1, 5: "\0i5", "\0": 2}),
    ],
)
def test_reading_both_kinds_of_keys(source: str, expected: object) -> None:
    assert json_config.loads(source) == expected


@pytest.mark.parametrize("source", ["", "{", '{"a":1', "{a:1}", "{0:1}x", "\0\0\0"])
def test_what_is_not_this_dialect(source: str) -> None:
    with pytest.raises(ValueError):
        json_config.loads(source)


def test_the_previous_generation_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "config" / "topics.json"
    for generation in range(3):
        json_config.persist(path, {"generation": generation})
        assert json_config.load(path) == {"generation": generation}
    assert json_config.loads((path.parent / "topics.json.bak").read_text()) == {"generation": 1}
    assert sorted(one.name for one in path.parent.iterdir()) == ["topics.json", "topics.json.bak"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "zeros", "bytes"])
def test_a_damaged_file_is_refused_and_a_missing_one_falls_back(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "topics.json"
    json_config.persist(path, {"generation": {"n": 0}})
    json_config.persist(path, {"generation": {"n": 1}})
    whole = path.read_bytes()
    contents = {"empty": b"", "cut": whole[:-3], "zeros": bytes(len(whole)), "bytes": b"\xff\xfe"}
    path.unlink()
    if damage != "missing":
        path.write_bytes(contents[damage])
        with pytest.raises(StoreError, match=r"is damaged.*topics\.json\.bak, is whole"):
            json_config.load(path)
        path.unlink()  # as the sentence says
    assert json_config.load(path) == {"generation": {"n": 0}}
    json_config.persist(path, {"generation": {"n": 2}})
    assert json_config.load(path) == {"generation": {"n": 2}}
    path.unlink()
    assert json_config.load(path) == {"generation": {"n": 0}}


@pytest.mark.parametrize("number", ["EIO", "ENOSPC"])
def test_a_failed_sync_of_the_folder_does_not_say_that_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    path = tmp_path / "topics.json"
    json_config.persist(path, {"a": 1})
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"disk.sync_folder.json:before=errno:{number}"))
    with pytest.raises(StoreError, match="has its new content") as caught:
        json_config.persist(path, {"a": 2})
    assert type(caught.value) is StoreError, "a full disk would mean that nothing was written"
    assert json_config.load(path) == {"a": 2}


def test_nothing_there_is_no_error_but_garbage_is(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    assert json_config.load(path) is None
    for content in (b"", b"\n", b'{"a":'):
        path.write_bytes(content)
        with pytest.raises(StoreError, match="continues without it") as caught:
            json_config.load(path)
        assert caught.value.path == path


def test_data_version() -> None:
    version = DataVersion.from_json({"counter": 3, "stateVersion": 1, "timestamp": 5})
    version.advance()
    assert (version.counter, version.state_version) == (4, 1)
    assert version.timestamp > 1_700_000_000_000
    assert DataVersion.from_json(None) == DataVersion() == DataVersion.from_json({"counter": "x"})


def test_topics_keep_what_we_do_not_know(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.write_text('{"newThing":[1],"topicConfigTable":{"T":{"perm":4,"fresh":{0:1}}},"dataVersion":{"counter":9}}')
    table = TopicTable.load(path)
    assert table.topics["T"] == TopicConfig("T", perm=4, unknown={"fresh": {0: 1}})
    assert (table.topics["T"].read_queues, table.version.counter) == (16, 9)
    table.put(TopicConfig("U", read_queues=2, write_queues=3, attributes={"message.type": "FIFO"}))
    table.persist(path)
    again = TopicTable.load(path)
    assert again == table
    assert again.version.counter == 10
    data = json_config.load(path)
    assert data is not None
    assert data["newThing"] == [1]
    assert data["topicConfigTable"]["T"]["fresh"] == {0: 1}
    assert list(data["topicConfigTable"]["U"]) == sorted(data["topicConfigTable"]["U"])
    again.remove(["U", "absent"])
    assert list(again.topics) == ["T"]
    assert again.version.counter == 11


def test_groups_keep_what_we_do_not_know(tmp_path: Path) -> None:
    path = tmp_path / "subscriptionGroup.json"
    path.write_text('{"subscriptionGroupTable":{"g":{"groupName":"g","consumeEnable":false,"fresh":1}}}')
    table = GroupTable.load(path)
    assert not table.groups["g"].consume_enabled
    table.put(GroupConfig("h"))
    table.persist(path)
    assert GroupTable.load(path) == table
    kept = json_config.load(path)
    assert kept is not None
    assert kept["subscriptionGroupTable"]["h"]["retryMaxTimes"] == 16
    GroupConfig("i").settings["attributes"]["x"] = "y"
    assert GroupConfig("j").settings["attributes"] == {}
    table.remove("h")
    assert list(table.groups) == ["g"]


def test_consumer_offsets(tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    path.write_text('{"groupTopicMap":{"x":["y"]},"offsetTable":{"T@g":{"0":5,1:6},"nogroup":{0:1}},"kept":1}')
    offsets = ConsumerOffsets.load(path)
    assert offsets.offsets == {("T", "g"): {0: 5, 1: 6}}
    offsets.put("g", "U", 2, 7)
    offsets.put("h", "T", 0, 9)
    assert sorted(offsets.of_group("g")) == [("T", 0, 5), ("T", 1, 6), ("U", 2, 7)]
    offsets.persist(path)
    data = json_config.load(path)
    assert data is not None
    assert data["groupTopicMap"].keys() == {"g", "h"}
    assert sorted(data["groupTopicMap"]["g"]) == ["T", "U"]
    assert data["offsetTable"] == {"T@g": {0: 5, 1: 6}, "U@g": {2: 7}, "T@h": {0: 9}}
    assert data["kept"] == 1
    again = ConsumerOffsets.load(path)
    again.remove_topic("T")
    assert list(again.offsets) == [("U", "g")]
    again.remove_group("g")
    assert not again.offsets


@pytest.mark.parametrize("table", [TopicTable, GroupTable, ConsumerOffsets])
def test_another_shape_is_a_typed_error(tmp_path: Path, table: type[TopicTable]) -> None:
    path = tmp_path / "file.json"
    for text in ("[1]", '{"topicConfigTable":[1],"subscriptionGroupTable":[1],"offsetTable":[1]}'):
        path.write_text(text)
        with pytest.raises(StoreError) as caught:
            table.load(path)
        assert caught.value.path == path
