"""``--node``, ``--store`` and ``--timeout``: the options of verbs that ask a node's supervisor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from commitmq.cli.output import DEFAULT_NODE
from commitmq.cli.quantity import seconds

_Function = TypeVar("_Function", bound=Callable[..., Any])


def node_options(function: _Function) -> _Function:
    """The parameters are called ``node``, ``store`` and ``timeout_s``."""
    for option in (
        click.option(
            "--timeout", "timeout_s", type=seconds(), default=10.0, show_default=True, help="Seconds to wait."
        ),
        click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Store folder of a node here."),
        click.option(
            "--node", metavar="ADDRESS", envvar="COMMITMQ_NODE", help=f"Admin address.  [default: {DEFAULT_NODE}]"
        ),
    ):
        function = option(function)
    return function
