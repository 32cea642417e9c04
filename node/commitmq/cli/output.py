"""What every verb prints and asks: tables for people, JSON for programs, errors as one sentence on standard error.

Progress bars go to standard error, where one can be drawn. ``--watch [SECONDS]`` makes a verb look again and again until
Ctrl-C. Secrets come from standard input, never from an argument, which every account of the machine can read.

A standard stream that was closed when the command began (``>&-``, or a launcher that closes everything) is None in
Python, and the next opened file or socket gets its descriptor: output for a terminal would be written into that file. So
each closed stream is opened again, on ``/dev/null``. Input and output are opened for the other direction: using them
fails, and the verb reports which stream is closed. Standard error takes everything: no message can reach an operator.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click
from click.core import ParameterSource

from commitmq.extras import is_installed
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from rich.progress import Progress

    from commitmq.security.policy import Secret


def can_draw() -> bool:
    """True with a terminal and with rich, which draws the bars; a client may be installed without rich."""
    return sys.stderr.isatty() and is_installed("rich")


@contextlib.contextmanager
def drawn_bars(*columns: str, refreshes_per_s: float = 10) -> Iterator[Progress]:
    """Bars of rich on standard error, with ``columns`` (names of rich's classes) behind the words of each."""
    from rich import progress
    from rich.console import Console

    made = [getattr(progress, name)() for name in columns]
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        *made,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=refreshes_per_s,
    ) as bars:
        yield bars


BYTE_COLUMNS: Final = ("BarColumn", "DownloadColumn", "TimeRemainingColumn", "TransferSpeedColumn")


@contextlib.contextmanager
def _progress(what: str, *, columns: Sequence[str], quiet: bool) -> Iterator[Callable[[int, int], None]]:
    if quiet or not can_draw():
        yield lambda _done, _total: None
        return
    with drawn_bars(*columns) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


byte_progress = functools.partial(_progress, columns=BYTE_COLUMNS)
count_progress = functools.partial(_progress, columns=("BarColumn", "MofNCompleteColumn", "TimeRemainingColumn"))
"""Give a function to call with what is done and the total. They show nothing when ``quiet`` or without :func:`can_draw`."""


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


LEAST_S: Final = 0.05
"""Between two looks, whatever was asked for."""


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


def node_unless(store: object, node: str | None) -> str | None:
    """``node``, unless it comes from the environment and ``store`` is given: an option wins over the environment.

    Raises UsageError when both were given as options.
    """
    if store is None or node is None:
        return node
    if click.get_current_context().get_parameter_source("node") is ParameterSource.ENVIRONMENT:
        return None
    raise click.UsageError("give either a store's folder or --node ADDRESS")


def print_json(value: Any) -> None:
    """One JSON document on standard output, on one line, so that several of them are JSON lines."""
    from commitmq.protocol.wire import dumps

    sys.stdout.buffer.write(dumps(value) + b"\n")
    sys.stdout.flush()


def print_either(as_json: bool, value: Any, sentence: str) -> None:
    """``value`` as JSON, or ``sentence`` for a person."""
    if as_json:
        print_json(value)
    else:
        click.echo(sentence)


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


_Value = TypeVar("_Value")


def usage(read: Callable[[], _Value]) -> _Value:
    """What ``read`` returns; its ValueError is one of usage."""
    try:
        return read()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def read_secret() -> Secret:
    """The first line of standard input. Raises UsageError for what is no secret."""
    from commitmq.security.policy import Secret

    return usage(lambda: Secret(sys.stdin.readline(1_024).rstrip("\r\n")))
