"""Goal: the protocol's page is true. Method: every example is sent, byte for byte, to a real node, in the page's order."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
import zmq

import commitmq
from commitmq import ShareConsumer
from nodes import Node, start_node
from transactions import transaction_endpoint

PAGE = Path(commitmq.__file__).parent / "protocol" / "PROTOCOL.md"
ANY = "…"
ROLES = {
    "admin": "admin",
    "writer": "writer",
    "memory": "dispatcher-memory",
    "coordinator": "coordinator",
    "reader": "reader-0",
    "dispatcher": "dispatcher-consume_queue",
    "cleanup": "cleanup",
    "pop": "pop",
    "transaction": "transaction",
}


class LocalSocket:
    """The writer's Unix socket, as a socket of ZeroMQ: the frames of a request are one packet."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(10)
        self._socket.connect(path)
        assert self._socket.recv(100) == b'{"v":1,"id":null,"ok":true}'

    def send_multipart(self, frames: list[bytes]) -> None:
        self._socket.send(b"".join(frames))

    def recv_multipart(self) -> list[bytes]:
        return [self._socket.recv(65_536)]

    def close(self) -> None:
        self._socket.close()


class Example(NamedTuple):
    line: int
    role: str
    request: list[bytes]
    answer: list[str]


def examples() -> list[Example]:
    """All ``exchange`` blocks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    found = []
    for block in re.finditer(r"^```exchange (\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        frames: list[tuple[str, str]] = []
        for line in block[2].splitlines():
            content = line if line.startswith(("> {", "< {")) else line.partition("#")[0]
            if content.startswith(("> ", "< ")):
                frames.append((content[0], content[2:].strip()))
            else:
                assert content.startswith("  "), f"{line!r} belongs to no frame"
                frames[-1] = (frames[-1][0], f"{frames[-1][1]} {content.strip()}")
        request = [frame_bytes(content) for side, content in frames if side == ">"]
        answer = [content for side, content in frames if side == "<"]
        found.append(Example(text[: block.start()].count("\n") + 1, block[1], request, answer))
    return found


def frame_bytes(content: str) -> bytes:
    """JSON and plain text as they stand, hexadecimal digits as bytes."""
    return bytes.fromhex(content) if re.fullmatch(r"[0-9a-f ]+", content) else content.encode()


def matches(expected: Any, found: Any) -> bool:
    if expected == ANY:
        return True
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(matches(expected[key], found[key]) for key in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(matches, expected, found))
    return bool(expected == found)


def frame_matches(expected: str, found: bytes) -> bool:
    if expected == ANY:
        return True
    if expected.startswith("{"):
        return matches(orjson.loads(expected), orjson.loads(found))
    pattern = expected.split()
    return len(pattern) == len(found) and all(
        one in ("..", f"{byte:02x}") for one, byte in zip(pattern, found, strict=True)
    )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = ("consume_queue.enable_lmq=true", "consume_queue.enable_multi_dispatch=true")
    with start_node(tmp_path_factory.mktemp("protocol"), *settings) as made:
        # The node starts its process pop for the first consumer that shares queues.
        ShareConsumer("doc", group="starts-it", node=made.address).close()
        yield made


@pytest.fixture(scope="module")
def sockets(node: Node) -> Iterator[dict[str, zmq.Socket[bytes] | LocalSocket]]:
    context = zmq.Context()
    made: dict[str, zmq.Socket[bytes] | LocalSocket] = {}
    transaction_endpoint(node)
    endpoints = node.endpoints()
    for name, role in ROLES.items():
        sock = made[name] = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.RCVTIMEO, 10_000)
        sock.connect(endpoints[role])
    made["writer"].send_multipart([b'{"v":1,"op":"hello","id":0}'])
    local = made["local"] = LocalSocket(orjson.loads(made["writer"].recv_multipart()[0])["local_socket"])
    yield made
    local.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("example", examples(), ids=lambda one: f"line {one.line}")
def test_the_node_answers_as_the_page_says(
    example: Example, sockets: dict[str, zmq.Socket[bytes] | LocalSocket]
) -> None:
    sock = sockets[example.role]
    sock.send_multipart(example.request)
    found = sock.recv_multipart()
    assert len(found) == len(example.answer), found
    for expected, frame in zip(example.answer, found, strict=True):
        assert frame_matches(expected, frame), (
            f"\nthe page: {expected}\nthe node: {frame!r}\n          {frame.hex(' ')}"
        )


def test_the_page_has_examples_for_every_process() -> None:
    assert {one.role for one in examples()} == {*ROLES, "local"}
    assert len(examples()) >= 20
