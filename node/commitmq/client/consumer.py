"""The consumer, a member of a group, and the reader, which reads alone; and the names of their settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Unpack

from commitmq.client.receiving.assignment import Queue
from commitmq.client.receiving.base_consumer import BaseConsumer
from commitmq.client.receiving.callbacks import Told
from commitmq.client.receiving.settings import GroupOptions, ReadOptions
from commitmq.errors import CommitMQError

__all__ = ["Consumer", "GroupOptions", "ReadOptions", "Reader", "Told"]


class Consumer(BaseConsumer):
    """A member of a consumer group: ``Consumer("orders", group="kitchen")``. One thread polls; any thread may :meth:`close`.

    The members of a group share the queues of their topics, each queue is read by one of them, and the group's offsets are
    kept by the node. A topic that does not exist yet is waited for; a warning in the log says so.

    ``node`` is the admin address (default: the environment's COMMITMQ_NODE, else tcp://127.0.0.1:7310). ``start`` says where
    to begin in a queue for which the group has no offset: ``earliest`` (the default), ``latest``, a datetime (first message
    stored then or later; without a time zone it is local time) or a queue offset. Queues and topics that come later are read
    from their first message (with a datetime: from that time). ``filter`` is a tag expression, ``TagA || TagB`` or ``*``, or a
    selector: ``Sql("price > 10 AND region = 'eu'")``. ``timeout_s`` (10) bounds each request.

    ``auto_commit`` (on): what a poll returned is committed when poll is called again (at most every
    ``auto_commit_interval_s``, 1), when a queue is given back, and by ``close``. So a message counts as processed when its
    batch was, and after a crash it is delivered again: at least once. An exception that comes while a poll is under way
    (Ctrl-C) loses nothing: what it would have returned is returned by the next one. A ``with`` block that ends by an
    exception does not commit the batch that raised it. Without ``auto_commit`` call :meth:`commit`.

    ``on_assign`` and ``on_revoke`` are called with a list of queues, in poll: before the first message of them comes, and
    when they are to be given back, which is the time to :meth:`commit`. ``on_revoke`` is called by ``close`` too, and
    afterwards when a queue was taken away because nobody polled in time. What they raise, poll raises, and they are called
    again by the next one.

    A member that does not poll for ``max_poll_interval_s`` (300; None: for ever) leaves its group until it does; its queues go
    to others, and what it did not commit is delivered to them. A second consumer with the same ``member`` name takes the
    place of the first one, whose polls then raise FencedError. ``session_timeout_ms`` (default: the node's) is how long a
    member may be silent, ``rebalance_timeout_s`` (10) how long it may take to give a queue back.

    On the node's own host messages are read from its mapped files without a copy (``mode="auto"``); ``mode="bytes"``
    has them sent, at most ``max_pull_bytes`` (2 MiB) in one answer. When offsets fell out of the log, reading goes on at the
    nearest message there is; ``gaps`` tells. Every record's CRC is compared, which costs some 0.3 µs a message;
    ``check_crc=False`` leaves it.
    """

    def __init__(
        self,
        topics: str | Iterable[str] | None = (),
        of_group: str | Iterable[str] | None = None,
        *,
        group: str | None = None,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings.

        ``Consumer(group, topics)``, the order of former versions, still works, and warns.
        """
        topics, group = topics_and_group(topics, of_group, group)
        super().__init__(topics, group=group, node=node, on_assign=on_assign, on_revoke=on_revoke, **options)

    def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Commit how far the group got; returns what the node now holds for each queue.

        Without ``offsets`` everything that was polled counts as done. An offset is that of the next message to read; one
        behind the queue's end is stored as that end. The answer comes when it is durable. Raises FencedError when a queue
        is no longer this consumer's (it was given to another member), its topic is another one by now, or its offset was
        reset meanwhile: nothing was committed then.
        """
        if self._settings.group is None:  # made in the words of former versions
            self._check_usable()
            raise CommitMQError("a consumer without a group has no offsets to commit")
        return self._using(partial(self._commit, offsets))


class Reader(BaseConsumer):
    """Reads all queues of topics, or ``queues``, without a group: ``Reader("orders")``. Nothing is committed.

    ``queues`` are pairs of a topic and a queue, ``Reader(queues=[("orders", 0)])``. ``start`` says where to begin in each
    queue; all other settings, and what reading is like, are a :class:`Consumer`'s.
    """

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        queues: Iterable[Queue] | None = None,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        super().__init__(
            topics, group=None, queues=queues, node=node, on_assign=on_assign, on_revoke=on_revoke, **options
        )


def topics_and_group(
    topics: str | Iterable[str] | None, of_group: str | Iterable[str] | None, group: str | None
) -> tuple[str | Iterable[str], str | None]:
    """Topics and group from what a consumer was given, in today's order or that of former versions, which warns."""
    if of_group is None:
        if group is None or topics is None:
            raise TypeError("a consumer is a member of a group: give it group=…; a Reader reads without one")
        return topics, group
    if group is not None or not (topics is None or isinstance(topics, str)):
        raise TypeError(f"several topics are a list: [{topics!r}, {of_group!r}]")
    warnings.warn(
        "Consumer(group, topics) is deprecated: say Consumer(topics, group=…), or Reader(topics) without a group",
        DeprecationWarning,
        stacklevel=3,
    )
    return of_group, topics
