"""``commitmq completion``: the lines that make a shell complete verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_PROGRAM = "commitmq"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Write the completion script for SHELL; the shell's start file evaluates it.

    \b
    Example: commitmq completion bash >> ~/.bashrc
    """
    from commitmq.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, _PROGRAM, "_COMMITMQ_COMPLETE").source())
