"""worker-dashboard: serves the dashboard's pages and ``/api/v1``.

Owns ``commitmq/workers/dashboard/login.key``. It asks the node as a client does and reads its files as a reader does, when
a visitor asks, in a few threads; without visitors it does nothing but its heartbeat, and a sample of figures every minute. A
death loses nothing but logins and these histories.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from commitmq.errors import CommitMQError
from commitmq.plugin import WorkerContext, run_async
from commitmq_plugins.dashboard.api.node import Shared
from commitmq_plugins.dashboard.app import App
from commitmq_plugins.dashboard.settings import DashboardSettings
from commitmq_plugins.http_server import HttpLimits, HttpServer

_LOOK_S: Final = 0.05
_DRAIN_S: Final = 3.0  # a resend of dead letters may take longer: it goes on with the next one


def run(context: WorkerContext) -> None:
    """Serve until the node stops."""
    run_async(context, lambda stopping: _serve(context, stopping))


async def _serve(context: WorkerContext, stopping: asyncio.Event) -> None:
    settings: DashboardSettings = context.params["settings"]
    shared = Shared(context, settings)
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
