"""``commitmq top``: the topics with the most new messages, and the groups that are most behind, again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from commitmq.cli.node_verb import address_of
from commitmq.cli.options import json_option, node_options
from commitmq.cli.output import LEAST_S, node_unless, print_json, print_table
from commitmq.cli.quantity import seconds
from commitmq.store.metadata.topic_config import is_system_group

_LAST = 2
_RANKS = {"retry": 1, "dlq": 1, "system": _LAST}  # of kinds of topics: which of two that are equally busy comes later


class TopSample(NamedTuple):
    """One look: its time in seconds, the sum of each topic's next offsets, and of each group lag and committed offsets."""

    at_s: float
    topics: dict[str, int]
    groups: dict[str, tuple[int, int]]
    all_topics: int
    all_groups: int
    kinds: Mapping[str, str] = {}
    """The kind of each topic, by name."""


@click.command()
@click.option("--every", "every_s", type=seconds(), default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="End after the first rates.")
@click.option("--rows", type=click.IntRange(1, 1_000), default=15, show_default=True, help="Topics and groups to show.")
@click.option("--most", type=click.IntRange(1), default=200, show_default=True, help="Topics and groups to look at.")
@node_options
@json_option
def top(
    every_s: float,
    once: bool,
    rows: int,
    most: int,
    node: str | None,
    store: Path | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Show topics by messages a second, and groups by lag, until Ctrl-C.

    Topics and groups of the system come last. Each look costs a request for each topic and group, so their number is bounded
    (--most). Output that is not a terminal gets one page after the other; --json a line for each look.

    \b
    Example: commitmq top --once --json
    """
    from commitmq.client.admin import Admin

    with Admin(address_of(store, node_unless(store, node)), timeout_s=timeout_s) as admin:
        before = _look(admin, most)
        while True:
            time.sleep(max(every_s, LEAST_S))
            now = _look(admin, most)
            page = compared(before, now, rows)
            if as_json:
                print_json(page)
            else:
                _show(page)
            if once:
                return
            before = now


def _look(admin: Any, most: int) -> TopSample:
    from commitmq.client.checks import kind_of
    from commitmq.errors import CommitMQError

    kinds = {one.name: kind_of(one) for one in admin.topics()}
    names = sorted(kinds, key=lambda name: _RANKS.get(kinds[name], 0))
    group_names = sorted((str(one["name"]) for one in admin.groups()), key=is_system_group)
    topics, groups = {}, {}
    for name in names[:most]:
        try:
            topics[name] = sum(one.max for one in admin.offsets(name))
        except CommitMQError:
            continue  # deleted in the meantime
    for name in group_names[:most]:
        try:
            lags = admin.group_lag(name)
        except CommitMQError:
            continue
        groups[name] = sum(one.lag for one in lags), sum(one.committed or 0 for one in lags)
    return TopSample(time.monotonic(), topics, groups, len(names), len(group_names), kinds)


def compared(before: TopSample, now: TopSample, rows: int) -> dict[str, Any]:
    """Rates between two looks: the ``rows`` busiest topics, and the groups that are most behind; those of the system last."""
    passed_s = max(now.at_s - before.at_s, LEAST_S)
    topics: list[dict[str, Any]] = [
        {"topic": name, "in_per_s": round(max(0, end - before.topics[name]) / passed_s, 1), "next_offsets": end}
        for name, end in now.topics.items()
        if name in before.topics
    ]
    groups: list[dict[str, Any]] = [
        {
            "group": name,
            "lag": lag,
            "lag_per_s": round((lag - before.groups[name][0]) / passed_s, 1),
            "out_per_s": round(max(0, done - before.groups[name][1]) / passed_s, 1),
        }
        for name, (lag, done) in now.groups.items()
        if name in before.groups
    ]
    ranks = {name: _RANKS.get(kind, 0) for name, kind in now.kinds.items()}
    topics.sort(
        key=lambda one: (
            (rank := ranks.get(one["topic"], 0)) == _LAST,
            -one["in_per_s"],
            rank,
            one["topic"],
        )
    )
    groups.sort(key=lambda one: (is_system_group(one["group"]), -one["lag"], one["group"]))
    return {
        "seconds": round(passed_s, 2),
        "in_per_s": round(sum(one["in_per_s"] for one in topics), 1),
        "topics": topics[:rows],
        "groups": groups[:rows],
        "not_looked_at": {"topics": now.all_topics - len(now.topics), "groups": now.all_groups - len(now.groups)},
    }


def _show(page: dict[str, Any]) -> None:
    click.clear()
    click.echo(f"{time.strftime('%H:%M:%S')}  {page['in_per_s']:.0f} messages/s in {page['seconds']} s\n")
    print_table(
        ("TOPIC", "IN/S", "STORED"), [(one["topic"], one["in_per_s"], one["next_offsets"]) for one in page["topics"]]
    )
    click.echo()
    print_table(
        ("GROUP", "LAG", "LAG/S", "OUT/S"),
        [(one["group"], one["lag"], one["lag_per_s"], one["out_per_s"]) for one in page["groups"]],
    )
    left = page["not_looked_at"]
    if left["topics"] or left["groups"]:
        click.echo(f"\nnot looked at: {left['topics']} topics, {left['groups']} groups (--most)")
