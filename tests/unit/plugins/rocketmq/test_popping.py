"""Goal: a pop takes the offsets that an administrator has set for its queues, so that commits count again from then on.

Method: the real table of offsets and the real requests; a node that has no messages.
"""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, MagicMock

import pytest

from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.popping import PopMessageProcessor
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import request


@pytest.mark.parametrize(("queue", "left"), [(-1, [2]), (1, [0, 2])])
def test_a_pop_takes_the_resets_of_its_queues(queue: int, left: list[int]) -> None:
    async def main() -> None:
        node, topics = MagicMock(), MagicMock()
        topics.get.return_value = MagicMock(read_queues=2, perm=6)
        node.mover = AsyncMock(return_value=({"parts": []}, []))
        offsets = Offsets(node, topics, MagicMock(), MagicMock(), asyncio.get_running_loop(), MagicMock())
        pops = PopMessageProcessor(node, topics, MagicMock(), offsets, MagicMock(), MagicMock(), 1_024)
        node.config.pop.max_wait_ms = node.config.pop.min_invisible_ms = 1_000
        node.config.pop.max_invisible_ms = 60_000
        for one in (0, 1, 2):
            offsets.set_reset("g", "T", one, 5)
        fields = {"consumerGroup": "g", "topic": "T", "queueId": str(queue), "maxMsgNums": "1", "invisibleTime": "1000",
                  "pollTime": "0", "bornTime": "0", "initMode": "0"}  # fmt: skip
        answer = await pops.pop(MagicMock(), request(RequestCode.POP_MESSAGE, fields))
        assert answer is not None
        assert answer.code == ResponseCode.POLLING_TIMEOUT
        assert [one for one in (0, 1, 2) if offsets.take_reset("g", "T", one) is not None] == left

    asyncio.run(main())
