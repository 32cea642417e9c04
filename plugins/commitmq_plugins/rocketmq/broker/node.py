"""The node behind the broker server: one line to each of its processes, the words of their requests, and their refusals in
RocketMQ's numbers and words (spec 2.7, 5.4, remoting 3.2).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson
import zmq

from commitmq.errors import CommitMQError, InvalidMessageError, ProtocolError, StoreError
from commitmq.format.constants import MAX_GROUP_UNITS, MAX_LONG_TOPIC_UNITS, MAX_TOPIC_UNITS
from commitmq.plugin import Actor, NodeConfig, WorkerContext, failpoints
from commitmq.protocol import wire
from commitmq.protocol.channel import GREETING, HEADER_LENGTH, MAX_PACKET_BYTES, new_routing_id
from commitmq.store.metadata.topic_config import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    TopicConfig,
    validate_group,
    validate_topic,
)
from commitmq_plugins.rocketmq.broker.rights import PROTOCOL
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode
from commitmq_plugins.rocketmq.remoting.server import FlushBatch

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
    """A connection to one process of the node, in an asyncio loop: requests, and a callback or a future for each
    answer.

    A request is passed to ZeroMQ only while the connection stands. When it ends, the outcome of the requests under way
    is unknown: they get a :class:`LineLostError`. A request that could not be passed on waits for the process to come
    back, until its time is over; then it was not sent, and its error has ``sent`` false.

    All methods are called in the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        turn: FlushBatch,
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


_AGAIN_AFTER_S: Final = 1.0
_HEADER_BYTES: Final = 4_096
MAX_RUN_BYTES: Final = MAX_PACKET_BYTES - _HEADER_BYTES


class LocalLine:
    """The writer's Unix socket for one run at a time (PROTOCOL.md): a lone sender's run takes half as many wake-ups as
    by ZeroMQ.

    The connection begins with a greeting of the writer; before it nothing is sent. When it ends, or an answer does not
    come in time, the outcome of the run under way is unknown, and a new connection begins with a later run.

    All methods are called in the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, turn: FlushBatch) -> None:
        """Connects at the first :meth:`call`, which is not taken therefore."""
        self._loop, self._path, self._turn = loop, path, turn
        self._socket: socket.socket | None = None
        self._is_greeted = False
        self._next_try_s = 0.0
        self._number = 0
        self._done: Done | None = None
        self._until_s = 0.0
        self._sweeper: asyncio.TimerHandle | None = None

    def call(self, op: str, fields: dict[str, Any], done: Done, payload: Any, *, timeout_s: float) -> bool:
        """Send a request, and give its answer to ``done``. False when it is not taken, and so not sent."""
        sock = self._socket
        if sock is None:
            self._connect()
            return False
        if not self._is_greeted or self._done is not None or len(payload) > MAX_RUN_BYTES:
            return False
        self._number += 1
        header = orjson.dumps({"v": wire.PROTOCOL_VERSION, "op": op, "id": self._number, **fields})
        if HEADER_LENGTH + len(header) > _HEADER_BYTES:
            return False
        if failpoints.ACTIVE:
            failpoints.hit(f"rocketmq.ask.{op}:before")
            done = watched(op, done)
        try:
            sock.sendmsg((len(header).to_bytes(HEADER_LENGTH, "big"), header, payload))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._lose("")  # the writer is gone; nothing was under way
            return False
        self._done = done
        self._until_s = time.monotonic() + timeout_s
        if failpoints.ACTIVE:
            failpoints.hit(f"rocketmq.ask.{op}:after")
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        return True

    def close(self) -> None:
        """A run under way fails."""
        self._lose("the connection is closed")
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self._next_try_s:
            return
        self._next_try_s = now + _AGAIN_AFTER_S
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(os.fspath(self._path))
        except OSError:  # no writer at present, no local socket on this node, or no room
            sock.close()
            return
        self._socket, self._is_greeted = sock, False
        self._loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_PACKET_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose("the writer ended the connection")
        elif not self._is_greeted:
            if data != GREETING:
                self._lose("")
            self._is_greeted = data == GREETING
        else:
            self._answered(data)

    def _answered(self, data: bytes) -> None:
        done = self._done
        try:
            answer = wire.parse_answer(data)
        except ProtocolError as error:
            self._lose(error.message)
            return
        if done is None or answer.get("id") != self._number:
            self._lose("the writer answered another request")
            return
        self._done = None
        self._turn.begin()
        try:
            done((answer, []))
        finally:
            self._turn.end()

    def _sweep(self) -> None:
        self._sweeper = None
        if self._done is not None:
            if time.monotonic() > self._until_s:
                self._lose("no answer from the writer in time")
            else:
                self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    def _lose(self, sentence: str) -> None:
        """End the connection. A run under way has an unknown outcome."""
        sock, done = self._socket, self._done
        self._socket, self._done, self._is_greeted = None, None, False
        if sock is not None:
            self._loop.remove_reader(sock)
            with contextlib.suppress(OSError):
                sock.close()
        if done is not None:
            done(LineLostError(sentence, sent=True))


_ALLOWED: Final = "^[%|a-zA-Z0-9_-]+$"


def topic_refusal(name: str) -> str | None:
    """None for a legal name."""
    if name.startswith(("%RETRY%", "%DLQ%")) and len(name) > MAX_LONG_TOPIC_UNITS:
        return (
            f"The specified topic is DLQ or Retry topic: {name}, and it's longer than topic max length:"
            f" {MAX_LONG_TOPIC_UNITS}"
        )
    return _refusal("topic", name, validate_topic, MAX_TOPIC_UNITS)


def group_refusal(name: str) -> str | None:
    """None for a legal name."""
    return _refusal("group", name, validate_group, MAX_GROUP_UNITS)


def _refusal(kind: str, name: str, validate: Callable[[str], None], most: int) -> str | None:
    if not name.strip():
        return f"The specified {kind} is blank."
    try:
        validate(name)
    except InvalidMessageError:
        if len(name) > most:
            return f"The specified {kind}: {name}, is longer than {kind} max length: {most}"
        return f"The specified {kind}: {name}, contains illegal characters, allowing only {_ALLOWED}"
    return None


_TIMEOUT_S: Final = 5.0
_MOST_PROOFS: Final = 10_000
SERVICE_NOT_AVAILABLE: Final = "SERVICE_NOT_AVAILABLE"


class NodeClient:
    """Lines are opened at first use. All methods are called in the loop."""

    def __init__(self, context: WorkerContext, loop: asyncio.AbstractEventLoop, turn: FlushBatch) -> None:
        """``turn`` is that of the server: the answers of a moment go to its clients together."""
        self._context, self._loop, self._turn = context, loop, turn
        self.layout = context.layout
        self.control, self.quotas = context.control, context.quotas
        self._lines: dict[tuple[str, int], NodeLine] = {}
        self._local_lines: list[LocalLine] = []
        self._on_behalf: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.on_check: Callable[[dict[str, Any], list[bytes]], None] | None = None
        """Takes the checks of transactions that the transaction process sends."""

    @property
    def config(self) -> NodeConfig:
        """The node's settings, as they are now."""
        return self._context.config

    def on_behalf_of(self, op: str, user: str, address: str = "") -> dict[str, Any]:
        """What a request of the operation ``op`` carries that is made for a client of ``user``, whose quotas it counts for."""
        if not user:
            return {}
        key = op, user, address
        found = self._on_behalf.get(key)
        if found is None:
            if len(self._on_behalf) >= _MOST_PROOFS:
                self._on_behalf.clear()
            found = self._on_behalf[key] = self._context.vouching.fields(op, Actor(user, PROTOCOL, address))
        return found

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        for local in self._local_lines:
            local.close()
        self._local_lines.clear()

    def local_line(self) -> LocalLine:
        """A new line to the writer's local socket."""
        self._local_lines.append(LocalLine(self._loop, self.layout.local_socket, self._turn))
        return self._local_lines[-1]

    def line(self, role: str, lane: int = 0) -> NodeLine:
        """The line to ``role``, as ``reader-0`` or ``writer``. Each lane is a peer of its own, which limits count alone."""
        found = self._lines.get((role, lane))
        if found is None:
            on_message = self._checked if role == "transaction" else None
            endpoint = self.layout.ipc(role)
            found = NodeLine(self._loop, self._context.zmq, endpoint, self._turn, on_message=on_message)
            self._lines[role, lane] = found
        return found

    def _checked(self, header: dict[str, Any], frames: list[bytes]) -> None:
        if self.on_check is not None and header.get("op") == "transaction.check":
            self.on_check(header, frames)

    def reader_of(self, topic: str, queue: int) -> NodeLine:
        """The line to the reader that serves this queue for this server."""
        return self.line(f"reader-{(hash(topic) + queue) % self.config.reader.count}")

    async def ask(self, role: str, op: str, *, timeout_s: float = _TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """The header of the answer. Raises ProtocolError for a refusal, SERVICE_NOT_AVAILABLE without an answer."""
        return (await self.exchange(self.line(role), op, fields, timeout_s=timeout_s))[0]

    async def exchange(
        self,
        line: NodeLine,
        op: str,
        fields: dict[str, Any],
        payload: tuple[Any, ...] = (),
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> Answer:
        """One request and its answer. Raises as :meth:`ask`."""
        try:
            answer = await line.request(op, fields, payload, timeout_s=timeout_s)
        except LineLostError as error:
            raise ProtocolError(SERVICE_NOT_AVAILABLE, str(error)) from error
        if not answer[0]["ok"]:
            raise wire.refusal(answer[0])
        return answer

    async def mover(self, role: str, op: str, *, lane: int = 0, timeout_s: float = _TIMEOUT_S, **fields: Any) -> Answer:
        """A request to a mover that runs on demand, ``pop`` or ``transaction``. Raises as :meth:`ask`."""
        await self._call(role)
        return await self.exchange(self.line(role, lane), op, fields, timeout_s=timeout_s)

    async def _call(self, role: str) -> None:
        if not (self.layout.sockets / f"{role}.ipc").exists():
            await self.exchange(self.line(self._admin()), "mover.start", {"role": role})

    async def expect(self, role: str) -> None:
        """A mover is likely to be needed soon: on a busy machine its start takes seconds that clients do not wait."""
        with contextlib.suppress(ProtocolError):  # the first request calls again, and says what is wrong
            await self._call(role)

    def _admin(self) -> str:
        """The name of the supervisor's socket, which each life of the node has of its own. Raises ProtocolError."""
        try:
            endpoint = self._context.admin_ipc
        except (StoreError, KeyError, IndexError) as error:
            raise ProtocolError(SERVICE_NOT_AVAILABLE, f"the supervisor cannot be reached: {error}") from error
        return endpoint.rpartition("/")[2].removesuffix(".ipc")


_CODES: Final = {
    "MESSAGE_ILLEGAL": ResponseCode.MESSAGE_ILLEGAL,
    "PROPERTIES_SIZE_EXCEEDED": ResponseCode.MESSAGE_ILLEGAL,
    "WHEEL_TIMER_MSG_ILLEGAL": ResponseCode.MESSAGE_ILLEGAL,
    "FRAME_TOO_LARGE": ResponseCode.MESSAGE_ILLEGAL,
    "SERVICE_NOT_AVAILABLE": ResponseCode.SERVICE_NOT_AVAILABLE,
    "CREATE_MAPPED_FILE_FAILED": ResponseCode.SYSTEM_ERROR,
    "SYSTEM_BUSY": ResponseCode.SYSTEM_BUSY,
    "TOPIC_NOT_EXIST": ResponseCode.TOPIC_NOT_EXIST,
    "GROUP_NOT_EXIST": ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    "NO_PERMISSION": ResponseCode.NO_PERMISSION,
    "INVALID_PARAMETER": ResponseCode.INVALID_PARAMETER,
    "LIMIT_EXCEEDED": ResponseCode.SYSTEM_ERROR,
    "ILLEGAL_OPERATION": ResponseCode.ILLEGAL_OPERATION,
    "FLUSH_DISK_TIMEOUT": ResponseCode.FLUSH_DISK_TIMEOUT,
}

_WRONG_FILTER: Final = re.compile(r"(?:a|the) (?:filter|tag filter|tag expression|\S+ filter is wrong)\b")
"""How the sentences of a reader begin that refuse an expression."""


def response_code(code: str) -> int:
    """RocketMQ's number for a code of the node; SYSTEM_ERROR for one that it has no number for."""
    return int(_CODES.get(code, ResponseCode.SYSTEM_ERROR))


def filter_refusal(code: str, sentence: str, kind: str) -> tuple[int, str] | None:
    """Code and remark when a reader refused the filter of a pull, and None for another refusal (spec 9.4).

    An expression that cannot be parsed has SUBSCRIPTION_PARSE_FAILED, a type of filter that the node does not have
    SYSTEM_ERROR, as with RocketMQ's ``enablePropertyFilter`` off.
    """
    if code != "INVALID_PARAMETER":
        return None
    if sentence.startswith("this node has no filter type"):
        return int(ResponseCode.SYSTEM_ERROR), f"The broker does not support consumer to filter message by {kind}"
    if _WRONG_FILTER.match(sentence):
        return int(ResponseCode.SUBSCRIPTION_PARSE_FAILED), sentence
    return None


def refusal_of(error: ProtocolError) -> tuple[int, str]:
    """Code and remark of the answer to a request that the node refused."""
    return response_code(error.code), error.message


FAQ: Final = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
REGION: Final = "DefaultRegion"
SEND_FIELDS: Final = {"MSG_REGION": REGION, "TRACE_ON": "true"}
"""Fields of every answer to a send, refusals included."""


class SendRefusal(Exception):
    """The send is refused with this code and remark."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code, self.remark = code, remark


def check_name(name: str) -> None:
    """Raises SendRefusal for a name that no topic can have (spec store 2.7)."""
    refused = topic_refusal(name)
    if refused is not None:
        raise SendRefusal(ResponseCode.INVALID_PARAMETER, refused)


def topic_text(topic: TopicConfig) -> str:
    """As RocketMQ's refusals show a topic."""
    perm = "".join(letter if topic.perm & bit else "-" for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE)))
    shown = ", ".join(f"{name}={value}" for name, value in topic.settings.items())
    return (
        f"TopicConfig [topicName={topic.name}, readQueueNums={topic.read_queues}, writeQueueNums={topic.write_queues},"
        f" perm={perm}{'X' if topic.perm & PERM_INHERIT else '-'}, topicFilterType={topic.filter_type},"
        f" topicSysFlag={topic.sys_flag}, order={str(topic.order).lower()}, attributes={{{shown}}}]"
    )
