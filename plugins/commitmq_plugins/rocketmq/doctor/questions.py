"""What a tool asks single clients through a broker: their stacks (request 307), and to handle one message (request 309).

The broker passes both on to the client, and waits 10 s for it. Every wait here has an end too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from commitmq_plugins.rocketmq.doctor.peer import Keys, Peer, PeerRefusedError, Terms
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.errors import PeerGoneError, RemotingError
from commitmq_plugins.rocketmq.remoting.fastjson import load_object

__all__ = ["Keys", "Terms", "handled", "stacks"]

_CLIENT_S: Final = 10.0
"""So long a broker waits for a client."""
_AT_ONCE: Final = 16


async def stacks(
    host: str, port: int, group: str, client_ids: Sequence[str], terms: Terms
) -> list[tuple[str | None, str | None]]:
    """For each of these consumers of ``group`` the stack of its threads; or None, and the reason why there is none."""
    peer, gate = Peer(host, port, terms), asyncio.Semaphore(_AT_ONCE)

    async def one(client_id: str) -> tuple[str | None, str | None]:
        fields = {"consumerGroup": group, "clientId": client_id, "jstackEnable": "true"}
        async with gate:
            try:
                found = await _object(peer, RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
            except RemotingError as error:
                return None, str(error)
        stack = found.get("jstack")
        return (stack, None) if isinstance(stack, str) and stack else (None, "the client's answer has no stack")

    try:
        return list(await asyncio.gather(*map(one, client_ids)))
    finally:
        await peer.close()


async def handled(
    host: str, port: int, group: str, client_id: str, message_id: str, terms: Terms
) -> tuple[str, str | None, int | None]:
    """Let a consumer of ``group`` handle one message now: its result as RocketMQ names it, remark, milliseconds.

    Raises RemotingError.
    """
    peer = Peer(host, port, terms)
    fields = {"consumerGroup": group, "clientId": client_id, "msgId": message_id}
    try:
        found = await _object(peer, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields)
    finally:
        await peer.close()
    remark, spent_ms = found.get("remark"), found.get("spentTimeMills")
    return str(found.get("consumeResult")), None if remark is None else str(remark), _number(spent_ms)


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


async def _object(peer: Peer, code: RequestCode, fields: dict[str, str]) -> dict[str, Any]:
    """The object in the answer's body. Raises RemotingError, whose text says what to do."""
    try:
        return load_object((await peer.ask(code, fields, wait_s=_CLIENT_S)).body)
    except PeerRefusedError as error:
        if error.code == ResponseCode.NO_PERMISSION and peer.terms.keys is None:
            raise RemotingError(f"{error}; --access-key signs the request as a user") from None
        raise
    except PeerGoneError as error:
        raise RemotingError(f"{error}; a server with tls_mode=enforcing needs --tls") from None
