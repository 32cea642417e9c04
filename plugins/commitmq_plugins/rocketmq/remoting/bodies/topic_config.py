"""TopicConfig and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from commitmq_plugins.rocketmq.remoting.bodies.data_version import DataVersion
from commitmq_plugins.rocketmq.remoting.errors import BodyError
from commitmq_plugins.rocketmq.remoting.fastjson import as_bool, as_int, as_map, as_object, as_text
from commitmq_plugins.rocketmq.remoting.steps import Steps, finish, in_steps

PERM_READ: Final = 4
PERM_WRITE: Final = 2


@dataclass(slots=True)
class TopicConfig:
    """A topic as topics.json has it. ``perm``: 4 readable, 2 writable, 1 inherited."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ | PERM_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "attributes": self.attributes,
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queue_nums,
            "topicFilterType": self.topic_filter_type,
            "topicName": self.topic_name,
            "topicSysFlag": self.topic_sys_flag,
            "writeQueueNums": self.write_queue_nums,
        }

    @classmethod
    def from_json(cls, value: Any) -> TopicConfig:
        members = as_object(value, "a topic")
        attributes = as_map(members.get("attributes"), "attributes", lambda one: as_text(one, "an attribute"))
        return cls(
            as_text(members.get("topicName"), "topicName"),
            as_int(members.get("readQueueNums", 16), "readQueueNums"),
            as_int(members.get("writeQueueNums", 16), "writeQueueNums"),
            as_int(members.get("perm", 6), "perm"),
            as_text(members.get("topicFilterType") or "SINGLE_TAG", "topicFilterType"),
            as_int(members.get("topicSysFlag", 0), "topicSysFlag"),
            as_bool(members.get("order"), "order"),
            attributes,
        )

    def to_text(self) -> str:
        """The short form of a compressed registration: ``name read write perm filterType attributes`` (spec 14)."""
        attributes = orjson.dumps(self.attributes).decode()
        return " ".join(
            [
                self.topic_name,
                str(self.read_queue_nums),
                str(self.write_queue_nums),
                str(self.perm),
                self.topic_filter_type,
                attributes,
            ]
        )

    @classmethod
    def from_text(cls, text: str) -> TopicConfig:
        """From the short form. Attributes that cannot be read are left out, as RocketMQ does. Raises BodyError."""
        parts = text.split(" ", 5)
        if len(parts) < 5:
            raise BodyError(f"a topic has {len(parts)} parts, it needs 5: {text!r:.200}")
        read, write, perm = (as_int(part, "a number of a topic") for part in parts[1:4])
        attributes: dict[str, str] = {}
        if len(parts) == 6:
            try:
                attributes = {str(name): str(one) for name, one in orjson.loads(parts[5]).items()}
            except (ValueError, AttributeError):
                attributes = {}
        return cls(parts[0], read, write, perm, parts[4], attributes=attributes)


@dataclass(slots=True)
class TopicConfigSerializeWrapper:
    """All topics of a broker with their version; the answer to 21 and a part of 103."""

    topic_config_table: dict[str, TopicConfig] = field(default_factory=dict)
    data_version: DataVersion = field(default_factory=DataVersion)
    mapping_info: dict[str, Any] = field(default_factory=dict)
    """topicQueueMappingInfoMap of static topics, unread."""

    def to_json(self) -> dict[str, Any]:
        return {
            "dataVersion": self.data_version.to_json(),
            "mappingDataVersion": self.data_version.to_json(),
            "topicConfigTable": {name: one.to_json() for name, one in self.topic_config_table.items()},
            "topicQueueMappingDetailMap": {},
            "topicQueueMappingInfoMap": self.mapping_info,
        }

    @classmethod
    def from_json(cls, value: Any) -> TopicConfigSerializeWrapper:
        return finish(cls.reading(value))

    @classmethod
    def reading(cls, value: Any) -> Steps[TopicConfigSerializeWrapper]:
        """:meth:`from_json` in steps."""
        members = as_object(value, "the topics")
        table: dict[str, TopicConfig] = {}
        for item in in_steps(as_map(members.get("topicConfigTable"), "topicConfigTable", lambda one: one).items()):
            if item is None:
                yield
            else:
                table[item[0]] = TopicConfig.from_json(item[1])
        return cls(
            table,
            DataVersion.from_json(members.get("dataVersion")),
            as_map(members.get("topicQueueMappingInfoMap"), "topicQueueMappingInfoMap", lambda one: one),
        )
