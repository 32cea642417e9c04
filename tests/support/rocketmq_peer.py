"""A client of RocketMQ's protocol for tests: fast, in one event loop, and back again after its server's death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from commitmq.format.record import Record, decode_record
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, encode, request
from nodes import Node, free_port, start_node

PATIENCE_S = 60.0
_PAUSE_S = 0.05
SEND = {"a": "pg", "b": "orders", "c": "TBW102", "d": "2", "e": "0", "f": "0", "g": "1763800000000", "h": "0", "j": "0",
        "k": "false"}  # fmt: skip
PULL = {"queueId": "0", "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "6", "commitOffset": "0",
        "suspendTimeoutMillis": "500", "subVersion": "0", "subscription": "*"}  # fmt: skip

_TOPIC = {"defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}


class LostError(Exception):
    """No answer: the connection ended, or the time was over."""


class Peer:
    """One client. ``on_request`` gets the server's requests, and returns the answer, if there is one. ``source`` is the
    address of this machine that it comes from.
    """

    def __init__(
        self, port: int, on_request: Callable[[Command], Command | None] | None = None, source: str = "127.0.0.1"
    ) -> None:
        self._port, self._on_request, self._source = port, on_request, source
        self._opaque = 0
        self._asked: dict[int, asyncio.Future[Command]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self.deaths = 0

    async def ask(self, command: Command, timeout_s: float = 5.0) -> Command:
        """The answer. Raises LostError."""
        self._opaque += 1
        opaque = command.opaque = self._opaque
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                writer = await self._connected()
                self._asked[opaque] = future
                writer.write(encode(command))
                return await future
        except (OSError, TimeoutError) as error:
            raise LostError(str(error)) from error
        finally:
            self._asked.pop(opaque, None)

    async def until(
        self, command: Command, is_good: Callable[[Command], bool] = lambda answer: answer.code == 0
    ) -> Command:
        """Ask again and again, over new connections if need be, until an answer is good."""
        deadline = time.monotonic() + PATIENCE_S
        last: object = None
        while time.monotonic() < deadline:
            try:
                answer = await self.ask(replace(command))
            except LostError as error:
                last = error
            else:
                if is_good(answer):
                    return answer
                last = answer
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError(f"no good answer in {PATIENCE_S:g} s: {last}")

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None or self._reading is None or self._reading.done():
                reader, self._writer = await asyncio.open_connection(
                    "127.0.0.1", self._port, local_addr=(self._source, 0)
                )
                self._reading = asyncio.create_task(self._read(reader, self._writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                for command in parser.feed(data):
                    if command.is_response:
                        future = self._asked.get(command.opaque)
                        if future is not None and not future.done():
                            future.set_result(command)
                    elif self._on_request is not None and (answer := self._on_request(command)) is not None:
                        writer.write(encode(answer))
        self.deaths += 1
        for future in self._asked.values():
            if not future.done():
                future.set_exception(OSError("the connection ended"))
        writer.close()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer is not None:
            self._writer.close()


@asynccontextmanager
async def connected(
    port: int, on_request: Callable[[Command], Command | None] | None = None, source: str = "127.0.0.1"
) -> AsyncIterator[Peer]:
    """A client, which is closed at the end."""
    peer = Peer(port, on_request, source)
    try:
        yield peer
    finally:
        await peer.close()


def send(
    topic: str, body: bytes, properties: dict[str, str] | None = None, *, queue: int = 0, sys_flag: int = 0
) -> Command:
    """A send of one message."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in (properties or {}).items())
    fields = {**SEND, "b": topic, "e": str(queue), "f": str(sys_flag), "i": text}
    return request(RequestCode.SEND_MESSAGE_V2, fields, body)


def pull(group: str, topic: str, offset: int, *, queue: int = 0, **fields: str) -> Command:
    """A pull of one queue, which may wait for half a second."""
    return request(
        RequestCode.PULL_MESSAGE,
        {
            **PULL,
            "consumerGroup": group,
            "topic": topic,
            "queueId": str(queue),
            "queueOffset": str(offset),
            **fields,
        },
    )


def is_pulled(answer: Command) -> bool:
    """Whether a pull has its answer, with messages or without."""
    return answer.code in (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED)


def heartbeat(
    client_id: str, group: str, *topics: str, producers: tuple[str, ...] = (), model: str = "CLUSTERING"
) -> Command:
    """A heartbeat of a consumer of ``topics`` (none without any), and of producer groups."""
    subscriptions = [{"topic": one, "subString": "*", "subVersion": 1, "expressionType": "TAG"} for one in topics]
    consumer = {"groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": model,
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": subscriptions}  # fmt: skip
    body = {
        "clientID": client_id,
        "consumerDataSet": [consumer] if topics else [],
        "producerDataSet": [{"groupName": one} for one in producers],
    }
    return request(RequestCode.HEART_BEAT, body=dumps(body))


def records(body: bytes | bytearray | memoryview) -> list[Record]:
    """The records of an answer's body."""
    found: list[Record] = []
    at = 0
    while at < len(body):
        found.append(decode_record(body, at))
        at += found[-1].total_size
    return found


@contextlib.contextmanager
def served_node(folder: Path, *settings: str, **extra: str) -> Iterator[tuple[Node, int, int]]:
    """A node that serves RocketMQ's clients, with the ports of its broker server and its name server."""
    port, namesrv_port = free_port(), free_port()
    own = (
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={namesrv_port}",
        f"network.store_port={port}",
    )
    with start_node(folder, *own, *settings, **extra) as node:
        yield node, port, namesrv_port


def asked(port: int, *commands: Command) -> list[Command]:
    """The answers to ``commands``, one after the other over one connection. Raises LostError."""

    async def talk() -> list[Command]:
        async with connected(port) as peer:
            return [await peer.ask(one, 20.0) for one in commands]

    return asyncio.run(talk())


def make_topic(name: str, queues: int = 1, perm: int = 6) -> Command:
    """A request of a tool for a topic, or for other numbers of queues and another permission of one."""
    fields = {"topic": name, "readQueueNums": str(queues), "writeQueueNums": str(queues), "perm": str(perm)}
    return request(RequestCode.UPDATE_AND_CREATE_TOPIC, {**_TOPIC, **fields})


def make_group(name: str, **settings: object) -> Command:
    """A request of a tool for a group with ``settings``, under RocketMQ's names."""
    return request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=dumps({"groupName": name, **settings}))


def fill(port: int, topic: str, *bodies: bytes, queue: int = 0, properties: dict[str, str] | None = None) -> int:
    """Send ``bodies`` to a queue of a topic and wait until they can be read; the end of the queue."""

    async def talk() -> int:
        async with connected(port) as peer:
            answer = Command(0)
            for body in bodies:
                answer = await peer.ask(send(topic, body, properties, queue=queue), 20.0)
                assert answer.code == 0, answer.remark
            end = int(answer.ext_fields["queueOffset"]) + 1
            await peer.until(bound(topic, queue), lambda found: found.ext_fields["offset"] == str(end))
            return end

    return asyncio.run(talk())


def bound(topic: str, queue: int = 0, code: RequestCode = RequestCode.GET_MAX_OFFSET) -> Command:
    """A question for the end of a queue, or with GET_MIN_OFFSET for its first offset."""
    return request(code, {"topic": topic, "queueId": str(queue)})


def has_code(*codes: int) -> Callable[[Command], bool]:
    """Whether an answer has one of ``codes``."""
    return lambda answer: answer.code in codes
