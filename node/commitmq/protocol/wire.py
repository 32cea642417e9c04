"""Headers of the native protocol: one orjson object per message, packed and checked here for clients and workers alike.

The protocol itself is described in PROTOCOL.md beside this file. This module must stay light: orjson only.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from commitmq.errors import (
    FencedError,
    GroupNotFoundError,
    Outcome,
    ProtocolError,
    SendError,
    TopicNotFoundError,
    send_error,
)

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_SENTENCE_CHARACTERS = 2_000
_LONGEST_OPERATION: Final = 64
NO_OPERATION: Final = f"no operation has a name of more than {_LONGEST_OPERATION} characters; the connection is ended"
# A header whose op comes first, or behind short fields, and is longer than any name; a character has four bytes at most.
_LOOKED_AT: Final = 1_024
_FIELD: Final = rb'\s*"[^"\\]{1,32}"\s*:\s*(?:-?\d{1,20}|"[^"\\]{0,64}")\s*,'
_TOO_LONG_A_NAME: Final = re.compile(
    rb'\s*\{(?:%s){0,6}\s*"op"\s*:\s*"[^"\\]{%d}' % (_FIELD, 4 * _LONGEST_OPERATION + 1)
)


def pack(header: dict[str, Any]) -> bytes:
    """Encode a request header; ``v`` is added."""
    return orjson.dumps({"v": PROTOCOL_VERSION, **header})


def parse_request(frame: bytes) -> dict[str, Any]:
    """The request header in ``frame``, with ``op`` (str) and ``id`` (int) present. Raises ProtocolError with BAD_HEADER
    or UNSUPPORTED_VERSION; the caller answers with it and continues.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError("BAD_HEADER", too_long(len(frame)))
    try:
        header = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise ProtocolError("BAD_HEADER", f"the first frame must be a JSON object: {error}") from error
    if type(header) is not dict:
        raise ProtocolError("BAD_HEADER", "the first frame must be a JSON object")
    version = header.get("v")
    if type(version) is not int:
        raise ProtocolError("BAD_HEADER", "the header needs v, the protocol version as an integer")
    if version != PROTOCOL_VERSION:
        raise ProtocolError("UNSUPPORTED_VERSION", f"this node speaks version {PROTOCOL_VERSION}, not {version}")
    operation = header.get("op")
    if type(operation) is not str:
        raise ProtocolError("BAD_HEADER", "the header needs op, the operation's name as a string")
    if len(operation) > _LONGEST_OPERATION:
        header["op"] = operation[:_LONGEST_OPERATION] + "…"  # no operation has such a name, and the refusal shows it
    if type(header.get("id")) is not int:
        raise ProtocolError("BAD_HEADER", "the header needs id, an integer that the answer repeats")
    return header


def names_no_operation(header: Any) -> bool:
    """Whether ``header``, an object with a buffer, has an ``op`` that is longer than any operation's name. Only its
    beginning is looked at, so false says nothing.
    """
    return _TOO_LONG_A_NAME.match(memoryview(header)[:_LOOKED_AT]) is not None


def too_long(size_bytes: int) -> str:
    """The sentence that refuses a header of ``size_bytes``."""
    return f"the header has {size_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed"


def request_id(frame: bytes) -> int | None:
    """The ``id`` of a header that :func:`parse_request` refused, if it has one: the error answer repeats it. A header
    that is too long is not parsed: parsing 60 MiB takes 2 GB and seconds.
    """
    if len(frame) > MAX_HEADER_BYTES:
        return None
    try:
        header = orjson.loads(frame)
    except orjson.JSONDecodeError:
        return None
    identity = header.get("id") if type(header) is dict else None
    return identity if type(identity) is int else None


def escaped(value: Any) -> Any:
    r"""``value`` with texts as UTF-8 can carry them: a path that is no UTF-8 is shown as ``/tmp/\udce9``."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(key): escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(one) for one in value]
    return value


def dumps(value: Any) -> bytes:
    """``value`` as JSON; :func:`escaped` where it is needed. Raises TypeError for what JSON cannot hold."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(escaped(value))


def ok(identity: int, **fields: Any) -> bytes:
    """A positive answer to request ``identity``."""
    header = {"v": PROTOCOL_VERSION, "id": identity, "ok": True, **fields}
    try:
        return orjson.dumps(header)
    except TypeError:
        return dumps(header)


def answer_again(answer: bytes, first: int, identity: int) -> bytes:
    """``answer``, made by :func:`ok` for request ``first``, as the answer to request ``identity``."""
    head = b'{"v":%d,"id":%d,'
    return head % (PROTOCOL_VERSION, identity) + answer[len(head % (PROTOCOL_VERSION, first)) :]


def error(identity: int | None, code: str, sentence: str, **fields: Any) -> bytes:
    """A refusal: a stable ``code``, a sentence for people, and further help (``outcome``, ``retry_after_ms``). A
    sentence may repeat the client's input; beyond MAX_SENTENCE_CHARACTERS its middle is omitted.
    """
    if len(sentence) > MAX_SENTENCE_CHARACTERS:
        half = MAX_SENTENCE_CHARACTERS // 2
        sentence = f"{sentence[:half]} … {sentence[-half:]}"
    return dumps({"v": PROTOCOL_VERSION, "id": identity, "ok": False, "code": code, "error": sentence, **fields})


def refused(identity: int | None, why: ProtocolError) -> bytes:
    """The answer to a request that an operation refused."""
    return error(identity, why.code, why.message, **why.more)


def parse_answer(frame: bytes | memoryview) -> dict[str, Any]:
    """The header of an answer. Raises ProtocolError BAD_ANSWER when it is no header: the peer is no CommitMQ node."""
    try:
        header = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise ProtocolError("BAD_ANSWER", f"the peer does not speak this protocol: {error}") from error
    if type(header) is not dict or type(header.get("ok")) is not bool:
        raise ProtocolError("BAD_ANSWER", "the peer does not speak this protocol: its answer has no field ok")
    return header


_REFUSALS: Final = {"TOPIC_NOT_EXIST": TopicNotFoundError, "GROUP_NOT_EXIST": GroupNotFoundError}


def refusal(answer: dict[str, Any]) -> ProtocolError:
    """The exception for an answer with ``ok: false`` (of a request that is no send)."""
    code = str(answer.get("code", "SYSTEM_ERROR"))
    sentence = str(answer.get("error", "the node gave no reason"))
    if code == "FENCED":
        return FencedError(sentence)
    return _REFUSALS.get(code, ProtocolError)(code, sentence, retry_after_ms=answer.get("retry_after_ms"))


def send_refusal(answer: dict[str, Any]) -> SendError:
    """The exception for a send that the node refused or could not complete."""
    code = str(answer.get("code", "SYSTEM_ERROR"))
    try:
        outcome = Outcome(answer.get("outcome", Outcome.NOT_STORED))
    except ValueError:
        outcome = Outcome.UNKNOWN
    return send_error(
        code, str(answer.get("error", "the node gave no reason")), outcome, retry_after_ms=answer.get("retry_after_ms")
    )
