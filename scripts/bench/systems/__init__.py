"""The systems that are compared: one module each, with a class that fulfils :class:`bench.system.System`."""

from __future__ import annotations

from importlib import import_module

from bench.system import System

# In the order of the tables; the first one is ours. Modules are loaded when they are asked for, because each may need
# libraries of its own.
SYSTEMS = {
    "commitmq": "bench.systems.commitmq:CommitMQ",
    "before": "bench.systems.before:Before",
    "rocketmq": "bench.systems.rocketmq:RocketMQ",
    "commitmq-rocketmq": "bench.systems.commitmq_rocketmq:CommitMQForRocketMQ",
    "kafka": "bench.systems.kafka:Kafka",
    "confluent": "bench.systems.confluent:Confluent",
    "redis": "bench.systems.redis:Redis",
    "nats": "bench.systems.nats:Nats",
}


def load(name: str) -> System:
    """The system called ``name`` in :data:`SYSTEMS`. Raises KeyError, and ImportError where a library is missing."""
    module, _, kind = SYSTEMS[name].partition(":")
    system: System = getattr(import_module(module), kind)()
    return system
