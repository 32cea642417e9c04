"""The operations on topics: ``topic.route``, ``create``, ``own``, ``reply``, ``list``, ``describe`` and ``delete``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.coordination import requests, topic_rules
from commitmq.coordination.answers import Answer, Operations, Part
from commitmq.coordination.listing import MAX_ENTRIES, Listing
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.requests import Header
from commitmq.coordination.topics import Topics, describe
from commitmq.errors import ProtocolError, StoreError
from commitmq.semantics.reply import reply_topic
from commitmq.store.metadata.topic_config import STORAGE_MEMORY, STORAGE_TYPE

_MAX_INCARNATION = (1 << 63) - 1


class TopicOperations:
    """See the module; :attr:`operations` has them by name."""

    def __init__(
        self,
        topics: Topics,
        offsets: GroupOffsets,
        listing: Listing,
        control: ControlBlock,
        *,
        config: NodeConfig,
        failed: Callable[[StoreError, int], None],
    ) -> None:
        """``failed`` is called with an error of the topics' files and the monotonic time in ms."""
        self._topics, self._offsets, self._listing, self._control = topics, offsets, listing, control
        self._memory_enabled = config.memory.enable
        self._reply_topic = reply_topic(config.network.cluster_name)
        self._reply_queues = config.topics.reply_queues
        self._failed = failed
        self.operations: Operations = {
            "topic.route": self._route,
            "topic.create": self._create,
            "topic.own": self._own,
            "topic.reply": self._reply,
            "topic.list": self._list,
            "topic.describe": self._describe,
            "topic.delete": self._delete,
        }

    def _route(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        topic = self._topics.route(name, create=requests.flag(header, "create"))
        return Answer(lambda: {"topic": describe(topic)}, self._needed(name))

    def _needed(self, name: str) -> Part | None:
        return "topics" if self._topics.is_staged(name) else None

    def _create(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        perm = requests.optional_integer(header, "perm", 0, 7)
        attributes = requests.mapping(header, "attributes")
        if attributes and attributes.get(STORAGE_TYPE) == STORAGE_MEMORY and not self._memory_enabled:
            raise ProtocolError("INVALID_PARAMETER", "this node serves no memory topics: memory.enable is off")
        queues = requests.optional_integer(header, "queues", 1, topic_rules.MAX_QUEUES)
        created = self._topics.create(
            name,
            queues,
            perm=6 if perm is None else perm,
            attributes=attributes,
            update=requests.flag(header, "update"),
            incarnation=requests.optional_integer(header, "incarnation", 0, _MAX_INCARNATION),
            further=_further(header),
        )
        topic = self._topics.get(name)
        return Answer(lambda: {"created": created, "topic": describe(topic)}, self._needed(name))

    def _own(self, header: Header, now_ms: int) -> Answer:
        """The topics of the transaction process, which asks for them when it begins."""
        self._topics.make_own(topic_rules.TRANSACTION_TOPICS)
        staged = any(self._topics.is_staged(name) for name in topic_rules.TRANSACTION_TOPICS)
        return Answer(lambda: {"topics": list(topic_rules.TRANSACTION_TOPICS)}, "topics" if staged else None)

    def _reply(self, header: Header, now_ms: int) -> Answer:
        """The topic of replies. RocketMQ makes it when it starts, with one queue; here the first requester does."""
        self._topics.ensure(self._reply_topic, self._reply_queues)
        topic = self._topics.get(self._reply_topic)
        return Answer(lambda: {"topic": describe(topic)}, self._needed(topic.name))

    def _list(self, header: Header, now_ms: int) -> Answer:
        after = requests.optional_text(header, "after") or ""
        limit = requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.topics(after, limit))

    def _describe(self, header: Header, now_ms: int) -> Answer:
        topic = self._topics.get(requests.text(header, "topic"))
        groups = sorted(self._offsets.table.groups_of(topic.name))
        return Answer(lambda: {"topic": {**describe(topic), "groups": groups}}, self._needed(topic.name))

    def _delete(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        incarnation = requests.optional_integer(header, "incarnation", 0, _MAX_INCARNATION)
        deletions = self._topics.deletions
        deletions.prune(self._control.get(Word.MIN_OFFSET), self._control.dispatcher(0, DispatcherWord.TOPICS))
        try:
            ending = self._topics.delete(name, incarnation)
        except StoreError as error:
            # Writing earlier staged changes may have failed: their requests must be refused too.
            self._failed(error, now_ms)
            raise
        if ending is None:
            return Answer(lambda: {"deleted": name, "tombstone": deletions.tombstones.get(name)})
        return Answer(
            lambda: {"deleted": name, "incarnation": ending, "tombstone": deletions.tombstones.get(name)},
            "topics",
            (name, ending),
        )


def _further(header: Header) -> dict[str, Any]:
    """What RocketMQ's tools set of a topic beside the rest: only the fields that the request has."""
    found: dict[str, Any] = {}
    for field in ("read_queues", "write_queues"):
        if (count := requests.optional_integer(header, field, 1, topic_rules.MAX_QUEUES)) is not None:
            found[field] = count
    if "order" in header:
        found["order"] = requests.flag(header, "order")
    if (flags := requests.optional_integer(header, "sys_flag", 0, topic_rules.MAX_SYS_FLAG)) is not None:
        found["sys_flag"] = flags
    if (kind := requests.optional_text(header, "filter_type")) is not None:
        if kind not in topic_rules.FILTER_TYPES:
            raise requests.refuse("filter_type", f"one of {', '.join(topic_rules.FILTER_TYPES)}", kind)
        found["filter_type"] = kind
    return found
