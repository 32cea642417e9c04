"""The pump: the thread that moves runs from an outbox to its lane, and answers from the lane to the runs.

It sends the first pending message at once. While runs are in flight, messages gather. The next run goes when an answer
comes, or when FULL_RUN_BYTES are pending and the lane's window is open. So a lone message does not wait, and a stream
of messages travels in runs. A run of a batch goes as soon as the window is open, in turn with runs of single messages.

At the end of a connection the sends that it did not take stay in the outbox. They continue the next connection, and
fail as *not stored* when their time is over.

The calling thread of a synchronous send, or of a synchronous batch of one run, takes the lane itself while nothing is
pending. If another thread has the lane, the send becomes a pending one. So the sends of many threads share runs, as
asynchronous sends do.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from commitmq.client.checks import Bell
from commitmq.client.routes import Routes, not_stored
from commitmq.client.sending.delivery import AtMostOnce, no_answer
from commitmq.client.sending.lane import WRONG_ENDPOINT, Lane, NodeWatch
from commitmq.client.sending.line import Line
from commitmq.client.sending.outbox import ANY_BYTES, FULL_RUN_BYTES, NO_WAKE, Outbox, Waiters
from commitmq.client.sending.run import NEVER_S, Group, Job, MessagesRun, NotYet
from commitmq.client.sending.run_encoder import encode_messages
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import Outcome, SendError
from commitmq.format.message_id import UniqueIds
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel, check_fork

_TICK_MS: Final = 50
_CONNECT_S: Final = 0.5
_LOOK_S: Final = 1.0
_log = logging.getLogger("commitmq.client")


class Pump:
    """One lane with its outbox and its thread, which begins with the first pending send.

    ``redirects`` tells whether another lane takes a topic now. If so, it has moved the topic's pending messages there.
    """

    def __init__(
        self,
        node: str | None,
        role: str,
        waiters: Waiters,
        *,
        pid: int,
        max_pending: int,
        max_pending_bytes: int,
        linger_s: float,
        in_pump: Callable[[], bool],
        redirects: Callable[[str, float], bool],
        pump_of_topic: Mapping[str, Pump] | None = None,
        **lane: Any,
    ) -> None:
        """``lane``: further arguments of :class:`Lane`."""
        self.outbox = Outbox(
            waiters,
            max_pending=max_pending,
            max_pending_bytes=max_pending_bytes,
            linger_s=linger_s,
            wake=self._wake,
            in_pump=in_pump,
            pump_of_topic=pump_of_topic,
        )
        self.lane = Lane(node, role, max_pending_bytes=max_pending_bytes, connected=self._note_limit, **lane)
        self.thread: threading.Thread | None = None
        """The thread, once it runs."""
        self._pid = pid
        self._role = role
        self._redirects = redirects
        self._bell = Bell()
        self._messages_next = True
        self._is_asking = False  # the queues are unknown of all topics of pending single messages

    def look(self) -> None:
        """Make the pump look at the pending messages again. Never blocks."""
        self._bell.ring()

    def _note_limit(self, max_message_bytes: int) -> None:
        self.outbox.max_message_bytes = max_message_bytes

    def _wake(self) -> None:
        """Wake the thread, or start it (lock held)."""
        self._bell.ring()
        if not self.outbox.has_pump:
            check_fork(self._pid, "producer")
            # A caller that is interrupted here may have started a thread or not. The first thread that runs is the pump.
            threading.Thread(target=self._run, name=f"commitmq-producer-{self._role}", daemon=True).start()
            self.outbox.has_pump = True

    # ------------------------------------------------------------ calling threads

    def send_waiting(self, job: Job) -> None:
        """Send ``job``. The caller waits for its outcome afterwards.

        If the job is one run, and nothing else is pending or under way, the calling thread sends it itself, without a hop to
        the pump. Such a job is in no count, so an interruption leaves no count wrong. Else the job goes into the outbox.
        Raises as :meth:`Outbox.submit_batch`.
        """
        lane = self.lane
        line = lane.line
        if not (line or self.outbox.outstanding or lane.delivery.in_submission_order):
            ticket = object()
            try:
                line.append(ticket)
                if line[0] is ticket and self._call(job):
                    return
            finally:
                line.remove(ticket)  # first in the finally: an exception can come before any later call
                if line:
                    line.wake()
        self.outbox.submit_batch(job)

    def _call(self, job: Job) -> bool:
        """Send ``job`` as one run and wait for the answer (connection owned); False when it is still to be sent."""
        lane = self.lane
        channel = lane.channel
        if channel is None or channel.lost_while_idle():
            return False
        try:
            run = job.next_run(time.monotonic() + _CONNECT_S, only=True)
        except NotYet:
            return False
        if run is not None:
            lane.call_run(channel, run, job.deadline)
        elif not job.more:
            self.outbox.finish_batch(job)
        return not job.more

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        outbox, lane = self.outbox, self.lane
        with outbox.lock:
            if self.thread is not None or outbox.closed:
                return  # another thread is the pump: an interrupted caller had started it
            self.thread = threading.current_thread()
            outbox.has_pump = True
        line, ticket = lane.line, Line.ticket()
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        while True:
            with outbox.lock:
                idle = outbox.is_empty
                if outbox.closed and not outbox.groups:
                    return
                outbox.wakes_at = ANY_BYTES if idle or self._is_asking else NO_WAKE
            if idle:
                poller.poll()
                self._bell.clear()
                continue
            if self._is_asking:
                poller.poll(int(max(0.0, min(outbox.earliest - time.monotonic(), _LOOK_S)) * 1000) + 1)
                self._bell.clear()
            outbox.linger(batches_in_flight=lane.has_batches_in_flight)
            try:
                line.append(ticket)
                if lane.watch is not None:
                    lane.watch.wait(line, ticket, outbox)
                elif line[0] is not ticket:
                    line.wait(ticket, NEVER_S)
                self.drive()
            except Exception as error:
                # No exception is expected here. If one comes, every future must get its outcome all the same.
                _log.exception("the producer's sending thread failed", extra={"fields": {}})
                lane.give_up(f"the client failed: {error!r}")
                outbox.fail_all("CLIENT_ERROR", f"the client failed: {error!r}")
            finally:
                line.remove(ticket)
                if line:
                    line.wake()

    def drive(self) -> None:
        """Send and receive until nothing is in flight and no run may be sent now (connection owned)."""
        outbox, lane = self.outbox, self.lane
        line, delivery = lane.line, lane.delivery
        owed = True  # the pump sends once in each turn, also while other threads wait in the line without an end
        while not outbox.closed:
            if owed or len(line) < 2 or delivery.is_repeating:
                self.fill()
                owed = False
            with outbox.lock:
                if not lane.flying:
                    nothing = outbox.is_empty or (self._is_asking and not outbox.batches)
                    nothing = nothing or outbox.linger_left_s(batches_in_flight=False) > 0
                    if not delivery.is_repeating and (nothing or len(line) > 1):
                        break
                    continue
                outbox.wakes_at = NO_WAKE
                if len(lane.flying) < lane.window and len(line) < 2:
                    outbox.wakes_at = FULL_RUN_BYTES if lane.flying_messages else ANY_BYTES
            self._receive()
            if lane.watch is not None:
                lane.watch.look(outbox)
            if time.monotonic() >= outbox.earliest:
                self.expire()
        if time.monotonic() >= outbox.earliest:
            self.expire()

    def fill(self) -> None:
        """Send all runs that may be sent now (connection owned)."""
        outbox, lane = self.outbox, self.lane
        if not lane.delivery.may_send(lane):
            if (busy := lane.delivery.busy.error) is not None:
                outbox.fail_late(busy.code, busy.message, busy.retry_after_ms, within_s=lane.delivery.busy.left_s)
            return
        asking: set[Group] = set()
        self._is_asking = False
        while len(lane.flying) < lane.window:
            asking &= outbox.groups.keys()
            self._is_asking = bool(asking) and len(asking) == len(outbox.groups)
            messages = len(asking) < len(outbox.groups)
            messages = messages and (not lane.flying_messages or outbox.pending_bytes >= FULL_RUN_BYTES)
            messages = messages and outbox.linger_left_s(batches_in_flight=lane.has_batches_in_flight) <= 0
            if not messages and not outbox.batches:
                return
            if lane.flying and lane.channel is not None and lane.channel.lost():
                lane.lose("the connection ended before the answer")
                return
            now = time.monotonic()
            try:
                channel = lane.connect(now + _CONNECT_S)
            except SendError as error:
                # The messages stay pending, because the node may come back within their time.
                if error.code in ("NODE_UNAVAILABLE", "SERVICE_NOT_AVAILABLE"):
                    outbox.fail_late(error.code, error.message)
                    if lane.watch is not None:
                        lane.watch.not_reached(error, outbox)
                else:
                    outbox.fail_all(error.code, error.message)
                return
            # (lane.connect may have found the connection lost, and that may have changed the outbox.)
            if outbox.batches and not (messages and self._messages_next and not lane.delivery.in_submission_order):
                self._messages_next = True
                if not self._send_batch(channel, now):
                    return
            elif outbox.groups.keys() - asking:
                self._messages_next = False
                group = outbox.next_group()
                if not self._is_known(group):
                    outbox.postpone(group)
                    asking.add(group)
                elif not self._send_messages(channel, group, now):
                    return
            else:
                return

    def _is_known(self, group: Group) -> bool:
        """Whether ``group`` can be sent without waiting for the coordinator. If not, a thread in the background asks it.

        Other topics must not wait for the answer. Without an answer, a group with a queue goes to the writer.
        """
        topic, queue, *_ = group
        routes = self.lane.routes
        if routes.fresh(topic):
            return True
        error = routes.ask(topic)
        if error is None:
            return False
        if queue >= 0:
            return True
        self._without_route(group, error)
        return False

    def _without_route(self, group: Group, error: SendError) -> None:
        """The queues of ``group``, which names none, are not known."""
        if error.code == "NODE_UNAVAILABLE" and not self.lane.gives_back:
            self.outbox.fail_late(error.code, error.message)  # the others wait for the node
        else:
            self.outbox.fail_group(group, error)

    def _send_messages(self, channel: Channel, group: Group, now: float) -> bool:
        """Send a run of ``group``. False when the connection is lost."""
        outbox, lane = self.outbox, self.lane
        topic, queue, ack, _ = group
        if lane.routes.fresh(topic) and self._redirects(topic, now):
            return True
        if queue < 0:
            try:
                queue = lane.routes.next_queue(topic, now + 1.0)
            except SendError as error:
                self._without_route(group, error)
                return True
        futures = outbox.take(group)
        if futures:
            run = self._encoded(topic, queue, ack, group, futures)
            if run is not None:
                lane.send(channel, run)
        return lane.channel is channel

    def _encoded(self, topic: str, queue: int, ack: str, group: Group, futures: list[SendFuture]) -> MessagesRun | None:
        """``futures`` as a run; None when they cannot be encoded. They have failed then."""
        outbox, lane = self.outbox, self.lane
        fields = {
            "v": wire.PROTOCOL_VERSION,
            "op": "append",
            "topic": topic,
            "queue": queue,
            "count": len(futures),
            "ack": ack,
        }
        unique = lane.ids.block(len(futures))
        try:
            with lane.delivery.numbered(topic, queue, fields) as sequence:
                sizes, data = encode_messages(lane.layout(topic), queue, futures, unique, sequence)
        except SendError as error:
            code, sentence = error.code, error.message
            outbox.fail(futures, lambda: not_stored(code, sentence))
            return None
        except Exception as error:
            # Messages were checked when they were sent. If a bad one comes here all the same, its run fails and no other.
            reason = f"the messages cannot be encoded: {error!r}"
            outbox.fail(futures, lambda: not_stored("CLIENT_ERROR", reason))
            return None
        run = MessagesRun(outbox, group, queue, futures, sizes, unique, fields, data)
        run.sequence = sequence
        return run

    def _send_batch(self, channel: Channel, now: float) -> bool:
        """Send the next run of the first pending batch. False when the connection is lost or the queues are not known."""
        outbox, lane = self.outbox, self.lane
        batch = outbox.batches[0]
        try:
            run = batch.next_run(now + _CONNECT_S)
        except NotYet as error:
            outbox.fail_late("NODE_UNAVAILABLE", str(error))
            if lane.watch is not None:
                lane.watch.not_reached(not_stored("NODE_UNAVAILABLE", str(error)), outbox)
            return False
        if run is not None and not lane.send(channel, run):
            return False
        outbox.finish_batch(batch)
        return lane.channel is channel

    def _receive(self) -> None:
        """Wait for an answer, a ring of the bell or one tick, and take all answers that have come."""
        channel = self.lane.channel
        assert channel is not None
        poller = zmq.Poller()
        poller.register(channel.socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        ready = {sock for sock, _ in poller.poll(_TICK_MS)}
        if self._bell.fd in ready:
            self._bell.clear()
        if not ready and channel.lost():
            self.lane.lose("the connection ended before the answer")
        elif channel.socket in ready:
            self.lane.receive()

    def expire(self) -> None:
        """Fail everything that timed out (connection owned). A run whose messages have all failed ends the connection."""
        outbox, lane = self.outbox, self.lane
        now = time.monotonic()
        outbox.fail_late("TIMEOUT", "not sent in time")
        deadlines = [run.expire(now, no_answer) for run in list(lane.flying.values())]
        if NEVER_S in deadlines:
            lane.lose("no answer in time")
        outbox.note_deadlines(min([*deadlines, lane.delivery.expire(now)], default=NEVER_S))

    # ------------------------------------------------------------ the end

    def close(self, timeout_s: float) -> None:
        """Fail the pending sends, end the thread, close every socket. ``timeout_s`` bounds a send that is under way."""
        outbox, lane, thread = self.outbox, self.lane, self.thread
        with outbox.lock:
            outbox.closed = True
            self._bell.ring()
        sentence = "the producer was closed before the message was sent"
        outbox.fail_messages("CLIENT_CLOSED", sentence)
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        ticket = Line.ticket()
        try:
            lane.line.append(ticket)
            # The send of another thread may wait for its answer until its time is over. Its socket must stay open so long.
            if not lane.line.wait(ticket, time.monotonic() + timeout_s + 1.0):
                _log.warning("the producer was closed while a send was under way", extra={"fields": {}})
                return
            lane.give_up("the producer was closed before the answer")
            outbox.fail_all("CLIENT_CLOSED", "the producer was closed before the batch was sent")
            lane.close()
            if thread is None or not thread.is_alive():
                self._bell.close()
        finally:
            lane.line.remove(ticket)
            lane.line.wake()


_ROUTE_S: Final = 1.0


class Lanes:
    """The lanes of one producer: the writer's lane, and the lane of the memory process from the first send to a memory
    topic on.

    The coordinator tells which topics are memory topics. A topic can be deleted and rebuilt as the other kind, and
    the producer does not know at once. The process that gets such a send refuses it as WRONG_ENDPOINT, and the topic
    changes lanes.

    ``writer`` is the pump of the writer's lane; all topics use it but those in ``pump_of_topic``.
    """

    def __init__(
        self,
        node: str | None,
        *,
        timeout_s: float,
        max_pending: int,
        max_pending_bytes: int,
        linger_s: float = 0.0,
        ids: UniqueIds | None = None,
        delivery: AtMostOnce | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.routes = Routes(node)
        self.ids = ids or UniqueIds()
        self.waiters = Waiters()
        self.pump_of_topic: dict[str, Pump] = {}
        """The pump of each topic that uses another lane than the writer's; lock held to change."""
        self._node = node
        self._timeout_s = timeout_s
        self._limits: dict[str, Any] = {
            "max_pending": max_pending,
            "max_pending_bytes": max_pending_bytes,
            "linger_s": linger_s,
        }
        self._memory: Pump | None = None
        self._watched: Callable[[], NodeWatch] | None = None
        self._is_closed = False
        # An idempotent producer numbers the messages of one lane, so it has the writer's only, which refuses memory topics.
        self._is_numbered = delivery is not None and delivery.in_submission_order
        self.writer = self._pump(
            "writer", delivery or AtMostOnce(), redirects=self._redirected, misled=lambda _topic: None
        )
        self.routes.told = self._look

    def _pump(
        self,
        role: str,
        delivery: AtMostOnce,
        *,
        redirects: Callable[[str, float], bool],
        misled: Callable[[str], None],
    ) -> Pump:
        pump = Pump(
            self._node,
            role,
            self.waiters,
            pid=self.pid,
            in_pump=self.in_pump,
            redirects=redirects,
            pump_of_topic=self.pump_of_topic,
            routes=self.routes,
            ids=self.ids,
            delivery=delivery,
            misled=misled,
            **self._limits,
        )
        if self._watched is not None:
            pump.lane.watch = self._watched()
        return pump

    def watch(self, made: Callable[[], NodeWatch]) -> None:
        """The producer has further nodes: give each lane a watch, made by ``made``. Before the first send."""
        self._watched = made
        self.writer.lane.watch = made()

    @property
    def lock(self) -> threading.RLock:
        """The lock of all outboxes."""
        return self.waiters.lock

    def of(self, topic: str, deadline: float) -> Pump:
        """The pump of the lane of ``topic``. Asks the coordinator the first time."""
        found = self.pump_of_topic.get(topic)
        if found is None and self._redirected(topic, min(deadline, time.monotonic() + _ROUTE_S)):
            found = self.pump_of_topic[topic]
        return found or self.writer

    def corrected(self, topic: str, error: SendError, via: Pump) -> bool:
        """Whether the lane of ``via`` refused a send with ``error`` because it is the wrong lane: then send it again."""
        if error.code != WRONG_ENDPOINT or error.outcome is not Outcome.NOT_STORED or self._is_numbered:
            return False
        if via is not self.writer:
            self._restore(topic)
        else:
            self.routes.forget(topic)
            self._redirect(topic)
        return True

    def _redirected(self, topic: str, deadline: float) -> bool:
        """Whether ``topic`` is a memory topic. If so, its pending messages move to the memory lane, in their order."""
        if self._is_numbered or not self.routes.is_memory(topic, deadline):
            return False
        self._redirect(topic)
        return True

    def _look(self, _topic: str) -> None:
        for pump in self._pumps():
            pump.look()

    def _redirect(self, topic: str) -> None:
        with self.lock:
            if self._memory is None:
                self._memory = self._pump(
                    "memory", AtMostOnce(), redirects=lambda _topic, _deadline: False, misled=self._restore
                )
            self.pump_of_topic[topic] = self._memory
            self.writer.outbox.move(topic, self._memory.outbox)

    def _restore(self, topic: str) -> None:
        with self.lock:
            self.pump_of_topic.pop(topic, None)
        self.routes.forget(topic)

    # ------------------------------------------------------------ all lanes

    def _pumps(self) -> list[Pump]:
        return [self.writer] if self._memory is None else [self.writer, self._memory]

    def all_in_flight(self) -> int:
        """Messages pending or in flight in all lanes."""
        return sum(pump.outbox.outstanding for pump in self._pumps())

    def in_pump(self) -> bool:
        """True in a pump's own thread. A wait for a send would never end there."""
        me = threading.current_thread()
        memory = self._memory
        return self.writer.thread is me or (memory is not None and memory.thread is me)

    def flush(self, deadline: float) -> bool:
        """Wait until nothing is pending or in flight; False when ``deadline`` passed before that."""
        return self.waiters.wait_until(lambda: not self.all_in_flight(), deadline)

    def disown(self) -> None:
        """In a forked child: the sockets are the parent's."""
        for pump in self._pumps():
            pump.lane.disown()

    def close(self, deadline: float) -> None:
        """Send pending messages until ``deadline``, fail the rest, end the threads, close every socket."""
        if self.pid != os.getpid():
            for pump in self._pumps():
                pump.outbox.closed = True  # the sockets are the parent's
            return
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
        if not self.in_pump():
            self.flush(deadline)
        for pump in reversed(self._pumps()):
            pump.close(self._timeout_s)
        self.routes.close()
