"""The target of a measurement: a node and a topic of its own, and how many of its messages a consumer can see."""

from __future__ import annotations

import secrets
import time
from types import TracebackType
from typing import Self

from commitmq.bench.figures import Clock
from commitmq.client.admin import Admin
from commitmq.client.results import SendResult
from commitmq.errors import CommitMQError
from commitmq.protocol.directory import Directory, Metadata

_POLL_S = 0.0005
# After the last ack a message becomes visible within milliseconds; this bounds the wait when a dispatcher is dead.
_VISIBLE_WITHIN_S = 30.0


class BenchTopic:
    """A topic on ``node``: the named one, or a fresh one that is deleted at the end of the ``with`` block.

    ``topics`` fresh topics, with ``queues`` queues each, are for measurements of many queues; ``name`` is the first of
    them.

    The messages of a deleted topic stay in the log until their segments expire, like all others.
    """

    def __init__(
        self,
        node: str | None,
        name: str | None = None,
        *,
        queues: int = 4,
        topics: int = 1,
        attributes: dict[str, str] | None = None,
    ) -> None:
        """``attributes`` are the attributes of fresh topics."""
        self.node = node
        self.fresh = name is None
        self.name = name or f"bench-{secrets.token_hex(6)}"
        self.names = [self.name, *(f"{self.name}-{number}" for number in range(1, topics if self.fresh else 1))]
        self.queues = queues
        self._attributes = attributes
        self._admin = Admin(node)

    def __enter__(self) -> Self:
        try:
            if self.fresh:
                for name in self.names:
                    self._admin.topic_create(name, self.queues, attributes=self._attributes)
        except BaseException:
            self._admin.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.fresh:
                for name in self.names:
                    self._admin.topic_delete(name)
        except CommitMQError:
            # When the node ended during the measurement, show the measurement's own error.
            if error is None:
                raise
        finally:
            self._admin.close()

    def visible(self) -> int:
        """Messages that consumers could have read so far: the sum of the queues' next offsets, 0 when the topic does
        not exist.
        """
        try:
            return sum(high for _, _, high, _ in self._admin.offsets(self.name))
        except CommitMQError as error:
            if getattr(error, "code", "") == "TOPIC_NOT_EXIST":
                return 0
            raise

    def readable(self) -> int:
        """Messages that consumers can read now, without expired ones."""
        return sum(high - low for _, low, high, _ in self._admin.offsets(self.name))

    def wait_visible(self, count: int) -> None:
        """Return when :meth:`visible` has reached ``count``. Raises CommitMQError when that takes too long."""
        clock = Clock(_VISIBLE_WITHIN_S)
        while (seen := self.visible()) < count:
            if clock.over():
                raise CommitMQError(
                    f"{count} messages of {self.name} were acknowledged, but consumers see only {seen} after"
                    f" {_VISIBLE_WITHIN_S:.0f} s"
                )
            time.sleep(_POLL_S)

    def wait_sent(self, last: SendResult) -> None:
        """Return when consumers could read ``last``, and so everything that was sent before it: dispatching follows the
        log's order. Raises CommitMQError when that takes too long.
        """
        clock = Clock(_VISIBLE_WITHIN_S)
        while self._admin.offsets(last.topic)[last.queue][2] <= last.queue_offset:
            if clock.over():
                raise CommitMQError(
                    f"{last.topic}: acknowledged messages are not visible after {_VISIBLE_WITHIN_S:.0f} s"
                )
            time.sleep(_POLL_S)

    def metadata(self) -> Metadata:
        """The node's metadata, and whether it is on this host."""
        directory = Directory(self.node)
        try:
            return directory.metadata(timeout_s=10.0)
        finally:
            directory.close()
