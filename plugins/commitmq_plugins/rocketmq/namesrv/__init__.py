"""RocketMQ's name server: which brokers there are, and which topics they have.

:mod:`.route_table` has the routes, :mod:`.requests` answers the requests and keeps what tools store here, :mod:`.process`
is the worker.
"""
