"""The process that forks all workers from the image of the node's keeper: each starts fast and costs little memory.

The supervisor forks the first one before it has a ZeroMQ context or a thread of its own, and another one when that has
died. Between them is a SOCK_SEQPACKET socket. Each ``{"role", "module", "params", "live"}`` comes with the worker's end of
its lifeline (SCM_RIGHTS) and is answered with ``{"pid"}``; the role ``keeper`` is a new keeper, with its end of a pipe. End of
file means the supervisor is dead, and ends this process.

A worker is forked twice: the process in between ends at once, which makes the supervisor (a child subreaper) the
worker's parent. So the supervisor can wait for every worker and learn how it ended, even after this process has died.
The answer is sent after that hand-over, so its pid stays valid until the supervisor itself has waited for it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import orjson

from commitmq import failpoints
from commitmq import log as log_module
from commitmq.config import NodeConfig
from commitmq.config.loading import with_live_values
from commitmq.protocol import wire
from commitmq.store.layout import StoreLayout
from commitmq.supervision.processes import HANDLED_SIGNALS, fork, set_process_name, signals_held, use_as, wait_for_exit
from commitmq.workers.runtime import context as runtime
from commitmq.workers.runtime.role_lock import acquire_role_lock

_MAX_MESSAGE_BYTES = 1 << 18
_REQUEST_TIMEOUT_S = 5.0

NextKeeper: TypeAlias = Callable[[str, int, int], int]
"""Runs a new keeper: the node's life, the pid of the supervisor above it, its end of the pipe from there; its exit code."""


class ForkServerDied(Exception):
    """The forkserver ended or does not answer."""


# ---------------------------------------------------------------- the supervisor's side


class ForkServer:
    """The supervisor's handle of one forkserver process."""

    def __init__(self, layout: StoreLayout, config: NodeConfig, next_keeper: NextKeeper | None) -> None:
        """Fork the process. Raises OSError."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_REQUEST_TIMEOUT_S)
        with theirs, signals_held():
            self.pid = fork(partial(serve, theirs, layout, config, next_keeper), theirs.fileno())
        self.pidfd = os.pidfd_open(self.pid)

    def fork(
        self, role: str, module: str, params: Mapping[str, Any], live: Mapping[str, Any], lifeline: socket.socket
    ) -> int:
        """Fork a worker that gets ``lifeline`` and the values ``live`` of the live settings. Returns its pid, already a child
        of the calling process.

        Raises ForkServerDied when no answer comes within five seconds; the caller must then end this forkserver.
        """
        request = {"role": role, "module": module, "params": dict(params), "live": live}
        return self._ask(request, lifeline.fileno())

    def fork_keeper(self, life: str, word_fd: int) -> int:
        """Fork a keeper that reads the calling process's last word from ``word_fd``. The rest is as in :meth:`fork`."""
        return self._ask({"role": "keeper", "life": life, "parent": os.getpid()}, word_fd)

    def _ask(self, request: dict[str, Any], fd: int) -> int:
        try:
            socket.send_fds(self._socket, [orjson.dumps(request)], [fd])
            answer = self._socket.recv(_MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ForkServerDied(f"the forkserver does not answer: {error}") from error
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
        self._socket.close()
        os.close(self.pidfd)

    def end(self, patience_s: float) -> None:
        """Close its socket so that it ends, kill it after ``patience_s`` seconds, and wait for it."""
        self._socket.close()
        if not wait_for_exit(self.pidfd, patience_s):
            self.kill()
            wait_for_exit(self.pidfd, None)
        self.reap()
        os.close(self.pidfd)


# ---------------------------------------------------------------- the forkserver's side


def serve(connection: socket.socket, layout: StoreLayout, config: NodeConfig, next_keeper: NextKeeper | None) -> int:
    """Fork on request until the supervisor is gone. Returns the exit code. Called with the handled signals blocked."""
    # the signals may go to a whole group of processes; the supervisor decides
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    set_process_name("cmq-forkserver")
    failpoints.play("forkserver")
    gc.freeze()  # what the supervisor has made so far stays, too
    use_as(os.devnull, os.O_RDWR, 0)
    log = log_module.get_log("forkserver")
    # The kernel holds the lock until this process has fully ended: the next supervisor finds and ends a forkserver that
    # hangs, and waiting for the lock is waiting for the end of the process.
    acquire_role_lock(layout.role_lock("forkserver"))
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1)
            if not data:
                return 0
            request = orjson.loads(data)
            (fd,) = descriptors
            if request["role"] == "keeper":
                assert next_keeper is not None
                run = partial(next_keeper, request["life"], request["parent"], fd)
            else:
                run = partial(_become_worker, request, fd, layout, config)
            try:
                answer: dict[str, Any] = {"pid": _fork_twice(run, fd)}
            except OSError as error:  # no memory or no process slot: the supervisor tries again later
                log.error("cannot fork", role=request["role"], error=str(error))
                answer = {"error": f"cannot fork: {error}"}
            finally:
                os.close(fd)
            connection.send(orjson.dumps(answer))
        except (BrokenPipeError, ConnectionResetError):
            return 0


def _fork_twice(run: Callable[[], int], keep: int) -> int:
    """Fork a process and hand it over to the subreaper above this one. Returns its pid. Raises OSError."""
    read_end, write_end = os.pipe()

    def between() -> int:
        try:
            answer = fork(run, keep)
        except OSError as error:
            answer = -(error.errno or errno.EAGAIN)
        os.write(write_end, str(answer).encode())
        return 0

    try:
        try:
            with signals_held():  # a stop that is sent to a new keeper waits until it can pass it on
                middle = fork(between, keep, write_end)
        finally:
            os.close(write_end)
        os.waitpid(middle, 0)
        answer = int(os.read(read_end, 32) or b"-0")
    finally:
        os.close(read_end)
    if answer <= 0:
        raise OSError(-answer, os.strerror(-answer) if answer else "the process in between died")
    return answer


def _become_worker(request: dict[str, Any], lifeline_fd: int, layout: StoreLayout, config: NodeConfig) -> int:
    """In the worker: run it. Returns the exit code."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    role = str(request["role"])
    set_process_name(f"cmq-{role}")
    failpoints.play(role)
    lifeline = socket.socket(fileno=lifeline_fd)
    log = log_module.get_log(role)
    config = with_live_values(config, request["live"])
    log_module.configure(config.log.level, config.log.format)
    try:
        run = importlib.import_module(str(request["module"])).run
    except Exception as error:
        log.exception("cannot import the worker", error=repr(error))
        with contextlib.suppress(OSError):
            lifeline.send(wire.dumps({"event": "error", "error": f"cannot import {request['module']}: {error!r}"}))
        return 70
    return int(runtime.main(role, run, layout.root, config, lifeline, request["params"]))
