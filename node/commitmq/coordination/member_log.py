"""The members of each group, for the next coordinator: ``commitmq/group_members.log``, one JSON line per change.

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
from pathlib import Path

import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.write_all import write_all

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
        """Close the file. Changes that are noted and not written are written by the next :meth:`write`, with all the
        rest.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
