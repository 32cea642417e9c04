"""worker-metrics: answers ``/metrics``, ``/health/live`` and ``/health/ready``.

Owns no file. Reads the control block, the tables of counts, ConsumeQueues and log; asks coordinator and supervisor, at a
scrape only. Without a scrape it does nothing but its heartbeat. A death loses nothing: counts are in the processes' tables.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from commitmq.errors import CommitMQError
from commitmq.plugin import WorkerContext, run_async
from commitmq_plugins.http_server import HttpLimits, HttpServer, Request, Response
from commitmq_plugins.metrics.collector import KINDS, NORMAL, Collector
from commitmq_plugins.metrics.health import Health
from commitmq_plugins.metrics.page import OPENMETRICS_TYPE, TEXT_TYPE
from commitmq_plugins.metrics.tokens import Tokens

_JSON: Final = "application/json"


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings = context.config.metrics
    tokens = Tokens(Path(settings.token_file), context.log) if settings.token_file else None
    health = Health(context)
    collector = Collector(context, health)
    # One thread gathers: two scrapes at a time share its answer, and the loop goes on meanwhile.
    thread = ThreadPoolExecutor(1, thread_name_prefix="gather")
    answers = Answers(collector, health, thread, tokens)
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


class Answers:
    """The answers of the server."""

    def __init__(
        self, collector: Collector, health: Health, thread: ThreadPoolExecutor, tokens: Tokens | None = None
    ) -> None:
        """``tokens``: those that ``/metrics`` asks for; None where it asks nobody."""
        self._collector, self._health, self._thread, self._tokens = collector, health, thread, tokens

    async def answer(self, request: Request) -> Response:
        """The answer to one request."""
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
            return Response(b"compat is exporter, or is left out\n", status=HTTPStatus.BAD_REQUEST)
        # Some gauges of the exporter end with _total, which OpenMetrics keeps for counters.
        openmetrics = "application/openmetrics-text" in request.headers.get("accept", "") and kind == NORMAL
        work = partial(self._collector.body, kind, openmetrics=openmetrics)
        body = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return Response(body, OPENMETRICS_TYPE if openmetrics else TEXT_TYPE)


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
