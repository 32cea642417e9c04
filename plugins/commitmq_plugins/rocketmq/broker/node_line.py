"""A connection to one process of the node, in an asyncio loop: requests, and a callback or a future for each answer.

A request is handed to ZeroMQ only while the connection stands. When it ends, the fate of the requests under way is unknown:
they get a :class:`LineLostError`. A request that could not be handed over waits for the process to come back, until its time
is over; then it was not sent, and its error has ``sent`` false.
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
from commitmq_plugins.rocketmq.remoting.turn import Turn

Answer = tuple[dict[str, Any], list[bytes]]
"""The header of an answer, ``ok`` or not, and its payload."""

_SWEEP_S: Final = 0.5
_ANSWERS_A_TURN: Final = 256
# Plain ints: the operators of an enum cost half a microsecond each.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)


class LineLostError(CommitMQError):
    """No answer: the connection ended, or the time was over. ``sent`` is false when the process never got the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


Done = Callable[[Answer | LineLostError], None]
"""Takes the answer of a request, or why there is none; called once, in the loop."""


def watched(op: str, done: Done) -> Done:
    """``done``, and before it the failpoint of an answer to ``op``."""

    def answered(answer: Answer | LineLostError) -> None:
        try:
            failpoints.hit(f"rocketmq.asked.{op}")
        finally:
            done(answer)

    return answered


class NodeLine:
    """See the module. All methods are called in the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        turn: Turn,
        *,
        max_waiting: int = 10_000,
        on_message: Callable[[dict[str, Any], list[bytes]], None] | None = None,
    ) -> None:
        """``max_waiting``: requests that wait for the process to come back. ``on_message`` gets what is no answer."""
        self._loop, self._zmq, self.endpoint, self._turn = loop, context, endpoint, turn
        self._max_waiting = max_waiting
        self._on_message = on_message
        self._number = 0
        self._under_way: dict[int, tuple[Done, float]] = {}
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
        future: asyncio.Future[Answer] = self._loop.create_future()

        def done(answer: Answer | LineLostError) -> None:
            if future.done():
                return
            if isinstance(answer, LineLostError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self.call(op, fields, done, payload, timeout_s=timeout_s)
        return future

    def call(
        self, op: str, fields: dict[str, Any], done: Done, payload: tuple[Any, ...] = (), *, timeout_s: float = 5.0
    ) -> None:
        """Send one request. ``done`` gets the answer as soon as it is read; what it then sends goes out together with what
        the other answers of that moment cause.
        """
        self._number += 1
        number = self._number
        try:
            header = orjson.dumps({"v": wire.PROTOCOL_VERSION, "op": op, "id": number, **fields})
        except orjson.JSONEncodeError as error:
            refusal = {"ok": False, "code": "INVALID_PARAMETER", "error": f"a value cannot be sent: {error}"}
            self._loop.call_soon(done, (refusal, []))
            return
        if len(self._waiting) >= self._max_waiting:
            lost = LineLostError(f"{self.endpoint} takes no requests at present", sent=False)
            self._loop.call_soon(done, lost)
            return
        if failpoints.ACTIVE:
            failpoints.hit(f"rocketmq.ask.{op}:before")
            done = watched(op, done)
        self._under_way[number] = done, time.monotonic() + timeout_s
        frames = [header, *payload]
        if self._waiting or not self._put(frames):
            self._waiting.append((number, frames))
        if failpoints.ACTIVE:
            failpoints.hit(f"rocketmq.ask.{op}:after")
        self._look_if_needed()

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
        with contextlib.suppress(zmq.Again):
            # Its descriptor tells of an event only to who has looked for one and found none.
            self._monitor.recv_multipart(_NOBLOCK)
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
            self._socket.send_multipart(frames, _NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def _look_if_needed(self) -> None:
        # Any call on a socket may consume the event of its descriptor. So either nothing is there now, and the next answer
        # makes a new event, or a look must follow.
        sock = self._socket
        if sock is None or self._is_looking:
            return
        if self._waiting or int(sock.getsockopt(_EVENTS)) & _POLLIN:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Hand over what waits, and take the answers that are there."""
        self._is_looking = False
        self._turn.begin()
        try:
            self._look_now()
        finally:
            self._turn.end()

    def _look_now(self) -> None:
        sock = self._socket
        if sock is None:
            return
        while self._waiting:
            number, frames = self._waiting[0]
            if number in self._under_way and not self._put(frames):
                break
            self._waiting.popleft()
        for _ in range(_ANSWERS_A_TURN):
            # Asking costs half of what an Again exception does.
            if sock.closed or not int(sock.getsockopt(_EVENTS)) & _POLLIN:
                return
            self._take(sock.recv_multipart(_NOBLOCK))
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def _take(self, frames: list[bytes]) -> None:
        header = orjson.loads(frames[0])
        if "ok" not in header:
            if self._on_message is not None:
                self._on_message(header, frames[1:])
            return
        found = self._under_way.pop(header.get("id"), None)
        if found is not None:
            self._tell(found[0], (header, frames[1:]))

    def _tell(self, done: Done, answer: Answer | LineLostError) -> None:
        """An error of one receiver is no error of the others."""
        try:
            done(answer)
        except Exception as error:
            self._loop.call_exception_handler({"message": f"an answer of {self.endpoint} failed", "exception": error})

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
        done, _ = self._under_way.pop(number)
        self._tell(done, LineLostError(sentence, sent=sent))

    def _fail_all(self, sentence: str) -> None:
        for number in list(self._under_way):
            self._fail(number, sentence, sent=True)
        self._waiting.clear()
