"""The connection object, which has the node's address for all clients of a program: ``commitmq.connect(node)``."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from commitmq.client import checks
from commitmq.errors import CommitMQError
from commitmq.protocol.directory import Directory
from commitmq.protocol.node_address import with_profile

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.aio import AsyncAdmin, AsyncConsumer, AsyncProducer, AsyncReader, AsyncTold
    from commitmq.client.consumer import Consumer, GroupOptions, Reader, ReadOptions
    from commitmq.client.producer import Producer
    from commitmq.client.receiving.assignment import Queue
    from commitmq.client.receiving.settings import RebalanceCallback
    from commitmq.client.sending.options import ProducerOptions
    from commitmq.client.sharing.aio_share import AsyncShareConsumer
    from commitmq.client.sharing.share_consumer import ShareConsumer
    from commitmq.client.sharing.share_engine import ShareOptions

_AnyClient = TypeVar("_AnyClient")


def connect(node: str | None = None, *, profile: str | None = None, timeout_s: float = 10.0) -> Connection:
    """A connection to ``node``: the admin address, by default the environment's COMMITMQ_NODE, else tcp://127.0.0.1:7310.

    ``profile`` names the file with the keys of a user, ``~/.config/commitmq/NAME.toml``: the connection is encrypted, and the
    node's key is checked. ``connect("commitmq://host:7310", profile="NAME")`` is ``connect("commitmq://NAME@host:7310")``,
    an address that every client takes. Without ``node`` the profile's own address is used.

    Raises NodeUnavailableError when the node does not answer within ``timeout_s`` (seconds), NodeAddressError for a bad
    address, ConfigError for a profile that cannot be used, AuthenticationError when the node does not know its key,
    ProtocolError when the node refuses.
    """
    timeout_s = checks.seconds("timeout_s", timeout_s)
    directory = Directory(with_profile(node, profile))
    try:
        directory.metadata(timeout_s=timeout_s)
    finally:
        directory.close()
    return Connection(directory.address, timeout_s)


def connect_async(node: str | None = None, *, profile: str | None = None, timeout_s: float = 10.0) -> AsyncConnection:
    """As :func:`connect`, for asyncio. The connection asks the node when it is entered."""
    return AsyncConnection(with_profile(node, profile), checks.seconds("timeout_s", timeout_s))


class _Making:
    """What both kinds of a connection share: they make clients of one node, and keep them until they close them."""

    node: str
    timeout_s: float
    _is_closed = False

    def _make(self, kind: Callable[..., _AnyClient], *arguments: Any, **options: Any) -> _AnyClient:
        self._check_open()
        options.setdefault("timeout_s", self.timeout_s)
        made = kind(*arguments, node=self.node, **options)
        self._keep(made)
        return made

    @abstractmethod
    def _keep(self, client: Any) -> None:
        """Close ``client`` with the connection."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise CommitMQError("the connection is closed")


class Connection(_Making):
    """The result of :func:`commitmq.connect`. It makes clients, and closes the clients that are still open at its end.

    ``node`` is the address of the node. ``timeout_s`` is the default time for a request of a client. The clients of one
    connection share nothing else: each has sockets of its own. Any thread may make clients.
    """

    def __init__(self, node: str, timeout_s: float) -> None:
        self.node = node
        self.timeout_s = timeout_s
        self._clients: list[Admin | Consumer | Producer | Reader | ShareConsumer] = []
        self._lock = threading.Lock()

    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """A :class:`commitmq.Producer` of this node."""
        from commitmq.client.producer import Producer

        return self._make(Producer, **options)

    def consumer(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        **options: Unpack[GroupOptions],
    ) -> Consumer:
        """A :class:`commitmq.Consumer` of this node."""
        from commitmq.client.consumer import Consumer

        return self._make(Consumer, topics, group=group, on_assign=on_assign, on_revoke=on_revoke, **options)

    def reader(
        self,
        topics: str | Iterable[str] = (),
        *,
        queues: Iterable[Queue] | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        **options: Unpack[ReadOptions],
    ) -> Reader:
        """A :class:`commitmq.Reader` of this node."""
        from commitmq.client.consumer import Reader

        return self._make(Reader, topics, queues=queues, on_assign=on_assign, on_revoke=on_revoke, **options)

    def share_consumer(
        self, topics: str | Iterable[str], *, group: str, **options: Unpack[ShareOptions]
    ) -> ShareConsumer:
        """A :class:`commitmq.ShareConsumer` of this node."""
        from commitmq.client.sharing.share_consumer import ShareConsumer

        return self._make(ShareConsumer, topics, group=group, **options)

    def admin(self, *, timeout_s: float | None = None) -> Admin:
        """A :class:`commitmq.Admin` of this node."""
        from commitmq.client.admin import Admin

        return self._make(Admin, timeout_s=self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Close every client that is still open, the newest first. Closing twice is allowed.

        A producer sends its pending messages; a consumer commits as :meth:`commitmq.Consumer.close` says. If one of
        them fails, the others are closed all the same, and the first error is raised.
        """
        problem: BaseException | None = None
        while (client := self._newest()) is not None:
            try:
                client.close()
            except BaseException as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Connection({self.node!r})"

    def _keep(self, client: Any) -> None:
        with self._lock:
            if not self._is_closed:
                self._clients = [one for one in self._clients if not one._closed]
                self._clients.append(client)
                return
        client.close()  # another thread has closed the connection while this client connected
        raise CommitMQError("the connection is closed")

    def _newest(self) -> Admin | Consumer | Producer | Reader | ShareConsumer | None:
        """Take the newest client out of the list. No client is added any more."""
        with self._lock:
            self._is_closed = True
            return self._clients.pop() if self._clients else None


class AsyncConnection(_Making):
    """:class:`Connection` for asyncio, an async context manager: ``async with commitmq.connect_async(node) as connection``.

    It asks the node when it is entered. A consumer and a reader connect when they are entered, or by ``start``.
    """

    def __init__(self, node: str | None, timeout_s: float) -> None:
        self._directory = Directory(node)
        self.node = self._directory.address
        self.timeout_s = timeout_s
        self._clients: list[AsyncAdmin | AsyncConsumer | AsyncProducer | AsyncReader | AsyncShareConsumer] = []

    def producer(self, **options: Unpack[ProducerOptions]) -> AsyncProducer:
        """A :class:`commitmq.AsyncProducer` of this node."""
        from commitmq.client.aio import AsyncProducer

        return self._make(AsyncProducer, **options)

    def consumer(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        on_assign: AsyncTold | None = None,
        on_revoke: AsyncTold | None = None,
        **options: Unpack[GroupOptions],
    ) -> AsyncConsumer:
        """A :class:`commitmq.AsyncConsumer` of this node."""
        from commitmq.client.aio import AsyncConsumer

        return self._make(AsyncConsumer, topics, group=group, on_assign=on_assign, on_revoke=on_revoke, **options)

    def reader(
        self,
        topics: str | Iterable[str] = (),
        *,
        queues: Iterable[Queue] | None = None,
        on_assign: AsyncTold | None = None,
        on_revoke: AsyncTold | None = None,
        **options: Unpack[ReadOptions],
    ) -> AsyncReader:
        """A :class:`commitmq.AsyncReader` of this node."""
        from commitmq.client.aio import AsyncReader

        return self._make(AsyncReader, topics, queues=queues, on_assign=on_assign, on_revoke=on_revoke, **options)

    def share_consumer(
        self, topics: str | Iterable[str], *, group: str, **options: Unpack[ShareOptions]
    ) -> AsyncShareConsumer:
        """A :class:`commitmq.AsyncShareConsumer` of this node."""
        from commitmq.client.sharing.aio_share import AsyncShareConsumer

        return self._make(AsyncShareConsumer, topics, group=group, **options)

    def admin(self, *, timeout_s: float | None = None) -> AsyncAdmin:
        """A :class:`commitmq.AsyncAdmin` of this node."""
        from commitmq.client.aio import AsyncAdmin

        return self._make(AsyncAdmin, timeout_s=self.timeout_s if timeout_s is None else timeout_s)

    async def close(self) -> None:
        """Close every client that is still open; see :meth:`Connection.close`."""
        self._is_closed = True
        problem: BaseException | None = None
        while self._clients:
            client = self._clients.pop()
            try:
                await client.close()
            except BaseException as error:
                problem = problem or error
        if problem is not None:
            raise problem

    async def __aenter__(self) -> Self:
        self._check_open()
        asked: Future[None] = Future()
        # A daemon thread, not an executor's: the interpreter would wait at its end for a question that nobody waits for.
        threading.Thread(target=self._ask, args=(asked,), name="commitmq-aio-connect", daemon=True).start()
        await asyncio.wrap_future(asked)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncConnection({self.node!r})"

    def _ask(self, asked: Future[None]) -> None:
        """Ask the node what it is, in a thread of its own. The end of ``asked`` says how that went."""
        if not asked.set_running_or_notify_cancel():
            return
        try:
            try:
                self._directory.metadata(timeout_s=self.timeout_s)
            finally:
                self._directory.close()
        except BaseException as error:
            asked.set_exception(error)
        else:
            asked.set_result(None)

    def _keep(self, client: Any) -> None:
        self._clients = [one for one in self._clients if not one.is_closed]
        self._clients.append(client)
