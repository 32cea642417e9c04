"""worker-metrics: answers ``/metrics``, ``/health/live`` and ``/health/ready``.

Owns no file. Reads the control block, the tables of counts, ConsumeQueues and log; asks coordinator and supervisor, at
a scrape only. Without a scrape it does nothing but its heartbeat. Scrapes at the same time share one answer. A death loses
nothing: counts are in the processes' tables.

``/metrics`` is for whoever sends a token of ``metrics.token_file``, as ``Authorization: Bearer TOKEN``. The file has a token
a line, so that a new one can come before the old one goes; blank lines and lines that begin with ``#`` are omitted. It is
read again when it has changed. A later file that is missing or wrong changes nothing: the tokens of before stay, the log
tells once, and each look tries again. ``/health`` needs no token: a probe has none, and learns only whether the node
serves.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from commitmq.errors import CommitMQError, StoreError
from commitmq.log import Log
from commitmq.plugin import WorkerContext, run_async
from commitmq.security.policy import Secret
from commitmq_plugins.http_server import HttpLimits, HttpServer, Request, Response
from commitmq_plugins.metrics.exposition import OPENMETRICS_TYPE, TEXT_TYPE, Exposition
from commitmq_plugins.metrics.figures import FigureCollector, Health
from commitmq_plugins.metrics.native import Exporter, MetricsWriter, Native

LEAST_CHARACTERS: Final = 16
MOST_TOKENS: Final = 16
_MOST_BYTES: Final = 64 * 1024
_SCHEME: Final = "bearer"


class Tokens:
    """Made while a node starts: raises StoreError for a file that cannot be used."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path, self._log = path, log
        self._told = ""
        self._seen = self._state()
        self._digests = self._read()

    def allows(self, authorization: str) -> bool:
        """Whether the header ``Authorization`` of a request has a token of the file."""
        self._look()
        scheme, _, told = authorization.strip().partition(" ")
        digest = hashlib.sha256(told.strip().encode(errors="replace")).digest()
        # Each is compared, in a time that tells nothing of the tokens.
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        return scheme.lower() == _SCHEME and any(found)

    def _look(self) -> None:
        if (state := self._state()) == self._seen:
            return
        try:
            self._digests = self._read()
        except StoreError as error:
            if (reason := str(error)) != self._told:
                self._told = reason
                self._log.error("the tokens of metrics cannot be read; those of before stay", error=reason)
            return
        self._seen, self._told = state, ""
        self._log.info("the tokens of metrics were read", count=len(self._digests))

    def _state(self) -> tuple[int, int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size

    def _read(self) -> list[bytes]:
        try:
            with open(self._path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise StoreError(f"cannot read metrics.token_file: {error.strerror}", path=self._path) from error
        if mode & 0o007:
            raise StoreError(
                f"every account of this machine can read metrics.token_file: chmod o= {self._path}", path=self._path
            )
        lines = [one.strip() for one in data.decode(errors="replace").splitlines()]
        tokens = [one for one in lines if one and not one.startswith("#")]
        if not 0 < len(tokens) <= MOST_TOKENS or len(data) > _MOST_BYTES:
            raise StoreError(f"metrics.token_file has 1 to {MOST_TOKENS} tokens, one a line", path=self._path)
        try:
            secrets = [Secret(one) for one in tokens]
        except ValueError as error:
            raise StoreError(f"metrics.token_file: {error}", path=self._path) from None
        if any(len(one.reveal()) < LEAST_CHARACTERS for one in secrets):
            raise StoreError(
                f"metrics.token_file: a token has {LEAST_CHARACTERS} characters or more, as `openssl rand -hex 32` makes",
                path=self._path,
            )
        return [hashlib.sha256(one.reveal().encode()).digest() for one in secrets]


NORMAL: Final = ""
EXPORTER: Final = "exporter"
KINDS: Final = (NORMAL, EXPORTER)


class Collector:
    """Makes pages. For one thread: the server's loop is another one."""

    def __init__(self, context: WorkerContext, health: Health) -> None:
        self._context, self._health = context, health
        self._gathering = FigureCollector(context)
        self._exporter = Exporter(context.config)
        self._age_s = context.config.metrics.age_ms / 1000
        self._pages: dict[str, tuple[float, Exposition]] = {}
        self._bodies: dict[tuple[str, bool], tuple[float, bytes]] = {}

    def close(self) -> None:
        self._gathering.close()

    def body(self, kind: str, *, openmetrics: bool) -> bytes:
        """An answer, ``metrics.age_ms`` old at most when it was asked for."""
        asked_s = time.monotonic()
        made_s, page = self._pages.get(kind, (0.0, None))
        if page is None or asked_s - made_s >= self._age_s:
            page = self._made(kind, asked_s)
            made_s = asked_s
            self._pages[kind] = made_s, page
        at_s, body = self._bodies.get((kind, openmetrics), (0.0, b""))
        if at_s != made_s:
            body = page.openmetrics() if openmetrics else page.text()
            self._bodies[kind, openmetrics] = made_s, body
        return body

    def _made(self, kind: str, now_s: float) -> Exposition:
        config = self._context.config
        page = Exposition(config.metrics.max_series)
        figures = self._gathering.gather()
        if kind == EXPORTER:
            self._exporter.write(page, figures, now_s)
            return page
        own = MetricsWriter(page, config, figures, self._gathering.lags)
        native = Native(page, config, figures, may_write=self._health.may_write())
        # Clients make topics and groups, and a page is bounded: what comes last is omitted first.
        own.write_node(ready=not self._health.reasons())
        native.write_node()
        for group, topic, lag in figures.furthest_behind():
            own.write_lag(group, topic, lag)
            native.write_lag(group, topic, lag)
        own.write_names()
        native.write_names()
        own.write_histograms()
        native.write_histograms()
        own.write_answer(time.monotonic() - now_s, self._gathering.errors)
        return page


_JSON: Final = "application/json"


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings = context.config.metrics
    tokens = Tokens(Path(settings.token_file), context.log) if settings.token_file else None
    health = Health(context)
    collector = Collector(context, health)
    # One thread gathers: two scrapes at a time share its answer, and the loop continues in the meantime.
    thread = ThreadPoolExecutor(1, thread_name_prefix="gather")
    answers = ScrapeHandler(collector, health, thread, tokens)
    limits = HttpLimits(settings.max_connections, settings.max_request_bytes, settings.timeout_ms / 1000)
    server = HttpServer(answers.answer, limits, context.log)
    try:
        host, port = await server.listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        why = error.strerror or str(error)
        raise CommitMQError(f"metrics cannot listen on {where}: {why} (metrics.host, metrics.port)") from error
    shown = f"[{host}]" if ":" in host else host
    context.ready(endpoints=[f"http://{shown}:{port}"])
    context.log.info("metrics are served", host=host, port=port)
    try:
        await stopping.wait()
        await server.close()
        await asyncio.get_running_loop().run_in_executor(thread, collector.close)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class ScrapeHandler:
    """The answers of the server."""

    def __init__(
        self, collector: Collector, health: Health, thread: ThreadPoolExecutor, tokens: Tokens | None = None
    ) -> None:
        """``tokens``: those that ``/metrics`` asks for; None where it asks nobody."""
        self._collector, self._health, self._thread, self._tokens = collector, health, thread, tokens

    async def answer(self, request: Request) -> Response:
        if request.path == "/metrics":
            return await self._metrics(request)
        if request.path == "/health/live":
            return Response(_json({"live": True}), _JSON)
        if request.path == "/health/ready":
            answer = self._health.answer()
            status = HTTPStatus.OK if answer["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
            return Response(_json(answer), _JSON, status)
        if request.path == "/":
            return Response(b"CommitMQ: /metrics, /metrics?compat=exporter, /health/live, /health/ready\n")
        return Response(b"there is /metrics, /health/live and /health/ready\n", status=HTTPStatus.NOT_FOUND)

    async def _metrics(self, request: Request) -> Response:
        if self._tokens is not None and not self._tokens.allows(request.headers.get("authorization", "")):
            why = b"send a token of metrics.token_file as Authorization: Bearer TOKEN\n"
            return Response(why, status=HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"),))
        kind = parse_qs(request.query).get("compat", [""])[-1]
        if kind not in KINDS:
            return Response(b"compat is exporter, or is omitted\n", status=HTTPStatus.BAD_REQUEST)
        # Some gauges of the exporter end with _total, which OpenMetrics keeps for counters.
        openmetrics = "application/openmetrics-text" in request.headers.get("accept", "") and kind == NORMAL
        work = partial(self._collector.body, kind, openmetrics=openmetrics)
        body = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return Response(body, OPENMETRICS_TYPE if openmetrics else TEXT_TYPE)


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
