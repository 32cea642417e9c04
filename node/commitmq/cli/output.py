"""The output of every verb: tables for people, JSON for programs, errors as one sentence on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from commitmq.cli.streams import is_closed
from commitmq.supervision.exit_codes import CliExit

_Function = TypeVar("_Function", bound=Callable[..., Any])

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
