"""The two clients that read: the consumer, a member of a group, and the reader, which reads alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Unpack, overload

from commitmq.client.receiving.assignment import Queue
from commitmq.client.receiving.base_consumer import BaseConsumer
from commitmq.client.receiving.callbacks import Told
from commitmq.client.receiving.settings import GroupOptions, ReadOptions
from commitmq.errors import CommitMQError

__all__ = ["Consumer", "GroupOptions", "ReadOptions", "Reader", "Told"]


class Consumer(BaseConsumer):
    """A member of a consumer group: ``Consumer("orders", group="kitchen")``. One thread polls; any thread may :meth:`close`.

    The members of a group share the queues of their topics: one member reads each queue. The node keeps the group's offsets.
    A consumer waits for a topic that does not exist yet, and a warning in the log says so.

    ``node`` is the admin address. Its default is the environment's COMMITMQ_NODE, else tcp://127.0.0.1:7310. ``timeout_s``
    (10) bounds each request.

    ``start`` says where to begin in a queue in which the group has no offset: ``earliest`` (the default), ``latest``, a queue
    offset, or a datetime for the first message stored then or later. A datetime without a time zone is local time. A queue or
    topic that comes later is read from its first message, or with a datetime from that time.

    ``filter`` is a tag expression, ``TagA || TagB`` or ``*``, or a selector such as ``Sql("price > 10 AND region = 'eu'")``.

    With ``auto_commit`` (the default) the consumer commits a batch when the program polls again, when it gives a queue
    back, and in ``close``; in polls at most every ``auto_commit_interval_s`` (1). So a message counts as processed when its
    whole batch is, and after a crash it is delivered again: at least once. A ``with`` block that ends by an exception does
    not commit the last batch. An exception during a poll, such as Ctrl-C, loses nothing: the next poll returns the batch.
    Without ``auto_commit`` call :meth:`commit`.

    ``poll`` calls ``on_assign`` with a list of new queues before it returns their first message. It calls ``on_revoke`` with a
    list of queues that it is about to give back, which is the time to :meth:`commit`. ``close`` calls ``on_revoke`` too. When
    the group took a queue away because the program did not poll in time, ``on_revoke`` is called afterwards. If a callback
    raises, poll raises the same, and the next poll calls the callback again.

    A member that does not poll for ``max_poll_interval_s`` (300; None means for ever) leaves its group until it polls again.
    Others get its queues and its uncommitted messages. A second consumer with the same ``member`` name takes the place of the
    first one, and a poll of the first one raises FencedError. ``session_timeout_ms`` (default: the node's) is how long a
    member may be silent. ``rebalance_timeout_s`` (10) is how long it may take to give a queue back.

    On the node's own host the consumer reads messages from the node's mapped files without a copy (``mode="auto"``). With
    ``mode="bytes"`` the node sends them, at most ``max_pull_bytes`` (2 MiB) in one answer. When its offset falls out of the
    log, the consumer goes on at the nearest message, and ``gaps`` tells of it. The consumer compares the CRC of every
    record, which takes about 0.3 µs a message; ``check_crc=False`` leaves the comparison out.
    """

    @overload
    def __init__(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
        **options: Unpack[GroupOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        topics: str | None,
        of_group: str | Iterable[str],
        *,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
        **options: Unpack[GroupOptions],
    ) -> None: ...
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
        """Commit offsets, and return the offset that the node now has for each of the queues.

        Without ``offsets`` every message that a poll returned counts as done. An offset is that of the next message to read.
        The node stores the queue's end instead of an offset behind it. The answer comes when the offsets are durable.

        Raises FencedError, and commits nothing, when another member has one of the queues by now, when a topic was made anew,
        or when an offset was reset meanwhile.
        """
        if self._settings.group is None:  # a reader in the words of former versions
            self._check_usable()
            raise CommitMQError("a consumer without a group has no offsets to commit")
        return self._using(partial(self._commit, offsets))


class Reader(BaseConsumer):
    """Reads topics without a group, and commits nothing: ``Reader("orders")``.

    It reads all queues of its topics, or only ``queues``, which are pairs of a topic and a queue:
    ``Reader(queues=[("orders", 0)])``. ``start`` says where to begin in each queue. The other settings and the methods are
    those of a :class:`Consumer`.
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
    """Topics and group from a consumer's first arguments. The order of former versions gives a warning."""
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
