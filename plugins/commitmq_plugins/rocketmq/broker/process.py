"""rocketmq-broker: serves RocketMQ's clients and tools.

Owns ``config/messageRequestMode.json``, and in its folder ``neighbours.json`` and its certificate
(:mod:`.remoting.self_signed`); reads the mapped log; asks the node's processes. A death loses nothing that a client was told:
messages are stored by the writer, offsets by the coordinator. Clients connect again, and their heartbeats bring the registry
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.log import LimitedLog
from commitmq.plugin import WorkerContext, run_async
from commitmq.security.access_file import AccessFile
from commitmq.security.live_access import LiveAccess
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq_plugins.rocketmq.broker.access import Access
from commitmq_plugins.rocketmq.broker.admin_broker import AdminBroker
from commitmq_plugins.rocketmq.broker.admin_clients import AdminClients
from commitmq_plugins.rocketmq.broker.admin_groups import AdminGroups
from commitmq_plugins.rocketmq.broker.admin_offsets import AdminOffsets
from commitmq_plugins.rocketmq.broker.admin_queues import Queues
from commitmq_plugins.rocketmq.broker.admin_topics import AdminTopics
from commitmq_plugins.rocketmq.broker.admin_users import AdminUsers
from commitmq_plugins.rocketmq.broker.allowances import Allowances
from commitmq_plugins.rocketmq.broker.auditing import Auditing
from commitmq_plugins.rocketmq.broker.broker_config import BrokerConfig
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.dispatch import Dispatch, Part
from commitmq_plugins.rocketmq.broker.group_reads import GroupReads
from commitmq_plugins.rocketmq.broker.lock_requests import LockRequests
from commitmq_plugins.rocketmq.broker.locks import QueueLocks
from commitmq_plugins.rocketmq.broker.looking import Looks
from commitmq_plugins.rocketmq.broker.neighbours import Neighbours
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.popping import Pops
from commitmq_plugins.rocketmq.broker.pulling import Pulls
from commitmq_plugins.rocketmq.broker.queries import Queries
from commitmq_plugins.rocketmq.broker.recalls import Recalls
from commitmq_plugins.rocketmq.broker.receipts import Receipts
from commitmq_plugins.rocketmq.broker.registration import Registration
from commitmq_plugins.rocketmq.broker.replies import Replies
from commitmq_plugins.rocketmq.broker.request_modes import RequestModes
from commitmq_plugins.rocketmq.broker.retries import Retries
from commitmq_plugins.rocketmq.broker.returning import Returning
from commitmq_plugins.rocketmq.broker.rival import Rival
from commitmq_plugins.rocketmq.broker.sending import Sends
from commitmq_plugins.rocketmq.broker.server_counts import ServerCounts
from commitmq_plugins.rocketmq.broker.stored_replies import StoredReplies
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.broker.transactions import Transactions
from commitmq_plugins.rocketmq.broker.user_limits import UserLimits
from commitmq_plugins.rocketmq.limits import limits_of, tls_of
from commitmq_plugins.rocketmq.remoting.server import RemotingServer
from commitmq_plugins.rocketmq.remoting.tls import ENFORCING
from commitmq_plugins.rocketmq.remoting.turn import Turn
from commitmq_plugins.rocketmq.settings import RocketMQSettings

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
    turn = Turn(loop)
    node = Node(context, loop, turn)
    topics = Topics(node)
    allowances = Allowances(settings)
    clients = Clients(node, topics, allowances, loop, log)
    returning = Returning(context, node)
    offsets = Offsets(node, topics, clients, returning, loop, log)
    locks = QueueLocks(max_of_place=settings.max_locks_per_address)
    own = [f"127.0.0.1:{settings.namesrv_port}"] if settings.namesrv_port else []
    address, name_servers = f"{host}:{port}", own + settings.name_servers()
    by_tls = own if settings.tls_mode == ENFORCING else []
    registration = Registration(node, topics, address, name_servers, log, by_tls)
    topics.tell = registration.settle_soon
    neighbours = Neighbours(registration.servers, network.broker_name, context.folder / "neighbours.json", log)
    neighbours.topics, neighbours.changed = clients.subscribed, clients.spread_changed
    clients.neighbours = neighbours
    rival = Rival(network.broker_name, address, lambda found: context.tell(rival=found), log)
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
    pulls = Pulls(node, topics, clients, offsets, returning, counting, reads, broker_config, most_pulls)
    groups.offsets_gone.append(pulls.forget)
    sends = Sends(node, topics, retries, allowances, loop, counting)
    stored_replies = StoredReplies(node, topics, clients, offsets, loop, log)
    sends.expects_reply = stored_replies.expect
    transactions = Transactions(node, clients, loop, log, counting, access)
    pops = Pops(node, topics, clients, offsets, log, counting, most_pops)
    parts: list[Part] = [
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
        Queries(node, topics, clients, access),
        Recalls(node, topics, enable=settings.recall_message_enable),
        pops,
        Receipts(node, topics, offsets, loop, log, counting),
        Looks(node, topics, offsets, pops),
        RequestModes(node, topics, clients, neighbours.queues),
        Replies(node, topics, clients, sends, store=settings.store_reply_message_enable),
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
