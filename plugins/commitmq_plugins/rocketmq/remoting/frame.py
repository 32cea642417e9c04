"""Frames of a byte stream (spec 15.1): ``length i4 · serialization i1 · header length i3 · header · body``.

``length`` counts everything behind itself. :class:`FrameParser` turns what a socket received into commands;
:func:`encode_head` gives everything before the body, so that a body can be sent from where it lies.

One request or answer of the protocol.

What can be wrong with a frame or with a field of one. ``closes`` says whether the connection can continue.

The JSON form of a frame's header (spec 15.2), lenient in what RocketMQ's decoder is lenient in.

Accepted beyond plain JSON: values of ``extFields`` that are no texts, numbers as texts, languages by number, control
characters inside texts, members that nobody knows. Written: only texts in ``extFields``, and nothing that is null,
because clients of other languages refuse such frames (remoting 1.1, 1.2).

The form ROCKETMQ of a frame's header (spec 15.3).

``code i2 · language i1 · version i2 · opaque i4 · flag i4 · remark (i4 length, text) · extFields (i4 length in bytes,
then for each: name with i2 length, value with i4 length)``, big-endian, texts in UTF-8. A code has 16 bits: the
requests of POP have larger ones and can only be sent as JSON.

Answers of success that differ in few fields: encoded once, with places for what differs.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import orjson

from commitmq.errors import CommitMQError
from commitmq_plugins.rocketmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    SERIALIZE_JSON,
    SERIALIZE_ROCKETMQ,
    VERSION,
    LanguageCode,
    RequestCode,
    ResponseCode,
)


@dataclass(slots=True)
class Command:
    """``code`` is a RequestCode, or a ResponseCode in an answer. An answer has the ``opaque`` of its request.

    All values of ``ext_fields`` are texts. ``body`` may be a view of what was received; keep a copy of what you keep.
    ``frame_bytes`` is the size of the whole frame as it was received, 0 for one made here. ``is_unwanted``: the answer to a
    one-way request, which is not sent.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    language: LanguageCode = LanguageCode.JAVA
    version: int = VERSION
    remark: str | None = None
    ext_fields: dict[str, str] = field(default_factory=dict)
    body: bytes | bytearray | memoryview = b""
    serialize: int = SERIALIZE_JSON
    frame_bytes: int = 0
    is_unwanted: bool = False

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Nobody waits for an answer; none may be sent, even for an error (remoting 1.1)."""
        return bool(self.flag & FLAG_ONEWAY)

    def answer(
        self,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        *,
        ext_fields: dict[str, str] | None = None,
        body: bytes | bytearray | memoryview = b"",
    ) -> Command:
        """The answer to this request. It is always JSON: the peer looks at the frame's own byte (remoting 1.1)."""
        fields = {} if ext_fields is None else ext_fields
        made = Command(
            code, self.opaque, FLAG_RESPONSE, LanguageCode.JAVA, VERSION, remark, fields, body, SERIALIZE_JSON
        )
        made.is_unwanted = self.is_oneway
        return made

    def not_supported(self) -> Command:
        """The answer to a request that this server does not know."""
        return self.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {self.code} not supported")


def request(
    code: RequestCode,
    ext_fields: dict[str, str] | None = None,
    body: bytes | bytearray | memoryview = b"",
    *,
    oneway: bool = False,
) -> Command:
    """A request of this server to a client. The connection gives it its ``opaque``."""
    return Command(int(code), 0, FLAG_ONEWAY if oneway else 0, ext_fields=ext_fields or {}, body=body)


class RemotingError(CommitMQError):
    """Base of the errors of RocketMQ's protocol."""

    closes: ClassVar[bool] = False
    """Whether the connection must be closed: the place of the next frame is unknown, or the peer is no client."""


class FrameError(RemotingError):
    """Bytes that are no frame: a wrong length, a header that cannot be read. RocketMQ closes such a connection too."""

    closes = True


class FieldError(RemotingError):
    """A header field is missing or has a value of another type. The request fails, the connection continues.

    ``field`` is its name on the wire, ``value`` its text, None for a field that is missing.
    """

    def __init__(self, message: str, field: str, value: str | None = None) -> None:
        super().__init__(message)
        self.field, self.value = field, value


class BodyError(RemotingError):
    """A body that cannot be read. The request fails, the connection continues."""


class PeerGoneError(RemotingError):
    """The peer closed its connection, or was disconnected, before it answered a request of this server."""


class PeerSilentError(RemotingError):
    """The peer did not answer a request of this server in time."""


_LANGUAGE_NAMES: Final = {language.name: language for language in LanguageCode}
_NAMES: Final = {language: language.name for language in LanguageCode}
_TEXTS: Final = {str}
_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


def encode_json(command: Command) -> bytes:
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


def decode_json(data: bytes | memoryview) -> Command:
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
        spoken = _LANGUAGE_NAMES.get(language, LanguageCode.OTHER)
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


_BINARY_HEAD: Final = struct.Struct(">hbhii")
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_LANGUAGES: Final = {int(language): language for language in LanguageCode}
_SHORT_MAX: Final = (1 << 15) - 1


def encode_binary(command: Command) -> bytes:
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
    head = _BINARY_HEAD.pack(command.code, command.language, command.version, command.opaque, command.flag)
    return b"".join([head, _INT.pack(len(remark)), remark, _INT.pack(len(fields)), fields])


def decode_binary(data: bytes | memoryview) -> Command:
    """The command in a ROCKETMQ header. Bytes behind its last field are ignored, as RocketMQ does.

    Raises FrameError with the place where the header ends too early. Texts that are no UTF-8 get replacement marks.
    """
    data = bytes(data)
    if len(data) < _BINARY_HEAD.size + 8:
        raise FrameError(f"a ROCKETMQ header has {_BINARY_HEAD.size + 8} bytes at least, this one has {len(data)}")
    code, language, version, opaque, flag = _BINARY_HEAD.unpack_from(data)
    at = _BINARY_HEAD.size
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


_OPAQUE: Final = 2_147_483_647
_HEAD: Final = struct.Struct(">iI")


class AnswerForm:
    """Answers with the fields ``fixed``, and those called ``names`` behind them."""

    def __init__(self, fixed: Mapping[str, str], names: Sequence[str]) -> None:
        """No name or value of ``fixed`` may look like ``@name@``."""
        fields = {**fixed, **{name: f"@{name}@" for name in names}}
        header = encode_json(Command(ResponseCode.SUCCESS, _OPAQUE, FLAG_RESPONSE, ext_fields=fields))
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


MAX_FRAME_BYTES: Final = 16 << 20
MAX_HEADER_BYTES: Final = 1 << 20
_HEADER_MAX: Final = (1 << 24) - 1
_NOTHING: Final = memoryview(b"")


class FrameParser:
    """Cuts one connection's bytes into commands: :meth:`add`, then :meth:`next` until it returns None.

    It keeps less than one frame and one read. After a wrong frame ``error`` says what it was. The commands before it are
    still returned; later calls return none.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        """``max_frame_bytes`` is the greatest length of a frame without its own 4 bytes."""
        self.max_frame_bytes, self.max_header_bytes = max_frame_bytes, max_header_bytes
        self.error: FrameError | None = None
        self._pending = bytearray()
        self._needed = 4
        self._view, self._at = _NOTHING, 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames that were not returned yet."""
        return len(self._pending) + len(self._view) - self._at

    def feed(self, data: bytes) -> list[Command]:
        """All commands that ``data`` completes."""
        self.add(data)
        commands: list[Command] = []
        while (command := self.next()) is not None:
            commands.append(command)
        return commands

    def add(self, data: bytes) -> None:
        """Take what the peer sent. :meth:`next` must have returned None since the last call."""
        if self.error is not None:
            return
        pending: bytes | bytearray = data
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return
            pending, self._pending = self._pending, bytearray()
        self._view, self._at = memoryview(pending), 0

    def next(self) -> Command | None:
        """The next command. Its body is a view of what was added, or a copy, never of a buffer in use."""
        view, at = self._view, self._at
        end = len(view)
        left = end - at
        if not left or self.error is not None:
            return None
        try:
            if left >= 8:
                length, word = _HEAD.unpack_from(view, at)
                header_bytes = word & _HEADER_MAX
                if (
                    not 4 <= length <= self.max_frame_bytes
                    or word >> 25
                    or header_bytes > length - 4
                    or header_bytes > self.max_header_bytes
                ):
                    self._refuse(length, word)
                if 4 + length <= left:
                    return self._decoded(view, at + 8 + header_bytes, at + 4 + length, word >> 24)
                needed = 4 + length
            else:
                needed = self._needed_of_few(view[at:])
        except FrameError as error:
            self.error = error
            self._view, self._at = _NOTHING, 0
            return None
        self._needed = needed
        self._pending += view[at:]
        self._view, self._at = _NOTHING, 0
        return None

    def _decoded(self, view: memoryview, body_at: int, stop: int, serialize: int) -> Command:
        """The command whose frame ends at ``stop``. The next one begins there."""
        at, end = self._at, len(view)
        header = view[at + 8 : body_at]
        command = decode_binary(header) if serialize else decode_json(header)
        body = view[body_at:stop]
        # A view keeps all of the read in memory for as long as the request is under way.
        command.body = body if 2 * len(body) >= end else bytes(body)
        command.frame_bytes = stop - at
        if stop < end:
            self._at = stop
        else:
            self._view, self._at = _NOTHING, 0
        return command

    def _needed_of_few(self, view: memoryview) -> int:
        """How many bytes are needed to continue, where a frame has fewer than 8 yet. Raises FrameError."""
        if len(view) < 4:
            return 4
        self._check_length(int.from_bytes(view[:4], "big", signed=True))
        return 8

    def _check_length(self, length: int) -> None:
        """Raises FrameError for a length that no frame may have."""
        if not 4 <= length <= self.max_frame_bytes:
            raise FrameError(
                f"a frame claims {length} bytes, allowed are 4 to {self.max_frame_bytes}: no client of RocketMQ, "
                "or the limit of a frame is too low"
            )

    def _refuse(self, length: int, word: int) -> None:
        """Raises FrameError with what is wrong in a frame's first 8 bytes."""
        self._check_length(length)
        if word >> 24 not in (SERIALIZE_JSON, SERIALIZE_ROCKETMQ):
            raise FrameError(f"a frame has serialization {word >> 24}, known are 0 (JSON) and 1 (ROCKETMQ)")
        header_bytes = word & _HEADER_MAX
        if header_bytes > length - 4:
            raise FrameError(f"a header claims {header_bytes} bytes of a frame of {length}")
        raise FrameError(f"a header claims {header_bytes} bytes, at most {self.max_header_bytes} are allowed")


def encode_head(command: Command, body_bytes: int) -> bytes:
    """Everything of the frame but its body, which has ``body_bytes`` and follows on the wire."""
    if command.serialize == SERIALIZE_JSON:
        header = encode_json(command)
    else:
        header = encode_binary(command)
    size = len(header)
    if size > _HEADER_MAX:
        raise FrameError(f"the header has {size} bytes, at most {_HEADER_MAX} fit")
    return _HEAD.pack(4 + size + body_bytes, command.serialize << 24 | size) + header


def encode(command: Command) -> bytes:
    """The whole frame of ``command``."""
    return encode_head(command, len(command.body)) + bytes(command.body)
