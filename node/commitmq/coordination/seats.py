"""The connection through which each group member speaks, so that the end of a connection shortens the member's session.

A program that is killed closes its connections at that moment, long before its session would end. A connection can also end
while its program lives. So the member keeps its queues for ``groups.disconnect_grace_ms`` more: its next heartbeat, over a
new connection, makes its session as long as before. RocketMQ ends a client's membership when its channel closes.

A connection counts for one member, the last that spoke through it; clients have one for each. A list of members shows who is
at the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from commitmq.coordination.groups import Groups

Seat = tuple[str, str]
"""Group and member."""


class Seats:
    """Members by connection. As many as there are connections of members."""

    def __init__(self, groups: Groups, grace_ms: int) -> None:
        """``grace_ms``: 0 for no effect of an ended connection."""
        self._groups, self.grace_ms = groups, grace_ms
        self._who_of: dict[Seat, tuple[str, str]] = {}
        self._seat_of: dict[bytes, Seat] = {}
        self._peer_of: dict[Seat, bytes] = {}

    def __len__(self) -> int:
        return len(self._seat_of)

    def who(self, group: str, member: str) -> tuple[str, str]:
        """User and address of the member's connection, empty where nothing is known of it."""
        return self._who_of.get((group, member), ("", ""))

    def take(self, peer: bytes, group: str, member: str, who: Callable[[], tuple[str, str]] = lambda: ("", "")) -> None:
        """``member`` spoke through the connection ``peer``, which lives; ``who`` says user and address of the peer.

        A first request can be here before its connection is known: then ``who`` has no address, and is asked again.
        """
        seat = (group, member)
        if self._peer_of.get(seat) == peer:
            if not self._who_of[seat][1]:
                self._who_of[seat] = who()
            return
        former = self._seat_of.get(peer)
        if former is not None:
            del self._peer_of[former], self._who_of[former]
        other = self._peer_of.get(seat)
        if other is not None:
            del self._seat_of[other]
        self._seat_of[peer], self._peer_of[seat], self._who_of[seat] = seat, peer, who()

    def ended(self, peers: Iterable[bytes], now_ms: int) -> None:
        """These connections ended."""
        for peer in peers:
            seat = self._seat_of.pop(peer, None)
            if seat is None:
                continue
            del self._peer_of[seat], self._who_of[seat]
            if self.grace_ms:
                self._groups.connection_ended(*seat, now_ms, self.grace_ms)
