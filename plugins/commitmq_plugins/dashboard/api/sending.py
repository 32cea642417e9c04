"""A test message."""

from __future__ import annotations

from dataclasses import dataclass

from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.shell import command
from commitmq_plugins.dashboard.api.values import value


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to send. Its topic must exist."""

    topic: str = value(doc="The topic's name.", longest=255)
    body: str = value(doc="The body, as text.", longest=65_536)
    tag: str | None = value(None, "Its tag.", longest=255)
    keys: str | None = value(None, "Its keys, with spaces between.", longest=1_024)


@dataclass(frozen=True, slots=True)
class Sent:
    """Where the message is."""

    topic: str
    queue: int
    offset: int
    message_id: str | None
    unique_id: str | None
    command: str


def send_message(node: Node, asked: NewMessage) -> Sent:
    """One send by a producer of its own. Raises SendError, InvalidMessageError."""
    node.admin.topic(asked.topic)  # a mistyped name creates no topic
    keys = (asked.keys or "").split() or None
    with node.producer(asked.topic) as producer:
        result = producer.send(asked.topic, asked.body.encode(), tags=asked.tag, keys=keys)
    options = [*(["--tags", asked.tag] if asked.tag else []), *(["--keys", " ".join(keys)] if keys else [])]
    line = command("produce", asked.topic, *options)
    return Sent(
        asked.topic,
        result.queue,
        result.queue_offset,
        result.msg_id,
        result.unique_id,
        f"printf '%s\\n' BODY | {line}",
    )
