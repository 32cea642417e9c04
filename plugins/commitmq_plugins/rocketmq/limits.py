"""The limits of both servers' connections, from the plugin's settings."""

from __future__ import annotations

from commitmq_plugins.rocketmq.remoting.server import ServerLimits
from commitmq_plugins.rocketmq.settings import RocketMQSettings


def limits_of(settings: RocketMQSettings) -> ServerLimits:
    """The limits of a server's connections."""
    return ServerLimits(
        max_connections=settings.max_connections,
        max_frame_bytes=settings.max_frame_bytes,
        max_unsent_bytes=settings.max_unsent_bytes,
        idle_timeout_s=settings.idle_timeout_ms / 1_000,
    )
