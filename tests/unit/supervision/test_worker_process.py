"""Goal: back-off, ends and messages of a worker are read as they are. Method: real children and socket pairs."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from commitmq.supervision.roster import ProcessSpec
from commitmq.supervision.worker_process import WorkerProcess, describe_exit

FLUSH = ProcessSpec("flush", "commitmq.workers.flush", 5)


def child(code: int | None) -> WorkerProcess:
    """A worker that exits with ``code``, or waits for a signal."""
    worker = WorkerProcess(FLUSH)
    pid = os.fork()
    if pid == 0:
        if code is None:
            time.sleep(60)
        os._exit(code or 0)
    worker.pid, worker.pidfd = pid, os.pidfd_open(pid)
    return worker


def reaped(worker: WorkerProcess) -> int:
    deadline = time.monotonic() + 20
    while (code := worker.reap()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return code


@pytest.mark.parametrize(("code", "words"), [(0, "CLEAN"), (70, "CRASHED"), (74, "STORE_UNUSABLE"), (5, "unnamed")])
def test_an_exit_code_is_reported_by_name(code: int, words: str) -> None:
    worker = child(code)
    assert reaped(worker) == code
    assert worker.last_exit == f"exit code {code} ({words})"
    assert (worker.pid, worker.pidfd) == (0, -1)


def test_a_kill_is_reported_with_its_signal_and_reason() -> None:
    worker = child(None)
    assert worker.reap() is None
    worker.kill("no heartbeat for 61 s")
    assert reaped(worker) == -signal.SIGKILL
    assert worker.last_exit == "killed by SIGKILL, no heartbeat for 61 s"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"


def test_back_off_doubles_up_to_its_limit_and_starts_over_after_a_good_while() -> None:
    worker = WorkerProcess(FLUSH)
    assert [worker.next_backoff(now, 100, 1000, 60_000) for now in range(6)] == [100, 200, 400, 800, 1000, 1000]
    worker.ready_ms = 5_000
    assert worker.next_backoff(64_999, 100, 1000, 60_000) == 1000
    assert worker.next_backoff(65_000, 100, 1000, 60_000) == 100


def test_whatever_a_worker_says_is_survived_and_its_end_is_noticed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    worker = WorkerProcess(FLUSH, lifeline=ours)
    for words in (b'{"event":"ready"}', b"\xff not json", b"[1]", b'{"event":"info","gap":3}'):
        theirs.send(words)
    assert worker.read_lifeline(7) == [{"event": "ready"}, {"event": "info", "gap": 3}]
    assert worker.lifeline_ended_ms == 0
    worker.ask_to_stop()
    assert theirs.recv(100) == b'{"command":"stop"}'
    theirs.close()
    assert worker.read_lifeline(8) == []
    assert worker.lifeline_ended_ms == 8
    worker.ask_to_stop()  # to nobody: no trouble
    ours.close()
