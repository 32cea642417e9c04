"""A ROUTER with its gate, without a node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import zmq

from commitmq.config import NetworkConfig
from commitmq.log import get_log
from commitmq.network.router import Router, open_router


@contextlib.contextmanager
def opened(
    tmp_path: Path, *, only_answers: bool = False, config: NetworkConfig | None = None
) -> Iterator[tuple[Router, list[str]]]:
    """It and its endpoints, tcp and ipc."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, endpoints = open_router(
        context, config or NetworkConfig(), get_log("test"), f"ipc://{tmp_path}/r.ipc", 0, only_answers=only_answers
    )
    try:
        yield router, endpoints
    finally:
        router.close()
        context.destroy(linger=0)
