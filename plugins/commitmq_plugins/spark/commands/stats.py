"""``commitmq pipeline stats``: see :mod:`commitmq_plugins.spark.jobs.stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.output import human_bytes, json_option, print_json, print_table
from commitmq_plugins.spark.command_options import job_session, master_option, sources_argument, topics_option

if TYPE_CHECKING:
    from commitmq_plugins.spark.jobs.stats import Group, Stats

_BY = {"topic": "topics", "queue": "queues", "tag": "tags", "hour": "hours"}


@click.command()
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


def _cells(one: Group) -> list[object]:
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
