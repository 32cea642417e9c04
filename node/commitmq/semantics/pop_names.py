"""Which retry topics a group has when it pops a topic (remoting 5.2): RocketMQ's two forms of their name.

``%RETRY%group_topic`` is the first form, ``%RETRY%group+topic`` the second, with which no two groups have one retry topic.
RocketMQ's settings are enableRetryTopicV2 and retrieveMessageFromPopRetryTopicV1. A message of a retry topic that comes back
again stays there, in whichever form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from commitmq.semantics.retry import pop_retry_topic


class _Settings(Protocol):
    """Those of the section ``[pop]``."""

    @property
    def retry_topics_v2(self) -> bool: ...
    @property
    def read_retry_topics_v1(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RetryNames:
    """``v2``: messages come back into topics of the second form. ``reads_v1``: those of the first form are read then too."""

    v2: bool = False
    reads_v1: bool = True

    @classmethod
    def of(cls, config: _Settings) -> RetryNames:
        return cls(config.retry_topics_v2, config.read_retry_topics_v1)

    def written(self, topic: str, group: str) -> str:
        """Where a message of ``topic`` comes back to ``group``."""
        return pop_retry_topic(topic, group, v2=self.v2)

    def read(self, topic: str, group: str) -> tuple[str, ...]:
        """Where a pop of ``topic`` may find messages that came back."""
        written = self.written(topic, group)
        return (written, pop_retry_topic(topic, group)) if self.v2 and self.reads_v1 else (written,)

    def in_turn(self, topic: str, group: str, lot: int) -> tuple[str, ...]:
        """The topics of :meth:`read` in the order in which a pop with ``lot``, of 0 to 99, looks into them.

        With an even one RocketMQ looks into the first form only, with an odd one into the second form only. A pop here goes on
        to the other one when it has found nothing, for a receive that waits is not woken again for what is there already.
        """
        names = self.read(topic, group)
        return names if lot % 2 else names[::-1]


USUAL_NAMES: Final = RetryNames()
"""RocketMQ's default: the first form only."""
