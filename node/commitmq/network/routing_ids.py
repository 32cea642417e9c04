"""Routing ids: the names under which ROUTER sockets know their peers.

libzmq gives a peer without an id of its own the next of 2^32 numbers, and aborts the process when another peer has
chosen exactly that number. It counts from the first value of C's ``rand``, which is the same in every process that has
not called ``srand``: six connections are then enough to end any node. So each process seeds it from the system's
randomness. An attacker can then only guess: a client that holds c chosen ids needs 2^32 / c connections of others to
meet one. A peer that sends requests under such an id is also refused.

A peer that chooses the id of another one takes its place. So nobody may be able to guess a chosen id.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

LEAST_CHOSEN_BYTES: Final = 16
_AUTOMATIC_BYTES: Final = 5
_NUMBERS: Final = 1 << 32


def seed() -> None:
    """Let libzmq's automatic ids begin at a secret number. Call it in each process, before its first ROUTER."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def number(routing_id: bytes) -> int | None:
    """The number in an automatic id; None for an id that a peer has chosen by the rules."""
    if len(routing_id) == _AUTOMATIC_BYTES and not routing_id[0]:
        return int.from_bytes(routing_id[1:], "big")
    return None


def fault(routing_id: bytes, first: int, given: int) -> str | None:
    """Why ``routing_id`` must not be used; None when it may. The router gave at most ``given`` ids, from ``first`` on."""
    automatic = number(routing_id)
    if automatic is not None:
        if (automatic - first) % _NUMBERS < given:
            return None
        return "ids that begin with a zero byte are the node's to give"
    if not routing_id[0]:
        return "ids that begin with a zero byte are the node's to give"
    if len(routing_id) < LEAST_CHOSEN_BYTES:
        return (
            f"a routing id of {len(routing_id)} bytes can be guessed: take {LEAST_CHOSEN_BYTES} random bytes or more,"
            " new for each connection, or none"
        )
    return None
