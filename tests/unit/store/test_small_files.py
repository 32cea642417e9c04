"""Goal: checkpoint, abort and lock are RocketMQ's bytes, and a second process is refused by name of the first's pid.

Method: the files' bytes are compared with the specification's, and a second process tries to take the lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import StoreError, StoreLockedError
from commitmq.store.access import StoreLock, lock_holder
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.recovery import abort_file

int64 = st.integers(-(2**63), 2**63 - 1)


@given(st.builds(Checkpoint, int64, int64, int64, int64, int64))
def test_checkpoint_round_trip(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    checkpoint.save(path)
    assert path.stat().st_size == 4096
    assert Checkpoint.load(path) == checkpoint
    Checkpoint(1).save(path)
    assert Checkpoint.load(path) == Checkpoint(1)


def test_checkpoint_bytes_and_what_follows_them(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    data = b"".join(number.to_bytes(8) for number in (1, 2, 3, 4, 5)) + b"unknown"
    path.write_bytes(data.ljust(4096, b"\0"))
    checkpoint = Checkpoint.load(path)
    checkpoint.logics_msg_timestamp = 9
    checkpoint.save(path)
    assert path.read_bytes() == (data[:8] + (9).to_bytes(8) + data[16:]).ljust(4096, b"\0")


def test_checkpoints_that_are_not_there_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert Checkpoint.load(path) == Checkpoint()
    path.write_bytes(b"")
    assert Checkpoint.load(path) == Checkpoint()
    path.write_bytes(bytes(39))
    with pytest.raises(StoreError) as caught:
        Checkpoint.load(path)
    assert caught.value.path == path


def test_min_timestamps() -> None:
    assert Checkpoint(10_000, 8_000, 4_000).min_timestamp == 5_000
    assert Checkpoint(10_000, 8_000, 4_000).min_timestamp_index == 4_000
    assert Checkpoint(2_000, 8_000).min_timestamp == 0


def test_abort_file(tmp_path: Path) -> None:
    path = tmp_path / "abort"
    abort_file.create(path, 123)
    assert path.read_bytes() == b"123"
    assert (tmp_path / "abort.bak").read_bytes() == b""
    assert abort_file.exists(path)
    assert abort_file.read_pid(path) == 123
    abort_file.create(path, 4567)
    assert path.read_bytes() == b"4567"
    assert (tmp_path / "abort.bak").read_bytes() == b"123"
    abort_file.remove(path)
    assert not abort_file.exists(path)
    assert abort_file.read_pid(path) is None
    abort_file.remove(path)
    path.touch()
    assert abort_file.read_pid(path) == -1, "somebody was here, who it was is not known"


HOLD = """
import sys
from pathlib import Path
from commitmq.store.access import StoreLock
lock = StoreLock(Path(sys.argv[1])); lock.acquire()
print("held", flush=True); sys.stdin.read()
"""


def test_a_second_process_is_refused_by_pid(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert path.read_bytes() == b"lock"
        assert lock_holder(path) == holder.pid
        with pytest.raises(StoreLockedError, match=f"process {holder.pid}") as caught:
            StoreLock(path).acquire()
        assert (caught.value.pid, caught.value.path) == (holder.pid, path)
        holder.kill()
        holder.wait(10)
    assert lock_holder(path) == 0
    with StoreLock(path) as lock:
        lock.acquire()
        with pytest.raises(StoreLockedError) as own:
            StoreLock(path).acquire()
        assert own.value.pid == os.getpid()
        # The refused try must not have dropped the lock: closing a descriptor of the file would.
        code = (
            "import sys; from pathlib import Path; from commitmq.store.access import lock_holder\n"
            "print(lock_holder(Path(sys.argv[1])))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout == f"{os.getpid()}\n"
    with StoreLock(path):
        pass
    assert lock_holder(tmp_path / "absent") == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot open the lock file"):
        StoreLock(tmp_path / "absent" / "lock").acquire()
