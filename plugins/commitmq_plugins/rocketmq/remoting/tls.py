"""TLS as RocketMQ's servers have it: the first byte of a connection decides (remoting 2.1).

A server without a certificate of its own makes one, in a thread: it serves plain connections in the meantime.
It begins when it listens, because a client with TLS waits 3 seconds only, and on a busy machine that is too short.

Such a certificate protects against listening only: no client can know by it who the server is. One file has the private
key and the certificate, so that they never differ. Only its owner can read it. A later start uses it again.

    key           EC P-256, new with each certificate
    certificate   self-signed, for ``localhost``; a CA, so that the standard library shows when it ends
    valid         10 years, from a day before: clocks differ

Two of a kind harm nobody: a file that is gone, damaged, at its end, or that others could read, is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from commitmq.files import atomic_file
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


FILE: Final = "tls.pem"
_VALID: Final = datetime.timedelta(days=3_650)
_DAY: Final = datetime.timedelta(days=1)
_REMEDY: Final = "or name tls_certificate and tls_key, or set tls_mode=disabled, in [plugins.rocketmq]"


def load_or_make(path: Path, log: Log) -> ssl.SSLContext:
    """The context with the certificate in ``path``; a usable one is made if there is none. Raises TlsUnavailableError."""
    try:
        why = _unusable(path)
        if why:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + atomic_file.SUFFIX).unlink()  # its mode would stay
            atomic_file.replace(path, _new(), "rocketmq.tls", mode=0o600)
        context = server_context(str(path))
    except OSError as error:
        sentence = f"the self-signed certificate {path} cannot be made or read: {error}; make it possible, {_REMEDY}"
        raise TlsUnavailableError(sentence) from error
    log.info(
        "TLS has a self-signed certificate: it protects against listening, not against a false server",
        file=str(path),
        made=why or "earlier",
    )
    return context


def _unusable(path: Path) -> str:
    """Why the file cannot be used, empty if it can. Raises OSError if it cannot be read, or is no file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return "there was none"
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return "others could read its key"
    try:
        server_context(str(path))
        looking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        looking.load_verify_locations(str(path))
        end_s = min(ssl.cert_time_to_seconds(str(one["notAfter"])) for one in looking.get_ca_certs())
    except (ssl.SSLError, ValueError, KeyError):
        return "it was damaged"
    return "it was at its end" if end_s < time.time() + _DAY.total_seconds() else ""


def _new() -> bytes:
    """Key and certificate in PEM. Raises TlsUnavailableError without the package cryptography."""
    # Nearly a tenth of a second, and some MB, that only a server pays that makes a certificate.
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        sentence = f"a self-signed certificate needs the package cryptography: pip install 'commitmq[node]', {_REMEDY}"
        raise TlsUnavailableError(sentence) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "CommitMQ, self-signed")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem += certificate.public_bytes(serialization.Encoding.PEM)
    return pem
