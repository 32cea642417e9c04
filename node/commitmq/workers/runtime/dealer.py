"""A process's connection to another process of its node, over ipc."""

from __future__ import annotations

import zmq

from commitmq.protocol.channel import new_routing_id
from commitmq.workers.runtime.context import Socket, WorkerContext


def connect(context: WorkerContext, role: str) -> Socket:
    """A DEALER to ``role``. It sends only while that process listens, and drops what was not sent when it is closed."""
    found = context.zmq.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.IMMEDIATE, 1)
    found.setsockopt(zmq.ROUTING_ID, new_routing_id())
    found.connect(context.layout.ipc(role))
    return found
