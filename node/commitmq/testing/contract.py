"""The tests that every dispatcher must pass, as a class to inherit from.

    class TestCounts(DispatcherContract):
        plugin = "my_plugin"                       # the module that the entry point names
        name = "counts"                            # the dispatcher's name
        poison = {"tags": "never"}                 # a message that it refuses, if any

        def snapshot(self, view):                  # what is in its files
            with sqlite3.connect(view.folder / "counts.db") as database:
                return database.execute("SELECT * FROM counts ORDER BY tag").fetchall()

The reference is one straight run: all records, in order, without an accident. Each test takes another way through the
same log (killed and replayed, cut into other batches, with a power cut behind a flush …) and compares the content of
the files at the end. A dispatcher that keeps nothing in files has nothing to compare; it still must not raise.

The first tests call the dispatcher directly, on a log with all kinds of records; they take a few seconds. The last ones
run it in a real node, kill it and the node under load, and compare with a straight run over the node's own log.

These tests cannot find a ``flush`` that forgets fdatasync. A killed process loses nothing that it wrote; only a power
cut does. The test of the power cut keeps the files as they were when ``flush`` returned, which finds data that was not
written yet.

A CommitLog with all kinds of records that a dispatcher may meet, written by the node's own appender.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import mmap
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from commitmq.client.message import Message
from commitmq.client.properties import build_properties
from commitmq.config import NodeConfig, load, section_from
from commitmq.errors import CorruptRecordError
from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import pack_host
from commitmq.format.record import Record, encode_record
from commitmq.log import get_log
from commitmq.plugin import loading as plugins
from commitmq.plugin.hookspecs import Dispatcher, DispatcherSpec, DispatcherView
from commitmq.store.layout import StoreLayout
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.recovery.scan import map_segment

if TYPE_CHECKING:
    from commitmq.testing.node import CommitMQNode


SEGMENT_BYTES = 16_384
TOPICS = ("orders", "a-topic-with-a-name-that-is-rather-long-for-one", "metrics%2", "SCHEDULE_TOPIC_XXXX")
RECORDS = 160
_HOST = Host("127.0.0.1", 10911)
_HOST_V6 = Host("::1", 10911)
_BORN_MS = 1_700_000_000_000
_PREPARED, _ROLLED_BACK = 0x4, 0xC
# Prepared, committed and rolled-back transactions, and no transaction most of the time.
_TRANSACTIONS = (0x0, 0x0, 0x0, _PREPARED, 0x0, 0x8, 0x0, _ROLLED_BACK)
# Words with one, two, three and four bytes a character, two with the same Java hash, and none.
_TAGS = ("drink", "", "grün", "标签", "🚀🚀", "Aa", "BB", "x" * 100)
_KEYS = ("", "table-7", "a b c", "schlüssel 钥匙 🗝", "k" * 300)


@dataclass(frozen=True, slots=True)
class SampleLog:
    """A log in ``folder``; ``offsets`` are its records' physical offsets, ``end`` is the offset behind the last one."""

    folder: Path
    offsets: tuple[int, ...]
    end: int
    segment_bytes: int = SEGMENT_BYTES

    def batches(self, log: CommitLog, start: int, end: int, cuts: Collection[int] = ()) -> Iterator[DispatchBatch]:
        """The range ``[start, end)`` as batches that also end at the records with the numbers in ``cuts``. They come as
        in a node: over the wire, with read-only rows.
        """
        walker = LogWalker(log, max_rows=4096, max_bytes=self.segment_bytes)
        stops = [self.offsets[number] for number in sorted(cuts) if start < self.offsets[number] < end]
        for stop in (*stops, end):
            while start < stop:
                frames = [bytes(frame) for frame in walker.walk(start, stop).to_frames()]
                batch = DispatchBatch.from_frames(frames, log)
                start = batch.end
                yield batch
        walker.release()

    def bounds(self, number: int) -> tuple[int, int]:
        """First offset of record ``number``, and where the next one starts (or a filler ends the segment)."""
        following = self.offsets[number + 1] if number + 1 < len(self.offsets) else self.end
        return self.offsets[number], following


def write_sample_log(folder: Path, extra: Record | None = None) -> SampleLog:
    """Write the log into ``folder``, some segments long; ``extra`` is one more record, put in the middle.

    Its content: several topics and queues, keys and tags of all widths of UTF-8, records without properties or body,
    records that wait for their delivery time, prepared and rolled-back transactions, both widths of hosts, a filler at
    each segment's end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = [_BORN_MS]
    appender = CommitLogAppender(
        0,
        segment_bytes=SEGMENT_BYTES,
        open_segment=lambda base: _segment(folder, base),
        store_host=pack_host(_HOST),
        max_message_bytes=SEGMENT_BYTES // 2,
        properties_crc=True,
        clock=lambda: clock[0],
    )
    queue_offsets: dict[tuple[str, int], int] = {}
    offsets = []
    records = [_record(number) for number in range(RECORDS)]
    if extra is not None:
        records.insert(RECORDS // 2, extra)
    for number, record in enumerate(records):
        clock[0] = _BORN_MS + number * 1_700  # records of several minutes
        queue = (record.topic, record.queue_id)
        counted = record.sys_flag & 0xC not in (_PREPARED, _ROLLED_BACK)
        data = bytearray(encode_record(record, properties_crc=True))
        done = appender.append_record(
            data, queue_offsets.get(queue, 0) if counted else 0, 20 if record.born_host is _HOST_V6 else 8
        )
        queue_offsets[queue] = queue_offsets.get(queue, 0) + counted
        offsets.append(done.physical_offset)
    appender.close()
    return SampleLog(folder, tuple(offsets), appender.position)


def _record(number: int) -> Record:
    tag, keys = _TAGS[number % len(_TAGS)], _KEYS[number % len(_KEYS)]
    properties = {name: value for name, value in (("TAGS", tag), ("KEYS", keys)) if value}
    if number % 3:
        properties["UNIQ_KEY"] = f"7F0000010001{number:020X}"
    topic = TOPICS[number % 13 % len(TOPICS)]
    if topic == TOPICS[-1]:
        properties["DELAY"] = str(number % 18 + 1)
    return Record(
        topic,
        queue_id=number % 3,
        sys_flag=_TRANSACTIONS[number % 8] if topic != TOPICS[-1] else 0,
        flag=number,
        born_timestamp=_BORN_MS + number,
        reconsume_times=number % 2,
        properties=properties if number % 11 else {},
        body=bytes((number + at) % 256 for at in range(number * 37 % 900)),
        born_host=_HOST_V6 if number % 5 == 0 else _HOST,
        store_host=_HOST,
    )


def _segment(folder: Path, base: int) -> mmap.mmap | None:
    path = folder / segment_name(base)
    if not path.exists():
        path.write_bytes(bytes(SEGMENT_BYTES))
    return map_segment(path, SEGMENT_BYTES)


_LOAD = 1_500  # messages of each stage in a node


class _UnreadableLog(CommitLog):
    """A log in which one record cannot be read."""

    unreadable = -1

    def read(self, offset: int, size: int) -> memoryview:
        if offset <= self.unreadable < offset + size and size < self.segment_bytes:
            raise CorruptRecordError("this record cannot be read", path=self.folder, offset=offset)
        return super().read(offset, size)


def _copy_unless_gone(source: str, target: str) -> str:
    """Copy, but skip a file that a thread of the dispatcher has just renamed."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)
    return target


class Life:
    """One life of a dispatcher on a store: from open to close, or to the point where it is left."""

    def __init__(self, contract: DispatcherContract, root: Path, sample: SampleLog) -> None:
        """``root`` becomes a store with the log of ``sample``, unless it already is one."""
        self.layout = StoreLayout(root)
        root.mkdir(parents=True, exist_ok=True)
        for folder in (self.layout.own, self.layout.run):
            folder.mkdir(exist_ok=True)
        if not self.layout.commit_log.exists():
            self.layout.commit_log.symlink_to(sample.folder.absolute())
        self._contract = contract
        self._sample = sample
        self.log = _UnreadableLog(self.layout.commit_log, sample.segment_bytes)
        self.dispatcher: Dispatcher
        self.view: DispatcherView
        self.position = 0
        self.durable = 0

    def open(
        self,
        position: int = 0,
        *,
        clean: bool = False,
        restarted: bool = False,
        deleted: Mapping[str, int] | None = None,
    ) -> Life:
        """Open as the host does: ``position`` is the position that the host knows to be durable. A node that starts
        again, and not only this dispatcher (``restarted``), has emptied its ``run``.
        """
        if not restarted:
            shutil.rmtree(self.layout.run)
            self.layout.run.mkdir()
        spec, config, section = self._contract.loaded()
        config = replace(config, commit_log=replace(config.commit_log, segment_bytes=self._sample.segment_bytes))
        factory: Any = plugins.resolve(spec.factory)
        self.dispatcher = factory()
        self.view = DispatcherView(
            self.layout, config, get_log(f"dispatcher-{spec.name}"), self.log, position,
            lambda: dict(deleted or {}), lambda _queues: None,
            settings=section, clean=clean, restarted=restarted, name=spec.name,
            node_clean=clean, log_end=self._sample.end,
        )  # fmt: skip
        found = self.dispatcher.open(self.view)
        assert type(found) is int, f"open() must return the offset to resume from, not {found!r:.100}"
        assert 0 <= found <= self._sample.end, f"open() resumes at {found}, the log has 0 to {self._sample.end}"
        self.position, self.durable = found, 0
        return self

    def feed(
        self, end: int, cuts: Iterable[int] = (), skip: tuple[int, int] = (0, 0), *, without: str | None = None
    ) -> Life:
        """Dispatch from the position up to ``end``. Records in ``skip`` are missing, like those that an operator
        skipped, and so are those of the topic ``without``.
        """
        for batch in self._batches(end, cuts):
            offsets = batch.rows["physical_offset"]
            rows = batch.rows[(offsets < skip[0]) | (offsets >= skip[1])]
            if without in batch.topics:
                rows = rows[rows["topic"] != batch.topics.index(without)]
            self.dispatcher.dispatch(DispatchBatch(batch.start, batch.end, rows, batch.topics, batch.log))
            self.position = batch.end
        return self

    def _batches(self, end: int, cuts: Iterable[int]) -> Iterator[DispatchBatch]:
        try:
            yield from self._sample.batches(self.log, self.position, end, frozenset(cuts))
        except CorruptRecordError as error:
            raise AssertionError(f"no record begins at {self.position}, where it resumes") from error

    def flush(self, *, thorough: bool = False) -> int:
        """Flush. The durable position must be valid, and must not go back."""
        found = self.dispatcher.flush(thorough=thorough)
        assert isinstance(found, tuple), f"flush() must return (durable offset, timestamp), not {found!r:.100}"
        assert [type(one) for one in found] == [int, int], f"flush() must return two integers, not {found!r:.100}"
        assert self.durable <= found[0] <= self.position, (
            f"flush() says {found[0]} is durable: it was {self.durable} before, and {self.position} is dispatched"
        )
        self.durable = found[0]
        return self.durable

    def close(self) -> Any:
        """Close in order; returns the snapshot."""
        self.flush(thorough=True)
        self.dispatcher.close()
        return self._snapshot()

    def copy(self, root: Path) -> Life:
        """A copy of the store in the kernel's present state, at another place: the state after a kill of the process."""
        shutil.copytree(self.layout.root, root, symlinks=True, copy_function=_copy_unless_gone)
        return Life(self._contract, root, self._sample)

    def leave(self) -> None:
        """Close its descriptors; its files are not used any more."""
        with contextlib.suppress(Exception):
            self.dispatcher.close()
        self.log.close()

    def _snapshot(self) -> Any:
        self.log.close()
        return self._contract.snapshot(self.view)


class DispatcherContract:
    """The tests that every dispatcher must pass. Subclasses set the attributes; only ``plugin``, ``name`` and
    :meth:`snapshot` are required.
    """

    plugin: ClassVar[str]
    """The plugin's module, as its entry point names it."""
    name: ClassVar[str]
    """The dispatcher's name, as in its DispatcherSpec."""
    settings: ClassVar[Sequence[str]] = ()
    """``section.key=value`` for the tests, in the node and directly."""
    poison: ClassVar[Mapping[str, Any] | None] = None
    """A message on which the dispatcher raises: ``body``, ``tags``, ``keys``, ``properties`` as for a producer."""
    examples: ClassVar[int] = 8
    """Number of random ways through the log in each of the replay tests."""
    phases: ClassVar[Collection[Phase]] = (Phase.generate, Phase.shrink)
    """Hypothesis's phases: a failing way is made shorter, which takes a while."""
    keeps_deleted_topics: ClassVar[bool] = False
    """True: ``forget`` keeps the content of deleted topics on purpose, as SqliteDispatcher's does without a ``drop_topic``."""
    in_node: ClassVar[bool] = True
    """False leaves out the tests with a node."""

    def snapshot(self, view: DispatcherView) -> Any:
        """The content of the files under ``view.folder``, for ``==``. The dispatcher is closed."""
        raise NotImplementedError("a subclass of DispatcherContract returns the content to compare")

    # ------------------------------------------------------------ helpers of the tests

    def loaded(self) -> tuple[DispatcherSpec, NodeConfig, Any]:
        """The dispatcher's spec, the configuration and the plugin's own section, from its hooks."""
        config = load(None, self.settings)
        # The node's own dispatchers pass this contract too, and only the node's distribution may use their names.
        distribution = plugins.OWN_DISTRIBUTION if self.plugin in plugins.BUILT_IN else "tested"
        candidate = plugins.Candidate(self.plugin, distribution, "-", partial(importlib.import_module, self.plugin))
        found = plugins.load_each([candidate])
        specs = [spec for _, spec in found.dispatchers(config) if spec.name == self.name]
        sections = [section for _, section in found.sections()]
        for report in found.reports:
            assert report.failure is None, f"the plugin fails in {report.failed_in}: {report.failure}"
        assert specs, f"{self.plugin} has no dispatcher {self.name!r}"
        section = None
        if sections:
            values = config.plugins.get(sections[0].name, {})
            section = section_from(sections[0].schema, values, f"plugins.{sections[0].name}")
        return specs[0], config, section

    @pytest.fixture
    def sample(self, tmp_path_factory: pytest.TempPathFactory) -> SampleLog:
        """The log for the direct tests."""
        return write_sample_log(tmp_path_factory.mktemp("sample") / "commitlog")

    def _life(self, root: Path, sample: SampleLog) -> Life:
        return Life(self, root, sample)

    def _straight(self, root: Path, sample: SampleLog, end: int | None = None, skip: tuple[int, int] = (0, 0)) -> Any:
        """The snapshot after all records below ``end`` except those in ``skip``, without an accident."""
        return self._life(root, sample).open().feed(sample.end if end is None else end, skip=skip).close()

    def _explore(self, folder: Path, sample: SampleLog, check: Callable[[Path, st.DataObject], None]) -> None:
        """Call ``check`` with random ways; a failure shows the smallest failing one."""
        numbers = itertools.count()

        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            phases=self.phases,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            check(folder / f"way-{next(numbers)}", data)

        run()

    # ------------------------------------------------------------ directly: batches

    def test_batches_may_be_cut_anywhere(self, sample: SampleLog, tmp_path: Path) -> None:
        expected = self._straight(tmp_path / "straight", sample)

        def check(root: Path, data: st.DataObject) -> None:
            cuts = data.draw(_cuts(sample), "batches end before records")
            life = self._life(root, sample).open().feed(sample.end, cuts)
            assert life.close() == expected

        self._explore(tmp_path, sample, check)

    def test_a_batch_may_hold_one_record(self, sample: SampleLog, tmp_path: Path) -> None:
        expected = self._straight(tmp_path / "straight", sample)
        life = self._life(tmp_path / "single", sample).open().feed(sample.end, range(len(sample.offsets)))
        assert life.close() == expected

    def test_batches_without_records(self, sample: SampleLog, tmp_path: Path) -> None:
        """A filler at a segment's end, and skipped records, leave batches with a range and no rows."""
        first, behind = sample.offsets[10], sample.offsets[60]
        once = self._straight(tmp_path / "straight", sample, skip=(first, behind))
        cuts = range(10, 60)
        life = self._life(tmp_path / "empty", sample).open().feed(sample.end, cuts, skip=(first, behind))
        assert life.close() == once

    def test_nothing_at_all(self, sample: SampleLog, tmp_path: Path) -> None:
        """Open and close without a record, twice, and use it after that."""
        root = tmp_path / "store"
        for clean in (False, True):
            self._life(root, sample).open(clean=clean).close()
        life = self._life(root, sample).open(clean=True).feed(sample.end)
        assert life.close() == self._straight(tmp_path / "straight", sample)

    # ------------------------------------------------------------ directly: positions

    def test_replay_after_a_kill(self, sample: SampleLog, tmp_path: Path) -> None:
        """Kill it somewhere behind a flush: repeated records must not count twice, all others must be there."""
        expected = self._straight(tmp_path / "straight", sample)

        def check(root: Path, data: st.DataObject) -> None:
            killed = data.draw(st.integers(0, len(sample.offsets) - 1), "killed before record")
            flushed = data.draw(st.integers(0, killed), "flushed before record")
            life = self._life(root / "a", sample).open()
            life.feed(sample.offsets[flushed], data.draw(_cuts(sample), "batches end before records"))
            durable = life.flush(thorough=data.draw(st.booleans(), "thorough flush"))
            life.feed(sample.offsets[killed])
            reached = life.position
            after = life.copy(root / "b")
            life.leave()
            after.open(durable, restarted=True)
            assert after.position <= reached, "open() resumes behind what was ever dispatched"
            after.feed(sample.end, data.draw(_cuts(sample), "then batches end before records"))
            assert after.close() == expected

        self._explore(tmp_path, sample, check)

    def test_replay_after_a_power_cut(self, sample: SampleLog, tmp_path: Path) -> None:
        """Only the files' content of when ``flush`` returned is left; the returned position must be true of it."""
        expected = self._straight(tmp_path / "straight", sample)

        def check(root: Path, data: st.DataObject) -> None:
            flushed = data.draw(st.integers(0, len(sample.offsets) - 1), "flushed before record")
            life = self._life(root / "a", sample).open().feed(sample.offsets[flushed])
            durable = life.flush(thorough=data.draw(st.booleans(), "thorough flush"))
            reached = life.position
            after = life.copy(root / "b")
            life.leave()
            after.open(durable)
            assert after.position <= reached, "open() resumes behind what was ever dispatched"
            after.feed(sample.end, data.draw(_cuts(sample), "then batches end before records"))
            assert after.close() == expected

        self._explore(tmp_path, sample, check)

    def test_replay_from_the_beginning(self, sample: SampleLog, tmp_path: Path) -> None:
        """The host's note of the position is lost: all records are offered again, once after a kill, once after a close."""
        expected = self._straight(tmp_path / "straight", sample)
        life = self._life(tmp_path / "a", sample).open().feed(sample.end)
        killed = life.copy(tmp_path / "b")
        assert life.close() == expected
        assert killed.open(0).feed(sample.end, range(0, len(sample.offsets), 7)).close() == expected
        closed = self._life(tmp_path / "a", sample)
        assert closed.open(0).feed(sample.end, range(0, len(sample.offsets), 5)).close() == expected

    def test_close_and_reopen(self, sample: SampleLog, tmp_path: Path) -> None:
        """Many short lives give the same result as a long one."""
        root = tmp_path / "store"
        durable = 0
        for number in (*range(20, len(sample.offsets), 20), None):
            end = sample.end if number is None else sample.offsets[number]
            life = self._life(root, sample).open(durable, clean=True, restarted=bool(number and number % 40))
            found = life.feed(end).close()
            durable = life.durable
        assert found == self._straight(tmp_path / "straight", sample)

    # ------------------------------------------------------------ directly: going back, going away

    def test_truncate(self, sample: SampleLog, tmp_path: Path) -> None:
        """``truncate`` works at every offset or raises NotImplementedError without a change; with ``can_undo`` it works."""
        expected = self._straight(tmp_path / "straight", sample)
        spec, _, _ = self.loaded()
        targets = (0, sample.offsets[1], sample.offsets[70], sample.offsets[-1], sample.end)
        for number, target in enumerate(targets):
            life = self._life(tmp_path / f"{number}", sample).open().feed(sample.end)
            life.flush()
            try:
                life.dispatcher.truncate(target)
            except NotImplementedError:
                assert not spec.can_undo, "a dispatcher with can_undo must be able to truncate"
            else:
                life.position, life.durable = target, 0
                cut = life.copy(tmp_path / f"{number}-cut")
                assert cut.open(target, restarted=True).position <= target, "open() resumes behind the truncation"
                if cut.position == target:
                    straight = self._straight(tmp_path / f"{number}-straight", sample, target)
                    assert cut.close() == straight, f"truncate({target}) leaves something else than a run up to there"
                else:
                    cut.leave()
                life.feed(sample.end, range(0, len(sample.offsets), 9))
            assert life.close() == expected, f"after truncate({target})"

    def test_expire(self, sample: SampleLog, tmp_path: Path) -> None:
        """The log loses its oldest segments: whether before or after a record came makes no difference."""
        bases = range(sample.segment_bytes, sample.end - sample.segment_bytes, sample.segment_bytes)
        assert len(bases) > 2
        late = self._life(tmp_path / "late", sample).open().feed(sample.end)
        for _ in range(3):
            late.dispatcher.expire(bases[1])
        expected = late.close()
        early = self._life(tmp_path / "early", sample).open().feed(bases[1])
        early.dispatcher.expire(bases[0])
        durable = early.flush(thorough=True)
        reopened = early.copy(tmp_path / "reopened")
        early.leave()
        reopened.open(durable, restarted=True).feed(sample.end)
        reopened.dispatcher.expire(bases[1])
        assert reopened.close() == expected

    def test_forget(self, sample: SampleLog, tmp_path: Path) -> None:
        """A deleted topic leaves the content, and does not come back when its records are replayed."""
        if not hasattr(self._life(tmp_path / "look", sample).open().dispatcher, "forget"):
            pytest.skip("it has no forget(topic): it keeps its content of deleted topics")
        kept = self._straight(tmp_path / "straight", sample)
        without: set[str] = set()
        forgotten: set[str] = set()
        for topic in TOPICS:
            root = tmp_path / topic
            if self._life(root / "without", sample).open().feed(sample.end, without=topic).close() != kept:
                without.add(topic)
            life = self._life(root / "a", sample).open().feed(sample.end)
            forget: Callable[[str], None] = life.dispatcher.forget  # type: ignore[attr-defined]
            forget(topic)
            forget("there-was-never-such-a-topic")
            killed = life.copy(root / "b")
            expected = life.close()
            if expected != kept:
                forgotten.add(topic)
            killed.open(0, restarted=True, deleted={topic: sample.end})
            assert killed.feed(sample.end, range(0, len(sample.offsets), 7)).close() == expected
        if self.keeps_deleted_topics:
            assert not forgotten, "keeps_deleted_topics is set, and forget() changes the content"
        else:
            assert without <= forgotten, f"forget() leaves the content of {sorted(without - forgotten)}"

    # ------------------------------------------------------------ directly: poison

    def test_a_record_that_cannot_be_read(self, sample: SampleLog, tmp_path: Path) -> None:
        """It may raise on the record, and after a skip all others are there; or it does not read it, and goes on."""
        number = 75
        life = self._life(tmp_path / "a", sample).open().feed(sample.offsets[50])
        durable = life.flush()
        life.log.unreadable = sample.offsets[number]
        self._die_and_skip(life, tmp_path, sample, number, durable, must_raise=False)

    def test_poison(self, tmp_path: Path) -> None:
        """It raises on the message of ``poison``, in any batch; after a skip all others are there, once."""
        if self.poison is None:
            pytest.skip("no message is known that it refuses")
        record = _poison_record(self.poison)
        sample = write_sample_log(tmp_path / "sample" / "commitlog", record)
        number = len(sample.offsets) // 2
        for name, first in (("alone", number), ("among others", 20)):
            folder = tmp_path / name
            life = self._life(folder / "a", sample).open().feed(sample.offsets[first])
            self._die_and_skip(life, folder, sample, number, life.flush(), must_raise=True)

    def _die_and_skip(
        self, life: Life, folder: Path, sample: SampleLog, number: int, durable: int, *, must_raise: bool
    ) -> None:
        skip = sample.bounds(number)
        try:
            life.feed(sample.end, (number, number + 1) if must_raise and folder.name == "alone" else ())
        except Exception:
            after = life.copy(folder / "b")
            life.leave()
            after.open(durable, restarted=True)
            assert after.position <= skip[0], "open() resumes behind the record that it died of"
            found = after.feed(sample.end, range(0, len(sample.offsets), 3), skip=skip).close()
            assert found == self._straight(folder / "straight", sample, skip=skip)
        else:
            assert not must_raise, f"dispatch() takes the message that it should refuse: {self.poison}"
            life.log.unreadable = -1
            assert life.close() == self._straight(folder / "straight", sample)

    def test_its_files_are_in_its_own_folder(self, sample: SampleLog, tmp_path: Path) -> None:
        if self.plugin in plugins.BUILT_IN:
            pytest.skip("it builds files that belong to the store")
        life = self._life(tmp_path / "store", sample)
        life.open().feed(sample.end).close()
        own = life.view.folder
        files = [path for path in life.layout.root.rglob("*") if path.is_file() and not path.is_relative_to(own)]
        assert files == [], "files outside of view.folder may meet those of others"

    # ------------------------------------------------------------ in a node

    def _node(self, factory: Callable[..., CommitMQNode]) -> CommitMQNode:
        """A node with the plugin in it, installed or not."""
        if not self.in_node:
            pytest.skip("in_node is False")
        modules = () if self.plugin in plugins.BUILT_IN else (self.plugin,)
        return factory(settings=self.settings, plugins=modules)

    def test_in_a_node(self, commitmq_node_factory: Callable[..., CommitMQNode], tmp_path: Path) -> None:
        """It is killed, slowed down, its node killed, all under load: in the end its files are a straight run's."""
        node, role = self._node(commitmq_node_factory), f"dispatcher-{self.name}"
        node.send_many("load", _messages(0))
        node.wait_until_dispatched(self.name)
        node.send_many("load", _messages(1))
        node.kill(role)
        node.send_many("load", _messages(2))
        node.wait_until_dispatched(self.name)
        with node.paused(role):
            for number in range(3, 7):
                node.send_many(f"load-{number % 2}", _messages(number))
            assert node.dispatcher(self.name)["lag_bytes"] or self.plugin in plugins.BUILT_IN
        node.wait_until_dispatched(self.name)
        node.send_many("load", _messages(7))
        node.crash()
        node.restart()
        node.send_many("load", _messages(8))
        node.wait_until_dispatched(self.name)
        node.stop()
        self._compare_with_straight_run(node, tmp_path)

    def test_poison_in_a_node(self, commitmq_node_factory: Callable[..., CommitMQNode], tmp_path: Path) -> None:
        """It is parked at the message of ``poison`` while everything else continues, and takes the rest after a skip."""
        if self.poison is None:
            pytest.skip("no message is known that it refuses")
        node = self._node(commitmq_node_factory)
        node.send_many("load", _messages(0))
        node.wait_until_dispatched(self.name)
        bad = node.send("load", Message(self.poison.get("body", b"x"), **_but_body(self.poison)))
        node.send_many("load", _messages(1))
        parked = node.wait_until_parked(self.name)["parked"]
        assert parked["physical_offset"] == bad.physical_offset
        node.wait_until_dispatched("consume_queue")
        skipped = node.skip(self.name)
        node.wait_until_dispatched(self.name)
        node.crash()
        node.restart()
        node.wait_until_dispatched(self.name)
        node.stop()
        end = bad.physical_offset + int(skipped["size"])
        self._compare_with_straight_run(node, tmp_path, skip=(bad.physical_offset, end))

    def _compare_with_straight_run(self, node: CommitMQNode, folder: Path, skip: tuple[int, int] = (0, 0)) -> None:
        config = load(None, node.settings)
        log = CommitLog(node.store / "commitlog", config.commit_log.segment_bytes)
        spans = list(log.iter_spans())
        log.close()
        sample = SampleLog(
            node.store / "commitlog", tuple(at for at, _ in spans), sum(spans[-1]), config.commit_log.segment_bytes
        )
        straight = self._life(folder / "straight-run", sample)
        expected = straight.open().feed(sample.end, skip=skip).close()
        view = straight.view
        own = DispatcherView(
            StoreLayout(node.store), view.config, view.log, view.commit_log, 0, view.topics_deleted, view.announce,
            settings=view.settings, name=view.name,
        )  # fmt: skip
        assert self.snapshot(own) == expected


def _cuts(sample: SampleLog) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(sample.offsets) - 1), max_size=12)


def _messages(stage: int) -> list[Message]:
    tags = ("drink", None, "grün", "标签", "🚀", "Aa", "BB")
    return [
        Message(
            b"%d" % number * (number % 50 + 1),
            tags=tags[number % len(tags)],
            keys=f"{stage}-{number}" if number % 2 else None,
        )
        for number in range(_LOAD)
    ]


def _poison_record(poison: Mapping[str, Any]) -> Record:
    properties = build_properties(
        poison.get("tags"), poison.get("keys"), poison.get("properties"), poison.get("sharding_key")
    )
    return Record("orders", body=poison.get("body", b"x"), properties=properties)


def _but_body(poison: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in poison.items() if name != "body"}
