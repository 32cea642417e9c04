"""The input of a job: the messages of several stores as one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from commitmq.errors import ConfigError
from commitmq_plugins.spark import columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def messages(
    spark: SparkSession,
    sources: Sequence[str],
    names: Sequence[str],
    *,
    topics: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The columns ``names`` of the messages of all ``sources``; ``topics``: only these; ``options``: further options of
    the format. Raises ConfigError without a source.
    """
    folders = [one for one in sources if "://" not in one]
    nodes = [one for one in sources if "://" in one]
    if not sources:
        raise ConfigError("name a source: a store's folder or a node's address")
    schema = ", ".join(f"{name} {columns.COLUMNS[name][0]}" for name in names)
    found = None
    for option, places in (("store", folders), ("node", nodes)):
        if not places:
            continue
        reader = (
            spark.read.format("commitmq").schema(schema).option(option, ",".join(places)).options(**(options or {}))
        )
        if topics:
            reader = reader.option("topics", ",".join(topics))
        part = reader.load()
        found = part if found is None else found.unionByName(part)
    assert found is not None
    return found
