"""Answers to clients: they leave through ZeroMQ's own queues, and any failure becomes the answer to one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import zmq

from commitmq.errors import CommitMQError, FilterError, ProtocolError
from commitmq.log import Log
from commitmq.network.router import Router
from commitmq.protocol import wire
from commitmq.security.native_rights import Actions
from commitmq.store.queues.queue_reader import VIEW_BYTES
from commitmq.workers.reader.filters import FAILED
from commitmq.workers.reader.places import NoSuchQueueError


class Answers:
    """Sends the answers of one reader over its ROUTER."""

    def __init__(self, router: Router, log: Log) -> None:
        self._router = router
        self.unsent = router.unsent
        self._log = log
        # This code decides whether a frame is copied, not pyzmq's own threshold.
        router.copy_threshold = 0

    def is_local(self, client: bytes) -> bool:
        """Whether the client is a process of the node's own account."""
        found = self._router.gate.peers.get(client)
        return found is not None and found.is_local

    def user_of(self, header: dict[str, Any]) -> str | None:
        """Whose quotas hold for the request that was just taken, see :meth:`Router.user_of`."""
        return self._router.user_of(header)

    def lacks(self, header: dict[str, Any], topics: Iterable[str], actions: Actions) -> str | None:
        """Why who sent the request that was just taken may not use one of ``topics``; see :meth:`Guard.lacks`."""
        guard = self._router.guard
        return None if guard is None else guard.lacks(header, topics, actions)

    def guarded(self, client: bytes, request: int, work: Callable[..., None], *arguments: Any) -> None:
        """Do ``work``. Any failure becomes the answer to this one request."""
        try:
            work(*arguments)
        except FilterError as error:
            self._log.error("a filter failed", error=str(error))
            self.send(client, wire.error(request, FAILED, str(error)))
        except ProtocolError as error:
            more = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
            if isinstance(error, NoSuchQueueError):
                more["read_queues"] = error.read_queues
            self.send(client, wire.error(request, error.code, error.message, **more))
        except (CommitMQError, OSError) as error:
            self._log.error("request failed", error=str(error))
            self.send(client, wire.error(request, "SYSTEM_ERROR", str(error)))
        except Exception as error:
            self._log.exception("request failed unexpectedly", error=repr(error))
            self.send(client, wire.error(request, "SYSTEM_ERROR", f"unexpected: {error!r}"))

    def send(self, client: bytes, header: bytes, frames: list[Any] | None = None) -> None:
        """Answer ``client``. A client that has gone costs nothing: the ROUTER drops messages that it cannot route."""
        if not frames:
            self._router.send_multipart([client, header])
            return
        send = self._router.send
        send(client, zmq.SNDMORE)
        send(header, zmq.SNDMORE)
        for frame in frames[:-1]:
            send(frame, zmq.SNDMORE, copy=len(frame) < VIEW_BYTES)
        last = frames[-1]
        if self.unsent.wants_tracker(client, sum(map(len, frames))):
            self.unsent.add(client, send(last, copy=False, track=True))
        else:
            send(last, copy=len(last) < VIEW_BYTES)
