"""Another broker under this broker's name: each registration takes the name from the other, and clients reach one by turns.

Two nodes are given one ``network.broker_name`` when a configuration is copied, or a store. No name server refuses the second
one, because a broker may come back at another address. But a broker that has registered, and finds the name with another
address again and again, is not alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commitmq.log import Log

_SIGHTINGS: Final = 2
"""The answer to the first look may be older than the registration."""
_REMEMBER_S: Final = 90.0
"""Each registers every 30 s, and has the name for that long."""


class Rival:
    """``address``: of the other broker; "" while none is known. ``tell`` is told when that changes."""

    def __init__(self, own_name: str, own_address: str, tell: Callable[[str], None], log: Log) -> None:
        self.address = ""
        self._name, self._own, self._tell, self._log = own_name, own_address, tell, log
        self._sightings, self._seen_s = 0, 0.0

    def look(self, found: str | None, now_s: float, *, is_registered: bool) -> None:
        """Take note of the address that a name server has for the name. ``is_registered``: it has heard of this broker."""
        if not is_registered or found in (None, self._own):
            self._sightings = 0
            if self.address and now_s - self._seen_s > _REMEMBER_S:
                self._log.info("no other broker has this broker's name any more", name=self._name, address=self.address)
                self._set("")
            return
        self._sightings += 1
        if self._sightings < _SIGHTINGS:
            return
        self._seen_s = now_s
        if self.address != found:
            self._log.error(
                "another broker registers under this broker's name: clients reach one of both, by turns; give each its own"
                " network.broker_name",
                name=self._name,
                address=found,
            )
            self._set(str(found))

    def _set(self, address: str) -> None:
        self.address = address
        self._tell(address)
