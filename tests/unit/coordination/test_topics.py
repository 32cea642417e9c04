"""Goal: topics are RocketMQ's file, limits hold, and a deletion is whole after a crash between any two of its writes.
Method: real files; a crash is an error at the n-th write, after which everything is loaded again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.coordination.topics import MAX_QUEUES, TopicManager
from commitmq.errors import ProtocolError, StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from commitmq.store.metadata.topic_files import TopicsJournal, TopicTurn
from golden_stores import GoldenStore


def _load(layout: StoreLayout, *, auto_create: bool = True, max_topics: int = 1_000) -> TopicManager:
    return TopicManager.load(layout, auto_create=auto_create, default_queues=4, max_topics=max_topics)


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        call()
    return caught.value.code


def test_created_topics_are_there_after_the_write(layout: StoreLayout) -> None:
    topics = _load(layout)
    assert topics.create("orders", 3)
    assert topics.is_staged("orders")
    assert not topics.create("orders", 3)
    topics.write()
    assert not topics.is_staged("orders")
    assert topics.changed == ["orders"]
    assert _load(layout).get("orders").read_queues == 3, "the journal has it"
    topics = _load(layout)
    topics.storage.close()
    data = json_config.load(layout.config / "topics.json")
    assert data is not None
    assert data["dataVersion"]["counter"] == 1
    made = topics.get("orders").incarnation
    assert made > 0
    assert data["topicConfigTable"]["orders"] == {
        "attributes": {"storage.created": str(made)},
        "order": False,
        "perm": 6,
        "readQueueNums": 3,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "orders",
        "topicSysFlag": 0,
        "writeQueueNums": 3,
    }
    assert _load(layout).get("orders").read_queues == 3


def test_a_failed_write_takes_creations_back(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = _load(layout)
    topics.create("kept", 1)
    topics.write()
    topics.changed.clear()
    topics.create("lost", 1)
    topics.create("kept", 5, update=True)
    with monkeypatch.context() as patch:
        patch.setattr(TopicsJournal, "append", _no_space)
        with pytest.raises(StoreError):
            topics.write()
    assert topics.names() == ["kept"]
    assert topics.get("kept").read_queues == 1
    assert topics.table.version.counter == 1
    topics.write()
    assert _load(layout).names() == ["kept"]


def _no_space(journal: TopicsJournal, turns: list[TopicTurn]) -> None:
    raise StoreError("no space", path=journal.path)


def test_names_numbers_and_attributes_are_checked(layout: StoreLayout) -> None:
    topics = _load(layout)
    for name in ("", "a b", "é", "a/b", "..", "x" * 128, "%RETRY%" + "x" * 249):
        assert _code(lambda name=name: topics.create(name, 1)) == "INVALID_PARAMETER"  # type: ignore[misc]
        assert _code(lambda name=name: topics.route(name, create=True)) == "INVALID_PARAMETER"  # type: ignore[misc]
    for queues in (0, -1, MAX_QUEUES + 1):
        assert _code(lambda queues=queues: topics.create("t", queues)) == "INVALID_PARAMETER"  # type: ignore[misc]
    assert _code(lambda: topics.create("t", 1, perm=8)) == "INVALID_PARAMETER"
    for attributes in (
        {"queue.type": "RocksDBCQ"},
        {"queue.type": "BatchCQ", "storage.type": "memory"},
        {"cleanup.policy": "COMPACTION"},
        {"colour": "red"},
        {"reserve.time": "x"},
        {"storage.type": "disk"},
        {"storage.type": "memory", "message.type": "DELAY"},
    ):
        assert _code(lambda attributes=attributes: topics.create("t", 1, attributes=attributes)) == "INVALID_PARAMETER"  # type: ignore[misc]
    assert topics.names() == []
    assert topics.create("x" * 127, 1, attributes={"message.type": "FIFO", "reserve.time": "-1"})
    assert topics.create("%RETRY%" + "x" * 248, 1)


@pytest.mark.parametrize("name", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer", "TBW102"])
def test_system_topics_are_nobodys(layout: StoreLayout, name: str) -> None:
    topics = _load(layout)
    assert _code(lambda: topics.create(name, 1)) == "NO_PERMISSION"
    assert _code(lambda: topics.route(name, create=True)) == "NO_PERMISSION"
    topics.table.topics[name] = TopicTable.from_json({"topicConfigTable": {name: {}}}).topics[name]
    assert topics.route(name, create=False).name == name
    assert _code(lambda: topics.delete(name)) == "NO_PERMISSION"


def test_auto_creation_follows_the_configuration(layout: StoreLayout) -> None:
    topics = _load(layout)
    assert topics.route("t", create=True).write_queues == 4
    assert _code(lambda: topics.route("u", create=False)) == "TOPIC_NOT_EXIST"
    assert _code(lambda: _load(layout, auto_create=False).route("u", create=True)) == "TOPIC_NOT_EXIST"


def test_the_number_of_topics_is_limited(layout: StoreLayout) -> None:
    topics = _load(layout, max_topics=2)
    topics.create("a", 1)
    topics.route("b", create=True)
    assert _code(lambda: topics.route("c", create=True)) == "LIMIT_EXCEEDED"
    assert not topics.create("a", 1)


def test_where_messages_are_kept_cannot_change(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.create("cache", 2, attributes={"storage.type": "memory"})
    topics.create("plain", 2)
    assert topics.create("cache", 3, update=True)
    made = topics.get("cache").attributes["storage.created"]
    assert not topics.create("cache", 3, attributes={"storage.type": "memory"})
    assert _code(lambda: topics.create("cache", 3, attributes={"storage.type": "memory", "storage.created": "1"})) == (
        "INVALID_PARAMETER"
    )
    assert _code(lambda: topics.create("cache", 3, attributes={"storage.type": "log"}, update=True)) == (
        "INVALID_PARAMETER"
    )
    assert _code(lambda: topics.create("plain", 2, attributes={"storage.type": "memory"}, update=True)) == (
        "INVALID_PARAMETER"
    )
    assert topics.create("plain", 2, attributes={"storage.type": "log", "message.type": "FIFO"}, update=True)
    topics.write()
    assert _load(layout).get("cache").attributes == {"storage.type": "memory", "storage.created": made}
    assert topics.get("cache").settings == {"storage.type": "memory"}
    assert topics.create("cache", 3, attributes={"storage.type": "memory", "message.type": "FIFO"}, update=True)
    assert _code(lambda: topics.create("cache", 3, attributes={"message.type": "DELAY"}, update=True)) == (
        "INVALID_PARAMETER"
    )


def test_other_settings_are_refused_unless_they_are_an_update(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.create("t", 2)
    assert _code(lambda: topics.create("t", 3)) == "INVALID_PARAMETER"
    topics.table.topics["t"].unknown["future"] = 1
    assert topics.create("t", 3, update=True)
    topics.write()
    again = _load(layout).get("t")
    assert (again.read_queues, again.unknown) == (3, {"future": 1})


def _delete(topics: TopicManager, name: str, end: int = 1_000) -> None:
    topics.delete(name)
    topics.write_deletions([name], end)
    topics.deletions.finish([name])


def test_a_deleted_topic_leaves_a_tombstone_that_outlives_its_successor(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.create("t", 2)
    _delete(topics, "t")
    assert _code(lambda: topics.get("t")) == "TOPIC_NOT_EXIST"
    assert _code(lambda: topics.delete("t")) == "TOPIC_NOT_EXIST"
    topics.create("t", 2)
    topics.write()
    again = _load(layout)
    assert again.get("t").read_queues == 2
    assert again.deletions.tombstones == {"t": 1_000}
    assert json_config.load(layout.tombstones) == {"t": 1_000}


def test_a_tombstone_goes_when_nothing_lies_below_it(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.create("t", 2)
    _delete(topics, "t")
    deletions = topics.deletions
    deletions.prune(1_000, 1 << 40)
    assert deletions.tombstones == {"t": 1_000}, "nobody was told of it yet"
    deletions.tell(7)
    deletions.prune(999, 7)
    deletions.prune(1_000, 6)
    assert deletions.tombstones == {"t": 1_000}, "there may be records, or queue files"
    deletions.prune(1_000, 7)
    assert deletions.tombstones == {}
    topics.create("u", 1)
    _delete(topics, "u", 2_000)
    assert json_config.load(layout.tombstones) == {"u": 2_000}
    loaded = _load(layout).deletions
    loaded.prune(2_000, 1 << 40)
    assert loaded.tombstones == {"u": 2_000}, "a new coordinator tells them anew"
    loaded.tell(1)
    loaded.prune(2_000, 1)
    assert loaded.tombstones == {}


def test_deleted_topics_that_are_remembered_are_limited(layout: StoreLayout) -> None:
    topics = TopicManager.load(layout, auto_create=True, default_queues=4, max_topics=9, max_deleted=2)
    for name in ("a", "b", "c"):
        topics.create(name, 1)
    _delete(topics, "a")
    topics.delete("b")
    assert _code(lambda: topics.delete("c")) == "LIMIT_EXCEEDED"
    topics.write_deletions(["b"], 1_000)
    topics.deletions.finish(["b"])
    assert _code(lambda: topics.delete("c")) == "LIMIT_EXCEEDED"
    topics.deletions.tell(1)
    topics.deletions.prune(1_000, 1)
    assert topics.delete("c") is not None


def test_incarnations_grow_whatever_the_clock_says(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics of one name in a burst, over restarts, with a clock that goes back by a year."""
    made = []
    for year in (2, 1, 1):
        with monkeypatch.context() as patch:
            patch.setattr("time.time_ns", lambda year=year: year * 31_536_000 * 10**9)
            topics = _load(layout)
            for _ in range(5):
                topics.create("t", 1)
                topics.write()
                made.append(topics.get("t").incarnation)
                _delete(topics, "t")
    assert made == sorted(set(made))
    topics = _load(layout)
    topics.create("t", 1)
    before = topics.get("t").incarnation
    topics.create("t", 5, attributes={"message.type": "FIFO"}, update=True)
    assert topics.get("t").incarnation == before, "a change is no new topic"


def test_a_topic_that_rocketmq_made_has_no_incarnation_until_it_is_made_anew(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.table.topics["old"] = TopicTable.from_json({"topicConfigTable": {"old": {}}}).topics["old"]
    assert topics.get("old").incarnation == 0
    assert topics.delete("old", 0) == 0
    topics.write_deletions(["old"], 5)
    topics.deletions.finish(["old"])
    assert topics.delete("old", 0) is None
    topics.create("old", 1)
    assert topics.delete("old", 0) is None
    assert topics.get("old").incarnation > 0


def test_no_topic_of_the_name_while_its_deletion_is_unfinished(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.create("t", 2)
    topics.delete("t")
    assert _code(lambda: topics.create("t", 2)) == "SERVICE_NOT_AVAILABLE"
    topics.write_deletions(["t"], 10)
    assert _code(lambda: topics.route("t", create=True)) == "SERVICE_NOT_AVAILABLE"
    topics.deletions.finish(["t"])
    assert topics.create("t", 2)


@pytest.mark.parametrize("failing_write", range(1, 6))
def test_a_crash_between_any_two_writes_leaves_the_topic_whole_or_gone(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, failing_write: int
) -> None:
    topics = _load(layout)
    topics.create("t", 2)
    topics.create("other", 1)
    topics.write()
    made = topics.get("t").incarnation
    real, append, writes = json_config.replace_text, TopicsJournal.append, 0

    def crashing(path: Path, text: str) -> None:
        nonlocal writes
        writes += 1
        if writes >= failing_write:
            raise StoreError("crash", path=path)
        real(path, text)

    def crashing_append(journal: TopicsJournal, turns: list[TopicTurn]) -> None:
        nonlocal writes
        writes += 1
        if writes >= failing_write:
            raise StoreError("crash", path=journal.path)
        append(journal, turns)

    with monkeypatch.context() as patch:
        patch.setattr(json_config, "replace_text", crashing)
        patch.setattr(TopicsJournal, "append", crashing_append)
        try:
            _delete(topics, "t")
        except StoreError:
            assert failing_write <= 4
        else:
            assert failing_write == 5, "a deletion has four writes"
    again = _load(layout)
    endings = {name: one.incarnation for name, one in again.deletions.endings.items()}
    if failing_write == 1:
        assert again.names() == ["other", "t"]
        assert (again.deletions.tombstones, endings) == ({}, {})
        return
    assert again.names() == ["other"]
    assert endings == ({"t": made} if failing_write <= 4 else {})
    if endings:
        again.write_deletions(["t"], 1_500)
        again.deletions.finish(["t"])
    final = _load(layout)
    assert (final.names(), final.deletions.endings) == (["other"], {})
    assert final.deletions.tombstones["t"] >= 1_000


@pytest.mark.parametrize("place", ["disk.replace.json:after", "disk.sync_folder.json:before"])
def test_a_decision_that_others_may_have_read_is_carried_out(
    layout: StoreLayout, failing: Callable[[str], None], place: str
) -> None:
    """The file is replaced, and then the disk fails: a process that reads it forgets the topic, so it must not come back."""
    topics = _load(layout)
    topics.create("t", 2)
    topics.create("other", 1)
    topics.write()
    made = topics.get("t").incarnation
    failing(place)
    assert topics.delete("t") == made
    assert json_config.load(layout.endings) == {"t": made}
    assert topics.deletions.is_doubtful, "a power cut may take it back"
    assert topics.deletions.is_ending("t", made)
    topics.deletions.settle()
    assert not topics.deletions.is_doubtful
    assert _load(layout).names() == ["other"]


@pytest.mark.parametrize("place", ["json.write", "disk.sync.json:before", "disk.replace.json:before"])
def test_a_decision_that_nobody_can_have_read_is_refused(
    layout: StoreLayout, failing: Callable[[str], None], place: str
) -> None:
    topics = _load(layout)
    topics.create("t", 2)
    topics.write()
    failing(place)
    with pytest.raises(StoreError):
        topics.delete("t")
    assert not topics.deletions.is_doubtful
    assert topics.names() == ["t"]
    assert _load(layout).names() == ["t"]


def test_a_refused_decision_leaves_the_doubt_about_an_earlier_one(
    layout: StoreLayout, failing: Callable[[str], None]
) -> None:
    """Else the earlier topic could end before its ending is durable."""
    topics = _load(layout)
    topics.create("t", 2)
    topics.create("u", 2)
    topics.write()
    failing("disk.replace.json:after")
    topics.delete("t")
    failing("json.write")
    with pytest.raises(StoreError):
        topics.delete("u")
    assert topics.deletions.is_doubtful


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``failing(place)``: the next time, the failpoint ``place`` errs."""

    def fail(place: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{place}=errno:EIO@1"))
        monkeypatch.setattr(failpoints, "ACTIVE", True)

    return fail


def _io_error(folder: Path, what: str = "") -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("name", ["deleted_topics.json", "deleting_topics.json"])
def test_unreadable_files_are_named(layout: StoreLayout, name: str) -> None:
    layout.own.mkdir(parents=True)
    (layout.own / name).write_text('["t"]')
    with pytest.raises(StoreError, match=name):
        _load(layout)


def test_a_topics_file_of_rocketmq_is_served_unchanged_in_meaning(
    tmp_path: Path, golden_stores: dict[str, GoldenStore]
) -> None:
    for name, store in golden_stores.items():
        root = tmp_path / name
        shutil.copytree(store.root / "config", root / "config")
        layout = StoreLayout(root)
        before = json_config.load(layout.config / "topics.json")
        assert before is not None
        topics = _load(layout)
        assert set(topics.names()) == set(before["topicConfigTable"])
        topics.create("ours", 2)
        topics.write()
        topics.storage.close()
        after = json_config.load(layout.config / "topics.json")
        assert after is not None
        assert after["topicConfigTable"].pop("ours")
        assert after["topicConfigTable"] == before["topicConfigTable"]
        assert after["dataVersion"]["counter"] == before["dataVersion"]["counter"] + 1


@pytest.mark.parametrize("kind", ["MIXED", "BROADCAST"])
def test_a_topic_for_messages_that_nobody_takes_is_refused(kind: str, layout: StoreLayout) -> None:
    """But a topic that RocketMQ made so can be updated all the same."""
    topics = _load(layout)
    assert _code(lambda: topics.create("t", 1, attributes={"message.type": kind})) == "INVALID_PARAMETER"
    topics.table.put(TopicConfig("rocket", 2, 2, attributes={"message.type": kind}))
    assert topics.create("rocket", 3, attributes={"message.type": kind}, update=True)
    assert _code(lambda: topics.create("rocket", 3, attributes={"message.type": "DELAYED"}, update=True)) == (
        "INVALID_PARAMETER"
    )
