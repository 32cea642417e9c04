"""A small HTTP/1.1 server for GET, HEAD and, on request, POST, in an asyncio loop, that no client can make large or
slow.

Bounds: connections; bytes of a request's head and of its body; the time until it is there; the time until its answer is
taken. An answer is one object for all clients that get it, and is passed on in pieces: a client that does not read
holds a piece, and loses its connection when its time is over. A client that sends a longer body, or anything that is no
request, gets an answer and loses its connection.

When a new connection is one too many, one that waits for its client ends: first one whose request is not there, of the
address with the most, then one whose answer is not taken; the oldest of these. Requests that are being answered
continue. One address has three quarters of the connections at most, so that others find some.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from commitmq.log import Log

_PIECE_BYTES: Final = 64 * 1024
_METHODS: Final = ("GET", "HEAD")
_END: Final = b"\r\n\r\n"
# Two of one of these would let two readers of one request see different ones.
_ONCE: Final = ("host", "content-length", "transfer-encoding", "origin")
_LENGTH_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class Request:
    """``headers`` have lower-case names, the last of a repeated one. ``body``: a POST's. ``peer``: its address."""

    method: str
    path: str
    query: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """``headers`` are those beside the ones that every answer has. Raises ValueError for one that ends its line."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if any(not one.isascii() or not one.isprintable() for pair in self.headers for one in pair):
            raise ValueError("a header of an answer is printable ASCII")


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of an HTTP server; ``timeout_s`` a request, and its answer. ``max_body_bytes``: 0 for no POST."""

    max_connections: int
    max_request_bytes: int
    timeout_s: float
    max_body_bytes: int = 0


class BadRequestError(Exception):
    """What came is no request that this server takes. ``status`` is the answer's."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True, eq=False)
class _HttpConnection:
    """``since_s``: since when it waits for its client, to ask or to take an ``answer``. ``works``: it does not."""

    writer: asyncio.StreamWriter
    address: str
    since_s: float
    answers: bool = False
    works: bool = False


class HttpServer:
    """One listener. ``handler`` gives the answers; an exception of it is answered with 500 and logged."""

    def __init__(self, handler: Handler, limits: HttpLimits, log: Log) -> None:
        self._handler, self._limits, self._log = handler, limits, log
        self._server: asyncio.Server | None = None
        self._connections: set[_HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused = 0
        """Connections beyond the limit, for which no other one could end."""
        self.displaced = 0
        """Connections that ended for another one."""

    def __len__(self) -> int:
        return len(self._connections)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address. Raises OSError."""
        limit = self._limits.max_request_bytes
        self._server = await asyncio.start_server(self._serve, host, port, limit=limit, backlog=64)
        found = self._server.sockets[0].getsockname()
        return str(found[0]), int(found[1])

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for one in list(self._connections):
            one.writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _HttpConnection(writer, _peer(writer), time.monotonic())
        if not self._makes_room(connection.address):
            self.refused += 1
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(connection)
        writer.transport.set_write_buffer_limits(high=0)  # an answer is done when the system has all of it
        try:
            while await self._one(reader, connection):
                pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or was too slow
        finally:
            self._tasks.discard(task)
            self._connections.discard(connection)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # it does not read, or has gone
            else:
                writer.close()

    def _makes_room(self, address: str) -> bool:
        """Whether there is room for one more connection of ``address``; another one may end for it."""
        most = self._limits.max_connections
        counts = Counter(one.address for one in self._connections)
        if counts[address] >= most - most // 4:
            crowd = address
        elif len(self._connections) < most:
            return True
        else:
            crowd = counts.most_common(1)[0][0]
        waiting = [one for one in self._connections if one.address == crowd and not one.works]
        if not waiting:
            return False
        found = min(waiting, key=lambda one: (one.answers, one.since_s))
        self._connections.discard(found)
        found.writer.transport.abort()
        self.displaced += 1
        return True

    async def _one(self, reader: asyncio.StreamReader, connection: _HttpConnection) -> bool:
        """Answer one request. False when the connection ends."""
        timeout_s, writer = self._limits.timeout_s, connection.writer
        connection.since_s, connection.answers = time.monotonic(), False
        try:
            async with asyncio.timeout(timeout_s):
                head = await self._head(reader)
                request, keeps = parse(head, self._limits.max_body_bytes)
                size = int(request.headers.get("content-length", "0"))
                body = await reader.readexactly(size) if size else b""
                request = replace(request, body=body, peer=connection.address)
        except BadRequestError as error:
            response, keeps, method = Response(f"{error}\n".encode(), status=error.status), False, "GET"
        else:
            method = request.method
            connection.works = True
            try:
                response = await self._handler(request)
            except Exception as error:
                self._log.exception("a request failed", path=request.path[:100], error=repr(error))
                response = Response(b"the node failed on this request\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        connection.since_s, connection.answers, connection.works = time.monotonic(), True, False
        async with asyncio.timeout(timeout_s):
            await self._send(writer, response, keeps=keeps, with_body=method != "HEAD")
        return keeps

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(_END)
        except asyncio.LimitOverrunError as error:
            most = self._limits.max_request_bytes
            why = f"the head of a request has {most} bytes at most"
            raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, why) from error

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, response: Response, *, keeps: bool, with_body: bool) -> None:
        status = response.status
        more = "".join(f"{name}: {value}\r\n" for name, value in response.headers)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {response.content_type}\r\n"
            f"Content-Length: {len(response.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{more}"
            f"Connection: {'keep-alive' if keeps else 'close'}\r\n\r\n"
        )
        writer.write(head.encode("ascii"))
        view = memoryview(response.body) if with_body else memoryview(b"")
        for start in range(0, len(view), _PIECE_BYTES):
            writer.write(view[start : start + _PIECE_BYTES])
            await writer.drain()
        await writer.drain()


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""  # none: it has gone


def parse(head: bytes, max_body_bytes: int = 0) -> tuple[Request, bool]:
    """The request of a head, without its body, and whether the client keeps the connection. Raises BadRequestError."""
    with contextlib.suppress(UnicodeDecodeError, ValueError):
        first, *lines = head.removesuffix(_END).decode("ascii").split("\r\n")
        method, target, version = first.split(" ")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise BadRequestError(HTTPStatus.BAD_REQUEST, "a header line has no name")
            if name.lower() in _ONCE and name.lower() in headers:
                raise BadRequestError(HTTPStatus.BAD_REQUEST, f"a request has one {name.lower()}")
            headers[name.lower()] = value.strip()
        if not target.startswith("/") or version not in ("HTTP/1.1", "HTTP/1.0"):
            raise BadRequestError(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
        if method not in _METHODS and not (method == "POST" and max_body_bytes):
            taken = " and ".join([*_METHODS, *(["POST"] if max_body_bytes else [])])
            raise BadRequestError(HTTPStatus.METHOD_NOT_ALLOWED, f"this server takes {taken}")
        _check_body(method, headers, max_body_bytes)
        path, _, query = target.partition("?")
        keeps = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        return Request(method, path, query, headers), keeps
    raise BadRequestError(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")


def _check_body(method: str, headers: dict[str, str], max_body_bytes: int) -> None:
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
        raise BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "this server takes bodies of a known length only")
    most = max_body_bytes if method == "POST" else 0
    if len(length) > _LENGTH_DIGITS or int(length) > most:
        why = f"a body has {most} bytes at most" if most else "this server takes no bodies"
        raise BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
