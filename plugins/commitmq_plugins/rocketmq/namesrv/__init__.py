"""RocketMQ's name server: which brokers there are, and which topics they have.

:mod:`.route_table` has the routes, :mod:`.kv_config` and :mod:`.config` what tools store here, :mod:`.requests` answers
the requests, :mod:`.process` is the worker.
"""
