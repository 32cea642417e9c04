"""dispatcher-NAME: hosts one dispatcher, built-in or a plugin's.

Owns: the files of its dispatcher, ``commitmq/dispatchers/NAME.json``. Reads: DispatchBatches, the CommitLog. Advances:
the words of its dispatcher slot. Sockets: PULL bound to ``dispatch-NAME`` (ipc); ROUTER ``dispatcher-NAME`` (ipc and
tcp) for queries and operations; SUB ``topics`` of the coordinator (deleted topics); PUB ``queues-changed`` for the
ConsumeQueue dispatcher, which wakes readers. Exit codes: workers.runtime.context.ExitCode; RESTART after an operation
that needs a new process.

A plugin's dispatcher runs with lower priority and bounded memory, and does not catch up when the node stops: the next
start continues at its position. See :mod:`commitmq.workers.dispatcher.dispatch_host` for positions, missed batches and
parking.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import zmq

from commitmq.store.log.dispatch_batch import NoBatchError
from commitmq.supervision.admin_socket import LAST_WORD_S
from commitmq.workers.dispatcher.dispatch_host import BATCHES_A_TURN, DispatcherHost
from commitmq.workers.dispatcher.dispatcher_requests import DispatcherRequests
from commitmq.workers.reput import dispatch_endpoint
from commitmq.workers.runtime.context import RestartWanted, WorkerContext, monotonic_ms

ROLE = "dispatcher"
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_CATCH_UP_AFTER_MS = 30
INDEX = "index"


def run(context: WorkerContext) -> None:
    """The loop: batches as they come, the log where batches are missing, a flush at each interval."""
    name = context.role.removeprefix("dispatcher-")
    host = DispatcherHost(context, name)
    requests = DispatcherRequests(context, host)
    if host.is_plugin:
        os.nice(context.config.dispatch.plugin_niceness)
        _limit_memory(context.config.dispatch.plugin_memory_bytes)
    if host.deaths.is_too_high:
        host.park()
        context.ready(endpoints=requests.endpoints)
        _wait_for_a_person(context, host, requests)
    else:
        host.open()
        context.ready(endpoints=requests.endpoints)
        _dispatch(context, host, requests, _pull_socket(context, name))
    host.close()
    if requests.restart_wanted and not context.stopping:
        # The answer leaves before the process ends, early enough for its reader (see AdminSocket.close).
        time.sleep(LAST_WORD_S)
        context.close()
        raise RestartWanted


def _pull_socket(context: WorkerContext, name: str) -> zmq.Socket[bytes]:
    pull: zmq.Socket[bytes] = context.zmq.socket(zmq.PULL)
    pull.setsockopt(zmq.RCVHWM, context.config.dispatch.queue_batches)
    pull.bind(dispatch_endpoint(context, name))
    context.register(pull)
    return pull


def _wait_for_a_person(context: WorkerContext, host: DispatcherHost, requests: DispatcherRequests) -> None:
    while not context.stopping and not requests.restart_wanted:
        context.wait(context.poll_ms)
        host.check_min()
        requests.serve()
        if host.lost_its_place:
            host.forgive()  # the record that it died on has expired
            requests.restart_wanted = True


def _dispatch(
    context: WorkerContext, host: DispatcherHost, requests: DispatcherRequests, pull: zmq.Socket[bytes]
) -> None:
    topics: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
    topics.setsockopt(zmq.SUBSCRIBE, b"topics")
    topics.connect(context.layout.ipc("topics"))
    context.register(topics, quiet=True)
    idle_since = monotonic_ms()
    # An index that was only begun on an old log continues at its position at the next start.
    patience_ms = context.config.supervisor.stop_timeout_s * 1000 // 2
    stop_by = 0
    readable: set[Any] = set()
    while not requests.restart_wanted:
        took = False
        before = host.position
        if int(topics.getsockopt(_EVENTS)) & _POLLIN:
            # Take the news before the records of new topics: else the topic table's file would be read for every new
            # topic.
            host.topics.hear(topics, host.position)
        for _ in range(BATCHES_A_TURN):
            if not int(pull.getsockopt(_EVENTS)) & _POLLIN:
                break
            frames = pull.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                host.take([frame.buffer for frame in frames])
                took = True
            except NoBatchError as error:  # nothing is lost: what is missing is read from the log
                context.log.error("a message was dropped", error=str(error))
        now = monotonic_ms()
        if took:
            idle_since = now
        host.check_min()
        limit = host.limit()
        if not took and host.position < limit and (now - idle_since >= _CATCH_UP_AFTER_MS or context.stopping):
            if not (context.stopping and host.is_plugin) and not host.read_log(limit, most=BATCHES_A_TURN):
                took = host.position > before  # continue at once, unless the log cannot be read
            else:
                idle_since = monotonic_ms()
        host.topics.check(host.position)
        if requests.router in readable:
            requests.serve()
        host.flush()
        if context.stopping:
            stop_by = stop_by or monotonic_ms() + patience_ms
            is_late = host.name == INDEX and monotonic_ms() >= stop_by
            if host.is_plugin or host.position >= limit or is_late:
                break
        soon = host.position < limit or host.is_flushing
        readable = context.wait(0 if took else _CATCH_UP_AFTER_MS if soon else context.poll_ms)


def _limit_memory(more_bytes: int) -> None:
    """Let this process take ``more_bytes`` of private memory beyond its present use; past that an allocation fails.

    RLIMIT_DATA counts private writable mappings and the heap, not the store's files, which are mapped shared.
    """
    # Not by psutil: its figure of the data includes the stack, and the limit counts VmData.
    status = Path("/proc/self/status").read_text()
    used = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
