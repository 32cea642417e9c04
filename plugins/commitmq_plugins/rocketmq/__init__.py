"""RocketMQ's remoting protocol: its clients, its tools and its brokers connect to the node, unmodified.

Built by the hooks that third parties use. :mod:`.remoting` has the protocol, :mod:`.broker` the server of producers, consumers
and tools, :mod:`.namesrv` the name server; each server is a worker process. The section ``[plugins.rocketmq]`` says where they
are found. :mod:`.doctor` is a verb of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commitmq.config import NodeConfig, section_from, setting
from commitmq.plugin.hookspecs import ConfigSection, WorkerSpec, hookimpl
from commitmq.security.start_rule import Listener

if TYPE_CHECKING:
    import click

PLUGIN = "rocketmq"


@dataclass(frozen=True, slots=True)
class RocketMQSettings:
    """``enable`` turns the broker server on, and with ``namesrv_port`` the name server.

    The broker's port is ``network.store_port``, which is part of every message's id: clients look messages up there. An empty
    ``advertised_host`` is ``network.store_host`` for the same reason. ``namesrv_port``: 0 for no name server of its own.
    ``namesrv``: other name servers with which the broker registers, ``host:port;host:port``. Broker and cluster have the
    names of ``network.broker_name`` and ``network.cluster_name``.

    ``max_groups_per_connection`` and ``max_topics_per_connection`` bound what is new to the node and made by one connection,
    ``max_new_names_per_second`` what all connections of one address make of both. ``max_memberships_per_connection`` counts
    the groups of consumers and of producers that one connection is in, known ones too, and ``max_memberships_per_address``
    those of all connections of one address; ``max_waiting_pulls_per_connection``
    and ``max_waiting_pops_per_connection`` its requests that wait for messages; ``max_locks_per_address`` locks of ordered
    queues. ``max_brokers``, ``max_topic_routes`` (one for each topic of each broker) and ``max_route_bytes`` bound what the
    name server keeps of all brokers. 0 means no limit for ``max_connections_per_address`` and ``max_new_names_per_second``.

    ``recall_message_enable``, ``store_reply_message_enable`` and ``trace_topic_enable`` are RocketMQ's recallMessageEnable,
    storeReplyMessageEnable and traceTopicEnable. ``tls_mode`` is its tlsMode: without ``tls_certificate`` and ``tls_key``
    each server makes a self-signed certificate when it starts first, and uses it again.
    """

    enable: bool = setting(False)
    host: str = setting("127.0.0.1")
    vip_port: bool = setting(True)
    namesrv_port: int = setting(9876, 0, 65_535)
    namesrv: str = setting("")
    advertised_host: str = setting("")
    tls_mode: str = setting("permissive", choices=("disabled", "permissive", "enforcing"))
    tls_certificate: str = setting("")
    tls_key: str = setting("")
    max_connections: int = setting(2_000, 1, 1_000_000)
    max_connections_per_address: int = setting(0, 0, 1_000_000)
    max_frame_bytes: int = setting(16 * 1024 * 1024, 4_096, 1 << 30)
    max_unsent_bytes: int = setting(16 * 1024 * 1024, 65_536, 1 << 40)
    max_groups_per_connection: int = setting(256, 1, 1_000_000)
    max_topics_per_connection: int = setting(256, 1, 1_000_000)
    max_new_names_per_second: int = setting(20, 0, 1_000_000)
    max_memberships_per_connection: int = setting(2_048, 1, 1_000_000)
    max_memberships_per_address: int = setting(8_000, 1, 10_000_000)
    max_waiting_pulls_per_connection: int = setting(4_096, 1, 1_000_000)
    max_waiting_pops_per_connection: int = setting(1_024, 1, 1_000_000)
    max_locks_per_address: int = setting(50_000, 1, 200_000)
    max_brokers: int = setting(1_000, 1, 100_000)
    max_topic_routes: int = setting(200_000, 1, 10_000_000)
    max_route_bytes: int = setting(128 * 1024 * 1024, 1 << 20, 1 << 40)
    idle_timeout_ms: int = setting(120_000, 1_000, 86_400_000)
    recall_message_enable: bool = setting(True)
    store_reply_message_enable: bool = setting(True)
    trace_topic_enable: bool = setting(False)

    def check(self) -> None:
        """Raises ValueError."""
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("plugins.rocketmq.tls_certificate and tls_key go together: name both files, or neither")
        for one in self.name_servers():
            host, _, port = one.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"plugins.rocketmq.namesrv: {one!r} is no host:port")

    def name_servers(self) -> list[str]:
        """The other name servers."""
        return [one.strip() for one in self.namesrv.replace(",", ";").split(";") if one.strip()]


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
        name_server = "commitmq_plugins.rocketmq.namesrv:run"
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
    from commitmq_plugins.rocketmq.doctor import rocketmq

    cli.add_command(rocketmq)
