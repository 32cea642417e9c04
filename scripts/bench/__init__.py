"""CommitMQ beside RocketMQ, Kafka, Redis and NATS: the same work for each of them on this machine, in one run.

``scripts/bench/run`` is the command. :mod:`bench.system` is the interface of a system, and ``systems`` has one module
for each. ``drivers`` has the clients in Python; ``java`` and ``go`` have those in other languages.
:mod:`bench.workloads` lists the measurements.
"""
