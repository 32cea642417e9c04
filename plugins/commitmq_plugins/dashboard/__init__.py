"""The dashboard: pages for a browser, and the same as JSON under ``/api/v1``, from a process of its own.

Built by the hooks that third parties use. The process is a client of the node that reads without a group. :mod:`.api` has
what the pages show and do, :mod:`.pages` how they look; :mod:`.process` serves both. The section ``[plugins.dashboard]`` says
where it listens, and bounds what a page costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commitmq.config import NodeConfig, section_from, setting
from commitmq.extras import need
from commitmq.plugin.hookspecs import ConfigSection, WorkerSpec, hookimpl
from commitmq.security.start_rule import Listener

if TYPE_CHECKING:
    import click

PLUGIN = "dashboard"
JINJA_MODULES = ("jinja2", "markupsafe")


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """``enable`` turns the dashboard on. ``port``: 0 for a free one.

    ``names``: further host names under which browsers reach the dashboard, as behind a proxy: ``mq.example;mq2.example``.
    Requests for other names are refused.

    ``secret_login``: users of the node may log in by name and secret; off, only by links.

    ``threads`` requests of a page or a program work at a time, and each waits ``deadline_ms`` for a process of the node.
    What all pages share is read again when it is older than ``age_ms``. A look at messages ends after ``scan_messages``,
    ``scan_bytes`` or ``scan_ms``, and says so. ``resend_ms`` bounds a resend of dead letters. Histories have a sample every
    ``history_s`` seconds, 0 for none, and ``history_series`` topics and as many groups at most.
    """

    enable: bool = setting(False)
    host: str = setting("127.0.0.1")
    port: int = setting(7380, 0, 65_535)
    names: str = setting("")
    max_connections: int = setting(64, 1, 10_000)
    max_request_bytes: int = setting(16_384, 1_024, 1 << 20)
    max_body_bytes: int = setting(262_144, 1_024, 1 << 24)
    max_sessions: int = setting(1_000, 1, 100_000)
    max_sessions_per_user: int = setting(20, 1, 100_000)
    secret_login: bool = setting(True)
    timeout_ms: int = setting(30_000, 100, 3_600_000)
    threads: int = setting(8, 1, 256)
    deadline_ms: int = setting(2_000, 50, 60_000)
    age_ms: int = setting(2_000, 0, 60_000)
    scan_messages: int = setting(50_000, 1, 10_000_000)
    scan_bytes: int = setting(64 * 1024 * 1024, 1, 1 << 40)
    scan_ms: int = setting(2_000, 10, 60_000)
    resend_ms: int = setting(20_000, 100, 600_000)
    history_s: int = setting(60, 0, 3_600)
    history_series: int = setting(500, 1, 10_000)

    def host_names(self) -> frozenset[str]:
        """Lower-case names that the ``Host`` of a request may have, without ports."""
        own = {"localhost", "127.0.0.1", "[::1]", f"[{self.host}]" if ":" in self.host else self.host}
        more = (one.strip() for one in self.names.replace(",", ";").split(";"))
        return frozenset(one.lower() for one in (*own, *more) if one)


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
