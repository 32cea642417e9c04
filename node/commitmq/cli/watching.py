"""``--watch [SECONDS]``: verbs that look again and again until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import click

from commitmq.cli.quantity import seconds

_Function = TypeVar("_Function", bound=Callable[..., Any])

LEAST_S: Final = 0.05
"""Between two looks, whatever was asked for."""
_USUAL_S: Final = 2.0


def watch_option(function: _Function) -> _Function:
    """The parameter is called ``every_s``, None without ``--watch``."""
    return click.option(
        "--watch",
        "every_s",
        type=seconds(),
        is_flag=False,
        flag_value=_USUAL_S,
        metavar="[SECONDS]",
        help=f"Look again and again until Ctrl-C, every SECONDS.  [without a number: {_USUAL_S:g}]",
    )(function)


def looks(every_s: float | None) -> Iterator[None]:
    """One round for each look: one, or without end with a pause of ``every_s`` between two."""
    while True:
        yield
        if every_s is None:
            return
        time.sleep(max(every_s, LEAST_S))


def new_page() -> None:
    """Begin the page of one look, with the time; a terminal is cleared first."""
    click.clear()
    click.echo(time.strftime("%H:%M:%S"))
