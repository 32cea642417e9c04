"""Goal: what was acknowledged as flushed survives a power cut at any moment, and the node starts on whatever is left.

Method: a real node lives for some seconds with its disk recorded (power_recorder), under load that keeps what it was told
(power_load). From the record come disks that a cut at any event may have left (power_disk); each is recovered and held
against what had been said by then (power_check), some of them with the power cut again during that recovery.

A failing image is named by the folder of its run and its number, and made again alone by

    COMMITMQ_POWER_RUN=FOLDER COMMITMQ_POWER_IMAGE=NUMBER pytest tests/crash/test_power_loss.py -k again
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from power_check import Recovered, check, config_of
from power_disk import Record
from power_images import Found, Images
from power_load import SHIM, Run, record_run
from power_recorder import Recorder
from traffic import seed

from commitmq import Reader
from commitmq.store.layout import StoreLayout
from nodes import Node, environment
from rebooted import after_a_reboot

pytestmark = pytest.mark.timeout(300)  # on a busy machine the recorded life alone takes more than a minute

IMAGES = 200
FEW_IMAGES = 10
DERIVED = ("index/", "consumequeue_ext/", "batchconsumequeue/", "commitmq/queue_ends", "timerwheel", "timerlog/")
REAL_STARTS = 2
SLOW_RUNS = 16
SLOW_IMAGES = 5_000
POOLED_IMAGES = 30
POOLED: dict[str, Any] = {"commit_log.transient_store_pool": True, "commit_log.transient_store_pool_size": 3}
EXPIRING = {"retention.store_bytes": 900_000, "retention.check_interval_ms": 50, "retention.delete_interval_ms": 1}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of recoveries would fill the log of a failing test with what they are meant to find."""
    log = logging.getLogger("commitmq")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: images are made and thrown away by the thousand."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="commitmq-power-", dir=memory if os.access(memory, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One recorded life, for all default tests."""
    return record_run(tmp_path_factory.mktemp("power"), seed(), scale=0.5)


def complain(run: Run, found: Found) -> None:
    lines = [f"image {number}: {text}" for number, text in sorted(found.failures.items())]
    assert not found.failures, f"{len(lines)} of {found.images} images of {run.folder} failed\n" + "\n".join(lines[:20])


def test_the_recorder_sees_every_call_that_changes_files(tmp_path: Path) -> None:
    """The kernel's own list of system calls has nothing that the record lacks, and the other way round."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    store, record, trace = tmp_path / "store", tmp_path / "record", tmp_path / "trace"
    store.mkdir()
    Recorder(store, record).prepare()
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import pathlib
from power_check import Recovered, config_of
from power_load import SETTINGS
store = pathlib.Path({str(store)!r})
for _ in range(2):
    recovered = Recovered(store, config_of(SETTINGS))
"""
    calls = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,open,openat,ftruncate,msync"
    traced = subprocess.run(
        ["strace", "-f", "-y", "-qq", "-e", f"trace={calls}", "-o", str(trace), sys.executable, "-c", code],
        env={
            **environment(),
            "PYTHONPATH": f"{SHIM}:{environment()['PYTHONPATH']}",
            "COMMITMQ_POWER_STORE": str(store),
            "COMMITMQ_POWER_RECORD": str(record),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "ptrace" in traced.stderr or "Operation not permitted" in traced.stderr:
        pytest.skip("tracing is not permitted here")
    assert traced.returncode == 0, traced.stderr
    recorded = Record(record)
    assert not recorded.missed
    here = (f"{store}/", f"{store}>")
    lines = [line for line in trace.read_text(errors="replace").splitlines() if any(one in line for one in here)]
    lines = [line for line in lines if " = -1 " not in line and "/run/" not in line and "/lock" not in line]
    kernel = {
        "sync": sum("sync(" in line for line in lines),
        "rename": sum("rename" in line for line in lines),
        "mkdir": sum("mkdir" in line for line in lines),
        "unlink": sum("unlink" in line for line in lines),
    }
    counted = [event for event in recorded.events if event["pid"] != os.getpid()]
    ours = {
        "sync": sum(event["op"] in ("sync", "syncdir") for event in counted),
        "rename": sum(event["op"] == "rename" for event in counted),
        "mkdir": sum(event["op"] == "mkdir" for event in counted),
        "unlink": sum(event["op"] == "unlink" for event in counted),
    }
    assert kernel == ours
    assert not any("msync(" in line for line in lines), "a mapping is synced, which the recorder does not see"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_sync_of_what_another_process_deletes_first_is_the_kernels_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A queue's files may be synced in a thread while its topic is deleted: the kernel sees no error in that."""
    store = tmp_path / "store"
    store.mkdir()
    recorder = Recorder(store, tmp_path / "record")
    recorder.prepare()
    recorder.install()
    try:
        path = store / "it"
        if what == "folder":
            path.mkdir()
        else:
            path.write_bytes(b"x")
        fd, alone = os.open(path, os.O_RDONLY), recorder.alone

        def alone_later() -> contextlib.AbstractContextManager[None]:
            monkeypatch.setattr(recorder, "alone", alone)
            path.rmdir() if what == "folder" else path.unlink()
            return alone()

        monkeypatch.setattr(recorder, "alone", alone_later)
        os.fsync(fd)
        assert not path.exists()
        os.close(fd)
    finally:
        recorder.uninstall()
    ops = [event["op"] for event in Record(tmp_path / "record").events]
    assert ops[-1] == ("rmdir" if what == "folder" else "unlink"), "nothing of that name was synced"


@pytest.mark.slow
def test_the_record_has_syncs_of_the_writer_and_of_flush(run: Run) -> None:
    """So the images below are of both: each makes messages durable."""
    events = Record(run.folder / "record").events
    syncs = [(event["pid"], event["path"]) for event in events if event["op"] == "sync"]
    flushes = {pid for pid, path in syncs if path == "checkpoint"}
    of_flush = [pid for pid, path in syncs if path.startswith("commitlog/") and pid in flushes]
    of_others = [pid for pid, path in syncs if path.startswith("commitlog/") and pid not in flushes]
    assert len(of_flush) > 100
    assert len(of_others) > 5, f"{len(of_others)} beside {len(of_flush)} of flush"


@pytest.mark.slow
def test_flushed_messages_survive_a_power_cut_at_any_moment(run: Run, scratch: Path) -> None:
    images = Images(run, scratch)
    found = images.run_all(range(IMAGES))
    complain(run, found)
    assert found.images == IMAGES
    assert found.acks > 10_000, "too little was acknowledged to show anything"
    print(f"images={found.images} recoveries_cut_again={found.again} acks_checked={found.acks}")  # noqa: T201


def test_store_verify_finds_nothing_after_a_start_on_what_a_power_cut_left(run: Run, scratch: Path) -> None:
    """The seed chooses some cuts, of a life that wrote derived files of every kind."""
    images = Images(run, scratch)
    written = {path for event in images.record.events for path in (event.get("path", ""), *event.get("files", ()))}
    assert all(any(path.startswith(name) for path in written) for name in DERIVED)
    complain(run, images.run_all(random.Random(f"{seed()} few").sample(range(1 << 30), FEW_IMAGES)))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_flushed_messages_survive_a_power_cut_of_a_node_with_a_pool(tmp_path: Path, scratch: Path) -> None:
    """With the transient store pool only the flush process writes the log, and what is in the pool is gone."""
    run = record_run(tmp_path / "pooled", seed(), scale=0.2, **POOLED)
    assert any(event.get("path") == "commitmq/transient_pool.json" for event in Record(run.folder / "record").events)
    found = Images(run, scratch).run_all(range(POOLED_IMAGES))
    complain(run, found)
    assert found.acks > 1_000, "too little was acknowledged to show anything"


def test_a_kill_at_any_moment_loses_nothing_at_all(run: Run, scratch: Path) -> None:
    """The same record with the page cache intact: then acks of ``memory`` are held to."""
    images = Images(run, scratch)
    for moment, disk in images.record.disks(images.looks()[::15]):
        folder = scratch / f"cached-{moment}"
        disk.write_cached(folder)
        recovered = Recovered(folder, config_of(run.settings))
        images.check_killed(recovered, moment)
        shutil.rmtree(folder)


def test_a_real_node_starts_on_what_a_power_cut_left(run: Run, tmp_path: Path) -> None:
    images = Images(run, tmp_path)
    chance = random.Random(len(images.record.events))
    for number in range(REAL_STARTS):
        moment = images.moment_of(chance.randrange(1 << 30))
        _, disk = next(images.record.disks([moment]))
        store = tmp_path / f"real-{number}" / "store"
        disk.write_image(store, chance)
        after_a_reboot(StoreLayout(store))
        node = Node(store, *(f"{name}={str(value).lower()}" for name, value in run.settings.items()))
        try:
            ended = node.start()
            assert ended.returncode == 0, ended.stderr + node.log_tail()
            before = images.record.events[moment]["t"]
            wanted = {
                (topic, queue, offset): name
                for time, ack, name, topic, queue, offset, _ in run.said.acked
                if time < before and ack == "flushed" and topic in ("orders", "audit")
            }
            read: set[tuple[str, int, int]] = set()
            if wanted:
                with Reader(sorted({topic for topic, _, _ in wanted}), node=node.address) as consumer:
                    while batch := consumer.poll(0.5):
                        read |= {(one.topic, one.queue_id, one.queue_offset) for one in batch}
            assert wanted.keys() <= read
            ended = node.stop()
            assert ended.returncode == 0, ended.stderr
        finally:
            node.end()
        check(Recovered(store, config_of(run.settings)), run.said, before)


@pytest.mark.skipif("COMMITMQ_POWER_RUN" not in os.environ, reason="repeats one image of a run that was kept")
def test_again(scratch: Path) -> None:
    run = Run.load(Path(os.environ["COMMITMQ_POWER_RUN"]))
    keep = Path(os.environ["COMMITMQ_POWER_RUN"]) / "kept"
    complain(run, Images(run, scratch).run_all([int(os.environ["COMMITMQ_POWER_IMAGE"])], keep=keep))


# ---------------------------------------------------------------- many


def many(number: int, count: int, folder: Path, scratch: Path, **settings: Any) -> tuple[Run, Found]:
    """One run and its images; ``number`` seeds it."""
    run = record_run(folder, number, **settings)
    return run, Images(run, scratch).run_all(range(count))


def _many(arguments: tuple[int, int, str, str, dict[str, Any]]) -> tuple[str, Found]:
    logging.getLogger("commitmq").setLevel(logging.CRITICAL)
    number, count, folder, scratch, settings = arguments
    run, found = many(number, count, Path(folder), Path(scratch), **settings)
    return str(run.folder), found


@pytest.mark.long
@pytest.mark.timeout(2_400)
def test_thousands_of_power_cuts(tmp_path: Path, scratch: Path) -> None:
    first = seed()
    modes: list[dict[str, Any]] = [
        {},
        {"commit_log.flush_mode": "async"},
        {"commit_log.preallocate_segments": 1},
        EXPIRING,
        POOLED,
        {**POOLED, "commit_log.flush_mode": "async"},
    ]
    work = [
        (first + number, SLOW_IMAGES // SLOW_RUNS + 1, str(tmp_path / f"run-{number}"), f"{scratch}/{number}", mode)
        for number in range(SLOW_RUNS)
        for mode in [modes[number % len(modes)]]
    ]
    failed: list[str] = []
    total = Found()
    spawn: Callable[..., Any] = multiprocessing.get_context("spawn").Pool
    with spawn(2) as pool:
        for folder, found in pool.imap_unordered(_many, work):
            total += found
            failed += [f"{folder} image {number}: {text}" for number, text in found.failures.items()]
            if not found.failures:
                shutil.rmtree(folder)
    assert not failed, f"{len(failed)} of {total.images} images failed:\n" + "\n".join(failed[:30])
    assert total.images >= SLOW_IMAGES
    print(f"images={total.images} recoveries_cut_again={total.again} acks_checked={total.acks}")  # noqa: T201
