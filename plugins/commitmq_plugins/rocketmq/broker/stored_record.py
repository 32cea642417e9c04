"""The record that a request names by its place in the log."""

from __future__ import annotations

from commitmq.errors import ProtocolError
from commitmq.format.record import Record, decode_record
from commitmq_plugins.rocketmq.broker.node import Node


async def stored_record(node: Node, physical_offset: int) -> Record | None:
    """The record at ``physical_offset``, or None. Raises ProtocolError when it cannot be read now."""
    try:
        _, frames = await node.exchange(node.line("reader-0"), "view", {"physical_offset": physical_offset})
    except ProtocolError as error:
        if error.code in ("INVALID_PARAMETER", "TOPIC_NOT_EXIST"):
            return None
        raise
    return decode_record(b"".join(frames), check_crc=False)
