"""A client's directory of one node: the supervisor's address, and the other processes from its ``metadata``.

It connects to the process of a role, and waits for a node that starts or starts again.

A node's description of itself: its store, the endpoints of its processes, and whether it is on this host.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from commitmq.errors import AuthenticationError, NodeUnavailableError, RequestError
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import endpoint_of, node_address


@dataclass(frozen=True, slots=True)
class Metadata:
    """The node's description of itself, and whether it is on this host."""

    node: str
    epoch: int
    store: Path
    segment_bytes: int
    properties_crc: bool
    same_host: bool
    endpoints: dict[str, list[list[str]]]
    raw: dict[str, Any]

    @property
    def store_id(self) -> str:
        """The id that tells the store from every other one; empty when the node sends none."""
        return str(self.raw.get("store_id", ""))

    def is_same_host_still(self) -> bool:
        """``same_host``, checked again: a node that was stopped or started since has another token."""
        return self.same_host and token_matches(self.store, str(self.raw["token"]))

    def endpoint(self, role: str, index: int = 0) -> str:
        """The best endpoint of the ``index``-th process of ``role`` (modulo): ipc on the same host, else tcp."""
        choices = self.endpoints.get(role) or []
        if not choices:
            raise NodeUnavailableError(f"the node {self.node} has no {role} at the moment")
        tcp_or_ipc = choices[index % len(choices)]
        if self.same_host:
            for one in tcp_or_ipc:
                if one.startswith("ipc://") and os.access(one.removeprefix("ipc://"), os.W_OK):
                    return one
        for one in tcp_or_ipc:
            if one.startswith("tcp://"):
                return one
        raise NodeUnavailableError(f"the {role} of the node {self.node} cannot be reached from this host")

    def count(self, role: str) -> int:
        """Number of processes of ``role``."""
        return len(self.endpoints.get(role) or [])


def parse_metadata(answer: dict[str, Any], address: str, *, may_be_local: bool = True) -> Metadata:
    """The metadata in the supervisor's ``answer``, which came from ``address``. Not ``may_be_local``: as of another host."""
    store = Path(answer["store"])
    endpoints: dict[str, list[list[str]]] = {}
    for role, value in answer["endpoints"].items():
        # A single process is given as [tcp, ipc], several processes of a role as a list of such pairs.
        several = value if value and isinstance(value[0], list) else [value]
        endpoints[role] = [[_reachable(one, address) for one in pair if one] for pair in several if pair]
    return Metadata(
        node=str(answer["node"]),
        epoch=int(answer["epoch"]),
        store=store,
        segment_bytes=int(answer["segment_bytes"]),
        properties_crc=bool(answer["properties_crc"]),
        same_host=may_be_local and token_matches(store, str(answer["token"])),
        endpoints=endpoints,
        raw=answer,
    )


def _reachable(endpoint: str, address: str) -> str:
    """``endpoint`` with the host of ``address`` when the node only says that it listens everywhere."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if endpoint.startswith(wildcard) and address.startswith("tcp://"):
            host = address.removeprefix("tcp://").rpartition(":")[0]
            return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
    return endpoint


def token_matches(store: Path, token: str) -> bool:
    """True when the store's token file can be read here and equals the node's token: same host, same file system. The
    token is random for each start of the node, so a copy of the store on another host does not match.
    """
    try:
        return bool(token) and (store / "run" / "token").read_text(encoding="ascii").strip() == token
    except (OSError, UnicodeDecodeError):
        return False


_CONNECT_ATTEMPT_S: Final = 1.0
_RETRY_PAUSE_S: Final = 0.05
_ONE_SILENCE_S: Final = 0.25
_WORTH_A_RETRY: Final = ("SERVICE_NOT_AVAILABLE", "BAD_ANSWER")


class _Silences(threading.local):
    """For each address at which this thread got no answer: the first and the last time of that. It is not part of a
    directory: a batch asks for its topic's queues over one directory and connects to the writer over another, in turn.
    """

    def __init__(self) -> None:
        self.of: dict[str, tuple[float, float]] = {}


_silences = _Silences()


class Directory:
    """The admin endpoint of one node and its last metadata. Not thread-safe."""

    def __init__(self, node: str | None) -> None:
        self.address = node_address(node)
        self._endpoint, self._keys = endpoint_of(self.address)
        self._channel: Channel | None = None
        self._metadata: Metadata | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def request(self, op: str, fields: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """One request to the supervisor. Raises NodeUnavailableError or ProtocolError."""
        began = time.monotonic()
        try:
            return self._request(op, fields, timeout_s=timeout_s)
        except AuthenticationError:
            raise
        except NodeUnavailableError as error:
            raise self._no_answer(error.message, time.monotonic() - began) from error

    def _no_answer(self, reason: str, waited_s: float) -> NodeUnavailableError:
        return NodeUnavailableError(
            f"no answer from the node at {self.address} within {waited_s:.1f} s; is it started? ({reason})"
        )

    def _request(self, op: str, fields: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        if self._channel is None or self._channel.lost():
            self.close()
            self._channel = Channel(self._endpoint, keys=self._keys)
        try:
            return self._channel.request(op, fields, timeout_s=timeout_s)[0]
        except RequestError as error:
            if not isinstance(error, NodeUnavailableError):
                if error.code == "BAD_ANSWER":
                    self.close()
                raise
            self.close()
            raise

    def _parsed(self, answer: dict[str, Any]) -> Metadata:
        # A client with a profile acts as its user: over the local sockets it would be the account that it runs under.
        return parse_metadata(answer, self._endpoint, may_be_local=self._keys is None)

    def metadata(self, *, timeout_s: float, refresh: bool = False) -> Metadata:
        """The node's metadata; asks the node unless it is known and ``refresh`` is false.

        The call waits for a starting node, also for one that dies in the meantime and is started again. Raises
        NodeUnavailableError or ProtocolError at the end of ``timeout_s``.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        while self._metadata is None or refresh:
            try:
                left_s = max(deadline - time.monotonic(), _RETRY_PAUSE_S)
                self._metadata = self._parsed(self._request("metadata", timeout_s=left_s))
                break
            except AuthenticationError:
                raise
            except RequestError as error:
                is_away = isinstance(error, NodeUnavailableError)
                is_over = time.monotonic() + _RETRY_PAUSE_S >= deadline
                if is_away and is_over:
                    raise self._no_answer(error.message, time.monotonic() - began) from error
                if is_over or not (is_away or error.code == "SERVICE_NOT_AVAILABLE"):
                    raise
            time.sleep(_RETRY_PAUSE_S)
        return self._metadata

    def connect(
        self, role: str, deadline: float, *, index: int = 0, hello: bool = False
    ) -> tuple[Channel, dict[str, Any]]:
        """A channel to a process of ``role``, trying until ``deadline`` (``time.monotonic()`` seconds).

        With ``hello`` the process is asked ``hello`` and its answer is returned. A restarting node keeps its addresses:
        if the supervisor does not answer, the last known address is tried too. A caller without ``hello`` has to
        connect again when the channel takes nothing: the address may have belonged to a node that is gone.
        """
        problem: RequestError | None = None
        silent = False  # True when it is the supervisor that does not answer
        began = time.monotonic()
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0 and problem is not None:
                waited_s = self._silent_for(began)
                raise (
                    self._no_answer(problem.message, waited_s) if silent else NodeUnavailableError(problem.message)
                ) from problem
            attempt_s = min(max(remaining, 0.01), _CONNECT_ATTEMPT_S)
            channel: Channel | None = None
            try:
                try:
                    metadata = self._metadata = self._parsed(self._request("metadata", timeout_s=attempt_s))
                    silent = False
                except AuthenticationError:
                    raise
                except NodeUnavailableError:
                    silent = True
                    if self._metadata is None:
                        raise
                    metadata = self._metadata
                channel = Channel(metadata.endpoint(role, index), _CONNECT_ATTEMPT_S, keys=self._keys)
                answer = channel.request("hello", timeout_s=attempt_s)[0] if hello else {}
                _silences.of.pop(self.address, None)
                return channel, answer
            except AuthenticationError:
                if channel is not None:
                    channel.close()
                raise
            except RequestError as error:
                problem = error
                if channel is not None:
                    channel.close()
                # BAD_ANSWER: while no process listens on a port of the system's own range, the kernel may connect a
                # client to itself, and the client then receives its own requests.
                if not isinstance(error, NodeUnavailableError) and error.code not in _WORTH_A_RETRY:
                    raise
            except BaseException:
                if channel is not None:
                    channel.close()
                raise
            time.sleep(min(_RETRY_PAUSE_S, max(deadline - time.monotonic(), 0)))

    def _silent_for(self, began: float) -> float:
        """For how long (seconds) the node was unreachable: a caller that tries for a long time does so in short turns."""
        now = time.monotonic()
        since, last = _silences.of.get(self.address, (began, began))
        if began - last > _ONE_SILENCE_S:
            since = began
        _silences.of[self.address] = (since, now)
        return now - since
