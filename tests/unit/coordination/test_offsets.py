"""Goal: an acknowledged group offset survives any crash, never goes back unless reset, and RocketMQ's file says so too.
Method: real files; a crash is a new object on the same folder, with the unsynced end of the journal cut at random.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from commitmq.coordination.offsets import COMMITS_A_VERSION, NONE, GroupOffsets
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import ConsumerOffsets
from commitmq.store.metadata.journal import DropTopic, OffsetsJournal, SetOffsets


def _committed(offsets: GroupOffsets, group: str, *entries: tuple[str, int, int], reset: bool = False) -> None:
    offsets.stage(group, entries, reset=reset)
    offsets.sync()


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


def test_a_commit_is_seen_only_after_the_sync(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    assert offsets.stage("g", [("t", 0, 5)]) == [("t", 0, 5)]
    assert offsets.fetch("g", "t", 0) == NONE
    offsets.sync()
    assert offsets.fetch("g", "t", 0) == 5
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 5


def test_offsets_never_go_back_unless_reset(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 9), ("t", 1, 4))
    assert offsets.stage("g", [("t", 0, 3), ("t", 1, 6)]) == [("t", 0, 9), ("t", 1, 6)]
    assert offsets.stage("g", [("t", 1, 5)]) == [("t", 1, 6)], "a commit sees what was staged before it"
    assert offsets.stage("g", [("t", 1, 2)], reset=True) == [("t", 1, 2)]
    offsets.sync()
    assert [offsets.fetch("g", "t", queue) for queue in (0, 1)] == [9, 2]
    assert GroupOffsets.open(layout).fetch("g", "t", 1) == 2


def test_a_dropped_topic_is_forgotten_in_order(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 9), ("u", 0, 1))
    offsets.stage("g", [("t", 1, 3)])
    offsets.stage_drop("t")
    assert offsets.stage("g", [("t", 0, 2)]) == [("t", 0, 2)], "the old 9 does not count any more"
    offsets.sync()
    for one in (offsets, GroupOffsets.open(layout)):
        assert [one.fetch("g", "t", 0), one.fetch("g", "t", 1), one.fetch("g", "u", 0)] == [2, NONE, 1]


def test_the_snapshot_is_rocketmqs_file_and_empties_the_journal(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 9), ("t", 2, 4))
    before = offsets.journal_bytes
    offsets.snapshot()
    assert offsets.journal_bytes < before
    data = json_config.load(layout.config / "consumerOffset.json")
    assert data is not None
    assert data["offsetTable"] == {"t@g": {0: 9, 2: 4}}
    assert data["groupTopicMap"] == {"g": ["t"]}
    assert not offsets.dirty
    again = GroupOffsets.open(layout)
    assert again.fetch("g", "t", 2) == 4


def test_the_version_advances_every_500_commits(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    for number in range(COMMITS_A_VERSION):
        assert offsets.table.version.counter == 0
        _committed(offsets, "g", ("t", 0, number))
    assert offsets.table.version.counter == 1


@pytest.mark.parametrize("step", ["snapshot written", "new journal not renamed"])
def test_a_crash_between_snapshot_and_new_journal_changes_nothing(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 9), ("t", 1, 9), ("gone", 0, 5))
    offsets.snapshot()
    _committed(offsets, "g", ("t", 0, 4), reset=True)
    offsets.stage_drop("gone")
    offsets.sync()
    with monkeypatch.context() as patch:
        if step == "snapshot written":
            patch.setattr(OffsetsJournal, "_new_file", lambda *_: (_ for _ in ()).throw(StoreError("crash")))
        else:
            patch.setattr(os, "replace", _failing_replace)
        with pytest.raises(StoreError):
            offsets.snapshot()
    again = GroupOffsets.open(layout)
    assert [again.fetch("g", "t", 0), again.fetch("g", "t", 1), again.fetch("g", "gone", 0)] == [4, 9, NONE]


def test_a_crash_behind_the_snapshot_and_one_inside_the_next_are_survived(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leaves a journal that knows the snapshot by its mark alone, the second leaves that snapshot as .bak alone."""
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 5))
    offsets.snapshot()
    _committed(offsets, "g", ("t", 0, 6))

    class Death(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(OffsetsJournal, "_new_file", die)
        offsets.snapshot()
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr("commitmq.files.atomic_file.disk.replace", die)
        patch.setattr(json_config, "_keep_previous", lambda path: os.replace(path, json_config.backup_path(path)))
        GroupOffsets.open(layout)
    snapshot = layout.config / "consumerOffset.json"
    assert (snapshot.exists(), json_config.backup_path(snapshot).exists()) == (False, True)
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 6
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 6


def _failing_for_the_journal(folder: Path, what: str = "folder") -> None:
    if what == "journal":
        raise OSError(5, "broken")


def _failing_replace(source: object, target: object) -> None:
    if "journal" in str(target):
        raise OSError(5, "crash")
    os.rename(str(source), str(target))


def test_offsets_that_rocketmq_wrote_after_our_crash_never_go_back(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 10), ("t", 1, 10))
    offsets.snapshot()
    _committed(offsets, "g", ("t", 0, 20), ("t", 1, 20), ("t", 2, 0))
    # RocketMQ knows the snapshot only, goes on from it and writes its own.
    theirs = ConsumerOffsets.load(layout.config / "consumerOffset.json")
    theirs.put("g", "t", 0, 15)
    theirs.put("g", "t", 1, 35)
    theirs.persist(layout.config / "consumerOffset.json")
    again = GroupOffsets.open(layout)
    assert [again.fetch("g", "t", queue) for queue in (0, 1, 2)] == [20, 35, 0]


def test_an_older_file_that_was_put_back_is_told_of(layout: StoreLayout, caplog: pytest.LogCaptureFixture) -> None:
    path = layout.config / "consumerOffset.json"
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 10))
    offsets.snapshot()
    older = path.read_bytes()
    _committed(offsets, "g", ("t", 0, 20))
    offsets.snapshot()
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 20
    assert not caplog.records
    path.write_bytes(older)
    again = GroupOffsets.open(layout)
    assert again.fetch("g", "t", 0) == 10
    assert ["was not written by this node last" in one.message for one in caplog.records] == [True]
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 10
    assert len(caplog.records) == 1, "it is this node's file now"


def test_a_snapshot_of_rocketmq_is_read_as_it_is(layout: StoreLayout) -> None:
    layout.config.mkdir(parents=True)
    (layout.config / "consumerOffset.json").write_text(
        '{"dataVersion":{"counter":3,"stateVersion":0,"timestamp":5},"offsetTable":{"%RETRY%g@g":{0:7},"t@g":{"1":8}}}'
    )
    offsets = GroupOffsets.open(layout)
    assert sorted(offsets.table.of_group("g")) == [("%RETRY%g", 0, 7), ("t", 1, 8)]


def test_nothing_is_acknowledged_while_the_disk_fails(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 1))

    def broken(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        offsets.stage("g", [("t", 0, 2)])
        with pytest.raises(StoreError):
            offsets.sync()
        assert offsets.failed
        assert offsets.fetch("g", "t", 0) == 1
        with pytest.raises(StoreError):
            offsets.recover()
    offsets.stage("g", [("t", 0, 2)])
    with pytest.raises(StoreError):
        offsets.sync()
    offsets.stage("g", [("t", 0, 1)])
    with pytest.raises(StoreError):
        offsets.sync()
    offsets.recover()
    assert not offsets.failed
    _committed(offsets, "g", ("t", 0, 3))
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 3


def test_a_full_disk_at_start_refuses_commits_but_not_reads(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.own.mkdir(parents=True)
    table = ConsumerOffsets()
    table.put("g", "t", 0, 7)
    table.persist(layout.config / "consumerOffset.json")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        offsets = GroupOffsets.open(layout)
        assert offsets.failed
        assert offsets.fetch("g", "t", 0) == 7
    offsets.recover()
    _committed(offsets, "g", ("t", 0, 8))
    assert GroupOffsets.open(layout).fetch("g", "t", 0) == 8


@pytest.mark.parametrize("step", ["snapshot written", "new journal not renamed", "its folder not synced"])
def test_what_is_acknowledged_behind_a_failed_new_journal_is_not_undone(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The snapshot is replaced, the journal is not, and goes on: resets and drops that follow must survive a crash."""
    offsets = GroupOffsets.open(layout)
    _committed(offsets, "g", ("t", 0, 9), ("t", 1, 9), ("gone", 0, 5))
    with monkeypatch.context() as patch:
        if step == "snapshot written":
            patch.setattr(OffsetsJournal, "_new_file", lambda *_: (_ for _ in ()).throw(StoreError("no space")))
        elif step == "new journal not renamed":
            patch.setattr(os, "replace", _failing_replace)
        else:
            patch.setattr(disk, "sync_folder", _failing_for_the_journal)
        with pytest.raises(StoreError):
            offsets.snapshot()
    if offsets.failed:  # then nothing is acknowledged before it is mended
        offsets.recover()
    _committed(offsets, "g", ("t", 0, 4), reset=True)
    offsets.stage_drop("gone")
    offsets.sync()
    for _ in range(2):
        again = GroupOffsets.open(layout)
        assert [again.fetch("g", "t", 0), again.fetch("g", "t", 1), again.fetch("g", "gone", 0)] == [4, 9, NONE]


class CrashingOffsets(RuleBasedStateMachine):
    """Random commits, resets, drops, snapshots and crashes against a plain dictionary of what was acknowledged."""

    folder: Path

    @initialize()
    def start(self) -> None:
        self.number = 0
        self.root = self.folder / "store"
        if self.root.exists():
            shutil.rmtree(self.root)
        self.offsets = GroupOffsets.open(StoreLayout(self.root))
        self.model: dict[tuple[str, str, int], int] = {}
        self.staged = dict(self.model)

    @rule(
        group=st.sampled_from("gh"),
        topic=st.sampled_from("tu"),
        queue=st.integers(0, 2),
        offset=st.integers(0, 50),
        reset=st.booleans(),
    )
    def stage(self, group: str, topic: str, queue: int, offset: int, reset: bool) -> None:
        stored = self.offsets.stage(group, [(topic, queue, offset)], reset=reset)
        key = (group, topic, queue)
        self.staged[key] = offset if reset else max(offset, self.staged.get(key, NONE))
        assert stored == [(topic, queue, self.staged[key])]

    @rule(topic=st.sampled_from("tu"))
    def drop(self, topic: str) -> None:
        self.offsets.stage_drop(topic)
        self.staged = {key: offset for key, offset in self.staged.items() if key[1] != topic}

    @rule()
    def sync(self) -> None:
        self.offsets.sync()
        self.model = dict(self.staged)

    @rule()
    def snapshot(self) -> None:
        self.offsets.snapshot()

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """What was staged is lost; of a record being written any part may be there."""
        path = self.root / "commitmq" / "offsets.journal"
        changes = self.offsets._staged
        end = path.stat().st_size
        alternatives = [self.model]
        if changes:
            journal = self.offsets._journal
            journal.append(changes)
            content = path.read_bytes()
            kept = data.draw(st.integers(end, len(content)))
            path.write_bytes(content[:kept])
            if kept == len(content):
                alternatives = [self.staged]
        self.offsets.close()
        self.offsets = GroupOffsets.open(StoreLayout(self.root))
        found = {
            (group, topic, queue): offset
            for (topic, group), queues in self.offsets.table.offsets.items()
            for queue, offset in queues.items()
        }
        assert found in alternatives
        self.model = found
        self.staged = dict(found)

    @invariant()
    def acknowledged_offsets_are_there(self) -> None:
        if hasattr(self, "model"):
            for (group, topic, queue), offset in self.model.items():
                assert self.offsets.fetch(group, topic, queue) == offset

    def teardown(self) -> None:
        if hasattr(self, "offsets"):
            self.offsets.close()


def test_random_histories_with_crashes(tmp_path: Path) -> None:
    CrashingOffsets.folder = tmp_path
    run_state_machine_as_test(
        CrashingOffsets,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_changes_are_what_the_journal_holds(layout: StoreLayout) -> None:
    offsets = GroupOffsets.open(layout)
    offsets.stage("g", [("t", 0, 1), ("t", 1, 2)])
    offsets.stage_drop("t")
    offsets.sync()
    offsets.close()
    found = OffsetsJournal.open(layout.own / "offsets.journal")
    assert found is not None
    found[0].close()
    assert found[1].changes == [SetOffsets("g", "t", ((0, 1), (1, 2))), DropTopic("t")]
