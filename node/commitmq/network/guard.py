"""Who may connect, and what they may: the users of the native protocol, decided for each request before its process sees it.

Only a node with keys has a guard (:mod:`commitmq.security.node_keys`). Who sends a request is in the request itself
(:class:`ZapHandler`), and never remembered by routing id: a client may choose the id of a peer that has just left. A key that
was removed, or whose user was disabled, is refused within :data:`commitmq.security.access_file.LOOK_MS`, connected or not.

The accounts of the node and of root are super users over the local sockets. Others are the users that
``security.access_file`` names.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils import z85

from commitmq.config import NodeConfig
from commitmq.errors import ProtocolError, StoreError
from commitmq.log import Log
from commitmq.network.connection import Disconnect, PeerConnection
from commitmq.protocol import wire
from commitmq.security.access_file import AccessFile, AccessTable, LiveAccess, UserQuotas, parse_local_users
from commitmq.security.audit import Actor, AuditLimits, AuditLog, Event
from commitmq.security.native_rights import CHANGES, PUB, Actions, needs_of, topic_need
from commitmq.security.node_keys import KeyPair, load_node_keys, node_key_path
from commitmq.store.access import shares_with_group

ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"commitmq"
LOCAL: Final = "local"
_UID: Final = "uid="
_MOST_TOLD: Final = 10
"""Refusals that the log has, of each second."""
_FAILED: Final = 70
_CONNECT: Final = "connect"
PROTOCOL: Final = "native"
_VERSION: Final = b"1.0"


def uid_of(who: str) -> int | None:
    """The account in the first word of a user id; None for a key."""
    return int(who.removeprefix(_UID)) if who.startswith(_UID) else None


class ZapHandler:
    """The ZAP handler of one ZeroMQ context (rfc.zeromq.org/spec/27), a thread that answers handshakes.

    tcp is CURVE: the client's public key must be a user's. ipc has no keys: the kernel says which account the peer has.
    Either way libzmq writes the answer's user id into each message of the connection, where no peer can change it:

        <public key> <address>     tcp
        uid=<number> local         ipc

    A router enforces its domain, so without this thread nobody gets in. If the thread fails, the process ends.

    Answers for all sockets of ``context`` with :data:`DOMAIN`. Make it before they are bound, close it after them.
    """

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
            self._audit.used(Event(Actor(user.name, PROTOCOL, address, key), _CONNECT))
        return f"{key} {address}"

    def _tell(self, mechanism: bytes, address: bytes, credentials: list[bytes]) -> None:
        self.refused += 1
        key = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
        where = address.decode(errors="replace")[:100]
        owner = self._live.table().owner_of(key)
        reason = "no user has this key" if owner is None else "the user is disabled"
        if self._audit is not None:
            self._audit.refused(
                Actor("" if owner is None else owner.name, PROTOCOL, where, key), _CONNECT, reason=reason
            )
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            self._second, self._told = second, 0
        if self._told < _MOST_TOLD:
            self._told += 1
            self._log.warning("a connection was refused", reason=reason, address=where, key=key, in_all=self.refused)


def audit_log(
    folder: Path, role: str, config: NodeConfig, log: Log, told: Callable[[str], object] | None = None
) -> AuditLog:
    """The audit log of the process ``role`` in ``folder``, which is the store's ``commitmq/audit``."""
    limits = AuditLimits(**{one.name: getattr(config.audit, one.name) for one in fields(AuditLimits)})
    return AuditLog(folder, role, log, limits, told=told)


_RETRY_CONNECT_MS: Final = 1_000
_RETRY_PENDING_MS: Final = 50
CONNECTIONS: Final = "user_connections"
PENDING: Final = "user_pending_bytes"


class LimitRefusal(NamedTuple):
    """``bound``: CONNECTIONS, which ends the connection too, or PENDING."""

    bound: str
    sentence: str
    retry_after_ms: int


class UserBounds:
    """What the clients of one user may have at one port: connections, and bytes that wait to be handled.

    The receiving thread tells each connection's user once it knows it, from the first request that the guard let pass.
    The gate's thread adds up what the connections of a user hold, at each of its looks while any connection holds
    bytes. Then requests of a user with more than the quota are refused, which frees their bytes at once, until a look
    finds less. At twice the quota, which a request without an end may reach, the user's connection with the most is
    ended. What it sent still waits, and counts. So no connection is ended that holds no more than its share of the
    quota: those of its user that send little live on.

    Both quotas hold for each process of the node by itself. Without any the receiving thread asks nothing.

    ``quotas`` is looked at again each time; ``refused`` is called for each refusal.
    """

    def __init__(self, quotas: UserQuotas, refused: Callable[[], object]) -> None:
        self.quotas, self._refused = quotas, refused
        self._connections: Counter[str] = Counter()
        self._counting = threading.Lock()  # both threads count
        self._over: frozenset[str] = frozenset()

    # ------------------------------------------------------------ the receiving thread

    def refusal(self, connection: PeerConnection, user: str) -> LimitRefusal | None:
        """Why a request of ``user`` over ``connection`` is refused; None when it is not."""
        found = None
        if connection.user != user:
            found = self._meet(connection, user)
        if found is None and user in self._over:
            most = self.quotas.of(user).pending_bytes
            sentence = f"more than {most} bytes of user {user} wait to be handled ([flow] {PENDING})"
            found = LimitRefusal(PENDING, sentence, _RETRY_PENDING_MS)
        if found is not None:
            self._refused()
        return found

    def _meet(self, connection: PeerConnection, user: str) -> LimitRefusal | None:
        most = self.quotas.of(user).connections
        with self._counting:
            if connection.closed:
                return None
            if most and self._connections[user] >= most:
                sentence = (
                    f"user {user} has {self._connections[user]} connections here, the most ([flow] {CONNECTIONS})"
                )
                return LimitRefusal(CONNECTIONS, sentence, _RETRY_CONNECT_MS)
            self._leave(connection)
            connection.user = user
            self._connections[user] += 1
        return None

    def _leave(self, connection: PeerConnection) -> None:
        user = connection.user
        if user:
            self._connections[user] -= 1
            if not self._connections[user]:
                del self._connections[user]

    # ------------------------------------------------------------ the gate's thread

    def forget(self, connection: PeerConnection) -> None:
        """``connection`` is closed, whatever user it had: one may just be named. Its bytes are still the user's."""
        with self._counting:
            self._leave(connection)

    def look(self, held: Collection[PeerConnection]) -> Disconnect | None:
        """Count what ``held``, all connections with bytes that wait, hold for each user. Returns the connection to end."""
        sizes: Counter[str] = Counter()
        for one in held:
            if one.user:
                sizes[one.user] += one.pending
        bounds = {user: self.quotas.of(user).pending_bytes for user in sizes}
        over = {user for user, most in bounds.items() if most and sizes[user] > most}
        self._over = frozenset(over)
        far_over = {user for user in over if sizes[user] > 2 * bounds[user]}
        shares = {user: bounds[user] // max(1, self._connections[user]) for user in far_over}
        worst = [one for one in held if one.user in far_over and not one.ended and one.pending > shares[one.user]]
        if not worst:
            return None
        one = max(worst, key=lambda one: (one.unfinished, one.pending))
        why = (
            f"{sizes[one.user]} bytes of user {one.user} wait to be handled, twice the quota is {2 * bounds[one.user]}"
        )
        return Disconnect(one, PENDING, why)


_MOST_CALLERS: Final = 10_000
_USER_ID: Final = "User-Id"
_SENDS: Final = frozenset(("send", "append", "batch", "send_back", "recall"))
_SUPER_UIDS: Final = frozenset((0, os.geteuid()))


@dataclass(frozen=True, slots=True)
class Caller:
    """``name``: of the user; empty for what belongs to none. ``why``: the reason then. ``key``: the public key, over tcp."""

    name: str
    address: str
    is_super: bool = False
    why: str = ""
    key: str = ""
    user: str = ""
    """Whose quotas hold: ``name``, but nobody for the node's own account."""


class Guard:
    """Keys, users and ZAP handler of one process, for its one router. Made by :func:`make_guard`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: NodeConfig,
        store: Path,
        keys: KeyPair,
        role: str,
        log: Log,
        audit: AuditLog | None = None,
    ) -> None:
        """``role``: the process; dispatchers and readers are of one kind each. Raises StoreError."""
        self._audit = audit
        self._live = LiveAccess(AccessFile(store), log)
        self._keys, self._store, self._log = keys, store, log
        self._kind = role.partition("-")[0]
        self._cluster = config.network.cluster_name
        self._local = parse_local_users(config.security.local_users)
        self._table = self._live.table()
        self._callers: dict[str, Caller] = {}
        self._second = self._told = 0
        self._last = _NOBODY
        self._zap = ZapHandler(context, self._live, log, audit)

    def close(self) -> None:
        """After the router's end."""
        self._zap.close()

    # ------------------------------------------------------------ the router's binds

    def before_ipc(self, router: zmq.Socket[bytes]) -> None:
        """Addresses that are bound from now on ask the kernel for the peer's account."""
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def after_ipc(self, path: str) -> None:
        """Let the accounts of ``security.access_file`` reach the socket, in a store that its owner shares with a group."""
        if self._local and shares_with_group(self._store):
            os.chmod(path, 0o770)

    def before_tcp(self, router: zmq.Socket[bytes]) -> None:
        """Addresses that are bound from now on take CURVE only."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.reveal().encode())

    # ------------------------------------------------------------ each request

    def refusal(self, frame: zmq.Frame) -> bytes | None:
        """The answer to a request that must not be handled, by its header's frame; None when it may."""
        table = self._live.table()
        if table is not self._table:
            self._table = table
            self._callers.clear()
        try:
            told = str(frame.get(_USER_ID))
        except (zmq.ZMQError, KeyError):
            told = ""
        self._last = caller = self._callers.get(told) or self._caller(told)
        # The node's own processes, and its owner, are asked nothing more.
        return None if caller.is_super and not caller.key else self._decide(table, caller, frame)

    @property
    def user(self) -> str:
        """The user who sent the request of the last :meth:`refusal`; empty for the node's own account."""
        return self._last.user

    def user_of(self, frame: zmq.Frame | Any) -> str:
        """The same of any request that :meth:`refusal` let pass, by its header's frame."""
        try:
            found = self._callers.get(str(frame.get(_USER_ID)))
        except (zmq.ZMQError, KeyError):
            return ""
        return "" if found is None else found.user

    def may_send(self, user: str, address: str | None, topic: str) -> bool:
        """Whether ``user`` may send to ``topic`` now (without ``address``: from any). The node's own account may."""
        if not user:
            return True
        table, need = self._live.table(), topic_need(topic, PUB)
        return table.may_somewhere(user, *need) if address is None else table.decide(user, *need, address).allowed

    @property
    def actor(self) -> Actor:
        """Who sent the request of the last :meth:`refusal`."""
        return _actor(self._last)

    def lacks(self, header: dict[str, Any], topics: Iterable[str], actions: Actions) -> str | None:
        """Why the sender of the last :meth:`refusal` may do none of ``actions`` on one of ``topics``; None when it may.
        For messages that a request, ``header``, names by their place: only the look-up tells their topics.
        """
        caller = self._last
        if caller.is_super:
            return None
        for topic in topics:
            resource, wanted = topic_need(topic, actions)
            decision = self._table.decide(caller.name, resource, wanted, caller.address)
            if not decision.allowed:
                reason = f"{decision.reason}; from {caller.address}"
                self._tell(caller, header, reason, str(resource))
                return reason
        return None

    def _caller(self, told: str) -> Caller:
        who, _, address = told.partition(" ")
        found = self._user(who, address)
        if len(self._callers) >= _MOST_CALLERS:
            self._callers.clear()
        self._callers[told] = found
        return found

    def _user(self, who: str, address: str) -> Caller:
        uid = uid_of(who) if address == LOCAL else None
        if uid is not None and uid in _SUPER_UIDS:
            return Caller(f"uid {uid}", address, is_super=True)
        if uid is not None:
            user = self._table.users.get(self._local.get(uid, ""))
            why = f"security.local_users names no user for the account with uid {uid}"
        else:
            user = self._table.owner_of(who)
            why = "no user has this key any more" if who else "nobody is named as its sender"
        key = who if uid is None else ""
        if user is None:
            return Caller("", address, why=why, key=key)
        if not user.is_enabled:
            return Caller(user.name, address, why=f"user {user.name} is disabled", key=key)
        return Caller(user.name, address, is_super=user.is_super, key=key, user=user.name)

    def _decide(self, table: AccessTable, caller: Caller, frame: zmq.Frame) -> bytes | None:
        if caller.why:
            return self._refuse(caller, {}, frame, caller.why)
        try:
            header = wire.parse_request(frame.bytes)
        except ProtocolError:
            return None  # its process refuses it by the same rule
        if caller.is_super:
            self._used(caller, header)
            return None
        needs = needs_of(self._kind, header, self._cluster)
        if needs is None:
            return self._refuse(caller, header, frame, "only super users may ask for this")
        for resource, actions in needs:
            decision = table.decide(caller.name, resource, actions, caller.address)
            if not decision.allowed:
                reason = f"{decision.reason}; from {caller.address}"
                return self._refuse(caller, header, frame, reason, str(resource))
        self._used(caller, header)
        return None

    def _used(self, caller: Caller, header: dict[str, Any]) -> None:
        """Write the first use of a topic, or of a group, by a user in an hour."""
        topic = header.get("topic")
        name = header.get("group") if topic is None else topic
        audit = self._audit
        if audit is None or type(name) is not str or not audit.is_first(caller.name, header["op"], name):
            return
        if header["op"] in CHANGES or header.get("reset"):
            return  # its process writes it
        resource = f"{'Group' if topic is None else 'Topic'}:{name}"
        audit.used(Event(_actor(caller), header["op"], resource, request=header["id"]))

    def _refuse(
        self, caller: Caller, header: dict[str, Any], frame: zmq.Frame, reason: str, resource: str = ""
    ) -> bytes:
        self._tell(caller, header, reason, resource)
        identity = header.get("id") if header else wire.request_id(frame.bytes)
        more = {"outcome": "not_stored"} if header.get("op") in _SENDS else {}
        return wire.error(identity, "NO_PERMISSION", reason, **more)

    def _tell(self, caller: Caller, header: dict[str, Any], reason: str, resource: str) -> None:
        """Write a refusal to the audit log, and the first ones of a second to the log."""
        operation = str(header.get("op", ""))
        if self._audit is not None:
            self._audit.refused(_actor(caller), operation, resource, reason, header.get("id"))
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            if self._told > _MOST_TOLD:
                self._log.warning("more requests were refused", count=self._told - _MOST_TOLD)
            self._second, self._told = second, 0
        self._told += 1
        if self._told <= _MOST_TOLD:
            self._log.warning(
                "a request was refused", user=caller.name, op=operation, address=caller.address, reason=reason[:500]
            )


_NOBODY: Final = Caller("", "")


def _actor(caller: Caller) -> Actor:
    return Actor(caller.name, PROTOCOL, caller.address, caller.key)


def make_guard(
    context: zmq.Context[zmq.Socket[bytes]],
    config: NodeConfig,
    store: Path,
    role: str,
    log: Log,
    *,
    node_key: str,
    audit: AuditLog | None = None,
) -> Guard | None:
    """The guard of a process; None where the node has started without keys. ``node_key``: the public key that the node
    has started with, or none, so that a file that came, went or was replaced since changes nothing. Raises StoreError.
    """
    if not node_key:
        return None
    keys = load_node_keys(store)
    if keys is None:
        raise StoreError(
            "the node's keys are gone, and without them everybody would be let in: put back a copy", path=store
        )
    if keys.public != node_key:
        raise StoreError(
            f"the node's keys are not those of its start, and no client expects them: put back the file with the public key"
            f" {node_key}; or stop the node and start it, and give its clients new profiles",
            path=node_key_path(store),
        )
    return Guard(context, config, store, keys, role, log, audit)
