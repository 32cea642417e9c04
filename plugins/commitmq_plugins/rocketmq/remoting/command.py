"""One request or answer of the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from commitmq_plugins.rocketmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    SERIALIZE_JSON,
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
