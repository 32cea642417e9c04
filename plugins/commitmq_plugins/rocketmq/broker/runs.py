"""Runs of the clients' messages: collected for a turn of the loop, stored, and each request answered.

A run that the writer refuses because of one message is stored once more in parts, one for each request, so that no client's
message is refused because of another one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

import orjson

from commitmq.config import NodeConfig
from commitmq.format.message_id import offset_message_id
from commitmq.semantics.recall import RecallHandle
from commitmq_plugins.rocketmq.broker.append_lanes import AppendLanes
from commitmq_plugins.rocketmq.broker.codes import response_code
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node_line import Answer, LineLostError
from commitmq_plugins.rocketmq.broker.places import Places
from commitmq_plugins.rocketmq.broker.send_targets import RunKey
from commitmq_plugins.rocketmq.remoting.answer_form import AnswerForm
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.server import Connection

_RETRY: Final = "%RETRY%"


class Waiting:
    """A request whose messages are in a run. ``sizes``: bytes of its record, or of each of its records.

    ``answer`` takes the answer instead of the connection. ``is_inner_batch``: the messages are one record, with one unique id
    (remoting 3.2). ``counted``: the topics in whose statistics it counts, where they are others than its own; such a
    request has a run of its own.
    """

    __slots__ = ("answer", "command", "connection", "counted", "is_inner_batch", "sizes", "unique")

    def __init__(
        self,
        connection: Connection,
        command: Command,
        unique: str | None,
        sizes: int | list[int],
        answer: asyncio.Future[Command] | None = None,
        *,
        is_inner_batch: bool = False,
        counted: tuple[str, ...] = (),
    ) -> None:
        self.connection, self.command, self.unique, self.sizes, self.answer = connection, command, unique, sizes, answer
        self.is_inner_batch, self.counted = is_inner_batch, counted


Collected = tuple[list[Any], list[Waiting]]
"""Records, or all records of a batch as one buffer; one for each request."""


class Runs:
    """See the module."""

    def __init__(
        self, config: NodeConfig, lanes: AppendLanes, loop: asyncio.AbstractEventLoop, counting: Counting,
        fields: Mapping[str, str]
    ) -> None:  # fmt: skip
        """``fields``: of every answer to a send."""
        self._lanes, self._loop, self._counting, self._fields = lanes, loop, counting, fields
        self._network = config.network
        self._max_run_bytes = config.commit_log.max_run_bytes
        self._runs: dict[RunKey, Collected] = {}
        self._is_scheduled = False
        self._id_prefix = offset_message_id(config.network.store_host, config.network.store_port, 0)[:-16]
        self._form = AnswerForm(fields, ("msgId", "queueId", "queueOffset", "transactionId"))

    def add(self, key: RunKey, data: Any, waiting: Waiting) -> None:
        """Store the record or the records ``data`` with all others of this turn for the same queue."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = ([], [])
        run[0].append(data)
        run[1].append(waiting)
        if self._is_scheduled:
            return
        if self._lanes.is_lone:
            self.flush()
        else:
            self._is_scheduled = True
            self._loop.call_soon(self._end_turn)

    def add_alone(self, key: RunKey, data: Any, waiting: Waiting) -> None:
        """Store a record as a run of its own, after those before it: it may get another place."""
        self.flush()
        self._append(key, [data], [waiting])

    def send_batch(self, key: RunKey, fields: dict[str, Any], body: Any, waiting: Waiting) -> None:
        """Store a batch as one record."""
        if key.user:
            fields |= self._lanes.on_behalf_of("batch", key.user)
        began_s = monotonic()
        self._lanes.hand_over(
            key.role, "batch", fields, body, 1, lambda answer: self._stored(key, [body], [waiting], 1, answer, began_s)
        )

    def _end_turn(self) -> None:
        self._is_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send what the turn collected."""
        runs, self._runs = self._runs, {}
        for key, (data, requests) in runs.items():
            if len(requests) == 1 or sum(map(len, data)) <= self._max_run_bytes:
                self._append(key, data, requests)
            else:
                self._append_each(key, data, requests)

    def _append_each(self, key: RunKey, data: list[Any], requests: list[Waiting]) -> None:
        for one, request in zip(data, requests, strict=True):
            self._append(key, [one], [request])

    def _append(self, key: RunKey, data: list[Any], requests: list[Waiting]) -> None:
        count = 0
        for request in requests:
            sizes = request.sizes
            count += 1 if isinstance(sizes, int) else len(sizes)
        fields: dict[str, Any] = {
            "topic": key.topic,
            "queue": key.queue,
            "count": count,
            "ack": key.ack,
            "forwarded": 6 if key.v6 else 4,
        }
        if key.client:
            fields["client"] = key.client
        if key.user:
            fields |= self._lanes.on_behalf_of("append", key.user)
        run = data[0] if len(data) == 1 else b"".join(data)
        began_s = monotonic()
        self._lanes.hand_over(
            key.role, "append", fields, run, len(requests),
            lambda answer: self._stored(key, data, requests, count, answer, began_s),
        )  # fmt: skip

    # ------------------------------------------------------------ answers

    def _stored(
        self,
        key: RunKey,
        data: list[Any],
        requests: list[Waiting],
        count: int,
        found: Answer | LineLostError,
        began_s: float,
    ) -> None:
        """Answer the requests of a run."""
        if isinstance(found, LineLostError):
            self._counting.puts.failed += 1
            remark = f"service not available now. {found}"
            for one in requests:
                self._refuse(one, ResponseCode.SERVICE_NOT_AVAILABLE, remark)
            return
        answer = found[0]
        if answer["ok"]:
            code = ResponseCode.SUCCESS
        elif answer.get("outcome") == "stored":
            code = ResponseCode.FLUSH_DISK_TIMEOUT
        elif len(requests) > 1 and answer.get("code") == "MESSAGE_ILLEGAL" and answer.get("outcome") == "not_stored":
            self._append_each(key, data, requests)
            return
        else:
            self._counting.puts.failed += 1
            for one in requests:
                self._refuse(one, response_code(str(answer.get("code"))), str(answer.get("error")))
            return
        now_s = monotonic()
        self._counting.puts.add(now_s - began_s, now_s)
        first = requests[0]
        size = first.command.frame_bytes if first.is_inner_batch else sum(map(len, data))
        for topic in first.counted or (key.topic,):
            self._counting.stored(topic, count, size, len(requests))
        if code == ResponseCode.SUCCESS and "due_ms" not in answer:
            self._answer_plainly(key.queue, answer, requests)
        else:
            self._answer_with_all(key, answer, requests, code)

    def _answer_plainly(self, queue: int, answer: dict[str, Any], requests: list[Waiting]) -> None:
        places, offset = Places(answer), int(answer.get("queue_offset", 0))
        for one in requests:
            sizes = one.sizes
            if isinstance(sizes, int):
                ids, count = f"{self._id_prefix}{places.next(sizes):016X}", 1
            else:
                ids, count = self._ids(places, sizes), len(sizes)
            command = one.command
            if one.answer is not None or one.unique is None or one.is_inner_batch or command.is_oneway:
                self._reply(one, self._answer(one, ResponseCode.SUCCESS, ids, queue, offset))
            else:
                values = (f'"{ids}"'.encode(), b'"%d"' % queue, b'"%d"' % offset, orjson.dumps(one.unique))
                one.connection.send_frame(command.opaque, self._form.frame(command.opaque, values))
            offset += count

    def _answer_with_all(
        self, key: RunKey, answer: dict[str, Any], requests: list[Waiting], code: ResponseCode
    ) -> None:
        """Answers to messages that wait somewhere, or were not flushed in time."""
        places, offset = Places(answer), int(answer.get("queue_offset", 0))
        for one in requests:
            sizes = [one.sizes] if isinstance(one.sizes, int) else one.sizes
            said = self._answer(one, code, self._ids(places, sizes), key.queue, offset)
            if one.unique is not None and "due_ms" in answer and not key.topic.startswith(_RETRY):
                handle = RecallHandle(key.topic, self._network.broker_name, answer["due_ms"] + 1, one.unique)
                said.ext_fields["recallHandle"] = handle.encode()
            offset += len(sizes)
            self._reply(one, said)

    def _ids(self, places: Places, sizes: list[int]) -> str:
        prefix = self._id_prefix
        return ",".join([f"{prefix}{place:016X}" for place in places.next_of(sizes)])

    def _answer(self, one: Waiting, code: ResponseCode, ids: str, queue: int, offset: int) -> Command:
        fields = {**self._fields, "msgId": ids, "queueId": str(queue), "queueOffset": str(offset)}
        if one.unique is not None:
            fields["transactionId"] = one.unique
            if one.is_inner_batch:
                fields["batchUniqId"] = one.unique
        return one.command.answer(code, ext_fields=fields)

    def _refuse(self, one: Waiting, code: int, remark: str) -> None:
        self._reply(one, one.command.answer(code, remark, ext_fields=dict(self._fields)))

    @staticmethod
    def _reply(one: Waiting, answer: Command) -> None:
        if one.answer is not None:
            if not one.answer.done():
                one.answer.set_result(answer)
        else:
            one.connection.send(answer)
