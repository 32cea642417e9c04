"""Who may ask: the names of this server, the origin and the token of a change, and the login of a node with users.

A page of another origin can make a browser send requests to loopback, and with a name of its own that resolves to 127.0.0.1
even read the answers. So a request must be for one of this server's names, a change must come from a page of this server or
carry a header that other origins cannot send, and its token must be that of the visitor's cookie.

What a visitor may do: decided by the table of the native protocol's operations and by the node's policies.

A visitor who is a user may do here what a client of the native protocol may do as this user, and sees no more. So each
question of a page to the node is an operation with its needs (:mod:`commitmq.security.native_rights`), and the function that
decides is the one of every other protocol.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from commitmq.errors import CommitMQError, ProtocolError, StoreError
from commitmq.files import atomic_file
from commitmq.format.constants import DEAD_LETTER_GROUP, DEAD_LETTER_PASSES, DLQ_PREFIX
from commitmq.plugin import Actor, AuditLog, Event
from commitmq.security.access_file import AccessTable
from commitmq.security.native_rights import CHANGES, needs_of
from commitmq.security.policy import Action, ResourceType, Secret
from commitmq_plugins.http_server import Request

ONLY_SUPER: Final = ("node", "everything")
"""A question that only super users may ask, as :meth:`Rights.may` takes it."""
_TOPICS: Final = (ResourceType.TOPIC, ResourceType.ANY)


class NotAllowedError(ProtocolError):
    """The visitor may not do this."""

    def __init__(self, reason: str) -> None:
        super().__init__("NO_PERMISSION", reason)


class Rights:
    """Of one visitor, by the policies of one moment. ``actor``: who he is, for the audit log. ``user`` is None for
    whoever may do everything: the account that owns the store, and everybody on a node without users.
    """

    def __init__(self, actor: Actor, user: str | None, table: AccessTable, cluster: str, audit: AuditLog) -> None:
        self.actor, self.user = actor, user
        self.table, self._cluster, self._audit = table, cluster, audit
        found = None if user is None else table.users.get(user)
        self.everything = user is None or (found is not None and found.is_super and found.is_enabled)

    def may(self, kind: str, op: str, **fields: Any) -> bool:
        """Whether he may ask a process of ``kind`` for this; for what a page shows."""
        return self.everything or self._refusal(kind, op, fields) is None

    def check(self, role: str, op: str, fields: dict[str, Any]) -> None:
        """Before the question is asked. Raises NotAllowedError, and writes that to the audit log."""
        kind = role.partition("-")[0]
        if not self.everything and (refusal := self._refusal(kind, op, fields)) is not None:
            self.refuse(op, *refusal)
        self._note_use(op, fields)

    def refuse(self, op: str, reason: str, resource: str = "") -> NoReturn:
        """Raises NotAllowedError, and writes that to the audit log."""
        self._audit.refused(self.actor, op, resource, reason)
        raise NotAllowedError(reason)

    def sees_topic(self, name: str) -> bool:
        """Whether he may know of a topic."""
        return self.may("coordinator", "topic.describe", topic=name)

    def reads_topic(self, name: str) -> bool:
        """Whether he may read a topic's messages, without a group."""
        return self.may("reader", "pull", topic=name)

    def sees_group(self, name: str) -> bool:
        """Whether he may know of a group."""
        return self.may("coordinator", "group.describe", group=name)

    @property
    def may_create(self) -> bool:
        """Whether there is a topic that he could create."""
        if self.everything:
            return True
        policies = self.table.policies.get(self.user or "")
        entries = () if policies is None else (*policies.custom, *policies.default)
        return any(one.allow and one.does((Action.CREATE,)) and one.pattern.type in _TOPICS for one in entries)

    def may_resend(self, group: str) -> bool:
        """Whether he may do all that a resend of a group's dead letters does, but for their topics."""
        topic = DLQ_PREFIX + group
        moves = {"group": DEAD_LETTER_GROUP, "offsets": [[topic, 0, 0]]}
        return (
            self.reads_topic(topic)
            and self.may("coordinator", "offset.commit", **moves)
            and self.may("writer", "append", topic=DEAD_LETTER_PASSES)
        )

    def _refusal(self, kind: str, op: str, fields: dict[str, Any]) -> tuple[str, str] | None:
        """Reason and resource; None when it is allowed."""
        needs = needs_of(kind, {**fields, "op": op}, self._cluster)
        if needs is None:
            return "only super users may ask for this", ""
        for resource, actions in needs:
            decision = self.table.decide(self.user or "", resource, actions, self.actor.address)
            if not decision.allowed:
                return f"{decision.reason}; from {self.actor.address}", str(resource)
        return None

    def _note_use(self, op: str, fields: dict[str, Any]) -> None:
        """Write the first use of a topic, or of a group, by a user in an hour, as the native protocol does."""
        topic = fields.get("topic")
        name = fields.get("group") if topic is None else topic
        if self.user is None or type(name) is not str or op in CHANGES or fields.get("reset"):
            return
        if self._audit.is_first(self.user, op, name):
            self._audit.used(Event(self.actor, op, f"{'Group' if topic is None else 'Topic'}:{name}"))


COOKIE: Final = "commitmq_session"
TOKEN_HEADER: Final = "x-commitmq-token"
LINK_LIFE_S: Final = 60
SESSION_LIFE_S: Final = 12 * 3_600
KEY_FILE: Final = "login.key"
_ID_LENGTH: Final = 32


class RefusedError(CommitMQError):
    """The request is not answered. ``status`` is the answer's."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_host(request: Request, names: frozenset[str]) -> str:
    """The request's ``Host``. Raises RefusedError for another name than those of this server."""
    host = request.headers.get("host", "").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in names:
        raise RefusedError(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"this server is not {name[:100]!r}: name it in plugins.dashboard.names, or use one of its names",
        )
    return host


def check_origin(request: Request, host: str) -> None:
    """For a change. Raises RefusedError when it comes from a page of another origin, or from nowhere without the header."""
    origin = request.headers.get("origin")
    if origin is None:
        if TOKEN_HEADER not in request.headers:
            raise RefusedError(HTTPStatus.FORBIDDEN, "a change needs an Origin, or the token as a header")
        return
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or parts.netloc.lower() != host:
        raise RefusedError(HTTPStatus.FORBIDDEN, f"a page of {origin[:100]!r} cannot change anything here")


def cookie_of(headers: Mapping[str, str]) -> str:
    """The session's id; empty without one."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    value = "" if found is None else found.value
    is_ours = len(value) == _ID_LENGTH and all(one in "0123456789abcdef" for one in value)
    return value if is_ours else ""


def set_cookie(session: str) -> tuple[str, str]:
    """The header that gives a browser its session."""
    return "Set-Cookie", f"{COOKIE}={session}; Path=/; HttpOnly; SameSite=Strict"


@dataclass(frozen=True, slots=True)
class Login:
    """Whom a session acts as: a user, who had this ``secret`` then; or, with an empty name, the store's account."""

    user: str = ""
    secret: Secret | None = None


class Sessions:
    """A change's token is a MAC of the cookie: only those that are logged in are kept. Thread-safe."""

    def __init__(self, most: int, most_of_one: int) -> None:
        """``most``: logins at a time; ``most_of_one``: of each user."""
        self._secret = secrets.token_bytes(32)
        self._most, self._most_of_one = most, most_of_one
        self._lock = threading.Lock()
        self._logins: dict[str, tuple[float, Login]] = {}  # until when, the oldest first

    @staticmethod
    def new() -> str:
        return secrets.token_hex(_ID_LENGTH // 2)

    def token(self, session: str) -> str:
        """What a change of this session must carry."""
        return hmac.new(self._secret, session.encode(), hashlib.sha256).hexdigest()

    def check_token(self, session: str, token: str) -> None:
        """Raises RefusedError."""
        if not session or not hmac.compare_digest(self.token(session).encode(), token.encode()):
            raise RefusedError(HTTPStatus.FORBIDDEN, "the token is not that of this session: load the page again")

    def log_in(self, login: Login) -> str:
        """A new session for ``login``; the one before stays nobody's. When its user has too many, the user's oldest one ends;
        when all have too many, the oldest of whoever has the most.
        """
        session = self.new()
        with self._lock:
            now_s = time.monotonic()
            self._logins = {one: known for one, known in self._logins.items() if known[0] > now_s}
            own = [one for one, (_, known) in self._logins.items() if known.user == login.user]
            for one in own[: max(0, len(own) - self._most_of_one + 1)]:
                del self._logins[one]
            if len(self._logins) >= self._most:
                user, _ = Counter(known.user for _, known in self._logins.values()).most_common(1)[0]
                del self._logins[next(one for one, (_, known) in self._logins.items() if known.user == user)]
            self._logins[session] = time.monotonic() + SESSION_LIFE_S, login
        return session

    def log_out(self, session: str) -> None:
        with self._lock:
            self._logins.pop(session, None)

    def login(self, session: str) -> Login | None:
        """Whom the session acts as, within its life; None for nobody."""
        with self._lock:
            until_s, login = self._logins.get(session, (0.0, None))
        return login if until_s > time.monotonic() else None


class Logins:
    """One-time links. They are made with a key in a file that only the node's own account can read, and serve a minute."""

    def __init__(self, folder: Path) -> None:
        """Makes a new key, so that links of an earlier process are void. Raises OSError, StoreError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = secrets.token_hex(32)
        atomic_file.replace(folder / KEY_FILE, self._key.encode(), "the dashboard's key", durable=False, mode=0o600)
        self._used: dict[str, int] = {}

    def use(self, link: str, now_s: float) -> str:
        """The user of the link; empty for the store's account. Raises RefusedError for one false, old or used."""
        text, _, mac = link.rpartition(".")
        wrong = RefusedError(
            HTTPStatus.FORBIDDEN, "this link is not valid any more: `commitmq dashboard` prints a new one"
        )
        number, _, rest = text.partition("-")
        made, _, user = rest.partition("-")
        if not (made.isascii() and made.isdecimal() and len(made) < 12 and len(number) < 40 and len(user) <= 128):
            raise wrong
        if not hmac.compare_digest(_mac(self._key, text).encode(), mac.encode()):
            raise wrong
        self._used = {one: at for one, at in self._used.items() if abs(now_s - at) <= LINK_LIFE_S}
        if abs(now_s - int(made)) > LINK_LIFE_S or text in self._used:
            raise wrong
        self._used[text] = int(made)
        return user


def make_link(folder: Path, user: str = "") -> str:
    """A link's text, made by the owner of the store: for a user, or for that account itself. Raises StoreError."""
    path = folder / KEY_FILE
    try:
        key = path.read_text(encoding="ascii")
    except OSError as error:
        raise StoreError(f"cannot read the dashboard's key: {error.strerror}", path=path) from error
    text = f"{secrets.token_hex(16)}-{int(time.monotonic())}-{user}"
    return f"{text}.{_mac(key, text)}"


def _mac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
