"""Watches the supervisor's keeper, and starts another one when it has died.

The first keeper is the supervisor's parent. A later one is its child, which cannot wait for the supervisor. So that
keeper reads from a pipe whose other end only the supervisor holds: it gets the exit code when the supervisor ends by
itself, and nothing when the supervisor was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final

from commitmq.log import Log
from commitmq.supervision.forkserver import ForkServerDied
from commitmq.supervision.processes import open_process, start_time_ticks
from commitmq.workers.runtime.context import monotonic_ms

_FIRST_PAUSE_MS: Final = 100
_LONGEST_PAUSE_MS: Final = 10_000
_WELL_AFTER_MS: Final = 60_000


class KeeperWatch:
    """One supervisor's keeper, and its successors. ``pid`` is 0 when there is none."""

    def __init__(self, pid: int, life: str, *, can_start: bool) -> None:
        """``can_start``: whether another keeper can be started at all."""
        self.can_start = can_start
        self.pid = pid
        self.restarts = 0
        ticks = start_time_ticks(pid) if pid else None
        self.life = life or (f"{pid}/{ticks}" if pid else "")
        self._pidfd = open_process(pid, ticks) if pid else None
        self._gone = bool(pid) and self._pidfd is None
        self._told = not self._gone
        self._word = -1  # this process's end of the pipe to a keeper that is its child
        self._pause_ms = _FIRST_PAUSE_MS
        self._started_ms = 0
        self._due_ms = 0

    @property
    def live_pid(self) -> int:
        return 0 if self._gone else self.pid

    @property
    def state(self) -> str:
        """``none``, ``running`` or ``gone``."""
        return "gone" if self._gone else "running" if self.pid else "none"

    def has_ended(self) -> bool:
        """True once after each keeper's end."""
        if not self._gone and self._pidfd is not None and self._is_over():
            self._gone, self._told = True, False
            os.close(self._pidfd)
            self._pidfd = None
            if self._word >= 0:
                os.close(self._word)
                self._word = -1
            now_ms = monotonic_ms()
            if now_ms - self._started_ms >= _WELL_AFTER_MS:
                self._pause_ms = _FIRST_PAUSE_MS
            self._due_ms = now_ms if not self.restarts else now_ms + self._pause_ms
            self._pause_ms = min(2 * self._pause_ms, _LONGEST_PAUSE_MS)
        if self._gone and not self._told:
            self._told = True
            return True
        return False

    def _is_over(self) -> bool:
        assert self._pidfd is not None
        if not self._word < 0:
            # A keeper that is this process's child is over as soon as it is a zombie; only this process can wait for it.
            with contextlib.suppress(ChildProcessError):
                return os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG) is not None
            return True
        return os.getppid() != self.pid

    def is_due(self, now_ms: int) -> bool:
        """Whether a new keeper should be started now."""
        return self._gone and self.can_start and now_ms >= self._due_ms

    def start(self, now_ms: int, fork: Callable[[str, int], int]) -> None:
        """Let ``fork`` make a keeper, a child of this process. After a ForkServerDied it is due again a moment later."""
        self._due_ms = now_ms + self._pause_ms
        theirs, ours = os.pipe()
        try:
            self.pid = fork(self.life, theirs)
        except ForkServerDied:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._word, self._gone = ours, False
        self._pidfd = os.pidfd_open(self.pid)
        self._started_ms = now_ms
        self.restarts += 1

    def look_after(
        self,
        now_ms: int,
        *,
        fork: Callable[[str, int], int],
        stop: Callable[[str], None] | None,
        renew: Callable[[], None],
        log: Log,
    ) -> None:
        """``fork`` another keeper when one has ended, or ``stop`` the node if that is given. ``renew``: there is a new pid."""
        if self.has_ended():
            if stop is not None:
                stop("the keeper is gone")
                return
            if not self.can_start:
                log.warning("the keeper is gone: nothing would start this supervisor again if it were killed")
            else:
                log.warning("the keeper is gone, starting another one")
        if self.is_due(now_ms):
            try:
                self.start(now_ms, fork)
            except ForkServerDied as error:
                log.error("cannot start a keeper", error=str(error))
            else:
                log.info("keeper started", pid=self.pid, restarts=self.restarts)
                renew()

    def tell_stop(self) -> None:
        """Stop the keeper from starting another supervisor: the node is being stopped."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def last_word(self, code: int) -> None:
        """Report this process's exit code to a keeper that is its child, just before this process ends."""
        if self._word >= 0:
            with contextlib.suppress(OSError):
                os.write(self._word, bytes([code & 0xFF]))
