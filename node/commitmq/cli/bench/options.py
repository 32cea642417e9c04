"""Options that several measurements share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from commitmq.cli.output import json_option, node_option
from commitmq.cli.quantity import Quantity, seconds

_Function = TypeVar("_Function", bound=Callable[..., Any])


def common_options(function: _Function) -> _Function:
    """The options of every measurement of a running node."""
    for decorate in (
        node_option,
        json_option,
        click.option(
            "--seconds",
            type=seconds(0.1),
            default=60.0,
            show_default=True,
            help="Stop a run after this long; its figures are then of fewer messages.",
        ),
        click.option("--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs."),
    ):
        function = decorate(function)
    return function


topic_option = click.option("--topic", metavar="TOPIC", help="Use this topic and keep it.  [default: a fresh one]")
body_option = click.option(
    "--body", type=Quantity("bytes", low=1, high=4 << 20), default=1024, show_default=True, help="Bytes of each body."
)
