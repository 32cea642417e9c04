"""LOCK_BATCH_MQ and UNLOCK_BATCH_MQ (remoting 6.4)."""

from __future__ import annotations

import time

from commitmq_plugins.rocketmq.broker.locks import QueueLocks
from commitmq_plugins.rocketmq.remoting.bodies.locks import LockBatchRequestBody, lock_answer
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue
from commitmq_plugins.rocketmq.remoting.places import place_of
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler


class LockRequests:
    """See the module."""

    def __init__(self, locks: QueueLocks, broker_name: str) -> None:
        self._locks, self._broker_name = locks, broker_name
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
        }

    def lock(self, connection: Connection, command: Command) -> Command:
        """Request 41."""
        body = LockBatchRequestBody.decode(command.body)
        wanted = [(one.topic, one.queue_id) for one in body.queues]
        now_ms = time.monotonic_ns() // 1_000_000
        owner = connection.user, body.client_id
        taken = self._locks.lock(body.consumer_group, owner, wanted, now_ms, place_of(connection.peer[0]))
        return command.answer(body=lock_answer(MessageQueue(topic, self._broker_name, queue) for topic, queue in taken))

    def unlock(self, connection: Connection, command: Command) -> Command:
        """Request 42."""
        body = LockBatchRequestBody.decode(command.body)
        owner = connection.user, body.client_id
        self._locks.unlock(body.consumer_group, owner, [(one.topic, one.queue_id) for one in body.queues])
        return command.answer()
