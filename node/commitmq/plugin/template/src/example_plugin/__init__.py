"""The parts that this plugin adds to a node: settings, a dispatcher and a verb of the command line.

A node imports this module at its start, in a process that only asks for the hooks; the command line imports it too. So it
stays light: the dispatcher and the command are named here, and imported where they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commitmq.plugin import ConfigSection, DispatcherSpec, hookimpl, setting

if TYPE_CHECKING:
    import click

    from commitmq.plugin import NodeConfig

COMMITMQ_HOOK_API = 1


@dataclass(frozen=True, slots=True)
class ExamplePluginConfig:
    """The section ``[plugins.example_plugin]``."""

    largest_body_bytes: int = setting(0, low=0)


@hookimpl
def commitmq_config() -> ConfigSection:
    return ConfigSection("example_plugin", ExamplePluginConfig)


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    return [DispatcherSpec("example_plugin", "example_plugin.dispatcher:ExamplePlugin")]


@hookimpl
def commitmq_register_commands(cli: click.Group) -> None:
    from example_plugin.command import command

    cli.add_command(command)
