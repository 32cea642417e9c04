"""Who made which topics and groups, so that one user makes no more than the quota: ``commitmq/makers.log``.

A request names its user: the guard does, or a process of the node that asks for one of its clients. What nobody in particular
has made counts for nobody, and neither do the retry topic and the dead-letter topic of a group that is there. A topic or a
group that is gone does not count any more: that is looked at when a user has as many as the quota.

The file is a :class:`MemberLog`, whose groups are ``topic USER`` and ``group USER``. It is not synced: a power cut may take
lines, and a user may make as many more.

The members of each group, for the next coordinator: ``commitmq/group_members.log``, one JSON line per change.

A line is ``[group, member, session time-out in ms]``, or ``[group, member, null]`` for a member that has left. Lines
are appended without a sync at the end of each turn that changed something, so they survive the death of the process.
After a power cut some may be missing. That costs at most a rebalance that waits for one session time-out, or a queue
that two consumers read until one of them learns that it is fenced. Commits are fenced in any case.

The cost of a change does not grow with the number of members. The file is rewritten when most of its lines belong to
members that have left, and whenever an append failed, because a torn line would hide those behind it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import orjson

from commitmq.errors import ProtocolError, StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import write_all
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX

_MAX_TIMEOUT_MS = 3_600_000
_SPARE_LINES = 4_096


class MemberLog:
    """The open file. ``members`` is ``{group: {member: session time-out in ms}}`` as noted."""

    def __init__(self, path: Path) -> None:
        """Read an earlier coordinator's file. A file that is missing, or ends in a torn line, is no error."""
        self.path = path
        self.members: dict[str, dict[str, int]] = {}
        self._staged: list[bytes] = []
        self._count = 0
        self._lines = 0
        self._size_bytes = 0
        self._fd = -1  # until the first write, which rewrites the file
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            return
        with contextlib.suppress(ValueError, TypeError):
            for line in lines[:-1]:
                group, member, timeout_ms = orjson.loads(line)
                self._keep(str(group), str(member), None if timeout_ms is None else int(timeout_ms))

    def note(self, group: str, member: str, timeout_ms: int | None) -> None:
        """Note that ``member`` is in ``group`` with this session time-out; None: that it has left."""
        if self.members.get(group, {}).get(member) == timeout_ms:
            return
        self._keep(group, member, timeout_ms)
        self._staged.append(orjson.dumps([group, member, timeout_ms], option=orjson.OPT_APPEND_NEWLINE))

    def _keep(self, group: str, member: str, timeout_ms: int | None) -> None:
        of_group = self.members.setdefault(group, {})
        self._count -= member in of_group
        if timeout_ms is None:
            of_group.pop(member, None)
        else:
            of_group[member] = min(timeout_ms, _MAX_TIMEOUT_MS)
            self._count += 1
        if not of_group:
            del self.members[group]

    def write(self) -> None:
        """Append the noted changes. Raises StoreError; the next call then writes the whole file."""
        if not self._staged:
            return
        lines = self._lines + len(self._staged)
        try:
            if self._fd < 0 or lines > 2 * self._count + _SPARE_LINES:
                self._write_anew()
            else:
                data = b"".join(self._staged)
                write_all(self._fd, data, self._size_bytes, place="members.append")
                self._lines, self._size_bytes = lines, self._size_bytes + len(data)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot write the members: {error.strerror}", path=self.path) from error
        self._staged.clear()

    def _write_anew(self) -> None:
        self.close()
        everybody = [
            orjson.dumps([group, member, timeout_ms], option=orjson.OPT_APPEND_NEWLINE)
            for group, members in self.members.items()
            for member, timeout_ms in members.items()
        ]
        data = b"".join(everybody)
        fd = atomic_file.write_beside(self.path, data, "members", durable=False, mode=0o600)
        try:
            atomic_file.take_name(self.path, "members")
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._lines, self._size_bytes = fd, len(everybody), len(data)

    def close(self) -> None:
        """Close the file. Changes that are not written are written by the next :meth:`write`, with all the rest."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


TOPIC: Final = "topic"
GROUP: Final = "group"
_NOTED: Final = 1
_SPARE: Final = 1_024


class Makers:
    """``who`` gives the user of the request that is handled at the moment; None for nobody."""

    def __init__(self, path: Path, existing: Mapping[str, Callable[[], Mapping[str, object]]]) -> None:
        """``existing``: of each kind, TOPIC and GROUP, what is there by name. Reads the file; never raises for it."""
        self._log, self._existing = MemberLog(path), existing
        self.who: Callable[[], str | None] = lambda: None
        self.most: Callable[[str, str], int] = lambda kind, user: 0
        """How many of a kind a user may have made; 0 for no bound."""
        self._owners: dict[tuple[str, str], str] = {}
        for key, names in self._log.members.items():
            kind, _, user = key.partition(" ")
            self._owners.update({(kind, name): user for name in names})
        self._prune()

    def makes(self, kind: str, name: str) -> None:
        """Note that ``name``, which is not there, is about to be made. Raises ProtocolError LIMIT_EXCEEDED."""
        if kind == TOPIC and _group_of(name) in self._existing[GROUP]():
            return
        user = self.who()
        if user is not None and (most := self.most(kind, user)) and self._count(kind, user) >= most:
            self._prune()
            if (count := self._count(kind, user)) >= most:
                raise ProtocolError(
                    "LIMIT_EXCEEDED",
                    f"user {user} has made {count} {kind}s, the most ([flow] user_{kind}s): delete some",
                )
        self._forget(kind, name)
        if user is not None:
            self._owners[kind, name] = user
            self._log.note(f"{kind} {user}", name, _NOTED)
            if len(self._owners) > 2 * sum(len(names()) for names in self._existing.values()) + _SPARE:
                self._prune()

    def write(self) -> None:
        """Append what was noted. Raises StoreError; the next call then writes everything."""
        self._log.write()

    def close(self) -> None:
        self._log.close()

    def _count(self, kind: str, user: str) -> int:
        return len(self._log.members.get(f"{kind} {user}", ()))

    def _forget(self, kind: str, name: str) -> None:
        user = self._owners.pop((kind, name), None)
        if user is not None:
            self._log.note(f"{kind} {user}", name, None)

    def _prune(self) -> None:
        """Forget what is gone."""
        there = {kind: names() for kind, names in self._existing.items()}
        for kind, name in [key for key in self._owners if key[1] not in there.get(key[0], ())]:
            self._forget(kind, name)


def _group_of(topic: str) -> str | None:
    """The group whose failed messages ``topic`` has."""
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return None
