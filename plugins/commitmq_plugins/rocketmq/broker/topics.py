"""The topics of the node, kept current for the broker server, and how new ones are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from commitmq.control import Word
from commitmq.errors import ProtocolError
from commitmq.store.metadata.topic_config import DEFAULT_PERM, PERM_INHERIT, TopicConfig
from commitmq.store.metadata.topic_files import TopicReader, apply
from commitmq_plugins.rocketmq.broker.node import NodeClient

DEFAULT_TOPIC: Final = "TBW102"
"""RocketMQ's template of new topics. Name servers have it as long as sends may create topics."""

_TEMPLATE_QUEUES: Final = 8
"""RocketMQ's defaultTopicQueueNums. A producer asks for 4, unless it is told otherwise."""
_TOPICS_VERSION: Final = int(Word.TOPICS_VERSION)  # a plain int for speed: each request looks


class TopicConfigManager:
    """The topic table. :meth:`sync` reads what changed, which costs a look at a word when nothing did."""

    def __init__(self, node: NodeClient) -> None:
        """Raises StoreError when the files cannot be read."""
        self._node = node
        self._reader = TopicReader(node.layout)
        self._version = node.control.get(Word.TOPICS_VERSION)
        self._table = self._reader.everything()
        self.own_names = frozenset((node.config.network.broker_name, node.config.network.cluster_name))
        """Topics that each broker of RocketMQ has, of one queue here; the first send makes them (spec 1.5)."""
        self.changed: set[str] = set(self._table.topics)
        """Names that changed since somebody emptied this set: name servers have to hear of them."""
        self.tell: Callable[[], Awaitable[None]] = self._tell_nobody
        """Lets name servers know what changed. Clients look a topic up as soon as they know that it was made."""

    async def _tell_nobody(self) -> None:
        self.sync()

    @property
    def template_queues(self) -> int:
        """The most queues that a send may give to the topic that it makes."""
        return max(_TEMPLATE_QUEUES, self._node.config.topics.default_queues)

    @property
    def all(self) -> dict[str, TopicConfig]:
        """All topics by name. Do not change it."""
        self.sync()
        return self._table.topics

    @property
    def version(self) -> int:
        """Grows with each change of a topic."""
        return self._version

    def sync(self) -> None:
        """Take what the coordinator changed. Raises StoreError."""
        version = self._node.control.get(_TOPICS_VERSION)
        if version == self._version:
            return
        changes = self._reader.changes(version)
        if changes is None:
            before, self._table = self._table.topics, self._reader.everything()
            self.changed |= {name for name in before.keys() | self._table.topics.keys()
                             if before.get(name) != self._table.topics.get(name)}  # fmt: skip
        else:
            for change in changes:
                apply(self._table, change)
                self.changed.add(change.name)
        self._version = version

    def get(self, name: str) -> TopicConfig | None:
        """The topic, or None."""
        self.sync()
        return self._table.topics.get(name)

    async def create(self, name: str, queues: int, *, perm: int = 6, user: str = "") -> TopicConfig:
        """The topic, made for ``user`` if there is none. Raises ProtocolError."""
        found = self.get(name)
        if found is not None:
            return found
        await self._node.ask(
            "coordinator",
            "topic.create",
            topic=name,
            queues=queues,
            perm=perm,
            **self._node.on_behalf_of("topic.create", user),
        )
        await self.tell()
        return self.must_get(name)

    def template(self, name: str) -> tuple[int, int] | None:
        """The most queues and the permission of a topic that a send makes by this template; None when it makes none
        (remoting 3.3).
        """
        known = self.get(name)
        most, perm = (0, 0) if known is None else (known.write_queues, known.perm)
        if name == DEFAULT_TOPIC:
            most = self.template_queues if known is None else most
            perm = DEFAULT_PERM | (PERM_INHERIT if self._node.config.topics.auto_create else 0)
        return (most, perm & ~PERM_INHERIT) if perm & PERM_INHERIT else None

    def must_get(self, name: str) -> TopicConfig:
        """A topic that the coordinator has. Raises ProtocolError TOPIC_NOT_EXIST when it is gone again."""
        found = self.get(name)
        if found is None:
            raise ProtocolError("TOPIC_NOT_EXIST", f"topic {name} was deleted in the meantime")
        return found

    async def retry_topics(self, group: str, *, dead: bool = False, user: str = "", tells: bool = True) -> bool:
        """Make the retry topic of ``group``, unless it is there, and with ``dead`` its dead-letter topic. A new group is
        made for ``user``. Without ``tells`` the caller must :attr:`tell` when it was made. Whether it was.

        RocketMQ makes the dead-letter topic with the first dead letter. Raises ProtocolError.
        """
        if self.get(f"%RETRY%{group}") is None or (dead and self.get(f"%DLQ%{group}") is None):
            more = self._node.on_behalf_of("group.retry_topics", user)
            await self._node.ask("coordinator", "group.retry_topics", group=group, only_retry=not dead, **more)
            if tells:
                await self.tell()
            self.sync()
            return True
        return False
