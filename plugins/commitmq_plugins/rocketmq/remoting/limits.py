"""What one peer, and all of them together, can take of a server."""

from __future__ import annotations

from dataclasses import dataclass


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
