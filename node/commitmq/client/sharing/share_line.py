"""The connection of a share consumer to the process ``pop`` of its node, which it asks the node to start."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from commitmq.errors import CommitMQError, NodeUnavailableError, ProtocolError
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory

CLOSE_S: Final = 2.0
_PAUSE_S: Final = 0.2
_PASSING: Final = ("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY")


class ShareLine:
    """One request at a time; any thread may make one."""

    def __init__(self, node: str | None) -> None:
        self._directory = Directory(node)
        self.address = self._directory.address
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._user = 0
        """The thread whose request is under way."""
        self._is_closed = False

    def connect(self, timeout_s: float) -> None:
        """Raises NodeUnavailableError without a node, ProtocolError when it refuses."""
        with self._lock:
            self._connect(time.monotonic() + timeout_s)

    def request(
        self, op: str, fields: dict[str, Any], *, timeout_s: float, wait_s: float = 0.0
    ) -> tuple[dict[str, Any], list[Any]]:
        """The answer and its frames. Repeats the request while the node is away or busy, for ``timeout_s`` at most; the
        node may take ``wait_s`` more to answer. Raises NodeUnavailableError, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        if self._user == threading.get_ident():
            raise CommitMQError("a request is under way: a signal handler must not make another one")
        try:
            with self._lock:
                self._user = threading.get_ident()
                try:
                    return self._answer(op, fields, deadline, wait_s)
                finally:
                    self._user = 0
        finally:
            if self._is_closed:
                self._end(0)

    def _answer(
        self, op: str, fields: dict[str, Any], deadline: float, wait_s: float
    ) -> tuple[dict[str, Any], list[Any]]:
        while True:
            if self._is_closed:
                raise CommitMQError("the consumer is closed")
            try:
                channel = self._connect(deadline)
                left_s = max(deadline - time.monotonic(), 0.01)
                answer, frames = channel.request(op, fields, timeout_s=left_s + wait_s)
                return answer, [frame.buffer for frame in frames]
            except NodeUnavailableError:
                self._drop()
                if time.monotonic() + _PAUSE_S >= deadline:
                    raise
                time.sleep(_PAUSE_S)
            except ProtocolError as error:
                pause_s = max((error.retry_after_ms or 0) / 1000, _PAUSE_S)
                if error.code not in _PASSING or time.monotonic() + pause_s >= deadline:
                    raise
                time.sleep(pause_s)
            except BaseException:
                self._drop()  # interrupted: a late answer must not be taken for another one
                raise

    def _connect(self, deadline: float) -> Channel:
        if self._channel is not None and self._channel.lost():
            self._drop()
        if self._channel is None:
            self._directory.metadata(timeout_s=max(deadline - time.monotonic(), 0.01))
            self._directory.request(
                "mover.start", {"role": "pop"}, timeout_s=max(deadline - time.monotonic(), 0.01)
            )  # a node that was started again runs no movers
            self._channel, _ = self._directory.connect("pop", deadline)
        return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def close(self) -> None:
        """Close the connection. A request under way ends first, and closes it where this does not wait for that: in a signal
        handler, which may interrupt the request, and after CLOSE_S.
        """
        self._is_closed = True
        if self._user != threading.get_ident():
            self._end(CLOSE_S)

    def _end(self, wait_s: float) -> None:
        if self._lock.acquire(timeout=wait_s):
            try:
                self._drop()
                self._directory.close()
            finally:
                self._lock.release()
