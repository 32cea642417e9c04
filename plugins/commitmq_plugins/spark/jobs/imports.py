"""Sends an export back into topics: bodies, keys, tags, properties and flags unchanged, each message once.

Each commit of the export's manifest is a step, so importing again adds the messages exported since. A state file beside
the manifest, or at the caller's path, records the imported steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commitmq_plugins.spark.jobs.export import Form, exported
from commitmq_plugins.spark.jobs.manifest import FOLDER, ExportError, Manifest
from commitmq_plugins.spark.jobs.replay import Replayed
from commitmq_plugins.spark.jobs.sending import SENT_COLUMNS, Sent, by_queue, ensure_topic, send
from commitmq_plugins.spark.jobs.state import opened
from commitmq_plugins.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MOST_TASKS: Final = 32


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
