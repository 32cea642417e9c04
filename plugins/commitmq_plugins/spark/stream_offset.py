"""The offset of a stream: Spark writes it into its checkpoint before a micro-batch, and reads it again after a crash.

    {"version": 2,
     "positions": {STORE: {TOPIC: {QUEUE: the next queue offset}}},
     "incarnations": {STORE: {TOPIC: which topic of that name}},
     "parts": {STORE: how many partitions the micro-batch that ends here is cut into}}

``incarnations``: a topic that is deleted and created again has queue offsets that begin at 0 again, so an offset means
nothing without its topic's incarnation. ``parts``: a repeated attempt is cut like the first one, also when the program
was restarted with other settings or on other machines in between; the sink identifies stored rows by task and order.

Version 1 had only the positions. Such a checkpoint can be continued: its topics are taken for the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.errors import ConfigError

VERSION: Final = 2
_VERSION: Final = "version"

Positions = dict[str, dict[str, dict[str, int]]]
Incarnations = dict[str, dict[str, str]]


@dataclass(slots=True)
class StreamOffset:
    """One offset; see the module."""

    positions: Positions = field(default_factory=dict)
    incarnations: Incarnations = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamOffset:
        """Raises ConfigError for an offset of a later version."""
        if _VERSION not in data:
            return cls(_copied(data))
        if data[_VERSION] != VERSION:
            raise ConfigError(
                f"the checkpoint has offsets of version {data[_VERSION]}; this program knows {VERSION}: use the version that "
                "wrote it, or a new checkpoint"
            )
        return cls(
            _copied(data["positions"]),
            {store: dict(topics) for store, topics in data["incarnations"].items()},
            dict(data["parts"]),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            _VERSION: VERSION,
            "positions": self.positions,
            "incarnations": self.incarnations,
            "parts": self.parts,
        }

    def position(self, store: str, topic: str, queue_id: int) -> int | None:
        """The next queue offset of a queue; None for a queue that was not seen yet."""
        return self.positions.get(store, {}).get(topic, {}).get(str(queue_id))

    def incarnation(self, store: str, topic: str) -> str | None:
        """The incarnation of the topic that the positions belong to; None when it is unknown."""
        return self.incarnations.get(store, {}).get(topic)

    def put(self, store: str, topic: str, incarnation: str, queue_id: int, position: int) -> None:
        """Set a queue's position. Queues of another incarnation of its topic are dropped."""
        known = self.incarnation(store, topic)
        if known is not None and known != incarnation:
            self.positions.get(store, {}).pop(topic, None)
        self.incarnations.setdefault(store, {})[topic] = incarnation
        self.positions.setdefault(store, {}).setdefault(topic, {})[str(queue_id)] = position

    def ahead(self) -> StreamOffset:
        """A copy to move forward, for a micro-batch that is not cut yet."""
        incarnations = {store: dict(topics) for store, topics in self.incarnations.items()}
        return StreamOffset(_copied(self.positions), incarnations)


def _copied(positions: Mapping[str, Any]) -> Positions:
    return {store: {topic: dict(queues) for topic, queues in topics.items()} for store, topics in positions.items()}
