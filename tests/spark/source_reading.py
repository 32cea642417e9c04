"""The source's plan and its tasks run in this process, for tests that look at more cases than Spark has time for."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from commitmq import Admin
from commitmq.testing.node_process import eventually
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.options import GapPolicy, SourceOptions, UnreadableRange
from commitmq_plugins.spark.origins import chosen, open_origins
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.reading import PartitionReader


def planned(options: SourceOptions, least: int = 2) -> list[Partition]:
    """The partitions of a batch read."""
    gaps: list[UnreadableRange] = []
    found: list[Partition] = []
    for origin in open_origins(options):
        slices = chosen(origin, options, gaps)
        parts = origin.parts_of(slices, least=least, max_bytes=options.max_bytes_per_partition)
        found += origin.partitions(slices, parts)
        origin.close()
    GapPolicy(options.fail_on_data_loss, options.gap_report).take(gaps)
    return found


def read_table(names: Sequence[str] = tuple(columns.COLUMNS), *, least: int = 2, **options: object) -> pa.Table:
    """All rows of a batch read with ``options``."""
    parsed = SourceOptions.parse({name: str(value) for name, value in options.items()})
    schema = columns.arrow_schema(names)
    batches = [batch for one in planned(parsed, least) for batch in PartitionReader(one, schema, parsed).batches()]
    return pa.Table.from_batches(batches, schema)


def wait_until_shown(address: str) -> None:
    """Wait until everything that the node at ``address`` has stored is flushed and in its queues."""

    def is_shown() -> bool:
        with Admin(address) as admin:
            positions = admin.status()["positions"]
        return bool(positions["written"] == positions["flushed"] == positions["dispatched"])

    eventually(is_shown, "all that was sent is shown")
