"""What a user may take of a node: quotas, of all users in the settings ``[flow]`` and of one in the file of users."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

QUOTAS: Final = (
    "send_messages_per_s",
    "send_bytes_per_s",
    "pull_messages_per_s",
    "pull_bytes_per_s",
    "topics",
    "groups",
    "connections",
    "pending_bytes",
)
"""The setting of each for all users is ``flow.user_NAME``. With 0 there is no bound."""
MAX_QUOTA: Final = 1 << 50
_SIZES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1_000**at for at, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1_024**at for at, prefix in enumerate("kmgt", 1)},
}
_TEXT: Final = re.compile(r"(\d[\d_]*)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quota:
    """All quotas of one user."""

    send_messages_per_s: int = 0
    send_bytes_per_s: int = 0
    pull_messages_per_s: int = 0
    pull_bytes_per_s: int = 0
    topics: int = 0
    groups: int = 0
    connections: int = 0
    pending_bytes: int = 0

    @classmethod
    def of_settings(cls, flow: object) -> Quota:
        """That of all users, in the settings ``[flow]``."""
        return cls(**{name: getattr(flow, f"user_{name}") for name in QUOTAS})

    def laid_over(self, quotas: Mapping[str, int]) -> Quota:
        """With those that a user has instead."""
        return Quota(**{name: quotas.get(name, getattr(self, name)) for name in QUOTAS})


def quotas_from_json(members: Any) -> tuple[tuple[str, int], ...]:
    """A user's own quotas in the file of users, in the order of QUOTAS. Raises ValueError."""
    if not isinstance(members, dict):
        raise ValueError(f"quotas must be an object, not {members!r:.100}")
    for name, number in members.items():
        if name not in QUOTAS:
            raise ValueError(f"there is no quota {name!r:.100}; they are {', '.join(QUOTAS)}")
        if type(number) is not int or not 0 <= number <= MAX_QUOTA:
            raise ValueError(f"the quota {name} must be a number from 0 to {MAX_QUOTA}, not {number!r:.100}")
    return tuple((name, members[name]) for name in QUOTAS if name in members)


def parse_quota(text: str) -> tuple[str, int | None]:
    """``NAME=NUMBER``; a quota of bytes may have a unit, as in ``send_bytes_per_s=10MiB``. None for ``NAME=default``.

    Raises ValueError.
    """
    name, equals, value = (one.strip() for one in text.partition("="))
    if name not in QUOTAS or not equals:
        raise ValueError(f"{text!r:.100} is no quota: write NAME=NUMBER, with a name of {', '.join(QUOTAS)}")
    if value == "default":
        return name, None
    found = _TEXT.fullmatch(value)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _SIZES or (unit and "bytes" not in name):
        units = ", or bytes with a unit such as 10MiB" if "bytes" in name else ""
        raise ValueError(f"{name}={value!r:.100}: write a whole number{units}; 0 for no bound, default for the node's")
    number = int(found[1].replace("_", "")) * _SIZES[unit]
    if number > MAX_QUOTA:
        raise ValueError(f"{name}={value:.100}: the most is {MAX_QUOTA}")
    return name, number
