"""worker-dashboard: serves the dashboard's pages and ``/api/v1``.

Owns ``commitmq/workers/dashboard/login.key``. It asks the node as a client does and reads its files as a reader does, when
a visitor asks, in a few threads; without visitors it does nothing but its heartbeat, and a sample of figures every minute. A
death loses nothing but logins and these histories.

On a node with users or keys a visitor logs in: by a one-time link, or as a user with the user's secret. A login is a session
of this process. Whose user is gone, is disabled, or has another secret since, is logged out. A user's secret is the one with
which RocketMQ's clients sign; wrong ones are counted, so that none is found by trying.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import parse_qs, unquote

import orjson

from commitmq.errors import (
    CommitMQError,
    GroupNotFoundError,
    InvalidMessageError,
    NodeUnavailableError,
    RequestError,
    RequestTimeoutError,
    TopicNotFoundError,
)
from commitmq.plugin import Actor, Event, WorkerContext, run_async
from commitmq.security.policy import Secret
from commitmq_plugins.dashboard import DashboardSettings
from commitmq_plugins.dashboard.api.messages import MessageQuery, NotThereError, body
from commitmq_plugins.dashboard.api.node import BadValueError, SharedNode, VisitorNode, take
from commitmq_plugins.dashboard.api.routes import ROOT, ROUTES, Route, document, match
from commitmq_plugins.dashboard.guard import (
    TOKEN_HEADER,
    Login,
    Logins,
    NotAllowedError,
    RefusedError,
    Rights,
    Sessions,
    check_host,
    check_origin,
    cookie_of,
    set_cookie,
)
from commitmq_plugins.dashboard.pages import STYLE, Renderer, navigation
from commitmq_plugins.http_server import HttpLimits, HttpServer, Request, Response

PROTOCOL: Final = "dashboard"
_MINUTE_S: Final = 60.0
_MOST_OF_ONE: Final = 10
_MOST_OF_ALL: Final = 100
_WRONG: Final = "there is no such user with this secret"


class LoginAttempts:
    """Wrong secrets of a minute: after 10 of a user, or 100 of all, none are looked at but links. Thread-safe."""

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


class LoginService:
    """Logins of one dashboard. Thread-safe."""

    def __init__(self, shared: SharedNode, folder: Path) -> None:
        """Raises OSError, StoreError: the links' key cannot be written."""
        self._shared, self._audit = shared, shared.context.audit
        self.sessions = Sessions(shared.settings.max_sessions, shared.settings.max_sessions_per_user)
        self._logins = Logins(folder)
        self._attempts = LoginAttempts()
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


_JSON: Final = "application/json"
_HTML: Final = "text/html; charset=utf-8"
_MOST_VALUES: Final = 200
_LOGIN: Final = "login.html"
_Made = TypeVar("_Made")
# No script at all, nothing of another origin, no frame around it. A referrer stays within: without one a browser would not say
# the origin of a form either.
HEADERS: Final = (
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_ICON: Final = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#0b6bcb" '
    b'd="M1 2h14v3H1zm0 4.5h14v3H1zM1 11h9v3H1z"/></svg>'
)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks: the session of the cookie, empty without one. ``may_begin``: a page may give a new one. ``rights`` is None
    for a visitor who must log in first.

    A browser that follows a link of another site leaves the cookie out. A new one would replace it, and with it the login.
    """

    session: str
    host: str
    may_begin: bool
    rights: Rights | None = None


class App:
    """Answers requests; work for the node is done in ``threads``."""

    def __init__(self, shared: SharedNode, threads: Executor, folder: Path) -> None:
        """``folder``: that of the key of links. Raises OSError, StoreError."""
        self._shared, self._threads = shared, threads
        self._log = shared.context.log
        self._names = shared.settings.host_names()
        self._entrance = LoginService(shared, folder)
        self._sessions = self._entrance.sessions
        self._renderer = Renderer()
        self.working = 0
        """Functions that threads run, or will."""
        self._openapi = json.dumps(document(ROUTES)).encode()

    async def answer(self, request: Request) -> Response:
        is_api = request.path.startswith(f"{ROOT}/") or request.path.startswith("/health")
        visitor = Visitor("", "", may_begin=False)
        try:
            host = check_host(request, self._names)
            is_own = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
            session = cookie_of(request.headers)
            rights = self._entrance.rights(session, request.peer)
            visitor = Visitor(session, host, may_begin=is_own and request.method != "POST", rights=rights)
            response = await self._answer(request, visitor)
        except Exception as error:
            status, text = _refusal(error)
            if status is HTTPStatus.INTERNAL_SERVER_ERROR:
                self._log.exception("a page failed", path=request.path[:100], error=repr(error))
            if is_api:
                response = _json({"error": text}, status)
            else:
                response = self._error_page(visitor, text, status)
        return dataclasses.replace(response, headers=(*HEADERS, *response.headers))

    async def _answer(self, request: Request, visitor: Visitor) -> Response:
        fixed = self._fixed(request)
        if fixed is not None:
            return fixed
        if request.path in ("/login", "/logout"):
            return self._log_in_or_out(request, visitor)
        if visitor.rights is None:
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED, "this node has users: `commitmq dashboard` prints a link to log in"
            )
        if request.path == f"{ROOT}/session":
            session = visitor.session or self._sessions.new()
            answer = _json({"token": self._sessions.token(session), "user": visitor.rights.actor.name})
            return dataclasses.replace(answer, headers=(set_cookie(session),))
        node = VisitorNode(self._shared, visitor.rights)
        if request.path.startswith(f"{ROOT}/"):
            return await self._api(request, visitor, node)
        return await self._html(request, visitor, node)

    def _fixed(self, request: Request) -> Response | None:
        """What needs neither login nor the node."""
        if request.path == "/health/live":
            return _json({"live": True})
        if request.path == "/health/ready":
            answer = self._shared.health.answer()
            status = HTTPStatus.OK if answer["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
            return _json(answer, status)
        if request.path == "/style.css":
            return Response(STYLE, "text/css; charset=utf-8")
        if request.path in ("/icon.svg", "/favicon.ico"):
            return Response(_ICON, "image/svg+xml")
        if request.path == f"{ROOT}/openapi.json":
            return Response(self._openapi, _JSON)
        return None

    def _log_in_or_out(self, request: Request, visitor: Visitor) -> Response:
        if request.method == "POST":
            form = _form_values(request)
            [token, name, secret] = ([*form.get(one, ()), ""][0] for one in ("token", "user", "secret"))
            self._check_change(request, visitor, token)
            if request.path == "/logout":
                self._sessions.log_out(visitor.session)
                return _see_other("/login")
            return _see_other("/", self._entrance.by_secret(name, secret, request.peer))
        [link] = parse_qs(request.query).get("link", [""])[-1:]
        if link and request.method == "GET" and request.path == "/login":
            return _see_other("/", self._entrance.by_link(link, request.peer))
        return self._login_page(visitor, "", HTTPStatus.OK)

    # ------------------------------------------------------------ JSON

    async def _api(self, request: Request, visitor: Visitor, node: VisitorNode) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        methods = []
        for route in ROUTES:
            values = match(route.api_path, request.path)
            if values is None:
                continue
            methods.append(route.method)
            if route.method != method:
                continue
            given: dict[str, Sequence[Any]] = {name: [one] for name, one in values.items()}
            if method == "POST":
                self._check_change(request, visitor, request.headers.get(TOKEN_HEADER, ""))
                _add(given, _json_values(request))
            else:
                _add(given, _query_values(request.query))
            return _json(await self._work(node, route, take(route.asks, given)))
        if methods:
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"this path takes {' and '.join(methods)}")
        raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no {request.path[:100]}; {ROOT}/openapi.json has all paths")

    async def _work(self, node: VisitorNode, route: Route, asked: Any) -> Any:
        if route.method == "POST":
            who, what = node.rights.actor, route.work.__name__
            shown = {"user": who.name, "address": who.address, "values": _shown(asked)}
            self._log.info("a change from the dashboard", what=what, **shown)
        return await self._in_thread(partial(route.work, node, asked))

    async def _in_thread(self, work: Callable[[], _Made]) -> _Made:
        done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self.working += 1
        done.add_done_callback(self._count_down)
        # A visitor who has gone ends this coroutine, and not the thread.
        return await asyncio.shield(done)

    async def sample(self) -> None:
        """Take samples for the histories until it is cancelled. A node that does not answer leaves a gap."""
        step_s = self._shared.settings.history_s
        while step_s:
            await asyncio.sleep(step_s)
            try:
                await self._in_thread(self._shared.sample)
            except CommitMQError as error:
                self._log.debug("a sample is missing", why=str(error))
            except Exception as error:
                self._log.exception("a sample failed", error=repr(error))

    def _count_down(self, done: asyncio.Future[Any]) -> None:
        self.working -= 1
        if not done.cancelled():
            done.exception()  # seen, also where the visitor has gone

    def _check_change(self, request: Request, visitor: Visitor, token: str) -> None:
        check_origin(request, visitor.host)
        self._sessions.check_token(visitor.session, token)

    # ------------------------------------------------------------ pages

    async def _html(self, request: Request, visitor: Visitor, node: VisitorNode) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        if request.path.startswith("/messages/") and request.path.endswith("/body") and method == "GET":
            return await self._download(request, node)
        if request.path == "/" and not node.rights.may("admin", "status"):
            return _see_other("/topics")
        for page in ROUTES:
            values = match(page.path, request.path)
            if values is None or page.method != method:
                continue
            given: dict[str, Sequence[Any]] = {name: [one] for name, one in values.items()}
            if method == "POST":
                form = _form_values(request)
                self._check_change(request, visitor, str(form.pop("token", [""])[-1]))
                _add(given, form)
            else:
                _add(given, _query_values(request.query))
            if page.is_only_a_form(given):
                return self._page(page.template, visitor, {"data": None, "asked": _first(page.asks, given)})
            asked = take(page.asks, given)
            data = await self._work(node, page, asked)
            shown = {"data": data, "asked": _first(page.asks, given)}
            return await self._in_thread(partial(self._page, page.template, visitor, shown))
        raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no page {request.path[:100]}")

    async def _download(self, request: Request, node: VisitorNode) -> Response:
        name = unquote(request.path.removeprefix("/messages/").removesuffix("/body"), errors="strict")
        given: dict[str, Sequence[Any]] = {"id": [name]}
        _add(given, _query_values(request.query))
        asked = take(MessageQuery, given)
        data = await self._in_thread(partial(body, node, asked))
        save = ("Content-Disposition", 'attachment; filename="message.bin"')
        return Response(data, "application/octet-stream", headers=(save,))

    def _page(
        self, template: str, visitor: Visitor, values: dict[str, Any], status: HTTPStatus = HTTPStatus.OK
    ) -> Response:
        is_whole = status is HTTPStatus.OK or template == _LOGIN
        begins = not visitor.session and visitor.may_begin and is_whole
        session = self._sessions.new() if begins else visitor.session
        rights = visitor.rights
        common = {
            "token": self._sessions.token(session),
            "problems": [] if rights is None else self._shared.health.reasons(),
            "visitor": rights,
            "navigation": () if rights is None else navigation(rights),
            "can_log_out": self._sessions.login(session) is not None,
        }
        html = self._renderer.page(template, {**common, **values})
        headers = (set_cookie(session),) if begins else ()
        return Response(html, _HTML, status, headers)

    def _error_page(self, visitor: Visitor, text: str, status: HTTPStatus) -> Response:
        if visitor.rights is None and visitor.host:
            return self._login_page(visitor, text, status)
        return self._page("error.html", visitor, {"text": text, "status": status}, status)

    def _login_page(self, visitor: Visitor, text: str, status: HTTPStatus) -> Response:
        takes_secret = self._shared.settings.secret_login and self._shared.asks_for_login
        return self._page(_LOGIN, visitor, {"text": text, "takes_secret": takes_secret}, status)


def _see_other(path: str, session: str = "") -> Response:
    headers = (("Location", path), *((set_cookie(session),) if session else ()))
    return Response(b"", status=HTTPStatus.SEE_OTHER, headers=headers)


def _refusal(error: Exception) -> tuple[HTTPStatus, str]:
    """Status and sentence of an answer about a failure."""
    kinds: tuple[tuple[type[Exception], HTTPStatus], ...] = (
        (BadValueError, HTTPStatus.BAD_REQUEST),
        (NotAllowedError, HTTPStatus.FORBIDDEN),
        (TopicNotFoundError, HTTPStatus.NOT_FOUND),
        (GroupNotFoundError, HTTPStatus.NOT_FOUND),
        (NotThereError, HTTPStatus.NOT_FOUND),
        (NodeUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
        (RequestTimeoutError, HTTPStatus.SERVICE_UNAVAILABLE),
        (InvalidMessageError, HTTPStatus.BAD_REQUEST),
        (UnicodeDecodeError, HTTPStatus.BAD_REQUEST),
        (ValueError, HTTPStatus.BAD_REQUEST),
        (RequestError, HTTPStatus.CONFLICT),
        (CommitMQError, HTTPStatus.BAD_GATEWAY),
    )
    if isinstance(error, RefusedError):
        return error.status, str(error)
    for kind, status in kinds:
        if isinstance(error, kind):
            return status, str(error)[:2_000]
    return HTTPStatus.INTERNAL_SERVER_ERROR, "the dashboard failed on this request; the node's log says why"


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(value, default=_not_text) + b"\n", _JSON, status)


def _not_text(value: Any) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is no JSON")


def _query_values(query: str) -> dict[str, list[str]]:
    return parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=_MOST_VALUES)


def _form_values(request: Request) -> dict[str, list[str]]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a page takes forms")
    return _query_values(request.body.decode("ascii"))


def _json_values(request: Request) -> dict[str, list[Any]]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{ROOT} takes {_JSON}")
    try:
        found = orjson.loads(request.body)
    except ValueError as error:
        raise BadValueError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadValueError("the body is a JSON object")
    return {name: one if isinstance(one, list) else [one] for name, one in found.items()}


def _add(given: dict[str, Sequence[Any]], more: dict[str, Any]) -> None:
    """What a path names counts."""
    for name, one in more.items():
        if name in given:
            raise BadValueError(f"{name} is in the path already")
        given[name] = one


def _first(schema: type[Any], given: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """What a form shows again: texts, empty for values that were not given."""
    none = {one.name: "" for one in dataclasses.fields(schema)}
    return none | {name: one[-1] if one else "" for name, one in given.items()}


def _shown(asked: Any) -> str:
    """A change for the log, without bodies."""
    values = {one.name: getattr(asked, one.name) for one in dataclasses.fields(asked) if one.name != "body"}
    return json.dumps(values)[:500]


_LOOK_S: Final = 0.05
_DRAIN_S: Final = 3.0  # a resend of dead letters may take longer: it continues with the next one


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings: DashboardSettings = context.params["settings"]
    shared = SharedNode(context, settings)
    threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="page")
    app = App(shared, threads, context.folder)
    limits = HttpLimits(
        settings.max_connections, settings.max_request_bytes, settings.timeout_ms / 1000, settings.max_body_bytes
    )
    server = HttpServer(app.answer, limits, context.log)
    try:
        host, port = await server.listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        why = error.strerror or str(error)
        raise CommitMQError(
            f"the dashboard cannot listen on {where}: {why} (plugins.dashboard.host, plugins.dashboard.port)"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    context.tell(has_keys=context.has_keys)
    context.ready(endpoints=[f"http://{shown}:{port}"])
    context.log.info("the dashboard is served", host=host, port=port)
    sampling = asyncio.create_task(app.sample())
    try:
        await stopping.wait()
        await server.close()
    finally:
        sampling.cancel()
        threads.shutdown(wait=False, cancel_futures=True)
    until_s = time.monotonic() + _DRAIN_S
    while app.working and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)
    if not app.working:
        shared.close()
