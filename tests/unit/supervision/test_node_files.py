"""Goal: run/ is emptied and closed to others, epochs never repeat, and ports follow the configuration.

Method: real folders with files, sockets and links of every kind in them.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.config import load
from commitmq.errors import StoreError
from commitmq.security.start_rule import is_loopback
from commitmq.store.layout import StoreLayout
from commitmq.supervision import node_files
from commitmq.supervision.roster import start_order


def test_run_is_emptied_and_open_to_nobody_else(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path / "store")
    node_files.make_folders(layout)
    (layout.run / "segment-being-made").write_bytes(b"x")
    (layout.run / "folder").mkdir()
    (layout.run / "folder" / "file").touch()
    os.symlink(tmp_path / "outside", layout.run / "link")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    layout.run.chmod(0o755)
    node_files.empty_run_folder(layout)
    assert {path.name for path in layout.run.iterdir()} <= {"sockets"}
    assert stat.S_IMODE(layout.run.stat().st_mode) == 0o700
    assert (tmp_path / "outside" / "kept").exists()


def test_a_long_path_gets_a_socket_folder_that_nobody_could_make_before_us(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path / ("long" * 20))
    node_files.make_folders(layout)
    node_files.empty_run_folder(layout)
    first = layout.sockets
    assert first.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    (first / "writer.bell").touch()
    node_files.empty_run_folder(layout)
    assert layout.sockets == first, "a supervisor that is started again is found at the same addresses"
    assert list(first.iterdir()) == []
    first.chmod(0o755)
    node_files.empty_run_folder(layout)
    second = layout.sockets
    assert second != first, "a folder that is not ours alone is never used"
    node_files.clear_run_folder(layout)
    assert not second.exists()
    assert list(layout.run.iterdir()) == []
    first.rmdir()
    node_files.empty_run_folder(layout)
    assert layout.sockets == second, "clients that outlive a stop look there"
    node_files.clear_run_folder(layout)


@pytest.mark.parametrize("call", ["open", "sync", "replace", "sync_folder"])
def test_a_record_of_the_socket_folder_that_cannot_be_written_ends_the_start_and_the_next_one_is_right(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = StoreLayout(tmp_path / ("long" * 20))
    node_files.make_folders(layout)
    with monkeypatch.context() as armed:
        armed.setattr(failpoints, "_points", failpoints.parse(f"disk.{call}.socket_record:before=errno:EIO"))
        armed.setattr(failpoints, "ACTIVE", True)
        with pytest.raises(StoreError, match="cannot make a folder for Unix sockets"):
            node_files.empty_run_folder(layout)
    node_files.empty_run_folder(layout)
    assert layout.sockets.is_dir()
    assert layout.socket_record.read_bytes()
    node_files.clear_run_folder(layout)


def test_a_copy_of_a_store_leaves_the_sockets_of_the_other_alone(tmp_path: Path) -> None:
    layout, copy = StoreLayout(tmp_path / ("long" * 20)), StoreLayout(tmp_path / ("copy" * 20))
    node_files.make_folders(layout)
    node_files.empty_run_folder(layout)
    (layout.sockets / "writer.bell").touch()
    shutil.copytree(layout.root, copy.root)
    assert copy.sockets == layout.sockets
    node_files.empty_run_folder(copy)
    assert copy.sockets != layout.sockets
    assert copy.sockets.is_dir()
    node_files.clear_run_folder(copy)
    assert [path.name for path in layout.sockets.iterdir()] == ["writer.bell"]
    node_files.clear_run_folder(layout)


@pytest.mark.parametrize("kind", ["link", "open"])
def test_what_is_not_our_socket_folder_is_never_emptied(tmp_path: Path, kind: str) -> None:
    layout = StoreLayout(tmp_path / ("long" * 20))
    node_files.make_folders(layout)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "kept").touch()
    named = tmp_path / "link" if kind == "link" else other
    if kind == "link":
        named.symlink_to(other)
    else:
        other.chmod(0o755)
    layout.sockets_note.write_text(str(named))
    node_files.clear_run_folder(layout)
    assert (other / "kept").exists()


def test_a_lock_that_is_held_stays_when_the_rest_is_cleared(tmp_path: Path) -> None:
    """The lock of a worker that could not be ended is all that tells the next node of it."""
    layout = StoreLayout(tmp_path / "store")
    node_files.make_folders(layout)
    program = "import sys; from commitmq.workers.runtime.context import *; from pathlib import Path; "
    program += "fd = acquire_role_lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(layout.role_lock("writer"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        layout.role_lock("reader-0").touch()
        node_files.clear_run_folder(layout)
        assert [path.name for path in layout.run.iterdir()] == ["writer.lock"]
        assert holder.stdin is not None
        holder.stdin.close()
    node_files.clear_run_folder(layout)
    assert not list(layout.run.iterdir())


def test_epochs_count_starts_and_never_repeat(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    node_files.make_folders(layout)
    assert [node_files.next_epoch(layout) for _ in range(3)] == [1, 2, 3]
    (layout.own / "epoch").write_text("x")
    with pytest.raises(StoreError, match="no such number"):
        node_files.next_epoch(layout)


def test_a_store_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot use this folder"):
        node_files.make_folders(StoreLayout(tmp_path / "file" / "store"))


def test_a_broken_node_file_reads_as_none(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    node_files.make_folders(layout)
    assert node_files.read_node_file(layout) == {}
    layout.node_file.write_bytes(b"{")
    assert node_files.read_node_file(layout) == {}


def test_recovery_starts_first_and_what_appends_through_the_writer_last() -> None:
    order = list(start_order(load(None, ["reader.count=2"])))
    assert order == [
        "recovery", "coordinator", "dispatcher-consume_queue", "dispatcher-index", "reput", "flush", "allocate",
        "dispatcher-memory", "reader-0", "reader-1", "cleanup", "writer",
        "schedule", "timer", "pop", "transaction",
    ]  # fmt: skip
    assert "dispatcher-index" not in start_order(load(None, ["index.enable=false"]))
    assert "dispatcher-memory" not in start_order(load(None, ["memory.enable=false"]))
    assert "schedule" not in start_order(load(None, ["schedule.enable=false"]))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("*", False),
     ("eth0", False), ("::", False), ("10.0.0.1", False)],
)  # fmt: skip
def test_loopback_is_recognised_and_everything_else_is_the_world(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
