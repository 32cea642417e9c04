"""The methods of an administrator's client that look into the queues of topics: idle topics, and one message by its offset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from commitmq.client.admin_results import QueueBounds, TopicInfo
from commitmq.client.topic_kinds import KINDS, kind_of
from commitmq.errors import ProtocolError, TopicNotFoundError

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message

_LOOK_S: Final = 0.05


class TopicAdmin:
    """A part of :class:`commitmq.Admin`."""

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
        return all(one.by_time is None or one.by_time >= one.max for one in self.offsets(topic.name, limit_ms))

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

    def offsets(self, topic: str, timestamp: int | datetime | None = None) -> list[QueueBounds]:
        raise NotImplementedError

    def _ask(self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def _request(self, role: str, op: str, fields: dict[str, Any]) -> tuple[dict[str, Any], list[zmq.Frame]]:
        raise NotImplementedError
