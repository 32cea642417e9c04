"""Messages of the lines that ``commitmq produce`` reads: a line is a body, or a JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from commitmq.client.message import Message

_FIELDS: Final = {"body", "body_base64", "tags", "keys", "properties", "sharding_key", "key", "flag", "tombstone"}
# Further fields of `consume --json`: they describe the old message's place and mean nothing for the new one.
_OF_ITS_PLACE: Final = {
    "topic",
    "queue_id",
    "queue_offset",
    "physical_offset",
    "msg_id",
    "born_timestamp",
    "store_timestamp",
    "sys_flag",
    "reconsume_times",
}


def message_of_line(tags: str | None, keys: str | None, key: str | None) -> Callable[[bytes], Message | bytes]:
    """The function that makes a message of a line: the line is the body, and all messages have these tags and keys."""
    from commitmq.client.message import Message

    if tags is None and keys is None and key is None:
        return lambda line: line
    return lambda line: Message(line, tags=tags, keys=keys, key=key)


def message_of_json(line: bytes) -> Message:
    """The message in one JSON line. Raises ValueError or InvalidMessageError."""
    import orjson

    from commitmq.client.message import Message, Tombstone
    from commitmq.client.properties import user_properties

    value: Any = orjson.loads(line)
    if type(value) is not dict:
        raise ValueError("a JSON line must be an object with a body")
    if "damage" in value:
        raise ValueError(f"it is a message whose body cannot be decoded: {value['damage']}")
    properties = value.get("properties")
    if properties is not None and type(properties) is not dict:
        raise ValueError("properties must be an object of strings")
    sharding_key = value.get("sharding_key")
    if "queue_offset" in value:  # as `consume --json` writes it
        value = {name: one for name, one in value.items() if name not in _OF_ITS_PLACE}
        sharding_key = sharding_key or (properties or {}).get("__SHARDINGKEY")
        properties = user_properties(properties or {})
    unknown = set(value) - _FIELDS
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}; fields are {', '.join(sorted(_FIELDS))}")
    keys = value.get("keys")
    if keys is not None and type(keys) not in (str, list):
        raise ValueError("keys must be a string or a list of strings")
    fields: dict[str, Any] = {
        "tags": value.get("tags"),
        "keys": keys,
        "properties": properties,
        "sharding_key": sharding_key,
        "key": value.get("key"),
        "flag": value.get("flag", 0),
    }
    tombstone = value.get("tombstone", False)
    if type(tombstone) is not bool:
        raise ValueError("tombstone must be true or false")
    if tombstone:
        if value.get("body") or value.get("body_base64"):
            raise ValueError("a tombstone has no body")
        return Tombstone(**fields)
    return Message(_body_of(value), **fields)


def _body_of(value: dict[str, Any]) -> bytes:
    import base64

    body, encoded = value.get("body"), value.get("body_base64")
    if (body is None) == (encoded is None):
        raise ValueError("a JSON line needs either body or body_base64")
    if encoded is not None:
        if type(encoded) is not str:
            raise ValueError("body_base64 must be a string")
        return base64.b64decode(encoded, validate=True)
    if type(body) is not str:
        raise ValueError("body must be a string (body_base64 for bytes)")
    return body.encode()
