"""Goal: no client can make a server of pages or metrics large, slow or silent. Method: sockets that misbehave, a listener."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus

import pytest

from commitmq.log import get_log
from commitmq_plugins.http_server import BadRequestError, HttpLimits, HttpServer, Request, Response, parse

BODY = b"x" * 30_000_000
PIECE = b"x" * 60_000
LIMITS = HttpLimits(max_connections=4, max_request_bytes=1_024, timeout_s=0.4)
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
GET_PIECE = b"GET /piece HTTP/1.1\r\nHost: a\r\n\r\n"
CLOSING = b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

Talk = Callable[[HttpServer, int], Awaitable[None]]


async def answer(request: Request) -> Response:
    if request.path == "/broken":
        raise RuntimeError("broken")
    if request.path == "/waits":
        await asyncio.sleep(3)
    if request.path == "/piece":
        return Response(PIECE)
    return Response(BODY if request.path == "/large" else f"{request.path} {request.query}".encode())


def served(talk: Talk, limits: HttpLimits = LIMITS) -> None:
    async def run() -> None:
        server = HttpServer(answer, limits, get_log("test"))
        _, port = await server.listen("127.0.0.1", 0)
        try:
            await asyncio.wait_for(talk(server, port), 20)
        finally:
            await server.close()
        assert len(server) == 0

    asyncio.run(run())


async def ask(port: int, data: bytes) -> bytes:
    """All that comes until the server ends the connection, or for a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    found = b""
    try:
        async with asyncio.timeout(1.5):
            while piece := await reader.read(1 << 20):
                found += piece
    except (TimeoutError, ConnectionResetError):
        pass
    writer.close()
    return found


def test_requests_of_one_connection_are_answered_in_order() -> None:
    async def talk(server: HttpServer, port: int) -> None:
        found = await ask(
            port, b"GET /a?b=1 HTTP/1.1\r\n\r\nHEAD /c HTTP/1.1\r\n\r\nGET /d HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        first, head, last, *rest = found.split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert not rest
        assert first.endswith(b"\r\n\r\n/a b=1")
        assert head.endswith(b"Content-Length: 3\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
                             b"Connection: keep-alive\r\n\r\n")  # fmt: skip
        assert last.endswith(b"Connection: close\r\n\r\n/d ")

    served(talk)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 5_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 \r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n bad: folded\r\n\r\n", 400),
        (b"GET /broken HTTP/1.1\r\nConnection: close\r\n\r\n", 500),
    ],
)
def test_what_is_no_request_is_answered_and_ends(data: bytes, status: int) -> None:
    async def talk(server: HttpServer, port: int) -> None:
        assert (await ask(port, data)).startswith(f"HTTP/1.1 {status} ".encode())
        assert (await ask(port, GET)).startswith(b"HTTP/1.1 200 ")

    served(talk)


def test_slow_clients_lose_their_connections() -> None:
    async def talk(server: HttpServer, port: int) -> None:
        drips = [await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMITS.max_connections)]
        began = time.monotonic()
        while len(server) and time.monotonic() - began < 3:
            for _, writer in drips:
                writer.write(b"G")  # a byte now and then: slow loris
            await asyncio.sleep(0.1)
        assert time.monotonic() - began < 2, "the time of a request begins anew with each byte"
        assert (await ask(port, GET)).startswith(b"HTTP/1.1 200 ")
        for _, writer in drips:
            writer.close()

    served(talk)


def test_a_client_that_never_reads_costs_a_piece_and_ends() -> None:
    async def talk(server: HttpServer, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.15)
        [held] = [one.transport.get_write_buffer_size() for one in (each.writer for each in server._connections)]
        assert held <= 1 << 20, "the whole answer waits for a client that does not read"
        began = time.monotonic()
        while len(server) and time.monotonic() - began < 3:
            await asyncio.sleep(0.05)
        assert time.monotonic() - began < 2
        writer.close()

    served(talk)


@pytest.mark.parametrize("closes", ["in its request", "its end"])
def test_a_client_that_closes_after_its_request_gets_the_whole_answer(closes: str) -> None:
    async def talk(server: HttpServer, port: int) -> None:
        assert server._server is not None
        server._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # connections inherit it
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=client, limit=1_024)
            writer.write(CLOSING.replace(b"/metrics", b"/piece") if closes == "in its request" else GET_PIECE)
            if closes == "its end":
                writer.write_eof()
            await asyncio.sleep(0.2)  # the system's buffers are full by now
            await reader.readuntil(b"\r\n\r\n")
            found = 0
            while piece := await reader.read(1 << 20):
                found += len(piece)
            assert found == len(PIECE), "the end of the answer is cut off"
            writer.close()

    served(talk, replace(LIMITS, timeout_s=10.0))


async def opened(port: int, count: int, source: str = "127.0.0.1", data: bytes = b"") -> list[asyncio.StreamWriter]:
    """Connections of one address, which send ``data``."""
    found = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), limit=1)
        writer.write(data)
        found.append(writer)
    await asyncio.sleep(0.1)
    return found


LONG = HttpLimits(max_connections=8, max_request_bytes=1_024, timeout_s=30)


@pytest.mark.parametrize("data", [b"", b"GET /metrics HT", b"GET /large HTTP/1.1\r\n\r\n"])
def test_connections_that_wait_for_their_clients_end_for_others(data: bytes) -> None:
    async def talk(server: HttpServer, port: int) -> None:
        held = await opened(port, 80, data=data)
        assert len(server) <= 8
        for _ in range(20):
            assert (await ask(port, CLOSING)).startswith(b"HTTP/1.1 200 ")
        assert server.refused == 0
        for writer in held:
            writer.close()

    served(talk, LONG)


def test_an_address_leaves_some_to_others() -> None:
    async def talk(server: HttpServer, port: int) -> None:
        other = await opened(port, 2, "127.0.0.2")
        held = await opened(port, 40)
        assert (len(server), server.displaced) == (8, 34)
        assert sum(one.address == "127.0.0.2" for one in server._connections) == 2, "the crowd pays for itself"
        more = await opened(port, 2, "127.0.0.3")
        assert {one.address for one in server._connections} == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
        for writer in (*other, *held, *more):
            writer.close()

    served(talk, LONG)


def test_connections_are_bounded_while_all_are_answered() -> None:
    async def talk(server: HttpServer, port: int) -> None:
        held = await opened(port, 8, data=b"GET /waits HTTP/1.1\r\n\r\n")
        assert len(server) == 6
        assert server.refused == 2
        assert await ask(port, CLOSING) == b""
        assert (len(server), server.displaced) == (6, 0)
        for writer in held:
            writer.close()

    served(talk, LONG)


def test_a_head_is_taken_apart() -> None:
    request, keeps = parse(b"GET /a?b=c HTTP/1.0\r\nAccept: x\r\naccept: y\r\n\r\n")
    assert request == Request("GET", "/a", "b=c", {"accept": "y"})
    assert not keeps
    with pytest.raises(BadRequestError) as raised:
        parse(b"GET /a HTTP/1.1\r\nno colon\r\n\r\n")
    assert raised.value.status is HTTPStatus.BAD_REQUEST


def test_a_server_that_takes_posts_gives_their_bodies() -> None:
    limits = HttpLimits(max_connections=4, max_request_bytes=1_024, timeout_s=0.4, max_body_bytes=2_000)
    bodies: list[bytes] = []

    async def take(request: Request) -> Response:
        bodies.append(request.body)
        return Response(b"taken", headers=(("X-One", "1"),))

    async def talk(server: HttpServer, port: int) -> None:
        body = b"x" * 2_000  # longer than a head may be
        found = await ask(
            port,
            b"POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + body + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
        )
        assert found.count(b"HTTP/1.1 200 OK") == 2
        assert b"\r\nX-One: 1\r\n" in found
        assert bodies == [body, b""]
        for head, status in (
            (b"POST / HTTP/1.1\r\nContent-Length: 2001\r\n\r\n", 413),
            (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413),
            (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 500 + b"\r\n\r\n", 413),
            (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
            (b"GET / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 413),
            (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
            (b"PUT / HTTP/1.1\r\n\r\n", 405),
        ):
            assert (await ask(port, head)).startswith(f"HTTP/1.1 {status} ".encode()), head
        began = time.monotonic()
        assert await ask(port, b"POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + b"x" * 1_999) == b""
        assert time.monotonic() - began < 1.4, "a body that does not come ends the connection"
        assert len(bodies) == 2

    async def run() -> None:
        server = HttpServer(take, limits, get_log("test"))
        _, port = await server.listen("127.0.0.1", 0)
        try:
            await asyncio.wait_for(talk(server, port), 30)
        finally:
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize("header", [("X", "a\r\nSet-Cookie: b"), ("X\n", "a"), ("X", "ü")])
def test_a_header_of_an_answer_cannot_begin_another(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Response(b"", headers=(header,))
