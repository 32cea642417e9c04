"""Sends messages of one topic, selected by time, tag or key, to another topic at a bounded rate.

When the job begins it decides which messages to send, and stores them in its state
(:mod:`commitmq_plugins.spark.jobs.positions`) as steps: ranges of each store's log, one after the other. So messages of a
queue keep their order, and an interrupted run continues at the step it was in.

Sends an export back into topics: bodies, keys, tags, properties and flags unchanged, each message once.

Each commit of the export's manifest is a step, so importing again adds the messages exported since. A state file beside
the manifest, or at the caller's path, records the imported steps.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commitmq.errors import ConfigError
from commitmq_plugins.spark.gaps import DataLossError, Gap, GapPolicy, coalesced
from commitmq_plugins.spark.jobs.export import Form, exported
from commitmq_plugins.spark.jobs.manifest import FOLDER, ExportError, Manifest
from commitmq_plugins.spark.jobs.positions import frame_of, opened, split_sources
from commitmq_plugins.spark.jobs.sending import SENT_COLUMNS, Sent, by_queue, ensure_topic, send, shares
from commitmq_plugins.spark.options import EARLIEST, LATEST, Bound, SourceOptions
from commitmq_plugins.spark.origins import chosen, open_origins, queues_of, remaining, require_topics
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.sinks import SinkOptions
from commitmq_plugins.spark.stores import Slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


DEFAULT_STEP_BYTES: Final = 64 * 1024 * 1024
_MOST_TASKS: Final = 32


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one run: the messages that it sent, and its number of ``steps``; ``begun_at`` of these were done
    before.
    """

    sent: Sent
    steps: int
    begun_at: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.sent), "steps": self.steps, "begun_at": self.begun_at}


def replay(
    spark: SparkSession,
    sources: Sequence[str],
    topic: str,
    target: str,
    state: Path,
    *,
    node: str | None = None,
    start_ms: int | None = None,
    end_ms: int | None = None,
    tags: str = "",
    keys: Sequence[str] = (),
    per_second: float | None = None,
    step_bytes: int = DEFAULT_STEP_BYTES,
    fail_on_data_loss: bool = True,
) -> Replayed:
    """Send the messages of ``topic`` in ``sources`` to the topic ``target`` of ``node``, each to the queue of the same
    number.

    Selected are messages stored from ``start_ms`` on and before ``end_ms`` (milliseconds since 1970), with a tag of
    ``tags`` (``a || b``) and one of ``keys``. ``target`` is created with as many queues if it does not exist. Repeating
    the job with the same ``state`` sends the missing messages; when all are sent, nothing. Raises StateError,
    DataLossError, SendError or SinkError.
    """
    if per_second is not None and per_second <= 0:
        raise ConfigError(f"a rate is above 0 messages a second, not {per_second}")
    folders, nodes = split_sources(sources)
    options = SourceOptions(
        stores=folders,
        nodes=nodes,
        topics=(topic,),
        start=Bound(EARLIEST, timestamp=start_ms),
        end=Bound(LATEST, timestamp=end_ms),
        tags=tags,
        keys=tuple(keys),
        fail_on_data_loss=fail_on_data_loss,
        decompress=True,
    )
    what = {
        "job": "replay", "sources": [*folders, *nodes], "topic": topic, "target": target, "node": node,
        "start_ms": start_ms, "end_ms": end_ms, "tags": tags, "keys": list(keys),
    }  # fmt: skip
    sent = Sent()
    with opened(state, what, lambda: _plan(options, target, node, step_bytes)) as found:
        begun_at = found.done
        queues = int(found.plan["queues"])
        tasks = min(queues, _MOST_TASKS)
        steps: list[dict[str, Any]] = found.plan["steps"]
        for number in range(found.done, len(steps)):
            partitions = _partitions(spark, options, steps[number])
            frame = by_queue(frame_of(spark, partitions, SENT_COLUMNS, options), queues, tasks)
            sink = SinkOptions(node=node, topic=target)
            counts: Counter[int] = Counter()
            for partition in partitions:
                for one in partition.slices:
                    counts[one.queue_id] += one.count
            parts = shares(spark, counts, queues, tasks) if per_second is not None else ()
            sent += send(frame, sink, found.sink_id, number, per_second, parts)
            found.finish_step()
    return Replayed(sent, len(steps), begun_at)


def _plan(options: SourceOptions, target: str, node: str | None, step_bytes: int) -> dict[str, Any]:
    """The present messages, in steps."""
    gaps: list[Gap] = []
    steps: list[dict[str, Any]] = []
    most_queues = 1
    origins = open_origins(options)
    try:
        require_topics(origins, options.topics)
        for origin in origins:
            slices = chosen(origin, options, gaps)
            most_queues = max(most_queues, *queues_of(origin, options.topics))
            parts = origin.parts_of(slices, least=1, max_bytes=step_bytes)
            for partition in origin.partitions(slices, parts):
                slices_ = [asdict(one) for one in partition.slices]
                steps.append({"store": origin.name, "generation": origin.generation, "slices": slices_})
    finally:
        for origin in origins:
            origin.close()
    if gaps and options.fail_on_data_loss:
        raise DataLossError(coalesced(gaps))
    return {"queues": ensure_topic(node, target, most_queues), "steps": steps}


def _partitions(spark: SparkSession, options: SourceOptions, step: dict[str, Any]) -> list[Partition]:
    """The messages of one step, in the store's present state. Raises DataLossError for those that it has no more."""
    name = str(step["store"])
    only = (
        replace(options, stores=(name,), nodes=())
        if name in options.stores
        else replace(options, stores=(), nodes=(name,))
    )
    (origin,) = open_origins(only)
    try:
        cores = spark.sparkContext.defaultParallelism
        gaps: list[Gap] = []
        present = {(one.topic, one.queue_id): one for one in origin.slices(options.wants)}
        wanted = [remaining(origin, Slice(**one), present, step["generation"], gaps) for one in step["slices"]]
        GapPolicy(options.fail_on_data_loss, options.gap_report).take(gaps)
        slices = [one for one in wanted if one is not None]
        parts = origin.parts_of(slices, least=cores, max_bytes=options.max_bytes_per_partition)
        return origin.partitions(slices, parts)
    finally:
        origin.close()


def import_export(
    spark: SparkSession,
    root: Path,
    topic: str,
    *,
    target: str = "",
    node: str | None = None,
    state: Path | None = None,
) -> Replayed:
    """Send the messages of ``topic`` in ``root`` to the topic ``target`` (default: the same name) of ``node``.

    Queues keep their numbers and their order; ``target`` is created with as many queues if it does not exist. Messages
    without a body are left out and counted. Raises ExportError when bodies were not kept; StateError, SendError,
    SinkError.
    """
    root = root.absolute()
    target = target or topic
    manifest = Manifest(root)
    if manifest.form is None:
        raise ExportError(f"{root} holds no export: it has no commit")
    form = Form(**manifest.form)
    if form.body != "raw" and not form.keep_body:
        raise ExportError(f"{root} has no bodies to import: it was exported with parsed ones, without --keep-body")
    what = {"job": "import", "root": str(root), "topic": topic, "target": target, "node": node}
    name = hashlib.blake2b(f"{topic}\n{target}\n{node}".encode(), digest_size=8).hexdigest()

    def plan() -> dict[str, Any]:
        used = max((queue + 1 for _, of, queue in manifest.positions if of == topic), default=1)
        queues = max(used, manifest.facts.queues.get(topic, 1))
        return {"queues": ensure_topic(node, target, queues)}

    sent = Sent()
    with opened(state or root / FOLDER / "imports" / f"{name}.json", what, plan) as found:
        begun_at = found.done
        queues = int(found.plan["queues"])
        tasks = min(queues, _MOST_TASKS)
        for commit in manifest.commits[begun_at:]:
            if any(file.topic == topic for file in commit.files):
                frame = exported(spark, root, topics=[topic], commits=[commit.number]).select(*SENT_COLUMNS)
                sink = SinkOptions(node=node, topic=target)
                sent += send(by_queue(frame, queues, tasks), sink, found.sink_id, commit.number)
            found.finish_step()
    return Replayed(sent, len(manifest.commits), begun_at)


def topics_of(root: Path) -> Sequence[str]:
    """The topics of an export, by name."""
    return sorted({file.topic for file in Manifest(root.absolute()).files})
