"""Shows measurements: the machine, spreads of several runs, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.output import can_draw

if TYPE_CHECKING:
    from commitmq.bench.figures import Progress, Spread


def print_machine(host: dict[str, Any]) -> None:
    """Print one line: the machine of the figures below."""
    click.echo(
        f"{host['processor']}, {host['cores']} cores, load {host['load_average_1min']}, Linux {host['kernel']},"
        f" Python {host['python']}, libzmq {host['libzmq']}"
    )


def median_of(repeat: int) -> str:
    """The number of runs behind a figure."""
    return "one run" if repeat == 1 else f"median of {repeat} runs"


def spread(value: Spread, form: str) -> str:
    """The median, and the range when there was more than one run."""
    if value.low == value.high:
        return format(value.median, form)
    return f"{format(value.median, form)} ({format(value.low, form)} to {format(value.high, form)})"


def say_cut_short(cut_short: bool, seconds: float) -> None:
    """Report that a run was ended early, if one was."""
    if cut_short:
        click.echo(f"a run was ended after {seconds:g} seconds (--seconds), before it had sent or read everything")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Progress]]:
    """``begin(name, total)`` starts a bar and returns the function that advances it; nothing when no bar can be drawn."""
    if not can_draw():
        yield lambda _name, _total: lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The bar is drawn by a thread of its own. Drawing ten times a second would show in the figures.
    with Bars(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bars:

        def begin(name: str, total: int) -> Progress:
            for task in bars.task_ids:
                bars.remove_task(task)
            task = bars.add_task(name, total=total)
            return lambda done: bars.update(task, advance=done)

        yield begin
