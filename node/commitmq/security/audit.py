"""The audit log of one process: who changed what, who was refused, and who used what for the first time in an hour.

A line is written before its change is made, with one system call, so a process that dies leaves no change without its
line; it may leave a line whose change never came. A thread syncs the file a second later. Lines are chained.

A node never waits for its audit log and never stops because of it. Where the file cannot be written, the log and
``status`` say so once; the thread tries again each second, and the next line that gets through tells how many are lost.

Owns two chains: ``commitmq/audit/ROLE.jsonl``, and for refusals ``ROLE.refused.jsonl``, so that they
roll no change away. What a user can cause is bounded.

Failpoints: ``audit.write`` (``short`` too), and those of :mod:`commitmq.files.disk` for files of the kind ``audit``.

One line of the audit log: a JSON object in the chain of its file.

    {"n":7,"time":"2026-11-26T07:15:02.123456Z","prev":"<64 hex>","user":"shop","key":"<12>","protocol":"native",
     "address":"10.1.2.3","op":"topic.create","resource":"Topic:orders","decision":"allowed","reason":"",
     "request":17,"before":null,"after":{...}}

``n`` counts the lines of one process from 1. ``prev`` is the SHA-256 of the line before without its line end, empty for
the first: a line that was changed, taken out or put in does not fit its neighbours. Members without a value are
omitted. ``key`` is the beginning of the public key. ``torn``: how many bytes of an unfinished line stand before this
one; ``lost``: how many lines could not be written since the line before, as on a full disk. Texts are cut, so a line
has a bounded length.

How much of the audit log each user may cause: nobody may fill it, and so roll others' lines out of it.

A user causes at most this many lines in a second, and in the long run this many bytes in a second; what was not used in
the last ten minutes may be used at once. Where nobody is asked who they are, a user is an address. Of what is not
written one line for each user tells how much it was; that line's bytes count as the user's too.

Which first uses of this hour the audit log has, of all users: a use by a request of data costs a look here.

Each user has a share, so nobody turns off the lines of others by many names.

The files of the audit log: their names, and their lines.

    commitmq/audit/ROLE.jsonl                    the file of a process, which it appends to
    commitmq/audit/ROLE.refused.jsonl            the same for refusals: they have a chain of their own
    commitmq/audit/ROLE.jsonl.000000000123       an older one, by the number of its first line

``users.jsonl`` is that of changes of users and policies; who changes them holds their lock (:mod:`.access_file`).

The chain of lines of one process in its files, as a process that writes it sees it; see :mod:`.audit`.

Owns ``commitmq/audit/NAME.jsonl``. At ``max_file_bytes`` the file gets the number of its first line behind its name
(:mod:`.audit_files`), and the oldest is deleted, which a line in the chain announces.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from commitmq import failpoints
from commitmq.files import disk
from commitmq.log import Log

MAX_LINE_BYTES: Final = 16 * 1024
_MAX_TEXT: Final = 200
MAX_NAME: Final = 144  # "Topic:" and the longest name of a topic
_MAX_VALUE_BYTES: Final = 2_000
_KEY_CHARACTERS: Final = 12


class AuditOutcome(StrEnum):
    """What became of a request. ``ALLOWED`` is written before a change is made, ``FAILED`` when it then was not."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks. ``name``: a user, ``uid N`` for an account, empty where nobody is asked. ``key``: public."""

    name: str = ""
    protocol: str = ""
    address: str = ""
    key: str = ""

    def cut(self) -> Actor:
        """As it stands in a line: a client whose signature is wrong may claim a name of any length."""
        return Actor(*(one[:MAX_NAME] for one in (self.name, self.protocol, self.address, self.key)))


@dataclass(frozen=True, slots=True)
class Event:
    """What was asked for. ``before`` and ``after``: of a change, as JSON; bodies, properties and secrets never stand there."""

    actor: Actor
    operation: str
    resource: str = ""
    decision: AuditOutcome = AuditOutcome.ALLOWED
    reason: str = ""
    request: int | None = None
    before: Any = None
    after: Any = None

    def members(self) -> dict[str, Any]:
        """The line's members, without those of the chain, and without empty ones."""
        actor = self.actor
        found = {
            "user": _text(actor.name, MAX_NAME),
            "key": _text(actor.key, _KEY_CHARACTERS),
            "protocol": _text(actor.protocol, MAX_NAME),
            "address": _text(actor.address, MAX_NAME),
            "op": _text(self.operation, MAX_NAME),
            "resource": _text(self.resource, MAX_NAME),
            "decision": str(self.decision),
            "reason": _text(self.reason, _MAX_TEXT),
            "request": _bounded(self.request),
            "before": _bounded(self.before),
            "after": _bounded(self.after),
        }
        return {name: value for name, value in found.items() if value not in ("", None)}


def _text(text: str, most: int) -> str:
    """Cut, and without lone surrogates, which JSON does not carry."""
    return text[:most].encode(errors="replace").decode()


def _bounded(value: Any) -> Any:
    if value is None:
        return None
    try:
        data = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return {"cut": _text(repr(value), _MAX_TEXT)}
    return value if len(data) <= _MAX_VALUE_BYTES else {"cut": data[:_MAX_VALUE_BYTES].decode(errors="replace")}


def encoded(members: dict[str, Any], number: int, previous: str, time_ns: int) -> bytes:
    """The line with its line end."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"
    line = {"n": number, "time": stamp, "prev": previous, **members}
    return orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The members of a line without its line end; None for what is none."""
    try:
        found = orjson.loads(line)
    except ValueError:
        return None
    is_line = isinstance(found, dict) and type(found.get("n")) is int and isinstance(found.get("prev"), str)
    return found if is_line and isinstance(found.get("time"), str) else None


def digest(line: bytes) -> str:
    """The ``prev`` of the line behind ``line``, which is without its line end."""
    return hashlib.sha256(line).hexdigest()


SAVED_S: Final = 600
"""A user may cause the bytes of this many seconds at once."""
_MOST_TOLD: Final = 10
"""Users with a summary of their own in a second: a client may claim any name when it is refused."""


class UnwrittenEvents(NamedTuple):
    """What a user caused, that was not written, by operation; or ``users`` of them, who have no lines of their own."""

    actor: Actor
    operations: Counter[str]
    users: int = 1


@dataclass(slots=True)
class _Account:
    """``left``: bytes that may be written at ``at_s``. The rest is of this second."""

    actor: Actor
    left: float
    at_s: float
    written: int = 0
    kinds: set[str] = field(default_factory=set)
    untold: Counter[str] = field(default_factory=Counter)


class LinesBound:
    """The lines that users cause. ``shares``: all users together have the bytes of so many; 0 for no such bound."""

    def __init__(self, most_lines: int, bytes_per_second: int, shares: int = 0) -> None:
        self._most_lines, self._rate, self._shares = most_lines, bytes_per_second, shares
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._all = _Account(Actor(), float(bytes_per_second * SAVED_S * shares), 0.0)

    def admits(self, actor: Actor, operation: str, now_s: float, kind: str = "") -> bool:
        """Whether a line is to be written. The first one of each ``kind`` in a second may be one line more."""
        found = self._account(actor, now_s)
        operation, kind = operation[:MAX_NAME], kind[: 2 * MAX_NAME]
        is_first = bool(kind) and kind not in found.kinds
        if (
            (found.written < self._most_lines or is_first)
            and self._refilled(found, now_s, 1) > 0
            and (not self._shares or self._refilled(self._all, now_s, self._shares) > 0)
        ):
            found.written += 1
            found.kinds.add(kind)
            return True
        found.untold[operation] += 1
        return False

    def charge(self, actor: Actor, size_bytes: int, now_s: float) -> None:
        """This many bytes were written for a user."""
        for one in (self._account(actor, now_s), self._all):
            one.left = max(one.left - size_bytes, -float(self._rate * SAVED_S))

    def take(self, now_s: float) -> list[UnwrittenEvents]:
        """Who caused lines that were not written. The next second begins."""
        untold = [UnwrittenEvents(one.actor, one.untold) for one in self._accounts.values() if one.untold]
        kept = {}
        for key, one in self._accounts.items():
            if self._refilled(one, now_s, 1) < self._rate * SAVED_S:
                one.written, one.kinds, one.untold = 0, set(), Counter()
                kept[key] = one
        self._accounts = kept
        own, others = untold[:_MOST_TOLD], untold[_MOST_TOLD:]
        if others:
            count: Counter[str] = Counter()
            for each in others:
                count["others"] += each.operations.total()
            own.append(UnwrittenEvents(Actor(), count, len(others)))
        return own

    @property
    def has_untold(self) -> bool:
        """Whether there is something that :meth:`take` would tell."""
        return any(one.untold for one in self._accounts.values())

    def _account(self, actor: Actor, now_s: float) -> _Account:
        key = (actor.name[:MAX_NAME], "") if actor.name else ("", actor.address[:MAX_NAME])
        found = self._accounts.get(key)
        if found is None:
            found = self._accounts[key] = _Account(actor.cut(), float(self._rate * SAVED_S), now_s)
        return found

    def _refilled(self, one: _Account, now_s: float, shares: int) -> float:
        rate = self._rate * shares
        one.left = min(float(rate * SAVED_S), one.left + max(0.0, now_s - one.at_s) * rate)
        one.at_s = now_s
        return one.left


SHARES: Final = 16
_HOUR_S: Final = 3600.0


class FirstUses:
    """``most``: uses in an hour, of which a user may have one in SHARES, at least one. ``told`` gets the user of whom no more
    are written, once in the hour, and the share.
    """

    def __init__(self, most: int, told: Callable[[str, int], object]) -> None:
        self._left = self._most = most
        self._share, self._told = -(-most // SHARES), told
        self._uses: dict[str, set[tuple[str, str]]] = {}
        self._full: set[str] = set()
        self._hour_ends = 0.0

    def is_first(self, user: str, operation: str, resource: str) -> bool:
        """Whether this is the first such use in an hour, and is to be written. What is cut in a line is cut here too:
        it is asked before a name is refused as too long, and nothing of that stays.
        """
        now_s = time.monotonic()
        if now_s >= self._hour_ends:
            self._uses.clear()
            self._full.clear()
            self._hour_ends, self._left = now_s + _HOUR_S, self._most
        key = operation[:MAX_NAME], resource[:MAX_NAME]
        uses = self._uses.get(user)
        if uses is not None and key in uses:
            return False
        if self._left > 0 and (uses is None or len(uses) < self._share):
            self._uses.setdefault(user, set()).add(key)
            self._left -= 1
            return True
        if self._most and user not in self._full:
            self._full.add(user)
            self._told(user, self._share)
        return False


ENDING: Final = ".jsonl"
REFUSALS: Final = ".refused"
_DIGITS: Final = 12
_TAIL_BYTES: Final = 128 * 1024


class RawLine(NamedTuple):
    """What stands between two line ends. ``members``: None for what is no line. ``is_whole``: a line end follows."""

    data: bytes
    at_byte: int
    members: dict[str, Any] | None
    is_whole: bool


class LastLine(NamedTuple):
    """Where a file's chain stands. ``end``: behind its last whole line. ``ends_open``: no line end is there."""

    number: int
    digest: str
    end: int
    ends_open: bool


def older_name(path: Path, first: int) -> Path:
    """The name of the file ``path`` when it is full; its first line has the number ``first``."""
    return path.with_name(f"{path.name}.{first:0{_DIGITS}d}")


def first_of(path: Path) -> int | None:
    """The number of the first line by the name of an older file; None for another name."""
    _, mark, digits = path.name.rpartition(f"{ENDING}.")
    return int(digits) if mark and len(digits) == _DIGITS and digits.isdecimal() and digits.isascii() else None


def older_files(path: Path) -> list[Path]:
    """The older files of ``path``, the oldest first. Raises OSError."""
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = [path.with_name(name) for name in names if name.startswith(f"{path.name}.")]
    return sorted(one for one in found if first_of(one) is not None)


def roles(folder: Path) -> list[str]:
    """The chains that have files in ``folder``. Raises OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = {name.partition(ENDING)[0] for name in names if name.endswith(ENDING) or first_of(Path(name)) is not None}
    return sorted(found)


def process_of(role: str) -> str:
    """The process that writes the chain ``role``."""
    return role.removesuffix(REFUSALS)


def pieces(data: bytes) -> Iterator[RawLine]:
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        piece = data[at:] if end < 0 else data[at:end]
        yield RawLine(piece, at, parsed(piece), end >= 0)
        at = len(data) if end < 0 else end + 1


def last_line(path: Path) -> LastLine | None:
    """The chain's end in a file; None where it has no whole line, or is not there. Raises OSError."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            for most in (_TAIL_BYTES, size):
                begin = max(0, size - most)
                file.seek(begin)
                found = _last_of(file.read(size - begin), begin)
                if found is not None or not begin:
                    return found
    except FileNotFoundError:
        pass
    return None


def _last_of(data: bytes, begin: int) -> LastLine | None:
    found, ends_open = None, bool(data) and not data.endswith(b"\n")
    former = None
    for one in pieces(data):
        if one.members is None:
            continue
        number, previous = one.members["n"], one.members["prev"]
        if not one.is_whole and former is not None and (number, previous) != (former.number + 1, former.digest):
            continue
        former = found = LastLine(
            number, digest(one.data), begin + one.at_byte + len(one.data) + one.is_whole, ends_open
        )
    return found


REMOVED: Final = "audit.removed"
GAP: Final = "audit.lost"
_FILE_MODE: Final = 0o600


class _State(NamedTuple):
    """Where a file and its chain stand."""

    size: int
    number: int
    previous: str
    junk: int
    ends_open: bool
    lost: int


class AuditChain:
    """Nothing is opened before the first line. Its owner has a lock for all calls but :meth:`sync`. ``say`` gets the
    kind of a fault with its sentence, and an empty one when it has passed.
    """

    def __init__(
        self, path: Path, log: Log, say: Callable[[str, str], None], *, max_file_bytes: int, max_files: int
    ) -> None:
        self.path = path
        self._log, self._say = log, say
        self._max_file_bytes, self._max_files = max_file_bytes, max_files
        self._fd = -1
        self._file = (-1, -1)  # device and inode
        self._size = self._number = self._first = self._junk = 0
        self._previous = ""
        self._is_resumed = self._ends_open = False
        self._begun: _State | None = None
        self.lost = 0
        self._full_files: list[int] = []  # descriptors, for their last sync
        self._to_remove: list[Path] = []
        self._has_new_name = self._is_new = False

    def append(self, members: dict[str, Any]) -> int:
        """Write one line with one system call, if the disk lets it. Returns its bytes; 0 when it is lost."""
        try:
            self._open()
            if self._begun is None:
                self._turn_over()
            written = self._put(members)
        except OSError as error:
            self._lose(error)
            return 0
        self.lost = 0
        self._is_new = True
        self._say("write", "")
        return written

    def begin(self) -> None:
        """The lines from here on may be taken back: they stay in one file."""
        try:
            self._open()
            self._turn_over()
        except OSError as error:
            self._lose(error)
        else:
            self._begun = _State(self._size, self._number, self._previous, self._junk, self._ends_open, self.lost)

    def take_back(self) -> None:
        """Take the lines since :meth:`begin` back; that needs no room on the disk."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            disk.resize(self._fd, begun.size, "audit")
        except OSError as error:
            self._say("write", f"cannot take lines back from the audit log {self.path}: {error.strerror}")
            return
        self._size, self._number, self._previous, self._junk, self._ends_open, self.lost = begun
        self._is_new = True

    def close(self) -> None:
        """Close the files; they were synced, if the device lets it."""
        while self._full_files:
            os.close(self._full_files.pop())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sync(self, lock: contextlib.AbstractContextManager[Any]) -> None:
        """Bring to the device what was written, and delete the files that are too many. Called without ``lock``."""
        with lock:
            if not self._is_new:
                return
            self._is_new = False
            full, self._full_files = self._full_files, []
            gone, self._to_remove = self._to_remove, []
            has_new_name, self._has_new_name = self._has_new_name, False
        sentence, newest = "", -1
        try:
            with lock:
                if self._fd >= 0:
                    newest = os.dup(self._fd)
            while full:
                disk.sync(full[0], "audit")
                os.close(full.pop(0))
            if newest >= 0:
                disk.sync(newest, "audit")
            if has_new_name or gone:
                disk.sync_folder(self.path.parent, "audit")
            for path in gone:
                disk.unlink(path, "audit", missing_ok=True)
        except OSError as error:
            sentence = f"cannot bring the audit log {self.path} to the device: {error.strerror}"
        finally:
            if newest >= 0:
                os.close(newest)
        with lock:
            if sentence:  # the next call tries again
                self._is_new = True
                self._full_files[:0], self._to_remove[:0] = full, gone
                self._has_new_name = self._has_new_name or has_new_name
            self._say("sync", sentence)

    def try_again(self) -> None:
        """After a fault, without waiting for the next line. A line says how many are lost, if any are."""
        lost = self.lost
        if lost:
            if not self.append({"op": GAP}):
                self.lost = lost  # the line of the gap is none that is missing
        elif self._fd >= 0:
            with contextlib.suppress(OSError):  # the next line meets it too
                self._turn_over()

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        self._say("write", f"cannot write the audit log {self.path}: {error.strerror}")

    def _put(self, members: dict[str, Any]) -> int:
        begin = b"\n" if self._ends_open else b""
        junk = self._junk + len(begin) if self._junk else 0
        marks = {name: value for name, value in (("torn", junk), ("lost", self.lost)) if value}
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
        return written

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
        self._size, self._junk, self._begun = size, 0, None
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
        """Begin the next file if this one is full, or continue where it cannot be renamed. Raises OSError for none."""
        if self._size < self._max_file_bytes or self._junk or self._ends_open:
            return
        try:
            self._begin_file()
        except OSError as error:
            if self._fd < 0:
                raise
            self._say("files", f"a full file of the audit log continues, {self.path}: {error.strerror}")
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
        gone = older[: max(0, len(older) - self._max_files + 1)]
        if gone:
            kept = older[len(gone) :]
            oldest = first_of(kept[0]) if kept else self._number + 1
            self._put({"op": REMOVED, "oldest": oldest})
            self._to_remove += gone


SUMMARY: Final = "audit.summary"
_SYNC_S: Final = 1.0
_SHARES: Final = 16
"""Refusals of all users together may have the bytes of this many users: a refused client may claim any name."""


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
    """The audit log of one process. Nothing is opened before the first line. May be called by several threads. ``told``
    gets the sentence about a fault, and an empty one when it has passed; it may raise.
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
        """Write a change before it is made, or its failure; only the number beyond a user's share. Never raises."""
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
        self.change(replace(event, decision=AuditOutcome.FAILED, reason=reason, before=None, after=None))

    def refused(
        self, actor: Actor, operation: str, resource: str = "", reason: str = "", request: int | None = None
    ) -> None:
        """Write that a request was refused. Refusals have files of their own, and of those beyond what their user may cause,
        and beyond what all may cause together, only the number is written.
        """
        self._bounded(self._refusals, Event(actor, operation, resource, AuditOutcome.REFUSED, reason, request))

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
        """Whether this is the first such use in an hour, and is to be written."""
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
            event = Event(actor, SUMMARY, decision=AuditOutcome.REFUSED, reason=reason)
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
