"""One server as a client meets it: every wait has an end, and a refusal has a name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commitmq.security.signature import ACCESS_KEY, SIGNATURE, sign
from commitmq.security.user import Secret
from commitmq_plugins.rocketmq.remoting.client import NEXT_ADDRESS_S, RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import PeerSilentError, RemotingError
from commitmq_plugins.rocketmq.remoting.fastjson import load_object
from commitmq_plugins.rocketmq.remoting.tls import anybody

Texts = Mapping[str, str]


class PeerRefusedError(RemotingError):
    """The server answers with another code than SUCCESS; ``code`` is a ResponseCode's number."""

    def __init__(self, code: int, remark: str | None) -> None:
        try:
            name = ResponseCode(code).name
        except ValueError:
            name = f"code {code}"
        super().__init__(f"{name}: {remark.strip().splitlines()[0]}" if remark and remark.strip() else name)
        self.code = code


@dataclass(frozen=True, slots=True)
class Keys:
    """What a client signs its requests with: a user's name and secret."""

    access_key: str
    secret: Secret

    def sign(self, command: Command) -> None:
        """Put both fields of a signed request into ``command``, whose other fields and body stay as they are then."""
        command.ext_fields[ACCESS_KEY] = self.access_key
        command.ext_fields[SIGNATURE] = sign(command.ext_fields, command.body, self.secret.reveal())


@dataclass(frozen=True, slots=True)
class Terms:
    """How the doctor speaks to servers. ``timeout_s`` is the longest wait for a connection, and for an answer. ``tls``:
    connections are encrypted. ``keys``: requests are signed.
    """

    timeout_s: float = 3.0
    tls: bool = False
    keys: Keys | None = None


class Peer:
    """See the module. Connects at the first request."""

    def __init__(self, host: str, port: int, terms: Terms) -> None:
        self.host, self.port, self.terms = host, port, terms
        self._client = RemotingClient(host, port, connect_s=terms.timeout_s, tls=anybody() if terms.tls else None)
        self.took_s = 0.0
        """How long the last answer took."""

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def ask(
        self, code: RequestCode, fields: Texts | None = None, body: bytes = b"", *, wait_s: float = 0.0
    ) -> Command:
        """The answer with SUCCESS. ``wait_s``: the server itself may wait so long. Raises PeerRefusedError, RemotingError."""
        answer = await self.answer(code, fields, body, wait_s=wait_s)
        if answer.code != ResponseCode.SUCCESS:
            raise PeerRefusedError(answer.code, answer.remark)
        return answer

    async def answer(
        self, code: RequestCode, fields: Texts | None = None, body: bytes = b"", *, wait_s: float = 0.0
    ) -> Command:
        """Any answer. Raises RemotingError."""
        began = time.monotonic()
        command = Command(int(code), ext_fields=dict(fields or {}), body=body)
        assert not command.flag & FLAG_ONEWAY
        if self.terms.keys is not None:
            self.terms.keys.sign(command)
        answer = await self._client.request(command, self.terms.timeout_s + wait_s)
        self.took_s = time.monotonic() - began
        return answer

    async def object(self, code: RequestCode, fields: Texts | None = None, body: bytes = b"") -> dict[str, Any]:
        """The JSON object in the answer's body. Raises PeerRefusedError, BodyError, RemotingError."""
        return load_object((await self.ask(code, fields, body)).body)

    async def ip(self) -> str | None:
        """The IP behind the host's name; None when it has none."""
        try:
            async with asyncio.timeout(self.terms.timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port)
        except (OSError, UnicodeError, TimeoutError):
            return None
        return str(found[0][4][0]) if found else None

    async def tls_version(self) -> str:
        """The version of TLS that the server speaks, on a connection of its own. Raises OSError, PeerSilentError."""
        try:
            async with asyncio.timeout(self.terms.timeout_s):
                _, writer = await asyncio.open_connection(
                    self.host, self.port, ssl=anybody(), happy_eyeballs_delay=NEXT_ADDRESS_S
                )
        except TimeoutError as error:
            raise PeerSilentError(f"no handshake within {self.terms.timeout_s:g} s") from error
        version = writer.get_extra_info("ssl_object").version()
        writer.transport.abort()
        return str(version)

    async def close(self) -> None:
        await self._client.close()
