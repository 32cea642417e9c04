"""RegisterBrokerBody: what a broker tells its name servers, plain or compressed (spec 14)."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq_plugins.rocketmq.remoting.bodies.data_version import DataVersion
from commitmq_plugins.rocketmq.remoting.bodies.topic_config import TopicConfig, TopicConfigSerializeWrapper
from commitmq_plugins.rocketmq.remoting.codes import V5_0_0
from commitmq_plugins.rocketmq.remoting.errors import BodyError
from commitmq_plugins.rocketmq.remoting.fastjson import as_list, as_object, as_text, dumps, load_object, loads
from commitmq_plugins.rocketmq.remoting.steps import Steps, finish, in_steps

_INT: Final = struct.Struct(">i")
_COMPRESSION_LEVEL: Final = 9


@dataclass(slots=True)
class RegisterBrokerBody:
    """The topics of a broker, and its filter servers (a feature that RocketMQ has removed)."""

    topics: TopicConfigSerializeWrapper = field(default_factory=TopicConfigSerializeWrapper)
    filter_servers: list[str] = field(default_factory=list)

    def encode(self, *, compressed: bool = False) -> bytes:
        if not compressed:
            return dumps(
                {"filterServerList": self.filter_servers, "topicConfigSerializeWrapper": self.topics.to_json()}
            )
        parts = [dumps(self.topics.data_version.to_json())]
        topics = [one.to_text().encode() for one in self.topics.topic_config_table.values()]
        mappings = [dumps(one) for one in self.topics.mapping_info.values()]
        parts = [*_sized(parts), _INT.pack(len(topics)), *_sized(topics), *_sized([dumps(self.filter_servers)])]
        parts += [_INT.pack(len(mappings)), *_sized(mappings)]
        return zlib.compress(b"".join(parts), _COMPRESSION_LEVEL)

    @classmethod
    def decode(
        cls, data: bytes | bytearray | memoryview, *, compressed: bool, version: int, max_bytes: int
    ) -> RegisterBrokerBody:
        """From a body of a broker of ``version``; at most ``max_bytes`` after decompression. Raises BodyError."""
        return finish(cls.decoding(data, compressed=compressed, version=version, max_bytes=max_bytes))

    @classmethod
    def decoding(
        cls, data: bytes | bytearray | memoryview, *, compressed: bool, version: int, max_bytes: int
    ) -> Steps[RegisterBrokerBody]:
        """:meth:`decode` in steps. That a body which is not compressed is JSON is one of them: 0.1 s for 16 MiB."""
        if not data:
            return cls()
        if compressed:
            return (yield from _Inflated(_inflate(data, max_bytes)).body(version))
        members = load_object(data)
        yield
        topics = yield from TopicConfigSerializeWrapper.reading(members.get("topicConfigSerializeWrapper", {}))
        return cls(topics, _texts(members.get("filterServerList")))


def _texts(value: Any) -> list[str]:
    return [as_text(one, "a filter server") for one in as_list(value, "filterServerList")]


def _sized(parts: list[bytes]) -> list[bytes]:
    return [_INT.pack(len(part)) + part for part in parts]


def _inflate(data: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, max_bytes)
    except zlib.error as error:
        raise BodyError(f"the body is not compressed with zlib: {error}") from error
    if not stream.eof and len(plain) < max_bytes:
        raise BodyError("the compressed body ends too early")
    if not stream.eof:
        raise BodyError(f"the body has more than {max_bytes} bytes after decompression")
    return plain


class _Inflated:
    """Reads the parts of a compressed body."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def body(self, version: int) -> Steps[RegisterBrokerBody]:
        data_version = DataVersion.from_json(loads(self._part("the data version")))
        table = {}
        for number in in_steps(self._count()):
            if number is None:
                yield
                continue
            config = TopicConfig.from_text(self._part("a topic").decode("utf-8", "replace"))
            table[config.topic_name] = config
        filter_servers = _texts(loads(self._part("the filter servers")))
        mappings: dict[str, Any] = {}
        if version >= V5_0_0:
            for number in in_steps(self._count()):
                if number is None:
                    yield
                    continue
                info = as_object(loads(self._part("a mapping")), "a mapping")
                mappings[as_text(info.get("topic"), "topic")] = info
        return RegisterBrokerBody(TopicConfigSerializeWrapper(table, data_version, mappings), filter_servers)

    def _int(self, what: str) -> int:
        if len(self._data) - self._at < 4:
            raise BodyError(f"the body ends at byte {len(self._data)}, before {what}")
        value: int = _INT.unpack_from(self._data, self._at)[0]
        self._at += 4
        return value

    def _count(self) -> range:
        """As many as the next number says; each takes 4 bytes at least, so a wrong number cannot cost much."""
        count = self._int("a count")
        if not 0 <= count <= (len(self._data) - self._at) // 4:
            raise BodyError(f"the body claims {count} entries at byte {self._at - 4}")
        return range(count)

    def _part(self, what: str) -> bytes:
        size = self._int(what)
        if not 0 <= size <= len(self._data) - self._at:
            raise BodyError(f"{what} at byte {self._at} claims {size} bytes, {len(self._data) - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]


def crc32(data: bytes | bytearray | memoryview) -> int:
    """RocketMQ's checksum of a registration: CRC-32 with its highest bit cleared."""
    return zlib.crc32(data) & 0x7FFF_FFFF
