"""The writer's Unix socket for one run at a time (PROTOCOL.md): a lone sender's run takes half as many wake-ups as by ZeroMQ.

The connection begins with a greeting of the writer; before it nothing is sent. When it ends, or an answer does not come in
time, the fate of the run under way is unknown, and a new connection begins with a later run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.errors import ProtocolError
from commitmq.plugin import failpoints
from commitmq.protocol import wire
from commitmq.protocol.local_packet import GREETING, HEADER_LENGTH, MAX_PACKET_BYTES
from commitmq_plugins.rocketmq.broker.node_line import Done, LineLostError, watched
from commitmq_plugins.rocketmq.remoting.turn import Turn

_SWEEP_S: Final = 0.5
_AGAIN_AFTER_S: Final = 1.0
_HEADER_BYTES: Final = 4_096
MAX_RUN_BYTES: Final = MAX_PACKET_BYTES - _HEADER_BYTES


class LocalLine:
    """See the module. All methods are called in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, turn: Turn) -> None:
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
        """End the connection. A run under way has an unknown fate."""
        sock, done = self._socket, self._done
        self._socket, self._done, self._is_greeted = None, None, False
        if sock is not None:
            self._loop.remove_reader(sock)
            with contextlib.suppress(OSError):
                sock.close()
        if done is not None:
            done(LineLostError(sentence, sent=True))
