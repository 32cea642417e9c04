"""The yardstick: a bare ROUTER that sends every request back, in a process of its own, and a DEALER that asks it.

It does only the work of any request over ZeroMQ (two processes, two hops, one body). So a send compared to it shows the
cost of the node itself on this machine at this moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

_START_S = 20.0


class EchoPeer:
    """An echo process over ``transport`` (``ipc`` or ``tcp`` on loopback) and one connection to it."""

    def __init__(self, transport: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="commitmq-echo-")
        endpoint = f"ipc://{Path(self._folder.name) / 'echo'}" if transport == "ipc" else "tcp://127.0.0.1:*"
        self._process = subprocess.Popen(
            [sys.executable, __file__, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            assert self._process.stdout is not None
            bound = self._process.stdout.readline().decode().strip()
            if not bound:
                raise OSError("the echo process did not start")
            self.socket = self._context.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.RCVTIMEO, int(_START_S * 1000))
            self.socket.connect(bound)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Pid of the echo process."""
        return self._process.pid

    def close(self) -> None:
        """End the connection and the process."""
        self._context.destroy(linger=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the process ends when it reads the end of its input
        self._process.stdout.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def serve(endpoint: str) -> None:
    """Echo until standard input ends. The first line of standard output is the bound endpoint."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    sys.stdout.write(router.getsockopt_string(zmq.LAST_ENDPOINT) + "\n")
    sys.stdout.flush()
    receive, send = router.recv_multipart, router.send_multipart
    while True:
        send(receive())


if __name__ == "__main__":
    serve(sys.argv[1])
