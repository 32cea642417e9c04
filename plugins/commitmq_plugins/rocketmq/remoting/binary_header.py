"""The form ROCKETMQ of a frame's header (spec 15.3).

``code i2 · language i1 · version i2 · opaque i4 · flag i4 · remark (i4 length, text) · extFields (i4 length in bytes,
then for each: name with i2 length, value with i4 length)``, big-endian, texts in UTF-8. A code has 16 bits: the
requests of POP have larger ones and can only be sent as JSON.
"""

from __future__ import annotations

import struct
from typing import Final

from commitmq_plugins.rocketmq.remoting.codes import SERIALIZE_ROCKETMQ, LanguageCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import FrameError

_HEAD: Final = struct.Struct(">hbhii")
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_LANGUAGES: Final = {int(language): language for language in LanguageCode}
_SHORT_MAX: Final = (1 << 15) - 1


def encode(command: Command) -> bytes:
    """The header of ``command``. Raises FrameError for a code or a name that does not fit its 16 bits."""
    if not -_SHORT_MAX - 1 <= command.code <= _SHORT_MAX:
        raise FrameError(f"code {command.code} does not fit a ROCKETMQ header: send it as JSON")
    remark = (command.remark or "").encode("utf-8", "replace")
    parts = []
    for name, value in command.ext_fields.items():
        name_bytes, value_bytes = name.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if len(name_bytes) > _SHORT_MAX:
            raise FrameError(f"the name of a field has {len(name_bytes)} bytes, at most {_SHORT_MAX} are allowed")
        parts += [_SHORT.pack(len(name_bytes)), name_bytes, _INT.pack(len(value_bytes)), value_bytes]
    fields = b"".join(parts)
    head = _HEAD.pack(command.code, command.language, command.version, command.opaque, command.flag)
    return b"".join([head, _INT.pack(len(remark)), remark, _INT.pack(len(fields)), fields])


def decode(data: bytes | memoryview) -> Command:
    """The command in a ROCKETMQ header. Bytes behind its last field are ignored, as RocketMQ does.

    Raises FrameError with the place where the header ends too early. Texts that are no UTF-8 get replacement marks.
    """
    data = bytes(data)
    if len(data) < _HEAD.size + 8:
        raise FrameError(f"a ROCKETMQ header has {_HEAD.size + 8} bytes at least, this one has {len(data)}")
    code, language, version, opaque, flag = _HEAD.unpack_from(data)
    at = _HEAD.size
    remark, at = _text(data, at, len(data), _INT)
    if len(data) - at < 4:
        raise FrameError(f"the header ends at byte {len(data)}, before the length of its fields")
    fields_bytes = _INT.unpack_from(data, at)[0]
    at += 4
    if not 0 <= fields_bytes <= len(data) - at:
        raise FrameError(f"the fields claim {fields_bytes} bytes, {len(data) - at} are left of the header")
    end = at + fields_bytes
    fields: dict[str, str] = {}
    while at < end:
        name, at = _text(data, at, end, _SHORT)
        value, at = _text(data, at, end, _INT)
        if value is not None and name is not None:
            fields[name] = value
    return Command(
        code,
        opaque,
        flag,
        _LANGUAGES.get(language, LanguageCode.OTHER),
        version,
        remark,
        fields,
        b"",
        SERIALIZE_ROCKETMQ,
    )


def _text(data: bytes, at: int, end: int, length: struct.Struct) -> tuple[str | None, int]:
    """The text at ``at``, None for an empty one, and the place behind it."""
    if end - at < length.size:
        raise FrameError(f"the header ends within the length of a text at byte {at}")
    size = length.unpack_from(data, at)[0]
    at += length.size
    if not 0 <= size <= end - at:
        raise FrameError(f"a text at byte {at} claims {size} bytes, {end - at} are left")
    return (data[at : at + size].decode("utf-8", "replace") if size else None), at + size
