"""``commitmq drain``: a node that takes no sends, for maintenance; it is the live setting ``flow.refuse_sends``."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.node_verb import address_of, request
from commitmq.cli.options import json_option, node_options
from commitmq.cli.output import complain, node_unless, print_json


@click.command()
@click.argument("state", type=click.Choice(["on", "off"]))
@node_options
@json_option
def drain(state: str, node: str | None, store: Path | None, timeout_s: float, as_json: bool) -> None:
    """Refuse all sends (on) or take them again (off); consumers read on, and commit.

    Producers with several nodes go to another one; others wait and try again until their time is over. Delayed messages
    that are due, retries and the ends of transactions are still stored. It stays on over a restart, until off.

    \b
    Example: commitmq drain on
    """
    address = address_of(store, node_unless(store, node))
    value = "true" if state == "on" else "false"
    answer = request(address, "config.set", timeout_s=timeout_s, key="flow.refuse_sends", value=value)
    if as_json:
        print_json({"refuses_sends": answer["value"], "before": answer["before"], "not_yet": answer["not_yet"]})
        return
    click.echo("the node refuses sends" if answer["value"] else "the node takes sends")
    if answer["not_yet"]:
        complain(f"these processes have not taken it yet, and will: {', '.join(answer['not_yet'])}")
