"""The cancelling of a timer message: recall handle and recall record (spec 12.2, 18; remoting 3.8).

A recall is a timer message of its own. It carries the unique id of the other one and is due in the same slot, where it
takes it away.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Host, Property
from commitmq.format.record import Record
from commitmq.semantics.derived import made
from commitmq.semantics.timer import TimerRefusedError, TimerRules, delete_key

RECALL_TAG: Final = "_RECALL_TAG_"
RECALL_BODY: Final = b"0"
CANCEL_MARGIN_MS: Final = 500
"""A message cannot be cancelled later than this before its slot: the timer must have seen the cancellation by then."""
_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """What a sender needs to cancel a timer message. ``deliver_ms`` is TIMER_OUT_MS + 1, so it rounds to the same slot."""

    topic: str
    broker_name: str
    deliver_ms: int
    unique_key: str

    def encode(self) -> str:
        """RocketMQ's text: URL-safe Base64, with padding, of ``v1 topic broker time id``."""
        text = f"{_VERSION} {self.topic} {self.broker_name} {self.deliver_ms} {self.unique_key}"
        return base64.urlsafe_b64encode(text.encode()).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> RecallHandle:
        """Inverse of :meth:`encode`. Raises InvalidMessageError for any other text."""
        try:
            parts = base64.b64decode(text, altchars=b"-_", validate=True).decode().split(" ")
        except (binascii.Error, UnicodeError, ValueError) as error:
            raise InvalidMessageError(f"the recall handle is invalid: {error}") from error
        if len(parts) != 5 or parts[0] != _VERSION or not (parts[3].isascii() and parts[3].isdigit()):
            raise InvalidMessageError("the recall handle is invalid: it is not version, topic, broker, time and id")
        return cls(parts[1], parts[2], int(parts[3]), parts[4])


def recall_handle(timer: Record, broker_name: str) -> RecallHandle | None:
    """The handle of ``timer``, a record of the timer topic; None without a unique id."""
    unique_key = timer.properties.get(Property.UNIQUE_KEY)
    real_topic = timer.properties.get(Property.REAL_TOPIC)
    out = timer.properties.get(Property.TIMER_OUT_MS)
    if not unique_key or not real_topic or not out:
        return None
    return RecallHandle(real_topic, broker_name, int(out) + 1, unique_key)


def recall_record(
    handle: RecallHandle,
    group: str,
    now_ms: int,
    host: Host,
    rules: TimerRules | None = None,
    *,
    with_topic: bool = False,
) -> Record:
    """The message that cancels the one of ``handle``; :func:`timer_request` (``fresh``) makes it a timer message.

    ``group`` is the sender's producer group, ``host`` the sender's address. TRACE_CONTEXT is empty, as RocketMQ stores
    it. Raises TimerRefusedError when the time has passed or is too far away.
    """
    left_ms = handle.deliver_ms - now_ms
    if not 0 < left_ms < (rules or TimerRules()).max_delay_s * 1000:
        why = f"its time came {-left_ms} ms ago" if left_ms <= 0 else f"it is due in {left_ms} ms (timer.max_delay_ms)"
        raise TimerRefusedError("ILLEGAL_OPERATION", f"the message cannot be cancelled: {why}")
    properties = {
        Property.TAGS: RECALL_TAG,
        Property.TIMER_DELETE_KEY: delete_key(handle.topic, handle.unique_key, with_topic=with_topic),
        Property.UNIQUE_KEY: handle.unique_key,
        Property.TIMER_DELIVER_MS: str(handle.deliver_ms),
        Property.BORN_TIMESTAMP: str(now_ms),
        Property.TRACE_CONTEXT: "",
        Property.PRODUCER_GROUP: group,
    }
    return made(handle.topic, 0, RECALL_BODY, properties, now_ms, host)
