"""rocketmq-namesrv: RocketMQ's name server, for this node and for any other broker that registers.

Owns the file of stored texts, ``kvConfig.json`` in its folder, and its certificate beside it (:mod:`.remoting.self_signed`). A
death loses the routes: brokers register again within 30 s, those of this node at once, and clients go on with the routes that
they have.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from commitmq.log import LimitedLog
from commitmq.plugin import WorkerContext, run_async
from commitmq_plugins.rocketmq.namesrv.requests import KVConfig, NamesrvConfig, NamesrvRequests
from commitmq_plugins.rocketmq.namesrv.route_table import RouteLimits, RouteTable
from commitmq_plugins.rocketmq.remoting.limits import limits_of, tls_of
from commitmq_plugins.rocketmq.remoting.server import Connection, RemotingServer
from commitmq_plugins.rocketmq.settings import RocketMQSettings

_MS: Final = 1_000_000


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings: RocketMQSettings = context.params["settings"]
    log = LimitedLog(context.log)
    path = context.folder / "kvConfig.json"
    config = NamesrvConfig(listen_port=settings.namesrv_port, kv_config_path=str(path))
    routes = RouteTable(RouteLimits(settings.max_brokers, settings.max_topic_routes, settings.max_route_bytes))
    requests = NamesrvRequests(routes, KVConfig(path), config, _now_ms, log)

    def closed(connection: Connection) -> None:
        for key in requests.channel_closed(connection):
            log.warning("a broker's connection ended", address=key.address)

    tls = tls_of(settings, context.folder, log)
    server = RemotingServer(requests.handle, closed, log, limits_of(settings), tls)
    port = await server.listen(settings.host, settings.namesrv_port)
    context.ready(endpoints=[f"tcp://{settings.host}:{port}"])
    context.log.info("RocketMQ's name server serves", host=settings.host, port=port)
    scanning = asyncio.create_task(_scan(routes, config, context))
    try:
        await stopping.wait()
    finally:
        scanning.cancel()
        await server.close()


async def _scan(routes: RouteTable, config: NamesrvConfig, context: WorkerContext) -> None:
    while True:
        await asyncio.sleep(config.scan_not_active_broker_interval / 1_000)
        for key, channel in routes.expire(_now_ms()):
            context.log.warning("a broker does not register any more", address=key.address)
            if isinstance(channel, Connection):
                channel.close()


def _now_ms() -> int:
    return time.monotonic_ns() // _MS
