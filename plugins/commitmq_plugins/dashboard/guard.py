"""Who may ask: the names of this server, the origin and the token of a change, and the login of a node with users.

A page of another origin can make a browser send requests to loopback, and with a name of its own that resolves to 127.0.0.1
even read the answers. So a request must be for one of this server's names, a change must come from a page of this server or
carry a header that other origins cannot send, and its token must be that of the visitor's cookie.
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
from typing import Final
from urllib.parse import urlsplit

from commitmq.errors import CommitMQError, StoreError
from commitmq.files import atomic_file
from commitmq.security.user import Secret
from commitmq_plugins.http_server import Request

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
    """Sessions need no table: the token of a change is a MAC of the cookie. Only those that are logged in are kept.
    Thread-safe.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        """``most``: logins at a time; ``most_of_one``: of each user."""
        self._secret = secrets.token_bytes(32)
        self._most, self._most_of_one = most, most_of_one
        self._lock = threading.Lock()
        self._logins: dict[str, tuple[float, Login]] = {}  # until when, the oldest first

    @staticmethod
    def new() -> str:
        """A session's id."""
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
        """It is nobody's from now on."""
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
        """Makes a new key, so that links of a former process are void. Raises OSError, StoreError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = secrets.token_hex(32)
        atomic_file.replace(folder / KEY_FILE, self._key.encode(), "the dashboard's key", durable=False, mode=0o600)
        self._used: dict[str, int] = {}

    def use(self, link: str, now_s: float) -> str:
        """The user for whom it was made; empty for the store's account. Raises RefusedError for a link that is false, old or
        used.
        """
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
