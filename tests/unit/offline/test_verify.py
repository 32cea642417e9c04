"""Goal: verify finds every kind of damage, says where it is, and finds nothing in stores that are whole.

Method: RocketMQ's own stores, whole, and then with one thing changed at a time; what is expected is the kind of the
finding, its file and that its extent covers the change. What can be rebuilt is rebuilt, and the store is sound again and,
where RocketMQ wrote it, the same byte for byte.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import Consumer, Producer
from commitmq.config import load
from commitmq.errors import StoreLockedError
from commitmq.format.record import Record
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.verify import Report, StoreFinding, verify
from commitmq.store.access import StoreLock
from commitmq.store.layout import StoreLayout
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from index_store import IndexStore
from nodes import commitmq, eventually, start_node

SETTINGS = ("index.hash_slots=200", "index.max_items=500")


def check(root: Path, settings: tuple[str, ...] = SETTINGS) -> Report:
    with HeldStore(root, load(None, settings)) as store:
        return verify(store)


def damage_of(report: Report) -> list[StoreFinding]:
    return [finding for finding in report.findings if not finding.is_note]


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        assert file.read(len(data)) != data, "this would change nothing"
        file.seek(offset)
        file.write(data)


@pytest.fixture
def clean(golden_copy: Callable[[str], GoldenStore]) -> Path:
    return golden_copy("clean").root


@pytest.mark.parametrize(("name", "records", "items"), [("clean", 410, 1097), ("crash", 412, 1121)])
def test_rocketmqs_own_stores_are_sound(
    golden_copy: Callable[[str], GoldenStore], name: str, records: int, items: int
) -> None:
    report = check(golden_copy(name).root)
    assert report.findings == []
    assert (report.records, report.units, report.index_items) == (records, records, items)


# Positions in the clean store (spec section 17): the first segment has 146 records up to 129665, then a filler.
LOG = "commitlog/00000000000000000000"
QUEUE = "consumequeue/GoldenNormal/0/00000000000000000000"


@pytest.mark.parametrize(
    ("file", "offset", "data", "kind"),
    [
        (LOG, 100, b"\xff\xff", "log.record"),  # inside the first record
        (LOG, 4, b"\x00\x00\x00\x00", "log.record"),  # its magic
        (LOG, 0, b"\x7f\xff\xff\xff", "log.record"),  # its size
        (LOG, 129669, b"\x00\x00\x00\x00", "log.record"),  # the filler's magic
        (LOG, 60_000, bytes(5_000), "log.record"),  # a hole in the middle
        ("commitlog/00000000000000262144", 12_000, b"\xff", "log.record"),  # in the last records
        (QUEUE, 3, b"\x01", "queue.wrong"),
        (QUEUE, 200, bytes(20), "queue.missing"),
        (QUEUE, 219, b"\x55", "queue.wrong"),  # a tags code
        ("consumequeue/GoldenNormal/0/00000000000000001000", 200, b"\1" * 20, "queue.extra"),
        ("index/0", 40 + 800 + 20 * 7, b"\x11", "index.wrong"),  # an item's hash
        ("index/0", 40 + 800 + 20 * 7 + 11, b"\x01", "index.wrong"),  # its offset
        ("index/0", 40 + 800 + 20 * 450 + 16, b"\x00\x00\x01\x01", "index.chain"),
        ("index/1", 36, b"\x00\x00\x01\x00", "index.chain"),  # its count: slots lead behind it
        ("index/2", 36, b"\x00\x00\x00\x20", "index.missing"),
        ("index/1", 32, b"\x00\x00\x00\x01", "index.header"),
        ("checkpoint", None, b"abc", "file.unreadable"),
        ("config/topics.json", None, b'{"topicConfigTable":', "file.unreadable"),
    ],
)
def test_one_change_is_found_and_named(clean: Path, file: str, offset: int | None, data: bytes, kind: str) -> None:
    if file.startswith("index/"):
        file = f"index/{sorted(os.listdir(clean / 'index'))[int(file[-1])]}"
    path = clean / file
    if offset is None:
        path.write_bytes(data)
        for generation in clean.glob(f"{file}.bak"):
            generation.unlink()
    else:
        change(path, offset, data)
    report = check(clean)
    assert not report.is_sound
    found = [one for one in damage_of(report) if one.kind == kind and one.file == file]
    assert found, [(one.kind, one.file, one.detail) for one in report.findings]
    if offset is not None and file.partition("/")[0] != "index":
        assert any(one.offset <= offset < one.offset + max(one.extent, 1) for one in found), found
    if kind == "log.record":
        assert report.records > 300, "what is behind the damage was read as well"


def test_a_missing_and_a_short_segment_are_named(clean: Path) -> None:
    (clean / "commitlog" / "00000000000000131072").rename(clean / "away")
    assert [(one.kind, one.file) for one in damage_of(check(clean)) if one.kind == "log.segment"] == [
        ("log.segment", "commitlog/00000000000000262144")
    ]
    (clean / "away").rename(clean / "commitlog" / "00000000000000131072")
    os.truncate(clean / "commitlog" / "00000000000000131072", 1000)
    assert "log.segment" in {one.kind for one in damage_of(check(clean))}


def flushed(root: Path) -> int:
    sidecar = Sidecar.load(StoreLayout(root).sidecar)
    return 0 if sidecar is None else sidecar.flushed


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store of three segments that a node stopped, and one that it was killed on."""
    made = {}
    sizes = ("commit_log.segment_bytes=65536", "commit_log.max_message_bytes=16384")
    for how in ("stopped", "killed"):
        with start_node(tmp_path_factory.mktemp(how), *sizes, "commit_log.preallocate_segments=0") as node:
            with Producer(node.address) as producer, Consumer("orders", group="g", node=node.address) as consumer:
                producer.send_batch("orders", [b"x" * 1000] * 150, queue=0)
                eventually(lambda: consumer.poll(1), "messages to commit")
                consumer.commit()
            made[how] = node.store
            eventually(lambda: flushed(made[how]) > 131_072, "the sidecar tells what was flushed")  # noqa: B023
            if how == "stopped":
                assert node.stop().returncode == 0
            else:
                node.kill_all()
    return made


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("loss", ["deleted", "zeroed", "all deleted", "all and queues deleted"])
def test_an_end_that_a_start_refuses_is_named(ours: dict[str, Path], tmp_path: Path, how: str, loss: str) -> None:
    store = shutil.copytree(ours[how], tmp_path / "store", ignore=shutil.ignore_patterns("run"))
    assert check(store, ()).is_sound
    segments = sorted((store / "commitlog").iterdir())
    for segment in segments if loss.startswith("all") else segments[2:]:
        segment.unlink() if loss != "zeroed" else segment.write_bytes(bytes(65_536))
    if "queues" in loss:
        shutil.rmtree(store / "consumequeue")
    found = [one for one in damage_of(check(store, ())) if one.kind == "log.end"]
    assert len(found) == 1
    assert ("no CommitLog" if loss == "all deleted" else "a start refuses that") in found[0].detail


@pytest.mark.parametrize("name", ["epoch", "offsets.journal", "topics.journal", "producers", "queue_ends", "position"])
def test_a_small_file_that_cannot_be_read_is_named(ours: dict[str, Path], tmp_path: Path, name: str) -> None:
    store = shutil.copytree(ours["stopped"], tmp_path / "store", ignore=shutil.ignore_patterns("run"))
    (store / "commitmq" / name).write_bytes(b"junk")
    report = check(store, ())
    assert [(one.kind, one.file) for one in report.findings] == [("file.unreadable", f"commitmq/{name}")]
    assert report.is_sound == (name in ("producers", "queue_ends")), "a start makes these anew"


def test_a_queue_file_of_another_size_is_named(clean: Path) -> None:
    os.truncate(clean / QUEUE, 600)
    kinds = {(one.kind, one.file) for one in damage_of(check(clean))}
    assert ("file.unreadable", QUEUE) in kinds
    assert ("queue.missing", QUEUE) in kinds


def test_a_missing_queue_and_a_missing_index_file_are_named(clean: Path) -> None:
    shutil.rmtree(clean / "consumequeue" / "GoldenBatch" / "2")
    (clean / "index" / sorted(os.listdir(clean / "index"))[1]).unlink()
    found = damage_of(check(clean))
    assert {one.kind for one in found} == {"queue.missing", "index.missing"}
    assert any("units 0 to 19 of GoldenBatch queue 2 are not there" in one.detail for one in found)


def test_after_a_crash_a_torn_end_and_a_lagging_queue_are_notes(clean: Path) -> None:
    (clean / "abort").write_bytes(b"1")
    change(clean / "commitlog" / "00000000000000262144", 12_502, b"\x00\x00\x00\x99\xda\xa3\x20\xa7 torn")
    report = check(clean)
    assert report.is_sound
    assert [one.kind for one in report.findings] == ["log.record"]
    assert "torn end" in report.findings[0].detail
    (clean / "abort").unlink()
    assert not check(clean).is_sound


def test_two_pages_that_changed_places_are_found(clean: Path) -> None:
    path = clean / LOG
    data = bytearray(path.read_bytes())
    data[8192:12288], data[32768:36864] = data[32768:36864], data[8192:12288]
    path.write_bytes(data)
    extents = [(one.offset, one.offset + one.extent) for one in damage_of(check(clean)) if one.kind == "log.record"]
    assert any(start < 12288 and end > 8192 for start, end in extents)
    assert any(start < 36864 and end > 32768 for start, end in extents)


@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_of_a_queue_an_index_or_a_body_is_found(
    clean: Path, golden_stores: dict[str, GoldenStore], seed: int
) -> None:
    chance = random.Random(seed)
    kind = chance.choice(["commitlog", "consumequeue", "index"])
    path = chance.choice([one for one in sorted((clean / kind).rglob("*")) if one.is_file()])
    data = bytearray(path.read_bytes())
    # Zeros behind the end mean nothing; neither do header times and seconds of an index (they depend on the clock), and
    # RocketMQ's records have a CRC over their body only.
    last = max(index for index, byte in enumerate(data) if byte)
    at = chance.randrange(840 + 20, last) if kind == "index" else chance.randrange(last + 1)
    if kind == "index" and (at - 840) % 20 in range(12, 16):
        at += 4
    if kind == "commitlog":
        bodies = [
            one
            for one in golden_stores["clean"].messages
            if one["physical_offset"] // 131072 * 131072 == int(path.name)
        ]
        record = chance.choice(bodies)
        at = record["physical_offset"] % 131072 + 88 + chance.randrange(len(record["body_hex"]) // 2)
    data[at] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    assert not check(clean).is_sound, f"seed {seed}: {path} at {at}"


def test_an_index_that_is_switched_off_may_be_behind(clean: Path) -> None:
    """Goal: a store that was used with index.enable=false is not called damaged."""
    newest = sorted((clean / "index").iterdir())[-1]
    newest.unlink()
    assert not check(clean).is_sound
    with HeldStore(clean, load(None, (*SETTINGS, "index.enable=false"))) as store:
        assert verify(store).findings == []


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    """A store with records that name LMQs, and with plain records in a BatchCQ topic, as RocketMQ 5.4.0 accepts them."""
    made = IndexStore(tmp_path)
    (made.root / "config").mkdir()
    table = {"topicConfigTable": {"B": {"topicName": "B", "attributes": {"queue.type": "BatchCQ"}}}}
    (made.root / "config" / "topics.json").write_text(json.dumps(table))
    for number in range(20):
        further = {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b", "INNER_MULTI_QUEUE_OFFSET": f"{number},{number}"}
        made.append(
            [
                Record("T", queue_offset=number, store_timestamp=1_000, properties=further),
                Record("B", queue_offset=number, store_timestamp=1_000),
            ]
        )
    with HeldStore(made.root, load(None, SETTINGS)) as store:
        rebuild(store, ("queues",))
    return made.root


def test_queues_of_every_kind_are_compared(kinds: Path) -> None:
    report = check(kinds)
    assert (report.findings, report.queues, report.units) == ([], 4, 20 * 4)
    for file, offset, data, kind in (
        ("consumequeue/%LMQ%b/0/00000000000000000000", 47, b"\x77", "queue.wrong"),
        ("consumequeue/%LMQ%b/0/00000000000000000000", 380, bytes(20), "queue.missing"),
        ("consumequeue/%LMQ%a/0/00000000000000000000", 400, b"\1" * 20, "queue.extra"),
        ("batchconsumequeue/B/0/00000000000000000000", 46 * 3, b"\1", "queue.wrong"),
        ("batchconsumequeue/B/0/00000000000000000000", 46 * 20, b"\1" * 46, "queue.extra"),
    ):
        before = (kinds / file).read_bytes()
        change(kinds / file, offset, data)
        # A start refuses a plain queue that leads behind the log's end, and verify says that too.
        found = [(one.kind, one.file) for one in damage_of(check(kinds)) if one.kind != "log.end"]
        assert found == [(kind, file)], (file, offset)
        (kinds / file).write_bytes(before)


def test_what_can_be_rebuilt_is_rebuilt(clean: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    shutil.copytree(clean, before)
    shutil.rmtree(clean / "consumequeue" / "GoldenTx")
    change(clean / QUEUE, 40, b"\xff" * 20)
    (clean / "index" / sorted(os.listdir(clean / "index"))[0]).unlink()
    assert not check(clean).is_sound
    with HeldStore(clean, load(None, SETTINGS)) as store:
        done = rebuild(store)
    assert done.records == 410
    assert check(clean).findings == []
    files = sorted(path.relative_to(before) for path in (before / "consumequeue").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(clean) for path in (clean / "consumequeue").rglob("*") if path.is_file())
    assert all((before / one).read_bytes() == (clean / one).read_bytes() for one in files)
    # Names of index files come from the clock; everything else in them is RocketMQ's.
    ours, theirs = ([path.read_bytes() for path in sorted((root / "index").iterdir())] for root in (clean, before))
    assert ours == theirs
    assert (done.kept / "consumequeue" / "GoldenNormal").is_dir()
    with HeldStore(clean, load(None, SETTINGS)) as store:
        # What the node's dispatchers keep beside their files goes with them.
        done = rebuild(store)
    assert (done.kept / "index").is_dir()
    assert (done.kept / "dispatchers" / "index" / "files.json").is_file()
    assert check(clean).findings == []


def test_a_queue_whose_messages_all_expired_keeps_its_next_offset(clean: Path) -> None:
    (clean / "commitlog" / "00000000000000000000").unlink()
    queue = ConsumeQueue(clean / "consumequeue" / "GoldenNormal" / "0", 1000)
    before = queue.refresh()
    # This one's last message expires, by hand: nothing of the queue is left in the log.
    gone = clean / "consumequeue" / "Gone" / "3"
    shutil.copytree(clean / "consumequeue" / "GoldenNormal" / "0", gone)
    last = ConsumeQueue(gone, 1000)
    last.recover()
    last.truncate(100_000)
    expected = last.max_offset
    assert 0 < expected < before
    with HeldStore(clean, load(None, SETTINGS)) as store:
        rebuild(store, ("queues",))
    assert ConsumeQueue(gone, 1000).refresh() == expected
    assert ConsumeQueue(clean / "consumequeue" / "GoldenNormal" / "0", 1000).refresh() == before


def test_a_rebuild_that_is_interrupted_leaves_the_store_as_it_was(clean: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from commitmq.config import load;"
        "from commitmq.offline.held_store import HeldStore; from commitmq.offline.rebuild import rebuild;"
        f"store = HeldStore(Path(sys.argv[1]), load(None, {SETTINGS!r})); store.__enter__(); rebuild(store)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(sys.path),
        "COMMITMQ_FAILPOINTS": "rebuild.before_exchange=kill",
    }
    ended = subprocess.run([sys.executable, "-c", code, str(clean)], env=environment, timeout=60, check=False)
    assert ended.returncode == -9
    assert check(clean).findings == []
    with HeldStore(clean, load(None, SETTINGS)) as store:
        rebuild(store)
    assert check(clean).findings == []


def test_a_store_that_somebody_uses_is_refused(clean: Path) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from commitmq.store.access import StoreLock;"
         "StoreLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()", str(clean / "lock")],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert held.stdout is not None
        held.stdout.readline()
        with pytest.raises(StoreLockedError, match=str(held.pid)):
            check(clean)
    finally:
        held.communicate(timeout=30)
    with StoreLock(clean / "lock"), pytest.raises(StoreLockedError):
        check(clean)
    assert check(clean).is_sound


def test_the_verbs_say_what_they_found_and_exit_by_it(clean: Path) -> None:
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    sound = commitmq("store", "verify", str(clean), *sets)
    assert (sound.returncode, sound.stdout.split(":")[0]) == (CliExit.OK, "sound"), sound.stderr
    change(clean / QUEUE, 3, b"\x01")
    damaged = commitmq("store", "verify", str(clean), *sets, "--json")
    report = json.loads(damaged.stdout)
    assert damaged.returncode == CliExit.DAMAGE_FOUND
    assert [(one["kind"], one["file"], one["offset"]) for one in report["findings"]] == [("queue.wrong", QUEUE, 0)]
    assert "DAMAGED" in commitmq("store", "verify", str(clean), *sets).stdout
    mended = commitmq("store", "rebuild", str(clean), "--only", "queues", *sets, "--json")
    assert json.loads(mended.stdout)["records"] == 410, mended.stderr
    assert commitmq("store", "verify", str(clean), *sets).returncode == CliExit.OK
    nothing = commitmq("store", "verify", str(clean / "config"))
    assert nothing.returncode == CliExit.STORE_UNUSABLE
    assert "this is no store" in nothing.stderr
