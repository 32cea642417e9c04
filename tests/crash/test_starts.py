"""Goal: a start that is refused, fails or is interrupted, anywhere and any number of times, costs nothing: the next good start
has every message, and goes on with the next queue offsets.

Method: four stores (RocketMQ's, stopped and killed, as a released broker wrote them; our own, stopped and killed) and a table
of ways in which a start ends badly: each refusal; each process ended, failing or signalled at each place of keeper,
supervisor, discovery, recovery and the workers behind them. All of them happen to one store, one after the other. After
each, ``abort``, checkpoint and sidecar are compared with what was found, as long as recovery has not ended; and a copy of the
store is recovered in this process, and its log and next offsets are compared with what was written before anything happened.
At the end a real node starts, and a client reads every message that an outside journal knows.

The power is cut, too, at moments of a start that is recorded call by call.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from power_check import Recovered
from power_disk import Record as DiskRecord
from power_recorder import Recorder
from traffic import seed

from commitmq import Admin, Message, Producer, Reader
from commitmq.config import NodeConfig, from_mapping
from commitmq.store.access import lock_holder
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery import cut_record
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, unpack
from nodes import Node, eventually
from rebooted import after_a_reboot

STORES = ("rocketmq-clean", "rocketmq-crash", "our-clean", "our-crash")
SETTINGS = (
    f"commit_log.segment_bytes={GOLDEN_SEGMENT_BYTES}",
    f"consume_queue.file_bytes={GOLDEN_QUEUE_FILE_BYTES}",
    "commit_log.max_message_bytes=16384",
    "index.hash_slots=200",
    "index.max_items=500",
    "supervisor.restart_backoff_ms=50",
)
POWER_IMAGES = 6

Queue = tuple[str, int]
Line = tuple[int, str, int, int, bytes]  # physical offset, topic, queue, queue offset, body as it is stored


@dataclass(frozen=True)
class Known:
    """A store as it was before anything happened: every record of its log, and what a client must read."""

    name: str
    root: Path
    lines: list[Line]
    next_offsets: dict[Queue, int]
    journal: dict[Queue, list[bytes]]
    """From outside: messages.jsonl of RocketMQ's own client, or what our node acknowledged. Bodies; None where compressed."""


def lines_of(layout: StoreLayout) -> list[Line]:
    log = CommitLog(layout.commit_log, GOLDEN_SEGMENT_BYTES)
    found = [
        (one.physical_offset, one.topic, one.queue_id, one.queue_offset, bytes(one.body)) for one in log.iter_records()
    ]
    log.close()
    return found


def config() -> NodeConfig:
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for setting in SETTINGS:
        name, _, value = setting.partition("=")
        section, _, key = name.partition(".")
        sections[section][key] = int(value)
    return from_mapping(sections)


def known(name: str, root: Path, journal: dict[Queue, list[bytes]], scratch: Path) -> Known:
    """Recover a copy of the untouched store: its log and its next offsets are what everything is held against."""
    copy = scratch / f"{name}-untouched"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("run"))
    recovered = Recovered(copy, config())
    lines = lines_of(StoreLayout(root))
    assert len(lines) == len(recovered.records())
    assert len(lines) > 400
    return Known(name, root, lines, dict(recovered.queue_offsets), journal)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """``stores(name)``: made when it is first asked for. Read only."""
    folder = tmp_path_factory.mktemp("starts")
    made: dict[str, Known] = {}

    def get(name: str) -> Known:
        if name not in made:
            made[name] = rocketmqs(name, folder) if name.startswith("rocketmq") else ours(name, folder)
        return made[name]

    return get


def rocketmqs(name: str, folder: Path) -> Known:
    golden = unpack(name.partition("-")[2], folder / name)
    journal: dict[Queue, list[tuple[int, bytes]]] = defaultdict(list)
    for line in golden.messages:
        body = b"" if line["sys_flag"] & 1 else bytes.fromhex(line["body_hex"])
        journal[line["topic"], line["queue_id"]].append((line["queue_offset"], body))
    return known(name, golden.root, {key: [body for _, body in sorted(one)] for key, one in journal.items()}, folder)


def ours(name: str, folder: Path) -> Known:
    node = Node(folder / name / "store", *SETTINGS)
    journal: dict[Queue, list[bytes]] = defaultdict(list)
    try:
        node.store.parent.mkdir()
        assert node.start().returncode == 0
        with Admin(node.address) as admin, Producer(node.address) as producer:
            admin.topic_create("orders", 3)
            for number in range(500):
                body, queue = b"%d " % number + b"x" * (300 + number % 400), number % 3
                ack = "memory" if number % 5 else "flushed"
                producer.send("orders", Message(body, keys=[f"k{number}"]), queue=queue, ack=ack)
                journal["orders", queue].append(body)
        if name == "our-clean":
            assert node.stop().returncode == 0
        else:
            node.pids()
            node.kill_all(known=True)
    finally:
        shutil.copytree(node.store, folder / name / "kept", ignore=shutil.ignore_patterns("run"))
        node.end()
    return known(name, folder / name / "kept", journal, folder)


# ---------------------------------------------------------------- ways in which a start ends badly


@dataclass(frozen=True)
class Failure:
    """One way. ``settings`` go over the right ones; ``point`` is where ``action`` happens, or ``signal`` comes."""

    name: str
    settings: tuple[str, ...] = ()
    codes: tuple[CliExit, ...] = ()
    point: str = ""
    action: str = ""
    signal: int = 0
    before_the_end: bool = True
    """Recovery has not ended: nothing that it trusts may have changed at all."""
    around: Callable[[Node], contextlib.AbstractContextManager[Any]] = field(
        default=lambda _node: contextlib.nullcontext()
    )

    def __str__(self) -> str:
        return self.name


@contextlib.contextmanager
def lock_held(node: Node) -> Iterator[None]:
    code = (
        "import sys, pathlib; from commitmq.store.access import StoreLock; lock = StoreLock(pathlib.Path(sys.argv[1]));"
        "lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(node.store / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=node.environment(),
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    yield
    holder.stdin.close()
    holder.stdout.close()
    holder.wait(30)


@contextlib.contextmanager
def bad_epoch(node: Node) -> Iterator[None]:
    path = node.store / "commitmq" / "epoch"
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.exists() else b"0\n"
    path.write_bytes(b"none\n")
    yield
    path.write_bytes(before)


@contextlib.contextmanager
def no_folder(node: Node) -> Iterator[None]:
    """A file in the place of a folder that the start makes."""
    path = node.store / "run"
    shutil.rmtree(path, ignore_errors=True)
    path.write_bytes(b"")
    yield
    path.unlink()


def taken_port() -> Failure:
    @contextlib.contextmanager
    def listening(_node: Node) -> Iterator[None]:
        with probe:
            yield

    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    probe.listen()
    port = f"network.port={probe.getsockname()[1]}"
    return Failure("port", (port,), (CliExit.ADDRESS_IN_USE,), around=listening)


REFUSALS = (
    Failure("segment size", ("commit_log.segment_bytes=262144",), (CliExit.STORE_UNUSABLE,)),
    # The way it was seen first: only the size of the segments is right.
    Failure("queue size", ("consume_queue.file_bytes=6000000",), (CliExit.STORE_UNUSABLE,)),
    Failure("configuration", ("commit_log.flush_mode=never",), (CliExit.CONFIG_ERROR,)),
    Failure("lock", (), (CliExit.STORE_LOCKED,), around=lock_held),
    Failure("epoch", (), (CliExit.STORE_UNUSABLE,), around=bad_epoch),
    Failure("no folder", (), (CliExit.STORE_UNUSABLE, CliExit.FAILURE), around=no_folder),
)
BEFORE = (
    "keeper.begin",
    "keeper.after_start",
    "supervisor.opened",
    "discovery.begin",
    "recovery.begin",
    "recovery.inside_scan",
    "recovery.after_scan",
    "recovery.before_sync",
)
# From here on recovery has found the log's end, and what it writes down is right.
AFTER = (
    "sidecar.write",
    "sidecar.before_fdatasync",
    "sidecar.before_checkpoint",
    "checkpoint.write",
    "checkpoint.before_fdatasync",
    "recovery.done",
    "supervisor.before_abort",
    "abort.write",
    "coordinator.begin",
    "dispatcher-consume_queue.begin",
    "dispatcher-index.begin",
    "reput.begin",
    "flush.begin",
    "allocate.begin",
    "dispatcher-memory.begin",
    "reader-0.begin",
    "cleanup.begin",
    "writer.begin",
    "supervisor.before_ready",
)
ACTIONS = ("exit", "errno:EIO", "SIGTERM", "SIGINT", "SIGKILL")


def at(point: str, action: str) -> Failure:
    name = f"{point} {action}"
    before = point in BEFORE
    if action.startswith("SIG"):
        return Failure(name, point=point, signal=getattr(signal, action), before_the_end=before)
    return Failure(name, point=point, action=action, before_the_end=before)


def table(actions: Callable[[int], tuple[str, ...]]) -> list[Failure]:
    """Every refusal, and every place with the actions that ``actions`` gives for its number."""
    found: list[Failure] = [*REFUSALS, taken_port()]
    for number, point in enumerate((*BEFORE, *AFTER)):
        found += [at(point, action) for action in actions(number)]
    return found


# ---------------------------------------------------------------- doing it


class Trial:
    """One store to which things happen."""

    def __init__(self, known: Known, folder: Path) -> None:
        self.known = known
        self._folder = folder
        store = folder / "store"
        shutil.copytree(known.root, store)
        self.node = Node(store, *SETTINGS)
        self.layout = StoreLayout(store)
        self._numbers = itertools.count()
        self.done: list[str] = []

    def trusted(self) -> dict[str, bytes | None]:
        """What a recovery goes by."""
        paths = (self.layout.abort, self.layout.checkpoint, self.layout.sidecar)
        return {path.name: path.read_bytes() if path.exists() else None for path in paths}

    def suffer(self, failure: Failure) -> None:
        """Let one start fail, and check what it left."""
        self.done.append(failure.name)
        before = self.trusted()
        with failure.around(self.node):
            code = self._interrupted(failure) if failure.signal else self._failing(failure)
        assert not failure.codes or code in failure.codes, (self.done, code)
        if self.node.is_started:
            self.node.stop()
        eventually(
            lambda: not self.layout.lock.exists() or lock_holder(self.layout.lock) == 0, "nobody holds the store"
        )
        if failure.before_the_end:
            assert self.trusted() == before, f"after {self.done}"
        self.check_copy()

    def _failing(self, failure: Failure) -> int:
        extra = {"COMMITMQ_FAILPOINTS": f"{failure.point}={failure.action}"} if failure.point else {}
        ended = self.node.start(*failure.settings, **extra)
        # An index that does not come up keeps nobody from starting; nor does a place that this store's start never meets.
        assert ended.returncode != 0 or failure.point, (self.done, ended.stdout)
        return ended.returncode

    def _interrupted(self, failure: Failure) -> int:
        """Have the process wait at the place, send the signal, and wait until all is over."""
        fired = self._folder / f"fired-{next(self._numbers)}"
        fired.mkdir()
        pause = "1s" if failure.point.startswith(("supervisor", "keeper")) else "20s"
        start = subprocess.Popen(
            [sys.executable, "-m", "commitmq.cli.main", *self.node.arguments(), "--background"],
            env=self.node.environment(
                COMMITMQ_FAILPOINTS=f"{failure.point}=delay:{pause}@1", COMMITMQ_FAILPOINTS_ONCE=str(fired)
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        reached = fired / failure.point
        eventually(lambda: reached.exists() or start.poll() is not None, f"{failure.point} is reached")
        if not reached.exists():
            return start.wait()  # this store's start does not come by there: it is an ordinary one
        everybody = psutil.Process(start.pid).children(recursive=True)
        self.node.seen |= {one.pid for one in everybody}
        if failure.signal == signal.SIGKILL:
            everybody.append(psutil.Process(start.pid))
            for one in everybody:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.suspend()
            for one in reversed(everybody):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            start.wait(30)
            psutil.wait_procs(everybody, 30)
        elif failure.signal == signal.SIGINT:
            start.send_signal(signal.SIGINT)
            start.wait(60)
        else:
            everybody[0].send_signal(failure.signal)  # the keeper
            start.wait(60)
        return start.returncode

    def check_copy(self) -> None:
        """A recovery, here and of a copy, finds what was there in the beginning."""
        copy = self._folder / f"copy-{next(self._numbers)}"
        shutil.copytree(self.layout.root, copy, ignore=shutil.ignore_patterns("run"))
        try:
            check(copy, self.known, str(self.done))
        finally:
            shutil.rmtree(copy)

    def start_well(self) -> None:
        """A real node at last, and a client that reads everything and sends more."""
        node, known = self.node, self.known
        ended = node.start()
        assert ended.returncode == 0, (self.done, ended.stderr, node.log_tail())
        assert "cut" not in ended.stderr
        for (topic, queue), bodies in known.journal.items():
            read = bodies_of(node.address, topic, queue, len(bodies))
            assert all(one in (b"", other) for one, other in zip(bodies, read, strict=True)), (topic, queue)
        with Producer(node.address) as producer:
            for topic, queue in itertools.islice((key for key in known.journal if "%" not in key[0]), 3):
                result = producer.send(topic, b"one more", queue=queue)
                assert result.queue_offset == known.next_offsets[topic, queue]
        assert node.report()["node"]["cuts"] == []
        assert node.stop().returncode == 0
        arguments = [part for setting in SETTINGS for part in ("--set", setting)]
        verified = node.run("store", "verify", str(node.store), *arguments)
        assert verified.returncode == 0, verified.stdout


def check(store: Path, known: Known, what: str) -> None:
    """Recover ``store`` here, and hold its log and next offsets against ``known``."""
    layout = StoreLayout(store)
    recovered = Recovered(store, config())
    assert lines_of(layout)[: len(known.lines)] == known.lines, what
    assert {key: recovered.queue_offsets.get(key) for key in known.next_offsets} == known.next_offsets, what
    assert cut_record.load(layout) == [], what


def bodies_of(address: str, topic: str, queue: int, count: int) -> list[bytes]:
    found: list[bytes] = []
    with Reader(node=address, queues=[(topic, queue)], start="earliest") as consumer:
        while len(found) < count:
            batch = consumer.poll(timeout_s=20)
            assert len(batch), f"{topic}/{queue} ends after {len(found)} of {count} messages"
            found += [bytes(one.body) for one in batch]
    return found[:count]


def try_all(known: Known, failures: list[Failure], folder: Path) -> None:
    trial = Trial(known, folder)
    try:
        for failure in failures:
            trial.suffer(failure)
        trial.start_well()
    except BaseException as error:
        error.add_note(f"--- {known.name} after {trial.done}\n--- the end of node.log ---\n{trial.node.log_tail()}")
        raise
    finally:
        trial.node.end()


# The first is how it was seen first: see the size of the queues.
DEFAULT = {
    "rocketmq-clean": (REFUSALS[1], at("recovery.after_scan", "SIGTERM")),
    "our-crash": (at("recovery.before_sync", "exit"), at("flush.begin", "SIGKILL")),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", DEFAULT)
def test_some_starts_that_end_badly_cost_nothing(name: str, stores: Callable[[str], Known], tmp_path: Path) -> None:
    try_all(stores(name), list(DEFAULT[name]), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("name", STORES)
def test_starts_that_end_badly_anywhere_cost_nothing(name: str, stores: Callable[[str], Known], tmp_path: Path) -> None:
    """Every refusal and every place, with one of the actions each; which one differs from store to store."""
    shift = STORES.index(name) + seed() % len(ACTIONS)
    try_all(stores(name), table(lambda number: (ACTIONS[(number + shift) % len(ACTIONS)],)), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", STORES)
def test_every_start_that_ends_badly_costs_nothing(
    name: str, action: str, stores: Callable[[str], Known], tmp_path: Path
) -> None:
    try_all(stores(name), table(lambda _number: (action,)), tmp_path)


# ---------------------------------------------------------------- the power


def cut_the_power(known: Known, folder: Path, images: int, number: int) -> int:
    """Record a start here, and recover what a power cut at moments of it may leave; returns how many."""
    store, record = folder / "recorded", folder / "record"
    shutil.copytree(known.root, store, ignore=shutil.ignore_patterns("run"))
    recorder = Recorder(store, record)
    recorder.prepare()
    first = len(DiskRecord(record).events)
    recorder.install()
    try:
        Recovered(store, config())
    finally:
        recorder.uninstall()
    found = DiskRecord(record)
    chance = random.Random(number)
    moments = sorted(chance.choices(range(first - 1, len(found.events)), k=images))
    for turn, (moment, disk) in enumerate(found.disks(moments)):
        image = folder / f"image-{turn}"
        disk.write_image(image, chance)
        after_a_reboot(StoreLayout(image))
        check(image, known, f"{known.name}: the power went after {found.events[moment]}, image {turn} of seed {number}")
        shutil.rmtree(image)
    return len(moments)


@pytest.mark.parametrize("name", STORES)
def test_a_power_cut_while_the_node_starts_costs_nothing(
    name: str, stores: Callable[[str], Known], tmp_path: Path
) -> None:
    assert cut_the_power(stores(name), tmp_path, POWER_IMAGES, seed()) == POWER_IMAGES


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("name", STORES)
def test_many_power_cuts_while_the_node_starts_cost_nothing(
    name: str, stores: Callable[[str], Known], tmp_path: Path
) -> None:
    assert cut_the_power(stores(name), tmp_path, 30 * POWER_IMAGES, seed()) == 30 * POWER_IMAGES
