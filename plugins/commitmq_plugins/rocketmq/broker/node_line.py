"""A connection to one process of the node, in an asyncio loop: requests, and a future for each answer.

A request is handed to ZeroMQ only while the connection stands. When it ends, the fate of the requests under way is unknown:
their futures fail with :class:`LineLostError`. A request that could not be handed over waits for the process to come back,
until its time is over; then it was not sent, and its future fails with ``sent`` false.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import orjson
import zmq

from commitmq.errors import CommitMQError
from commitmq.plugin import failpoints
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id

Answer = tuple[dict[str, Any], list[bytes]]
"""The header of an answer, ``ok`` or not, and its payload."""

_SWEEP_S: Final = 0.5
_ANSWERS_A_TURN: Final = 256


class LineLostError(CommitMQError):
    """No answer: the connection ended, or the time was over. ``sent`` is false when the process never got the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class NodeLine:
    """See the module. All methods are called in the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        max_waiting: int = 10_000,
        on_message: Callable[[dict[str, Any], list[bytes]], None] | None = None,
    ) -> None:
        """``max_waiting``: requests that wait for the process to come back. ``on_message`` gets what is no answer."""
        self._loop, self._zmq, self.endpoint = loop, context, endpoint
        self._max_waiting = max_waiting
        self._on_message = on_message
        self._number = 0
        self._under_way: dict[int, tuple[asyncio.Future[Answer], float]] = {}
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        self._is_looking = False
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self.connections = 0
        """How many connections there were: who registered something over an earlier one registers again."""
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        self._open()

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._under_way)

    def request(
        self, op: str, fields: dict[str, Any], payload: tuple[Any, ...] = (), *, timeout_s: float = 5.0
    ) -> asyncio.Future[Answer]:
        """Send one request. The future has the answer, also a refusal; it raises LineLostError without one."""
        self._number += 1
        number = self._number
        future: asyncio.Future[Answer] = self._loop.create_future()
        try:
            header = orjson.dumps({"v": wire.PROTOCOL_VERSION, "op": op, "id": number, **fields})
        except orjson.JSONEncodeError as error:
            future.set_result(
                ({"ok": False, "code": "INVALID_PARAMETER", "error": f"a value cannot be sent: {error}"}, [])
            )
            return future
        if len(self._waiting) >= self._max_waiting:
            future.set_exception(LineLostError(f"{self.endpoint} takes no requests at present", sent=False))
            return future
        self._under_way[number] = future, time.monotonic() + timeout_s
        frames = [header, *payload]
        if failpoints.ACTIVE:
            failpoints.hit(f"rocketmq.ask.{op}:before")
            future.add_done_callback(lambda _: failpoints.hit(f"rocketmq.asked.{op}"))
        if self._waiting or not self._put(frames):
            self._waiting.append((number, frames))
        if failpoints.ACTIVE:
            failpoints.hit(f"rocketmq.ask.{op}:after")
        self._look_soon()
        return future

    def close(self) -> None:
        """Requests under way fail."""
        self._sweeper.cancel()
        self._shut()
        self._fail_all("the connection is closed")

    # ------------------------------------------------------------ the socket

    def _open(self) -> None:
        sock = self._socket = self._zmq.socket(zmq.DEALER)
        sock.setsockopt(zmq.ROUTING_ID, new_routing_id())
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IMMEDIATE, 1)
        sock.setsockopt(zmq.RCVHWM, 0)  # answers are bounded by the requests under way
        sock.setsockopt(zmq.SNDHWM, 1_000)
        sock.setsockopt(zmq.RECONNECT_IVL, 20)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sock.connect(self.endpoint)
        self.connections += 1
        self._loop.add_reader(int(sock.getsockopt(zmq.FD)), self._look)
        self._loop.add_reader(int(self._monitor.getsockopt(zmq.FD)), self._hear)

    def _shut(self) -> None:
        sock, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        if sock is None or monitor is None:
            return
        self._loop.remove_reader(int(sock.getsockopt(zmq.FD)))
        self._loop.remove_reader(int(monitor.getsockopt(zmq.FD)))
        sock.disable_monitor()
        monitor.close(0)
        sock.close(0)

    def _put(self, frames: list[Any]) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def _look_soon(self) -> None:
        # Any call on a socket may consume the event of its descriptor, so a look must follow.
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Hand over what waits, and take the answers that are there."""
        self._is_looking = False
        sock = self._socket
        if sock is None:
            return
        while self._waiting:
            number, frames = self._waiting[0]
            if number in self._under_way and not self._put(frames):
                break
            self._waiting.popleft()
        for _ in range(_ANSWERS_A_TURN):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._look_soon()

    def _take(self, frames: list[bytes]) -> None:
        header = orjson.loads(frames[0])
        if "ok" not in header:
            if self._on_message is not None:
                self._on_message(header, frames[1:])
            return
        found = self._under_way.pop(header.get("id"), None)
        if found is not None and not found[0].done():
            found[0].set_result((header, frames[1:]))

    # ------------------------------------------------------------ losses

    def _hear(self) -> None:
        """The connection ended: requests under way have no answer. A new connection begins."""
        monitor = self._monitor
        if monitor is None:
            return
        lost = False
        with contextlib.suppress(zmq.Again):
            while True:
                lost |= bool(monitor.recv_multipart(zmq.NOBLOCK))
        if not lost:
            return
        self._look()  # the last answers of a process that ends
        self._shut()
        waiting = {number for number, _ in self._waiting}
        for number in [one for one in self._under_way if one not in waiting]:
            self._fail(number, f"the connection to {self.endpoint} ended", sent=True)
        self._open()

    def _sweep(self) -> None:
        now = time.monotonic()
        waiting = {number for number, _ in self._waiting}
        for number in [one for one, (_, until) in self._under_way.items() if until <= now]:
            self._fail(number, f"no answer from {self.endpoint} in time", sent=number not in waiting)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        self._look()

    def _fail(self, number: int, sentence: str, *, sent: bool) -> None:
        future, _ = self._under_way.pop(number)
        if not future.done():
            future.set_exception(LineLostError(sentence, sent=sent))

    def _fail_all(self, sentence: str) -> None:
        for number in list(self._under_way):
            self._fail(number, sentence, sent=True)
        self._waiting.clear()
