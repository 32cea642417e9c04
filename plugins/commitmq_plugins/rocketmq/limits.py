"""Limits and TLS of both servers' connections, from the plugin's settings."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from commitmq.errors import ConfigError
from commitmq.files.fd_cache import affordable_files
from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting import self_signed, tls
from commitmq_plugins.rocketmq.remoting.limits import ServerLimits
from commitmq_plugins.rocketmq.settings import RocketMQSettings


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
