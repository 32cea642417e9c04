"""Goal: whatever file of a stopped store is deleted, emptied, cut short, zeroed or changed by a bit, the next start either has
everything that was acknowledged and gives no queue offset out twice, or refuses by a sentence that names a way out; verify
says that something is wrong, and the way out works.

Method: a table of files and damages of a real node's store with every kind of file; each is damaged, verified, started in
this process (recovery, coordinator, dispatchers, the writer's look at the tail), read whole and compared with what the
undamaged store has. Where a start is refused, the way out that it names is gone, and the start is made again.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from kinds_store import COUNTS, Place, Served, make_store, read_all
from power_check import Recovered, config_of
from power_load import SETTINGS

from commitmq import failpoints
from commitmq.errors import CommitMQError, StoreError
from commitmq.format.file_names import segment_name
from commitmq.offline.expire import expire, safe_end
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.repair import repair
from commitmq.offline.verify import verify
from commitmq.store.layout import StoreLayout
from commitmq.store.log.expiry import MinOffsetFile, look_at_segments
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.workers.dispatcher.dispatch_host import DispatcherHost

# A start that is refused leaves sockets of this process's workers to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = config_of(SETTINGS)
SECOND = segment_name(CONFIG.commit_log.segment_bytes)
Damage = Callable[[Path], None]


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def cut_short(path: Path) -> None:
    used = len(path.read_bytes().rstrip(b"\0"))
    os.truncate(path, used // 2)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(bytes(data).rstrip(b"\0")) // 2] ^= 0x10
    path.write_bytes(data)


def flip_last_unit(path: Path) -> None:
    """The highest bit of the newest unit's physical offset."""
    size = 46 if "batch" in path.parts[-4] else 20
    data = bytearray(path.read_bytes())
    data[(len(bytes(data).rstrip(b"\0")) - 1) // size * size] ^= 0x40
    path.write_bytes(data)


class Truth(NamedTuple):
    served: dict[Place, Served]
    offsets: dict[tuple[str, int], int]
    topics: set[str]
    groups: dict[tuple[str, str], dict[int, int]]


def look(store: Recovered) -> Truth:
    served, failed = read_all(store)
    assert not failed
    return Truth(served, store.queue_offsets, store.topics, store.groups)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def truth(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("truth") / "store"
    shutil.copytree(original, folder)
    found = look(Recovered(folder, CONFIG))
    assert found.offsets == COUNTS
    assert len(found.served) == 960 + 60 + 60 + 2 * 60
    return found


def is_sound(root: Path) -> bool:
    try:
        with HeldStore(root, CONFIG) as store:
            return verify(store).is_sound
    except CommitMQError:
        return False


def put_back(original: Path, root: Path, relative: str) -> None:
    """What every refusal offers first."""
    target = root / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(original / relative, target)


def names(root: Path, pattern: str, which: int) -> str:
    return str(sorted(path for path in root.glob(pattern))[which].relative_to(root))


# Which file, the damage, and what comes of it: everything is there again ("mended": after queues were made anew, "kept":
# without), or the start is refused with these words. "silent" where verify need not say so: nothing is missing.
QUICK: list[tuple[str, int, Damage, str]] = [
    ("consumequeue", 0, delete, "mended"),
    ("consumequeue/orders/0", 0, delete, "mended"),
    ("consumequeue/orders/0/*", 0, delete, "mended"),
    ("consumequeue/orders/0/*", 3, delete, "mended"),
    ("consumequeue/orders/0/*", -1, delete, "mended"),
    ("consumequeue/orders/0/*", -1, zero, "mended"),
    ("consumequeue/orders/1/*", -1, flip_last_unit, "mended"),
    ("consumequeue/%LMQ%a/0/*", 0, delete, "mended"),
    ("batchconsumequeue/batches/0/*", 0, flip_last_unit, "mended"),
    ("batchconsumequeue/batches/0/*", -1, delete, "mended"),
    ("index/2*", 2, delete, "kept"),
    ("index/2*", 0, delete, "kept"),
    ("index/2*", 1, cut_short, "kept"),
    ("config/consumerOffset.json", 0, empty, "is damaged: it is empty"),
    ("config/consumerOffset.json", 0, delete, "builds on it"),
    ("config/topics.json", 0, cut_short, "is damaged"),
    ("config/topics.json", 0, delete, "table of topics is missing"),
    ("commitmq/queue_ends", 0, flip, "silent"),
    ("commitlog/*", 0, delete, "missing at the log's beginning"),
]
SLOW: list[tuple[str, int, Damage, str]] = [
    *(
        (f"consumequeue/orders/{queue}/*", which, damage, "mended")
        for queue, count in ((0, 7), (1, 6))
        for which in range(count)
        for damage in (delete, empty, cut_short, zero)
    ),
    *((f"consumequeue/%LMQ%{name}/0/*", 0, damage, "mended") for name in "ab" for damage in (empty, cut_short, zero)),
    *(
        ("batchconsumequeue/batches/0/*", which, damage, "mended")
        for which in (0, 1)
        for damage in (delete, empty, cut_short, zero, flip_last_unit)
    ),
    *(("index/2*", which, damage, "kept") for which in range(5) for damage in (delete, empty, cut_short, zero)),
    *(("config/subscriptionGroup.json", 0, damage, "is damaged") for damage in (empty, cut_short, zero)),
    *(("config/topics.json", 0, damage, "is damaged") for damage in (empty, zero)),
    *(("config/consumerOffset.json", 0, damage, "is damaged") for damage in (cut_short, zero)),
    *(("commitmq/queue_ends", 0, damage, "silent") for damage in (delete, empty, cut_short, zero)),
    *(("commitmq/position", 0, damage, "silent") for damage in (delete, empty, cut_short, zero, flip)),
    *(("commitmq/producers", 0, damage, "silent") for damage in (delete, empty, cut_short, zero, flip)),
    *(("commitmq/offsets.journal", 0, damage, "this is no offsets journal") for damage in (empty, cut_short, zero)),
    *(("commitmq/dispatchers/index/files.json", 0, damage, "silent") for damage in (delete, empty, zero)),
    *(
        ("consumequeue_ext/orders/0/*", which, damage, "silent")
        for which in (0, 1, 2)
        for damage in (delete, zero, flip)
    ),
    ("checkpoint", 0, delete, "silent"),
    ("commitlog/*", 0, cut_short, "was cut short"),
    ("commitlog/*", 1, delete, "is missing before"),
    ("commitlog/*", 1, cut_short, "was cut short"),
    ("commitlog/*", -1, delete, "refused to cut the log"),
    ("commitlog/*", -1, empty, "refused to cut the log"),
    ("commitlog/*", -1, cut_short, "was cut short"),
    ("commitlog/*", -1, zero, "refused to cut the log"),
]


def check(original: Path, truth: Truth, root: Path, pattern: str, which: int, damage: Damage, outcome: str) -> None:
    shutil.copytree(original, root)
    relative = names(root, pattern, which)
    damage(root / relative)
    if outcome != "silent":
        # A small file that is not there at all is no damage to verify.
        silent = damage is delete and pattern in ("config/topics.json", "config/consumerOffset.json")
        assert silent or not is_sound(root), f"verify says nothing of {damage.__name__} {relative}"
    try:
        found = look(Recovered(root, CONFIG))
    except CommitMQError as error:
        assert outcome in str(error), f"{damage.__name__} {relative}: {error}"
        assert str(root) in str(error), "the refusal names no file"
        # Refused again, and nothing was changed: what the sentence offers first makes it whole.
        with pytest.raises(CommitMQError):
            Recovered(root, CONFIG)
        put_back(original, root, relative)
        found = look(Recovered(root, CONFIG))
    else:
        assert outcome in ("mended", "kept", "silent"), f"{damage.__name__} {relative} was not noticed"
    was_mended = any((root / "commitmq").glob("before-rebuild-*"))
    assert was_mended == (outcome == "mended"), f"{damage.__name__} {relative}: made anew {was_mended}"
    assert found == truth, f"{damage.__name__} {relative}"
    (root / "abort").unlink()
    with HeldStore(root, CONFIG) as store:
        report = verify(store)
    assert report.is_sound, f"{damage.__name__} {relative}: {[one.detail for one in report.findings][:3]}"


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_a_lost_file_is_mended_or_refused(original: Path, truth: Truth, tmp_path: Path, number: int) -> None:
    check(original, truth, tmp_path / "store", *QUICK[number])


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_many_lost_files_are_mended_or_refused(original: Path, truth: Truth, tmp_path: Path) -> None:
    for number, case in enumerate(SLOW):
        check(original, truth, tmp_path / str(number) / "store", *case)
        shutil.rmtree(tmp_path / str(number))


def follow(sentence: str, path: Path) -> None:
    """Do what the refusal says may be done without a copy."""
    if "or write {} into it" in sentence:
        path.write_bytes(b"{}")
    elif "Put back a copy: its previous generation" in sentence:
        shutil.copy2(path.with_name(path.name + ".bak"), path)
    else:
        words = re.search(r"(?:or|and) remove (.*?)(?:: | to go on)", sentence)
        assert words is not None, sentence
        for name in words[1].split(" and "):
            Path(name).unlink()


@pytest.mark.parametrize("name", ["consumerOffset.json", "topics.json", "subscriptionGroup.json"])
@pytest.mark.parametrize("backup", ["whole", "missing", "junk"])
@pytest.mark.parametrize("there", [True, False], ids=["damaged", "deleted"])
def test_what_a_refusal_says_of_a_config_file_works(
    original: Path, tmp_path: Path, name: str, backup: str, there: bool
) -> None:
    """To the letter, at the next start; verify says the same."""
    root = tmp_path / "store"
    shutil.copytree(original, root)
    path = root / "config" / name
    beside = path.with_name(f"{name}.bak")
    whole = path.read_bytes()
    path.unlink()
    if there:
        path.write_bytes(b"junk")
    beside.unlink(missing_ok=True)
    if backup != "missing":
        beside.write_bytes(b"junk" if backup == "junk" else whole + b"\n")
    try:
        Recovered(root, CONFIG)
        assert not there
        assert backup != "junk"
        return
    except StoreError as error:
        sentence = str(error)
    if there:
        with HeldStore(root, CONFIG) as store:
            (told,) = [one.detail for one in verify(store).findings if one.file == f"config/{name}"]
        assert told == sentence
    follow(sentence, path)
    recovered = Recovered(root, CONFIG)
    assert recovered.queue_offsets == COUNTS
    if backup == "whole":
        assert recovered.groups


def test_after_a_crash_too(original: Path, truth: Truth, tmp_path: Path) -> None:
    """A node that is killed has its record from its start or from the last time it was written."""
    root = tmp_path / "store"
    shutil.copytree(original, root)
    Recovered(root, CONFIG)  # leaves abort, as a killed node does
    shutil.rmtree(root / "consumequeue" / "orders" / "1")
    assert look(Recovered(root, CONFIG)) == truth


def test_without_a_record_samples_of_the_log_tell(original: Path, truth: Truth, tmp_path: Path) -> None:
    """As with a store of RocketMQ's, or of a version that kept no record."""
    for number, lost in enumerate(("consumequeue", "consumequeue/orders/0", "batchconsumequeue/batches/0")):
        root = tmp_path / str(number) / "store"
        shutil.copytree(original, root)
        for name in ("queue_ends", "position"):
            (root / "commitmq" / name).unlink()
        shutil.rmtree(root / lost)
        assert look(Recovered(root, CONFIG)) == truth, lost


def test_the_next_offset_of_a_queue_whose_messages_all_expired_outlives_its_files(
    original: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(original, root)
    first = sorted((root / "commitlog").iterdir())[:2]
    (root / "commitmq" / "min_offset").write_bytes(b"%020d\n" % (2 * 131_072))
    for path in first:
        path.unlink()
    before = Recovered(root, CONFIG).queue_offsets
    assert before == COUNTS
    (root / "abort").unlink()
    shutil.rmtree(root / "consumequeue" / "orders" / "1")
    assert Recovered(root, CONFIG).queue_offsets == before


def test_a_lost_beginning_is_not_forgotten_offline(original: Path, truth: Truth, tmp_path: Path) -> None:
    """Neither what makes queues anew nor what deletes or restores segments takes it for where the log begins."""
    root = tmp_path / "store"
    shutil.copytree(original, root)
    first = sorted((root / "commitlog").iterdir())[0]
    first.unlink()
    with HeldStore(root, CONFIG) as store:
        found = [one for one in verify(store).findings if one.kind == "log.segment"]
        assert [(one.file, "began at physical offset 0" in one.detail) for one in found] == [
            ("commitlog/" + SECOND, True)
        ]
        for offline in (rebuild, lambda held: repair(held, "cut"), safe_end):
            with pytest.raises(StoreError, match="missing at the log's beginning"):
                offline(store)
    put_back(original, root, str(first.relative_to(root)))
    assert look(Recovered(root, CONFIG)) == truth


def test_segments_that_rocketmq_expired_are_no_loss(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ notes nowhere what it deletes. Also when our first start behind it dies before it has its own record."""
    root = tmp_path / "store"
    shutil.copytree(original, root)
    sorted((root / "commitlog").iterdir())[0].unlink()
    (root / "abort").write_bytes(b"4711")  # RocketMQ's, which was killed

    def dies(_host: DispatcherHost) -> None:
        raise StoreError("dies")

    with monkeypatch.context() as patched:
        patched.setattr(DispatcherHost, "open", dies)
        with pytest.raises(StoreError, match="dies"):
            Recovered(root, CONFIG)
    store = Recovered(root, CONFIG)
    assert store.queue_offsets == COUNTS
    assert store.records()
    assert store.min_offset == int(SECOND)
    ends = QueueEnds.load(root / "commitmq" / "queue_ends")
    assert ends is not None
    assert ends.log_start == int(SECOND)


def test_an_expiry_that_cannot_be_noted_and_dies_is_no_loss(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the oldest segment goes without a note."""
    root = tmp_path / "store"
    shutil.copytree(original, root)
    layout = StoreLayout(root)
    segment_bytes = CONFIG.commit_log.segment_bytes
    segments = look_at_segments(layout.commit_log, segment_bytes)
    monkeypatch.setattr(
        failpoints, "_points", failpoints.parse("min_offset.write=errno:ENOSPC;cleanup.after_unlink=errno:EIO")
    )
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    with HeldStore(root, CONFIG), pytest.raises(OSError, match=os.strerror(errno.EIO)):
        expire(layout, segments, segments[1].end, segments[-1].end)
    monkeypatch.undo()
    assert not (layout.commit_log / segment_name(0)).exists()
    assert MinOffsetFile(layout).read() == 0
    assert Recovered(root, CONFIG).queue_offsets == COUNTS


def test_a_rebuild_keeps_what_only_the_record_knows(original: Path, truth: Truth, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(original, root)
    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "batchconsumequeue")
    with HeldStore(root, CONFIG) as store:
        rebuild(store)
        assert verify(store).is_sound
    assert look(Recovered(root, CONFIG)) == truth


@pytest.mark.parametrize("damage", [cut_short, zero, delete, empty], ids=lambda one: one.__name__)
def test_a_last_segment_that_is_not_whole_is_repaired_as_a_start_judges_it(
    original: Path, truth: Truth, tmp_path: Path, damage: Damage
) -> None:
    root = tmp_path / "store"
    shutil.copytree(original, root)
    damage(sorted((root / "commitlog").iterdir())[-1])
    with pytest.raises(CommitMQError):
        Recovered(root, CONFIG)
    with HeldStore(root, CONFIG) as store:
        done = repair(store, "cut")
        assert done.damage, "repair calls a log whole at which a start is refused"
        assert verify(store).is_sound
    served, _ = read_all(Recovered(root, CONFIG))
    assert served
    assert all(truth.served[place] == record for place, record in served.items())


def test_units_at_offset_zero_of_a_queue_that_has_units_change_nothing(tmp_path: Path) -> None:
    queue = ConsumeQueue(tmp_path / "topic" / "0", 2_000)
    unit = b"".join(number.to_bytes(8, "big") + (10).to_bytes(4, "big") + bytes(8) for number in (0, 10, 20))
    assert queue.append_units(0, unit) == 3
    stray = (30).to_bytes(8, "big") + (10).to_bytes(4, "big") + bytes(8)
    assert queue.append_units(0, stray) == 0, "place 0 is taken"
    assert queue.max_offset == 3
