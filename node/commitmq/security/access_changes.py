"""What a change of users and policies was, for the audit log: without secrets, of which it says only that they changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.security.access_table import AccessTable
from commitmq.security.audit import SUMMARY, AuditLimits, AuditLog
from commitmq.security.audit_line import Actor, Event
from commitmq.security.user import User

ROLE: Final = "users"
_KEY_CHARACTERS: Final = 12
_MOST_BYTES: Final = 1 << 30


def this_account() -> Actor:
    """The account of this process, which may write the store's files."""
    return Actor(f"uid {os.getuid()}", "file", "local")


@contextlib.contextmanager
def written_down(
    root: Path, actor: Actor, before: AccessTable, after: AccessTable, is_made: Callable[[], bool | None]
) -> Iterator[None]:
    """Write to the audit log of the store in ``root`` what the block is going to change; needs the lock of the users.

    ``is_made``: whether the change is there, although the block raised; None where that cannot be read. Raises StoreError
    where the audit log cannot be written: nobody would see that there was a change.
    """
    events = [*_users(actor, before, after), *_policies(actor, before, after)]
    # Only the store's owner changes users, with a sync for each change, and every line counts.
    limits = AuditLimits(changes_per_second=len(events), user_bytes_per_second=_MOST_BYTES)
    log = AuditLog(root / "commitmq" / "audit", ROLE, get_log(ROLE), limits, syncs_at_once=True)
    try:
        try:
            log.begin()
            _check(log)
            for one in events:
                log.write(one)
                _check(log)
            yield
        except BaseException as error:
            _tell(log, events, is_made(), f"{error}" or repr(error))
            raise
    finally:
        log.close()


def _check(log: AuditLog) -> None:
    if log.lost:
        raise StoreError(f"users stay as they are, because the change cannot be written down: {log.fault}")


def _tell(log: AuditLog, events: list[Event], is_there: bool | None, reason: str) -> None:
    """Write what became of a change that raised. Of one that was not made no line stays that has no ``failed`` behind it."""
    if is_there is not False:
        fate = "made, but a power cut may take it back" if is_there else "it cannot be read whether this was made"
        for one in events:
            log.write(replace(one, reason=f"{fate}: {reason}"))
        return
    for one in events:
        log.failed(one, reason)
        if log.lost:
            log.take_back()
            log.failed(Event(one.actor, SUMMARY), f"changes of users, {len(events)}, were not made: {reason}")
            break


def _users(actor: Actor, before: AccessTable, after: AccessTable) -> Iterator[Event]:
    for name in sorted(before.users.keys() | after.users.keys()):
        old, new = before.users.get(name), after.users.get(name)
        if old is not None and new is not None and old.keys != new.keys:
            yield from _keys(actor, old, new)
            old = replace(old, keys=new.keys)
        if old != new:
            operation = "user.add" if old is None else "user.delete" if new is None else "user.alter"
            now = _shown(new)
            if old is not None and new is not None and old.secret != new.secret:
                now = {**(now or {}), "secret": "another"}
            yield Event(actor, operation, f"User:{name}", before=_shown(old), after=now)


def _keys(actor: Actor, old: User, new: User) -> Iterator[Event]:
    shown = [{"keys": [one[:_KEY_CHARACTERS] for one in user.keys]} for user in (old, new)]
    if set(new.keys) - set(old.keys):
        yield Event(actor, "user.key.add", f"User:{new.name}", before=shown[0], after=shown[1])
    if set(old.keys) - set(new.keys):
        yield Event(actor, "user.key.remove", f"User:{new.name}", before=shown[0], after=shown[1])


def _shown(user: User | None) -> dict[str, Any] | None:
    if user is None:
        return None
    return {
        **user.shown(),
        "keys": [one[:_KEY_CHARACTERS] for one in user.keys],
        **user.shown_quotas(),
    }


def _policies(actor: Actor, before: AccessTable, after: AccessTable) -> Iterator[Event]:
    for name in sorted(before.policies.keys() | after.policies.keys()):
        old, new = before.policies.get(name), after.policies.get(name)
        if old != new:
            shown = [None if one is None else one.to_json() for one in (old, new)]
            yield Event(actor, "acl.change", f"User:{name}", before=shown[0], after=shown[1])
