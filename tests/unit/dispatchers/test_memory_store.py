"""Goal: memory topics keep what they say within their budget, evict in the promised order, and survive their process.

Method: the store itself on a temporary folder of the memory file system, read through the reader's own classes. What is
in memory is asked of the kernel (allocated blocks), not of the store. A process's death is an exception out of a
failpoint: the object is left as it is, and another one takes the folder over.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.errors import DiskFullError, OffsetOutOfRangeError, StoreError
from commitmq.format.constants import Host
from commitmq.format.java import java_string_hash
from commitmq.format.message_id import pack_host
from commitmq.format.record import Record, decode_record, encode_record
from commitmq.log import get_log
from commitmq.plugin.hookspecs import TopicStoreView
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.log.run_check import MessageIllegalError
from commitmq.store.memory_files import UNIT_FILE_BYTES, MemoryTopics
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import PullStatus
from commitmq.store.shared_memory import check_private
from commitmq_dispatchers.memory import MemoryStore

SEGMENT = 64 * 1024
BUDGET = 16 * SEGMENT
BORN = pack_host(Host("127.0.0.1", 0))
MADE = 1  # incarnation of the topics here


class Died(BaseException):
    """What a failpoint raises instead of killing the test."""


class Memory:
    """A store, and a reader of what it keeps."""

    def __init__(self, folder: Path, *, budget: int = BUDGET, life: str = "life") -> None:
        self.view = TopicStoreView(
            folder=folder,
            store=folder,
            life=life,
            budget_bytes=budget,
            segment_bytes=SEGMENT,
            store_host=pack_host(Host("10.0.0.1", 10911)),
            config=NodeConfig(),
            log=get_log("test"),
        )
        self.store = MemoryStore()
        self.store.open(self.view)
        self.reader = MemoryTopics(folder)
        self.checker = CommitLogAppender(
            0,
            segment_bytes=SEGMENT,
            open_segment=lambda _base: None,
            store_host=self.view.store_host,
            max_message_bytes=4 * 1024 * 1024,
            properties_crc=True,
        )

    def restarted(self, *, life: str = "life") -> Memory:
        """As the next process finds it; this object must not be used any more."""
        return Memory(self.view.folder, budget=self.view.budget_bytes, life=life)

    def run(self, topic: str, bodies: list[bytes], queue: int = 0, tag: str | None = None) -> tuple[int, list[int]]:
        """Store a run; its first queue offset, and the physical offset of each part."""
        data = b"".join(record(topic, queue, body, tag) for body in bodies)
        run = self.checker.check_run(data, topic.encode(), queue, born_v6=False)
        stored = self.store.append_run(topic, MADE, queue, run, BORN)
        return stored.queue_offset, [part.physical_offset for part in stored.appended.parts]

    def one(self, topic: str, body: bytes, queue: int = 0, tag: str | None = None) -> int:
        properties = b"" if tag is None else f"TAGS\x01{tag}\x02".encode()
        encoded = self.checker.encode(
            topic.encode(), queue, body, properties, sys_flag=0, flag=0, born_timestamp=1, born_host=BORN
        )
        return self.store.append_record(topic, MADE, queue, encoded, len(BORN)).queue_offset

    def bounds(self, topic: str, queue: int = 0) -> tuple[int, int] | None:
        found = self.reader.get(topic, MADE)
        return None if found is None else found.queues.bounds(topic, queue, bound=found.bound, floor=found.floor)

    def read(self, topic: str, queue: int = 0) -> list[Record]:
        """Everything that a consumer of the queue can read, checked against its place."""
        found = self.reader.get(topic, MADE)
        if found is None:
            return []
        low, high = self.bounds(topic, queue) or (0, 0)
        records: list[Record] = []
        at = low
        while at < high:
            result = found.queues.read(
                topic, queue, at, bound=found.bound, floor=found.floor, max_messages=1000, max_bytes=1 << 20
            )
            assert result.status is PullStatus.FOUND
            for frame in found.queues.frames(result.units):
                position = 0
                while position < len(frame):
                    records.append(decode_record(bytes(frame), position))
                    position += records[-1].total_size
            codes = [java_string_hash(one.properties.get("TAGS", "")) for one in records[at - low :]]
            assert result.units["tags_code"].tolist() == codes
            at = result.next_offset
        assert [one.queue_offset for one in records] == list(range(low, high))
        return records

    def bodies(self, topic: str, queue: int = 0) -> list[bytes]:
        return [one.body for one in self.read(topic, queue)]

    @property
    def really_used(self) -> int:
        """Allocated bytes of all files under the folder, the small owner file left out."""
        total = 0
        for parent, _, names in os.walk(self.view.folder):
            total += sum(os.stat(os.path.join(parent, name)).st_blocks * 512 for name in names if name != "owner")
        return total


def record(topic: str, queue: int, body: bytes, tag: str | None) -> bytes:
    """One record of a run: zeros where the node fills in, an empty CRC slot at its end."""
    encoded = encode_record(
        Record(
            topic,
            queue_id=queue,
            body=body,
            born_host=Host("0.0.0.0", 0),
            store_host=Host("0.0.0.0", 0),
            properties={} if tag is None else {"TAGS": tag},
        )
    )
    slot = b"__CRC32#\x01" + b"0" * 10 + b"\x02"
    tail = int.from_bytes(encoded[len(encoded) - properties_bytes(tag) - 2 :][:2], "big")
    grown = encoded[: len(encoded) - tail - 2] + (tail + 20).to_bytes(2, "big") + encoded[len(encoded) - tail :] + slot
    return len(grown).to_bytes(4, "big") + grown[4:]


def properties_bytes(tag: str | None) -> int:
    return 0 if tag is None else len(f"TAGS\x01{tag}\x02".encode())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for one store on the memory file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        yield Path(parent) / "memory"


@pytest.fixture
def memory(folder: Path) -> Memory:
    return Memory(folder)


def die_at(monkeypatch: pytest.MonkeyPatch, name: str, hit: int = 1) -> None:
    """Make the ``hit``-th visit of failpoint ``name`` the process's end."""
    left = [hit]

    def visited(point: str) -> None:
        if point == name:
            left[0] -= 1
            if left[0] == 0:
                raise Died(point)

    monkeypatch.setattr(failpoints, "ACTIVE", True)
    monkeypatch.setattr(failpoints, "hit", visited)


# ---------------------------------------------------------------- what is kept


def test_what_was_stored_is_read_in_order_with_its_tags(memory: Memory) -> None:
    assert memory.reader.get("t", MADE) is None
    assert memory.run("t", [b"a", b"b"], tag="A")[0] == 0
    assert memory.one("t", b"c", tag="B") == 2
    assert memory.run("t", [b"x" * 100], queue=3)[0] == 0
    assert memory.one("t", b"d") == 3
    assert memory.bodies("t") == [b"a", b"b", b"c", b"d"]
    assert [one.properties.get("TAGS") for one in memory.read("t")] == ["A", "A", "B", None]
    assert memory.bodies("t", 3) == [b"x" * 100]
    assert memory.reader.get("other", MADE) is None
    assert memory.really_used == memory.store.used_bytes


def test_queues_and_logs_go_on_over_many_files(folder: Path) -> None:
    memory = Memory(folder, budget=1 << 24)
    expected: list[bytes] = []
    for number in range(24):
        bodies = [b"%d/%d" % (number, index) for index in range(523)]
        assert memory.run("t", bodies)[0] == len(expected)
        expected += bodies
    assert len(expected) > 2 * UNIT_FILE_BYTES // 20
    assert memory.bodies("t") == expected
    # A run larger than a segment lies in parts, one after the other.
    first, parts = memory.run("t", [bytes([index]) * 5_000 for index in range(40)])
    assert first == len(expected)
    assert len(parts) >= 3
    assert [body[:1] for body in memory.bodies("t")[first:]] == [bytes([index]) for index in range(40)]
    assert memory.really_used == memory.store.used_bytes


def test_a_record_that_no_segment_holds_is_refused_and_changes_nothing(memory: Memory) -> None:
    memory.run("t", [b"before"])
    for send in (lambda: memory.one("t", bytes(SEGMENT)), lambda: memory.run("t", [b"a", bytes(SEGMENT)])):
        with pytest.raises(MessageIllegalError, match=r"memory\.segment_bytes"):
            send()
    memory.run("t", [b"after"])
    assert memory.bodies("t") == [b"before", b"after"]


def test_offsets_by_time_and_tags_are_answered_as_for_the_log(memory: Memory) -> None:
    memory.run("t", [b"a", b"b", b"c"], tag="A")
    found = memory.reader.get("t", MADE)
    assert found is not None
    stamp = memory.read("t")[0].store_timestamp
    assert found.queues.offset_by_time("t", 0, stamp, bound=found.bound) == 0
    assert found.queues.offset_by_time("t", 0, stamp + 10_000, bound=found.bound) == 3


# ---------------------------------------------------------------- the budget


def test_the_budget_is_held_and_used(memory: Memory) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    sent: dict[tuple[str, int], list[bytes]] = {}
    total = 0
    while total < 5 * BUDGET:
        topic, queue = rng.choice("abc"), rng.randrange(3)
        bodies = [rng.randbytes(rng.choice([10, 100, 1_000, 9_000])) for _ in range(rng.randrange(1, 40))]
        known = sent.setdefault((topic, queue), [])
        assert memory.run(topic, bodies, queue)[0] == len(known), f"seed {seed}"
        known += bodies
        total += sum(map(len, bodies))
        assert memory.really_used == memory.store.used_bytes, f"seed {seed}"
        assert memory.store.used_bytes <= BUDGET, f"seed {seed}"
    assert memory.store.used_bytes >= 0.9 * BUDGET, f"seed {seed}"
    for (topic, queue), bodies in sent.items():
        left = memory.bodies(topic, queue)
        assert left == bodies[len(bodies) - len(left) :], f"seed {seed}"
        low, high = memory.bounds(topic, queue) or (0, 0)
        assert (high, high - low) == (len(bodies), len(left)), f"seed {seed}"


def fill(memory: Memory, topic: str, segments: int) -> None:
    """About ``segments`` segments of messages."""
    for _ in range(segments):
        memory.run(topic, [bytes(900)] * 64)


def test_a_topic_that_takes_much_pays_itself(memory: Memory) -> None:
    fill(memory, "quiet", 3)
    before = memory.bounds("quiet")
    fill(memory, "loud", 60)
    assert memory.bounds("quiet") == before
    assert (memory.bounds("loud") or (0, 0))[0] > 0


def test_without_an_old_segment_of_its_own_the_oldest_of_all_goes(memory: Memory) -> None:
    fill(memory, "first", 2)
    memory.one("second", b"only one")
    fill(memory, "third", 20)
    # "third" holds most now, but a topic that has one segment only cannot pay itself: the oldest of all goes.
    low = (memory.bounds("first") or (0, 0))[0]
    assert low == 0
    for number in range(40):
        memory.one(f"new{number}", b"x")
    assert (memory.bounds("first") or (0, 0))[0] > 0
    assert memory.really_used == memory.store.used_bytes <= BUDGET


def test_a_topic_that_went_quiet_loses_even_its_active_segment_and_goes_on_behind_it(folder: Path) -> None:
    memory = Memory(folder, budget=4 * SEGMENT)
    memory.run("quiet", [b"a", b"b", b"c"])
    memory.run("quiet", [b"z"], queue=1)
    for number in range(8):
        fill(memory, f"t{number}", 1)
    assert memory.bounds("quiet") == (3, 3)
    assert memory.bounds("quiet", 1) == (1, 1)
    found = memory.reader.get("quiet", MADE)
    assert found is not None
    result = found.queues.read("quiet", 0, 1, bound=found.bound, floor=found.floor, max_messages=10, max_bytes=1000)
    assert (result.status, result.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 3)
    assert memory.run("quiet", [b"d"])[0] == 3
    assert memory.one("quiet", b"e", queue=1) == 1
    assert (memory.bodies("quiet"), memory.bodies("quiet", 1)) == ([b"d"], [b"e"])
    assert memory.really_used == memory.store.used_bytes <= 4 * SEGMENT


def test_a_reader_keeps_what_it_holds_and_then_lets_go_of_what_was_evicted(memory: Memory) -> None:
    memory.run("t", [b"first" * 1000])
    found = memory.reader.get("t", MADE)
    assert found is not None
    result = found.queues.read("t", 0, 0, bound=found.bound, max_messages=1, max_bytes=1 << 20)
    held = found.queues.frames(result.units)[0]
    fill(memory, "t", 40)
    assert found.floor > 0
    assert decode_record(bytes(held), 0).body == b"first" * 1000
    with pytest.raises(OffsetOutOfRangeError):
        found.queues.frames(result.units)
    del held
    memory.bodies("t")
    fill(memory, "t", 40)

    def mapped() -> list[str]:
        """Segments of this store that are deleted, and still mapped."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [one for one in lines if str(memory.view.folder) in one and one.endswith("(deleted)") and "/log/" in one]

    assert mapped(), "this test must map a deleted segment, or it shows nothing"
    memory.reader.release_evicted()
    assert not mapped()
    for link in Path("/proc/self/fd").iterdir():
        with_target = os.readlink(link) if link.is_symlink() else ""
        assert not (str(memory.view.folder) in with_target and with_target.endswith("(deleted)")), with_target


def test_a_memory_file_system_that_is_full_evicts_and_then_refuses(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget may be larger than what the system gives; a refused run must leave nothing."""
    fill(memory, "t", 6)
    high = (memory.bounds("t") or (0, 0))[1]
    real = os.posix_fallocate
    room = [memory.store.used_bytes]

    def limited(fd: int, start: int, size: int) -> None:
        if memory.store.used_bytes + size > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    fill(memory, "t", 6)
    assert (memory.bounds("t") or (0, 0))[1] == high + 6 * 64
    assert memory.store.used_bytes <= room[0]
    before = memory.read("t")
    room[0] = 0
    with pytest.raises(DiskFullError):
        memory.run("t", [bytes(30_000)] * 4)
    with pytest.raises(DiskFullError):
        memory.one("new", b"x")
    left = memory.read("t")
    assert left == before[len(before) - len(left) :]
    room[0] = BUDGET
    first, _ = memory.run("t", [b"again"] * 3)
    assert first == high + 6 * 64
    assert memory.bodies("t")[-3:] == [b"again"] * 3
    assert memory.really_used == memory.store.used_bytes


def test_many_topics_fit_a_budget_just_above_what_is_never_evicted(folder: Path) -> None:
    topics, queues = 200, 4
    budget = 4096 * (1 + topics * (1 + 2 * queues)) + 8 * SEGMENT
    memory = Memory(folder, budget=budget)
    sent = 0
    for _ in range(2):
        for number in range(topics):
            for queue in range(queues):
                assert memory.run(f"t{number}", [b"x"] * 300, queue)[0] == sent
            assert memory.store.used_bytes <= budget
        sent += 300
    assert memory.really_used == memory.store.used_bytes <= budget
    memory = memory.restarted()
    assert memory.really_used == memory.store.used_bytes <= budget
    for number in (0, topics - 1):
        for queue in range(queues):
            low, high = memory.bounds(f"t{number}", queue) or (0, 0)
            assert (high, len(memory.read(f"t{number}", queue))) == (sent, high - low)
            assert memory.one(f"t{number}", b"after", queue) == sent
            assert memory.bodies(f"t{number}", queue)[-1] == b"after"
    assert memory.bounds("t0", 0) == (sent, sent + 1), "its older messages went, the last unit stayed"


def test_a_reader_that_comes_late_finds_the_end_behind_a_hole(folder: Path) -> None:
    """One that looked before, one that never did, and one after a restart, at every size of the hole."""
    memory = Memory(folder, budget=12 * SEGMENT)
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    sent = holes = 0
    early = memory.reader
    while sent < 3 * UNIT_FILE_BYTES // 20:
        count = rng.randrange(1, 700)
        memory.run("t", [b"%d" % (sent + index) for index in range(count)])
        sent += count
        if rng.random() < 0.3:
            fill(memory, f"other{rng.randrange(3)}", rng.randrange(1, 12))
        if rng.random() < 0.2:
            memory = memory.restarted()
        assert memory.really_used == memory.store.used_bytes <= 12 * SEGMENT, f"seed {seed}"
        first = sorted((folder / "topics" / "t" / "0").iterdir())[0]
        holes += not any(first.read_bytes()[:4096])
        expected = None
        for reader in (early, memory.reader, MemoryTopics(folder)):
            if reader is early and rng.random() < 0.5:
                continue  # sometimes it has not looked for long
            found = reader.get("t", MADE)
            assert found is not None
            bounds = found.queues.bounds("t", 0, bound=found.bound, floor=found.floor)
            assert bounds is not None
            assert bounds[1] == sent, f"seed {seed}"
            assert expected in (None, bounds), f"seed {seed}"
            expected = bounds
        assert memory.bodies("t") == [b"%d" % number for number in range((expected or (0,))[0], sent)], f"seed {seed}"
    assert holes


@pytest.mark.parametrize("step", ["_pass_hole", "_extend", "_end"])
def test_what_is_evicted_while_a_reader_opens_a_queue_does_not_hide_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    for sent in (2_000, 6_000):  # a hole grows, or the first file goes too
        memory = Memory(folder.with_name(str(sent)), budget=24 * SEGMENT)
        for first in range(0, sent, 100):
            memory.run("t", [b"%d" % number for number in range(first, first + 100)])
        real = getattr(QueueReader, step)
        evicted = [False]

        def evicting(*args: Any, real: Any = real, memory: Memory = memory, evicted: list[bool] = evicted) -> Any:
            if not evicted[0]:
                evicted[0] = True
                for number in range(24):
                    fill(memory, f"other{number}", 1)
            return real(*args)

        found = memory.reader.get("t", MADE)
        assert found is not None
        bound = found.bound
        with monkeypatch.context() as patched:
            patched.setattr(QueueReader, step, evicting)
            seen = found.queues.bounds("t", 0, bound=bound, floor=0)
        assert evicted[0]
        assert seen is not None
        assert seen[1] == sent
        assert memory.bounds("t") == (sent, sent)


def test_a_budget_that_holds_no_more_topics_refuses_with_what_fills_it(folder: Path) -> None:
    """A refused run gives back what it had reserved, and what was stored before can still be added to."""
    memory = Memory(folder, budget=4 * SEGMENT)
    with pytest.raises(DiskFullError, match=r"memory\.budget_bytes do not hold .* never evicted.* queues in use"):
        for number in range(100):
            memory.run(f"t{number}", [b"x"] * 50)
    assert memory.really_used == memory.store.used_bytes <= 4 * SEGMENT
    for _ in range(3):
        used = memory.store.used_bytes
        with pytest.raises(DiskFullError, match="never evicted"):
            memory.run("t1", [b"x"] * 9_000)
        assert memory.really_used == memory.store.used_bytes <= max(used, 4 * SEGMENT)
    for name in [name for name in memory.store.topics() if name != "t1"][:10]:
        memory.store.forget(name)
    assert memory.run("t1", [b"again"])[0] == 50
    memory = memory.restarted()
    assert memory.run("t1", [b"and again"])[0] == 51
    assert memory.bodies("t1")[-2:] == [b"again", b"and again"]
    assert memory.really_used == memory.store.used_bytes <= 4 * SEGMENT


# ---------------------------------------------------------------- topics come and go


def test_a_deleted_topic_frees_its_memory_and_its_namesake_begins_at_0(memory: Memory) -> None:
    empty = memory.store.used_bytes
    memory.run("t", [b"old"] * 10)
    assert memory.bodies("t") == [b"old"] * 10
    memory.store.forget("t")
    memory.store.forget("never was")
    assert memory.store.used_bytes == empty == memory.really_used
    assert memory.reader.get("t", MADE) is None
    assert memory.run("t", [b"new"])[0] == 0
    assert memory.bodies("t") == [b"new"]
    # Deleted and made again while nobody looked: what is stored tells them apart.
    again = memory.checker.check_run(record("t", 0, b"newer", None), b"t", 0, born_v6=False)
    assert memory.store.append_run("t", 2, 0, again, BORN).queue_offset == 0
    assert memory.reader.get("t", MADE) is None
    assert memory.store.topics() == {"t": 2}


def test_the_end_of_the_node_leaves_nothing(memory: Memory, folder: Path) -> None:
    memory.run("t", [b"x"])
    memory.store.close(keep=False)
    assert not folder.exists()


def test_another_life_begins_with_nothing(memory: Memory) -> None:
    memory.run("t", [b"x"])
    assert memory.reader.get("t", MADE) is not None
    other = memory.restarted(life="another")
    assert other.store.topics() == {}
    memory.reader.release_evicted()
    assert memory.reader.get("t", MADE) is None, "a reader of the first life has the topic no more"
    assert other.run("t", [b"y"])[0] == 0
    assert other.bodies("t") == [b"y"]


def test_a_folder_that_others_could_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(StoreError, match="not a folder that only this account can use"):
        Memory(folder)
    with pytest.raises(StoreError):
        check_private(folder)
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(StoreError, match="not a folder that only this account can use"):
        Memory(folder)


# ---------------------------------------------------------------- death of the process


def test_everything_acknowledged_is_taken_over(memory: Memory) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    for _ in range(3):
        for _ in range(60):
            memory.run(
                rng.choice("ab"), [rng.randbytes(rng.choice([20, 2_000]))] * rng.randrange(1, 300), rng.randrange(2)
            )
        before = {(topic, queue): memory.read(topic, queue) for topic in "ab" for queue in range(2)}
        memory = memory.restarted()
        assert {key: memory.read(*key) for key in before} == before, f"seed {seed}"
        assert memory.really_used == memory.store.used_bytes <= BUDGET, f"seed {seed}"


@pytest.mark.parametrize("point", ["memory.after_append", "memory.before_publish", "memory.before_unlink"])
def test_death_between_any_two_steps_keeps_what_was_acknowledged(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """What was under way may not appear, in part or later; queue offsets go on without a gap."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    kept: list[bytes] = []
    for death in range(12):
        die_at(monkeypatch, point, hit=rng.randrange(1, 12))
        with pytest.raises(Died):
            while True:
                bodies = [
                    b"%d " % death + rng.randbytes(rng.choice([5, 800, 6_000])) for _ in range(rng.randrange(1, 60))
                ]
                assert memory.run("t", bodies)[0] == len(kept), f"seed {seed}"
                kept += bodies
        monkeypatch.setattr(failpoints, "ACTIVE", False)
        memory = memory.restarted()
        left = memory.bodies("t")
        low, high = memory.bounds("t") or (0, 0)
        assert high == len(kept), f"seed {seed}"
        assert left == kept[low:], f"seed {seed}"
        assert memory.really_used == memory.store.used_bytes <= BUDGET, f"seed {seed}"


def test_the_order_of_eviction_survives(folder: Path) -> None:
    memory = Memory(folder, budget=8 * SEGMENT)
    for topic in ("zz", "aa", "mm"):
        memory.one(topic, b"x")
        time.sleep(0.003)  # a segment's age is the store time of its first message, in milliseconds
    for topic in ("zz", "aa", "mm"):
        fill(memory, topic, 1)
    memory = memory.restarted()
    fill(memory, "loud", 3)
    fill(memory, "other", 4)
    gone = [topic for topic in ("zz", "aa", "mm") if (memory.bounds(topic) or (0, 0))[0] > 0]
    assert gone == ["zz", "aa", "mm"][: len(gone)]
    assert gone


def test_a_topic_that_cannot_be_read_is_lost_alone(memory: Memory, folder: Path) -> None:
    memory.run("good", [b"x"])
    memory.run("bad", [b"y"])
    (folder / "topics" / "bad" / "head").write_bytes(b"nonsense")
    memory = memory.restarted()
    assert memory.bodies("good") == [b"x"]
    assert list(memory.store.topics()) == ["good"]
    assert memory.run("bad", [b"z"])[0] == 0


def test_other_sizes_after_a_restart_begin_anew(memory: Memory) -> None:
    """The configuration of a node cannot change while it lives; a folder that disagrees is not believed."""
    memory.run("t", [b"x"])
    again = MemoryStore()
    again.open(replace(memory.view, segment_bytes=2 * SEGMENT))
    assert again.topics() == {}


def test_tags_codes_are_those_of_the_walk_of_the_log() -> None:
    from commitmq.kernels.compiled import tags_codes

    records = [record("t", 0, b"body", tag) for tag in (None, "A", "标签🚀", "polygenelubricants")]
    ends = np.cumsum([len(one) for one in records], dtype=np.int64)
    codes = np.full(len(records), -1, np.int64)
    assert tags_codes(np.frombuffer(b"".join(records), np.uint8), ends, codes) == len(records)
    assert codes.tolist() == [0, *(java_string_hash(tag) for tag in ("A", "标签🚀", "polygenelubricants"))]
    # The first bad record ends it, whatever the sizes say.
    damaged = bytearray(b"".join(records))
    damaged[int(ends[1]) + 4] ^= 0xFF
    assert tags_codes(np.frombuffer(damaged, np.uint8), ends, codes) == 2
