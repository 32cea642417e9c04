"""Statistics of a store: counts, bytes, percentiles of size and delay, distinct keys; by topic, queue, tag and hour.

One pass over the log. Spark counts every group of :data:`GROUPINGS` at once; percentiles and distinct keys are
approximate (:data:`ERRORS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from commitmq_plugins.spark.jobs.positions import messages

if TYPE_CHECKING:
    from pyspark.sql import Column, Row, SparkSession

APPROXIMATE: Final = "≈"
PERCENTS: Final = (50, 95, 99)
# Name of a grouping -> its columns. A message without a tag has the tag None.
GROUPINGS: Final[dict[str, tuple[str, ...]]] = {
    "total": (),
    "topics": ("topic",),
    "queues": ("topic", "queue_id"),
    "tags": ("topic", "tag"),
    "hours": ("topic", "hour"),
}
_ACCURACY: Final = 1000
_HOUR_MS: Final = 3_600_000
_KEYS_DEVIATION: Final = 0.02
ERRORS: Final = (
    f"{APPROXIMATE}: approximate. The rank of a percentile is off by at most {1 / _ACCURACY:.1%} of the messages; a number of "
    f"keys by less than {_KEYS_DEVIATION:.0%} in two cases of three, by less than {3 * _KEYS_DEVIATION:.0%} nearly always."
)
"""The possible error of figures with a ``≈``."""
_NAMES: Final = ("topic", "queue_id", "tags", "keys", "store_timestamp", "born_timestamp", "body_size", "total_size")


@dataclass(frozen=True, slots=True)
class StatsGroup:
    """Figures of the messages that share ``of`` (a grouping's columns; an hour is its beginning in ISO 8601, UTC).

    Bytes are those of records in the log and of stored bodies. Delays are milliseconds from born to stored (a
    producer's clock may be ahead: then they are negative). Times are milliseconds since 1970.
    """

    of: dict[str, Any]
    messages: int
    log_bytes: int
    body_bytes: int
    body_size: dict[str, int]
    delay_ms: dict[str, int]
    with_key: int
    distinct_keys: int
    first_stored_ms: int
    last_stored_ms: int

    def to_json(self) -> dict[str, Any]:
        return {
            **self.of,
            "messages": self.messages,
            "log_bytes": self.log_bytes,
            "body_bytes": self.body_bytes,
            "body_size": self.body_size,
            "delay_ms": self.delay_ms,
            "with_key": self.with_key,
            "distinct_keys": self.distinct_keys,
            "first_stored_ms": self.first_stored_ms,
            "last_stored_ms": self.last_stored_ms,
        }


@dataclass(slots=True)
class Stats:
    """The result of :func:`stats`: for each grouping its groups, in the order of their columns."""

    sources: list[str]
    groups: dict[str, list[StatsGroup]] = field(default_factory=dict)

    @property
    def total(self) -> StatsGroup | None:
        """All messages together; None when there is none."""
        found = self.groups.get("total")
        return found[0] if found else None

    def to_json(self) -> dict[str, Any]:
        total = self.total
        return {
            "sources": self.sources,
            "total": total.to_json() if total else None,
            **{name: [one.to_json() for one in found] for name, found in self.groups.items() if name != "total"},
        }


def stats(spark: SparkSession, sources: Sequence[str], *, topics: Sequence[str] = ()) -> Stats:
    """Figures of all messages of ``sources``, or only of ``topics``. Raises ConfigError, StoreError."""
    from pyspark.sql import functions as sql

    frame = messages(spark, sources, _NAMES, topics=topics).select(
        "topic",
        "queue_id",
        sql.col("tags").alias("tag"),
        "keys",
        "body_size",
        "total_size",
        sql.unix_millis("store_timestamp").alias("stored"),
        (sql.unix_millis("store_timestamp") - sql.unix_millis("born_timestamp")).alias("delay"),
    )
    dimensions = list(dict.fromkeys(name for names in GROUPINGS.values() for name in names))
    groups = [[sql.col(name) for name in names] for names in GROUPINGS.values()]
    found = (
        frame.withColumn("hour", _hour())
        .groupingSets(groups, *dimensions)
        .agg(sql.grouping_id().alias("grouping"), *_figures())
        .collect()
    )
    numbers = {
        sum(1 << (len(dimensions) - 1 - index) for index, one in enumerate(dimensions) if one not in names): name
        for name, names in GROUPINGS.items()
    }
    result = Stats(list(sources), {name: [] for name in GROUPINGS})
    for row in found:
        name = numbers[row["grouping"]]
        if row["messages"]:
            result.groups[name].append(_group(row, GROUPINGS[name]))
    for name, members in result.groups.items():
        members.sort(key=lambda one, names=GROUPINGS[name]: [_sortable(one.of[column]) for column in names])  # type: ignore[misc]
    return result


def _hour() -> Column:
    """The beginning of the hour in which a message was stored, in milliseconds. Computed by arithmetic: Spark truncates
    a timestamp in the session's time zone, and an hour here is one of UTC.
    """
    from pyspark.sql import functions as sql

    return sql.col("stored") - sql.pmod(sql.col("stored"), sql.lit(_HOUR_MS))


def _figures() -> list[Column]:
    from pyspark.sql import functions as sql

    percents = sql.array(*(sql.lit(one / 100) for one in PERCENTS))
    return [
        sql.count("*").alias("messages"),
        sql.sum("total_size").alias("log_bytes"),
        sql.sum("body_size").alias("body_bytes"),
        sql.percentile_approx("body_size", percents, _ACCURACY).alias("sizes"),
        sql.max("body_size").alias("largest"),
        sql.percentile_approx("delay", percents, _ACCURACY).alias("delays"),
        sql.max("delay").alias("slowest"),
        sql.count("keys").alias("with_key"),
        sql.approx_count_distinct("keys", _KEYS_DEVIATION).alias("distinct_keys"),
        sql.min("stored").alias("first"),
        sql.max("stored").alias("last"),
    ]


def _group(row: Row, names: Sequence[str]) -> StatsGroup:
    values = {name: row[name] for name in names}
    if "hour" in values:
        values["hour"] = iso(row["hour"])
    return StatsGroup(
        values,
        row["messages"],
        row["log_bytes"],
        row["body_bytes"],
        _percentiles(row["sizes"], row["largest"]),
        _percentiles(row["delays"], row["slowest"]),
        row["with_key"],
        min(row["distinct_keys"], row["with_key"]),
        row["first"],
        row["last"],
    )


def _percentiles(values: Sequence[int], greatest: int) -> dict[str, int]:
    return {**{f"p{percent}": value for percent, value in zip(PERCENTS, values, strict=True)}, "max": greatest}


def _sortable(value: Any) -> tuple[bool, Any]:
    return value is not None, value


def about(shown: object) -> str:
    """The text of an approximate figure."""
    return f"{APPROXIMATE} {shown}"


def iso(milliseconds: int) -> str:
    """A time in ISO 8601, to the second, UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
