"""rocketmq-broker: serves RocketMQ's clients and tools; :class:`Dispatch` finds the processor of each request.

Owns ``config/messageRequestMode.json``, and in its folder ``neighbours.json`` and its certificate
(:mod:`.remoting.tls`); reads the mapped log; asks the node's processes. A death loses nothing that a client was told:
messages are stored by the writer, offsets by the coordinator. Clients connect again, and their heartbeats bring the registry
back.

Failpoints of a request: ``rocketmq.read.SEND_MESSAGE_V2`` (it was read), ``rocketmq.ask.append:before`` and ``:after`` (a
question to a process of the node, here of its operation append), ``rocketmq.asked.append`` (the answer came),
``rocketmq.done.LOCK_BATCH_MQ`` (what it asks for is done, and its answer is made), ``remoting.answer:before`` and ``:after``
(the answer to the client).

Two nodes have one ``network.broker_name`` when a configuration or a store was copied. Then each registration takes the name
from the other, and clients reach one by turns. No name server refuses the second, because a broker may come back at another
address. But a broker that has registered, and finds the name with another address again and again, is not alone:
:class:`RivalBroker` reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from commitmq.errors import CommitMQError, ProtocolError
from commitmq.log import LimitedLog, Log
from commitmq.plugin import WorkerContext, failpoints, run_async
from commitmq.security.access_file import AccessFile, LiveAccess
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq_plugins.rocketmq import RocketMQSettings
from commitmq_plugins.rocketmq.broker.admin_server import AdminBroker, AdminClients, AdminUsers
from commitmq_plugins.rocketmq.broker.admin_store import AdminGroups, AdminOffsets, AdminTopics, Queues
from commitmq_plugins.rocketmq.broker.assignment import LockRequests, QueueLocks, RequestModes
from commitmq_plugins.rocketmq.broker.broker_config import BrokerConfig
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import Counting, ServerCounts
from commitmq_plugins.rocketmq.broker.name_servers import Neighbours, RegistrationService
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, NodeClient, refusal_of
from commitmq_plugins.rocketmq.broker.offsets import GroupReads, Offsets, Returning
from commitmq_plugins.rocketmq.broker.popping import AckMessageProcessor, PopMessageProcessor
from commitmq_plugins.rocketmq.broker.pulling import PullMessageProcessor
from commitmq_plugins.rocketmq.broker.queries import PeekMessageProcessor, QueryMessageProcessor
from commitmq_plugins.rocketmq.broker.replies import ReplyMessageProcessor, StoredReplies
from commitmq_plugins.rocketmq.broker.rights import CHANGES, Access, Allowances, Auditing, UserLimits
from commitmq_plugins.rocketmq.broker.sending import RecallMessageProcessor, Retries, SendMessageProcessor
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.broker.transactions import EndTransactionProcessor
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError
from commitmq_plugins.rocketmq.remoting.server import (
    FlushBatch,
    Handler,
    RemotingConnection,
    RemotingServer,
    limits_of,
    tls_of,
)
from commitmq_plugins.rocketmq.remoting.tls import ENFORCING


class RequestProcessor(Protocol):
    """A part of the server: the requests that it answers."""

    @property
    def handlers(self) -> Mapping[RequestCode, Handler]: ...


class Dispatch:
    """All parts. Raises ValueError when two of them answer one request."""

    def __init__(
        self,
        parts: Iterable[RequestProcessor],
        access: Access,
        log: Log,
        counts: ServerCounts | None = None,
        auditing: Auditing | None = None,
    ) -> None:
        self._access, self._log, self._counts = access, log, counts
        self._handlers: dict[int, Handler] = {}
        for part in parts:
            for code, handler in part.handlers.items():
                if code in self._handlers:
                    raise ValueError(f"two parts answer request {code}")
                written = auditing is not None and code in CHANGES
                self._handlers[int(code)] = auditing.of_change(handler) if written and auditing else handler

    def handle(self, connection: RemotingConnection, command: Command) -> Command | Awaitable[Command | None] | None:
        """The answer to one request, or what will give it."""
        if self._counts is None:
            return self._handled(connection, command)
        began_ns = self._counts.began()
        found = self._handled(connection, command)
        if found is None or isinstance(found, Command):
            self._counts.answered(began_ns, command, found)
            return found
        return self._counted(self._counts, began_ns, command, found)

    @staticmethod
    async def _counted(
        counts: ServerCounts, began_ns: int, command: Command, found: Awaitable[Command | None]
    ) -> Command | None:
        answer = await found
        counts.answered(began_ns, command, answer)
        return answer

    def _handled(self, connection: RemotingConnection, command: Command) -> Command | Awaitable[Command | None] | None:
        try:
            refusal = self._access.refusal(connection, command)
            if refusal is not None:
                return refusal
            handler = self._handlers.get(command.code)
            if handler is None:
                return command.not_supported()
            if failpoints.ACTIVE:
                failpoints.hit(f"rocketmq.read.{RequestCode(command.code).name}")
            found = handler(connection, command)
        except Exception as error:
            return self._failed(command, error)
        if found is None or isinstance(found, Command):
            return self._done(command, found)
        return self._later(command, found)

    async def _later(self, command: Command, found: Awaitable[Command | None]) -> Command | None:
        try:
            return self._done(command, await found)
        except Exception as error:
            return self._failed(command, error)

    @staticmethod
    def _done(command: Command, answer: Command | None) -> Command | None:
        """The answer. (A send answers by itself: ``rocketmq.asked.append`` is where it is done.)"""
        if failpoints.ACTIVE and answer is not None:
            failpoints.hit(f"rocketmq.done.{RequestCode(command.code).name}")
        return answer

    def _failed(self, command: Command, error: Exception) -> Command:
        """The answer to an exception: the code that RocketMQ has for what the node refused, else what RocketMQ answers, the
        exception's class and its message (remoting 1.1).
        """
        if isinstance(error, ProtocolError):
            return command.answer(*refusal_of(error))
        if not isinstance(error, CommitMQError):
            self._log.exception("a request failed", code=command.code, error=repr(error))
        elif isinstance(error, RemotingError):
            self._log.debug("a request is wrong", code=command.code, error=str(error))
        return command.answer(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}, {error}")


_SIGHTINGS: Final = 2
"""The answer to the first look may be older than the registration."""
_REMEMBER_S: Final = 90.0
"""Each registers every 30 s, and has the name for that long."""


class RivalBroker:
    """``address``: of the other broker; "" while none is known. ``tell`` is told when that changes."""

    def __init__(self, own_name: str, own_address: str, tell: Callable[[str], None], log: Log) -> None:
        self.address = ""
        self._name, self._own, self._tell, self._log = own_name, own_address, tell, log
        self._sightings, self._seen_s = 0, 0.0

    def look(self, found: str | None, now_s: float, *, is_registered: bool) -> None:
        """Take note of the address that a name server has for the name. ``is_registered``: it has heard of this broker."""
        if not is_registered or found in (None, self._own):
            self._sightings = 0
            if self.address and now_s - self._seen_s > _REMEMBER_S:
                self._log.info("no other broker has this broker's name any more", name=self._name, address=self.address)
                self._set("")
            return
        self._sightings += 1
        if self._sightings < _SIGHTINGS:
            return
        self._seen_s = now_s
        if self.address != found:
            self._log.error(
                "another broker registers under this broker's name: clients reach one of both, by turns; give each its own"
                " network.broker_name",
                name=self._name,
                address=found,
            )
            self._set(str(found))

    def _set(self, address: str) -> None:
        self.address = address
        self._tell(address)


ROLE = "rocketmq-broker"
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.2


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings: RocketMQSettings = context.params["settings"]
    network, log, loop = context.config.network, LimitedLog(context.log), asyncio.get_running_loop()
    port = network.store_port
    host = settings.advertised_host or network.store_host
    users = AccessFile(context.layout.root)
    auditing = Auditing(context.audit, network.cluster_name)
    access = Access(LiveAccess(users, log), network.cluster_name, log, auditing, UserLimits(context.quotas))
    turn = FlushBatch(loop)
    node = NodeClient(context, loop, turn)
    topics = TopicConfigManager(node)
    allowances = Allowances(settings)
    clients = ClientManager(node, topics, allowances, loop, log)
    returning = Returning(context, node)
    offsets = Offsets(node, topics, clients, returning, loop, log)
    locks = QueueLocks(max_of_place=settings.max_locks_per_address)
    own = [f"127.0.0.1:{settings.namesrv_port}"] if settings.namesrv_port else []
    address, name_servers = f"{host}:{port}", own + settings.name_servers()
    by_tls = own if settings.tls_mode == ENFORCING else []
    registration = RegistrationService(node, topics, address, name_servers, log, by_tls)
    topics.tell = registration.settle_soon
    neighbours = Neighbours(registration.servers, network.broker_name, context.folder / "neighbours.json", log)
    neighbours.topics, neighbours.changed = clients.subscribed, clients.spread_changed
    clients.neighbours = neighbours
    rival = RivalBroker(network.broker_name, address, lambda found: context.tell(rival=found), log)
    neighbours.found_own = lambda found: rival.look(found, time.monotonic(), is_registered=registration.is_done)
    counting = Counting(network.cluster_name, loop)
    retries = Retries(node, topics, clients, locks, counting, access)
    broker_config = BrokerConfig(
        context.config,
        context.layout.root,
        address,
        name_servers,
        topics.template_queues,
        has_trace_topic=settings.trace_topic_enable,
    )
    reads, queues = GroupReads(node, log), Queues(node, offsets)
    groups = AdminGroups(node, offsets, reads)
    groups.settings_changed.append(retries.forget)
    most_pulls, most_pops = settings.max_waiting_pulls_per_connection, settings.max_waiting_pops_per_connection
    pulls = PullMessageProcessor(node, topics, clients, offsets, returning, counting, reads, broker_config, most_pulls)
    groups.offsets_gone.append(pulls.forget)
    sends = SendMessageProcessor(node, topics, retries, allowances, loop, counting)
    stored_replies = StoredReplies(node, topics, clients, offsets, loop, log)
    sends.expects_reply = stored_replies.expect
    transactions = EndTransactionProcessor(node, clients, loop, log, counting, access)
    pops = PopMessageProcessor(node, topics, clients, offsets, log, counting, most_pops)
    parts: list[RequestProcessor] = [
        sends,
        pulls,
        counting,
        groups,
        AdminTopics(node, topics, queues, registration, counting),
        AdminClients(node, topics, clients, access, address),
        AdminOffsets(node, topics, clients, offsets, pulls, queues, counting, access, address),
        AdminBroker(node, broker_config, counting, queues),
        AdminUsers(users),
        clients,
        offsets,
        retries,
        LockRequests(locks, network.broker_name),
        transactions,
        QueryMessageProcessor(node, topics, clients, access),
        RecallMessageProcessor(node, topics, enable=settings.recall_message_enable),
        pops,
        AckMessageProcessor(node, topics, offsets, loop, log, counting),
        PeekMessageProcessor(node, topics, offsets, pops),
        RequestModes(node, topics, clients, neighbours.queues),
        ReplyMessageProcessor(node, topics, clients, sends, store=settings.store_reply_message_enable),
    ]
    counts = None if context.counts is None else ServerCounts(context.counts)
    if counts is not None:
        clients.on_turn = partial(counts.look, clients.registry)
    dispatch = Dispatch(parts, access, log, counts, auditing)
    tls = tls_of(settings, context.folder, log)
    server = RemotingServer(dispatch.handle, clients.closed, log, limits_of(settings), tls, turn)
    await _patiently(returning.learn, stopping)
    await _listen(server, settings, port)
    await _patiently(reads.sync, stopping)
    if settings.trace_topic_enable:
        await _patiently(lambda: topics.create(TRACE_TOPIC, 1), stopping)
    registration.start()
    neighbours.start()
    # What is there by now stays: a collection of the whole heap would look at it again and again, which takes milliseconds.
    gc.collect()
    gc.freeze()
    context.ready(endpoints=[f"tcp://{settings.host}:{port}"])
    log.info("RocketMQ's clients are served", host=settings.host, port=port)
    await stopping.wait()
    await neighbours.close()
    await registration.close()
    await server.close()
    transactions.close()
    stored_replies.close()
    await offsets.close()
    await clients.close()
    await reads.close()
    counting.close()
    node.close()


async def _listen(server: RemotingServer, settings: RocketMQSettings, port: int) -> None:
    """Listen on ``port``, and on that of the VIP channel. Raises OSError."""
    await server.listen(settings.host, port)
    if settings.vip_port and port > 2:
        await server.listen(settings.host, port - 2)


async def _patiently(ask: Callable[[], Awaitable[Any]], stopping: asyncio.Event) -> None:
    """Ask the coordinator at the start, again and again while it is absent: it may be on its own way back.

    Raises ProtocolError for another refusal, and when the coordinator is absent for too long.
    """
    until = time.monotonic() + _PATIENCE_S
    while not stopping.is_set():
        try:
            await ask()
            return
        except ProtocolError as error:
            if error.code != SERVICE_NOT_AVAILABLE or time.monotonic() >= until:
                raise
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _PAUSE_S)
