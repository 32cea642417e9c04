"""Goal: the node's own dispatchers pass the tests that it asks of everybody else's, and wrong ones do not.

Method: the contract on the built-in dispatchers; then dispatchers with one mistake each, and the test that must find it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase

from commitmq import hookimpl
from commitmq.format.index import IndexShape
from commitmq.plugin.hookspecs import DispatcherSpec, DispatcherView
from commitmq.store.index.index_file import IndexFile
from commitmq.store.log.dispatch_batch import DispatchBatch
from commitmq.testing import CommitMQNode, DispatcherContract
from commitmq.testing.contract import write_sample_log


class TestConsumeQueue(DispatcherContract):
    """The units of each queue; files are sparse behind their end, so that zeros there do not count."""

    plugin = "commitmq_dispatchers.consume_queue"
    name = "consume_queue"
    settings = ("consume_queue.file_bytes=200",)

    def snapshot(self, view: DispatcherView) -> Any:
        root = view.layout.consume_queue
        return {
            str(path.relative_to(root)): path.read_bytes().rstrip(b"\0") for path in root.rglob("*") if path.is_file()
        }

    @pytest.mark.slow
    def test_in_a_node(self, commitmq_node_factory: Callable[..., CommitMQNode], tmp_path: Path) -> None:
        super().test_in_a_node(commitmq_node_factory, tmp_path)


class TestIndex(DispatcherContract):
    """The items of each file in their order; names and the seconds in them come from the clock."""

    plugin = "commitmq_dispatchers.index"
    name = "index"
    settings = ("index.hash_slots=50", "index.max_items=64")

    def snapshot(self, view: DispatcherView) -> Any:
        shape = IndexShape(view.config.index.hash_slots, view.config.index.max_items)
        item = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
        files = []
        for path in sorted(view.layout.index.glob("*")):
            file = IndexFile(path, shape)
            header = file.header
            file.close()
            items = np.frombuffer(path.read_bytes()[shape.item_position(1) :], item)[: header.count - 1]
            files.append((header.begin_offset, header.end_offset, header.slots_used, items.tolist()))
        return files


# ---------------------------------------------------------------- dispatchers with a mistake


class Right:
    """Keeps the offset of each record, with its topic, in one file, which it replaces at each batch. The others get one
    thing wrong.
    """

    def open(self, view: DispatcherView) -> int:
        self.file = view.folder / "seen.json"
        view.folder.mkdir(parents=True, exist_ok=True)
        kept: list[tuple[int, str]] = json.loads(self.file.read_bytes()) if self.file.exists() else []
        self.seen = [offset for offset, _ in kept]
        self.topics = dict(kept)
        self.deleted = view.topics_deleted
        self.position = view.position
        return view.position

    def offsets(self, batch: DispatchBatch) -> list[int]:
        """Of the records that are not of a deleted topic."""
        topics = [batch.topics[number] for number in batch.rows["topic"].tolist()]
        found = dict(zip(batch.rows["physical_offset"].tolist(), topics, strict=True))
        self.topics |= found
        deleted = self.deleted()
        return [offset for offset, topic in found.items() if offset >= deleted.get(topic, 0)]

    def dispatch(self, batch: DispatchBatch) -> None:
        for index in range(len(batch)):
            batch.record(index)
        self.seen = sorted({*self.seen, *self.offsets(batch)})
        self.position = batch.end
        self.save()

    def save(self) -> None:
        self.file.write_text(json.dumps([(offset, self.topics[offset]) for offset in self.seen]))

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        return self.position, 0

    def truncate(self, offset: int) -> None:
        self.seen = [one for one in self.seen if one < offset]
        self.position = offset
        self.save()

    def expire(self, min_offset: int) -> None:
        self.seen = [one for one in self.seen if one >= min_offset]
        self.save()

    def forget(self, topic: str) -> None:
        self.seen = [one for one in self.seen if self.topics[one] != topic]
        self.save()

    def close(self) -> None:
        pass


class CountsTwice(Right):
    def dispatch(self, batch: DispatchBatch) -> None:
        self.seen += self.offsets(batch)
        self.position = batch.end
        self.save()


class SavesAtCloseOnly(Right):
    def dispatch(self, batch: DispatchBatch) -> None:
        self.seen = sorted({*self.seen, *self.offsets(batch)})
        self.position = batch.end

    def close(self) -> None:
        self.save()


class ClaimsTheFuture(Right):
    def flush(self, *, thorough: bool) -> tuple[int, int]:
        return self.position + 1, 0


class NeedsWholeBatches(Right):
    def dispatch(self, batch: DispatchBatch) -> None:
        self.seen += self.offsets(batch)[:1]
        self.save()


class DislikesEmptyBatches(Right):
    def dispatch(self, batch: DispatchBatch) -> None:
        int(batch.rows["physical_offset"][-1])
        super().dispatch(batch)


class TruncatesTooLittle(Right):
    def truncate(self, offset: int) -> None:
        self.seen = [one for one in self.seen if one <= offset]
        self.save()


class ChangesBeforeItRefuses(Right):
    def truncate(self, offset: int) -> None:
        self.seen.clear()
        self.save()
        raise NotImplementedError


class ExpiresByNumber(Right):
    def expire(self, min_offset: int) -> None:
        del self.seen[:10]
        self.save()


class ResumesTooLate(Right):
    def open(self, view: DispatcherView) -> int:
        super().open(view)
        return view.position + 1 if view.position else 0


class PositionInAString(Right):
    def open(self, view: DispatcherView) -> Any:
        return str(super().open(view))


class WritesElsewhere(Right):
    def open(self, view: DispatcherView) -> int:
        position = super().open(view)
        self.file = view.layout.own / "seen.json"
        return position


class AppliesHalfABatch(Right):
    def dispatch(self, batch: DispatchBatch) -> None:
        for index, offset in enumerate(self.offsets(batch)):
            self.seen.append(offset)
            self.save()
            batch.record(index)
        self.position = batch.end


class ForgetsNothing(Right):
    def forget(self, topic: str) -> None:
        pass


class ForgetsOneTopic(Right):
    def forget(self, topic: str) -> None:
        if topic == "orders":
            super().forget(topic)


class ForgetsUntilTheReplay(Right):
    def open(self, view: DispatcherView) -> int:
        found = super().open(view)
        self.deleted = dict
        return found


class ForgetsAll(Right):
    def forget(self, topic: str) -> None:
        self.seen.clear()
        self.save()


class TestRight(DispatcherContract):
    """The yardstick is no mistake itself; the others are made from it."""

    plugin = "a_plugin_with_right"
    name = "mistaken"
    in_node = False
    examples = 5
    dispatcher: type[Right] = Right

    @pytest.fixture(autouse=True)
    def _a_plugin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, self.dispatcher)

    def snapshot(self, view: DispatcherView) -> Any:
        file = view.folder / "seen.json"
        return json.loads(file.read_bytes()) if file.exists() else []


def install(monkeypatch: pytest.MonkeyPatch, dispatcher: type[Right]) -> None:
    """Make ``dispatcher`` the dispatcher of a module that can be imported as a plugin."""
    module = ModuleType(TestRight.plugin)

    @hookimpl
    def commitmq_dispatchers(config: object) -> list[DispatcherSpec]:
        return [DispatcherSpec("mistaken", f"{TestRight.plugin}:factory", can_undo=False)]

    vars(module).update(commitmq_dispatchers=commitmq_dispatchers, factory=dispatcher)
    monkeypatch.setitem(sys.modules, TestRight.plugin, module)


@pytest.mark.parametrize(
    ("dispatcher", "test"),
    [
        (CountsTwice, "test_replay_after_a_kill"),
        (CountsTwice, "test_replay_from_the_beginning"),
        (SavesAtCloseOnly, "test_replay_after_a_power_cut"),
        (SavesAtCloseOnly, "test_replay_after_a_kill"),
        (ClaimsTheFuture, "test_close_and_reopen"),
        (NeedsWholeBatches, "test_batches_may_be_cut_anywhere"),
        (NeedsWholeBatches, "test_a_batch_may_hold_one_record"),
        (DislikesEmptyBatches, "test_batches_without_records"),
        (TruncatesTooLittle, "test_truncate"),
        (ChangesBeforeItRefuses, "test_truncate"),
        (ExpiresByNumber, "test_expire"),
        (ResumesTooLate, "test_close_and_reopen"),
        (PositionInAString, "test_nothing_at_all"),
        (WritesElsewhere, "test_its_files_are_in_its_own_folder"),
        (AppliesHalfABatch, "test_a_record_that_cannot_be_read"),
        (ForgetsNothing, "test_forget"),
        (ForgetsOneTopic, "test_forget"),
        (ForgetsUntilTheReplay, "test_forget"),
        (ForgetsAll, "test_forget"),
    ],
)
def test_a_mistake_is_found(
    dispatcher: type[Right], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, dispatcher)
    contract = type("TestMistaken", (TestRight,), {"phases": (Phase.generate,)})()
    arguments: list[Any] = [tmp_path]
    if test != "test_poison":
        arguments.insert(0, write_sample_log(tmp_path / "sample" / "commitlog"))
    with pytest.raises((AssertionError, IndexError, ExceptionGroup)):
        getattr(contract, test)(*arguments)
