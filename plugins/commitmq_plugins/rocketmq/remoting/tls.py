"""TLS as RocketMQ's servers have it: the first byte of a connection decides (remoting 2.1).

A server without a certificate of its own makes one (:mod:`.self_signed`), in a thread: it serves plain connections meanwhile.
It begins when it listens, because a client with TLS waits 3 seconds only, and on a busy machine that is too short.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Final

from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting.frame import RemotingError

FIRST_BYTE: Final = 0x16
"""Of a TLS handshake. A frame that begins with it would have 369 MB."""

DISABLED: Final = "disabled"
ENFORCING: Final = "enforcing"
_AGAIN_S: Final = 5.0


class TlsUnavailableError(RemotingError):
    """The server has no certificate: connections with TLS end. The text says why, and what to do."""


class Tls:
    """The TLS of a server. ``is_required``: connections without TLS end (RocketMQ's mode enforcing).

    ``context`` is None until :meth:`prepare` has made it with ``make``; connections with TLS wait for it.
    """

    def __init__(
        self,
        context: ssl.SSLContext | None,
        *,
        is_required: bool = False,
        make: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """``make`` is called in a thread; it raises TlsUnavailableError."""
        self.context, self.is_required = context, is_required
        self._make = make
        self._making: asyncio.Future[ssl.SSLContext] | None = None
        self._failed: TlsUnavailableError | None = None
        self._again_s = 0.0

    async def prepare_early(self, log: Log) -> None:
        """Have the context before a connection needs it. A failure is logged."""
        with contextlib.suppress(TlsUnavailableError):
            await self.prepare(log)

    async def prepare(self, log: Log) -> None:
        """Have the context: it is made once for all connections that wait for it.

        Raises TlsUnavailableError. A failure holds for some seconds, so that connections do not cost a try each.
        """
        if self.context is not None or self._make is None:
            return
        if self._failed is not None and time.monotonic() < self._again_s:
            raise self._failed
        if self._making is None:
            self._making = asyncio.ensure_future(self._made(self._make, log))
        await asyncio.shield(self._making)

    async def _made(self, make: Callable[[], ssl.SSLContext], log: Log) -> ssl.SSLContext:
        try:
            context = self.context = await asyncio.to_thread(make)
        except TlsUnavailableError as error:
            self._failed, self._again_s = error, time.monotonic() + _AGAIN_S
            log.error("connections with TLS cannot be served", error=str(error))
            raise
        finally:
            self._making = None
        return context


def load(mode: str, certificate: str, key: str, make: Callable[[], ssl.SSLContext] | None = None) -> Tls | None:
    """TLS by RocketMQ's tlsMode: disabled (None), permissive or enforcing.

    ``certificate`` and ``key`` are files; without them ``make`` makes the context when it is needed. Raises OSError,
    ssl.SSLError.
    """
    if mode == DISABLED:
        return None
    if not certificate:
        return Tls(None, is_required=mode == ENFORCING, make=make)
    return Tls(server_context(certificate, key), is_required=mode == ENFORCING)


def server_context(certificate: str, key: str | None = None) -> ssl.SSLContext:
    """The context of a server with these files. Raises OSError, ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def anybody() -> ssl.SSLContext:
    """The context of a client that takes any server's certificate: for a server on this host, and to look at one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _no_password() -> str:
    """OpenSSL would ask the terminal for it. (An OSError, as the other faults of these files.)"""
    raise OSError("the private key is encrypted; give one without a password")
