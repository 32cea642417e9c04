"""The JSON form of a frame's header (spec 15.2), lenient in what RocketMQ's decoder is lenient in.

Accepted beyond plain JSON: values of ``extFields`` that are no texts, numbers as texts, languages by number, control
characters inside texts, members that nobody knows. Written: only texts in ``extFields``, and nothing that is null,
because clients of other languages refuse such frames (remoting 1.1, 1.2).
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

import orjson

from commitmq_plugins.rocketmq.remoting.codes import FLAG_RESPONSE, SERIALIZE_JSON, LanguageCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import FrameError

_LANGUAGES: Final = {language.name: language for language in LanguageCode}
_NAMES: Final = {language: language.name for language in LanguageCode}
_TEXTS: Final = {str}
_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


def encode(command: Command) -> bytes:
    """The header of ``command``, with its members in alphabetical order."""
    header: dict[str, Any] = {"code": command.code}
    if command.ext_fields:
        header["extFields"] = command.ext_fields
    header["flag"] = command.flag
    header["language"] = _NAMES[command.language]
    header["opaque"] = command.opaque
    if command.remark is not None:
        header["remark"] = command.remark
    header["serializeTypeCurrentRPC"] = "JSON"
    header["version"] = command.version
    try:
        return orjson.dumps(header)
    except orjson.JSONEncodeError:
        return orjson.dumps(_valid(header))  # half a surrogate pair; Java sends a question mark for it


def decode(data: bytes | memoryview) -> Command:
    """The command in a JSON header. Raises FrameError with what is wrong."""
    try:
        header = orjson.loads(data)
    except orjson.JSONDecodeError:
        header = _decode_leniently(bytes(data))
    if type(header) is not dict:
        raise FrameError(f"the header is no JSON object but {type(header).__name__}")
    get = header.get
    fields = get("extFields")
    if fields is None:
        fields = {}
    elif type(fields) is not dict:
        raise FrameError(f"the header's extFields are no JSON object but {type(fields).__name__}")
    elif fields and set(map(type, fields.values())) != _TEXTS:
        fields = {name: text for name, value in fields.items() if (text := _as_text(value)) is not None}
    language = get("language", "JAVA")
    if type(language) is str:
        spoken = _LANGUAGES.get(language, LanguageCode.OTHER)
    elif type(language) is int and language in _NAMES:
        spoken = LanguageCode(language)
    else:
        spoken = LanguageCode.OTHER
    remark = get("remark")
    if remark is not None and type(remark) is not str:
        remark = _as_text(remark)
    code, opaque, flag, version = get("code", 0), get("opaque", 0), get("flag", 0), get("version", 0)
    if not (
        type(code) is type(opaque) is type(flag) is type(version) is int
        and min(code, opaque, flag, version) >= _INT_MIN
        and max(code, opaque, flag, version) <= _INT_MAX
    ):
        code, opaque = _integer("code", code), _integer("opaque", opaque)
        flag, version = _integer("flag", flag), _integer("version", version)
    return Command(code, opaque, flag, spoken, version, remark, fields, b"", SERIALIZE_JSON)


def encode_answer(opaque: int, code: int, remark: str | None, ext_fields: dict[str, str]) -> bytes:
    """The header of an answer."""
    return encode(Command(code, opaque, FLAG_RESPONSE, remark=remark, ext_fields=ext_fields))


def _integer(name: str, value: Any) -> int:
    if type(value) is str:
        with contextlib.suppress(ValueError):
            value = int(value)
    if value is None:
        return 0
    if type(value) is not int:
        raise FrameError(f"the header's {name} is no integer: {value!r:.100}")
    if not _INT_MIN <= value <= _INT_MAX:
        raise FrameError(f"the header's {name} {value} does not fit 32 bits")
    return value


def _as_text(value: Any) -> str | None:
    """What RocketMQ's decoder makes of a value where a text is expected; None for null, which it leaves out."""
    if value is None or type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    try:
        return orjson.dumps(value).decode() if isinstance(value, dict | list) else str(value)
    except orjson.JSONEncodeError as error:
        raise FrameError(f"a header field is no text: {error}") from error


def _decode_leniently(data: bytes) -> Any:
    """Control characters and half surrogate pairs inside texts, which orjson refuses and RocketMQ takes."""
    try:
        return _valid(json.loads(data.decode(), strict=False))
    except UnicodeDecodeError as error:
        raise FrameError(f"the header is no UTF-8: {error}") from error
    except RecursionError:
        raise FrameError("the header is nested too deeply") from None
    except ValueError as error:
        raise FrameError(f"the header is no JSON: {error}") from error


def _valid(value: Any) -> Any:
    """``value`` with a question mark for each half of a surrogate pair in all its texts."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_valid(name): _valid(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_valid(one) for one in value]
    return value
