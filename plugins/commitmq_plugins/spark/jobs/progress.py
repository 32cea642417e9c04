"""Shows the progress of a job's tasks: a bar on standard error while a verb runs."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from commitmq.cli.progress import can_draw

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INTERVAL_S: Final = 0.25


@contextlib.contextmanager
def task_progress(spark: SparkSession, what: str, *, quiet: bool) -> Iterator[None]:
    """Shows the tasks of all Spark jobs that this thread starts meanwhile; nothing when ``quiet`` or without
    :func:`can_draw`.
    """
    if quiet or not can_draw():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    context = spark.sparkContext
    group = f"commitmq-{uuid.uuid4().hex}"
    context.setJobGroup(group, what)
    ended = threading.Event()
    shown = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks"),
        TimeElapsedColumn(),
    )
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def watch() -> None:
            tracker = context.statusTracker()
            while not ended.wait(_INTERVAL_S):
                done = total = 0
                # Spark forgets finished jobs some time later; their tasks stay counted as long as Spark knows them.
                for job in tracker.getJobIdsForGroup(group):
                    info = tracker.getJobInfo(job)
                    for stage in info.stageIds if info else ():
                        found = tracker.getStageInfo(stage)
                        if found is not None:
                            done += found.numCompletedTasks
                            total += found.numTasks
                bar.update(task, completed=done, total=total or None)

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
            context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
