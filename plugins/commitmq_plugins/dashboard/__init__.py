"""The dashboard: pages for a browser, and the same as JSON under ``/api/v1``, from a process of its own.

Built by the hooks that third parties use. The process is a client of the node that reads without a group. :mod:`.api` has
what the pages show and do, :mod:`.pages` how they look; :mod:`.process` serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commitmq.config import NodeConfig, section_from
from commitmq.extras import need
from commitmq.plugin.hookspecs import ConfigSection, WorkerSpec, hookimpl
from commitmq.security.start_rule import Listener
from commitmq_plugins.dashboard.settings import JINJA_MODULES, PLUGIN, DashboardSettings

if TYPE_CHECKING:
    import click


@hookimpl
def commitmq_config() -> ConfigSection:
    """The section ``[plugins.dashboard]``."""
    return ConfigSection(PLUGIN, DashboardSettings)


@hookimpl
def commitmq_workers(config: NodeConfig) -> list[WorkerSpec]:
    """The process ``worker-dashboard``, when ``enable`` is on. Raises MissingExtraError, which ``status`` shows."""
    found: DashboardSettings = section_from(DashboardSettings, config.plugins.get(PLUGIN, {}), f"plugins.{PLUGIN}")
    if not found.enable:
        return []
    need("the dashboard", "dashboard", JINJA_MODULES)
    # A node with users asks each visitor for a login, and nothing is encrypted: off loopback only by the word.
    listener = Listener(
        "dashboard",
        found.host,
        asks=True,
        open_without_users=True,
        ports=(found.port,),
        setting="plugins.dashboard.port",
    )
    return [WorkerSpec("dashboard", "commitmq_plugins.dashboard.process:run", listeners=(listener,))]


@hookimpl
def commitmq_register_commands(cli: click.Group) -> None:
    """The verb ``dashboard``."""
    from commitmq_plugins.dashboard.command import dashboard

    cli.add_command(dashboard)
