"""CommitMQ beside RocketMQ, Kafka, Redis and NATS: the same work for each of them on this machine, in one run.

``scripts/bench/run`` is the command. :mod:`bench.system` is what a system must offer, ``systems`` has one module for each,
``drivers`` the clients in Python (``java`` and ``go`` those in other languages), :mod:`bench.workloads` what is measured.
"""
