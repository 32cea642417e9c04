"""The loop of a worker that serves its clients by asyncio: the loop waits for the supervisor's words as well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from commitmq.workers.runtime.context import WorkerContext

_BEAT_S: Final = 0.5


def run_async(context: WorkerContext, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``main`` until it returns. Its event is set when the worker shall drain and return. Raises what ``main``
    raises, and SupervisorGone at the end of the lifeline: ``main`` is cancelled then.
    """
    asyncio.run(_run(context, main))


async def _run(context: WorkerContext, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    gone: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        try:
            context.wait(0)
        except BaseException as error:
            if not gone.done():
                gone.set_exception(error)
        if context.stopping:
            stopping.set()

    async def beat() -> None:
        while True:
            look()
            await asyncio.sleep(_BEAT_S)

    serving = asyncio.ensure_future(main(stopping))
    beating = asyncio.ensure_future(beat())
    loop.add_reader(context.fileno(), look)
    try:
        await asyncio.wait((serving, gone), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
            await asyncio.wait((serving,), timeout=1.0)
            gone.result()
        serving.result()
    finally:
        loop.remove_reader(context.fileno())
        beating.cancel()
        if gone.done():
            gone.exception()
