"""A lane: the way to one process of the node that takes sends, the writer or the process of memory topics.

A lane has a ZeroMQ connection, and a local socket for single synchronous sends. One thread at a time uses both: the
owner, whose ticket is the first in ``line`` (:mod:`commitmq.client.sending.line`). The owner is

* the calling thread of a synchronous send or of a synchronous batch of one run, for the time of its round trip, while
  nothing else is pending: no thread hop is on that path;
* the pump, while anything is pending or in flight.

The lane keeps the runs in flight and gives each answer to its run. The delivery policy decides about refused and lost
runs (:mod:`commitmq.client.sending.delivery`).

The window is the number of runs in flight. It is wide enough that the node always has the next runs to store while it
syncs the runs before. With a small ``max_pending_bytes`` the window is narrower: the copies in flight never take more
than that, or than LEAST_WINDOW runs.

What one lane of a producer with several nodes tells about its node (:mod:`commitmq.client.producing`).

A producer of one node waits for it: its messages stay pending while the node is away, full or silent. Where further
nodes are, the messages that name no queue must not wait. The pump gives those back that were not passed on, as not
stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
import zmq

from commitmq.client.routes import Routes, not_stored, unknown
from commitmq.client.sending.delivery import LEAST_WINDOW, AtMostOnce, no_answer
from commitmq.client.sending.line import Line, Ticket
from commitmq.client.sending.run import MAX_RUN_BYTES, NEVER_S, MessagesRun, SendRun
from commitmq.client.sending.run_encoder import RunLayout
from commitmq.errors import NodeUnavailableError, RequestError, SendError
from commitmq.format.message_id import UniqueIds
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel, ConnectionLost, LocalSocket, local_path
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    from commitmq.client.tracing import Tracer


_NEVER_S: Final = float("inf")
_LOOK_S: Final = 0.1


class PendingMessages(Protocol):
    """The messages that wait: an outbox."""

    def fail_free(self, error: SendError) -> None: ...


class NodeWatch:
    """Used by the owner of the connection and by the pump; any thread may read ``since``. Times are monotonic seconds.

    ``gives_back``: messages that name no queue do not wait for this node. No try to connect then takes longer than
    ``connect_timeout_s``. ``silence_s`` tells for how long a request has no answer; after ``most_silence_s`` the
    messages that were not passed on go to another node, while ``has_other`` says that one is there. ``latency`` gets
    the time of each answered run, ``away`` the error of each try to connect that failed.
    """

    def __init__(
        self,
        *,
        gives_back: bool,
        connect_timeout_s: float,
        most_silence_s: float,
        silence_s: Callable[[], float],
        latency: Callable[[float], None],
        away: Callable[[SendError], None],
        has_other: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gives_back = gives_back
        self.connect_timeout_s = connect_timeout_s if gives_back else _NEVER_S
        self.since = _NEVER_S
        """When the oldest run without an answer was passed on; infinite without one."""
        self._most_silence_s = most_silence_s
        self._silence_s = silence_s
        self._latency = latency
        self._away = away
        self._has_other = has_other
        self._clock = clock

    def sent(self, at: float) -> None:
        """A run was passed on."""
        if self.since == _NEVER_S:
            self.since = at

    def answered(self, sent_at: float, oldest: float) -> None:
        """A run has its answer. ``oldest``: when the oldest of the others was passed on."""
        self.since = oldest
        self._latency(self._clock() - sent_at)

    def not_reached(self, error: SendError, pending: PendingMessages) -> None:
        """There is no connection to the node."""
        self._away(error)
        if self.gives_back:
            pending.fail_free(error)

    def look(self, pending: PendingMessages) -> None:
        """Give the messages back that wait behind a request without an answer."""
        if not self.gives_back:
            return
        silence_s = self._silence_s()
        if silence_s >= self._most_silence_s and self._has_other():
            sentence = f"the node has not answered for {silence_s:.1f} s, and this message was not sent"
            pending.fail_free(not_stored("CLIENT_BUSY", sentence))

    def wait(self, line: Line, ticket: Ticket, pending: PendingMessages) -> None:
        """Wait for the connection, which a calling thread may have until its own time is over."""
        while not line.wait(ticket, time.monotonic() + _LOOK_S):
            self.look(pending)


WRONG_ENDPOINT: Final = "WRONG_ENDPOINT"
_PUT_S: Final = 0.5
_LOCAL_HEADER: Final = LocalSocket.MAX_HEADER_BYTES
_LOCAL_BODY: Final = LocalSocket.MAX_BODY_BYTES

_loads = orjson.loads


class Lane:
    """The connection to one process of the node that takes sends. All methods belong to the owner of the connection."""

    def __init__(
        self,
        node: str | None,
        role: str,
        *,
        routes: Routes,
        ids: UniqueIds,
        delivery: AtMostOnce,
        max_pending_bytes: int,
        connected: Callable[[int], None],
        misled: Callable[[str], None],
    ) -> None:
        """``role`` is ``writer`` or ``memory``. ``connected`` is called at each new connection, with the node's limit for a
        body, and ``misled`` with a topic that this process does not take.
        """
        self.directory = Directory(node)
        self.role = role
        self.routes = routes
        self.ids = ids
        self.delivery = delivery
        # (A run of a batch has up to twice the bytes of a run of single messages.)
        self.window = max(LEAST_WINDOW, min(delivery.window, max_pending_bytes // (2 * MAX_RUN_BYTES)))
        self.line = Line()
        self.channel: Channel | None = None
        self.local: LocalSocket | None = None
        """The writer's local socket, for single synchronous sends; None until it is connected."""
        self.local_path = ""
        """The path of the local socket; empty after the first try to connect to it."""
        self.hello: dict[str, Any] = {}
        self.max_message_bytes = 0
        self.flying: dict[int, SendRun] = {}
        """Runs in flight, by request id."""
        self.flying_messages = 0
        """Runs of single messages among them."""
        self.trace: Tracer | None = None
        self.watch: NodeWatch | None = None
        """Set where the producer has further nodes."""
        self._connected = connected
        self._misled = misled
        self._layouts: dict[str, RunLayout] = {}

    # ------------------------------------------------------------ the connection

    def connect(self, deadline: float) -> Channel:
        """The channel to the process, connected. Raises SendError (not stored) without a connection before ``deadline``."""
        channel = self.channel
        if channel is not None:
            if not channel.lost_while_idle():
                return channel
            # The next connection counts its requests from one again: no run of this one may stay behind.
            self.lose("the connection ended before the answer")
        if self.watch is not None:
            deadline = min(deadline, time.monotonic() + self.watch.connect_timeout_s)
        try:
            channel, hello = self.directory.connect(self.role, deadline, hello=True)
        except RequestError as error:
            raise not_stored(error.code, error.message) from error
        self.hello = hello
        self.max_message_bytes = int(hello["max_message_bytes"])
        self.local_path = local_path(hello, channel.endpoint)
        self._layouts.clear()
        self._connected(self.max_message_bytes)
        self.channel = channel  # last: whoever sees it may use the rest
        return channel

    def open_local(self) -> LocalSocket | None:
        """Connect to the writer's local socket, once a connection; None when the socket takes no more connections."""
        path, self.local_path = self.local_path, ""
        with contextlib.suppress(OSError):
            self.local = LocalSocket(path)
        return self.local

    def disconnect(self) -> None:
        """Close the connection. Requests that are queued in it are not sent any more."""
        self.disown()
        self.local_path = ""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def disown(self) -> None:
        """Close the local socket. A forked child has to do it, or the connection stays open at the node; it may do no more."""
        if self.local is not None:
            self.local.close()
            self.local = None

    def call(
        self, channel: Channel, fields: str, body: bytes, size_bytes: int, deadline: float, *, is_run: bool = False
    ) -> dict[str, Any] | None:
        """Send one request over a connection on which nothing is in flight, and wait for its answer: the quick way.

        ``fields`` is the header, JSON, without its id and its end. ``size_bytes`` is the size of the body. A run goes over
        ZeroMQ, because the local socket takes single messages only. The answer may be a refusal. Returns None when the
        connection did not take the request; raises SendError (unknown) when it did and no answer came.
        """
        identity = channel.next_id()
        way: Channel | None = channel
        taken = False
        try:
            header = f'{fields},"id":{identity}}}'.encode()
            local = self.local
            if local is None and self.local_path and not is_run:
                local = self.open_local()
            if local is not None and size_bytes <= _LOCAL_BODY and len(header) <= _LOCAL_HEADER and not is_run:
                way = None
                answer: dict[str, Any] = _loads(local.request(header, body, deadline))
            else:
                channel.send(header, zmq.SNDMORE)
                channel.send(body)
                taken = True
                answer = _loads(channel.receive())
            if answer["id"] == identity and answer["ok"] is True:
                return answer
        except ConnectionLost as error:
            self.disconnect()
            raise unknown(error.message) from error
        except NodeUnavailableError:  # the local socket did not take it
            self.disconnect()
            return None
        except zmq.Again:
            if taken:
                return self._answer(channel, identity, deadline)
            # There is no connection at the moment. The socket may hold a part of the request, and is closed with it.
            self.disconnect()
            return None
        except (ValueError, TypeError, KeyError) as error:
            self.disconnect()
            raise unknown("the peer does not speak this protocol", "BAD_ANSWER") from error
        except BaseException:
            self.disconnect()  # interrupted: the next send must not receive the answer to this one
            raise
        return self._unexpected(way, identity, answer, deadline)

    def call_run(self, channel: Channel, run: SendRun, deadline: float) -> None:
        """Send ``run`` in the quick way, and give it its outcome."""
        began = time.monotonic()
        try:
            fields = orjson.dumps(run.fields)[:-1].decode()
            answer = self.call(channel, fields, run.data, len(run.data), deadline, is_run=run.fields["op"] != "send")
        except SendError as error:
            problem = no_answer() if time.monotonic() >= deadline else error
            run.failed(lambda: problem)
            return
        if answer is None:
            self.delivery.not_taken(run)
        elif answer["ok"] is True:
            if self.trace is not None:
                self.trace.stored(run.topic, run.fields, run.data, answer, began)
            run.stored(answer)
        else:
            self.delivery.refused(self, run, answer)

    def _unexpected(
        self, way: Channel | None, identity: int, answer: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        """The answer to request ``identity``, after a first answer that is a refusal, or an earlier request's.

        ``way`` is None for an answer of the local socket, which is closed with an interrupted request. Raises SendError.
        """
        if answer["id"] is None:
            self.disconnect()  # the node could not read the request
        elif answer["id"] != identity:
            if way is not None:
                return self._answer(way, identity, deadline)
            self.disconnect()
            raise unknown("the answer is to another request", "BAD_ANSWER")
        if answer["ok"] is True:
            raise unknown("the answer names no request", "BAD_ANSWER")
        return answer

    def _answer(self, channel: Channel, identity: int, deadline: float) -> dict[str, Any]:
        """Wait for the answer to request ``identity``, which the connection took. Raises SendError."""
        try:
            while True:
                answer = wire.parse_answer(channel.wait(deadline))
                if answer.get("id") in (identity, None):
                    break
        except ConnectionLost as error:
            self.disconnect()
            raise unknown(error.message) from error
        except BaseException:
            # Interrupted (Ctrl-C) with an answer on its way: the next request must not receive it.
            self.disconnect()
            raise
        return answer

    def layout(self, topic: str) -> RunLayout:
        """The layout of records of ``topic`` for the node of this connection."""
        layout = self._layouts.get(topic)
        if layout is None:
            hello = self.hello
            layout = self._layouts[topic] = RunLayout(
                topic,
                born_v6=bool(hello["born_host"]["v6"]),
                store_v6=bool(hello["store_host"]["v6"]),
                properties_crc=bool(hello["properties_crc"]),
                mark=self.delivery.mark,
            )
        return layout

    def forget_layouts(self) -> None:
        """Make new layouts: the mark in the records has changed."""
        self._layouts.clear()

    # ------------------------------------------------------------ runs

    @property
    def gives_back(self) -> bool:
        """Whether messages that name no queue go to another node, instead of waiting for this one."""
        return self.watch is not None and self.watch.gives_back

    @property
    def has_batches_in_flight(self) -> bool:
        """Whether a run of a batch was passed on and not answered."""
        return len(self.flying) > self.flying_messages

    def send(self, channel: Channel, run: SendRun) -> bool:
        """Hand ``run`` to the connection. False when it did not take the run, which then waits for the next connection."""
        try:
            self.put(channel, run)
        except NodeUnavailableError as error:
            self.delivery.not_taken(run)
            self.lose(error.message)
            return False
        self.delivery.handed_over(run)
        return True

    def put(self, channel: Channel, run: SendRun) -> None:
        """Hand ``run`` to the connection. Raises NodeUnavailableError: it did not take it."""
        identity = channel.next_id()
        channel.put([orjson.dumps({**run.fields, "id": identity}), run.data], time.monotonic() + _PUT_S)
        self.flying[identity] = run
        if self.trace is not None or self.watch is not None:
            run.sent_at = time.monotonic()
            if self.watch is not None:
                self.watch.sent(run.sent_at)
        self.flying_messages += isinstance(run, MessagesRun)

    def receive(self) -> None:
        """Read all answers that have come, and give each to its run."""
        channel = self.channel
        while channel is not None and self.flying:
            try:
                frame = channel.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                answer = wire.parse_answer(frame)
            except RequestError as error:
                self.lose(error.message)
                return
            self.take_answer(answer)
            channel = self.channel

    def take_answer(self, answer: dict[str, Any]) -> None:
        """Give ``answer`` to its run. An answer to no run in flight is dropped."""
        run = self.flying.pop(answer.get("id", -1), None)
        if run is None:
            if not answer["ok"] and answer.get("id") is None:
                self.lose(f"the node could not read a request: {answer.get('error')}")
            return
        self.flying_messages -= isinstance(run, MessagesRun)
        if self.watch is not None:
            self.watch.answered(run.sent_at, next((one.sent_at for one in self.flying.values()), NEVER_S))
        if answer["ok"]:
            if self.delivery.busy.error is not None:
                self.delivery.busy.passed(run)
            if self.trace is not None:
                self.trace.stored(run.topic, run.fields, run.data, answer, run.sent_at)
            run.stored(answer)
        else:
            self.delivery.refused(self, run, answer)

    def refuse(self, run: SendRun, answer: dict[str, Any]) -> None:
        """The node has refused ``run`` permanently."""
        self.routes.forget(run.topic)
        if answer.get("code") == WRONG_ENDPOINT:
            self._misled(run.topic)
        run.failed(lambda: wire.send_refusal(answer), answer)

    def lose(self, sentence: str) -> None:
        """Close a connection that brings no more answers. The delivery policy decides about the runs in flight."""
        self.disconnect()
        self.delivery.lost(self._take_flying(), sentence)

    def give_up(self, sentence: str) -> None:
        """As :meth:`lose`, but no run in flight is repeated."""
        self.disconnect()
        self.delivery.give_up(self._take_flying(), sentence)

    def _take_flying(self) -> list[SendRun]:
        flying, self.flying, self.flying_messages = self.flying, {}, 0
        if self.watch is not None:
            self.watch.since = NEVER_S
        return list(flying.values())

    def close(self) -> None:
        """Close every socket."""
        self.disconnect()
        self.directory.close()
