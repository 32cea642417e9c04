"""Who visits. On a node with users or keys a visitor logs in: by a one-time link, or as a user with the user's secret.

A login is a session of this process. Whose user is gone, is disabled, or has another secret since, is logged out. A user's
secret is the one with which RocketMQ's clients sign; wrong ones are counted, so that none is found by trying.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from http import HTTPStatus
from pathlib import Path
from typing import Final

from commitmq.plugin import Actor, Event
from commitmq.security.user import Secret
from commitmq_plugins.dashboard.api.rights import Rights
from commitmq_plugins.dashboard.api.shared import Shared
from commitmq_plugins.dashboard.guard import Login, Logins, RefusedError, Sessions

PROTOCOL: Final = "dashboard"
_MINUTE_S: Final = 60.0
_MOST_OF_ONE: Final = 10
_MOST_OF_ALL: Final = 100
_WRONG: Final = "there is no such user with this secret"


class Attempts:
    """Wrong secrets of the last minute: after 10 of a user, or 100 of all, no more are looked at. Links go on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wrong: deque[tuple[float, str]] = deque()

    def check(self, user: str, now_s: float) -> None:
        """Raises RefusedError when there were too many."""
        with self._lock:
            while self._wrong and now_s - self._wrong[0][0] > _MINUTE_S:
                self._wrong.popleft()
            of_one = sum(name == user for _, name in self._wrong)
            if of_one >= _MOST_OF_ONE or len(self._wrong) >= _MOST_OF_ALL:
                raise RefusedError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too many wrong secrets: wait a minute, or log in by a link (`commitmq dashboard --user NAME`)",
                )

    def note(self, user: str, now_s: float) -> None:
        """One more wrong secret."""
        with self._lock:
            self._wrong.append((now_s, user))


class Entrance:
    """Logins of one dashboard. Thread-safe."""

    def __init__(self, shared: Shared, folder: Path) -> None:
        """Raises OSError, StoreError: the links' key cannot be written."""
        self._shared, self._audit = shared, shared.context.audit
        self.sessions = Sessions(shared.settings.max_sessions, shared.settings.max_sessions_per_user)
        self._logins = Logins(folder)
        self._attempts = Attempts()
        self._cluster = shared.context.config.network.cluster_name

    def rights(self, session: str, address: str) -> Rights | None:
        """What the visitor of a session may do; None when he must log in first."""
        shared = self._shared
        if not shared.asks_for_login:
            return self._rights(Actor("", PROTOCOL, address), None)
        login = self.sessions.login(session)
        if login is None:
            return None
        if not login.user:
            return self._rights(Actor(f"uid {os.geteuid()}", PROTOCOL, address), None)
        user = shared.access().users.get(login.user)
        if user is None or not user.is_enabled or user.secret != login.secret:
            self.sessions.log_out(session)
            return None
        return self._rights(Actor(login.user, PROTOCOL, address), login.user)

    def _rights(self, actor: Actor, user: str | None) -> Rights:
        return Rights(actor, user, self._shared.access(), self._cluster, self._audit)

    def by_link(self, link: str, address: str) -> str:
        """The new session of a visitor with a link. Raises RefusedError."""
        name = self._logins.use(link, time.monotonic())
        if not name:
            return self._log_in(Login(), Actor(f"uid {os.geteuid()}", PROTOCOL, address), "a link")
        user = self._shared.access().users.get(name)
        actor = Actor(name, PROTOCOL, address)
        if user is None or not user.is_enabled:
            self._audit.refused(actor, "login", reason="there is no such user")
            raise RefusedError(HTTPStatus.FORBIDDEN, "the user of this link is gone, or disabled")
        return self._log_in(Login(name, user.secret), actor, "a link")

    def by_secret(self, name: str, secret: str, address: str) -> str:
        """The new session of a user who knows the secret. Raises RefusedError."""
        if not self._shared.settings.secret_login:
            raise RefusedError(HTTPStatus.FORBIDDEN, "plugins.dashboard.secret_login is off: log in by a link")
        now_s = time.monotonic()
        self._attempts.check(name, now_s)
        user = self._shared.access().users.get(name)
        actor = Actor(name[:128], PROTOCOL, address)
        try:
            given = Secret(secret)
        except ValueError:
            given = Secret.make()
        # One comparison for a user who is not there too: the time tells nothing.
        is_right = (Secret.make() if user is None else user.secret) == given
        if user is None or not is_right or not user.is_enabled:
            self._attempts.note(name, now_s)
            self._audit.refused(actor, "login", reason=_WRONG)
            raise RefusedError(HTTPStatus.FORBIDDEN, _WRONG)
        return self._log_in(Login(name, user.secret), actor, "the secret")

    def _log_in(self, login: Login, actor: Actor, by: str) -> str:
        self._audit.used(Event(actor, "login", reason=f"by {by}"))
        return self.sessions.log_in(login)
