"""Messages of rows: the columns that a sink takes, and the message of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from commitmq.client.message import Message, Tombstone
from commitmq.errors import ConfigError, InvalidMessageError
from commitmq.format.constants import Property
from commitmq_plugins.spark.columns import COLUMNS, STATE_COLUMNS
from commitmq_plugins.spark.delays import TIME_COLUMNS
from commitmq_plugins.spark.sink_options import SinkOptions

SINK_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "flag": ("int",),
    "queue_id": ("int",),
    "sharding_key": ("string",),
    "delay_ms": ("bigint", "int"),
    "deliver_at": ("timestamp",),
}
"""The columns of a row, with the types that each may have."""

NOT_CARRIED: Final = frozenset(
    (
        Property.UNIQUE_KEY, Property.CRC32, Property.PRODUCER_SEQUENCE, Property.WAIT, Property.CLUSTER, Property.REGION,
        Property.TRACE_ON, Property.DELAY, Property.RETRY_TOPIC, Property.REAL_TOPIC, Property.REAL_QUEUE_ID,
        Property.TRANSACTION_PREPARED, Property.PRODUCER_GROUP, Property.INNER_NUM, Property.INNER_BASE,
        Property.TIMER_DELAY_SECONDS, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS, "TIMER_OUT_MS",
        "TIMER_DEL_UNIQKEY", Property.INNER_MULTI_DISPATCH, Property.INNER_MULTI_QUEUE_OFFSET,
    )
)  # fmt: skip
"""Properties that describe how a message was sent, stored or delivered: a message that is sent again does not get them.
"""


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Raise ConfigError for columns that have no meaning here, or that are missing."""
    names = schema.fieldNames()
    if "body" not in names:
        raise ConfigError("there is no column body: it has the body of a message")
    if not options.topic and "topic" not in names:
        raise ConfigError("say where the messages go: option topic, or a column topic")
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name in SINK_COLUMNS:
            if kind not in SINK_COLUMNS[field.name]:
                raise ConfigError(f"the column {field.name} is {' or '.join(SINK_COLUMNS[field.name])}, not {kind}")
            if field.name in TIME_COLUMNS and options.idempotent:
                raise ConfigError(
                    f"the column {field.name} delays messages, and an idempotent producer's messages cannot be delayed: say"
                    " idempotent=false (a task that Spark repeats may then store its messages again)"
                )
        elif field.name not in COLUMNS and field.name not in STATE_COLUMNS:
            raise ConfigError(f"a message has no {field.name!r}; columns are {', '.join(SINK_COLUMNS)}")


def sendable(batch: pa.RecordBatch) -> pa.Array:
    """For each row of a store, whether it has a body, or a key whose value it deletes."""
    size = pc.binary_length(batch.column("body"))
    has_key = pc.greater(pc.binary_length(batch.column("keys")).fill_null(0), 0)
    return pc.if_else(pc.equal(size, 0).fill_null(False), has_key, pc.is_valid(size))


def row_messages(rows: pa.RecordBatch, tombstones: bool) -> tuple[Sequence[bytes | Message], dict[str, Any]]:
    """The messages of ``rows``, and the further arguments of ``send_batch``. ``tombstones``: an empty body is no
    mistake.
    """
    names = rows.schema.names
    body = rows.column("body")
    if body.null_count:
        raise InvalidMessageError("a row has no body")
    bodies: list[bytes] = (body.cast(pa.binary()) if body.type != pa.binary() else body).to_pylist()
    columns: dict[str, list[Any]] = {
        name: rows.column(name).to_pylist()
        for name in ("tags", "keys", "sharding_key")
        if name in names and rows.column(name).null_count < rows.num_rows
    }
    has_flags = "flag" in names and bool(np.any(np.asarray(rows.column("flag").fill_null(0))))
    tombstones = tombstones and not all(bodies)
    if not (has_flags or tombstones) and ("properties" not in names or not _pairs(rows.column("properties"))):
        if "sharding_key" in columns:
            columns["sharding_keys"] = columns.pop("sharding_key")
        return bodies, columns
    nothing = [None] * rows.num_rows
    own = rows.column("properties").to_pylist() if "properties" in names else nothing
    flags = rows.column("flag").fill_null(0).to_pylist() if has_flags else [0] * rows.num_rows
    messages: list[bytes | Message] = []
    for index, pairs in enumerate(own):
        properties = {name: value for name, value in pairs or () if name not in NOT_CARRIED}
        tags, keys, sharding_key = (columns.get(name, nothing)[index] for name in ("tags", "keys", "sharding_key"))
        tags = tags or properties.pop(Property.TAGS, None)
        keys = keys or properties.pop(Property.KEYS, None)
        sharding_key = sharding_key or properties.pop(Property.SHARDING_KEY, None)
        for name in (Property.TAGS, Property.KEYS, Property.SHARDING_KEY):
            properties.pop(name, None)
        fields: dict[str, Any] = {
            "tags": tags,
            "keys": keys,
            "properties": properties,
            "sharding_key": sharding_key,
            "flag": flags[index],
        }
        text = bodies[index]
        try:
            messages.append(Tombstone(**fields) if tombstones and not text else Message(text, **fields))
        except InvalidMessageError as error:
            raise InvalidMessageError(f"row {index}: {error}") from error
    return messages, {}


def _pairs(properties: pa.MapArray) -> int:
    """The number of pairs in all maps together."""
    offsets = properties.offsets
    return int(offsets[-1].as_py()) - int(offsets[0].as_py())
