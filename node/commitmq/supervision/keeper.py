"""The first process of a node: loads what all others run, forks the supervisor, and forks another one after a kill.

``commitmq start`` becomes the keeper (in the foreground) or forks it (in the background). Nothing of a node is executed
again: the keeper forks the supervisor, that the forkserver, and that the workers. So modules are loaded once, and all
processes share their memory. The keeper itself never opens a file of the store, a ZeroMQ context or a thread: each
supervisor is forked from the same clean image, and inherits nothing of the one that died.

A supervisor in the background whose keeper was killed gets another one from its forkserver: a child of the supervisor,
not its parent. That keeper reads from a pipe on which the supervisor writes its exit code when it ends by itself, and
which closes without a word when it was killed. Then the keeper forks the next supervisor, which is its child, and from
there on everything is as usual.

* SIGTERM and SIGINT are passed to the supervisor as SIGTERM and remembered: a supervisor that dies after that is not
  started again, so a stop stays a stop even when it goes wrong.
* A supervisor killed by any other signal is started again, after 100 ms at first, twice that each time up to 10 s, and
  from 100 ms again after it ran for a minute. It recovers the store as after any crash.
* An exit code is passed through. After a kill, that of a full disk (79) is not: the keeper starts another supervisor in
  the same way until there is room.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from commitmq import failpoints
from commitmq import log as log_module
from commitmq.config import NodeConfig
from commitmq.plugin.loading import BUILT_IN
from commitmq.semantics import movers
from commitmq.store.access import keep_private
from commitmq.store.layout import StoreLayout
from commitmq.supervision.console import console_report, pipe_report
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.processes import (
    HANDLED_SIGNALS,
    fork,
    pass_interpreter_on,
    release_library_pages,
    set_process_name,
    signals_held,
)
from commitmq.supervision.roster import start_order
from commitmq.supervision.supervisor import Supervisor

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
WELL_AFTER_S = 60.0
_M_ARENA_MAX = -8  # of glibc's mallopt(3)


@dataclass(frozen=True, slots=True)
class Start:
    """What a node was started with. Every supervisor of its life runs with exactly these values.

    ``report_fd``: in the background a pipe on which the supervisor reports to a waiting ``start`` (-1: none), in the
    foreground the standard error of the command.
    """

    store: Path
    config: NodeConfig
    background: bool
    report_fd: int


class Parent:
    """The supervisor above a keeper of the life ``life`` that it started itself; ``word_fd`` is the pipe from it."""

    def __init__(self, life: str, pid: int, word_fd: int) -> None:
        self.life, self._word_fd = life, word_fd
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)
            if select.select([word_fd], [], [], 0)[0]:  # it has ended, and its number may name another process
                os.close(self._pidfd)
                self._pidfd = -1

    def end(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def wait(self) -> int:
        """The exit code that it writes; -1 when it ended without one."""
        word = os.read(self._word_fd, 1)
        os.close(self._word_fd)
        closing, self._pidfd = self._pidfd, -1
        if closing >= 0:
            os.close(closing)
        return word[0] if word else -1


def keep(start: Start, parent: Parent | None = None) -> int:
    """Keep one supervisor running; returns the exit code to end with. Called with :data:`HANDLED_SIGNALS` blocked, so that
    a stop that is sent to a new keeper is not lost.
    """
    asked = False
    child = 0

    def pass_on(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if child > 0:
            # The child cannot have been reaped and its pid reused: reaping happens below, with these signals blocked.
            os.kill(child, signal.SIGTERM)
        elif parent is not None:
            parent.end()

    set_process_name("cmq-keeper")
    failpoints.play("keeper")
    if start.background:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    # A closed terminal must not kill a process that writes a log; in the foreground it ends the node in order.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if start.background else pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    log_module.configure(start.config.log.level, start.config.log.format)
    log_module.follow(StoreLayout(start.store).log)
    log = log_module.get_log("keeper")
    if failpoints.ACTIVE:
        failpoints.hit("keeper.begin")

    pause_s = FIRST_PAUSE_S
    was_killed = parent is not None  # a node that ran is started again also when the disk is full in the meantime
    if parent is not None:
        code = parent.wait()
        if code >= 0:
            return code
        if asked:
            return CliExit.UNCLEAN_STOP
        log.warning("supervisor was killed, starting it again")
    else:
        load(start.config)
    while True:
        started = time.monotonic()
        with signals_held():
            if asked:
                return CliExit.UNCLEAN_STOP
            child = _start(start, parent.life if parent is not None else "")
        if failpoints.ACTIVE:
            failpoints.hit("keeper.after_start")
        _wait_for(child)
        with signals_held():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            child = 0
        if code >= 0 and not (code == CliExit.NO_ROOM and was_killed and not asked):
            return code
        if asked or -code in (signal.SIGTERM, signal.SIGINT):
            return CliExit.UNCLEAN_STOP
        was_killed = True
        if time.monotonic() - started >= WELL_AFTER_S:
            pause_s = FIRST_PAUSE_S
        why = f"supervisor was killed by signal {-code}" if code < 0 else "the disk has no room for a start"
        log.warning(f"{why}, starting it again in {pause_s:.1f} s")
        # the loop above sees a stop that comes during this sleep: the handler has run, and no child is started
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def load(config: NodeConfig) -> None:
    """Import what the processes of a node of ``config`` run. Movers, which most nodes never start, import their own part."""
    # BLAS would start its thread pools while numpy is imported, and they are of no use here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "MALLOC_ARENA_MAX" not in os.environ:
        # glibc makes up to eight arenas per core, each of which keeps the memory freed into it; a worker needs two at most.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    pass_interpreter_on()
    gc.disable()  # what is imported stays, and collections while it grows would be a tenth of the time
    roles = start_order(config)
    own = [module for role, module in roles.items() if role not in movers.ROLES]
    dispatchers = [name for name in BUILT_IN if name.startswith("commitmq_dispatchers.")]
    for name in (*own, *dispatchers, "commitmq.workers.discovery", "encodings.ascii"):
        # A broken module must not stop the others: the worker imports it again and reports the reason.
        with contextlib.suppress(Exception):
            import_module(name)
    # A collection never visits frozen objects, so the collector of no process copies the shared pages.
    gc.freeze()
    gc.enable()
    release_library_pages()


def _start(start: Start, life: str) -> int:
    """Fork a supervisor; returns its pid. Called with the handled signals blocked."""
    return fork(partial(supervise, start, os.getpid(), life), *((start.report_fd,) if start.report_fd >= 0 else ()))


def supervise(start: Start, keeper_pid: int, life: str) -> int:
    """Run one supervisor; returns its exit code. Called with the handled signals blocked, until it handles them."""
    os.setpgid(0, 0)  # Ctrl-C reaches only the keeper, which passes it on once
    set_process_name("cmq-supervisor")
    failpoints.play("supervisor")
    report = (pipe_report if start.background else console_report)(start.report_fd)
    events: set[str] = set()

    def tell(message: dict[str, Any]) -> None:
        events.add(message["event"])
        report(message)

    def next_keeper(life: str, parent: int, word_fd: int) -> int:
        return keep(replace(start, report_fd=-1), Parent(life, parent, word_fd))

    supervisor: Supervisor | None = None
    keep_private(start.store)
    try:
        supervisor = Supervisor(
            start.store,
            start.config,
            keeper_pid=keeper_pid,
            next_keeper=next_keeper if start.background else None,
            report=tell,
            life=life,
        )
        code = int(supervisor.run())
    except Exception as error:  # the exit code must be right after any failure, and the workers end with the lifelines
        log_module.get_log("supervisor").exception("supervisor crashed", error=repr(error))
        if "ready" in events:
            os.kill(os.getpid(), signal.SIGKILL)  # the keeper starts the next one, as after any other kill
        report({"event": "failed", "error": f"the supervisor crashed: {error!r}", "code": int(CliExit.CRASHED)})
        code = int(CliExit.CRASHED)
    if supervisor is not None:
        supervisor.last_word(code)
    return code


def _wait_for(child: int) -> None:
    """Wait for ``child`` without reaping it, and reap all other children that end: orphans come to pid 1."""
    while True:
        # Look first without reaping, so that the handler never signals a pid that is already free for reuse.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, 0)
