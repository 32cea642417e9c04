"""Runs of the clients' messages: collected for a turn of the loop, stored, and each request answered.

A run that the writer refuses because of one message is stored once more in parts, one for each request, so that no client's
message is refused because of another one's.

Where the records of a run lie, and how many messages a client's batch has.

Where a send goes: its topic, queue and what its records have in common; found once for each kind of send of a connection.

Most fields of a producer's sends are the same each time. They are checked at the first of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from time import monotonic
from typing import Any, Final, NamedTuple

import orjson

from commitmq.config import NodeConfig
from commitmq.format.constants import Host, Property, SysFlag
from commitmq.format.java import hash_map_order
from commitmq.format.message_id import offset_message_id, pack_host
from commitmq.format.properties import BROKER_BUCKETS
from commitmq.semantics.timer import RecallHandle
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, MessageIllegalError, RecordForm, RunCheck
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, STORAGE_MEMORY, STORAGE_TYPE, TopicConfig
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import (
    Answer,
    Done,
    LineLostError,
    LocalLine,
    NodeClient,
    SendRefusal,
    response_code,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import AnswerForm, Command
from commitmq_plugins.rocketmq.remoting.headers import SendMessageRequestHeader
from commitmq_plugins.rocketmq.remoting.server import RemotingConnection

_TIMEOUT_S: Final = 15.0


class AppendLanes:
    """The two ways of a run to the writer: its local socket for a lone message, ZeroMQ for everything else.

    A sender that waits for each answer is lone: nothing else is under way, and last time it was so too. Its message is
    sent at once and by the quick way. With several senders a turn's messages are collected, which makes fewer and
    larger runs.

    Runs reach the writer in the order in which they are passed on: while one is on the local socket, others wait for
    its answer, and while any is with ZeroMQ, none takes the local socket.
    """

    def __init__(self, node: NodeClient) -> None:
        self._node = node
        self._local: LocalLine = node.local_line()
        self._under_way = self._most = 0
        self._was_lone = self._is_local_busy = False
        self._held: list[tuple[str, str, dict[str, Any], Any, Done]] = []

    @property
    def is_lone(self) -> bool:
        """Whether the next message is to be passed on at once."""
        return self._was_lone and not self._under_way

    def on_behalf_of(self, op: str, user: str) -> dict[str, Any]:
        """What a run of a client of ``user`` carries, see :meth:`NodeClient.on_behalf_of`."""
        return self._node.on_behalf_of(op, user)

    def hand_over(self, role: str, op: str, fields: dict[str, Any], run: Any, messages: int, done: Done) -> None:
        """Send a run with this many clients' messages to ``role``, the process of the topic; ``done`` gets its answer.

        ``op`` is append, or batch for a batch that is one record.
        """
        was_idle = not self._under_way
        self._under_way += messages
        self._most = max(self._most, self._under_way)

        def ended(answer: Answer | LineLostError) -> None:
            self._ended(messages)
            done(answer)

        if self._is_local_busy:
            self._held.append((role, op, fields, run, ended))
            return
        if was_idle and self._was_lone and messages == 1 and role == "writer" and op == "append":
            self._is_local_busy = self._local.call(op, fields, self._local_ended(ended), run, timeout_s=_TIMEOUT_S)
            if self._is_local_busy:
                return
        self._node.line(role).call(op, fields, ended, (run,), timeout_s=_TIMEOUT_S)

    def _local_ended(self, ended: Done) -> Done:
        def go_on(answer: Answer | LineLostError) -> None:
            self._is_local_busy = False
            held, self._held = self._held, []
            for role, op, fields, run, done in held:
                self._node.line(role).call(op, fields, done, (run,), timeout_s=_TIMEOUT_S)
            ended(answer)

        return go_on

    def _ended(self, messages: int) -> None:
        self._under_way -= messages
        if not self._under_way:
            self._was_lone, self._most = self._most == 1, 0


_PAIRS: Final = re.compile("(?:[^\x01\x02]+\x01[^\x01\x02]+\x02)+")
_MAX_FORMS: Final = 1_024
_MAX_NAMES_LENGTH: Final = 2_048
_WAIT: Final = "WAIT"
WAITED: Final = ("TRAN_MSG", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY",
                 "INNER_NUM", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "__PSEQ__")  # fmt: skip
"""What a message has that waited somewhere, or was stored in a special way. A consumer sends it back with all of that."""
DROPPED: Final = ("POP_CK", Property.CRC32)
"""What the broker takes away from a single message."""
_NOT_PLAIN: Final = frozenset({*SPECIAL_PROPERTIES, *WAITED, *DROPPED, Property.REPLY_TO_CLIENT})


class CompletedProperties(NamedTuple):
    """``encoded``: as the record has them. ``waits``: the sender does not forbid to wait for the flush."""

    encoded: bytes
    unique: str
    waits: bool


class _PropertiesForm(NamedTuple):
    """``pick`` takes the values of ``template`` from the list of names and values; places in that list."""

    template: str
    pick: Any
    unique: int
    wait: int


class PlainProperties:
    """The properties of a plain message with what a broker adds to them (spec 5.4), without a dictionary for each message.

    A broker writes properties in the order of a Java HashMap (spec 2.5), which depends on their names alone. So the order is
    found once for each set of names, and kept as a template.

    ``marks`` are the properties that are added to each message.
    """

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = dict(marks)
        self._forms: dict[tuple[str, ...], _PropertiesForm | None] = {}

    def completed(self, text: str) -> CompletedProperties | None:
        """The properties ``text`` of a send with those that are added. None for a message that is not plain: it waits
        or waited somewhere, its sender waits for a reply, it has no unique key, or its properties are not as clients write
        them.
        """
        if _PAIRS.fullmatch(text) is None:
            return None
        flat = text[:-1].replace("\x02", "\x01").split("\x01")
        names = tuple(flat[::2])
        try:
            form = self._forms[names]
        except KeyError:
            form = self._new_form(names)
        if form is None:
            return None
        encoded = (form.template % form.pick(flat)).encode("utf-8", "replace")
        return CompletedProperties(encoded, flat[form.unique], form.wait < 0 or flat[form.wait] != "false")

    def _new_form(self, names: tuple[str, ...]) -> _PropertiesForm | None:
        if sum(map(len, names)) > _MAX_NAMES_LENGTH:
            return None
        form = self._form(names)
        if len(self._forms) >= _MAX_FORMS:
            self._forms.clear()
        self._forms[names] = form
        return form

    def _form(self, names: tuple[str, ...]) -> _PropertiesForm | None:
        known = set(names)
        if (
            len(known) != len(names)
            or Property.UNIQUE_KEY not in known
            or not known.isdisjoint(_NOT_PLAIN)
            or not known.isdisjoint(self._marks)
        ):
            return None
        template, places = "", []
        for name in hash_map_order([*names, *self._marks], BROKER_BUCKETS):
            if name in known:
                template += f"{name.replace('%', '%%')}\x01%s\x02"
                places.append(2 * names.index(name) + 1)
            else:
                template += f"{name}\x01{self._marks[name].replace('%', '%%')}\x02"
        wait = 2 * names.index(_WAIT) + 1 if _WAIT in known else -1
        return _PropertiesForm(template, itemgetter(*places), 2 * names.index(Property.UNIQUE_KEY) + 1, wait)


class RecordOffsets:
    """The physical offset of each record of a run, from the parts of an answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._parts = [list(part) for part in answer.get("parts", ())] or [
            [1 << 62, int(answer.get("physical_offset", 0))]
        ]

    def next(self, size: int) -> int:
        """The place of the next record, which has ``size`` bytes."""
        part = self._parts[0]
        at = int(part[1])
        part[0] -= 1
        part[1] += size
        if part[0] == 0 and len(self._parts) > 1:
            del self._parts[0]
        return at

    def next_of(self, sizes: list[int]) -> list[int]:
        """The places of the next records, which have ``sizes`` bytes."""
        part = self._parts[0]
        if len(self._parts) > 1 and int(part[0]) <= len(sizes):
            return [self.next(size) for size in sizes]
        *found, end = accumulate(sizes, initial=int(part[1]))
        part[0] -= len(sizes)
        part[1] = end
        return found


def count_of(body: Any) -> int:
    """Messages of a client batch; what is wrong in it, the writer says."""
    view, at, count = memoryview(body), 0, 0
    while at + 4 <= len(view):
        size = int.from_bytes(view[at : at + 4], "big", signed=True)
        if size < 22:
            break
        at += size
        count += 1
    return count


_COMPRESSION: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
_TRANSACTION: Final = 0xC
CLIENTS: Final = 1
USERS: Final = 2
_MAX_KNOWN: Final = 256  # of a connection
_MAX_NAME_LENGTH: Final = 1_024
_MAX_RUN_KEYS: Final = 100_000
_MAX_LONG: Final = (1 << 63) - 1
# Of the short names, those whose values are the same in each send, as far as storing depends on them. Born time and
# properties (g and i) are not among them.
_CONSTANT: Final = itemgetter("a", "b", "c", "d", "e", "f", "h", "j", "k")


class RunKey:
    """What all records of a run have in common. Two keys are never equal. ``client`` is the sender, where senders have rates,
    and ``user`` the user, where users have; otherwise they are empty.
    """

    __slots__ = ("ack", "client", "queue", "role", "topic", "user", "v6")

    def __init__(self, role: str, topic: str, queue: int, ack: str, v6: bool, client: str = "", user: str = "") -> None:
        self.role, self.topic, self.queue, self.ack, self.v6 = role, topic, queue, ack, v6
        self.client, self.user = client, user


class SendTarget(NamedTuple):
    """``flushed`` and ``memory``: the run of a message whose sender waits for the flush, and of one that does not.

    ``version``: of the topics, when it was made. ``rates``: who had rates then, of CLIENTS and USERS.
    """

    topic: str
    queue: int
    flushed: RunKey
    memory: RunKey
    form: RecordForm
    is_batch: bool
    is_inner: bool
    version: int
    rates: int


class CheckedSend(NamedTuple):
    """A send whose fields were checked before."""

    target: SendTarget
    born_ms: int
    properties: str


class SendTargets:
    """All targets. Raises :class:`SendRefusal` for a send that no queue takes."""

    def __init__(self, check: RunCheck, *, is_sync: bool, rates: Callable[[], int]) -> None:
        """``is_sync``: the node flushes before it answers, unless a message does not wait. ``rates``: who has rates now, a sum
        of CLIENTS and USERS: their messages are several runs then.
        """
        self._check, self._is_sync, self._rates = check, is_sync, rates
        self._keys: dict[tuple[str, str, int, str, bool, str, str], RunKey] = {}

    def known(self, connection: RemotingConnection, command: Command, version: int) -> CheckedSend | None:
        """The target of a send like an earlier one of the connection; None for another send."""
        fields = command.ext_fields
        try:
            target = connection.memo[self._name(command)]
            born_ms = int(fields["g"])
        except (KeyError, ValueError):
            return None
        text = fields.get("i", "")
        is_as_then = target.version == version and target.rates == self._rates()
        if not is_as_then or not 0 <= born_ms <= _MAX_LONG or Property.PRIORITY in text:
            return None
        return CheckedSend(target, born_ms, text)

    def remember(self, connection: RemotingConnection, command: Command, target: SendTarget) -> None:
        """The connection's next sends with these fields have this target."""
        if len(connection.memo) >= _MAX_KNOWN:
            connection.memo.clear()
        try:
            name = self._name(command)
        except KeyError:
            return  # with long names, which old clients send
        if sum(len(part) for part in name if isinstance(part, str)) <= _MAX_NAME_LENGTH:
            connection.memo[name] = target

    @staticmethod
    def _name(command: Command) -> tuple[Any, ...]:
        fields = command.ext_fields
        return (command.code, fields.get("l"), fields.get("m"), *_CONSTANT(fields))

    def find(
        self, connection: RemotingConnection, code: int, header: SendMessageRequestHeader, topic: TopicConfig, queue: int,
        version: int,
    ) -> SendTarget:  # fmt: skip
        """The target of a send to ``queue`` of ``topic``. Raises SendRefusal."""
        batch = is_batch(code, header)
        if batch and header.sys_flag & _TRANSACTION:
            raise SendRefusal(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be part of a transaction")
        born_host = _born_host(*connection.peer)
        try:
            form = RecordForm(
                self._check,
                header.topic.encode(),
                queue,
                sys_flag=header.sys_flag & _COMPRESSION if header.sys_flag & SysFlag.COMPRESSED else 0,
                flag=header.flag,
                born_host=born_host,
                reconsume_times=max(0, header.reconsume_times or 0),
            )
        except MessageIllegalError as error:
            raise SendRefusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        role = "memory" if topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY else "writer"
        v6 = len(born_host) == 20
        rates = self._rates()
        sender = connection.name if rates & CLIENTS else "", connection.user if rates & USERS else ""
        memory = self._key(role, header.topic, queue, "memory", v6, *sender)
        return SendTarget(
            header.topic,
            queue,
            self._key(role, header.topic, queue, "flushed", v6, *sender) if self._is_sync else memory,
            memory,
            form,
            batch,
            batch and topic.attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH,
            version,
            rates,
        )

    def _key(self, *parts: Any) -> RunKey:
        key = self._keys.get(parts)
        if key is None:
            if len(self._keys) >= _MAX_RUN_KEYS:
                self._keys.clear()
            key = self._keys[parts] = RunKey(*parts)
        return key


def is_batch(code: int, header: SendMessageRequestHeader) -> bool:
    """Whether a send has a batch of messages in its body."""
    return bool(header.batch) or code == RequestCode.SEND_BATCH_MESSAGE


@lru_cache(maxsize=4_096)
def _born_host(ip: str, port: int) -> bytes:
    return pack_host(Host(ip, port))


_RETRY: Final = "%RETRY%"


class PendingRequest:
    """A request whose messages are in a run. ``sizes``: bytes of its record, or of each of its records.

    ``answer`` takes the answer instead of the connection. ``is_inner_batch``: the messages are one record, with one unique id
    (remoting 3.2). ``counted``: the topics in whose statistics it counts, where they are others than its own; such a
    request has a run of its own.
    """

    __slots__ = ("answer", "command", "connection", "counted", "is_inner_batch", "sizes", "unique")

    def __init__(
        self,
        connection: RemotingConnection,
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


Collected = tuple[list[Any], list[PendingRequest]]
"""Records, or all records of a batch as one buffer; one for each request."""


class Runs:
    """The runs that are collected in a turn of the loop."""

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

    def add(self, key: RunKey, data: Any, waiting: PendingRequest) -> None:
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

    def add_alone(self, key: RunKey, data: Any, waiting: PendingRequest) -> None:
        """Store a record as a run of its own, after those before it: it may get another place."""
        self.flush()
        self._append(key, [data], [waiting])

    def send_batch(self, key: RunKey, fields: dict[str, Any], body: Any, waiting: PendingRequest) -> None:
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

    def _append_each(self, key: RunKey, data: list[Any], requests: list[PendingRequest]) -> None:
        for one, request in zip(data, requests, strict=True):
            self._append(key, [one], [request])

    def _append(self, key: RunKey, data: list[Any], requests: list[PendingRequest]) -> None:
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
        requests: list[PendingRequest],
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

    def _answer_plainly(self, queue: int, answer: dict[str, Any], requests: list[PendingRequest]) -> None:
        places, offset = RecordOffsets(answer), int(answer.get("queue_offset", 0))
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
        self, key: RunKey, answer: dict[str, Any], requests: list[PendingRequest], code: ResponseCode
    ) -> None:
        """Answers to messages that wait somewhere, or were not flushed in time."""
        places, offset = RecordOffsets(answer), int(answer.get("queue_offset", 0))
        for one in requests:
            sizes = [one.sizes] if isinstance(one.sizes, int) else one.sizes
            said = self._answer(one, code, self._ids(places, sizes), key.queue, offset)
            if one.unique is not None and "due_ms" in answer and not key.topic.startswith(_RETRY):
                handle = RecallHandle(key.topic, self._network.broker_name, answer["due_ms"] + 1, one.unique)
                said.ext_fields["recallHandle"] = handle.encode()
            offset += len(sizes)
            self._reply(one, said)

    def _ids(self, places: RecordOffsets, sizes: list[int]) -> str:
        prefix = self._id_prefix
        return ",".join([f"{prefix}{place:016X}" for place in places.next_of(sizes)])

    def _answer(self, one: PendingRequest, code: ResponseCode, ids: str, queue: int, offset: int) -> Command:
        fields = {**self._fields, "msgId": ids, "queueId": str(queue), "queueOffset": str(offset)}
        if one.unique is not None:
            fields["transactionId"] = one.unique
            if one.is_inner_batch:
                fields["batchUniqId"] = one.unique
        return one.command.answer(code, ext_fields=fields)

    def _refuse(self, one: PendingRequest, code: int, remark: str) -> None:
        self._reply(one, one.command.answer(code, remark, ext_fields=dict(self._fields)))

    @staticmethod
    def _reply(one: PendingRequest, answer: Command) -> None:
        if one.answer is not None:
            if not one.answer.done():
                one.answer.set_result(answer)
        else:
            one.connection.send(answer)
