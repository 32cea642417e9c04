"""Sends: SEND_MESSAGE, SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE (remoting 3.1 to 3.6).

All messages that were read from the sockets in one turn of the loop, and belong to the same queue, go to the writer as one
run. A message that waits somewhere first (a delay, a timer, a half message) is a run of its own, because it may have a
place of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import Host, Property, SysFlag
from commitmq.format.message_id import offset_message_id, pack_host
from commitmq.format.properties import decode_properties, encode_properties
from commitmq.log import Log
from commitmq.semantics.recall import RecallHandle
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, MessageIllegalError, RunCheck
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, STORAGE_MEMORY, STORAGE_TYPE, TopicConfig
from commitmq_plugins.rocketmq.broker.allowances import Allowances
from commitmq_plugins.rocketmq.broker.batch_body import elements
from commitmq_plugins.rocketmq.broker.codes import refusal_of, response_code
from commitmq_plugins.rocketmq.broker.counting import Counting, counted_topics
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.node_line import Answer, LineLostError
from commitmq_plugins.rocketmq.broker.places import Places, count_of
from commitmq_plugins.rocketmq.broker.retries import Retries
from commitmq_plugins.rocketmq.broker.send_refusal import FAQ, SEND_FIELDS, Refusal, check_name
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.sending import SendMessageRequestHeader, decode_send
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_MAX_TIMEOUT_S: Final = 15.0
_COMPRESSION: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
_TRANSACTION: Final = 0xC
_SPECIAL: Final = frozenset(SPECIAL_PROPERTIES)
_RETRY: Final = "%RETRY%"
_WAITED: Final = ("TRAN_MSG", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY",
                  "INNER_NUM", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "__PSEQ__")  # fmt: skip
"""What a message has that waited somewhere, or was stored in a special way. A consumer sends it back with all of that."""


class _Waiting(NamedTuple):
    """A request whose messages are in a run: ``sizes`` has the bytes of each record."""

    connection: Connection
    command: Command
    topic: str
    queue: int
    unique: str | None
    sizes: list[int]
    answer: asyncio.Future[Command] | None = None
    """Takes the answer instead of the connection."""
    is_inner_batch: bool = False
    """Whether the messages are one record, with one unique id (remoting 3.2)."""
    counted: tuple[str, ...] = ()  # the topics in whose statistics it counts; none: its own


class _Key(NamedTuple):
    """What all records of a run have in common. ``number`` tells apart runs that must not be put together; ``client`` is
    the sender, where senders have rates.
    """

    role: str
    topic: str
    queue: int
    ack: str
    v6: bool
    number: int
    client: str


class Sends:
    """See the module."""

    def __init__(self, node: Node, topics: Topics, retries: Retries, allowances: Allowances,
                 loop: asyncio.AbstractEventLoop, log: Log, counting: Counting) -> None:  # fmt: skip
        self._counting, self._allowances = counting, allowances
        self._node, self._topics, self._retries, self._loop, self._log = node, topics, retries, loop, log
        config = node.config
        self._network = config.network
        host = Host(config.network.store_host, config.network.store_port)
        self._check = RunCheck(
            store_host=pack_host(host),
            max_message_bytes=config.commit_log.max_message_bytes,
            properties_crc=config.commit_log.append_properties_crc,
        )
        self._is_sync = config.commit_log.flush_mode == "sync"
        self._max_run_bytes = config.commit_log.max_run_bytes
        self._marks = {"CLUSTER": config.network.cluster_name, **SEND_FIELDS}
        self.expects_reply: Callable[[dict[str, str]], None] = lambda properties: None
        """Is called with the properties of each request whose sender waits for a reply."""
        self._runs: dict[_Key, tuple[list[bytes | bytearray], list[_Waiting]]] = {}
        self._number = 0
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.SEND_MESSAGE: self.handle,
            RequestCode.SEND_MESSAGE_V2: self.handle,
            RequestCode.SEND_BATCH_MESSAGE: self.handle,
        }

    # ------------------------------------------------------------ requests

    def handle(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Take one send. Its answer is sent when the messages are stored."""
        header = decode_send(command.ext_fields)
        topic = self._topics.get(header.topic)
        if topic is None or header.topic.startswith(_RETRY):
            return self._handle_slowly(connection, command, header, topic)
        try:
            self._put(connection, command, header, topic)
        except Refusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        return None

    async def _handle_slowly(
        self, connection: Connection, command: Command, header: SendMessageRequestHeader, topic: TopicConfig | None
    ) -> Command | None:
        """A send to a topic that has to be made first, or to a retry topic."""
        try:
            if header.topic.startswith(_RETRY):
                if header.batch or command.code == RequestCode.SEND_BATCH_MESSAGE:
                    raise Refusal(
                        ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {header.topic}"
                    )
                topic = await self._retries.place(connection, header, command.version)
            elif topic is None:
                topic = await self._created(connection, header)
            self._put(connection, command, header, topic)
        except Refusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        except ProtocolError as error:
            return command.answer(*refusal_of(error), ext_fields=dict(SEND_FIELDS))
        return None

    async def _created(self, connection: Connection, header: SendMessageRequestHeader) -> TopicConfig:
        """The topic of a send, made if its template lets sends make topics. Raises Refusal, ProtocolError."""
        check_name(header.topic)
        template = self._topics.template(header.default_topic)
        if template is None:
            raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please!{FAQ}")
        self._allowances.topic(connection, header.topic)
        most, perm = template
        return await self._topics.create(header.topic, max(1, min(header.default_topic_queue_nums, most)), perm=perm)

    async def stored(
        self,
        connection: Connection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig,
        body: bytes,
    ) -> Command:
        """Store one message; its answer. Raises Refusal."""
        answer: asyncio.Future[Command] = self._loop.create_future()
        one = replace(command, body=body, code=int(RequestCode.SEND_MESSAGE))
        self._put(connection, one, header, topic, answer)
        return await answer

    # ------------------------------------------------------------ runs

    def _put(
        self,
        connection: Connection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig,
        answer: asyncio.Future[Command] | None = None,
    ) -> None:
        """Put the messages of a request into a run. Raises Refusal."""
        queue = header.queue_id
        if queue >= max(topic.write_queues, topic.read_queues):
            raise Refusal(ResponseCode.INVALID_PARAMETER, f"request queueId[{queue}] is illegal, {topic.to_json()}")
        if queue < 0:
            queue = random.randrange(max(1, topic.write_queues))
        is_batch = header.batch or command.code == RequestCode.SEND_BATCH_MESSAGE
        born_host = _born_host(*connection.peer)
        properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
        if "TIMER_OUT_MS" in properties or header.topic.startswith((_RETRY, "%DLQ%")):
            properties = {name: value for name, value in properties.items() if name not in _WAITED}
        role = "memory" if topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY else "writer"
        ack = "memory" if not self._is_sync or properties.get("WAIT") == "false" else "flushed"
        number = 0
        if is_batch and topic.attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH:
            self._send_inner_batch(connection, command, header, queue, properties, ack)
            return
        if is_batch:
            records = self._batch_records(header, queue, command.body, born_host)
        else:
            if Property.REPLY_TO_CLIENT in properties:
                self.expects_reply(properties)
            records = [self._record(header, queue, command.body, properties, born_host)]
            if not _SPECIAL.isdisjoint(properties):
                self._number = number = self._number + 1
        key = _Key(role, header.topic, queue, ack, len(born_host) == 20, number, self._client(connection))
        unique = properties.get(Property.UNIQUE_KEY)
        sizes = [len(record) for record in records]
        counted = counted_topics(topic.name, properties) if number else ()
        self._add(
            key, records, _Waiting(connection, command, topic.name, queue, unique, sizes, answer, counted=counted)
        )

    def _record(
        self,
        header: SendMessageRequestHeader,
        queue: int,
        body: Any,
        properties: dict[str, str],
        born_host: bytes,
    ) -> bytearray:
        """A single message; its properties get what a broker adds (spec 5.4)."""
        for name in ("POP_CK", Property.CRC32):
            properties.pop(name, None)
        if Property.UNIQUE_KEY not in properties:
            properties[Property.UNIQUE_KEY] = self._retries.unique_id()
        properties.update(self._marks)
        try:
            encoded = encode_properties(properties)
        except InvalidMessageError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        return self._encoded(header, queue, body, encoded, header.flag, born_host)

    def _encoded(
        self, header: SendMessageRequestHeader, queue: int, body: Any, properties: bytes, flag: int, born_host: bytes
    ) -> bytearray:
        sys_flag = header.sys_flag & _COMPRESSION if header.sys_flag & SysFlag.COMPRESSED else 0
        try:
            return self._check.encode(
                header.topic.encode(),
                queue,
                body,
                properties,
                sys_flag=sys_flag,
                flag=flag,
                born_timestamp=max(0, header.born_timestamp),
                born_host=born_host,
                reconsume_times=max(0, header.reconsume_times or 0),
                checked=True,
            )
        except MessageIllegalError as error:
            raise Refusal(
                ResponseCode.MESSAGE_ILLEGAL,
                "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
                f"{self._check.max_message_bytes}B, msg properties length limit 32KB. {error}",
            ) from error

    def _batch_records(
        self, header: SendMessageRequestHeader, queue: int, body: Any, born_host: bytes
    ) -> list[bytes | bytearray]:
        """A record of each message of a batch, whose property bytes stay as they are (spec 2.8). Raises Refusal."""
        if header.sys_flag & _TRANSACTION:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be part of a transaction")
        records: list[bytes | bytearray] = []
        try:
            for flag, one, properties in elements(body):
                records.append(self._encoded(header, queue, one, properties, flag, born_host))
        except InvalidMessageError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        if not records:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
        return records

    def _client(self, connection: Connection) -> str:
        """For whose rates a send counts, where clients have any: messages of several clients are several runs then."""
        flow = self._node.config.flow
        return connection.name if flow.client_send_messages_per_s or flow.client_send_bytes_per_s else ""

    def _add(self, key: _Key, records: list[bytes | bytearray], waiting: _Waiting) -> None:
        if not self._runs:
            self._loop.call_soon(self._flush)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = ([], [])
        run[0].extend(records)
        run[1].append(waiting)

    def _flush(self) -> None:
        """Send what the turn collected to the writer."""
        runs, self._runs = self._runs, {}
        for key, (records, requests) in runs.items():
            data = b"".join(records)
            if len(data) <= self._max_run_bytes or len(requests) == 1:
                self._append(key, data, len(records), requests)
                continue
            at = 0
            for one in requests:
                mine = records[at : at + len(one.sizes)]
                at += len(one.sizes)
                self._append(key, b"".join(mine), len(mine), [one])

    def _append(self, key: _Key, run: bytes, count: int, requests: list[_Waiting]) -> None:
        fields: dict[str, Any] = {
            "topic": key.topic,
            "queue": key.queue,
            "count": count,
            "ack": key.ack,
            "forwarded": 6 if key.v6 else 4,
        }
        if key.client:
            fields["client"] = key.client
        future = self._node.line(key.role).request("append", fields, (run,), timeout_s=_MAX_TIMEOUT_S)
        future.add_done_callback(lambda done: self._stored(done, requests))

    def _send_inner_batch(
        self,
        connection: Connection,
        command: Command,
        header: SendMessageRequestHeader,
        queue: int,
        properties: dict[str, str],
        ack: str,
    ) -> None:
        """A batch that stays one record, for a topic of BatchCQ."""
        fields = {
            "topic": header.topic,
            "queue": queue,
            "count": count_of(command.body),
            "properties": {**properties, **self._marks},
            "born": max(0, header.born_timestamp),
            "ack": ack,
            "client": connection.name,
        }
        unique = properties.get(Property.UNIQUE_KEY)
        waiting = _Waiting(connection, command, header.topic, queue, unique, [0], is_inner_batch=True)
        future = self._node.line("writer").request("batch", fields, (bytes(command.body),), timeout_s=_MAX_TIMEOUT_S)
        future.add_done_callback(lambda done: self._stored(done, [waiting]))

    # ------------------------------------------------------------ answers

    def _stored(self, done: asyncio.Future[Answer], requests: list[_Waiting]) -> None:
        """Answer the requests of a run."""
        try:
            answer = done.result()[0]
        except (LineLostError, asyncio.CancelledError) as error:
            remark = f"service not available now. {error}"
            for one in requests:
                self._reply(
                    one, one.command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, remark, ext_fields=dict(SEND_FIELDS))
                )
            return
        if not answer["ok"] and answer.get("outcome") != "stored":
            code = response_code(str(answer.get("code")))
            for one in requests:
                self._reply(one, one.command.answer(code, str(answer.get("error")), ext_fields=dict(SEND_FIELDS)))
            return
        code = ResponseCode.SUCCESS if answer["ok"] else ResponseCode.FLUSH_DISK_TIMEOUT
        offset = int(answer.get("queue_offset", 0))
        places = Places(answer)
        for one in requests:
            ids = [self._message_id(places.next(size)) for size in one.sizes]
            fields = {
                **SEND_FIELDS,
                "msgId": ",".join(ids),
                "queueId": str(one.queue),
                "queueOffset": str(offset),
            }
            if one.unique is not None:
                fields["transactionId"] = one.unique
                if one.is_inner_batch:
                    fields["batchUniqId"] = one.unique
                if "due_ms" in answer and not one.topic.startswith(_RETRY):
                    handle = RecallHandle(one.topic, self._network.broker_name, answer["due_ms"] + 1, one.unique)
                    fields["recallHandle"] = handle.encode()
            offset += len(one.sizes)
            for name in one.counted or (one.topic,):
                self._counting.stored(name, len(one.sizes), sum(one.sizes) or one.command.frame_bytes)
            self._reply(one, one.command.answer(code, ext_fields=fields))

    def _message_id(self, physical_offset: int) -> str:
        return offset_message_id(self._network.store_host, self._network.store_port, physical_offset)

    @staticmethod
    def _reply(waiting: _Waiting, answer: Command) -> None:
        if waiting.answer is not None:
            if not waiting.answer.done():
                waiting.answer.set_result(answer)
        else:
            waiting.connection.send(answer)


@lru_cache(maxsize=4_096)
def _born_host(ip: str, port: int) -> bytes:
    return pack_host(Host(ip, port))
