"""``/metrics`` for Prometheus and ``/health`` for whoever starts and watches nodes, from a process of its own.

Built by the hooks that third parties use. The process is a client of the node and reads its shared memory; the node's own
processes only count, each in a table of its own (:mod:`commitmq.counting`).
"""

from __future__ import annotations

from commitmq.config import NodeConfig
from commitmq.plugin.hookspecs import WorkerSpec, hookimpl
from commitmq.security.start_rule import Listener


@hookimpl
def commitmq_workers(config: NodeConfig) -> list[WorkerSpec]:
    """The process ``worker-metrics``, when ``metrics.enable`` is on."""
    if not config.metrics.enable:
        return []
    found = config.metrics
    asks = bool(found.token_file)
    listeners = (Listener("metrics", found.host, asks=asks, ports=(found.port,), setting="metrics.port"),)
    return [WorkerSpec("metrics", "commitmq_plugins.metrics.process:run", listeners=listeners)]
