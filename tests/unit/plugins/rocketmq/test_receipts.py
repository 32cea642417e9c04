"""Goal: a change of the invisible time has RocketMQ's answer, also when it comes too late.

Method: the real request; a process pop that knows nothing of the message any more.
"""

from __future__ import annotations

import asyncio
import time
from unittest.mock import AsyncMock, MagicMock

from commitmq.semantics.pop import ReceiptHandle
from commitmq_plugins.rocketmq.broker.popping import AckMessageProcessor
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request


def changed(invisible_ms: int, node: MagicMock, more: str = "") -> Command:
    """The answer for a message that was popped for ``invisible_ms`` two seconds ago. ``more`` is put behind its handle."""

    async def main() -> Command:
        topics = MagicMock()
        topics.get.return_value = MagicMock(read_queues=1)
        node.mover = AsyncMock(return_value=({"handles": [None]}, []))
        node.config.pop.min_invisible_ms, node.config.pop.max_invisible_ms = 1, 60_000
        receipts = AckMessageProcessor(node, topics, MagicMock(), asyncio.get_running_loop(), MagicMock(), MagicMock())
        handle = ReceiptHandle(0, time.time_ns() // 1_000_000 - 2_000, invisible_ms, 3, 0, "commitmq", 0, 7)
        fields = {"consumerGroup": "g", "topic": "T", "queueId": "0", "extraInfo": str(handle) + more, "offset": "7",
                  "invisibleTime": "5000"}  # fmt: skip
        return await receipts.change(MagicMock(), request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, fields))

    return asyncio.run(main())


def test_a_change_that_comes_too_late_is_answered_with_a_new_handle() -> None:
    began_ms = time.time_ns() // 1_000_000
    answer = changed(1_000, MagicMock())
    assert answer.code == ResponseCode.SUCCESS
    assert {name: answer.ext_fields[name] for name in ("invisibleTime", "reviveQid")} == {
        "invisibleTime": "5000",
        "reviveQid": "3",
    }
    assert int(answer.ext_fields["popTime"]) >= began_ms


def test_a_change_of_an_acknowledged_message_is_refused() -> None:
    assert changed(600_000, MagicMock()).code == ResponseCode.NO_MESSAGE


def test_a_handle_of_rocketmqs_proxy_has_one_part_more() -> None:
    node = MagicMock()
    assert changed(600_000, node, " 123456").code == ResponseCode.NO_MESSAGE
    ((topic, handle),) = node.mover.await_args.kwargs["receipts"]
    assert (topic, len(handle.split(" "))) == ("T", 8)
