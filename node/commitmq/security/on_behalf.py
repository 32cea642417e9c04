"""On whose behalf a process of the node asks: a gateway names its user in a request, and proves that it may.

    {"op": "topic.create", "on_behalf_of": {"user": "shop", "protocol": "dashboard", "address": "10.1.2.3",
     "proof": "<64 hex>"}, …}

The proof is an HMAC-SHA256 of operation, user, protocol and address. The supervisor draws its key at each start and gives it
to the processes that it forks; it is in no file and in no log. So another program cannot make a proof, not even one of the
node's account. A request whose proof is wrong counts as its sender's own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any, Final

import orjson

from commitmq.security.audit import Actor

FIELD: Final = "on_behalf_of"
_LONGEST: Final = 300


class Vouching:
    """Makes and checks proofs, with the key of this start of the node."""

    def __init__(self, key: str) -> None:
        """``key``: of :meth:`draw`. With an empty one nothing is believed, and nobody is named."""
        self._key = key.encode()

    @staticmethod
    def draw() -> str:
        """A new key."""
        return secrets.token_hex(32)

    def fields(self, operation: str, actor: Actor) -> dict[str, Any]:
        """What a request for ``operation`` carries to be that of ``actor``."""
        if not self._key:
            return {}
        named = (actor.name[:_LONGEST], actor.protocol[:_LONGEST], actor.address[:_LONGEST])
        user, protocol, address = (one.encode(errors="replace").decode() for one in named)
        told = {"user": user, "protocol": protocol, "address": address}
        return {FIELD: {**told, "proof": self._proof(operation, user, protocol, address)}}

    def actor(self, header: dict[str, Any]) -> Actor | None:
        """Whom a request is for; None where it names nobody, or without a right proof."""
        told = header.get(FIELD)
        if type(told) is not dict or not self._key:
            return None
        user, protocol, address, proof = (told.get(one) for one in ("user", "protocol", "address", "proof"))
        if not (type(user) is type(protocol) is type(address) is type(proof) is str):
            return None
        right = self._proof(header["op"], user, protocol, address)
        if not hmac.compare_digest(right.encode(), proof.encode(errors="replace")):
            return None
        return Actor(user, protocol, address)

    def user(self, header: dict[str, Any]) -> str | None:
        """The name of the user whom a request is for; None for nobody's."""
        if FIELD not in header:
            return None
        found = self.actor(header)
        return None if found is None else found.name or None

    def _proof(self, *told: str) -> str:
        return hmac.new(self._key, orjson.dumps(told), hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "Vouching(***)"
