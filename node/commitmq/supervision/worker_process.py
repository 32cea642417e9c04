"""The supervisor's view of one worker: process, lifeline, phase, restarts and back-off."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from commitmq.supervision.forkserver import ForkServer
from commitmq.supervision.processes import CpuMeter
from commitmq.supervision.roster import ProcessSpec
from commitmq.workers.runtime.context import ExitCode

_MAX_MESSAGE_BYTES = 1 << 17


class Phase(StrEnum):
    """A worker's phase of life, as ``status`` shows it."""

    IDLE = "idle"  # not started yet, or stopped already
    WAITING = "waiting"  # dead; started again after its back-off
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DONE = "done"  # a one-shot worker that ended well


@dataclass
class WorkerProcess:
    """One role and, while it lives, its process. Times are CLOCK_MONOTONIC milliseconds."""

    spec: ProcessSpec
    phase: Phase = Phase.IDLE
    wanted: bool = False  # keep it alive: restart it after a death
    pid: int = 0
    pidfd: int = -1
    lifeline: socket.socket | None = None
    lifeline_ended_ms: int = 0
    started_ms: int = 0
    ready_ms: int = 0
    start_at_ms: int = 0
    active_ms: int = 0  # when a one-shot worker was last seen to use the CPU
    restarts: int = 0
    backoff_ms: int = 0
    deaths_before_ready: int = 0
    settings: int = 0  # the version of the live settings that it has
    unclean: bool = False  # after the request to stop it ended with another exit code than 0
    killed_because: str = ""
    last_exit: str = ""
    last_error: str = ""
    endpoints: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    no_room: str = ""
    """Why it ended, when that was for lack of room on the disk, until it is ready again."""
    cpu: CpuMeter = field(default_factory=CpuMeter)

    @property
    def role(self) -> str:
        return self.spec.name

    @property
    def module(self) -> str:
        return self.spec.module

    @property
    def slot(self) -> int:
        return self.spec.slot

    @property
    def one_shot(self) -> bool:
        return self.spec.one_shot

    def fork(self, forkserver: ForkServer, params: Mapping[str, Any], live: Mapping[str, Any], now_ms: int) -> None:
        """Start the process. When it raises ForkServerDied, nothing has changed. ``live``: values of the live settings.
        A child that exists in spite of that ends by itself, because its lifeline is closed here.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = forkserver.fork(self.role, self.module, params, live, theirs)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self.pid, self.pidfd, self.lifeline = pid, os.pidfd_open(pid), ours
        self.started_ms, self.ready_ms, self.lifeline_ended_ms = now_ms, 0, 0
        self.killed_because = ""
        self.phase = Phase.STARTING

    def read_lifeline(self, now_ms: int) -> list[dict[str, Any]]:
        """All messages that have arrived. Notes when the worker's end is closed."""
        messages: list[dict[str, Any]] = []
        while self.lifeline is not None and not self.lifeline_ended_ms:
            try:
                data = self.lifeline.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.lifeline_ended_ms = now_ms
                break
            # No message of a worker may end the supervisor.
            with contextlib.suppress(orjson.JSONDecodeError):
                message = orjson.loads(data)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def ask_to_stop(self) -> None:
        """Send ``stop``. The caller must notice a worker that is dead or does not listen."""
        self.phase = Phase.STOPPING
        if self.lifeline is not None:
            with contextlib.suppress(OSError):
                self.lifeline.send(orjson.dumps({"command": "stop"}))

    def take_settings(self, version: int, live: Mapping[str, Any]) -> None:
        """Send the values of the live settings. A worker whose pipe is full misses them: it hangs, and is started again."""
        if self.lifeline is not None:
            with contextlib.suppress(OSError):
                self.lifeline.send(orjson.dumps({"command": "settings", "version": version, "values": live}))

    def kill(self, because: str) -> None:
        """SIGKILL the process. The pidfd reports its end like any other."""
        self.killed_because = because
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """Wait status in ``Popen.returncode`` style (negative: signal) if the process has ended, else None. Closes the
        pidfd and the lifeline and forgets the pid: after this the pid may belong to another process.
        """
        try:
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            code = int(ExitCode.CRASHED)  # impossible, unless another part waited for it
        else:
            if ended is None:
                return None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.close(self.pidfd)
        if self.lifeline is not None:
            self.lifeline.close()
        self.pid, self.pidfd, self.lifeline = 0, -1, None
        self.last_exit = f"{describe_exit(code)}, {self.killed_because}" if self.killed_because else describe_exit(code)
        return code

    def next_backoff(self, now_ms: int, first_ms: int, longest_ms: int, well_after_ms: int) -> int:
        """Milliseconds to wait before the next start: doubles with each death, starts over after a long good run."""
        if self.backoff_ms == 0 or (self.ready_ms and now_ms - self.ready_ms >= well_after_ms):
            self.backoff_ms = first_ms
        else:
            self.backoff_ms = min(self.backoff_ms * 2, longest_ms)
        return self.backoff_ms


def describe_exit(code: int) -> str:
    """``exit code 70 (CRASHED)`` or ``killed by SIGKILL``."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    name = next((known.name for known in ExitCode if known == code), "unnamed")
    return f"exit code {code} ({name})"
