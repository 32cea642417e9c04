"""Goal: topics.json and its journal never disagree, whichever step of writing them fails or dies; who follows the files has
what was answered, and reads no more than changed; and a RocketMQ that used the store in between loses and revives nothing.

Method: the real files. A table for RocketMQ's turn; a random machine of changes, snapshots, failures at each step and
deaths, against a plain dictionary of what was acknowledged; its
parameter is the seed.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from commitmq.control import ControlBlock, Word
from commitmq.coordination.topics import TopicManager
from commitmq.errors import ProtocolError, StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from commitmq.store.metadata.topic_files import TopicReader, TopicsJournal, journal_path, load_topics
from commitmq.workers.runtime.topic_view import TopicViews

FAR_MS = 1 << 60


def _load(layout: StoreLayout) -> TopicManager:
    return TopicManager.load(layout, auto_create=True, default_queues=4, max_topics=1_000)


def _delete(topics: TopicManager, name: str) -> None:
    topics.delete(name)
    topics.write_deletions([name], 1_000)
    topics.deletions.finish([name])


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


def test_an_entry_is_written_as_any_other_text(layout: StoreLayout) -> None:
    """The quick way to encode a topic makes the same bytes as the general one, which is RocketMQ's."""
    table = TopicTable()
    for name, attributes in (("a", {}), ('q"\\\n\x01\x7fé漢', {"k": 'v"', "l": "\t", "m": ""}), ("b", {"x": "1"})):
        table.put(TopicConfig(name, 1, 2, 7, dict(attributes), order=True, filter_type="MULTI_TAG", sys_flag=3))
    table.put(TopicConfig("unknown", unknown={"later": [1, None, True]}))
    assert table.dumps() == json_config.dumps(table.to_json())
    table.persist(layout.config / "topics.json")
    assert TopicTable.load(layout.config / "topics.json").topics == table.topics


def test_what_rocketmq_did_in_between_and_what_we_had_answered_are_both_there(layout: StoreLayout) -> None:
    topics = _load(layout)
    for name in ("both", "deleted", "again", "changed"):
        topics.create(name, 2)
    topics.write()
    topics.storage.snapshot(0, at_once=True)
    # Only the journal has these; then the machine dies, and RocketMQ starts on the store.
    topics.create("ours", 3)
    topics.write()
    _delete(topics, "deleted")
    _delete(topics, "again")
    topics.create("again", 7)
    topics.create("changed", 5, update=True)
    topics.write()
    newest = topics.table.topics["again"].incarnation  # the last one that a topic got
    theirs = TopicTable.load(layout.config / "topics.json")
    theirs.put(TopicConfig("theirs", 8, 8))
    theirs.put(TopicConfig("changed", 16, 16, attributes=theirs.topics["changed"].attributes))
    theirs.remove(["both"])
    theirs.persist(layout.config / "topics.json")
    expected = {"again": 7, "changed": 16, "ours": 3, "theirs": 8}
    for _ in range(2):
        assert {name: one.read_queues for name, one in load_topics(layout).topics.items()} == expected
        again = _load(layout)
        assert {name: one.read_queues for name, one in again.table.topics.items()} == expected
        assert again.table.next_incarnation() > newest
    assert TopicTable.load(layout.config / "topics.json").topics.keys() == expected.keys()


@pytest.mark.parametrize("seed", range(12))
def test_random_changes_failures_and_deaths(seed: int, layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    layout.run.mkdir(parents=True)
    control = ControlBlock(layout.control, create=True)
    topics = _load(layout)
    acked: dict[str, int] = {}  # name -> queues
    doubtful: set[str] = set()  # refused by a failing disk: the files may have it or not
    version = 0
    views = TopicViews(layout, control)
    read_whole = 0
    everything = TopicReader.everything

    def counted(reader: TopicReader) -> TopicTable:
        nonlocal read_whole
        read_whole += 1
        return everything(reader)

    monkeypatch.setattr(TopicReader, "everything", counted)

    def publish() -> None:
        nonlocal version
        version += 1
        topics.deletions.tell(version)
        topics.next_version = version + 1
        topics.changed.clear()
        control.put(Word.TOPICS_VERSION, version)

    def failing() -> contextlib.AbstractContextManager[object]:
        step = chance.choice(["fdatasync", "replace", "topics.json", "fsync", "new file"])
        patch = pytest.MonkeyPatch()
        broken = OSError(chance.choice([5, 28]), "broken")
        real_replace, real_sync = os.replace, os.fsync

        def replace(source: object, target: object) -> None:
            wanted = {"replace": "topics.journal", "topics.json": "topics.json"}[step]
            if str(target).endswith(wanted):
                raise broken
            real_replace(str(source), str(target))

        def raising(*_: object) -> None:
            raise broken

        match step:
            case "fdatasync":
                patch.setattr(os, "fdatasync", raising)
            case "fsync":
                patch.setattr(os, "fsync", lambda fd: raising() if chance.random() < 0.5 else real_sync(fd))
            case "new file":
                patch.setattr(TopicsJournal, "_new_file", lambda *_: (_ for _ in ()).throw(StoreError("no space")))
            case _:
                patch.setattr(os, "replace", replace)
        stack = contextlib.ExitStack()
        stack.callback(patch.undo)
        return stack

    publish()
    for _ in range(150):
        name = chance.choice("abcdefgh")
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                queues = chance.randint(1, 9)
                with failing() if chance.random() < 0.15 else contextlib.nullcontext():
                    try:
                        topics.create(name, queues, update=True)
                        topics.write()
                        acked[name] = queues
                        doubtful.discard(name)
                    except (StoreError, ProtocolError):
                        doubtful.add(name)
                publish()
            case 4 if name in acked:
                with contextlib.suppress(StoreError):
                    _delete(topics, name)
                    acked.pop(name)
                    doubtful.discard(name)
                if topics.deletions.endings:
                    break  # the disk failed: its retry is the service's, and other tests'
                publish()
            case 5 | 6:
                faults = failing() if chance.random() < 0.5 else contextlib.nullcontext()
                with faults, contextlib.suppress(StoreError):
                    topics.storage.snapshot(FAR_MS, at_once=True)
            case 7 if topics.storage.failed:
                topics.storage.recover()
            case 8:
                topics.storage.journal.close()  # it dies
                before = read_whole
                topics = _load(layout)
                assert read_whole == before
                publish()
            case _:
                views.reload()
        if topics.storage.failed:
            continue
        there = {one: topic.read_queues for one, topic in topics.table.topics.items()}
        assert {one: n for one, n in there.items() if one not in doubtful} == {
            one: n for one, n in acked.items() if one not in doubtful
        }
        acked = there
        if chance.random() < 0.3:
            views.reload()
            assert {one: view.read_queues for one, view in views._topics.items()} == there
            assert {one: topic.read_queues for one, topic in load_topics(layout).topics.items()} == there
    assert read_whole <= 40, "most looks read what changed"
    topics.storage.journal.close()
    control.close()


def test_who_follows_reads_what_changed_over_snapshots(layout: StoreLayout) -> None:
    topics = _load(layout)
    layout.run.mkdir(parents=True)
    control = ControlBlock(layout.control, create=True)
    reader = TopicReader(layout)
    assert reader.everything().topics == {}
    for number in range(30):
        topics.create(f"t{number}", 1)
        topics.next_version = number
        topics.write()
        if number % 10 == 9:
            topics.storage.snapshot(FAR_MS, at_once=True)  # one between two looks is no reason to read everything
        if number % 3 == 2:
            # What is in the journal and was not answered yet is nobody's.
            changes = reader.changes(number - 1)
            assert changes is not None
            names = {one.name for one in changes}
            assert f"t{number}" not in names or number % 10 == 9
            assert {f"t{number - 1}"} <= names | {f"t{number}"} or number % 10 == 9
            more = reader.changes(number)
            assert more is not None
            assert f"t{number}" in names | {one.name for one in more}
    for name in "xy":
        topics.create(name, 1)
        topics.write()
        topics.storage.snapshot(FAR_MS, at_once=True)
    assert reader.changes(100) is None, "a whole journal was missed"
    assert len(reader.everything().topics) == 32
    assert reader.changes(100) == []
    control.close()


def test_a_damaged_journal_is_refused_and_a_torn_one_cut(layout: StoreLayout) -> None:
    topics = _load(layout)
    topics.create("a", 1)
    topics.write()
    size = journal_path(layout).stat().st_size
    topics.create("b", 1)
    topics.write()
    topics.storage.journal.close()
    whole = journal_path(layout).read_bytes()
    journal_path(layout).write_bytes(whole[:-1])
    assert _load(layout).names() == ["a"]
    damaged = bytearray(whole)
    damaged[size - 2] ^= 1
    (layout.config / "topics.json").unlink()
    journal_path(layout).write_bytes(damaged)
    with pytest.raises(StoreError, match=r"topics journal.*topics\.json"):
        _load(layout)
    assert journal_path(layout).read_bytes() == damaged
