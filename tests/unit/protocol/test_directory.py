"""Goal: a node that starts is waited for, and no longer than was asked for.

Method: a socket in the place of the node's, which says that it starts as often as the test wants.
"""

from __future__ import annotations

import threading
import time

import orjson
import pytest
import zmq

from commitmq.errors import ProtocolError
from commitmq.protocol.directory import Directory
from nodes import eventually

REST = {"node": "n", "epoch": 1, "segment_bytes": 1 << 20, "properties_crc": False, "token": ""}


def serve(router: zmq.Socket[bytes], refusals: int, over: threading.Event) -> None:
    while not over.is_set():
        if not router.poll(20):
            continue
        peer, *_, request = router.recv_multipart()
        asked = orjson.loads(request)
        answer = {"v": 1, "id": asked["id"], "ok": True, "store": "/s", "endpoints": {}, **REST}
        if refusals > 0:
            refusals -= 1
            answer = {
                "v": 1,
                "id": asked["id"],
                "ok": False,
                "code": "SERVICE_NOT_AVAILABLE",
                "error": "the node starts",
            }
        router.send_multipart([peer, orjson.dumps(answer)])


def bound(router: zmq.Socket[bytes], port: int) -> bool:
    """libzmq closes a socket in a thread of its own, a moment later."""
    try:
        router.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True


@pytest.mark.parametrize(("refusals", "timeout_s", "waits"), [(3, 10.0, True), (1_000, 0.5, False)])
def test_a_node_that_starts_is_waited_for(refusals: int, timeout_s: float, waits: bool) -> None:
    over = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(target=serve, args=(router, refusals, over))
        thread.start()
        directory = Directory(f"tcp://127.0.0.1:{port}")
        began = time.monotonic()
        try:
            if waits:
                assert directory.metadata(timeout_s=timeout_s).count("reader") == 0
            else:
                with pytest.raises(ProtocolError, match="the node starts"):
                    directory.metadata(timeout_s=timeout_s)
                assert time.monotonic() - began < 5
        finally:
            directory.close()
            over.set()
            thread.join()


def test_a_node_that_dies_while_it_is_asked_is_waited_for() -> None:
    """Its connection ends; the next one leads to its successor."""
    over = threading.Event()
    with zmq.Context() as context:
        first = context.socket(zmq.ROUTER)
        port = first.bind_to_random_port("tcp://127.0.0.1")

        def succeed() -> None:
            first.recv_multipart()
            first.close(linger=0)
            with context.socket(zmq.ROUTER) as second:
                second.setsockopt(zmq.LINGER, 0)
                eventually(lambda: bound(second, port), "the port is free again")
                serve(second, 1, over)

        thread = threading.Thread(target=succeed)
        thread.start()
        directory = Directory(f"tcp://127.0.0.1:{port}")
        try:
            assert directory.metadata(timeout_s=20).count("reader") == 0
        finally:
            directory.close()
            over.set()
            thread.join()
