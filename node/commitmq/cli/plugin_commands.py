"""Adds the commands of plugins to ``commitmq``.

Imported only when a plugin is installed and a verb is not the node's own.
"""

from __future__ import annotations

import click

from commitmq.cli.output import complain
from commitmq.extras import missing_for_node
from commitmq.plugin import loading as plugins


def add_to(group: click.Group, *, taken: set[str], only: str | None = None) -> None:
    """Call ``commitmq_register_commands`` of every plugin, or of the built-in one called ``only``. Verbs in ``taken`` are
    not replaced.

    Each plugin registers into a group of its own first, so that a plugin that raises half-way adds nothing.
    """
    loaded = (
        plugins.load() if only is None else plugins.load_each(one for one in plugins.candidates() if one.name == only)
    )
    for report in loaded.reports:
        own = click.Group()
        for _ in loaded.call("commitmq_register_commands", only=report.name, cli=own):
            for name, command in own.commands.items():
                if report.is_built_in and group.commands.get(name) is command:
                    continue  # it was asked for by its verb before
                if name in taken or name in group.commands:
                    complain(f"plugin {report.name}: there is a verb {name!r} already, the plugin's is omitted")
                else:
                    group.add_command(command, name)
        if report.is_built_in and missing_for_node():
            continue  # the node's own plugins add no verbs here, and a client need not have them
        if report.failure and report.failed_in in ("import", "registration", "commitmq_register_commands"):
            why = report.failure.strip().splitlines()[-1]
            complain(
                f"plugin {report.name} failed in {report.failed_in}: {why} (`commitmq plugins` shows the whole failure)"
            )
