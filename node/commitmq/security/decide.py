"""May a user do this? One pure function: no file, no socket, no clock (RocketMQ's ACL 2.0).

Super users may do everything. Of all others' entries those count that match the resource, one of the actions and the peer's
address; default entries only if no custom one does. Among those the most exact pattern decides, and among equally exact
ones Deny wins. Without a matching entry the answer is no.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from commitmq.security.policy import Action, Address, Entry, Policies
from commitmq.security.resource import Resource
from commitmq.security.user import User


class Decision(NamedTuple):
    """``entry`` decided; None for a super user, a disabled one, and where nothing matches."""

    allowed: bool
    reason: str
    entry: Entry | None = None


def decide(
    user: User, policies: Policies, resource: Resource, actions: Collection[Action], address: Address | None
) -> Decision:
    """Whether ``user`` at ``address`` may do one of ``actions`` on ``resource``."""
    if not user.is_enabled:
        return Decision(False, f"user {user.name} is disabled")
    if user.is_super:
        return Decision(True, "a super user may do everything")
    for entries in (policies.custom, policies.default):
        matching = [
            one for one in entries if one.pattern.matches(resource) and one.does(actions) and one.comes_from(address)
        ]
        if matching:
            entry = min(matching, key=lambda one: (one.pattern.rank, one.allow))
            wanted = "|".join(sorted(actions))
            verb = "allows" if entry.allow else "denies"
            return Decision(entry.allow, f"the entry {entry.pattern} of user {user.name} {verb} {wanted}", entry)
    wanted = "|".join(sorted(actions))
    return Decision(False, f"no entry of user {user.name} allows {wanted} on {resource}")


def of_other_addresses(
    policies: Policies, resource: Resource, actions: Collection[Action], address: Address | None
) -> list[Entry]:
    """The entries that speak of one of ``actions`` on ``resource``, but not of a peer at ``address``."""
    entries = (*policies.custom, *policies.default)
    matching = [one for one in entries if one.pattern.matches(resource) and one.does(actions)]
    return [one for one in matching if not one.comes_from(address)]
