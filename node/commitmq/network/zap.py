"""Who may connect: the ZAP handler of one ZeroMQ context (rfc.zeromq.org/spec/27), a thread that answers handshakes.

tcp is CURVE: the client's public key must be a user's. ipc has no keys: the kernel says which account the peer has. Either way
libzmq writes the answer's user id into each message of the connection, where no peer can change it:

    <public key> <address>     tcp
    uid=<number> local         ipc

A router enforces its domain, so without this thread nobody gets in. If the thread fails, the process ends.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import zmq
from zmq.utils import z85

from commitmq.log import Log
from commitmq.security.access_file import LiveAccess
from commitmq.security.audit import Actor, AuditLog, Event

ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"commitmq"
LOCAL: Final = "local"
_UID: Final = "uid="
_MOST_TOLD: Final = 10
"""Refusals that the log has, of each second."""
_FAILED: Final = 70
_CONNECT: Final = "connect"
_PROTOCOL: Final = "native"
_VERSION: Final = b"1.0"


def uid_of(who: str) -> int | None:
    """The account in the first word of a user id; None for a key."""
    return int(who.removeprefix(_UID)) if who.startswith(_UID) else None


class ZapHandler:
    """Answers for all sockets of ``context`` with :data:`DOMAIN`. Make it before they are bound, close it after them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        live: LiveAccess,
        log: Log,
        audit: AuditLog | None = None,
    ) -> None:
        self._live, self._log, self._audit = live, log, audit
        self.refused = 0
        self._second = self._told = 0
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._socket.close(0)
        os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop in ready:
                    return
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            return
        except BaseException as error:
            # Nobody could connect any more; another process of this role can do it.
            self._log.exception("the ZAP handler failed, so this process ends", error=repr(error))
            os._exit(_FAILED)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number, domain, address, _, mechanism, *credentials = [*request, *([b""] * (6 - len(request)))]
        found = ""
        if version == _VERSION and domain == DOMAIN:
            found = self._user_id(mechanism, address.decode(errors="replace"), credentials)
        if not found:
            self._tell(mechanism, address, credentials)
            return [_VERSION, number, b"400", b"unknown key", b"", b""]
        return [_VERSION, number, b"200", b"OK", found.encode(), b""]

    def _user_id(self, mechanism: bytes, address: str, credentials: list[bytes]) -> str:
        """The user id of a peer that may connect; empty for one that may not."""
        if mechanism == b"NULL":
            # libzmq writes the peer's account behind the address of a Unix socket: ``localhost:uid:gid:pid``.
            parts = address.split(":")
            is_account = len(parts) == 4 and all(one.isdecimal() for one in parts[1:])
            return f"{_UID}{parts[1]} {LOCAL}" if is_account else ""
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return ""
        key = z85.encode(credentials[0]).decode()
        # A user that was added this moment gets in.
        user = self._live.table().owner_of(key) or self._live.newest().owner_of(key)
        if user is None or not user.is_enabled:
            return ""
        address = address.removeprefix("::ffff:")
        if self._audit is not None and self._audit.is_first_connection(user.name, key, address):
            self._audit.used(Event(Actor(user.name, _PROTOCOL, address, key), _CONNECT))
        return f"{key} {address}"

    def _tell(self, mechanism: bytes, address: bytes, credentials: list[bytes]) -> None:
        self.refused += 1
        key = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
        where = address.decode(errors="replace")[:100]
        owner = self._live.table().owner_of(key)
        reason = "no user has this key" if owner is None else "the user is disabled"
        if self._audit is not None:
            self._audit.refused(
                Actor("" if owner is None else owner.name, _PROTOCOL, where, key), _CONNECT, reason=reason
            )
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            self._second, self._told = second, 0
        if self._told < _MOST_TOLD:
            self._told += 1
            self._log.warning("a connection was refused", reason=reason, address=where, key=key, in_all=self.refused)
