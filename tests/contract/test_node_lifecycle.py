"""Goal: a node starts, heals from the death of any of its processes, and stops, and says truly how that went.

Method: the real command in real processes on a temporary store. Where a worker must misbehave in a way that real ones
do not (refuse to stop, crash at every start), the real supervisor runs over the do-nothing workers of ``lifecycle/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Producer
from commitmq.semantics import movers
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.node_files import node_life
from nodes import DEADLINE_S, LIFECYCLE, SEGMENT_BYTES, WORKERS, Node, alive, commitmq, environment, eventually

ROLES = WORKERS


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "store")
    yield made
    made.end()


@pytest.fixture
def running(node: Node) -> Node:
    ended = node.start()
    assert ended.returncode == 0, ended.stderr
    return node


# ---------------------------------------------------------------- start, status, stop


def test_start_status_and_stop(running: Node) -> None:
    report = running.report()
    assert report["node"]["state"] == "ready"
    assert {row["role"] for row in report["processes"]} == {
        "keeper",
        "supervisor",
        "forkserver",
        "discovery",
        "recovery",
        *ROLES,
        *movers.ROLES,
    }
    states = dict.fromkeys(("discovery", "recovery"), "done") | dict.fromkeys(movers.ROLES, "idle")
    for row in report["processes"]:
        assert row["state"] == states.get(row["role"], "ready"), row
        assert row["restarts"] == 0
    assert (running.store / "abort").exists()
    pids = running.pids()

    ended = running.stop()

    assert ended.returncode == 0, ended.stderr + running.log()
    assert not [role for role, pid in pids.items() if alive(pid)]
    assert not (running.store / "abort").exists()
    assert not (running.store / "run" / "node.json").exists()
    assert commitmq("status", "--store", str(running.store)).returncode == CliExit.NODE_UNAVAILABLE
    assert running.stop().returncode == CliExit.NODE_UNAVAILABLE


def test_stop_by_address_waits_for_the_processes_of_this_machine(running: Node) -> None:
    pids = running.pids()
    ended = commitmq("stop", "--node", running.report()["node"]["admin"][0])
    assert ended.returncode == 0, ended.stderr
    assert not [role for role, pid in pids.items() if alive(pid)]


def test_a_second_node_is_refused_by_the_pid_of_the_first(running: Node) -> None:
    before = running.pids()
    ended = commitmq(*running.arguments(), "--background")
    assert ended.returncode == CliExit.STORE_LOCKED
    assert str(before["supervisor"]) in ended.stderr
    assert running.pids() == before


def test_a_store_of_another_segment_size_is_refused_with_both_numbers(node: Node) -> None:
    segment = node.store / "commitlog" / "00000000000000000000"
    segment.parent.mkdir(parents=True)
    segment.write_bytes(bytes(2 * SEGMENT_BYTES))
    ended = node.start()
    assert ended.returncode == CliExit.STORE_UNUSABLE
    assert str(SEGMENT_BYTES) in ended.stderr
    assert str(2 * SEGMENT_BYTES) in ended.stderr
    assert not (node.store / "abort").exists(), "a refused store must be left as it was found"
    assert segment.stat().st_size == 2 * SEGMENT_BYTES


def test_a_store_of_another_queue_file_size_is_refused_with_both_numbers(node: Node) -> None:
    assert node.start("consume_queue.file_bytes=4000").returncode == 0
    with Producer(node.address) as producer:
        producer.send("orders", b"body", queue=0)
    assert node.stop().returncode == 0
    ended = node.start("consume_queue.file_bytes=8000")
    assert ended.returncode == CliExit.STORE_UNUSABLE
    assert "4000" in ended.stderr
    assert "8000" in ended.stderr
    assert not (node.store / "abort").exists(), "a refused store must be left as it was found"
    assert node.start("consume_queue.file_bytes=4000").returncode == 0
    assert node.stop().returncode == 0


def test_a_wrong_key_is_named(node: Node) -> None:
    ended = node.start("commit_log.segmnt_bytes=4096")
    assert ended.returncode == CliExit.CONFIG_ERROR
    assert "segmnt_bytes" in ended.stderr


def test_a_taken_port_is_named(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = node.start(f"network.port={port}")
    assert ended.returncode == CliExit.ADDRESS_IN_USE
    assert str(port) in ended.stderr


def test_a_node_open_to_the_network_says_so(node: Node) -> None:
    ended = node.start("network.host=0.0.0.0", "security.insecure_listeners=native")
    assert ended.returncode == 0, ended.stderr
    assert "WITHOUT AUTHENTICATION" in ended.stderr
    assert "WITHOUT AUTHENTICATION" in node.log()
    assert node.report()["node"]["insecure_listeners"] == ["native"]
    assert "INSECURE: the listener native" in commitmq("status", "--store", str(node.store)).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_node_in_the_foreground_in_order(node: Node, number: signal.Signals) -> None:
    keeper = node.start_in_foreground()
    pids = node.pids()
    keeper.send_signal(number)
    assert keeper.wait(DEADLINE_S) == 0
    assert not [role for role, pid in pids.items() if alive(pid)]
    assert not (node.store / "abort").exists()
    assert "stopped; everything written is flushed" in node.foreground_log.read_text()


def test_a_signal_to_every_process_at_once_still_stops_in_order(node: Node) -> None:
    # What a service manager does: SIGTERM to the whole control group.
    keeper = node.start_in_foreground()
    for pid in node.pids().values():
        with contextlib.suppress(ProcessLookupError):  # the first signal already stops the node
            os.kill(pid, signal.SIGTERM)
    assert keeper.wait(DEADLINE_S) == 0
    assert not (node.store / "abort").exists()


def test_an_idle_supervisor_wakes_at_most_five_times_a_second(running: Node) -> None:
    def switches() -> int:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("voluntary_ctxt_switches:")[1].split()[0])

    pid = running.pids()["supervisor"]
    time.sleep(0.5)
    before, started = switches(), time.monotonic()
    time.sleep(2)
    a_second = (switches() - before) / (time.monotonic() - started)
    assert 1 <= a_second <= 6.5  # five, and what the CPU samples' file reads may add


# ---------------------------------------------------------------- deaths


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_is_started_again_and_the_others_go_on(running: Node) -> None:
    for role in ROLES:
        before = running.pids()
        endpoints = running.row(role).get("endpoints")
        os.kill(before[role], signal.SIGKILL)
        eventually(lambda role=role, pid=before[role]: running.healed(role, pid), f"{role} is back")  # type: ignore[misc]
        after = running.pids()
        assert {name: pid for name, pid in after.items() if name != role} == {
            name: pid for name, pid in before.items() if name != role
        }
        row = running.row(role)
        assert row["restarts"] == 1
        assert row["last_exit"] == "killed by SIGKILL"
        assert row["endpoints"] == endpoints, "clients must find it at the same address"
    assert running.stop().returncode == 0


def test_a_killed_forkserver_leaves_the_workers_alone_and_serves_again(running: Node) -> None:
    before = running.pids()
    os.kill(before["forkserver"], signal.SIGKILL)
    eventually(lambda: running.healed("forkserver", before["forkserver"]), "the forkserver is back")
    after = running.pids()
    assert {role: after[role] for role in ROLES} == {role: before[role] for role in ROLES}
    # Workers of a dead forkserver can still be waited for, and the new one forks their successors.
    os.kill(before["reput"], signal.SIGKILL)
    eventually(lambda: running.healed("reput", before["reput"]), "reput is back")
    assert not alive(before["reput"])
    assert running.stop().returncode == 0


def test_a_worker_killed_together_with_the_forkserver_comes_back(running: Node) -> None:
    before = running.pids()
    os.kill(before["forkserver"], signal.SIGKILL)
    os.kill(before["writer"], signal.SIGKILL)
    eventually(lambda: running.healed("writer", before["writer"]), "the writer is back")
    assert running.stop().returncode == 0


def test_a_killed_supervisor_is_started_again_at_the_same_addresses(running: Node) -> None:
    before = running.report()
    pids = running.pids()
    os.kill(pids["supervisor"], signal.SIGKILL)
    eventually(lambda: running.healed("supervisor", pids["supervisor"]), "the supervisor is back")
    after = running.report()
    assert after["node"]["admin"] == before["node"]["admin"]
    assert after["node"]["epoch"] == before["node"]["epoch"] + 1
    assert after["node"]["token"] != before["node"]["token"]
    for old, new in zip(before["processes"], after["processes"], strict=True):
        assert old.get("endpoints") == new.get("endpoints")
    assert running.pids()["keeper"] == pids["keeper"]
    assert not [role for role in ROLES if alive(pids[role])]
    assert running.stop().returncode == 0


@pytest.mark.slow
def test_a_background_node_outlives_its_keeper_and_gets_another(running: Node) -> None:
    """A killed keeper is replaced, as often as it happens; then a killed supervisor is started again all the same."""
    life = node_life(StoreLayout(running.store))
    for _ in range(2):
        pids = running.pids()
        os.kill(pids["keeper"], signal.SIGKILL)
        eventually(lambda before=pids: running.healed("keeper", before["keeper"]), "another keeper is there")  # type: ignore[misc]
        now = running.pids()
        assert {role: pid for role, pid in now.items() if role != "keeper"} == {
            role: pid for role, pid in pids.items() if role != "keeper"
        }, "nobody else is disturbed"
        assert running.keeper_pid == now["keeper"]
    assert running.row("keeper")["restarts"] == 2
    before = running.pids()
    os.kill(before["supervisor"], signal.SIGKILL)
    eventually(lambda: running.healed("supervisor", before["supervisor"]), "the new keeper starts a supervisor")
    eventually(running.is_ready, "the node is ready again")
    after = running.pids()
    assert after["keeper"] == before["keeper"], "it is the new supervisor's parent"
    assert running.report()["node"]["keeper"] == "running"
    assert node_life(StoreLayout(running.store)) == life, "it is the same life of the node"
    # Once more, with the usual keeper of a supervisor that it started.
    os.kill(after["supervisor"], signal.SIGKILL)
    eventually(lambda: running.healed("supervisor", after["supervisor"]), "the supervisor is started again")
    eventually(running.is_ready, "the node is ready again")
    assert running.stop().returncode == 0
    eventually(lambda: not alive(after["keeper"]), "the keeper has ended with the node")


def test_a_node_with_a_later_keeper_stops_in_order(running: Node) -> None:
    first = running.pids()["keeper"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: running.healed("keeper", first), "another keeper is there")
    later = running.pids()
    os.kill(later["keeper"], signal.SIGTERM)
    eventually(lambda: not any(alive(pid) for pid in later.values()), "everybody has ended")
    assert not StoreLayout(running.store).abort.exists()


def test_a_foreground_node_stops_in_order_when_its_keeper_is_killed(node: Node) -> None:
    keeper = node.start_in_foreground()
    pids = node.pids()
    keeper.kill()
    keeper.wait()
    eventually(lambda: not [role for role, pid in pids.items() if alive(pid)], "every process is gone")
    assert not (node.store / "abort").exists()


def test_a_node_killed_as_a_whole_starts_again(running: Node) -> None:
    running.kill_all()
    assert (running.store / "abort").exists()
    assert running.stop().returncode == CliExit.NODE_UNAVAILABLE
    ended = running.start()
    assert ended.returncode == 0, ended.stderr
    assert "store recovered clean=False" in running.log()
    assert running.stop().returncode == 0


def test_a_worker_that_hangs_is_killed_and_started_again(node: Node) -> None:
    assert node.start("supervisor.hang_timeout_s=2").returncode == 0
    pid = node.pids()["reader-0"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: node.healed("reader-0", pid), "the reader is back")
    assert "no heartbeat" in node.row("reader-0")["last_exit"]
    assert node.stop().returncode == 0


def test_a_supervisor_killed_during_start_heals_and_start_still_returns_when_ready(node: Node, tmp_path: Path) -> None:
    ended = node.start(COMMITMQ_FAILPOINTS="supervisor.before_abort=kill@1", COMMITMQ_FAILPOINTS_ONCE=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "supervisor was killed by signal 9" in node.log()
    assert node.stop().returncode == 0


@pytest.mark.slow
def test_a_supervisor_killed_during_stop_stays_down_and_leaves_abort(node: Node, tmp_path: Path) -> None:
    assert node.start(COMMITMQ_FAILPOINTS="supervisor.before_abort_removed=kill@1").returncode == 0
    pids = node.pids()
    assert node.stop().returncode == CliExit.UNCLEAN_STOP
    assert not [role for role, pid in pids.items() if alive(pid)]
    assert (node.store / "abort").exists()
    assert node.start().returncode == 0
    assert node.stop().returncode == 0


# ---------------------------------------------------------------- workers that misbehave


class TinyNode:
    """The real supervisor, without a keeper, over workers that do nothing."""

    def __init__(self, store: Path, *settings: str) -> None:
        self.own = store / "commitmq"
        self.own.mkdir(parents=True, exist_ok=True)
        self.store = store
        fixed = ("network.port=0", "index.enable=false", "memory.enable=false", "schedule.enable=false")
        self.process = subprocess.Popen(
            # The index's dispatcher and the schedule start beside the others: their places in the order are not fixed.
            [sys.executable, str(LIFECYCLE / "tiny_node.py"), str(store), "0", *fixed, *settings],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def outcome(self) -> dict[str, Any]:
        """The first report that says how the start ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report: dict[str, Any] = json.loads(line)
            if report["event"] != "info":
                return report
        raise AssertionError(f"no report; exit code {self.process.wait()}")

    def order(self) -> list[list[str]]:
        return [line.split() for line in (self.own / "order").read_text().splitlines()]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the workers end with their lifelines
        self.process.communicate()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Callable[..., TinyNode]]:
    made: list[TinyNode] = []

    def make(*settings: str) -> TinyNode:
        made.append(TinyNode(tmp_path / "store", *settings))
        return made[-1]

    (tmp_path / "store" / "commitmq").mkdir(parents=True)
    yield make
    for one in made:
        one.close()


def test_workers_stop_in_the_reverse_order_of_their_start(tiny: Callable[..., TinyNode]) -> None:
    one = tiny("reader.count=2")
    assert one.outcome()["event"] == "ready"
    assert one.stop() == 0
    readers = ["reader-0", "reader-1"]
    roles = ["coordinator", "dispatcher-consume_queue", "reput", "flush", "allocate", *readers, "cleanup", "writer"]
    assert [(words[0], words[1]) for words in one.order()] == [
        *(("start", role) for role in ("recovery", *roles)),
        *(("stop", role) for role in reversed(roles)),
    ]
    assert not (one.store / "abort").exists()


def test_a_worker_that_does_not_stop_is_killed_and_abort_stays(tiny: Callable[..., TinyNode], tmp_path: Path) -> None:
    one = tiny("supervisor.stop_timeout_s=1")
    assert one.outcome()["event"] == "ready"
    (one.own / "flush.deaf").touch()
    assert one.stop() == CliExit.UNCLEAN_STOP
    assert (one.store / "abort").exists()
    assert "reput" in [words[1] for words in one.order() if words[0] == "stop"], "those after it still drain"
    again = tiny()
    assert again.outcome()["event"] == "ready"
    assert again.order()[-9][:2] == ["start", "recovery"]
    assert again.order()[-9][3] == "False", "recovery must be told that the last stop was not clean"


def test_a_worker_that_crashes_at_every_start_fails_the_start_with_its_reason(tiny: Callable[..., TinyNode]) -> None:
    one = tiny()
    (one.own / "reput.crash").touch()
    outcome = one.outcome()
    assert outcome["event"] == "failed"
    assert "crash wanted" in outcome["error"]
    assert "reput" in outcome["error"]
    assert one.process.wait(DEADLINE_S) == CliExit.START_FAILED
    started = [words[1] for words in one.order() if words[0] == "start"]
    assert started.count("reput") == 3
    assert "writer" not in started


def test_a_store_that_a_worker_calls_unusable_fails_the_start_at_once(tiny: Callable[..., TinyNode]) -> None:
    one = tiny()
    (one.own / "recovery.fail").write_text("sizes differ")
    outcome = one.outcome()
    assert outcome["code"] == CliExit.STORE_UNUSABLE
    assert "sizes differ" in outcome["error"]
    assert one.process.wait(DEADLINE_S) == CliExit.STORE_UNUSABLE
    assert len(one.order()) == 1
    assert not (one.store / "abort").exists()


def test_a_dying_worker_is_started_again_ever_more_slowly(tiny: Callable[..., TinyNode]) -> None:
    one = tiny("supervisor.restart_backoff_ms=200")
    assert one.outcome()["event"] == "ready"
    ends = []
    for count in range(1, 4):
        pid = next(int(words[2]) for words in reversed(one.order()) if words[1] == "reput")
        eventually(lambda pid=pid: alive(pid), "reput lives")  # type: ignore[misc]
        time.sleep(0.2)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wanted = count + 1
        eventually(lambda wanted=wanted: [w[1] for w in one.order()].count("reput") == wanted, "reput is started again")  # type: ignore[misc]
        ends.append(time.monotonic() - killed)
    assert ends[0] >= 0.2
    assert ends[1] >= 0.4
    assert ends[2] >= 0.8
    assert one.stop() == 0, "a worker that died and came back drains like any other"


def test_a_stop_does_not_wait_long_for_a_recovery(tiny: Callable[..., TinyNode], tmp_path: Path) -> None:
    (tmp_path / "store" / "commitmq" / "recovery.silent").touch()
    one = tiny()
    eventually(lambda: (one.own / "order").exists(), "recovery runs")
    started = time.monotonic()
    assert one.stop() == CliExit.OK
    assert time.monotonic() - started < 10
    assert not (one.store / "abort").exists(), "the store is as it was found"
    outcome = one.outcome()
    assert (outcome["event"], outcome["code"]) == ("failed", CliExit.INTERRUPTED)


@pytest.mark.slow
def test_an_orphan_that_hangs_is_killed_before_a_new_node_starts(tiny: Callable[..., TinyNode]) -> None:
    one = tiny()
    assert one.outcome()["event"] == "ready"
    stuck = next(int(words[2]) for words in one.order() if words[1] == "flush")
    (one.own / "flush.stuck").touch()
    time.sleep(0.5)  # until its loop has come round to look
    one.process.kill()
    one.process.wait()
    (one.own / "flush.stuck").unlink()
    started = time.monotonic()
    again = tiny()
    assert again.outcome()["event"] == "ready"
    assert time.monotonic() - started >= 4.5, "an orphan gets time to exit by itself"
    assert not alive(stuck)
    assert again.stop() == 0


# ---------------------------------------------------------------- what forked processes inherit


def descriptors(pid: int) -> dict[int, str]:
    """Where each descriptor of a process leads."""
    folder = Path(f"/proc/{pid}/fd")
    found = {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed since: the process lives
            found[int(name)] = os.readlink(folder / name)
    return found


def test_no_process_executes_a_program_or_keeps_what_the_command_had(node: Node, tmp_path: Path) -> None:
    """The pipe to a reader ends with the command; other descriptors, the terminal and the folder are left as well."""
    folder = tmp_path / "gone"
    folder.mkdir()
    words = " ".join(map(str, node.arguments()))
    env = {name: value for name, value in environment().items() if name != "HOME"}
    done = subprocess.run(
        ["bash", "-c", f"exec 7<{sys.executable}; {sys.executable} -m commitmq.cli.main {words} --background | cat"],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"node is ready" in done.stdout, done.stderr
    folder.rmdir()
    pids = node.pids()
    lines = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids.values()}
    assert len(lines) == 1, "no process was executed but the command"
    assert str(node.store).encode() in lines.pop()
    for role, pid in pids.items():
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        assert name == f"cmq-{role}"[:15]
        found = descriptors(pid)
        assert os.getsid(pid) == pids["keeper"]
        assert found[0] == "/dev/null"
        assert found[1] == found[2] == str(StoreLayout(node.store).log)
        assert 7 not in found or "python" not in found[7], role
    assert len(descriptors(pids["keeper"])) == 4, "besides the streams only the pipe to the command that waited"
    os.kill(pids["keeper"], signal.SIGHUP)
    os.kill(pids["supervisor"], signal.SIGHUP)
    os.kill(pids["writer"], signal.SIGKILL)
    eventually(lambda: node.healed("writer", pids["writer"]), "the writer is back")
    assert node.stop().returncode == 0


@pytest.mark.slow
def test_a_supervisor_by_way_of_a_later_forkserver_and_keeper_serves(running: Node) -> None:
    """Their images are of a supervisor that died: its locks, its descriptors and its sockets are not the next one's."""
    for role in ("forkserver", "keeper", "supervisor", "forkserver", "supervisor"):
        before = running.pids()
        os.kill(before[role], signal.SIGKILL)
        eventually(lambda role=role, pid=before[role]: running.healed(role, pid), f"another {role} is there")  # type: ignore[misc]
        eventually(running.is_ready, "the node is ready")
    with Producer(running.address) as producer:
        assert producer.send("orders", b"body", queue=0).queue_offset == 0
    supervisor = running.pids()["supervisor"]
    sockets = [one for one in descriptors(supervisor).values() if one == "anon_inode:[eventpoll]"]
    os.kill(running.pids()["forkserver"], signal.SIGKILL)
    eventually(running.is_ready, "the node is ready")
    assert len([one for one in descriptors(supervisor).values() if one == "anon_inode:[eventpoll]"]) == len(sockets)
    assert running.stop().returncode == 0
    assert "Traceback" not in running.log()


def test_a_closed_terminal_ends_no_node_in_the_background(node: Node) -> None:
    """The command is the leader of a terminal's session, which ends with it."""
    main, terminal = os.openpty()
    words = [sys.executable, "-m", "commitmq.cli.main", *node.arguments(), "--background"]
    program = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    os.close(terminal)
    os.close(main)
    assert done.returncode == 0
    for pid in node.pids().values():
        assert not [where for where in descriptors(pid).values() if where.startswith(("/dev/pts", "/dev/tty"))]
    assert node.is_ready()
    assert node.stop().returncode == 0
