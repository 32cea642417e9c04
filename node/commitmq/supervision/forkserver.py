"""The process that forks all workers: it has loaded their common modules, so each starts fast and costs little memory.

``python -m commitmq.supervision.forkserver FD`` where FD is a SOCK_SEQPACKET socket to the supervisor. The first
message lists the modules to preload. Then each ``{"role", "module", "params"}`` comes with the worker's end of its
lifeline (SCM_RIGHTS) and is answered with ``{"pid"}``. End of file means the supervisor is dead, and ends this process.

A worker is forked twice: the process in between ends at once, which makes the supervisor (a child subreaper) the
worker's parent. So the supervisor can wait for every worker and learn how it ended, even after this process has died.
The answer is sent after that hand-over, so its pid stays valid until the supervisor itself has waited for it.

All heavy modules are imported inside functions: the supervisor imports this module for :class:`ForkServer`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from commitmq import failpoints
from commitmq import log as log_module
from commitmq.config import NodeConfig, from_mapping
from commitmq.config.live import with_live_values
from commitmq.protocol import wire
from commitmq.store.layout import StoreLayout
from commitmq.supervision.processes import (
    pass_interpreter_on,
    release_library_pages,
    set_process_name,
    wait_for_exit,
)

_MAX_MESSAGE_BYTES = 1 << 18
_REQUEST_TIMEOUT_S = 5.0
_SHARED_MODULES = (
    "numpy",
    "zmq",
    "orjson",
    "commitmq.kernels.compiled",
    "commitmq.protocol.wire",
    "commitmq.workers.runtime.context",
)


class ForkServerDied(Exception):
    """The forkserver ended or does not answer."""


# ---------------------------------------------------------------- the supervisor's side


class ForkServer:
    """The supervisor's handle of one forkserver process."""

    def __init__(self, layout: StoreLayout, config: NodeConfig, modules: Iterable[str]) -> None:
        """Start the process. It is :attr:`ready` after the supervisor has read that message from :attr:`socket`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "commitmq.supervision.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=worker_environment(),
            )
        self.socket = ours
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.ready = False
        self.ended = False  # its socket is closed; the pidfd reports its exit
        ours.setblocking(False)
        first = {"store": str(layout.root), "config": config.to_dict(), "modules": sorted(modules)}
        with contextlib.suppress(OSError):  # it has died already, and its pidfd reports that
            self.socket.send(orjson.dumps(first))
        # Only this module may wait for that child. Popen must not wait for it when it is garbage-collected.
        self._process.returncode = 0

    def read_events(self) -> list[dict[str, Any]]:
        """The forkserver's messages since the last call (while it preloads). Sets :attr:`ready`."""
        events: list[dict[str, Any]] = []
        while True:
            try:
                data = self.socket.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return events
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return events
            events.append(orjson.loads(data))
            if events[-1].get("event") == "ready":
                self.ready = True

    def fork(
        self, role: str, module: str, params: Mapping[str, Any], live: Mapping[str, Any], lifeline: socket.socket
    ) -> int:
        """Fork a worker that gets ``lifeline`` and the values ``live`` of the live settings. Returns its pid, already a child
        of the calling process.

        Raises ForkServerDied when no answer comes within five seconds; the caller must then end this forkserver.
        """
        request = orjson.dumps({"role": role, "module": module, "params": dict(params), "live": live})
        self.socket.settimeout(_REQUEST_TIMEOUT_S)
        try:
            socket.send_fds(self.socket, [request], [lifeline.fileno()])
            answer = self.socket.recv(_MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ForkServerDied(f"the forkserver does not answer: {error}") from error
        finally:
            self.socket.setblocking(False)
        if not answer:
            raise ForkServerDied("the forkserver closed its socket")
        reply = orjson.loads(answer)
        if "pid" not in reply:
            raise ForkServerDied(str(reply.get("error")))
        return int(reply["pid"])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """Exit code (negative: signal) if the process has ended, else None. Call it until it is not None."""
        try:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return 0
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def close(self) -> None:
        """Release the descriptors of a process that was reaped."""
        self.socket.close()
        os.close(self.pidfd)

    def end(self, patience_s: float) -> None:
        """Close its socket so that it ends, kill it after ``patience_s`` seconds, and wait for it."""
        self.socket.close()
        if not wait_for_exit(self.pidfd, patience_s):
            self.kill()
            wait_for_exit(self.pidfd, None)
        self.reap()
        os.close(self.pidfd)


def worker_environment() -> dict[str, str]:
    """The environment of all node processes: this process's, with settings that limit memory and threads."""
    environment = dict(os.environ)
    # glibc makes up to eight arenas per core, each of which keeps the memory freed into it; a worker needs two at most.
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    # BLAS would start its thread pools while numpy is imported, before the fork, and they are of no use here.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


# ---------------------------------------------------------------- the forkserver's side


def main(arguments: list[str]) -> int:
    """Preload, then fork on request until the supervisor is gone. Returns the exit code."""
    # the signals may go to a whole group of processes; the supervisor decides
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_process_name("cmq-forkserver")
    failpoints.play("forkserver")
    log_module.configure()
    log = log_module.get_log("forkserver")
    connection = socket.socket(fileno=int(arguments[0]))
    first = connection.recv(_MAX_MESSAGE_BYTES)
    if not first:
        return 0
    settings = orjson.loads(first)
    layout = StoreLayout(Path(settings["store"]))
    config = from_mapping(settings["config"])
    log_module.follow(layout.log)
    log_module.configure(config.log.level, config.log.format)
    # The kernel holds the lock until this process has fully ended: the next supervisor finds and ends a forkserver that
    # hangs, and waiting for the lock is waiting for the end of the process.
    _lock(layout)
    try:
        seconds = _preload(settings["modules"])
        connection.send(wire.dumps({"event": "ready", "preload_s": round(seconds, 3)}))
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1)
            if not data:
                return 0
            request = orjson.loads(data)
            try:
                answer: dict[str, Any] = {"pid": _fork_twice(request, descriptors[0], layout, config)}
            except OSError as error:  # no memory or no process slot: the supervisor tries again later
                log.error("cannot fork", role=request["role"], error=str(error))
                answer = {"error": f"cannot fork: {error}"}
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            connection.send(orjson.dumps(answer))
    except (BrokenPipeError, ConnectionResetError):
        return 0


def _lock(layout: StoreLayout) -> None:
    from commitmq.workers.runtime.role_lock import acquire_role_lock

    acquire_role_lock(layout.role_lock("forkserver"))


def _preload(worker_modules: list[str]) -> float:
    """Import the modules that workers share. Returns seconds. A worker module with a failing import fails only in its
    own process.
    """
    started = time.perf_counter()
    gc.disable()  # what is imported stays, and collections while it grows would be a tenth of the time
    for name in _SHARED_MODULES:
        importlib.import_module(name)
    for name in worker_modules:
        # A broken module (a plugin's, say) must not stop the others: the worker imports it again and reports the
        # reason.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # A collection never visits frozen objects, so a worker's collector does not copy the shared pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    release_library_pages()
    return time.perf_counter() - started


def _fork_twice(request: dict[str, Any], lifeline: int, layout: StoreLayout, config: NodeConfig) -> int:
    """Fork the worker and hand it over to the subreaper above this process. Returns its pid. Raises OSError."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        code = 1
        try:
            worker = os.fork()
            if worker == 0:
                code = 70
                code = _become_worker(request, lifeline, layout, config)
            else:
                os.write(write_end, str(worker).encode())
                code = 0
        except OSError as error:
            os.write(write_end, f"-{error.errno}".encode())
        finally:
            # Never return into the forkserver's stack, and never run its exit handlers.
            os._exit(code)
    os.close(write_end)
    try:
        os.waitpid(between, 0)
        answer = int(os.read(read_end, 32) or b"-0")
    finally:
        os.close(read_end)
    if answer <= 0:
        raise OSError(-answer, os.strerror(-answer) if answer else "the process in between died")
    return answer


def _become_worker(request: dict[str, Any], lifeline_fd: int, layout: StoreLayout, config: NodeConfig) -> int:
    """In the worker: close everything inherited except lifeline and standard streams, then run. Returns the exit code."""
    role = str(request["role"])
    os.closerange(3, lifeline_fd)
    os.closerange(lifeline_fd + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    set_process_name(f"cmq-{role}")
    pass_interpreter_on()
    failpoints.play(role)
    lifeline = socket.socket(fileno=lifeline_fd)
    log = log_module.get_log(role)
    config = with_live_values(config, request["live"])
    log_module.configure(config.log.level, config.log.format)
    try:
        run = importlib.import_module(str(request["module"])).run
        runtime = importlib.import_module("commitmq.workers.runtime.context")
    except Exception as error:
        log.exception("cannot import the worker", error=repr(error))
        with contextlib.suppress(OSError):
            lifeline.send(wire.dumps({"event": "error", "error": f"cannot import {request['module']}: {error!r}"}))
        return 70
    code = int(runtime.main(role, run, layout.root, config, lifeline, request["params"]))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # Tearing down the interpreter and its modules would only make every stop of a node longer.
    os._exit(exit_code)
