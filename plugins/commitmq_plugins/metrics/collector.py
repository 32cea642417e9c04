"""Makes the answers to scrapes, and shares one among those that come at the same time."""

from __future__ import annotations

import time
from typing import Final

from commitmq.plugin import WorkerContext
from commitmq_plugins.metrics.exporter import Exporter
from commitmq_plugins.metrics.figures import Gathering
from commitmq_plugins.metrics.health import Health
from commitmq_plugins.metrics.native import Native
from commitmq_plugins.metrics.own import Own
from commitmq_plugins.metrics.page import Page

NORMAL: Final = ""
EXPORTER: Final = "exporter"
KINDS: Final = (NORMAL, EXPORTER)


class Collector:
    """Makes pages. For one thread: the server's loop is another one."""

    def __init__(self, context: WorkerContext, health: Health) -> None:
        self._context, self._health = context, health
        self._gathering = Gathering(context)
        self._exporter = Exporter(context.config)
        self._age_s = context.config.metrics.age_ms / 1000
        self._pages: dict[str, tuple[float, Page]] = {}
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

    def _made(self, kind: str, now_s: float) -> Page:
        config = self._context.config
        page = Page(config.metrics.max_series)
        figures = self._gathering.gather()
        if kind == EXPORTER:
            self._exporter.write(page, figures, now_s)
            return page
        own = Own(page, config, figures, self._gathering.lags)
        native = Native(page, config, figures, may_write=self._health.may_write())
        # Clients make topics and groups, and a page is bounded: what comes last is left out first.
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
