"""``commitmq bench all``: every measurement of a running node in one table, beside its goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.bench.baseline import AgainstBaseline, baseline_options, figure
from commitmq.cli.bench.options import common_options
from commitmq.cli.bench.telling import median_of, print_machine, progress_bars
from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import print_json, print_table

if TYPE_CHECKING:
    from commitmq.bench.goals import Outcome


@click.command(cls=NodeVerb, name="all", short_help="Everything in one table, beside its goal.")
@click.option(
    "--count", type=click.IntRange(1, 10**9), default=4000, show_default=True, help="Sends of each ack level."
)
@click.option("--messages", type=click.IntRange(1, 10**9), default=200_000, show_default=True, help="Messages a run.")
@common_options
@baseline_options
def all_(
    count: int, messages: int, repeat: int, seconds: float, as_json: bool, node: str, baseline: AgainstBaseline
) -> None:
    """Everything with 1 KiB bodies, in one table, beside its goal."""
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.goals import measure_all

    host = machine()
    baseline.begin("all", node)
    with progress_bars() as begin:
        outcomes = list(measure_all(node, repeat=repeat, count=count, messages=messages, limit_s=seconds, begin=begin))
    results = [(one.goal, one.measured) for one in outcomes]
    more = baseline.end(
        host, [figure(goal.name, goal.unit, value, goal.floor) for goal, value in results if goal.floor is not None]
    )
    missed = sum(one.met is False for one in outcomes)
    if as_json:
        told = [to_json(one) for one in outcomes]
        report = {"bench": "all", "machine": host, "results": told, "summary": {"missed": missed}}
        print_json(report | more)
        return
    print_machine(host)
    print_table(
        ("", "median", "low", "high", "unit", "goal", "", "how"),
        [_row(one) for one in outcomes],
        left=(0, 4, 5, 6, 7),
    )
    judged = sum(one.met is not None for one in outcomes)
    click.echo(f"{f'{missed} of {judged} goals missed' if missed else 'all goals met'} ({median_of(repeat)})")
    baseline.tell()


def _row(one: Outcome) -> tuple[object, ...]:
    goal = one.goal
    form = ",.0f" if goal.unit == "messages/s" else ".2f"
    limit = "-" if goal.limit is None else f"{'<=' if goal.at_most else '>='} {format(goal.limit, ',g')}"
    verdict = {None: "", True: "met", False: "MISSED"}[one.met]
    figures = (format(value, form) for value in (one.measured.median, one.measured.low, one.measured.high))
    return (goal.name, *figures, goal.unit, limit, verdict, one.note)
