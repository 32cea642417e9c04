"""``commitmq pipeline export``: see :mod:`commitmq_plugins.spark.jobs.export`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import complain, human_bytes, json_option, print_json
from commitmq.cli.quantity import Quantity
from commitmq_plugins.spark.command_options import job_session, master_option, sources_argument, topics_option

_MIB = 1024 * 1024


@click.command()
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
