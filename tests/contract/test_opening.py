"""Goal: ``commitmq start --store DIR`` is enough for every store, says the little that matters, and refuses at once and as a
whole what cannot be.

Method: the real command on stores of RocketMQ, on new ones, and on ones whose files or ``store.json`` were changed; what a
refused start may have touched is told by every name, size, time and byte of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accounts import obeying
from commitmq import Admin, Producer
from commitmq.errors import ProtocolError
from commitmq.store.store_file import StoreFile, store_id
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from nodes import DEADLINE_S, Node, commitmq, environment, eventually, free_ports, started

GoldenCopy = Callable[[str], GoldenStore]
MIB = 1 << 20


def everything(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Size, time of change and content of each file below ``folder``; a folder counts by its name."""
    return {
        str(path.relative_to(folder)): (found.st_size, found.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        if path.is_file()
        else (0, 0, "")
        for path in sorted(folder.rglob("*"))
        if (found := path.stat())
    }


def disk_bytes(folder: Path) -> int:
    """Of a node that runs: a file may go between the listing and the look."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def start(store: Path, *more: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return commitmq("start", "--background", "--store", str(store), "--set", "network.port=0", *more, **extra)


# ---------------------------------------------------------------- sizes


def test_a_new_store_of_a_laptop_is_small_keeps_its_sizes_and_has_a_name(tmp_path: Path) -> None:
    node = Node.bare(tmp_path / "store", "network.port=0", "memory.budget_bytes=64MiB")
    with started(node):
        with Producer(node.address) as producer:
            producer.send("t", b"one")
        assert disk_bytes(node.store) < 160 * MIB
        with Admin(node.address) as admin:
            name = admin.status()["node"]["store_id"]
        metadata = commitmq("status", "--store", str(node.store), "--json", COMMITMQ_NODE="tcp://192.0.2.1:1")
        assert json.loads(metadata.stdout)["node"]["store_id"] == name, "--store goes over COMMITMQ_NODE"
        ended = commitmq("stop", COMMITMQ_NODE=node.address)
        assert (ended.returncode, ended.stdout) == (0, "node stopped\n"), ended.stderr
    kept = StoreFile.load(node.store / "commitmq" / "store.json")
    assert kept is not None
    assert kept.sizes["commit_log.segment_bytes"] == 64 * MIB
    assert store_id(node.store) == name
    shutil.copytree(node.store, tmp_path / "copy")
    assert store_id(tmp_path / "copy") == name, "a copy has its messages' store's name"
    # Another profile is another wish, and no contradiction.
    again = Node.bare(node.store, "network.port=0", "profile=server", "memory.budget_bytes=64MiB")
    with started(again), Admin(again.address) as admin:
        assert admin.status()["node"]["store_id"] == name
        assert {path.stat().st_size for path in (node.store / "commitlog").iterdir()} == {64 * MIB}
    assert (node.store / "commitmq" / "store.json").read_text().count(name) == 1


def test_all_sizes_that_contradict_are_refused_in_one_sentence_and_nothing_is_touched(golden_copy: GoldenCopy) -> None:
    store = golden_copy("clean").root
    before = everything(store)
    wrong = {
        "commit_log.segment_bytes": "64MiB",
        "consume_queue.file_bytes": "2000",
        "index.hash_slots": "300",
        "index.max_items": "480",  # with these the files would have the same length
    }
    for mode in (["--background"], []):
        sets = [part for key, value in wrong.items() for part in ("--set", f"{key}={value}")]
        ended = commitmq("start", "--store", str(store), *mode, *sets)
        assert ended.returncode == 74
        assert ended.stdout == ""
        (line,) = ended.stderr.splitlines()
        for part in (
            "segment_bytes=131072",
            "file_bytes=1000",
            "hash_slots=200",
            "max_items=500",
            "Nothing was changed",
        ):
            assert part in line
        for part in ("segment_bytes=67108864", "file_bytes=2000", "hash_slots=300", "max_items=480"):
            assert part in line
    assert everything(store) == before


def test_a_configuration_file_may_list_defaults(golden_copy: GoldenCopy) -> None:
    """config/node.toml has every key: using it is no claim about a store."""
    store = golden_copy("crash").root
    node_toml = Path(__file__).resolve().parents[2] / "config" / "node.toml"
    ended = start(store, "--config", str(node_toml))
    try:
        assert ended.returncode == 0, ended.stderr
        assert "sizes are taken from the files (commit_log.segment_bytes=131072" in ended.stderr
    finally:
        assert commitmq("stop", "--store", str(store)).returncode == 0


def test_a_start_that_fails_writes_no_sizes_that_the_next_one_would_believe(golden_copy: GoldenCopy) -> None:
    store = golden_copy("clean").root
    ended = start(store, COMMITMQ_FAILPOINTS="recovery.after_scan=errno:EIO")
    assert ended.returncode != 0
    assert not (store / "commitmq" / "store.json").exists()
    node = Node.bare(store, "network.port=0")
    with started(node):
        assert (store / "commitmq" / "store.json").exists()


def test_a_damaged_store_json_is_told_and_made_anew(golden_copy: GoldenCopy) -> None:
    store = golden_copy("clean").root
    with started(Node.bare(store, "network.port=0")):
        pass
    path = store / "commitmq" / "store.json"
    name, text = store_id(store), path.read_text()
    path.write_text(text.replace("131072", "131073"))
    ended = start(store)
    try:
        assert ended.returncode == 0, ended.stderr
        assert "store.json is damaged (its checksum does not match): sizes are taken from the files" in ended.stderr
        assert store_id(store) not in (None, name)
        assert '"commit_log.segment_bytes": 131072' in path.read_text()
    finally:
        assert commitmq("stop", "--store", str(store)).returncode == 0


def test_a_log_cut_short_is_refused_by_what_the_store_remembers(golden_copy: GoldenCopy) -> None:
    """Goal: a lone segment of another length is not taken for a store of another segment size."""
    store = golden_copy("clean").root
    with started(Node.bare(store, "network.port=0")):
        pass
    for segment in (store / "commitlog").iterdir():
        os.truncate(segment, 65536)
    before = everything(store)
    ended = start(store)
    assert ended.returncode == 74
    assert "the store remembers commit_log.segment_bytes=131072, but" in ended.stderr
    assert "has 65536 bytes" in ended.stderr
    assert everything(store) == before


@pytest.mark.slow
def test_index_files_that_differ_leave_a_node_that_works_without_an_index_and_says_so(golden_copy: GoldenCopy) -> None:
    store = golden_copy("clean").root
    oldest = min((store / "index").iterdir())
    shutil.copyfile(oldest, oldest.with_name("20200101000000000"))
    os.truncate(oldest.with_name("20200101000000000"), 8_000)
    before = everything(store / "index")
    ended = start(store)
    try:
        assert ended.returncode == 0, ended.stderr
        assert "the node runs without an index: the files in" in ended.stderr
        status = commitmq("status", "--store", str(store))
        assert "the node runs without an index: the files in" in status.stdout
        assert "dispatcher-index" not in status.stdout
        with Admin(Node.bare(store).address) as admin:
            with pytest.raises(ProtocolError, match="keeps no index"):
                admin.query("GoldenNormal", key="k")
            assert admin.topics()
    finally:
        ended = commitmq("stop", "--store", str(store))
    assert ended.returncode == 0, ended.stderr
    assert everything(store / "index") == before
    kept = StoreFile.load(store / "commitmq" / "store.json")
    assert kept is not None
    assert "index.hash_slots" not in kept.sizes
    shutil.rmtree(store / "index")
    with started(Node.bare(store, "network.port=0")) as node, Admin(node.address) as admin:
        eventually(lambda: admin.query("GoldenNormal", key="k").complete, "the messages are indexed again")


# ---------------------------------------------------------------- the disk


def test_a_disk_that_has_no_room_for_a_segment_is_told_at_the_start_and_in_status(tmp_path: Path) -> None:
    store = tmp_path / "store"
    # A failpoint: a segment too large for the disk would take all of it for a moment, from everybody else's tests too.
    ended = start(store, "--profile", "dev", COMMITMQ_FAILPOINTS="disk.reserve.segment:before=errno:ENOSPC")
    try:
        assert ended.returncode == 0, ended.stderr
        assert "WARNING: sends are refused: a segment of the log needs 16.0 MiB" in ended.stderr
        status = commitmq("status", "--store", str(store))
        assert "sends are refused: a segment of the log needs 16.0 MiB" in status.stdout
        assert "--profile dev" in status.stdout
    finally:
        assert commitmq("stop", "--store", str(store)).returncode == 0


# ---------------------------------------------------------------- ports and hosts


def test_nodes_share_a_machine_by_their_blocks_of_ports(tmp_path: Path) -> None:
    base = free_ports(80)
    first = Node.bare(tmp_path / "a" / "store", f"network.port={base}", "profile=dev")
    second = Node.bare(
        tmp_path / "b" / "store", f"network.port={base + 8}", "profile=dev", "network.advertised_host=localhost"
    )
    with started(first), started(second):
        assert sorted(first._node_file()["ports"].values()) == list(range(base, base + 8))
        with Admin(second.address) as admin:
            status = admin.status()
            assert {row["role"] for row in status["processes"] if row["state"] == "ready"} >= {"writer", "reader-0"}
        with Producer(second.address) as producer:
            assert producer.send("t", b"by the advertised host").queue_offset == 0
            told = producer._lanes.writer.lane.directory.metadata(timeout_s=5).raw["endpoints"]
        assert told["writer"][0] == f"tcp://localhost:{base + 9}"
        assert told["reader"][0][0] == f"tcp://localhost:{base + 15}"
        third = commitmq("start", "--background", "--store", str(tmp_path / "c"), "--set", f"network.port={base + 5}")
        assert third.returncode == 72
        pid = first.pids()["dispatcher-index"]
        assert (
            f"port {base + 5} is in use by process {pid} (cmq-dispatcher-), and this node's admin socket"
            in third.stderr
        )
        assert "(network.port itself;" in third.stderr
        assert f"some of the ports {base + 5} to {base + 42}" in third.stderr


def test_a_neighbours_port_in_use_is_named_with_who_needs_it(tmp_path: Path) -> None:
    base = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 7))
        taken.listen()
        ended = commitmq("start", "--background", "--store", str(tmp_path / "store"), "--set", f"network.port={base}")
    assert ended.returncode == 72
    assert f"port {base + 7} is in use by process {os.getpid()} (" in ended.stderr
    assert "this node's reader-0 needs it (network.port + 7;" in ended.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("background", [True, False])
def test_a_start_that_gets_no_port_leaves_a_new_folder_as_it_is(tmp_path: Path, background: bool) -> None:
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", encoding="ascii") as file:
        if int(file.read()) <= 80:
            pytest.skip("here every account may listen on port 80")
    words = obeying()
    if words:
        words[-1] += ",-net_bind_service"
    words += [sys.executable, "-m", "commitmq.cli.main", "start", *(["--background"] if background else [])]
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").write_text("something else")
    ended = subprocess.run(
        [*words, "--store", str(tmp_path / "store"), "--set", "network.port=80"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == CliExit.START_FAILED
    assert ended.stderr == "commitmq: cannot listen on tcp://127.0.0.1:80: Permission denied\n"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["mine"]


def test_a_profile_that_does_not_count_is_told(tmp_path: Path) -> None:
    node = Node.bare(tmp_path / "store", "network.port=0", "profile=dev")
    with started(node):
        pass
    words = ("start", "--background", "--store", str(node.store), "--set", "network.port=0")
    for profile, told in (
        ("small", "the store has its sizes already; those of the profile small are not used"),
        ("dev", ""),
    ):
        again = commitmq(*words, "--profile", profile)
        assert commitmq("stop", "--store", str(node.store)).returncode == 0
        assert (again.returncode, again.stderr.strip()) == (0, told)


# ---------------------------------------------------------------- the foreground


@contextlib.contextmanager
def foreground(store: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    words = [
        sys.executable,
        "-m",
        "commitmq.cli.main",
        "start",
        "--store",
        str(store),
        "--set",
        "network.port=0",
        *more,
    ]
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE_S)


def read_until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("node is ready at"):
            return lines
    raise AssertionError(f"it ended: {lines}")


@pytest.mark.parametrize("more", [(), ("--verbose",)])
def test_a_node_in_the_foreground_says_a_few_lines_and_logs_elsewhere(tmp_path: Path, more: tuple[str, ...]) -> None:
    store = tmp_path / "store"
    with foreground(store, "--profile", "dev", *more) as process:
        lines = read_until_ready(process)
        assert not [line for line in lines if line.startswith("20")], "no line of the log"
        assert len(lines) <= 5, "a slow machine is told what takes so long"
        assert f"commitmq stop --store {store}" in lines[-2], "how to stop it"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert out == "node stopped; everything written is flushed and dispatched\n"
        log = store / "commitmq" / "node.log"
        if more:
            assert "supervisor node is ready" in errors
            assert not log.exists()
        else:
            assert errors == ""
            assert "supervisor node is ready" in log.read_text()
            assert str(log) in lines[0]


def test_a_start_in_the_foreground_that_fails_says_only_that(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with started(Node(store)) as node:
        with foreground(store) as process:
            out, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 73
        assert errors == f"commitmq: the store is in use by process {node.supervisor_pid} [{store / 'lock'}]\n"
        assert "flushed" not in out
