"""dispatcher-NAME: hosts one dispatcher, built-in or a plugin's.

Owns: the files of its dispatcher, ``commitmq/dispatchers/NAME.json``. Reads: DispatchBatches, the CommitLog. Advances:
the words of its dispatcher slot. Sockets: PULL bound to ``dispatch-NAME`` (ipc); ROUTER ``dispatcher-NAME`` (ipc and
tcp) for queries and operations; SUB ``topics`` of the coordinator (deleted topics); PUB ``queues-changed`` for the
ConsumeQueue dispatcher, which wakes readers. Exit codes: workers.runtime.context.ExitCode; RESTART after an operation
that needs a new process.

A plugin's dispatcher runs with lower priority and bounded memory, and does not catch up when the node stops: the next
start continues at its position. See :mod:`commitmq.workers.dispatcher.dispatch_host` for positions, missed batches and
parking.

The verbs for a dispatcher's position: skip the record that it was parked at, move it back or forwards.

``skip`` and a reset to a later position add ranges to the dispatcher's state. From then on their records are taken out
of every batch, also when the dispatcher goes back to an older position of its own.

The requests to one dispatcher, over a ROUTER of its own: queries, and the operations on its position.

    query {request}            the dispatcher's answer; only while it is not parked
    retry {}                   start a parked dispatcher again, with its code imported again
    restart {}                 the same for a dispatcher that is not parked: after its plugin was replaced
    skip {at}                  as retry, without the record it was parked at (its physical offset, so that a repeated
                               request skips nothing else)
    reset {to} or {timestamp}  continue at the beginning, the end, a record's physical offset or a store time

No request ends the process. A query that raises fails alone.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any, Final

import orjson
import zmq

from commitmq.control import DispatcherWord, Word
from commitmq.errors import CommitMQError, ProtocolError
from commitmq.store.log.dispatch_batch import NoBatchError
from commitmq.supervision.admin_socket import LAST_WORD_S
from commitmq.workers.dispatcher.dispatch_host import BATCHES_A_TURN, CONSUME_QUEUE, DispatcherHost
from commitmq.workers.reput import dispatch_endpoint
from commitmq.workers.runtime.context import RestartWanted, WorkerContext, monotonic_ms
from commitmq.workers.runtime.request_socket import RequestSocket


def skip_suspect(host: DispatcherHost) -> dict[str, Any]:
    """Skip for ever the record that the dispatcher was parked at. Returns it. Raises StoreError."""
    assert host.state is not None
    suspect = host.suspect()
    start = suspect["physical_offset"]
    if "size" not in suspect:
        raise CommitMQError("there is no record behind the dispatcher's position")
    host.state.skipped.append((start, start + suspect["size"]))
    host.state.save()
    host.forgive()
    return suspect


def move(host: DispatcherHost, to: int) -> None:
    """Continue at ``to``, a record's offset: forwards by skipping the range between, backwards by ``truncate``.

    Raises NotImplementedError when the dispatcher cannot go back, StoreError when its state cannot be written. Any
    exception of the dispatcher means that this process must end.
    """
    assert host.state is not None
    if to >= host.position:
        if to > host.position:
            host.state.skipped.append((host.position, to))
        host.state.save()
        host.forgive()
        host.context.tell(skipped=host.state.skipped)
        return
    was_parked, before = host.dispatcher is None, host.position
    try:
        if host.dispatcher is None:
            host.open()
        assert host.dispatcher is not None
        host.dispatcher.truncate(to)
    except Exception as error:
        if was_parked or not isinstance(error, NotImplementedError):
            # The dispatcher's state is unknown: as after a crash, the next process opens it again, or is parked
            # again.
            host.drop()
            host.set_position(before)
        raise
    # Skipped records behind ``to`` are wanted again: going back means all of them.
    host.state.skipped = [(start, min(end, to)) for start, end in host.state.skipped if start < to]
    host.state.position = to
    host.state.save()
    host.forgive()
    host.context.tell(skipped=host.state.skipped)
    host.set_position(to)
    host.context.control.put_dispatcher(host.slot, DispatcherWord.DURABLE, to)


_MAX_TIME_MS: Final = 1 << 53
_MAX_DEPTH: Final = 254


class DispatcherRequests:
    """The socket and its operations."""

    def __init__(self, context: WorkerContext, host: DispatcherHost) -> None:
        self._context = context
        self._host = host
        self.restart_wanted = False
        operations = {
            "query": self._query,
            "retry": self._retry,
            "restart": self._restart,
            "skip": self._skip,
            "reset": self._reset,
        }
        changes: dict[str, tuple[str, ...]] = {
            "retry": (),
            "restart": (),
            "skip": ("at",),
            "reset": ("to", "timestamp"),
        }
        self._socket = RequestSocket(context, f"dispatcher {host.name}", operations, changes)
        self.router, self.endpoints, self.serve = self._socket.router, self._socket.endpoints, self._socket.serve

    # ------------------------------------------------------------ operations

    def _query(self, _client: bytes, header: dict[str, Any]) -> dict[str, Any]:
        request = header.get("request", {})
        if not isinstance(request, dict):
            raise ProtocolError("INVALID_PARAMETER", "request must be an object")
        if self._host.is_parked:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", f"dispatcher {self._host.name} is parked")
        query = getattr(self._host.dispatcher, "query", None)
        if query is None:
            raise ProtocolError("UNKNOWN_OP", f"dispatcher {self._host.name} answers no queries")
        try:
            result = query(request)
        except SystemExit as error:  # a library for commands, perhaps: even so only this query fails
            raise ProtocolError("SYSTEM_ERROR", f"{self._host.name} failed on this request: {error!r:.1000}") from error
        if not isinstance(result, dict):
            raise ProtocolError("SYSTEM_ERROR", f"the answer of {self._host.name} must be a dict, not {result!r:.100}")
        most = self._context.config.network.max_frame_bytes
        try:
            # Measure text first: packing more than the process has memory for ends in a signal, not in an exception.
            size = _text_size(result)
            if size <= most:
                size = len(orjson.dumps(result))
        except TypeError as error:
            raise ProtocolError("SYSTEM_ERROR", f"the answer of {self._host.name} is not JSON: {error}") from error
        if size > most:
            raise ProtocolError(
                "SYSTEM_ERROR",
                f"the answer of {self._host.name} has {size} bytes, network.max_frame_bytes allows {most}",
            )
        return {"result": result, "position": self._host.position}

    def _retry(self, _client: bytes, _header: dict[str, Any]) -> dict[str, Any]:
        self._check_parked()
        self._host.forgive()
        self.restart_wanted = True
        return {"position": self._host.position}

    def _restart(self, _client: bytes, _header: dict[str, Any]) -> dict[str, Any]:
        if self._host.is_parked:
            raise ProtocolError("INVALID_PARAMETER", f"dispatcher {self._host.name} is parked: use retry, or skip")
        self.restart_wanted = True
        return {"position": self._host.position}

    def _skip(self, _client: bytes, header: dict[str, Any]) -> dict[str, Any]:
        self._check_parked()
        if header.get("at") != self._host.position:
            where = self._host.position
            raise ProtocolError(
                "INVALID_PARAMETER", f"it is parked at physical offset {where}, not {header.get('at')!r:.40}"
            )
        skipped = skip_suspect(self._host)
        self.restart_wanted = True
        return {"skipped": skipped}

    def _check_parked(self) -> None:
        if not self._host.is_parked:
            raise ProtocolError("INVALID_PARAMETER", f"dispatcher {self._host.name} is not parked")

    def _reset(self, _client: bytes, header: dict[str, Any]) -> dict[str, Any]:
        if self._host.name == CONSUME_QUEUE:
            raise ProtocolError("NO_PERMISSION", "the ConsumeQueues follow the log; rebuild them offline instead")
        was_parked, before = self._host.is_parked, self._host.position
        to = self._target(header)
        try:
            move(self._host, to)
        except NotImplementedError:
            self.restart_wanted = was_parked
            raise ProtocolError(
                "INVALID_PARAMETER", f"dispatcher {self._host.name} cannot go back: its truncate() is not implemented"
            ) from None
        except Exception:
            self.restart_wanted = True
            raise
        self.restart_wanted = was_parked
        return {"position": to, "before": before}

    # ------------------------------------------------------------ positions

    def _target(self, header: dict[str, Any]) -> int:
        low, high = self._context.control.get(Word.MIN_OFFSET), self._host.limit()
        to, timestamp = header.get("to"), header.get("timestamp")
        if timestamp is not None:
            if type(timestamp) is not int or not 0 <= timestamp < _MAX_TIME_MS:
                raise ProtocolError("INVALID_PARAMETER", "timestamp must be milliseconds since 1970")
            return self._host.positions.offset_by_time(timestamp, low, high)
        if to == "begin":
            return low
        if to == "end":
            return high
        if type(to) is not int:
            raise ProtocolError("INVALID_PARAMETER", 'to must be "begin", "end" or a physical offset')
        if not low <= to <= high:
            raise ProtocolError("INVALID_PARAMETER", f"the log has the offsets {low} to {high}, not {to}")
        if not self._host.positions.is_boundary(to, low, high):
            raise ProtocolError("INVALID_PARAMETER", f"no record begins at physical offset {to}")
        return to


def _text_size(value: object, depth: int = 0) -> int:
    """Characters of all texts in a JSON value. Values nested deeper than JSON allows are left for the packer to refuse."""
    if isinstance(value, str):
        return len(value)
    if depth > _MAX_DEPTH or not isinstance(value, dict | list | tuple):
        return 0
    inner = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return sum(_text_size(one, depth + 1) for one in inner)


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
