"""The output of every verb: tables for people, JSON for programs, errors as one sentence on standard error.

Progress bars on standard error, when one can be drawn; and a bar over bytes for verbs that read a whole store.

Replaces standard streams that were closed when the command began (``>&-``, or a launcher that closes everything).

For such a stream Python has None, and the next opened file or socket gets its descriptor: output for a terminal would
be written into that file. So each closed stream is opened again, on ``/dev/null``. Input and output are opened for the
other direction: using them fails, and the verb reports which stream is closed. Standard error takes everything: no
message can reach a person.

``--watch [SECONDS]``: verbs that look again and again until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, TypeVar

import click
from click.core import ParameterSource

from commitmq.cli.quantity import seconds
from commitmq.extras import is_installed
from commitmq.supervision.exit_codes import CliExit


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


_stand_ins: set[int] = set()


def stand_in() -> None:
    """Replace each closed standard stream."""
    for fd, name, flags, mode in (
        (0, "stdin", os.O_WRONLY, "r"),
        (1, "stdout", os.O_RDONLY, "w"),
        (2, "stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is not None:
            continue
        found = os.open(os.devnull, flags)  # the lowest free number, which is ``fd``
        if found == fd:
            os.set_inheritable(fd, True)
            _stand_ins.add(fd)
        stream = open(found, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def is_closed(fd: int) -> bool:
    """Whether the standard stream ``fd`` was closed when the command began."""
    return fd in _stand_ins


def do_without() -> None:
    """From now on a closed stream fails nothing: output is discarded, and input is empty."""
    for fd in _stand_ins:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd)
        os.close(null)


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


DEFAULT_NODE = "tcp://127.0.0.1:7310"


def node_option(function: _Function) -> _Function:
    """``--node ADDRESS``: the admin address of the node a client verb talks to."""
    return click.option(
        "--node",
        metavar="ADDRESS",
        default=DEFAULT_NODE,
        show_default=True,
        envvar="COMMITMQ_NODE",
        help="Admin address of the node.",
    )(function)


def node_unless(store: object, node: str | None) -> str | None:
    """``node``, unless it comes from the environment and ``store`` is given: an option wins over the environment.

    Raises UsageError when both were given as options.
    """
    if store is None or node is None:
        return node
    if click.get_current_context().get_parameter_source("node") is ParameterSource.ENVIRONMENT:
        return None
    raise click.UsageError("give either a store's folder or --node ADDRESS")


def json_option(function: _Function) -> _Function:
    """``--json``: machine-readable output; the parameter is called ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Write JSON.")(function)


def print_json(value: Any) -> None:
    """One JSON document on standard output, on one line, so that several of them are JSON lines."""
    from commitmq.protocol.wire import dumps

    sys.stdout.buffer.write(dumps(value) + b"\n")
    sys.stdout.flush()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, left: Sequence[int] = (0,)) -> None:
    """Aligned columns; those with an index in ``left`` are left-aligned, all others right."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    for row in cells:
        line = "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo(line.rstrip())


def human_bytes(count: int | None) -> str:
    """``count`` bytes in the largest binary unit that keeps a digit before the point; ``-`` for None."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def yes_option(function: _Function) -> _Function:
    """``--yes``: for :func:`ask_before`."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(function)


def ask_before(what: str, yes: bool) -> None:
    """Ask whether to do ``what``, as in "delete topic orders", unless ``yes``. Raises UsageError where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"standard input is no terminal, so the command cannot ask; give --yes to {what}")
    confirm(f"{what[0].upper()}{what[1:]}?")


def confirm(question: str) -> None:
    """Continue only after a yes. Raises click's Abort, and UsageError when standard input is closed."""
    if is_closed(0):
        raise click.UsageError(
            "standard input is closed, so the command cannot ask; --yes continues without a question"
        )
    click.confirm(question, abort=True)


def complain(sentence: str) -> None:
    """An error or warning for the person at the terminal."""
    click.echo(f"commitmq: {sentence}", err=True)


def fail(sentence: str, code: CliExit = CliExit.FAILURE) -> NoReturn:
    """Print the reason and exit with ``code``."""
    complain(sentence)
    raise SystemExit(int(code))
