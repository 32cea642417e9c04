"""The requests to one dispatcher, over a ROUTER of its own: queries, and the operations on its position.

    query {request}            the dispatcher's answer; only while it is not parked
    retry {}                   start a parked dispatcher again, with its code imported again
    restart {}                 the same for a dispatcher that is not parked: after its plugin was replaced
    skip {at}                  as retry, without the record it was parked at (its physical offset, so that a repeated
                               request skips nothing else)
    reset {to} or {timestamp}  continue at the beginning, the end, a record's physical offset or a store time

No request ends the process. A query that raises fails alone.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from commitmq.control import Word
from commitmq.errors import ProtocolError
from commitmq.workers.dispatcher import position_verbs
from commitmq.workers.dispatcher.dispatch_host import CONSUME_QUEUE, DispatcherHost
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.request_socket import RequestSocket

_MAX_TIME_MS: Final = 1 << 53
_MAX_DEPTH: Final = 254


class DispatcherRequests:
    """The socket and its operations."""

    def __init__(self, context: WorkerContext, host: DispatcherHost) -> None:
        self._context = context
        self._host = host
        self.restart_wanted = False
        operations = {
            "query": self._query,
            "retry": self._retry,
            "restart": self._restart,
            "skip": self._skip,
            "reset": self._reset,
        }
        changes: dict[str, tuple[str, ...]] = {
            "retry": (),
            "restart": (),
            "skip": ("at",),
            "reset": ("to", "timestamp"),
        }
        self._socket = RequestSocket(context, f"dispatcher {host.name}", operations, changes)
        self.router, self.endpoints, self.serve = self._socket.router, self._socket.endpoints, self._socket.serve

    # ------------------------------------------------------------ operations

    def _query(self, header: dict[str, Any]) -> dict[str, Any]:
        request = header.get("request", {})
        if not isinstance(request, dict):
            raise ProtocolError("INVALID_PARAMETER", "request must be an object")
        if self._host.is_parked:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", f"dispatcher {self._host.name} is parked")
        query = getattr(self._host.dispatcher, "query", None)
        if query is None:
            raise ProtocolError("UNKNOWN_OP", f"dispatcher {self._host.name} answers no queries")
        try:
            result = query(request)
        except SystemExit as error:  # a library for commands, perhaps: even so only this query fails
            raise ProtocolError("SYSTEM_ERROR", f"{self._host.name} failed on this request: {error!r:.1000}") from error
        if not isinstance(result, dict):
            raise ProtocolError("SYSTEM_ERROR", f"the answer of {self._host.name} must be a dict, not {result!r:.100}")
        most = self._context.config.network.max_frame_bytes
        try:
            # Measure text first: packing more than the process has memory for ends in a signal, not in an exception.
            size = _text_size(result)
            if size <= most:
                size = len(orjson.dumps(result))
        except TypeError as error:
            raise ProtocolError("SYSTEM_ERROR", f"the answer of {self._host.name} is not JSON: {error}") from error
        if size > most:
            raise ProtocolError(
                "SYSTEM_ERROR",
                f"the answer of {self._host.name} has {size} bytes, network.max_frame_bytes allows {most}",
            )
        return {"result": result, "position": self._host.position}

    def _retry(self, _header: dict[str, Any]) -> dict[str, Any]:
        self._check_parked()
        self._host.forgive()
        self.restart_wanted = True
        return {"position": self._host.position}

    def _restart(self, _header: dict[str, Any]) -> dict[str, Any]:
        if self._host.is_parked:
            raise ProtocolError("INVALID_PARAMETER", f"dispatcher {self._host.name} is parked: use retry, or skip")
        self.restart_wanted = True
        return {"position": self._host.position}

    def _skip(self, header: dict[str, Any]) -> dict[str, Any]:
        self._check_parked()
        if header.get("at") != self._host.position:
            where = self._host.position
            raise ProtocolError(
                "INVALID_PARAMETER", f"it is parked at physical offset {where}, not {header.get('at')!r:.40}"
            )
        skipped = position_verbs.skip_suspect(self._host)
        self.restart_wanted = True
        return {"skipped": skipped}

    def _check_parked(self) -> None:
        if not self._host.is_parked:
            raise ProtocolError("INVALID_PARAMETER", f"dispatcher {self._host.name} is not parked")

    def _reset(self, header: dict[str, Any]) -> dict[str, Any]:
        if self._host.name == CONSUME_QUEUE:
            raise ProtocolError("NO_PERMISSION", "the ConsumeQueues follow the log; rebuild them offline instead")
        was_parked, before = self._host.is_parked, self._host.position
        to = self._target(header)
        try:
            position_verbs.move(self._host, to)
        except NotImplementedError:
            self.restart_wanted = was_parked
            raise ProtocolError(
                "INVALID_PARAMETER", f"dispatcher {self._host.name} cannot go back: its truncate() is not implemented"
            ) from None
        except Exception:
            self.restart_wanted = True
            raise
        self.restart_wanted = was_parked
        return {"position": to, "before": before}

    # ------------------------------------------------------------ positions

    def _target(self, header: dict[str, Any]) -> int:
        low, high = self._context.control.get(Word.MIN_OFFSET), self._host.limit()
        to, timestamp = header.get("to"), header.get("timestamp")
        if timestamp is not None:
            if type(timestamp) is not int or not 0 <= timestamp < _MAX_TIME_MS:
                raise ProtocolError("INVALID_PARAMETER", "timestamp must be milliseconds since 1970")
            return self._host.positions.offset_by_time(timestamp, low, high)
        if to == "begin":
            return low
        if to == "end":
            return high
        if type(to) is not int:
            raise ProtocolError("INVALID_PARAMETER", 'to must be "begin", "end" or a physical offset')
        if not low <= to <= high:
            raise ProtocolError("INVALID_PARAMETER", f"the log has the offsets {low} to {high}, not {to}")
        if not self._host.positions.is_boundary(to, low, high):
            raise ProtocolError("INVALID_PARAMETER", f"no record begins at physical offset {to}")
        return to


def _text_size(value: object, depth: int = 0) -> int:
    """Characters of all texts in a JSON value. Values nested deeper than JSON allows are left for the packer to refuse."""
    if isinstance(value, str):
        return len(value)
    if depth > _MAX_DEPTH or not isinstance(value, dict | list | tuple):
        return 0
    inner = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return sum(_text_size(one, depth + 1) for one in inner)
