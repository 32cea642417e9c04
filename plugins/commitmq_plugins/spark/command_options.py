"""Shared by the verbs of ``commitmq pipeline``: arguments, and a session whose failures are sentences.

Shows the progress of a job's tasks: a bar on standard error while a verb runs.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from commitmq.cli.output import can_draw
from commitmq.store.access import require_store
from commitmq.store.layout import StoreLayout

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


_Function = TypeVar("_Function", bound=Callable[..., Any])


def sources_argument(function: _Function) -> _Function:
    """``SOURCES``: folders of stores, addresses of nodes; the parameter is called ``sources``."""
    return click.argument("sources", metavar="SOURCES...", nargs=-1, required=True)(function)


def stores_argument(function: _Function) -> _Function:
    """``DIRS``: folders of stores that no program uses; the parameter is called ``folders``."""
    kind = click.Path(exists=True, file_okay=False, path_type=Path)
    return click.argument("folders", metavar="DIRS...", nargs=-1, required=True, type=kind)(function)


def config_options(function: _Function) -> _Function:
    """``--config`` and ``--set``, as of ``store verify``: the parameters are called ``config_file`` and ``overrides``."""
    keys = click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable."
    )
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--config", "config_file", type=kind, help="TOML file of keys.")(keys(function))


def topics_option(function: _Function) -> _Function:
    """``--topic NAME``, repeatable; the parameter is called ``topics``."""
    return click.option("--topic", "topics", metavar="NAME", multiple=True, help="Only this topic; repeatable.")(
        function
    )


def master_option(function: _Function) -> _Function:
    """``--master URL``: where Spark runs."""
    return click.option(
        "--master",
        metavar="URL",
        default="local[*]",
        show_default=True,
        envvar="COMMITMQ_SPARK_MASTER",
        help="Where Spark runs: local[N], or spark://HOST:PORT.",
    )(function)


@contextlib.contextmanager
def job_session(master: str, what: str, *, quiet: bool, sources: Sequence[str | Path] = ()) -> Iterator[SparkSession]:
    """A session with a progress bar called ``what``. Spark's exceptions become a CommitMQError with one sentence.

    ``sources``: raises StoreError for a folder among them that is no store, before Spark is started. Spark plans on
    this machine, so this machine must see a store, even when only executors read it.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    for folder in _folders(sources):
        require_store(StoreLayout(folder.absolute()))
    from commitmq_plugins.spark.sessions import plain, session

    spark = session(master, app=f"commitmq pipeline: {what}")
    try:
        with task_progress(spark, what, quiet=quiet):
            yield spark
    except (PySparkException, Py4JError) as error:
        raise plain(error) from error


def _folders(sources: Sequence[str | Path]) -> Iterator[Path]:
    """The folders among ``sources``, without addresses; a source may list several with commas, as in the options of the
    format.
    """
    for source in sources:
        if isinstance(source, Path):
            yield source
        elif "://" not in source:
            yield from (Path(one.strip()) for one in source.split(",") if one.strip())
