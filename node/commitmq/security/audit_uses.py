"""Which first uses of this hour the audit log has, of all users: a use by a request of data costs a look here.

Each user has a share, so nobody turns off the lines of others by many names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from commitmq.security.audit_line import MAX_NAME

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
        """Whether this is the first such use in an hour, and is to be written.

        What is cut in a line is cut here too: it is asked before a name is refused as too long, and nothing of that stays.
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
