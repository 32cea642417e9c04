"""Goal: whatever byte of whatever file is damaged, a store never serves wrong data for good: it is refused by a sentence that
names the file, or what is wrong is an error where it is read, or it does not matter. verify finds what matters, and rebuild
restores what can be rebuilt.

Method: the store of a real node with every kind of file (ConsumeQueues with extension units, BatchCQ and light queues,
index, topics, groups, offsets and their journal, checkpoint, sidecar). For each kind and each way of damage one file is
changed at a place that a seed chooses; the store is verified, started (recovery and dispatchers, in this process), and
every queue is read as a reader and a consumer read it. ``COMMITMQ_SEED`` repeats the choices.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import orjson
import pytest
from kinds_store import QUEUES, Place, Served, make_store, read_all
from power_check import Recovered, config_of
from power_load import SETTINGS
from traffic import seed

from commitmq.errors import CommitMQError
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.verify import Report, verify
from shares import shared

# A start that is refused leaves sockets of this process's workers to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KINDS = {
    "log": "commitlog/*",
    "queue": "consumequeue/orders/*/*",
    "light queue": "consumequeue/%LMQ%*/*/*",
    "extension": "consumequeue_ext/orders/*/*",
    "batch queue": "batchconsumequeue/*/*/*",
    "index": "index/*",
    "checkpoint": "checkpoint",
    "sidecar": "commitmq/position",
    "topics": "config/topics.json",
    "groups": "config/subscriptionGroup.json",
    "offsets": "config/consumerOffset.json",
    "generations": "config/*.bak",
    "journal": "commitmq/offsets.journal",
    "dispatchers": "commitmq/dispatchers/*.json",
    "lock": "lock",
}
REBUILT = ("queue", "light queue", "extension", "batch queue", "index")
DAMAGES = ("flip", "zeros", "truncation", "swap")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="module")
def truth(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Place, Served]:
    folder = tmp_path_factory.mktemp("truth") / "store"
    shutil.copytree(original, folder)
    served, failed = read_all(Recovered(folder, config_of(SETTINGS)))
    assert not failed
    assert len(served) == 960 + 60 + 60 + 2 * 60
    return served


def damage(chance: random.Random, path: Path, how: str) -> bool:
    """Damage the file; False when that would change nothing."""
    data = bytearray(path.read_bytes())
    before = bytes(data)
    used = len(before.rstrip(b"\0"))
    if how == "flip" and used:
        data[chance.randrange(used)] ^= 1 << chance.randrange(8)
    elif how == "zeros" and used:
        start = chance.randrange(used)
        end = min(len(data), start + chance.choice((1, 20, 512, 4096)))
        data[start:end] = bytes(end - start)
    elif how == "truncation" and used:
        del data[chance.randrange(used) :]
    elif how == "swap" and len(data) >= 2:
        size = 4096 if used > 3 * 4096 else max(1, used // 3)
        first, second = 0, max(1, (used // size - 1)) * size
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
    path.write_bytes(data)
    return bytes(data) != before


def look(root: Path) -> Report | CommitMQError:
    try:
        with HeldStore(root, config_of(SETTINGS)) as store:
            return verify(store)
    except CommitMQError as error:
        return error


def check_one(original: Path, truth: dict[Place, Served], folder: Path, kind: str, how: str, number: int) -> None:
    chance = random.Random(f"{kind}/{how}/{number}")
    root = folder / "store"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(original, root)
    paths = sorted(path for path in root.glob(KINDS[kind]) if path.is_file())
    if not paths:
        assert kind in ("generations", "journal", "dispatchers"), f"the store has no {kind}"
        return
    path = chance.choice(paths)
    if not damage(chance, path, how):
        return
    name = f"seed {number}: {how} in {path.relative_to(root)}"
    report = look(root)
    sound = isinstance(report, Report) and report.is_sound
    if isinstance(report, CommitMQError):
        assert path.name in str(report), f"{name}: {report}"
    try:
        store = Recovered(root, config_of(SETTINGS))
    except CommitMQError as error:
        assert str(root) in str(error), f"{name}: the refusal names no file: {error}"
    else:
        served, failed = read_all(store)
        wrong = [place for place, record in served.items() if truth.get(place) != record]
        if how != "flip" and not sound:
            # Damage that took a record's __CRC32# too leaves one that RocketMQ would have written without: its body is what
            # it was, and verify, which looks at what is behind the record, knows.
            wrong = [place for place in wrong if place not in truth or served[place][:2] != truth[place][:2]]
        assert not wrong, f"{name}: served as good: {wrong[:3]}"
        # Where a queue's last units are gone, only verify knows that there were any: a start does not read the log again.
        ends = {queue: max((place[2] for place in served if place[:2] == queue), default=-1) for queue in QUEUES}
        missing = {place for place in truth.keys() - served.keys() if place[2] < ends[place[:2]] or sound}
        silent = {place[:2] for place in missing} - failed
        assert not silent, f"{name}: messages of {silent} are missing, and nobody says so"
    if kind in REBUILT:
        shutil.rmtree(root)
        shutil.copytree(original, root)
        damage(random.Random(f"{kind}/{how}/{number}/again"), path, how)
        with HeldStore(root, config_of(SETTINGS)) as store_held:
            rebuild(store_held)
            again = verify(store_held)
        assert again.is_sound, f"{name}: {[one.detail for one in again.findings][:3]}"
        served, failed = read_all(Recovered(root, config_of(SETTINGS)))
        assert not failed
        assert served == truth, f"{name}: not restored"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_and_never_served(
    original: Path, truth: dict[Place, Served], tmp_path: Path, kind: str
) -> None:
    """One way of damage for each kind of file, which the seed chooses; the slow suite has all of them
    for some kinds, the long one for the others."""
    number = seed()
    check_one(original, truth, tmp_path, kind, random.Random(f"{kind}/{number}").choice(DAMAGES), number)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", shared(KINDS, 5))
def test_much_damage_is_named_and_never_served(
    original: Path, truth: dict[Place, Served], tmp_path: Path, kind: str
) -> None:
    first = seed()
    for number in range(8):
        for how in DAMAGES:
            check_one(original, truth, tmp_path, kind, how, first + number)


def test_a_dispatcher_whose_position_is_inside_a_record_starts_over(
    original: Path, truth: dict[Place, Served], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(original, root)
    path = root / "commitmq" / "dispatchers" / "index.json"
    state = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**state, "position": state["position"] - 7}))
    store = Recovered(root, config_of(SETTINGS))
    assert [one.name for one in path.parent.glob("index.json*")] != [path.name], "the damaged file is kept"
    assert orjson.loads(path.read_bytes())["position"] == state["position"], "it went through the log again"
    served, failed = read_all(store)
    assert (served, failed) == (truth, set())
