"""A worker with no work: it does nothing but what every worker must, so that tests see the supervisor and nothing else.

``params`` come from the supervisor; what a test wants is read from files in the store's ``own`` folder, named after the
role: ``ROLE.fail`` (raise StoreError with its text), ``ROLE.crash`` (raise RuntimeError), ``ROLE.deaf`` (ignore
``stop``), ``ROLE.stuck`` and ``recovery.silent`` (do not turn the loop for a minute).
"""

from __future__ import annotations

import os
import time

from commitmq.control import DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.workers.runtime.context import WorkerContext


def run(context: WorkerContext) -> None:
    own = context.layout.own
    with open(own / "order", "ab", buffering=0) as order:
        order.write(f"start {context.role} {os.getpid()} {context.params.get('clean')}\n".encode())
    if (own / f"{context.role}.fail").exists():
        raise StoreError((own / f"{context.role}.fail").read_text(), path=context.layout.root)
    if (own / f"{context.role}.crash").exists():
        raise RuntimeError("crash wanted")
    if context.role == "recovery":
        time.sleep(60 if (own / "recovery.silent").exists() else 0)
        for word in (Word.WRITTEN, Word.FLUSHED, Word.REPUT):
            context.control.put(word, 1000)
        for position in (DispatcherWord.DISPATCHED, DispatcherWord.DURABLE):
            context.control.put_dispatcher(0, position, 1000)
        context.ready()
        return
    if context.role in ("writer", "coordinator") or context.role.startswith("reader"):
        router, endpoints = context.bind_router(context.role)
        context.register(router)
        context.ready(endpoints=endpoints)
    else:
        context.ready()
    while not context.stopping or (own / f"{context.role}.deaf").exists():
        context.wait(100)
        time.sleep(60 if (own / f"{context.role}.stuck").exists() else 0)
    with open(own / "order", "ab", buffering=0) as order:
        order.write(f"stop {context.role} {os.getpid()}\n".encode())
