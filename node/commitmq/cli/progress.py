"""Progress bars on standard error, when one can be drawn; and a bar over bytes for verbs that read a whole store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from commitmq.extras import is_installed


def can_draw() -> bool:
    """True with a terminal and with rich, which draws the bars; a client may be installed without rich."""
    return sys.stderr.isatty() and is_installed("rich")


@contextlib.contextmanager
def byte_progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with (bytes done, total bytes). Shows nothing when ``quiet`` or without :func:`can_draw`."""
    if quiet or not can_draw():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def count_progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with (things done, their number). Shows nothing when ``quiet`` or without :func:`can_draw`."""
    if quiet or not can_draw():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
