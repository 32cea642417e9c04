"""HeartbeatData: a client's groups and subscriptions (spec 15.6, 2.3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from commitmq_plugins.rocketmq.remoting.errors import BodyError
from commitmq_plugins.rocketmq.remoting.fastjson import (
    as_bool,
    as_int,
    as_list,
    as_name,
    as_object,
    as_text,
    load_object,
)

MAX_FILTER_CHARACTERS: Final = 65_536
MAX_TAGS: Final = 1_024


@dataclass(slots=True)
class SubscriptionData:
    """One topic of a group. ``sub_version`` grows with each change; ``code_set`` are the hashes of the tags."""

    topic: str
    sub_string: str = "*"
    tags_set: list[str] = field(default_factory=list)
    code_set: list[int] = field(default_factory=list)
    sub_version: int = 0
    expression_type: str = "TAG"
    class_filter_mode: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "classFilterMode": self.class_filter_mode,
            "codeSet": self.code_set,
            "expressionType": self.expression_type,
            "subString": self.sub_string,
            "subVersion": self.sub_version,
            "tagsSet": self.tags_set,
            "topic": self.topic,
        }

    @classmethod
    def from_json(cls, value: Any) -> SubscriptionData:
        """Elements of ``codeSet`` may be texts: the Go client's are (remoting 1.13)."""
        members = as_object(value, "a subscription")
        tags = as_list(members.get("tagsSet"), "tagsSet"), as_list(members.get("codeSet"), "codeSet")
        if max(map(len, tags)) > MAX_TAGS:
            raise BodyError(f"a subscription has {max(map(len, tags))} tags, at most {MAX_TAGS} are allowed")
        return cls(
            as_name(members.get("topic"), "topic"),
            as_text(members.get("subString") or "*", "subString"),
            [as_name(one, "a tag") for one in tags[0]],
            [as_int(one, "a tag's code") for one in tags[1]],
            as_int(members.get("subVersion", 0), "subVersion"),
            as_name(members.get("expressionType") or "TAG", "expressionType"),
            as_bool(members.get("classFilterMode"), "classFilterMode"),
        )


@dataclass(slots=True)
class ConsumerData:
    """One consumer group of a client."""

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: list[SubscriptionData] = field(default_factory=list)
    unit_mode: bool = False

    @classmethod
    def from_json(cls, value: Any) -> ConsumerData:
        members = as_object(value, "a consumer group")
        subscriptions = as_list(members.get("subscriptionDataSet"), "subscriptionDataSet")
        texts = sum(len(str(one.get("subString", ""))) for one in subscriptions if isinstance(one, dict))
        if texts > MAX_FILTER_CHARACTERS:
            raise BodyError(
                f"the filters of a group have {texts} characters, at most {MAX_FILTER_CHARACTERS} are allowed"
            )
        return cls(
            as_name(members.get("groupName"), "groupName"),
            as_name(members.get("consumeType") or "CONSUME_PASSIVELY", "consumeType"),
            as_name(members.get("messageModel") or "CLUSTERING", "messageModel"),
            as_name(members.get("consumeFromWhere") or "CONSUME_FROM_LAST_OFFSET", "consumeFromWhere"),
            [SubscriptionData.from_json(one) for one in subscriptions],
            as_bool(members.get("unitMode"), "unitMode"),
        )


@dataclass(slots=True)
class HeartbeatData:
    """The body of 34. With ``without_sub`` the subscriptions are left out and must not replace known ones."""

    client_id: str
    producer_groups: list[str] = field(default_factory=list)
    consumers: list[ConsumerData] = field(default_factory=list)
    heartbeat_fingerprint: int = 0
    without_sub: bool = False

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> HeartbeatData:
        """Raises BodyError."""
        members = load_object(data)
        producers = as_list(members.get("producerDataSet"), "producerDataSet")
        consumers = as_list(members.get("consumerDataSet"), "consumerDataSet")
        return cls(
            as_name(members.get("clientID"), "clientID"),
            [as_name(as_object(one, "a producer group").get("groupName"), "groupName") for one in producers],
            [ConsumerData.from_json(one) for one in consumers],
            as_int(members.get("heartbeatFingerprint", 0), "heartbeatFingerprint"),
            as_bool(members.get("withoutSub"), "withoutSub"),
        )


@dataclass(slots=True)
class CheckClientRequestBody:
    """The body of 46."""

    client_id: str
    group: str
    subscription_data: SubscriptionData | None = None

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> CheckClientRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        subscription = members.get("subscriptionData")
        return cls(
            as_text(members.get("clientId") or "", "clientId"),
            as_text(members.get("group") or "", "group"),
            None if subscription is None else SubscriptionData.from_json(subscription),
        )
