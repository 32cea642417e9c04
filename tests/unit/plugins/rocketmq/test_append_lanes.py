"""Goal: runs reach the writer in their order, a lone sender's by the quick way, and a lost one is told to its sender.

Method: lanes over lines that keep what they are given until the test answers; a line over a hand-made writer's socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from commitmq.plugin import failpoints
from commitmq.protocol.channel import GREETING
from commitmq_plugins.rocketmq.broker.node import MAX_RUN_BYTES, Answer, LineLostError, LocalLine
from commitmq_plugins.rocketmq.broker.runs import AppendLanes
from commitmq_plugins.rocketmq.remoting.server import FlushBatch

OK: Answer = ({"ok": True}, [])


class Lines:
    """The node's lines: ``sent`` has the way and the run of each request that waits for its answer."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, Callable[[Any], None]]] = []
        self.takes_local = True
        self.order: list[bytes] = []

    def local_line(self) -> Any:
        return Local(self)

    def line(self, role: str) -> Any:
        return Remote(self, role)

    def answer(self, with_: Any = OK) -> None:
        self.sent.pop(0)[2](with_)

    @property
    def ways(self) -> list[tuple[str, bytes]]:
        return [one[:2] for one in self.sent]


class Local:
    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def call(self, op: str, fields: Any, done: Any, payload: bytes, *, timeout_s: float) -> bool:
        if self.lines.takes_local:
            self.lines.sent.append(("local", payload, done))
            self.lines.order.append(payload)
        return self.lines.takes_local


class Remote:
    def __init__(self, lines: Lines, role: str) -> None:
        self.lines, self.role = lines, role

    def call(self, op: str, fields: Any, done: Any, payload: tuple[bytes], *, timeout_s: float) -> None:
        self.lines.sent.append((self.role, payload[0], done))
        self.lines.order.append(payload[0])


class Sent:
    """Lanes whose runs are their numbers."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.lanes = AppendLanes(self.lines)  # type: ignore[arg-type]
        self.answers: list[Any] = []

    def put(self, run: bytes, messages: int = 1, role: str = "writer", op: str = "append") -> None:
        self.lanes.hand_over(role, op, {}, run, messages, self.answers.append)

    def be_lone(self) -> None:
        self.put(b"first")
        self.lines.answer()
        assert self.lanes.is_lone
        self.lines.order.clear()
        self.answers.clear()


def test_a_sender_is_lone_when_it_was_so_last_time() -> None:
    sent = Sent()
    assert not sent.lanes.is_lone
    sent.put(b"1")
    assert sent.lines.ways == [("writer", b"1")]
    sent.lines.answer()
    assert sent.lanes.is_lone
    sent.put(b"2")
    assert not sent.lanes.is_lone
    assert sent.lines.ways == [("local", b"2")]
    sent.lines.answer()
    assert sent.answers == [OK, OK]
    sent.put(b"3", messages=2)  # one run of two senders
    sent.lines.answer()
    assert not sent.lanes.is_lone


def test_others_wait_for_the_lone_one_and_keep_their_order() -> None:
    sent = Sent()
    sent.be_lone()
    for run in (b"1", b"2", b"3"):
        sent.put(run)
    assert sent.lines.ways == [("local", b"1")]
    sent.lines.answer()
    assert sent.lines.ways == [("writer", b"2"), ("writer", b"3")]
    sent.put(b"4")
    assert sent.lines.order == [b"1", b"2", b"3", b"4"]
    for _ in range(3):
        sent.lines.answer()
    assert len(sent.answers) == 4
    assert not sent.lanes.is_lone


def test_a_lost_connection_loses_only_what_was_on_it() -> None:
    sent = Sent()
    sent.be_lone()
    sent.put(b"1")
    sent.put(b"2")
    lost = LineLostError("gone", sent=True)
    sent.lines.answer(lost)
    sent.lines.answer()
    assert sent.answers == [lost, OK]


def test_what_the_local_socket_does_not_take_goes_by_zeromq() -> None:
    sent = Sent()
    sent.be_lone()
    sent.lines.takes_local = False
    sent.put(b"1")
    assert sent.lines.ways == [("writer", b"1")]
    sent.lines.answer()
    sent.lines.takes_local = True
    sent.put(b"2", role="memory")
    assert sent.lines.ways == [("memory", b"2")]
    sent.lines.answer()
    sent.put(b"3", op="batch")
    assert sent.lines.ways == [("writer", b"3")]


# ------------------------------------------------------------ the line itself


class Writer:
    """A writer's local socket by hand."""

    def __init__(self, path: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listening.bind(str(path))
        self.listening.listen(4)
        self.peer: socket.socket | None = None

    def accept(self, greeting: bytes = GREETING) -> socket.socket:
        self.peer = self.listening.accept()[0]
        self.peer.settimeout(5)
        self.peer.send(greeting)
        return self.peer

    def close(self) -> None:
        self.listening.close()
        if self.peer is not None:
            self.peer.close()


def with_line(folder: Path, talk: Callable[[LocalLine, Writer, list[Any]], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        writer = Writer(folder / "w.sock")
        line = LocalLine(loop, folder / "w.sock", FlushBatch(loop))
        try:
            async with asyncio.timeout(20):
                await talk(line, writer, [])
        finally:
            line.close()
            writer.close()

    asyncio.run(main())


def call(line: LocalLine, found: list[Any], run: bytes = b"run", timeout_s: float = 5.0) -> bool:
    return line.call("append", {"topic": "T"}, found.append, run, timeout_s=timeout_s)


async def greeted(line: LocalLine, writer: Writer, found: list[Any]) -> socket.socket:
    assert not call(line, found)  # it connects
    peer = writer.accept()
    await asyncio.sleep(0.05)
    return peer


def test_nothing_is_sent_before_the_greeting(tmp_path: Path) -> None:
    async def talk(line: LocalLine, writer: Writer, found: list[Any]) -> None:
        assert not call(line, found)
        assert not call(line, found)
        peer = writer.accept()
        await asyncio.sleep(0.05)
        assert call(line, found)
        packet = peer.recv(1_000)
        size = int.from_bytes(packet[:4], "big")
        header = orjson.loads(packet[4 : 4 + size])
        assert (header["op"], header["topic"], packet[4 + size :]) == ("append", "T", b"run")
        assert not call(line, found)  # one at a time
        peer.send(orjson.dumps({"v": 1, "id": header["id"], "ok": True, "queue_offset": 4}))
        await asyncio.sleep(0.05)
        assert [one[0]["queue_offset"] for one in found] == [4]
        assert not call(line, found, bytes(MAX_RUN_BYTES + 1))
        assert call(line, found, bytes(MAX_RUN_BYTES))

    with_line(tmp_path, talk)


def test_a_peer_without_the_greeting_gets_nothing(tmp_path: Path) -> None:
    async def talk(line: LocalLine, writer: Writer, found: list[Any]) -> None:
        assert not call(line, found)
        peer = writer.accept(b"hello")
        await asyncio.sleep(0.05)
        assert not call(line, found)
        assert peer.recv(100) == b""
        assert found == []

    with_line(tmp_path, talk)


def test_the_end_of_the_connection_makes_the_fate_unknown(tmp_path: Path) -> None:
    async def talk(line: LocalLine, writer: Writer, found: list[Any]) -> None:
        peer = await greeted(line, writer, found)
        assert call(line, found)
        peer.close()
        await asyncio.sleep(0.05)
        assert [one.sent for one in found] == [True]
        assert not call(line, found)

    with_line(tmp_path, talk)


def test_a_late_answer_is_nobodys(tmp_path: Path) -> None:
    async def talk(line: LocalLine, writer: Writer, found: list[Any]) -> None:
        peer = await greeted(line, writer, found)
        assert call(line, found, timeout_s=0.1)
        await asyncio.sleep(0.8)
        assert [one.sent for one in found] == [True]
        assert peer.recv(1_000)
        assert peer.recv(1_000) == b""  # it is ended, so that no late answer comes

    with_line(tmp_path, talk)


def test_the_local_socket_has_the_failpoints_of_every_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(line: LocalLine, writer: Writer, found: list[Any]) -> None:
        peer = await greeted(line, writer, found)
        hits: list[str] = []
        monkeypatch.setattr(failpoints, "ACTIVE", True)
        monkeypatch.setattr(failpoints, "hit", hits.append)
        assert call(line, found)
        assert not call(line, found)  # what is not taken goes by ZeroMQ, and is counted there
        assert hits == ["rocketmq.ask.append:before", "rocketmq.ask.append:after"]
        peer.send(orjson.dumps({"v": 1, "id": 1, "ok": True}))
        await asyncio.sleep(0.05)
        assert hits[2:] == ["rocketmq.asked.append"]
        assert len(found) == 1

    with_line(tmp_path, talk)
