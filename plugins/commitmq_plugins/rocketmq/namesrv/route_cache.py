"""Encoded routes. Clients ask for them all the time, so they are kept until they change, as far as there is room."""

from __future__ import annotations


class RouteCache:
    """Bodies by topic, of ``max_bytes`` at most: when there is no room for one more, all are forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._bodies: dict[str, bytes] = {}

    def get(self, topic: str) -> bytes | None:
        return self._bodies.get(topic)

    def put(self, topic: str, body: bytes) -> None:
        """A body that alone has more than ``max_bytes`` is not kept."""
        self.drop(topic)
        if self._bytes + len(body) > self._max_bytes:
            self.clear()
        if len(body) <= self._max_bytes:
            self._bodies[topic] = body
            self._bytes += len(body)

    def drop(self, topic: str) -> None:
        """The route of ``topic`` has changed."""
        self._bytes -= len(self._bodies.pop(topic, b""))

    def clear(self) -> None:
        """Any route may have changed."""
        self._bodies.clear()
        self._bytes = 0
