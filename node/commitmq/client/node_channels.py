"""The connections of an admin to the processes of one node: one for each process, made at its first request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commitmq.errors import NodeUnavailableError
from commitmq.protocol.channel import Channel, ConnectionLost
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    import zmq


class NodeChannels:
    """``directory`` says where the processes are. ``timeout_s`` bounds the wait for a process that does not answer at all."""

    def __init__(self, directory: Directory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._channels: dict[str, Channel] = {}

    def request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        """Send a request to the process of ``role``, and again after a lost connection. Returns the answer and its frames.

        ``timeout_s`` bounds the work of a process that has the request.
        """
        began = time.monotonic()
        deadline = began + (self._timeout_s if timeout_s is None else timeout_s)
        reached_by = min(deadline, began + self._timeout_s)
        while True:
            channel = self._channels.get(role)
            if channel is not None and channel.lost():
                self._drop(role)
                channel = None
            if channel is None:
                channel, _ = self._directory.connect(role, reached_by)
                self._channels[role] = channel
            try:
                return channel.request(op, fields, payload, timeout_s=max(deadline - time.monotonic(), 0.01))
            except NodeUnavailableError as error:
                # An admin may repeat every request, because each one names the wanted state and not a change.
                self._drop(role)
                now = time.monotonic()
                if isinstance(error, ConnectionLost):  # the process was there, and may be back in a moment
                    reached_by = min(deadline, now + self._timeout_s)
                if now >= reached_by:
                    raise

    def _drop(self, role: str) -> None:
        self._channels.pop(role).close()

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
