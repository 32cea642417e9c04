"""The request that cancels a message which waits for its time (the operation ``recall``)."""

from __future__ import annotations

from typing import Any

from commitmq.client.results import SendResult
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.protocol import wire


def cancel_fields(receipt: SendResult | str) -> dict[str, Any]:
    """The header without its id. Raises InvalidMessageError for what is no receipt of such a message."""
    from commitmq.semantics.recall import RecallHandle
    from commitmq.semantics.timer import TIMER_TOPIC

    which: dict[str, Any]
    if isinstance(receipt, SendResult):
        if receipt.stored_topic != TIMER_TOPIC:
            raise InvalidMessageError(
                "only a message that was sent with delay or deliver_at, and waits, can be cancelled"
            )
        topic, unique_id = receipt.topic, receipt.unique_id
        which = {"physical_offset": receipt.physical_offset, "unique_id": unique_id}
    elif isinstance(receipt, str):
        handle = RecallHandle.decode(receipt)
        topic, unique_id = handle.topic, handle.unique_key
        which = {"handle": receipt}
    else:
        raise InvalidMessageError(f"a receipt is a SendResult or a recall handle, not {type(receipt).__name__}")
    return {
        "v": wire.PROTOCOL_VERSION,
        "op": "recall",
        "topic": topic,
        "queue": 0,
        "ack": "flushed",
        "properties": {Property.UNIQUE_KEY: unique_id},
        **which,
    }
