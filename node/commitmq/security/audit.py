"""The audit log of one process: who changed what, who was refused, and who used what for the first time in an hour.

A line is written before its change is made, with one system call, so a process that dies leaves no change without its line; it
may leave a line whose change never came. A thread syncs the file a second later. Lines are chained (:mod:`.audit_line`).

A node never waits for its audit log and never stops because of it. Where the file cannot be written, the log and
``status`` say so once; the thread tries again each second, and the next line that gets through tells how many are lost.

Owns two chains (:mod:`.audit_chain`): ``commitmq/audit/ROLE.jsonl``, and for refusals ``ROLE.refused.jsonl``, so that they
roll no change away. What a user can cause is bounded (:mod:`.audit_bounds`).

Failpoints: ``audit.write`` (``short`` too), and those of :mod:`commitmq.files.disk` for files of the kind ``audit``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from commitmq.log import Log
from commitmq.security.audit_bounds import LinesBound
from commitmq.security.audit_chain import AuditChain
from commitmq.security.audit_files import ENDING, REFUSALS
from commitmq.security.audit_line import Actor, Decision, Event
from commitmq.security.audit_uses import FirstUses

SUMMARY: Final = "audit.summary"
_SYNC_S: Final = 1.0
_SHARES: Final = 16
"""Refusals of all users together may have the bytes of so many users: a refused client may claim any name."""


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """The section ``[audit]`` of the settings."""

    enable: bool = True
    max_file_bytes: int = 16 * 1024 * 1024
    max_files: int = 10
    refusals_per_second: int = 20
    changes_per_second: int = 100
    user_bytes_per_second: int = 2_048
    uses_per_hour: int = 10_000


class AuditLog:
    """See the module. Nothing is opened before the first line. May be called by several threads.

    ``told`` gets the sentence about a fault, and an empty one when it has passed; it may raise.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        log: Log,
        limits: AuditLimits | None = None,
        *,
        told: Callable[[str], object] | None = None,
        syncs_at_once: bool = False,
    ) -> None:
        """``folder``: ``commitmq/audit`` of the store. ``syncs_at_once``: for a process that ends soon; no thread then."""
        self.path = folder / f"{role}{ENDING}"
        self.limits = limits or AuditLimits()
        self._log, self._told, self._syncs_at_once = log, told, syncs_at_once
        self._lock = threading.Lock()
        self._main = self._chain(folder / f"{role}{ENDING}")
        self._refused = self._chain(folder / f"{role}{REFUSALS}{ENDING}")
        self._chains = (self._main, self._refused)
        self._is_closed = False
        self._faults: dict[str, str] = {}
        self._second = 0
        most, rate = self.limits.changes_per_second, self.limits.user_bytes_per_second
        self._changes = LinesBound(most, rate)
        self._refusals = LinesBound(self.limits.refusals_per_second, rate, _SHARES)
        most = self.limits.uses_per_hour if self.limits.enable else 0
        self._uses = FirstUses(most, partial(self._no_more, "uses"))
        self._connections = FirstUses(most, partial(self._no_more, "connections"))
        self._thread: threading.Thread | None = None
        self._dirty, self._ends = threading.Event(), threading.Event()

    def _chain(self, path: Path) -> AuditChain:
        limits = self.limits

        def say(what: str, sentence: str) -> None:
            self._say(f"{path.name} {what}", sentence)

        return AuditChain(path, self._log, say, max_file_bytes=limits.max_file_bytes, max_files=limits.max_files)

    @property
    def fault(self) -> str:
        """Why lines cannot be written at present; empty when they can."""
        return next(iter(self._faults.values()), "")

    @property
    def lost(self) -> int:
        """Lines that could not be written; the next one that can says so."""
        return sum(one.lost for one in self._chains)

    # ------------------------------------------------------------ what is written

    def write(self, event: Event) -> None:
        """Write one line that no user can cause at will. Never raises."""
        if self.limits.enable:
            with self._lock:
                self._append(self._main, event.members())

    def begin(self) -> None:
        """Begin a change of several lines, which :meth:`take_back` can take back. Never raises."""
        with self._lock:
            self._main.begin()

    def take_back(self) -> None:
        """Take all lines since :meth:`begin` back: what they tell was not made, and that cannot be written. Never raises."""
        with self._lock:
            self._main.take_back()

    def change(self, event: Event) -> None:
        """Write a change, before it is made; or that it failed. Beyond what its user may cause (:mod:`.audit_bounds`) only how
        many there were is written. Never raises.
        """
        self._bounded(self._changes, event, f"{event.operation} {event.decision}")

    def used(self, event: Event) -> None:
        """Write a use, which :meth:`is_first` was asked for; bounded as a change is. Never raises."""
        self._bounded(self._changes, event, f"{event.operation} {event.decision}")

    @contextlib.contextmanager
    def changing(self, event: Event) -> Iterator[None]:
        """:meth:`change` with ``event`` before the change in the block, and that it failed when the block raises."""
        self.change(event)
        try:
            yield
        except BaseException as error:
            self.failed(event, f"{error}" or repr(error))
            raise

    def failed(self, event: Event, reason: str) -> None:
        """Write that a change, which :meth:`change` was told of, was not made."""
        self.change(replace(event, decision=Decision.FAILED, reason=reason, before=None, after=None))

    def refused(
        self, actor: Actor, operation: str, resource: str = "", reason: str = "", request: int | None = None
    ) -> None:
        """Write that a request was refused. Refusals have files of their own, and of those beyond what their user may cause,
        and beyond what all may cause together, only the number is written.
        """
        self._bounded(self._refusals, Event(actor, operation, resource, Decision.REFUSED, reason, request))

    def _bounded(self, bound: LinesBound, event: Event, kind: str = "") -> None:
        if not self.limits.enable:
            return
        with self._lock:
            now_s = self._begin_second()
            if bound.admits(event.actor, event.operation, now_s, kind):
                self._charged(bound, event.actor, event.members(), now_s)
            else:
                self._wake()

    def is_first(self, user: str, operation: str, resource: str) -> bool:
        """Whether this is the first such use in an hour, and is to be written (:mod:`.audit_uses`)."""
        return self._uses.is_first(user, operation, resource)

    def is_first_connection(self, user: str, key: str, address: str) -> bool:
        """The same of a connection, of which uses take no place."""
        return self._connections.is_first(user, key, address)

    def _no_more(self, what: str, user: str, share: int) -> None:
        sentence = f"the first {share} {what} of this user in the hour have lines (audit.uses_per_hour), no more"
        self.write(Event(Actor(user), SUMMARY, reason=sentence))

    def close(self) -> None:
        """Write what waits, and sync. Nothing is written any more: another process may take the file over."""
        with self._lock:
            self._sum_up(time.monotonic())
            self._is_closed = True
        if self._thread is not None:
            self._ends.set()
            self._dirty.set()
            self._thread.join()
        self._sync()
        with self._lock:
            for one in self._chains:
                one.close()

    # ------------------------------------------------------------ lines; all with the lock

    def _append(self, chain: AuditChain, members: dict[str, Any]) -> int:
        """Write one line, if the disk lets it. Returns its bytes."""
        if self._is_closed:
            return 0
        written = chain.append(members)
        if self._syncs_at_once:
            return written
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="audit", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is left; the next line tries again
                thread.start()
                self._thread = thread
        self._wake()
        return written

    def _charged(self, bound: LinesBound, actor: Actor, members: dict[str, Any], now_s: float) -> None:
        chain = self._refused if bound is self._refusals else self._main
        bound.charge(actor, self._append(chain, members), now_s)

    def _begin_second(self) -> float:
        """Write what the last second left, if it is over. Returns the time."""
        now_s = time.monotonic()
        if int(now_s) != self._second:
            self._sum_up(now_s)
            self._second = int(now_s)
        return now_s

    def _sum_up(self, now_s: float) -> None:
        for actor, untold, users in self._refusals.take(now_s):
            count, of_whom = untold.total(), "this user" if users == 1 else f"{users} users"
            reason = f"{count} more requests of {of_whom} were refused in a second"
            event = Event(actor, SUMMARY, decision=Decision.REFUSED, reason=reason)
            self._charged(self._refusals, actor, {**event.members(), "count": count}, now_s)
        for actor, untold, users in self._changes.take(now_s):
            count, of_whom = untold.total(), "this user" if users == 1 else f"{users} users"
            event = Event(actor, SUMMARY, reason=f"{count} more changes of {of_whom} in a second", after=dict(untold))
            self._charged(self._changes, actor, {**event.members(), "count": count}, now_s)

    def _say(self, what: str, sentence: str) -> None:
        """Tell of a fault of ``what`` once, and once that it has passed."""
        if self._faults.get(what, "") == sentence or (sentence and what in self._faults):
            return
        if sentence:
            self._faults[what] = sentence
            self._log.error(sentence)
        else:
            del self._faults[what]
            self._log.info("the audit log is written again")
        if self._told is not None:
            with contextlib.suppress(Exception):
                self._told(self.fault)

    # ------------------------------------------------------------ the thread

    def _wake(self) -> None:
        if not self._dirty.is_set():
            self._dirty.set()

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            if self._ends.wait(_SYNC_S):
                return
            self._dirty.clear()
            with self._lock:
                self._begin_second()
                if self._refusals.has_untold or self._changes.has_untold:
                    self._wake()  # they came in this second, which is not over
                if self._faults:
                    for one in self._chains:
                        one.try_again()
            self._sync()
            if self._faults:
                self._wake()

    def _sync(self) -> None:
        for one in self._chains:
            one.sync(self._lock)
