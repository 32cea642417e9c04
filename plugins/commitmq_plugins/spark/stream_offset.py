"""The offset of a stream: Spark writes it into its checkpoint before a micro-batch, and reads it again after a crash.

    {"version": 3,
     "begun": whether the stream has begun,
     "positions": {STORE: {TOPIC: {QUEUE: the next queue offset}}},
     "begins": {STORE: {TOPIC: {QUEUE: the queue offset at which the micro-batch that ends here begins}}},
     "incarnations": {STORE: {TOPIC: which topic of that name}},
     "generations": {STORE: {TOPIC: the store's generation when these positions were found}},
     "parts": {STORE: how many partitions the micro-batch that ends here is cut into}}

``begun``: Spark keeps no offset for the begin of a stream; it asks for it again when it plans the first micro-batch, and
after a crash in it. So that offset says nothing, and the end of the first micro-batch says where that one began.
``begins``: only queues of which the offset before has no position, or another one: all queues of the first micro-batch,
later new ones. ``incarnations``: a topic that is deleted and created again has queue offsets that begin at 0 again, so an
offset means nothing without its topic's incarnation. ``generations``: the log can end earlier than it did, after a power
cut or a repair, and then get other messages at the same offsets. Each time is a new generation of the store
(:mod:`commitmq.store.recovery.cut_history`), which says how far the positions of an older one are right. ``parts``: a
repeated attempt is cut like the first one, also when the program was restarted with other settings or on other machines
in between; the sink identifies stored rows by task and order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from commitmq.errors import ConfigError
from commitmq_plugins.spark.stores import Slice

VERSION: Final = 3
_VERSION: Final = "version"

Positions = dict[str, dict[str, dict[str, int]]]
Incarnations = dict[str, dict[str, str]]
Generations = dict[str, dict[str, int]]


@dataclass(slots=True)
class StreamOffset:
    """One offset; see the module."""

    begun: bool = True
    positions: Positions = field(default_factory=dict)
    begins: Positions = field(default_factory=dict)
    incarnations: Incarnations = field(default_factory=dict)
    generations: Generations = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamOffset:
        """Raises ConfigError for an offset of another version."""
        if data.get(_VERSION) != VERSION:
            raise ConfigError(
                f"the checkpoint has offsets of version {data.get(_VERSION, 1)}; this program knows {VERSION}: use "
                "the program that wrote it, or a new checkpoint"
            )
        return cls(
            bool(data["begun"]),
            _copied(data["positions"]),
            _copied(data["begins"]),
            {store: dict(topics) for store, topics in data["incarnations"].items()},
            {store: dict(topics) for store, topics in data["generations"].items()},
            dict(data["parts"]),
        )

    def to_json(self) -> dict[str, Any]:
        return {_VERSION: VERSION, **asdict(self)}

    def position(self, store: str, topic: str, queue_id: int, incarnation: str | None = None) -> int | None:
        """The next queue offset of a queue; None for a queue that was not seen yet, and with ``incarnation`` also for one
        of another topic of that name.
        """
        if incarnation not in (None, self.incarnation(store, topic)):
            return None
        return self.positions.get(store, {}).get(topic, {}).get(str(queue_id))

    def of(self, store: str) -> Iterator[tuple[str, int, int]]:
        """Topic, queue and position of each queue of a store."""
        for topic, queues in self.positions.get(store, {}).items():
            for queue, position in queues.items():
                yield topic, int(queue), position

    def incarnation(self, store: str, topic: str) -> str | None:
        """The incarnation of the topic that the positions belong to; None when it is unknown."""
        return self.incarnations.get(store, {}).get(topic)

    def begin(self, store: str, topic: str, queue_id: int, before: StreamOffset) -> int:
        """Where the micro-batch that ends here begins; ``before`` is the offset before this one. Raises ConfigError."""
        found = self.begins.get(store, {}).get(topic, {}).get(str(queue_id))
        if found is None:
            found = before.position(store, topic, queue_id, self.incarnations[store][topic])
        if found is None:
            raise ConfigError(f"the checkpoint does not say where queue {queue_id} of {topic!r} in {store} begins")
        return found

    def forget(self, store: str, topic: str, queue_id: int) -> None:
        """Have no position of a queue."""
        del self.positions[store][topic][str(queue_id)]

    def read(self, store: str, one: Slice, generation: int) -> None:
        """Count ``one`` as read, from its first message to its end, in this ``generation`` of the store. Queues of another
        incarnation of its topic are dropped.
        """
        self.generations.setdefault(store, {})[one.topic] = generation
        queue = str(one.queue_id)
        if self.incarnations.setdefault(store, {}).setdefault(one.topic, one.incarnation) != one.incarnation:
            self.incarnations[store][one.topic] = one.incarnation
            self.positions.get(store, {}).pop(one.topic, None)
        queues = self.positions.setdefault(store, {}).setdefault(one.topic, {})
        if queues.get(queue) != one.first:
            self.begins.setdefault(store, {}).setdefault(one.topic, {})[queue] = one.first
        queues[queue] = one.end

    def ahead(self) -> StreamOffset:
        """A copy to move forward, for a micro-batch that is not cut yet."""
        found = deepcopy(self)
        return replace(found, begun=True, begins={}, parts={})


def _copied(positions: Mapping[str, Any]) -> Positions:
    return {store: {topic: dict(queues) for topic, queues in topics.items()} for store, topics in positions.items()}
