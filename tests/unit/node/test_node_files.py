"""Goal: run/ is emptied and closed to others, epochs never repeat, and ports follow the configuration."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from commitmq import node_files
from commitmq.admin_socket import is_loopback
from commitmq.config import load
from commitmq.crew import configured_port, port_of, tcp_port
from commitmq.errors import StoreError
from commitmq.roster import start_order
from commitmq.store.layout import StoreLayout


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
    assert list(layout.run.iterdir()) == []
    assert stat.S_IMODE(layout.run.stat().st_mode) == 0o700
    assert (tmp_path / "outside" / "kept").exists()


def test_a_long_path_gets_a_socket_folder_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layout = StoreLayout(tmp_path / ("long" * 20))
    node_files.make_folders(layout)
    node_files.empty_run_folder(layout)
    assert layout.sockets.parent == tmp_path
    assert stat.S_IMODE(layout.sockets.stat().st_mode) == 0o700
    (layout.sockets / "writer.bell").touch()
    node_files.empty_run_folder(layout)
    assert list(layout.sockets.iterdir()) == []
    node_files.remove_socket_folder(layout)
    assert not layout.sockets.exists()
    layout.sockets.mkdir(mode=0o777)
    layout.sockets.chmod(0o777)
    with pytest.raises(StoreError, match="not ours alone"):
        node_files.empty_run_folder(layout)


def test_epochs_count_starts_and_never_repeat(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    node_files.make_folders(layout)
    assert [node_files.next_epoch(layout) for _ in range(3)] == [1, 2, 3]
    (layout.own / "epoch").write_text("x")
    with pytest.raises(StoreError, match="not a number"):
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


def test_ports_follow_the_admin_port_or_are_free_ones_kept() -> None:
    fixed = load(None, ["network.port=7310", "reader.count=2"])
    assert [configured_port(role, fixed) for role in ("admin", "writer", "coordinator", "reader-1", "flush")] == [
        7310, 7311, 7312, 7314, 0,
    ]  # fmt: skip
    free = load(None, ["network.port=0"])
    assert port_of("writer", free, {"writer": 4242}) == 4242
    assert port_of("writer", fixed, {"writer": 4242}) == 7311
    assert port_of("reader-0", free, {}) == 0
    assert tcp_port(["tcp://[::1]:81", "ipc:///x:9"]) == 81
    assert tcp_port(["ipc:///x:9"]) == 0


def test_recovery_starts_first_and_the_writer_last() -> None:
    order = list(start_order(load(None, ["reader.count=2"])))
    assert order == [
        "recovery", "coordinator", "dispatcher-consume_queue", "dispatcher-index", "reput", "flush", "allocate",
        "dispatcher-memory", "reader-0", "reader-1", "cleanup", "writer",
    ]  # fmt: skip
    assert "dispatcher-index" not in start_order(load(None, ["index.enable=false"]))
    assert "dispatcher-memory" not in start_order(load(None, ["memory.enable=false"]))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("*", False),
     ("eth0", False), ("::", False), ("10.0.0.1", False)],
)  # fmt: skip
def test_loopback_is_recognised_and_everything_else_is_the_world(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
