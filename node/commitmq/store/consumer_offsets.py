"""Consumer group offsets as ``consumerOffset.json`` holds them (spec 1.4, 12.10).

``offsetTable`` maps ``topic@group`` to the next queue offset to consume by queue id; ``groupTopicMap`` is derived from
it on write and ignored on read. Members that we do not know are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.store import json_config
from commitmq.store.java import hash_map_order
from commitmq.store.json_config import DataVersion

SEPARATOR: Final = "@"
_GROUP_BUCKETS: Final = 64
_TOPIC_BUCKETS: Final = 16


@dataclass(slots=True)
class ConsumerOffsets:
    """The table: ``offsets[(topic, group)][queue id]`` is the next queue offset, in the file's order."""

    offsets: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    version: DataVersion = field(default_factory=DataVersion)
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> ConsumerOffsets:
        """From ``path`` or its ``.bak``; empty when there is neither. Raises StoreError."""
        return cls.from_json(json_config.load(path) or {}, path)

    @classmethod
    def from_json(cls, data: Any, path: Path | None = None) -> ConsumerOffsets:
        """Quoted and unquoted queue ids are both read; an entry without ``@`` has no group and is dropped."""
        try:
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            rest.pop("groupTopicMap", None)
            offsets: dict[tuple[str, str], dict[int, int]] = {}
            for name, queues in (rest.pop("offsetTable", None) or {}).items():
                topic, separator, group = str(name).partition(SEPARATOR)
                if separator:
                    offsets[topic, group] = {int(queue): int(offset) for queue, offset in queues.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the consumer offsets are not in RocketMQ's shape: {error}", path=path) from error
        return cls(offsets, version, rest)

    def to_json(self) -> dict[str, Any]:
        """The file's content; queue ids are unquoted keys, ascending."""
        topics: dict[str, list[str]] = {}
        for topic, group in self.offsets:
            topics.setdefault(group, []).append(topic)
        members = {
            "dataVersion": self.version.to_json(),
            # RocketMQ fills hash maps here; their order is not promised, but costs nothing and makes equal bytes.
            "groupTopicMap": {
                group: hash_map_order(topics[group], _TOPIC_BUCKETS) for group in hash_map_order(topics, _GROUP_BUCKETS)
            },
            "offsetTable": {
                f"{topic}{SEPARATOR}{group}": dict(sorted(queues.items()))
                for (topic, group), queues in self.offsets.items()
            },
            **self.unknown,
        }
        return dict(sorted(members.items()))

    def get(self, group: str, topic: str, queue: int) -> int | None:
        """The stored next queue offset; None when the group never committed one."""
        return self.offsets.get((topic, group), {}).get(queue)

    def put(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Store the next queue offset; whether it may go back is the caller's rule."""
        self.offsets.setdefault((topic, group), {})[queue] = offset

    def of_group(self, group: str) -> Iterator[tuple[str, int, int]]:
        """``(topic, queue id, next queue offset)`` of one group."""
        for (topic, name), queues in self.offsets.items():
            if name == group:
                for queue, offset in queues.items():
                    yield topic, queue, offset

    def remove_topic(self, topic: str) -> None:
        """Forget a deleted topic: a new one of its name begins at 0 again."""
        for key in [key for key in self.offsets if key[0] == topic]:
            del self.offsets[key]

    def remove_group(self, group: str) -> None:
        """Forget a deleted group."""
        for key in [key for key in self.offsets if key[1] == group]:
            del self.offsets[key]

    def persist(self, path: Path) -> None:
        """Write ``consumerOffset.json``, durably."""
        json_config.persist(path, self.to_json())
