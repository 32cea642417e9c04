"""What befalls a machine while a node lives on it: its disk is full, its clock is wrong, its power goes.

The disk is a small file system of its own. The clock is wrong for the node's processes only (see power_shim). A power cut
kills every process of the node, puts a disk in the store's place that the cut may have left (see power_disk), and starts the
node on it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from power_disk import Record
from power_recorder import Recorder

from commitmq.store.layout import StoreLayout
from nodes import Node, environment
from rebooted import after_a_reboot

SHIM = Path(__file__).parent / "power_shim"
DISK_MIB = 256
JUMPS_S = (2, -2, 3_600, -3_600, 4 * 86_400, -4 * 86_400)
_FILLER = "filler"


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = DISK_MIB) -> Iterator[Path]:
    """An empty file system at ``folder``. Where mounting is not permitted the test is skipped, which CI forbids."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m,nr_inodes=65536", "commitmq-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        reason = f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}"
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def no_space(folder: Path) -> Iterator[None]:
    """The file system of ``folder`` has no free block meanwhile."""
    filler = folder / _FILLER
    try:
        with filler.open("wb") as file, contextlib.suppress(OSError):
            chunk = 1 << 20
            while chunk >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), chunk)
                except OSError:
                    chunk //= 2
        yield
    finally:
        filler.unlink()


def copy(store: Path, to: Path) -> None:
    """A copy that takes no more room: a queue's file is a few pages and megabytes of hole."""
    subprocess.run(["cp", "-a", "--sparse=always", f"{store}/.", str(to)], check=True)


class WrongClock:
    """A wall clock that tests may set wrong, of every process that is started with :attr:`environment`.

    The monotonic clock goes on as it is, as it does on a machine whose time is set. This process keeps the right time.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self._path = path
        with path.open("r+b") as file:
            self._off_ns = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    @property
    def environment(self) -> dict[str, str]:
        """Variables for ``Node.start`` or ``start_node``."""
        return {"PYTHONPATH": f"{SHIM}:{environment()['PYTHONPATH']}", "COMMITMQ_WRONG_CLOCK": str(self._path)}

    def set(self, seconds: float) -> None:
        """From now on the clock is ``seconds`` ahead of the right time, behind it where negative."""
        self._off_ns[0] = int(seconds * 1_000_000_000)

    def right(self) -> None:
        """From now on the clock is right."""
        self.set(0)


class Machine:
    """What the node ``node`` runs on. ``disk`` is its small file system, ``notes`` a folder elsewhere."""

    def __init__(self, node: Node, disk: Path, notes: Path, seed: int, *, recorded: bool) -> None:
        self._node, self._disk, self._notes = node, disk, notes
        self._chance = random.Random(f"machine-{seed}")
        self.clock = WrongClock(notes / "clock")
        self._ahead: list[tuple[float, float]] = []
        self._recorder: Recorder | None = None
        if recorded:
            node.store.mkdir()
            self._recorder = Recorder(node.store, notes / "record")
            self._recorder.prepare()

    def environment(self) -> dict[str, str]:
        """The variables with which the node's processes start."""
        found = self.clock.environment
        if self._recorder is not None:
            found |= {"COMMITMQ_POWER_STORE": self._recorder.store, "COMMITMQ_POWER_RECORD": self._recorder.record}
        return found

    def suffer(self) -> str:
        """One calamity for about a second; returns its name."""
        length_s = 0.5 + self._chance.random()
        if self._chance.random() < 0.4:
            with no_space(self._disk):
                time.sleep(length_s)
            return f"no space for {length_s:.1f} s"
        jump_s = self._chance.choice(JUMPS_S)
        from_s = time.time()
        self.clock.set(jump_s)
        time.sleep(length_s)
        self.clock.right()
        self._ahead.append((from_s, time.time()))
        return f"clock off by {jump_s} s for {length_s:.1f} s"

    def may_be_early(self, sent_s: float, came_s: float) -> bool:
        """Whether the clock was wrong at any time from ``sent_s`` to ``came_s``: what it read as due comes then."""
        return any(sent_s <= until_s and came_s >= from_s for from_s, until_s in self._ahead)

    def cut_power(self, **extra: str) -> None:
        """Cut the power, and start the node again on what is left; ``extra`` are variables beside :meth:`environment`."""
        recorder = self._recorder
        assert recorder is not None, "only a recorded machine can lose its power"
        self._node.pids()
        with recorder.alone():
            self._node.kill_all(known=True)
            recorder.look()
        record = Record(Path(recorder.record))
        assert not record.missed, record.missed
        image = self._notes / "image"
        for _, disk in record.disks([len(record.events) - 1]):
            disk.write_image(image, self._chance)
        log = self._node.store / "commitmq" / "node.log"
        (image / "commitmq").mkdir(exist_ok=True)
        shutil.copy(log, image / "commitmq" / "node.log")  # which is not recorded
        for path in self._node.store.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        copy(image, self._node.store)
        shutil.rmtree(image)
        after_a_reboot(StoreLayout(self._node.store))
        self._recorder = None  # a life loses its power once
        ended = self._node.start(**self.environment(), **extra)
        assert ended.returncode == 0, ended.stderr
