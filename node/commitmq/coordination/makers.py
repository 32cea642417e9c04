"""Who made which topics and groups, so that one user makes no more than the quota: ``commitmq/makers.log``.

A request names its user: the guard does, or a process of the node that asks for one of its clients. What nobody in particular
has made counts for nobody, and neither do the retry topic and the dead-letter topic of a group that is there. A topic or a
group that is gone does not count any more: that is looked at when a user has as many as the quota.

The file is a :class:`MemberLog`, whose groups are ``topic USER`` and ``group USER``. It is not synced: a power cut may take
lines, and a user may make as many more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from commitmq.coordination.member_log import MemberLog
from commitmq.errors import ProtocolError
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX

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
