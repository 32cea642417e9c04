"""Idle clients of RocketMQ's remoting protocol: connections that sent one heartbeat of a producer."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

from bench.system import HOST, BenchError

_HEART_BEAT: Final = 34
_SPARE_FILES: Final = 200
_TIMEOUT_S: Final = 30.0
_HEAD: Final = struct.Struct(">iI")
_VERSION: Final = 493  # RocketMQ 5.4.0


@contextlib.contextmanager
def connected(port: int, count: int) -> Iterator[None]:
    """``count`` connections, each of which has its heartbeat answered. Raises BenchError."""
    _allow_files(count + _SPARE_FILES)
    with contextlib.ExitStack() as stack:
        try:
            peers = []
            for number in range(count):
                peer = stack.enter_context(socket.create_connection((HOST, port), _TIMEOUT_S))
                peer.sendall(_heartbeat(number))
                peers.append(peer)
            for peer in peers:
                _answered(peer)
        except OSError as error:
            raise BenchError(f"{len(peers)} of {count} clients could connect: {error}") from error
        yield


def _heartbeat(number: int) -> bytes:
    body = {"clientID": f"127.0.0.1@idle{number}", "producerDataSet": [{"groupName": "idle"}], "consumerDataSet": []}
    header = {"code": _HEART_BEAT, "flag": 0, "language": "JAVA", "opaque": number, "version": _VERSION}
    head = json.dumps({**header, "extFields": {}, "serializeTypeCurrentRPC": "JSON"}).encode()
    data = json.dumps(body).encode()
    return _HEAD.pack(4 + len(head) + len(data), len(head)) + head + data


def _answered(peer: socket.socket) -> None:
    """Read the answer to the heartbeat. Raises BenchError for a refusal, OSError."""
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        more = peer.recv(65_536)
        if not more:
            raise ConnectionResetError("the server closed the connection")
        data += more
    header_bytes = int.from_bytes(data[5:8], "big")
    answer: dict[str, Any] = json.loads(data[8 : 8 + header_bytes])
    if answer["code"] != 0:
        raise BenchError(f"the server refused a heartbeat: {answer}")


def _allow_files(count: int) -> None:
    """Raise the limit of open files. Raises BenchError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise BenchError(f"this account may have {hard} open files, {count} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
