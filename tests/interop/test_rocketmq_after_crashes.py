"""Goal: "a store written here opens there, including after a crash": RocketMQ's own classes and our recovery find the same
messages in the stores that a crash left.

Each crash gives two stores. One is as the crash left it,
and RocketMQ recovers it by its own rules: it must have every message that was acknowledged for good. The other went through
our recovery first: then both must agree on every message of every queue (place, bytes, properties), on the bounds of every
queue, on the tags code of every unit, extension units included, and on what is found by key.

Method: a node whose disk is recorded lives under load (tests/crash/power_load: plain queues with extension units, inner
batches, light message queues, keys), with processes killed all the time. From the record come stores as SIGKILL of every
process left them (the page cache is whole), and as power cuts left them (any subset of what was not synced).
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "crash"))

from power_check import Recovered, check, config_of, light_places
from power_disk import Disk
from power_images import Images
from power_load import SETTINGS, Run, digest, record_run
from test_semantics_model import live
from traffic import seed, tags_code

from commitmq.format.client_batch import decode_client_batch
from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES, SysFlag
from commitmq.format.index import IndexShape
from commitmq.format.record import Record
from commitmq.format.units import UNIT
from commitmq.store.index.index_reader import IndexReader, KeyKind, KeyQuery
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import HEAD_BYTES, MAX_ADDRESS, address_of
from commitmq.store.queues.queue_files import list_queues
from nodes import SEGMENT_BYTES
from rebooted import after_a_reboot

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

# RocketMQ looks for holes in the last three files of a queue only, and refuses a store in which a file that is not the last
# one never got its size. So no queue may roll twice between two syncs; with real sizes none can.
SIZES: dict[str, Any] = {
    "consume_queue.file_bytes": 4_000,
    "consume_queue.ext_file_bytes": 20_000,
    "consume_queue.batch_file_bytes": 46 * 200,
}
ROCKETMQ = {
    "mappedFileSizeCommitLog": SETTINGS["commit_log.segment_bytes"],
    "mappedFileSizeConsumeQueue": SIZES["consume_queue.file_bytes"],
    "enableConsumeQueueExt": "true",
    "mappedFileSizeConsumeQueueExt": SIZES["consume_queue.ext_file_bytes"],
    "mapperFileSizeBatchConsumeQueue": SIZES["consume_queue.batch_file_bytes"],
    "enableLmq": "true",
    "enableMultiDispatch": "true",
    "maxHashSlotNum": SETTINGS["index.hash_slots"],
    "maxIndexNum": SETTINGS["index.max_items"],
    # RocketMQ 5.4.0 goes back ten segments at most, which of these small ones is less than the seconds since its checkpoint.
    "commitLogRecoverMaxNum": 10_000,
}
LIVED: dict[str, Any] = {
    "commit_log.segment_bytes": SEGMENT_BYTES,
    "index.hash_slots": 1_000,
    "index.max_items": 20_000,
    "retention.hours": 8_760,
}
ROCKETMQ_LIVED = {
    "mappedFileSizeCommitLog": LIVED["commit_log.segment_bytes"],
    "maxHashSlotNum": LIVED["index.hash_slots"],
    "maxIndexNum": LIVED["index.max_items"],
    "commitLogRecoverMaxNum": 10_000,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "timerWheelEnable": "true",
}
DELAYED = "SCHEDULE_TOPIC_XXXX"
Line = dict[str, Any]
Key = tuple[str, int]
Judge = Callable[..., dict[Path, Any]]


def has_a_torn_place(root: Path) -> bool:
    """Whether a unit of a ConsumeQueue lost the sector with its place and kept the one with its size.

    RocketMQ takes every unit with a place of at least 0 and a size above 0 for a good one. So it believes such a unit, which
    leads to the log's first record. Our recovery asks the record. With files of 4,000 bytes only unit 102 of a file can be so.
    """
    for path in (root / "consumequeue").glob("*/*/*"):
        units = np.frombuffer(path.read_bytes()[: path.stat().st_size // UNIT_BYTES * UNIT_BYTES], UNIT)
        lost = (units["physical_offset"] == 0) & (units["size"] > 0) & (units["size"] != PREBLANK_SIZE)
        if lost[0 if int(path.name) else 1 :].any():
            return True
    return False


def has_a_lost_extension(root: Path) -> bool:
    """Whether a queue kept units whose extension units are lost, at places where RocketMQ's new ones do not begin.

    RocketMQ dispatches those messages again: it appends an extension unit for each, of 20 bytes without a bit map, and
    keeps the ConsumeQueue's unit with the old address. Between two of the new units it reads any bytes, or fails. Our recovery
    writes both anew. We sync the extension first, but a power cut leaves any subset of what was not synced.
    """
    for folder in (root / "consumequeue_ext").glob("*/*"):
        end = 0
        for path in sorted(folder.iterdir()):
            content, at = path.read_bytes(), 0
            while (size := int.from_bytes(content[at : at + 2], "big", signed=True)) >= HEAD_BYTES:
                at += size
            end = int(path.name) + (len(content) if size == -1 else at)
        for path in (root / "consumequeue" / folder.relative_to(root / "consumequeue_ext")).glob("*"):
            units = np.frombuffer(path.read_bytes()[: path.stat().st_size // UNIT_BYTES * UNIT_BYTES], UNIT)
            codes = units["tags_code"][(units["physical_offset"] >= 0) & (units["size"] > 0)].astype(np.int64)
            beyond = (codes[codes <= MAX_ADDRESS] & np.iinfo(np.int64).max) - end  # without the sign of an address
            if ((beyond > 0) & (beyond % HEAD_BYTES != 0)).any():
                return True
    return False


class Judged:
    """A store that our recovery went through, and what we say of it. It is RocketMQ's to write to."""

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        self.name, self.recovered = root.name, root
        self.queries = root.with_name(f"{root.name}.queries")
        self._store = Recovered(root, config_of(settings))
        self.records = self._store.records()
        shutil.rmtree(root / "run", ignore_errors=True)
        self.keys = self._some_keys()
        self.queries.write_text("".join(f"{topic}\t{key}\n" for topic, key in self.keys), encoding="utf-8")

    def _some_keys(self) -> list[tuple[str, str]]:
        found: dict[tuple[str, str], None] = {}
        for number, record in enumerate(self.records):
            if not record.sys_flag & SysFlag.INNER_BATCH:
                if "KEYS" in record.properties:
                    found[record.topic, record.properties["KEYS"]] = None
                if number % 11 == 0 and "UNIQ_KEY" in record.properties:  # operations of transactions have none
                    found[record.topic, record.properties["UNIQ_KEY"]] = None
        return list(found)

    # ------------------------------------------------------------ what we say

    def our_messages(self) -> dict[Key, list[Line]]:
        """By queue, in its order: the fields of each message. Light message queues tell their place and the record's."""
        found: dict[Key, list[Line]] = {}
        for record in self.records:
            queue = found.setdefault((record.topic, record.queue_id), [])
            if record.sys_flag & SysFlag.INNER_BATCH:
                queue += [
                    {
                        "queue_offset": record.queue_offset + number,
                        "physical_offset": record.physical_offset,
                        "properties": one.decoded_properties(),
                        "body_hex": one.body.hex(),
                    }
                    for number, one in enumerate(decode_client_batch(record.body))
                ]
            else:
                queue.append(record.to_json())
            for name, offset in light_places(record):
                found.setdefault((name, 0), []).append(
                    {"lmq_offset": offset, "physical_offset": record.physical_offset}
                )
        return found

    def our_bounds(self) -> dict[Key, tuple[int, int]]:
        found = {}
        layout, settings = self._store.layout, self._store.config.consume_queue
        for topic, queue_id, folder in list_queues(layout.consume_queue):
            queue = ConsumeQueue(folder, settings.file_bytes)
            queue.refresh()
            found[topic, queue_id] = (queue.min_offset, queue.max_offset)
        for topic, queue_id, folder in list_queues(layout.batch_consume_queue):
            batches = BatchConsumeQueue(folder, settings.batch_file_bytes)
            batches.refresh()
            found[topic, queue_id] = (0, batches.max_offset)
        return found

    def our_answers(self) -> dict[tuple[str, str], list[int]]:
        layout, config = self._store.layout, self._store.config
        log = CommitLog(layout.commit_log, config.commit_log.segment_bytes)
        reader = IndexReader(log, layout.index, IndexShape(config.index.hash_slots, config.index.max_items))
        found = {}
        for topic, key in self.keys:
            # As a consumer of RocketMQ's asks: by any of the keys, the unique one too.
            both = [
                reader.search(KeyQuery(topic, key, kind), bound=self._store.end, max_messages=10_000).offsets
                for kind in (KeyKind.KEY, KeyKind.UNIQUE)
            ]
            found[topic, key] = sorted({*both[0], *both[1]})
        reader.close()
        log.close()
        return found


class Crashed(Judged):
    """One crash: ``left`` is what it left, ``recovered`` the same after our recovery."""

    def __init__(self, folder: Path, images: Images, disk: Disk, moment: int, chance: random.Random | None) -> None:
        """The crash after event ``moment``: a power cut when there is ``chance`` to choose what is left, else a kill."""
        self.left, recovered = folder.with_name(f"{folder.name}-left"), folder.with_name(f"{folder.name}-recovered")
        if chance is None:
            disk.write_cached(self.left)
        else:
            disk.write_image(self.left, chance)
            after_a_reboot(StoreLayout(self.left))
        self.misleads_rocketmq = has_a_torn_place(self.left) or has_a_lost_extension(self.left)
        shutil.copytree(self.left, recovered)
        self._run, self._power = images.run, chance is not None
        super().__init__(recovered, self._run.settings)
        events = images.record.events
        self._before = int(events[moment if self._power else moment - 1]["t"])
        if self._power:
            check(self._store, self._run.said, self._before)
        else:
            images.check_killed(self._store, moment)
        shutil.rmtree(self.left / "run", ignore_errors=True)

    # ------------------------------------------------------------ what was promised

    def check_promises(self, lines: list[Line]) -> int:
        """Everything that was acknowledged for good is in ``lines``; returns how many messages that are."""
        found = {
            (line["topic"], line["queue_id"], line["queue_offset"]): (
                line["physical_offset"],
                digest(bytes.fromhex(line["body_hex"])),
            )
            for line in lines
            if "body_hex" in line
        }
        promised = 0
        for time, ack, name, topic, queue_id, offset, physical in self._run.said.acked:
            if time < self._before and (ack == "flushed" or not self._power):
                promised += 1
                assert found.get((topic, queue_id, offset)) == (physical, name), (
                    f"{self.name}: {topic}/{queue_id}@{offset}"
                )
        return promised


def by_queue(lines: list[Line]) -> dict[Key, list[Line]]:
    """RocketMQ's lines of messages, as :meth:`Crashed.our_messages` has them."""
    found: dict[Key, list[Line]] = {}
    for line in lines:
        if "lmq" in line:
            told = {"lmq_offset": line["lmq_offset"], "physical_offset": line["message"]["physical_offset"]}
            found.setdefault((line["lmq"], 0), []).append(told)
        elif "body_hex" in line:
            properties = {name: value for name, value in line["properties"].items() if name != "__CRC32#"}
            found.setdefault((line["topic"], line["queue_id"]), []).append({**line, "properties": properties})
    return found


def agree(crash: Judged, run: Any) -> int:
    """RocketMQ's ``run`` on the recovered store says what we say; returns how many messages were compared."""
    ours, theirs = crash.our_messages(), by_queue(run.lines)
    assert ours.keys() == theirs.keys(), f"{crash.name}: {ours.keys() ^ theirs.keys()}"
    for key, expected in ours.items():
        told = theirs[key]
        # Of a message in a batch we know what the batch says of it; WAIT is what RocketMQ's consumers add.
        same = [{name: line[name] for name in known} for known, line in zip(expected, told, strict=True)]
        for line in same:
            if "total_size" not in line and "properties" in line:
                line["properties"].pop("WAIT", None)
        assert same == expected, f"{crash.name}: {key}"
    bounds = {key: (low, high) for key, (low, high, _) in run.queues.items() if high}
    assert bounds == {key: one for key, one in crash.our_bounds().items() if one[1]}, f"{crash.name}: {bounds}"
    records = {record.physical_offset: record for record in crash.records}
    units = [line for line in run.lines if "tags_code" in line]
    assert len(units) == sum(high - low for low, high in bounds.values())
    for line in units:
        record: Record = records[line["physical_offset"]]
        if record.topic != DELAYED:  # of which the third field of a unit is the due time
            assert line["tags_code"] == tags_code(record), f"{crash.name}: {line}"
    # RocketMQ indexes the record at which its own recovery began to build the index anew a second time (spec 4.2).
    answers = {
        (line["topic"], line["key"]): sorted(set(line["physical_offsets"]))
        for line in run.lines
        if "physical_offsets" in line
    }
    known = crash.our_answers()
    differing = {
        key: (answers.get(key), known.get(key)) for key in {*answers, *known} if answers.get(key) != known.get(key)
    }
    assert not differing, f"{crash.name}: {differing}"
    return sum(map(len, ours.values()))


def crashes_of(run: Run, folder: Path, kills: int, cuts: int, number: int) -> list[Crashed]:
    """``kills`` moments at which every process died, and ``cuts`` at which the power went, of a recorded life."""
    images = Images(run, folder)
    chance = random.Random(number)
    looks = images.looks()
    # Late ones have more in them. A record is played forward once, so moments ascend; each has a folder, so none comes twice.
    events = len(images.record.events)
    late = sorted(set(looks[len(looks) // 3 :]))
    moments = sorted(
        [(moment, False) for moment in chance.sample(late, kills)]
        + [(moment, True) for moment in chance.sample(range(events // 3, events), cuts)]
    )
    found = []
    for (moment, power), (_, disk) in zip(moments, images.record.disks([at for at, _ in moments]), strict=True):
        name = folder / f"{'cut' if power else 'kill'}-{moment}"
        found.append(Crashed(name, images, disk, moment, chance if power else None))
    return found


def judge(crashes: list[Crashed], on_each: Judge) -> tuple[int, int]:
    """Both stores of each crash in RocketMQ; returns how many messages were compared, and how many promises held."""
    misled = sum(crash.misleads_rocketmq for crash in crashes)
    # Of three stores two were, once: only a larger number of them tells how rare it is.
    assert misled <= (len(crashes) // 4 if len(crashes) > 8 else len(crashes) - 1), "such a loss is rare"
    judged = {
        crash.name: [crash.recovered] if crash.misleads_rocketmq else [crash.left, crash.recovered] for crash in crashes
    }
    verbs = {root: ("judge", str(crash.queries)) for crash in crashes for root in judged[crash.name]}
    runs = on_each(verbs, settings=ROCKETMQ)
    compared = promised = 0
    for crash in crashes:
        for root in judged[crash.name]:
            assert "failed" not in runs[root].report, f"{root.name}: {runs[root].report['failed']}"
        compared += agree(crash, runs[crash.recovered])
        crash.check_promises(runs[crash.recovered].lines)
        if not crash.misleads_rocketmq:
            promised += crash.check_promises(runs[crash.left].lines)
    return compared, promised


@pytest.mark.slow
def test_rocketmq_opens_what_crashes_left(tmp_path: Path, run_rocketmq_on_each: Judge) -> None:
    number = seed()
    run = record_run(tmp_path / "life", number, deletes=False, short=True, **SIZES)
    compared, promised = judge(crashes_of(run, tmp_path, 1, 2, number), run_rocketmq_on_each)
    assert compared > 200
    assert promised > 100


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({}, marks=pytest.mark.long, id="default"),
        pytest.param({"commit_log.flush_mode": "async"}, marks=pytest.mark.long, id="async"),
        pytest.param(
            {"commit_log.append_properties_crc": False, "consume_queue.enable_ext": False},
            marks=pytest.mark.long,
            id="plain",
        ),
        pytest.param(
            {"commit_log.preallocate_segments": 1, "consume_queue.flush_least_pages": 0},
            marks=pytest.mark.long,
            id="eager",
        ),
    ],
)
def test_rocketmq_opens_what_many_crashes_left(
    mode: dict[str, Any], tmp_path: Path, run_rocketmq_on_each: Judge
) -> None:
    number = seed()
    run = record_run(tmp_path / "life", number, deletes=False, **SIZES, **mode)
    compared, promised = judge(crashes_of(run, tmp_path, 8, 24, number), run_rocketmq_on_each)
    print(f"crashes=32 messages_compared={compared} promises={promised}")  # noqa: T201
    assert promised > 5_000


@pytest.mark.long
@pytest.mark.parametrize("number", range(200, 210))
def test_rocketmq_opens_what_a_hard_life_left(number: int, tmp_path: Path, run_rocketmq_on_each: Judge) -> None:
    """Every semantic at once, deaths, full disks, wrong clocks and power cuts; see tests/crash/test_semantics_model.py."""
    lived = Judged(live(tmp_path, number), LIVED)
    runs = run_rocketmq_on_each({lived.recovered: ("judge", str(lived.queries))}, settings=ROCKETMQ_LIVED)
    run = runs[lived.recovered]
    assert "failed" not in run.report, run.report["failed"]
    assert agree(lived, run) > 200


@pytest.mark.parametrize(("sector", "expected"), [(3, True), (2, False)])
def test_a_torn_place_is_seen(sector: int, expected: bool, tmp_path: Path) -> None:
    units = np.zeros(200, UNIT)
    units["physical_offset"][:103] = 1 + np.arange(103)
    units["size"][:103] = 100
    content = bytearray(units.tobytes())
    content[sector * 512 : sector * 512 + 512] = bytes(512)
    folder = tmp_path / "consumequeue" / "t" / "0"
    folder.mkdir(parents=True)
    (folder / f"{0:020d}").write_bytes(content)
    assert has_a_torn_place(tmp_path) is expected


@pytest.mark.parametrize(("kept", "expected"), [(3, False), (2, False), (1, True), (0, True)])
def test_a_lost_extension_is_seen(kept: int, expected: bool, tmp_path: Path) -> None:
    """Units of 34, 34 and 20 bytes; the ConsumeQueue has all their addresses."""
    sizes = [34, 34, 20]
    addresses = [address_of(sum(sizes[:number])) for number in range(3)]
    units = np.zeros(3, UNIT)
    units["physical_offset"], units["size"], units["tags_code"] = [100, 200, 300], 100, addresses
    content = b"".join(size.to_bytes(2, "big") + bytes(size - 2) for size in sizes[:kept]).ljust(200, b"\0")
    for folder, data in (("consumequeue", units.tobytes()), ("consumequeue_ext", content)):
        path = tmp_path / folder / "t" / "0" / f"{0:020d}"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    assert has_a_lost_extension(tmp_path) is expected
