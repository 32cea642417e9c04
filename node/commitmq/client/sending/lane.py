"""A lane: the way to one process of the node that takes sends, the writer or the process of memory topics.

A lane has a ZeroMQ connection, and beside it the local socket for single synchronous sends. One thread uses both at a time:
the owner, whose ticket is the first in ``line`` (:mod:`commitmq.client.sending.line`). The owner is

* the calling thread of a synchronous send or of a synchronous batch of one run, for the time of its round trip, while nothing
  else is pending: no thread hop is on that path;
* the pump, while anything is pending or in flight.

The lane knows the runs in flight and gives each answer to its run. It decides nothing about a run that is refused or lost: the
delivery policy does (:mod:`commitmq.client.sending.delivery`).

The window is wide enough that the node always has the next runs to store while it syncs those before. Where
``max_pending_bytes`` is small it is narrower, so that the copies in flight never take more than that (or than LEAST_WINDOW
runs).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import orjson
import zmq

from commitmq.client.routes import Routes, not_stored, unknown
from commitmq.client.sending.delivery import LEAST_WINDOW, AtMostOnce, no_answer
from commitmq.client.sending.line import Line
from commitmq.client.sending.run import MAX_RUN_BYTES, MessagesRun, Run
from commitmq.client.sending.run_encoder import RunLayout
from commitmq.errors import NodeUnavailableError, RequestError, SendError
from commitmq.format.unique_ids import UniqueIds
from commitmq.protocol import wire
from commitmq.protocol.connection import Channel, ConnectionLost, Directory
from commitmq.protocol.local_packet import LocalSocket, local_path

WRONG_ENDPOINT: Final = "WRONG_ENDPOINT"
_PUT_S: Final = 0.5
_LOCAL_HEADER: Final = LocalSocket.MAX_HEADER_BYTES
_LOCAL_BODY: Final = LocalSocket.MAX_BODY_BYTES

_loads = orjson.loads


class Lane:
    """See the module. All methods belong to the owner of the connection."""

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
        """``role`` is ``writer`` or ``memory``. ``connected`` hears the node's limit for a body at each new connection.
        ``misled`` hears of a topic that this process does not take.
        """
        self.directory = Directory(node)
        self.role = role
        self.routes = routes
        self.ids = ids
        self.delivery = delivery
        # (Runs of batches have up to twice the bytes of the pump's own.)
        self.window = max(LEAST_WINDOW, min(delivery.window, max_pending_bytes // (2 * MAX_RUN_BYTES)))
        self.line = Line()
        self.channel: Channel | None = None
        self.local: LocalSocket | None = None
        """The short way, for single synchronous sends."""
        self.local_path = ""
        """Where that can be had, until it was tried."""
        self.hello: dict[str, Any] = {}
        self.max_message_bytes = 0
        self.flying: dict[int, Run] = {}
        """Runs in flight, by request id."""
        self.flying_messages = 0
        """Runs of single messages among them."""
        self._connected = connected
        self._misled = misled
        self._layouts: dict[str, RunLayout] = {}

    # ------------------------------------------------------------ the connection

    def connect(self, deadline: float) -> Channel:
        """The channel to the process, connecting if need be. Raises SendError (not stored) when there is none in time."""
        channel = self.channel
        if channel is not None:
            if not channel.lost_while_idle():
                return channel
            # The next connection counts its requests from one again: no run of this one may stay behind.
            self.lose("the connection ended before the answer")
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
        """Connect to the local socket that the writer told of; None when it takes no more. Tried once a connection."""
        path, self.local_path = self.local_path, ""
        with contextlib.suppress(OSError):
            self.local = LocalSocket(path)
        return self.local

    def disconnect(self) -> None:
        """Close the connection; nothing that was queued in it is sent any more."""
        self.disown()
        self.local_path = ""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def disown(self) -> None:
        """Close the local connection; all that a forked child may do, where it would stay open at the node otherwise."""
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
            # There is no connection at the moment. What the socket has of the request goes with it.
            self.disconnect()
            return None
        except (ValueError, TypeError, KeyError) as error:
            self.disconnect()
            raise unknown("the peer does not speak this protocol", "BAD_ANSWER") from error
        except BaseException:
            self.disconnect()  # interrupted: the answer on its way must not meet the next send
            raise
        return self._unexpected(way, identity, answer, deadline)

    def call_run(self, channel: Channel, run: Run, deadline: float) -> None:
        """Send ``run`` in the quick way, and give it its outcome."""
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
            run.stored(answer)
        else:
            self.delivery.refused(self, run, answer)

    def _unexpected(
        self, way: Channel | None, identity: int, answer: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        """An answer that is a refusal, or to an earlier request that was interrupted. ``way`` is None where it came over the
        local socket, which no request outlives.
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
        """The answer to request ``identity``, which was handed over by the calling thread. Raises SendError."""
        try:
            while True:
                answer = wire.parse_answer(channel.wait(deadline))
                if answer.get("id") in (identity, None):
                    break
        except ConnectionLost as error:
            self.disconnect()
            raise unknown(error.message) from error
        except BaseException:
            # Interrupted (Ctrl-C) with an answer on its way: the next request must not meet it.
            self.disconnect()
            raise
        return answer

    def layout(self, topic: str) -> RunLayout:
        """How records of ``topic`` are laid out for this connection's node."""
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
        """Records will carry another mark from now on."""
        self._layouts.clear()

    # ------------------------------------------------------------ runs

    @property
    def has_batches_in_flight(self) -> bool:
        """Whether a run of a batch was handed over and not answered."""
        return len(self.flying) > self.flying_messages

    def send(self, channel: Channel, run: Run) -> bool:
        """Hand ``run`` over; one that the connection does not take waits for the next one, and the result is False."""
        try:
            self.put(channel, run)
        except NodeUnavailableError as error:
            self.delivery.not_taken(run)
            self.lose(error.message)
            return False
        self.delivery.handed_over(run)
        return True

    def put(self, channel: Channel, run: Run) -> None:
        """Hand ``run`` to the connection. Raises NodeUnavailableError: it did not take it."""
        identity = channel.next_id()
        channel.put([orjson.dumps({**run.fields, "id": identity}), run.data], time.monotonic() + _PUT_S)
        self.flying[identity] = run
        self.flying_messages += isinstance(run, MessagesRun)

    def receive(self) -> None:
        """Take all answers that are there, and give each to its run."""
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
        """Give ``answer`` to its run; one to no run of this connection is nothing."""
        run = self.flying.pop(answer.get("id", -1), None)
        if run is None:
            if not answer["ok"] and answer.get("id") is None:
                self.lose(f"the node could not read a request: {answer.get('error')}")
            return
        self.flying_messages -= isinstance(run, MessagesRun)
        if answer["ok"]:
            run.stored(answer)
        else:
            self.delivery.refused(self, run, answer)

    def refuse(self, run: Run, answer: dict[str, Any]) -> None:
        """The node has refused ``run`` for good."""
        self.routes.forget(run.topic)
        if answer.get("code") == WRONG_ENDPOINT:
            self._misled(run.topic)
        run.failed(lambda: wire.send_refusal(answer), answer)

    def lose(self, sentence: str) -> None:
        """The connection is of no more use; the delivery policy decides about the runs in flight."""
        self.disconnect()
        self.delivery.lost(self._take_flying(), sentence)

    def give_up(self, sentence: str) -> None:
        """As :meth:`lose`, and nothing that was in flight is asked about again."""
        self.disconnect()
        self.delivery.give_up(self._take_flying(), sentence)

    def _take_flying(self) -> list[Run]:
        flying, self.flying, self.flying_messages = self.flying, {}, 0
        return list(flying.values())

    def close(self) -> None:
        """Close every socket."""
        self.disconnect()
        self.directory.close()
