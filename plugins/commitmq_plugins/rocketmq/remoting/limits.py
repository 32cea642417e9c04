"""What one peer, and all of them together, can take of a server.

Limits and TLS of both servers' connections, from the plugin's settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from commitmq.errors import ConfigError
from commitmq.files.fd_cache import affordable_files
from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting import self_signed, tls
from commitmq_plugins.rocketmq.settings import RocketMQSettings


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bytes, and seconds.

    * A frame has ``max_frame_bytes``; all incomplete frames of the server ``max_pending_bytes``, then the connection with
      the largest one ends. A frame must be complete ``frame_timeout_s`` after it began.
    * More than ``max_requests`` without an answer: the next ones get SYSTEM_BUSY. Nothing is read from a connection with as
      many one-way requests under way, or whose requests have ``max_request_bytes``, and while those of all connections
      have more than ``max_all_request_bytes``.
    * Nothing is read from a peer that has not read ``high_water_bytes`` of its answers. Its connection ends beyond
      ``max_unsent_bytes``, and when it reads nothing for ``send_timeout_s``.
    * ``max_connections``, and ``max_connections_per_address`` of them from one address; one without a byte
      from its peer in ``idle_timeout_s`` ends. A TLS handshake has ``handshake_timeout_s``.
    """

    max_connections: int = 2_000
    max_connections_per_address: int = 1_000_000
    max_frame_bytes: int = 16 << 20
    max_pending_bytes: int = 256 << 20
    max_unsent_bytes: int = 16 << 20
    max_requests: int = 8_192
    max_request_bytes: int = 64 << 20
    max_all_request_bytes: int = 512 << 20
    high_water_bytes: int = 1 << 20
    idle_timeout_s: float = 120.0
    frame_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    handshake_timeout_s: float = 15.0


def limits_of(settings: RocketMQSettings) -> ServerLimits:
    """The limits of a server's connections. There are no more of them than the process has descriptors for: with none left a
    client would wait in the kernel's queue, instead of being told at once.
    """
    most = affordable_files(settings.max_connections)
    return ServerLimits(
        max_connections=most,
        max_connections_per_address=settings.max_connections_per_address or most,
        max_frame_bytes=settings.max_frame_bytes,
        max_unsent_bytes=settings.max_unsent_bytes,
        idle_timeout_s=settings.idle_timeout_ms / 1_000,
    )


def tls_of(settings: RocketMQSettings, folder: Path, log: Log) -> tls.Tls | None:
    """The TLS of a server, whose own certificate would be in ``folder``. Raises ConfigError."""
    make = partial(self_signed.load_or_make, folder / self_signed.FILE, log)
    try:
        return tls.load(settings.tls_mode, settings.tls_certificate, settings.tls_key, make)
    except OSError as error:
        files = f"{settings.tls_certificate} and {settings.tls_key}"
        raise ConfigError(f"plugins.rocketmq.tls_certificate and tls_key: {files} cannot be used: {error}") from error
