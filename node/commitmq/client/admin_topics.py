"""The methods of an administrator's client that look into the queues of topics: their bounds, idle topics, one message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from commitmq.client.admin_results import QueueBounds, TopicDescription, TopicInfo
from commitmq.client.topic_kinds import KINDS, kind_of
from commitmq.errors import ProtocolError, TopicNotFoundError

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message

_LOOK_S: Final = 0.05


class TopicAdmin:
    """A part of :class:`commitmq.Admin`."""

    def offsets(
        self, topic: str, timestamp: int | datetime | None = None, *, incarnation: int | None = None
    ) -> list[QueueBounds]:
        """For each queue the offset of its first message and the offset that the next message will get.

        With ``timestamp`` (milliseconds or a datetime) ``by_time`` is the first message that was stored then or later. With
        an ``incarnation`` raises ProtocolError TOPIC_NOT_EXIST for another topic of that name.
        """
        return self._bounds(topic, timestamp, incarnation=incarnation)[0]

    def hidden_queues(self, topic: str) -> list[QueueBounds]:
        """The bounds of queues that have messages and lie beyond the topic's read queues, so that nobody reads them."""
        return self._bounds(topic, hidden=True)[1]

    def _bounds(
        self,
        topic: str,
        timestamp: int | datetime | None = None,
        *,
        hidden: bool = False,
        incarnation: int | None = None,
    ) -> tuple[list[QueueBounds], list[QueueBounds]]:
        """The bounds of the queues that are read, and with ``hidden`` of those beyond that have messages."""
        fields: dict[str, Any] = {"topic": topic, **({"hidden": True} if hidden else {})}
        if incarnation is not None:
            fields["incarnation"] = incarnation
        if timestamp is not None:
            fields["timestamp"] = int(timestamp.timestamp() * 1000) if isinstance(timestamp, datetime) else timestamp
        answer = self._ask("reader", "offsets", fields)
        read, beyond = ([QueueBounds(*row[:4]) for row in answer.get(part, ())] for part in ("queues", "hidden"))
        return read, beyond

    def _check_all_read(self, topic: TopicDescription, reads: int) -> None:
        """Raise ProtocolError INVALID_PARAMETER if with so many read queues a group would miss messages."""
        lost = [one for part in self._bounds(topic.name, hidden=True) for one in part if one.queue >= reads]
        lost = [one for one in lost if one.max > one.min]
        queues = [[topic.name, one.queue] for one in lost]
        for group in topic.groups if lost else ():
            answer = self._ask("coordinator", "offset.fetch", {"group": group, "queues": queues})
            at = {queue: offset for _, queue, offset in answer["offsets"]}
            for one in lost:
                if (unread := one.max - max(one.min, at.get(one.queue, 0))) > 0:
                    sentence = (
                        f"group {group} has not read {unread} messages in queue {one.queue} of topic {topic.name}, and with"
                        f" {reads} read queues nobody reads them: lower the write queues first and wait, or force it"
                    )
                    raise ProtocolError("INVALID_PARAMETER", sentence)

    def topics_idle(
        self,
        before: int | datetime,
        kinds: Iterable[str] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[TopicInfo]:
        """The topics whose last message was stored before ``before`` (milliseconds or a datetime), one request for each topic.

        ``kinds``: only topics of these (:data:`commitmq.client.topic_kinds.KINDS`); by default all but ``system``. A topic
        without messages is idle if it was made before that time. ``on_progress`` is called with the number of topics that
        were looked at, and of all. Raises ValueError for an unknown kind.
        """
        wanted = set(KINDS) - {"system"} if kinds is None else set(kinds)
        if unknown := wanted - set(KINDS):
            raise ValueError(f"a kind of topics is one of {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
        asked = [one for one in self.topics() if kind_of(one) in wanted]
        found = []
        for number, one in enumerate(asked, 1):
            try:
                if self._is_idle(one, before):
                    found.append(one)
            except TopicNotFoundError:
                pass  # it was deleted meanwhile
            if on_progress is not None:
                on_progress(number, len(asked))
        return found

    def topic_delete_idle(self, name: str, before: int | datetime) -> bool:
        """Delete a topic if its last message was stored before ``before``; False if it is in use, or does not exist any more.

        The ConsumeQueues first reach what the log had at the call, so that no message of before is overlooked. A topic of the
        same name that was made meanwhile stays. A system topic stays. Raises ProtocolError SERVICE_NOT_AVAILABLE when the
        ConsumeQueues stay behind.
        """
        self._wait_until_dispatched()
        try:
            known = self.topic(name)
            if kind_of(known) == "system" or not self._is_idle(known, before):
                return False
            self._ask("coordinator", "topic.delete", {"topic": name, "incarnation": known.incarnation})
        except TopicNotFoundError:
            return False
        return True

    def message_at(self, topic: str, queue: int, offset: int) -> Message:
        """The message at a queue offset.

        Raises ProtocolError INVALID_PARAMETER if the queue has none there, and TopicNotFoundError.
        """
        from commitmq.client.receiving.query import messages_of_pull

        fields = {"topic": topic, "queue": queue, "offset": offset, "max_messages": 1}
        answer, frames = self._request("reader", "pull", fields)
        for message in messages_of_pull(topic, queue, [frame.buffer for frame in frames], offset):
            if message.queue_offset == offset:
                return message
        first, end = answer["min_offset"], answer["max_offset"]
        has = f"it has offsets {first} to {end - 1}" if end > first else "it is empty"
        raise ProtocolError(
            "INVALID_PARAMETER", f"queue {queue} of topic {topic} has no message at offset {offset}: {has}"
        )

    def _is_idle(self, topic: TopicInfo, before: int | datetime) -> bool:
        limit_ms = int(before.timestamp() * 1000) if isinstance(before, datetime) else before
        if topic.incarnation >= limit_ms:  # the time at which it was made, in ms; 0 for a topic of RocketMQ
            return False
        parts = self._bounds(topic.name, limit_ms, hidden=True)
        return all(one.by_time is None or one.by_time >= one.max for part in parts for one in part)

    def _wait_until_dispatched(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        now = self.status()["positions"]
        written = now["written"]
        while now["dispatched"] < written:
            if time.monotonic() >= deadline:
                sentence = f"the ConsumeQueues are {written - now['dispatched']} bytes behind the log; try again later"
                raise ProtocolError("SERVICE_NOT_AVAILABLE", sentence)
            time.sleep(_LOOK_S)
            now = self.status()["positions"]

    _timeout_s: float

    def status(self) -> dict[str, Any]:
        raise NotImplementedError

    def topics(self) -> list[TopicInfo]:
        raise NotImplementedError

    def topic(self, name: str) -> Any:
        raise NotImplementedError

    def _ask(self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def _request(self, role: str, op: str, fields: dict[str, Any]) -> tuple[dict[str, Any], list[zmq.Frame]]:
        raise NotImplementedError
