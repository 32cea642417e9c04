"""A message as the encoder of asynchronous sends takes it, without the future that it is in a producer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OneMessage:
    """``encoded_extras``: encoded properties, flag and compression bits; None where there is nothing of them."""

    body: bytes
    encoded_extras: tuple[bytes, int, int] | None = None
    born: int = 0
