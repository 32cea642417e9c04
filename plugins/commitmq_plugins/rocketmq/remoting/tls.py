"""TLS as RocketMQ's servers have it: the first byte of a connection decides (remoting 2.1)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final

FIRST_BYTE: Final = 0x16
"""Of a TLS handshake. A frame that begins with it would have 369 MB."""


@dataclass(frozen=True, slots=True)
class Tls:
    """``context`` of a server. ``is_required``: connections without TLS end (RocketMQ's mode enforcing)."""

    context: ssl.SSLContext
    is_required: bool = False


def load(mode: str, certificate: str, key: str) -> Tls | None:
    """TLS by RocketMQ's tlsMode: disabled (None), permissive or enforcing. Raises OSError, ssl.SSLError."""
    if mode == "disabled":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return Tls(context, mode == "enforcing")
