"""A connection to another server of RocketMQ's protocol: a name server, or a broker."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final

from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, PeerGoneError, PeerSilentError, encode

_READ_BYTES: Final = 65_536
_CONNECT_S: Final = 3.0
NEXT_ADDRESS_S: Final = 0.25
"""So long an address of a name may be silent before the next one is tried beside it."""


class RemotingClient:
    """Connects at the first request, and again after the connection ended. With ``tls`` the connection is encrypted.

    ``connections`` counts them: who told the server something on one connection sees that it is another one now.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, *, connect_s: float = _CONNECT_S
    ) -> None:
        self.host, self.port = host, port
        self.connections = 0
        self._connect_s, self._tls = connect_s, tls
        self._opaque = 0
        self._under_way: dict[int, asyncio.Future[Command]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_connected(self) -> bool:
        return self._writer is not None and self._reading is not None and not self._reading.done()

    async def request(self, command: Command, timeout_s: float = 3.0) -> Command:
        """Send ``command`` and wait for its answer. Raises PeerGoneError, PeerSilentError."""
        async with self._connecting:
            writer = await self._connected()
        self._opaque += 1
        command.opaque = self._opaque
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._under_way[command.opaque] = future
        try:
            writer.write(encode(command))
            async with asyncio.timeout(timeout_s):
                await writer.drain()
                return await future
        except TimeoutError as error:
            raise PeerSilentError(f"{self.address} does not answer") from error
        except OSError as error:
            raise PeerGoneError(f"the connection to {self.address} ended: {error}") from error
        finally:
            self._under_way.pop(command.opaque, None)

    async def _connected(self) -> asyncio.StreamWriter:
        if self.is_connected and self._writer is not None:
            return self._writer
        try:
            async with asyncio.timeout(self._connect_s):
                reader, self._writer = await asyncio.open_connection(
                    self.host, self.port, ssl=self._tls, happy_eyeballs_delay=NEXT_ADDRESS_S
                )
        except TimeoutError as error:
            raise PeerGoneError(f"cannot connect to {self.address} within {self._connect_s:g} s") from error
        except (OSError, UnicodeError) as error:  # (a name that no resolver takes)
            raise PeerGoneError(f"cannot connect to {self.address}: {error}") from error
        self.connections += 1
        self._reading = asyncio.create_task(self._read(reader))
        return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        parser, reason = FrameParser(), ""
        try:
            while data := await reader.read(_READ_BYTES):
                for command in parser.feed(data):
                    future = self._under_way.get(command.opaque)
                    if command.is_response and future is not None and not future.done():
                        future.set_result(command)
                if parser.error is not None:
                    reason = f": {parser.error}"
                    break
        except OSError as error:
            reason = f": {error}"
        finally:
            for future in self._under_way.values():
                if not future.done():
                    future.set_exception(PeerGoneError(f"the connection to {self.address} ended{reason}"))
            if self._writer is not None:
                self._writer.close()

    async def close(self) -> None:
        """Requests under way fail."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer is not None and self._tls is None:
            self._writer.close()
        elif self._writer is not None:
            # (A close by TLS waits for the peer.)
            self._writer.transport.abort()
            await asyncio.sleep(0)
