"""Goal: who waits for a process of the node learns at once that it died, and asks the next one.

Method: a line to a ROUTER of the test, which closes while a request is under way and comes back at the same address.
"""

from __future__ import annotations

import asyncio

import orjson
import pytest
import zmq

from commitmq_plugins.rocketmq.broker.node import LineLostError, NodeLine
from commitmq_plugins.rocketmq.remoting.server import FlushBatch

SOON_S = 5.0


async def taken(router: zmq.Socket[bytes]) -> list[bytes]:
    """The next request."""
    for _ in range(int(SOON_S / 0.01)):
        if router.poll(0):
            return router.recv_multipart()
        await asyncio.sleep(0.01)
    raise AssertionError("no request came")


def test_a_request_under_way_fails_when_its_process_dies_and_the_line_opens_again() -> None:
    async def run(context: zmq.Context[zmq.Socket[bytes]]) -> None:
        loop = asyncio.get_running_loop()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        line = NodeLine(loop, context, f"tcp://127.0.0.1:{port}", FlushBatch(loop))
        try:
            asked = line.request("first", {}, timeout_s=60.0)
            await taken(router)
            router.close(0)
            with pytest.raises(LineLostError, match="ended"):
                await asyncio.wait_for(asked, SOON_S)
            assert line.connections == 2
            router = context.socket(zmq.ROUTER)
            router.bind(f"tcp://127.0.0.1:{port}")
            asked = line.request("second", {}, timeout_s=60.0)
            peer, header = await taken(router)
            router.send_multipart([peer, orjson.dumps({"id": orjson.loads(header)["id"], "ok": True})])
            assert (await asyncio.wait_for(asked, SOON_S))[0]["ok"]
        finally:
            line.close()
            router.close(0)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        asyncio.run(run(context))
    finally:
        context.destroy(0)
