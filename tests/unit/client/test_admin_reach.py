"""Goal: an administrator waits long for the work of a node that is there, and not for a node that is not.

Method: an address where nobody listens, and sockets in the place of a node's that answer what and when the test says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
import zmq

from commitmq import Admin, NodeUnavailableError

NOBODY = "tcp://127.0.0.1:9"
pytestmark = pytest.mark.timeout(30)


@contextmanager
def playing_a_node(cleanup: str | None, work_s: float = 0.0) -> Iterator[str]:
    """Admin address of a node whose ``cleanup`` is there (None: answered after ``work_s``), or at an address."""
    over = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        metadata: dict[str, Any] = {
            "node": "n",
            "epoch": 1,
            "store": "/nowhere",
            "segment_bytes": 1 << 20,
            "properties_crc": False,
            "token": "",
            "endpoints": {"cleanup": [cleanup or address, ""]},
        }

        def serve() -> None:
            while not over.is_set():
                if router.poll(20):
                    peer, *_, request = router.recv_multipart()
                    asked = orjson.loads(request)
                    if asked["op"] == "expire":
                        over.wait(work_s)
                    about = metadata if asked["op"] == "metadata" else {"segments": []}
                    router.send_multipart([peer, orjson.dumps({"v": 1, "id": asked["id"], "ok": True, **about})])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield address
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("work", [Admin.expire, Admin.stop])
def test_a_node_that_is_not_there_is_an_error_soon(work: Callable[[Admin], object]) -> None:
    began = time.monotonic()
    with Admin(NOBODY, timeout_s=0.3) as admin, pytest.raises(NodeUnavailableError, match="is it started"):
        work(admin)
    assert time.monotonic() - began < 5


def test_a_process_of_the_node_that_is_not_there_is_an_error_soon() -> None:
    began = time.monotonic()
    with playing_a_node(NOBODY) as address, Admin(address, timeout_s=0.3) as admin, pytest.raises(NodeUnavailableError):
        admin.expire()
    assert time.monotonic() - began < 8


def test_the_work_of_a_node_that_is_there_may_take_longer() -> None:
    with playing_a_node(None, work_s=1.5) as address, Admin(address, timeout_s=0.3) as admin:
        assert admin.expire() == {"segments": []}
