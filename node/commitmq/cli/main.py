"""Entry point of ``commitmq``: a table of verbs whose modules are imported only when used.

``commitmq --help`` must answer in under 200 ms, so the one-line summaries are here and not in the verbs' modules; a
test checks that both are equal.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version

import click

from commitmq.errors import (
    CommitMQError,
    ConfigError,
    NodeUnavailableError,
    StoreError,
    StoreLockedError,
)
from commitmq.files.disk_space import NO_SPACE
from commitmq.supervision.exit_codes import MEANINGS, CliExit

# verb -> one-line summary. The module is commitmq.cli.VERB, and its click command is also called VERB (see _MODULES).
VERBS = {
    "start": "Start a node on a store folder.",
    "stop": "Stop a node; returns when everything is flushed.",
    "status": "Show a node's processes, positions and lags.",
    "doctor": "Examine a node: one page of findings, with advice.",
    "top": "Show topics by rate and groups by lag, again and again.",
    "metrics": "Print the samples of a node's /metrics.",
    "drain": "Refuse sends, or take them again, for maintenance.",
    "config": "Show a node's settings; change some of them at once.",
    "topic": "Create, list, describe and delete topics.",
    "produce": "Send lines or JSON lines to a topic.",
    "consume": "Read messages of a topic.",
    "query": "Find messages by key, unique key, tag, id, offset or time.",
    "trace": "Show the trace of one message.",
    "group": "List consumer groups and their lag.",
    "client": "List who is connected to a node.",
    "export": "Write a node's topics, groups and users to a file.",
    "import": "Give a node the topics, groups and users of a file.",
    "dlq": "List dead letters, send them again, give them up.",
    "delayed": "List messages that wait for their time; cancel one.",
    "store": "Inspect, repair and expire a store folder.",
    "bench": "Measure a running node.",
    "plugins": "List plugins and the parts that they add.",
    "dispatcher": "List dispatchers; move one that is stuck.",
    "transaction": "List open transactions; end one manually.",
    "user": "Add, change, delete and list users.",
    "acl": "Allow and deny what users do.",
    "audit": "Show who changed what, and who was refused.",
    "support": "Collect what helps to find a node's problem.",
    "completion": "Write the completion script of a shell.",
    "keys": "Make a node's keys, for encrypted connections.",
}

# Modules whose verbs are words of Python.
_MODULES = {"import": "import_"}

# Verbs that built-in plugins add through the hook; their summaries are here so that --help need not load the plugins, and
# their plugins so that such a verb loads no other one.
BUILT_IN_VERBS = {
    "pipeline": "Spark jobs over stores and nodes.",
    "rocketmq": "Examine a cluster of RocketMQ's protocol.",
    "dashboard": "Show the address of a node's dashboard.",
}

VERB_PLUGINS = {
    "pipeline": "commitmq_plugins.spark",
    "rocketmq": "commitmq_plugins.rocketmq",
    "dashboard": "commitmq_plugins.dashboard",
}

# The same values as in commitmq.plugin.loading, which is too heavy to import here.
ENTRY_POINT_GROUP = "commitmq"
PLUGINS_VARIABLE = "COMMITMQ_PLUGINS"

_EPILOG = "Exit codes: " + "; ".join(f"{int(code)} {meaning}" for code, meaning in MEANINGS.items()) + "."


class LazyGroup(click.Group):
    """A group that knows its commands' summaries without importing them."""

    _asked_plugins = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._ask_plugins()
        return [*VERBS, *BUILT_IN_VERBS, *(name for name in super().list_commands(ctx) if name not in BUILT_IN_VERBS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in BUILT_IN_VERBS:
            if cmd_name not in self.commands:
                import_module("commitmq.cli.plugin_commands").add_to(
                    self, taken=set(VERBS), only=VERB_PLUGINS[cmd_name]
                )
            return super().get_command(ctx, cmd_name)
        if cmd_name not in VERBS:
            self._ask_plugins()
            return super().get_command(ctx, cmd_name)
        module = _MODULES.get(cmd_name, cmd_name)
        command = getattr(import_module(f"commitmq.cli.{module}"), module)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click looks up near misses by importing every command; this table needs no import.
        if args and args[0] not in VERBS and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"there is no verb {args[0]!r}; verbs are {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self._ask_plugins()
        with formatter.section("Verbs"):
            formatter.write_dl([*VERBS.items(), *BUILT_IN_VERBS.items()])
        added = [(name, one) for name, one in sorted(self.commands.items()) if name not in BUILT_IN_VERBS]
        if added:
            with formatter.section("Verbs of plugins"):
                formatter.write_dl([(name, one.get_short_help_str()) for name, one in added])

    def _ask_plugins(self) -> None:
        """Let the plugins add their commands, once. Nothing is imported when no plugin is installed."""
        if not self._asked_plugins:
            installed = os.environ.get(PLUGINS_VARIABLE) or any(True for _ in entry_points(group=ENTRY_POINT_GROUP))
            if installed:
                self._asked_plugins = True
                import_module("commitmq.cli.plugin_commands").add_to(self, taken=set(VERBS))


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    try:
        click.echo(f"commitmq {version('commitmq')}")
    except PackageNotFoundError:
        click.echo("commitmq (not installed)")
    ctx.exit()


@click.group(cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """A message storage node whose files are RocketMQ's, byte for byte."""


def exit_code_of(error: CommitMQError) -> CliExit:
    """The exit code with which a typed error ends a verb."""
    if isinstance(error, ConfigError):
        return CliExit.CONFIG_ERROR
    if isinstance(error, StoreLockedError):
        return CliExit.STORE_LOCKED
    if isinstance(error, StoreError):
        return CliExit.STORE_UNUSABLE
    if isinstance(error, NodeUnavailableError):
        return CliExit.NODE_UNAVAILABLE
    return CliExit.FAILURE


# Errors of writing to standard output: a full disk (or /dev/full), a quota, a broken device, a closed descriptor.
_OUTPUT_PROBLEMS = (*NO_SPACE, errno.EFBIG, errno.EIO, errno.EBADF)


def _run(words: list[str]) -> object:
    """Run the verb in ``words``. Returns its exit code or None. (click's own main turns a closed pipe into exit code 1.)"""
    cli._main_shell_completion({}, "commitmq")
    try:
        with cli.make_context("commitmq", words) as context:
            return cli.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code


def _drop_output() -> None:
    """Discard the rest of the output: Python would report the same error again while it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit: every typed error becomes one sentence and its exit code, never a traceback."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        import_module("commitmq.cli.output").stand_in()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # the name of a file may be no text: it is written as it is
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        try:
            code = _run(words)
        finally:
            sys.stdout.flush()
    except click.exceptions.Abort:
        sys.exit(CliExit.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CommitMQError as error:
        click.echo(f"commitmq: {error}", err=True)
        sys.exit(exit_code_of(error))
    except (KeyboardInterrupt, EOFError):
        sys.exit(CliExit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of this command's output (head, less) has gone.
        _drop_output()
        sys.exit(CliExit.OK)
    except OSError as error:
        if error.errno not in _OUTPUT_PROBLEMS or error.filename is not None:
            raise
        _drop_output()
        reason = "standard output is closed" if error.errno == errno.EBADF else error.strerror
        click.echo(f"commitmq: the output cannot be written: {reason}", err=True)
        sys.exit(CliExit.FAILURE)
    sys.exit(code if isinstance(code, int) else CliExit.OK)


if __name__ == "__main__":
    main()
