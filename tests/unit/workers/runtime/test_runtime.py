"""Goal: a worker wakes for what concerns it, obeys its supervisor, never meets a second one of its role, and ends with
the exit code that names the reason.

Method: the waiting part runs in this process against real sockets; locks and exit codes are tried with real processes,
because both belong to a process as a whole.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import orjson
import pytest
import zmq

from commitmq.config import NodeConfig, load
from commitmq.control import ControlBlock, WorkerState, WorkerWord, role_slot
from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.supervision import node_files
from commitmq.workers.runtime import context as runtime
from commitmq.workers.runtime.context import ExitCode, SupervisorGone, WorkerContext
from commitmq.workers.runtime.doorbell import NAPPING, SLEEPING, Doorbell
from commitmq.workers.runtime.role_lock import acquire_role_lock

ROLE = "reput"
SLOT = role_slot(ROLE)
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    layout = StoreLayout(tmp_path / "store")
    layout.run.mkdir(parents=True)
    node_files.make_folders(layout)
    node_files.empty_run_folder(layout)
    return layout


@pytest.fixture
def control(layout: StoreLayout) -> Iterator[ControlBlock]:
    block = ControlBlock(layout.control, create=True)
    yield block
    block.close()


@pytest.fixture
def lifeline() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The supervisor's end and the worker's end."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends[0].settimeout(30)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def supervisor(lifeline: tuple[socket.socket, socket.socket]) -> socket.socket:
    return lifeline[0]


@pytest.fixture
def context(
    layout: StoreLayout, control: ControlBlock, lifeline: tuple[socket.socket, socket.socket]
) -> Iterator[WorkerContext]:
    doorbell = Doorbell(layout.doorbell(ROLE))
    made = WorkerContext(ROLE, layout, NodeConfig(), control, lifeline[1], doorbell, get_log(ROLE))
    yield made
    made.close()


def elapsed(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def wait_until_free(port: int) -> None:
    """libzmq gives a port back in its own thread, a moment after the socket was closed."""
    deadline = time.monotonic() + 20
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                return


# ---------------------------------------------------------------- waiting


def test_waiting_ends_after_its_time(context: WorkerContext) -> None:
    assert elapsed(lambda: context.wait(100)) >= 0.09
    assert context.wait(0) == set()


def test_a_ring_ends_the_wait_and_is_taken(context: WorkerContext) -> None:
    ringer = context.ringer(ROLE)
    timer = threading.Timer(0.05, ringer.ring)
    timer.start()
    assert elapsed(lambda: context.wait(20_000)) < 10
    timer.join()
    assert elapsed(lambda: context.wait(100)) >= 0.09, "the ring was not taken"
    ringer.close()


def test_a_worker_shows_that_it_sleeps_only_while_it_does(context: WorkerContext, control: ControlBlock) -> None:
    seen: list[int] = []

    def look() -> bool:
        seen.append(control.worker(SLOT, WorkerWord.ASLEEP))
        return True

    context.wait(1000, unless=look)
    context.wait(2, unless=look)
    context.wait(1000, unless=look, nap=True)
    assert seen == [SLEEPING, NAPPING, NAPPING]
    assert control.worker(SLOT, WorkerWord.ASLEEP) == 0


def test_work_that_came_before_the_sleep_makes_the_wait_a_look(context: WorkerContext) -> None:
    assert elapsed(lambda: context.wait(20_000, unless=lambda: True)) < 10
    assert elapsed(lambda: context.wait(100, unless=lambda: False)) >= 0.09


def test_every_wait_shows_a_heartbeat(context: WorkerContext, control: ControlBlock) -> None:
    before = runtime.monotonic_ms()
    context.wait(0)
    assert before <= control.worker(SLOT, WorkerWord.HEARTBEAT_MS) <= runtime.monotonic_ms()


def test_a_registered_socket_ends_the_wait_and_is_named(context: WorkerContext) -> None:
    router, (tcp, ipc) = context.bind_router("worker")
    context.register(router)
    for endpoint in (tcp, ipc):
        peer = context.zmq.socket(zmq.DEALER)
        peer.connect(endpoint)
        peer.send_multipart([b"header", b"payload"])
        assert router in context.wait(20_000)
        _, *frames = router.recv_multipart()
        assert frames == [b"header", b"payload"]
        peer.close(linger=0)
    context.unregister(router)
    router.close(linger=0)


def test_the_gate_hears_before_each_sleep_that_no_request_waits(context: WorkerContext) -> None:
    # A worker that ends its turn at a limit has not heard Again after the last request.
    router, (tcp, _) = context.bind_router("worker")
    context.register(router)
    with context.zmq.socket(zmq.DEALER) as dealer:
        dealer.connect(tcp)
        dealer.send_multipart([b"one"])
        dealer.send_multipart([b"two"])
        while router not in context.wait(1_000):
            pass
        router.recv_multipart()
        assert not router.gate.is_empty
        while router not in context.wait(1_000):
            pass  # the second one may come later
        router.recv_multipart()
        assert not router.gate.is_empty
        looks = router.gate.looks
        assert router not in context.wait(0)
        assert router.gate.is_empty
        assert router.gate.looks > looks


def test_a_free_port_is_told_and_can_be_bound_again(context: WorkerContext) -> None:
    first, (tcp, _) = context.bind_router("worker")
    assert tcp.startswith("tcp://127.0.0.1:")
    port = int(tcp.rpartition(":")[2])
    assert port > 0
    first.close(linger=0)
    context.params["port"] = port  # as the supervisor asks of the next incarnation
    wait_until_free(port)
    second, (again, _) = context.bind_router("worker")
    assert again == tcp
    second.close(linger=0)


# ---------------------------------------------------------------- the lifeline


def test_stop_asks_to_drain(context: WorkerContext, supervisor: socket.socket, control: ControlBlock) -> None:
    supervisor.send(orjson.dumps({"command": "stop"}))
    assert not context.stopping
    context.wait(20_000)
    assert context.stopping
    assert control.worker(SLOT, WorkerWord.STATE) == WorkerState.DRAINING


def test_other_commands_wait_in_order(context: WorkerContext, supervisor: socket.socket) -> None:
    for number in range(3):
        supervisor.send(orjson.dumps({"command": "look", "number": number}))
    for _ in range(3):
        context.wait(20_000)
    taken = [context.command() for _ in range(4)]
    assert [one and one["number"] for one in taken] == [0, 1, 2, None]
    assert not context.stopping


def test_the_end_of_the_lifeline_ends_the_worker(context: WorkerContext, supervisor: socket.socket) -> None:
    supervisor.close()
    with pytest.raises(SupervisorGone):
        context.wait(20_000)
    with pytest.raises(SupervisorGone):
        context.tell(state="late")


def test_ready_tells_the_supervisor_and_the_control_block(
    context: WorkerContext, supervisor: socket.socket, control: ControlBlock
) -> None:
    context.ready(endpoints=["tcp://127.0.0.1:1", "ipc://x"])
    assert orjson.loads(supervisor.recv(65536)) == {"event": "ready", "endpoints": ["tcp://127.0.0.1:1", "ipc://x"]}
    assert control.worker(SLOT, WorkerWord.STATE) == WorkerState.READY
    context.tell(gap=7)
    assert orjson.loads(supervisor.recv(65536)) == {"event": "info", "gap": 7}


# ---------------------------------------------------------------- role locks


def hold_lock(path: Path, held: socket.socket) -> None:
    acquire_role_lock(path)
    held.send(b"held")
    time.sleep(120)


def try_lock(path: Path, answer: socket.socket) -> None:
    try:
        acquire_role_lock(path)
    except BlockingIOError as error:
        answer.send(str(error).encode())
    else:
        answer.send(b"got it")


def ask_another_process(target: Callable[[Path, socket.socket], None], path: Path) -> tuple[BaseProcess, str]:
    ours, theirs = socket.socketpair()
    process = SPAWN.Process(target=target, args=(path, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.settimeout(60)
    answer = ours.recv(4096).decode()
    ours.close()
    return process, answer


def test_a_second_process_of_a_role_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    fd = acquire_role_lock(path)
    process, answer = ask_another_process(try_lock, path)
    process.join(30)
    assert answer == f"{path} is held by another process"
    assert path.stat().st_mode & 0o777 == 0o600

    os.close(fd)
    process, answer = ask_another_process(try_lock, path)
    process.join(30)
    assert answer == "got it"


def test_a_killed_holder_loses_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    holder, answer = ask_another_process(hold_lock, path)
    assert answer == "held"
    with pytest.raises(BlockingIOError):
        acquire_role_lock(path)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(30)
    os.close(acquire_role_lock(path))


def test_locks_of_different_roles_are_independent(tmp_path: Path) -> None:
    holder, answer = ask_another_process(hold_lock, tmp_path / "writer.lock")
    assert answer == "held"
    os.close(acquire_role_lock(tmp_path / "flush.lock"))
    holder.kill()
    holder.join(30)


def test_a_refused_lock_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    holder, _ = ask_another_process(hold_lock, path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        acquire_role_lock(path)
    assert len(os.listdir("/proc/self/fd")) == before
    holder.kill()
    holder.join(30)


# ---------------------------------------------------------------- from lock to exit code


def run_until_stopped(context: WorkerContext) -> None:
    context.ready(pid=os.getpid())
    while not context.stopping:
        context.wait(50)


def run_and_crash(context: WorkerContext) -> None:
    raise ValueError("broken\non purpose")


def run_on_an_unusable_store(context: WorkerContext) -> None:
    raise StoreError("the segment has another size", path="commitlog/0", offset=4096)


def run_without_room(context: WorkerContext) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def worker_process(run: Callable[[WorkerContext], None], root: Path, lifeline: socket.socket) -> None:
    os._exit(runtime.main(ROLE, run, root, load(), lifeline, {}))


class Worker:
    """A worker in a process of its own, and the supervisor's end of its lifeline."""

    def __init__(self, layout: StoreLayout, run: Callable[[WorkerContext], None]) -> None:
        self.lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline.settimeout(60)
        self.process = SPAWN.Process(target=worker_process, args=(run, layout.root, theirs), daemon=True)
        self.process.start()
        self._theirs = theirs

    def event(self) -> dict[str, object]:
        event: dict[str, object] = orjson.loads(self.lifeline.recv(65536))
        self._theirs.close()  # the worker has its own copy by now; ours would hide the end of the lifeline
        return event

    def exit_code(self) -> int | None:
        self.process.join(60)
        code = self.process.exitcode
        self.process.kill()
        self.lifeline.close()
        self._theirs.close()
        return code


def test_a_worker_that_drained_exits_clean(layout: StoreLayout, control: ControlBlock) -> None:
    worker = Worker(layout, run_until_stopped)
    assert worker.event() == {"event": "ready", "pid": worker.process.pid}
    assert control.worker(SLOT, WorkerWord.PID) == worker.process.pid
    assert control.worker(SLOT, WorkerWord.STATE) == WorkerState.READY
    worker.lifeline.send(orjson.dumps({"command": "stop"}))
    assert worker.exit_code() == ExitCode.CLEAN
    assert control.worker(SLOT, WorkerWord.STATE) == WorkerState.STOPPED


def test_signals_for_the_whole_terminal_do_not_end_a_worker(layout: StoreLayout, control: ControlBlock) -> None:
    worker = Worker(layout, run_until_stopped)
    worker.event()
    assert worker.process.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    seen = runtime.monotonic_ms()
    deadline = time.monotonic() + 30
    while control.worker(SLOT, WorkerWord.HEARTBEAT_MS) <= seen + 100 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert control.worker(SLOT, WorkerWord.HEARTBEAT_MS) > seen + 100, "the loop turns no more"
    worker.lifeline.send(orjson.dumps({"command": "stop"}))
    assert worker.exit_code() == ExitCode.CLEAN


def test_a_worker_ends_with_its_supervisor(layout: StoreLayout, control: ControlBlock) -> None:
    worker = Worker(layout, run_until_stopped)
    worker.event()
    worker.lifeline.close()
    assert worker.exit_code() == ExitCode.SUPERVISOR_GONE


def test_a_second_worker_of_a_role_leaves_at_once(layout: StoreLayout, control: ControlBlock) -> None:
    first = Worker(layout, run_until_stopped)
    first.event()
    second = Worker(layout, run_until_stopped)
    assert second.exit_code() == ExitCode.ROLE_TAKEN
    assert control.worker(SLOT, WorkerWord.PID) == first.process.pid, "the second one wrote words of the first"
    first.lifeline.send(orjson.dumps({"command": "stop"}))
    assert first.exit_code() == ExitCode.CLEAN


@pytest.mark.parametrize(
    ("run", "code", "error"),
    [
        (run_and_crash, ExitCode.CRASHED, "ValueError('broken\\non purpose')"),
        (
            run_on_an_unusable_store,
            ExitCode.STORE_UNUSABLE,
            "the segment has another size [commitlog/0 at offset 4096]",
        ),
        (run_without_room, ExitCode.NO_ROOM, "[Errno 28] No space left on device"),
    ],
)
def test_the_last_words_of_a_worker_reach_the_supervisor(
    layout: StoreLayout, control: ControlBlock, run: Callable[[WorkerContext], None], code: ExitCode, error: str
) -> None:
    worker = Worker(layout, run)
    assert worker.event() == {"event": "error", "error": error}
    assert worker.exit_code() == code


def test_a_worker_without_a_control_block_says_that_no_node_runs(layout: StoreLayout) -> None:
    worker = Worker(layout, run_until_stopped)
    assert "not running" in str(worker.event()["error"])
    assert worker.exit_code() == ExitCode.STORE_UNUSABLE
