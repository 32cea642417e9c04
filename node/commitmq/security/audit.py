"""The audit log of one process: who changed what, who was refused, and who used what for the first time in an hour.

A line is written before its change is made, with one system call, so a process that dies leaves no change without its line; it
may leave a line whose change never came. A thread syncs the file a second later. Lines are chained (:mod:`.audit_line`).

A node never waits for its audit log and never stops because of it. Where the file cannot be written, the log and
``status`` say so once; the next line that gets through tells how many are lost.

Owns ``commitmq/audit/ROLE.jsonl``. At ``max_file_bytes`` the file gets the number of its first line behind its name
(:mod:`.audit_files`), and the oldest is deleted, which a line in the chain announces.

Failpoints: ``audit.write`` (``short`` too), and those of :mod:`commitmq.files.disk` for files of the kind ``audit``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from commitmq import failpoints
from commitmq.files import disk
from commitmq.log import Log
from commitmq.security.audit_bounds import ChangesBound
from commitmq.security.audit_files import ENDING, first_of, last_line, older_files, older_name
from commitmq.security.audit_line import Actor, Decision, Event, digest, encoded

SUMMARY: Final = "audit.summary"
REMOVED: Final = "audit.removed"
_SYNC_S: Final = 1.0
_HOUR_S: Final = 3600.0
_FILE_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """The section ``[audit]`` of the settings."""

    enable: bool = True
    max_file_bytes: int = 16 * 1024 * 1024
    max_files: int = 10
    refusals_per_second: int = 100
    changes_per_second: int = 100
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
        self._fd = -1
        self._file = (-1, -1)  # device and inode
        self._size = self._number = self._first = self._junk = 0
        self._previous = ""
        self._is_resumed = self._is_closed = self._ends_open = False
        self._lost = 0
        self._faults: dict[str, str] = {}
        self._second = self._refused = self._untold = 0
        self._changes = ChangesBound(self.limits.changes_per_second)
        self._uses: set[tuple[str, str, str]] = set()
        self._hour_ends = 0.0
        self._is_full = False
        self._full_files: list[int] = []  # descriptors, for their last sync
        self._to_remove: list[Path] = []
        self._has_new_name = False
        self._thread: threading.Thread | None = None
        self._dirty, self._ends = threading.Event(), threading.Event()

    @property
    def fault(self) -> str:
        """Why lines cannot be written at present; empty when they can."""
        return next(iter(self._faults.values()), "")

    # ------------------------------------------------------------ what is written

    def write(self, event: Event) -> None:
        """Write one line. Never raises."""
        if self.limits.enable:
            with self._lock:
                self._append(event.members())

    def change(self, event: Event) -> None:
        """Write a change, before it is made; or that it failed. After ``changes_per_second`` lines of its user in a second
        only the first of each kind is written, and of the others how many there were. Never raises.
        """
        if not self.limits.enable:
            return
        with self._lock:
            self._begin_second()
            if self._changes.admits(event):
                self._append(event.members())
            else:
                self._wake()

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
        """Write that a request was refused; after ``refusals_per_second`` lines of a second only how many more there were."""
        if not self.limits.enable:
            return
        with self._lock:
            self._begin_second()
            self._refused += 1
            if self._refused > self.limits.refusals_per_second:
                self._untold += 1
                self._wake()
                return
            self._append(Event(actor, operation, resource, Decision.REFUSED, reason, request).members())

    def is_first(self, user: str, operation: str, resource: str) -> bool:
        """Whether this is the first such use in an hour, and is to be written. A use by a request of data costs this look."""
        now_s = time.monotonic()
        if now_s >= self._hour_ends:
            self._uses.clear()
            self._hour_ends, self._is_full = now_s + _HOUR_S, False
        key = user, operation, resource
        if key in self._uses or not self.limits.enable:
            return False
        if len(self._uses) < self.limits.uses_per_hour:
            self._uses.add(key)
            return True
        if not self._is_full and self.limits.uses_per_hour:
            self._is_full = True
            sentence = f"{self.limits.uses_per_hour} uses were written (audit.uses_per_hour); for an hour no more are"
            self.write(Event(Actor(), SUMMARY, reason=sentence))
        return False

    def close(self) -> None:
        """Write what waits, and sync. Nothing is written any more: another process may take the file over."""
        with self._lock:
            self._sum_up()
            self._is_closed = True
        if self._thread is not None:
            self._ends.set()
            self._dirty.set()
            self._thread.join()
        self._sync()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    # ------------------------------------------------------------ the file; all with the lock

    def _append(self, members: dict[str, Any]) -> None:
        """Write one line with one system call, if the disk lets it."""
        if self._is_closed:
            return
        try:
            self._open()
            if self._size >= self.limits.max_file_bytes and not self._junk and not self._ends_open:
                self._turn_over()
            self._put(members)
        except OSError as error:
            self._lost += 1
            self._say("write", f"cannot write the audit log {self.path}: {error.strerror}")
            return
        self._lost = 0
        self._say("write", "")
        if self._syncs_at_once:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="audit", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is left; the next line tries again
                thread.start()
                self._thread = thread
        self._wake()

    def _put(self, members: dict[str, Any]) -> None:
        begin = b"\n" if self._ends_open else b""
        junk = self._junk + len(begin) if self._junk else 0
        marks = {name: value for name, value in (("torn", junk), ("lost", self._lost)) if value}
        line = encoded({**members, **marks}, self._number + 1, self._previous, time.time_ns())
        data = begin + line
        written = os.write(self._fd, failpoints.clip("audit.write", data) if failpoints.ACTIVE else data)
        self._size += written
        if written < len(data) - 1:
            self._junk += written
            self._ends_open = self._ends_open or written > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._number += 1
        self._previous = digest(line[:-1])
        self._junk, self._ends_open = 0, written < len(data)

    def _open(self) -> None:
        """Open the file where it is not, or is another one by now. Raises OSError."""
        if self._fd >= 0:
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                found = None
            if found is not None and (found.st_dev, found.st_ino) == self._file:
                if found.st_size != self._size:
                    self._log.error("another program has changed the audit log", path=str(self.path))
                    self._take_size(found.st_size)
                return
            self._log.error("the audit log is gone; another file begins", path=str(self.path))
            os.close(self._fd)
            self._fd = -1
        self.path.parent.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        fd = disk.open_file(self.path, flags, "audit", _FILE_MODE)
        try:
            about = os.fstat(fd)
            if not self._is_resumed:
                self._resume(about.st_size)
            else:
                self._first = self._number + 1
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._file = fd, (about.st_dev, about.st_ino)
        if self._size != about.st_size:
            self._take_size(about.st_size)
        self._has_new_name = True

    def _take_size(self, size: int) -> None:
        """Go on behind what another program has made of the file; the chain shows it."""
        self._size, self._junk = size, 0
        self._ends_open = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _resume(self, size: int) -> None:
        """Take up the chain where the last process of this name left it. Raises OSError."""
        found = last_line(self.path)
        self._size = size
        if found is not None:
            self._number, self._previous = found.number, found.digest
            self._first = self._first_number()
            self._ends_open, self._junk = found.ends_open, size - found.end
        else:
            # No whole line: a new file, or one that holds the first line of a process that died.
            older = older_files(self.path)
            former = last_line(older[-1]) if older else None
            self._number, self._previous = (former.number, former.digest) if former is not None else (0, "")
            self._first = self._number + 1
            self._junk, self._ends_open = size, size > 0
        self._is_resumed = True

    def _first_number(self) -> int:
        """The number of the file's first line, from the end of the older file before it."""
        older = older_files(self.path)
        former = last_line(older[-1]) if older else None
        return 1 if former is None else former.number + 1

    def _turn_over(self) -> None:
        """Begin the next file. Where the full one cannot be renamed, it goes on. Raises OSError when there is no file then."""
        try:
            self._begin_file()
        except OSError as error:
            if self._fd < 0:
                raise
            self._say("files", f"a full file of the audit log goes on, {self.path}: {error.strerror}")
        else:
            self._say("files", "")

    def _begin_file(self) -> None:
        """Give the full file its other name, and begin the next one. Raises OSError."""
        disk.replace(self.path, older_name(self.path, self._first), "audit")
        self._full_files.append(self._fd)
        self._fd = -1
        self._size = self._junk = 0
        self._ends_open = False
        self._open()
        older = older_files(self.path)
        gone = older[: max(0, len(older) - self.limits.max_files + 1)]
        if gone:
            kept = older[len(gone) :]
            oldest = first_of(kept[0]) if kept else self._number + 1
            self._put({"op": REMOVED, "oldest": oldest})
            self._to_remove += gone

    def _begin_second(self) -> None:
        """Write what the last second left, if it is over."""
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            self._sum_up()
            self._second, self._refused = second, 0

    def _sum_up(self) -> None:
        if self._untold:
            count, self._untold = self._untold, 0
            reason = f"{count} more requests were refused in a second"
            self._append(
                {**Event(Actor(), SUMMARY, decision=Decision.REFUSED, reason=reason).members(), "count": count}
            )
        for actor, untold in self._changes.take():
            reason = f"{untold.total()} more changes of this user in a second"
            event = Event(actor, SUMMARY, reason=reason, after=dict(untold))
            self._append({**event.members(), "count": untold.total()})

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
                if self._untold or self._changes.has_untold:
                    self._wake()  # they came in this second, which is not over
            self._sync()

    def _sync(self) -> None:
        """Bring to the device what was written, and delete the files that are too many."""
        with self._lock:
            files, self._full_files = self._full_files, []
            gone, self._to_remove = self._to_remove, []
            has_new_name, self._has_new_name = self._has_new_name, False
        sentence = ""
        try:
            with self._lock:
                if self._fd >= 0:
                    files.append(os.dup(self._fd))
            for fd in files:
                disk.sync(fd, "audit")
            if has_new_name or gone:
                disk.sync_folder(self.path.parent, "audit")
            for path in gone:
                disk.unlink(path, "audit", missing_ok=True)
        except OSError as error:
            sentence = f"cannot bring the audit log {self.path} to the device: {error.strerror}"
        finally:
            for fd in files:
                os.close(fd)
        with self._lock:
            self._say("sync", sentence)
