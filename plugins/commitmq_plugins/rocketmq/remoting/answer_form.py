"""Answers of success that differ in few fields: encoded once, with places for what differs."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from commitmq_plugins.rocketmq.remoting import json_header
from commitmq_plugins.rocketmq.remoting.codes import FLAG_RESPONSE, SERIALIZE_JSON, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command

_OPAQUE: Final = 2_147_483_647
_HEAD: Final = struct.Struct(">iI")


class AnswerForm:
    """Answers with the fields ``fixed``, and those called ``names`` behind them."""

    def __init__(self, fixed: Mapping[str, str], names: Sequence[str]) -> None:
        """No name or value of ``fixed`` may look like ``@name@``."""
        fields = {**fixed, **{name: f"@{name}@" for name in names}}
        header = json_header.encode(Command(ResponseCode.SUCCESS, _OPAQUE, FLAG_RESPONSE, ext_fields=fields))
        header = header.replace(b"%", b"%%")
        for place, value in [*((f'"@{name}@"', b"%s") for name in names), (f'"opaque":{_OPAQUE}', b'"opaque":%d')]:
            if header.count(place.encode()) != 1:
                raise ValueError(f"{place} must be there once")
            header = header.replace(place.encode(), value)
        self._header = header

    def frame(self, opaque: int, values: Sequence[bytes]) -> bytes:
        """The frame of an answer to the request ``opaque``, without a body. ``values`` are JSON, in the order of the names."""
        header = self._header % (*values, opaque)
        size = len(header)
        return _HEAD.pack(4 + size, SERIALIZE_JSON << 24 | size) + header
