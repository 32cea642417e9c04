"""The node's admin socket: receives requests, sends answers; the supervisor's handlers do the work.

Operations: ``metadata`` (where the workers listen, limits), ``status`` (processes, positions), ``stop`` (answered when
everything is flushed and all workers have ended). See protocol/PROTOCOL.md.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from commitmq.config import NodeConfig
from commitmq.errors import CommitMQError, ProtocolError
from commitmq.log import Log
from commitmq.network import ports
from commitmq.network.gate import ShareOfTime
from commitmq.network.router import open_router
from commitmq.protocol import wire
from commitmq.security.audit import Event
from commitmq.security.native_rights import Vouching
from commitmq.supervision.exit_codes import CliExit, StartFailed
from commitmq.supervision.exposure import Exposure

_MAX_REQUESTS_A_TURN = 256
_WAITING_ANSWERS = 1_000
_MAX_HEADER_BYTES = 64 * 1024
_MAX_TURN_NS = 5_000_000
_SHARE = 0.2  # of a processor that the other processes need
_SHARED = "status"  # its answer takes milliseconds, and depends on nothing in the request
_READ_ONLY = ("metadata", "status")  # nobody misses one whose client has gone
_CHANGES = ("stop", "config.set", "config.unset")  # for the audit log
_PORT_PATIENCE_MS = 500
LAST_WORD_S = 0.1


class AddressInUseError(StartFailed):
    """Another program listens on one of the node's addresses."""

    def __init__(self, message: str) -> None:
        super().__init__(message, CliExit.ADDRESS_IN_USE)


Answer = bytes | None
Handler = Callable[[bytes, dict[str, Any]], Answer]


class AdminSocket:
    """A ROUTER on tcp and ipc. A handler gets the peer's identity and the header; it returns None to answer later."""

    def __init__(
        self,
        config: NodeConfig,
        ipc: str,
        port: int,
        handlers: Mapping[str, Handler],
        log: Log,
        exposure: Exposure | None = None,
    ) -> None:
        """Bind ``ipc`` and ``port`` (0: a free one) of ``network.host``. ``exposure`` knows whether it asks
        for keys. Raises AddressInUseError or CommitMQError.
        """
        self._context = zmq.Context(io_threads=1)
        self._handlers = handlers
        self._log = log
        self._share = ShareOfTime(_SHARE)
        self._exposure = exposure
        self.settings: Callable[[str], Any] | None = None
        """The present value of a setting, for the audit log."""
        try:
            guard = None if exposure is None else exposure.guard_of(self._context, "admin", log)
            self.socket, self.endpoints = open_router(
                self._context,
                config.network,
                log,
                ipc,
                port,
                has_line=False,
                max_header_bytes=_MAX_HEADER_BYTES,
                waiting_answers=_WAITING_ANSWERS,
                linger_ms=1000,
                guard=guard,
                vouching=None if exposure is None else Vouching(exposure.vouching_key),
            )
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            address = f"tcp://{config.network.host}:{port or '*'}"
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(ports.in_use(port, "admin", config)) from error
            raise CommitMQError(f"cannot listen on {address}: {error.strerror}") from error

    def serve(self) -> float:
        """Answer the requests that have arrived, up to a limit. Returns the seconds to rest before the next call, so that
        requests take no more than their share of a processor.

        Those for the status come last, and share one answer, which was made after the last of them arrived.
        """
        began_s = time.thread_time()
        end_ns = time.monotonic_ns() + _MAX_TURN_NS
        shared: list[tuple[bytes, int]] = []
        for _ in range(_MAX_REQUESTS_A_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) < 2:
                continue  # only an identity: there is nothing to answer and no id to repeat
            answer = self._answer(frames[0], frames[1], len(frames) - 2, shared)
            if answer is not None:
                self.send(frames[0], answer)
            if time.monotonic_ns() >= end_ns:
                break
        if shared:
            self._answer_shared(shared)
        return self._share.spend(time.thread_time() - began_s)

    def _answer_shared(self, requests: list[tuple[bytes, int]]) -> None:
        first_peer, first = requests[0]
        answer = self._handled(first_peer, {"op": _SHARED, "id": first})
        if answer is None:
            return
        for peer, identity in requests:
            if not self.socket.gate.has_left(peer):
                self.send(peer, wire.answer_again(answer, first, identity))

    def look(self) -> None:
        """Tell the gate when no request waits; before each sleep, because :meth:`serve` may end at its bound."""
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.socket.gate.found_nothing()

    def _answer(self, peer: bytes, frame: bytes, surplus: int, shared: list[tuple[bytes, int]]) -> Answer:
        """The answer, if it is made now. A request whose answer others may share goes to ``shared``."""
        try:
            header = wire.parse_request(frame)
        except ProtocolError as error:
            return wire.refused(wire.request_id(frame), error)
        if header["op"] not in self._handlers:
            known = ", ".join(sorted(self._handlers))
            return wire.error(header["id"], "UNKNOWN_OP", f"the admin socket knows {known}, not {header['op']!r}")
        if header["op"] in _READ_ONLY and self.socket.gate.has_left(peer):
            return None
        if surplus:
            sentence = f"{header['op']} takes no payload, but {surplus} frames came"
            return wire.error(header["id"], "INVALID_PARAMETER", sentence)
        if header["op"] == _SHARED:
            shared.append((peer, header["id"]))
            return None
        return self._handled(peer, header)

    def _handled(self, peer: bytes, header: dict[str, Any]) -> Answer:
        try:
            if header["op"] not in _CHANGES or self._exposure is None:
                return self._handlers[header["op"]](peer, header)
            with self._exposure.audit.changing(self._change(peer, header)):
                return self._handlers[header["op"]](peer, header)
        except ProtocolError as error:
            return wire.refused(header["id"], error)
        except Exception as error:  # the failure of one request must not end the node
            self._log.exception("admin request failed", op=header["op"], error=repr(error))
            return wire.error(header["id"], "SYSTEM_ERROR", f"the node failed to answer: {error!r}")

    def _change(self, peer: bytes, header: dict[str, Any]) -> Event:
        key = header.get("key")
        resource = f"Setting:{key}" if isinstance(key, str) else ""
        after = {"value": header.get("value")} if header["op"] == "config.set" else None
        before = {"value": self.settings(key)} if self.settings is not None and isinstance(key, str) else None
        actor = self.socket.actor(peer, header)
        return Event(actor, header["op"], resource, request=header["id"], before=before, after=after)

    def send(self, peer: bytes, answer: bytes) -> None:
        """Answer ``peer``. The answer is dropped when the peer has gone or takes nothing in."""
        try:
            self.socket.send_multipart([peer, answer], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._log.debug("answer dropped", error=str(error))

    def close(self, *, linger_ms: int = 1000, last_word: bool = False) -> None:
        """Let answers out for at most ``linger_ms``, then close; with ``last_word`` not before a peer can have read its
        answer.

        A DEALER with ZMQ_IMMEDIATE, as CommitMQ's clients use, loses an answer that libzmq has received but not handed
        over by the time it sees the end of the connection. So answer and end must not arrive together.
        """
        if last_word:
            time.sleep(LAST_WORD_S)
        self.socket.close()
        self._context.destroy(linger=linger_ms)


def bind_admin(
    config: NodeConfig,
    ipc: str,
    known_ports: dict[str, int],
    handlers: Mapping[str, Handler],
    log: Log,
    exposure: Exposure,
) -> AdminSocket:
    """The admin socket of a node; its port goes into ``known_ports``. The rest is as :class:`AdminSocket`'s."""
    port = ports.port_of("admin", config, known_ports)
    deadline_ns = time.monotonic_ns() + (_PORT_PATIENCE_MS * 1_000_000 if config.network.port else 0)
    try:
        while True:
            try:
                admin = AdminSocket(config, ipc, port, handlers, log, exposure)
                break
            except AddressInUseError:
                if time.monotonic_ns() >= deadline_ns:
                    raise
                time.sleep(0.02)  # the previous node has stopped and is just reporting that
    except AddressInUseError:
        if config.network.port:
            raise
        # Another program took the free port of the node's previous run in the meantime: any other port will do.
        admin = AdminSocket(config, ipc, 0, handlers, log, exposure)
    known_ports["admin"] = ports.tcp_port(admin.endpoints) or port
    return admin
