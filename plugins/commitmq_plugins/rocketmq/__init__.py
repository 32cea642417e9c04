"""RocketMQ's remoting protocol: its clients, its tools and its brokers connect to the node, unmodified.

Built by the hooks that third parties use. :mod:`.remoting` has the protocol, :mod:`.broker` the server of producers, consumers
and tools, :mod:`.namesrv` the name server; each server is a worker process. :mod:`.doctor` is a verb of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commitmq.config import NodeConfig, section_from
from commitmq.plugin.hookspecs import ConfigSection, WorkerSpec, hookimpl
from commitmq.security.start_rule import Listener
from commitmq_plugins.rocketmq.settings import PLUGIN, RocketMQSettings

if TYPE_CHECKING:
    import click


@hookimpl
def commitmq_config() -> ConfigSection:
    """The section ``[plugins.rocketmq]``."""
    return ConfigSection(PLUGIN, RocketMQSettings)


@hookimpl
def commitmq_workers(config: NodeConfig) -> list[WorkerSpec]:
    """The broker server and the name server, when ``enable`` is on."""
    found: RocketMQSettings = section_from(RocketMQSettings, config.plugins.get(PLUGIN, {}), f"plugins.{PLUGIN}")
    if not found.enable:
        return []
    encrypts = found.tls_mode == "enforcing"
    broker = "commitmq_plugins.rocketmq.broker.process:run"
    port = config.network.store_port
    ports = (port, port - 2) if found.vip_port and port > 2 else (port,)
    remedy = "make users (`commitmq user add`) and set plugins.rocketmq.tls_mode=enforcing"
    listener = Listener(
        "rocketmq",
        found.host,
        encrypts,
        True,
        open_without_users=True,
        ports=ports,
        setting="network.store_port",
        remedy=remedy,
        is_vital=True,
    )
    workers = [WorkerSpec("rocketmq_broker", broker, is_server=True, listeners=(listener,))]
    if found.namesrv_port:
        name_server = "commitmq_plugins.rocketmq.namesrv.process:run"
        ports, setting = (found.namesrv_port,), "plugins.rocketmq.namesrv_port"
        # It asks nobody, as RocketMQ's.
        remedy = "have no name server (plugins.rocketmq.namesrv_port=0)"
        listener = Listener(
            "rocketmq_namesrv", found.host, encrypts, ports=ports, setting=setting, remedy=remedy, is_vital=True
        )
        workers.insert(0, WorkerSpec("rocketmq_namesrv", name_server, is_server=True, listeners=(listener,)))
    return workers


@hookimpl
def commitmq_register_commands(cli: click.Group) -> None:
    """The verb ``rocketmq``."""
    from commitmq_plugins.rocketmq.doctor.command import rocketmq

    cli.add_command(rocketmq)
