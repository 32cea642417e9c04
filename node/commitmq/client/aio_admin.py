"""The asyncio twin of the admin client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from commitmq.client.admin import Admin

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _in_thread(
    method: Callable[Concatenate[Admin, _P], _R],
) -> Callable[Concatenate[AsyncAdmin, _P], asyncio.Future[_R]]:
    """The asynchronous twin of one of Admin's methods."""

    def call(self: AsyncAdmin, /, *arguments: _P.args, **named: _P.kwargs) -> asyncio.Future[_R]:
        work = partial(method, self._admin, *arguments, **named)
        return asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    call.__name__ = method.__name__
    call.__qualname__ = f"AsyncAdmin.{method.__name__}"
    call.__doc__ = method.__doc__
    call.__wrapped__ = method  # type: ignore[attr-defined]  # its arguments, for help() and the reference
    return call


class AsyncAdmin:
    """:class:`commitmq.Admin` for asyncio: every method returns an awaitable."""

    def __init__(self, node: str | None = None, *, timeout_s: float = 10.0) -> None:
        self._admin = Admin(node, timeout_s=timeout_s)
        self.is_closed = False
        """True once :meth:`close` was called."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-admin")

    metadata = _in_thread(Admin.metadata)
    status = _in_thread(Admin.status)
    set_aside = _in_thread(Admin.set_aside)
    stop = _in_thread(Admin.stop)
    expire = _in_thread(Admin.expire)
    topic_create = _in_thread(Admin.topic_create)
    topic_update = _in_thread(Admin.topic_update)
    topics = _in_thread(Admin.topics)
    topic = _in_thread(Admin.topic)
    topic_delete = _in_thread(Admin.topic_delete)
    topics_idle = _in_thread(Admin.topics_idle)
    topic_delete_idle = _in_thread(Admin.topic_delete_idle)
    memory_use = _in_thread(Admin.memory_use)
    offsets = _in_thread(Admin.offsets)
    hidden_queues = _in_thread(Admin.hidden_queues)
    view = _in_thread(Admin.view)
    message = _in_thread(Admin.message)
    message_at = _in_thread(Admin.message_at)
    query = _in_thread(Admin.query)
    groups = _in_thread(Admin.groups)
    group = _in_thread(Admin.group)
    group_config = _in_thread(Admin.group_config)
    group_create = _in_thread(Admin.group_create)
    group_delete = _in_thread(Admin.group_delete)
    group_plan = _in_thread(Admin.group_plan)
    group_in_flight = _in_thread(Admin.group_in_flight)
    clients = _in_thread(Admin.clients)
    export_config = _in_thread(Admin.export_config)
    import_config = _in_thread(Admin.import_config)
    group_lag = _in_thread(Admin.group_lag)
    commit_offsets = _in_thread(Admin.commit_offsets)
    reset_offsets = _in_thread(Admin.reset_offsets)
    set_offsets = _in_thread(Admin.set_offsets)
    dlq_groups = _in_thread(Admin.dlq_groups)
    dlq_list = _in_thread(Admin.dlq_list)
    dlq_show = _in_thread(Admin.dlq_show)
    dlq_resend = _in_thread(Admin.dlq_resend)
    dlq_purge = _in_thread(Admin.dlq_purge)
    dispatchers = _in_thread(Admin.dispatchers)
    dispatcher_query = _in_thread(Admin.dispatcher_query)
    dispatcher_retry = _in_thread(Admin.dispatcher_retry)
    dispatcher_restart = _in_thread(Admin.dispatcher_restart)
    dispatcher_skip = _in_thread(Admin.dispatcher_skip)
    dispatcher_reset = _in_thread(Admin.dispatcher_reset)

    delayed = _in_thread(Admin.delayed)
    delayed_recall = _in_thread(Admin.delayed_recall)
    transactions = _in_thread(Admin.transactions)
    transaction_resolve = _in_thread(Admin.transaction_resolve)

    async def close(self) -> None:
        """Close every connection."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._admin.close)
        finally:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
