"""What one client may do to a node: a table for the tests that run each of it beside well-behaved clients.

An attack runs in a process of its own until it is ended: ``python attacks.py NAME ENDPOINTS``, the endpoints as a JSON object.
It does its worst again and again, also when the node ends its connections.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from commitmq.protocol import wire
from zmtp import MORE, RawPeer, frame

Endpoints = dict[str, str]
Attack = Callable[[Endpoints], None]
ATTACKS: dict[str, Attack] = {}
LARGE, SMALL = "attacked-large", "attacked-small"
PORTS = ("admin", "writer", "reader-0", "coordinator")
FIRST_ID = 0x6B8B4567  # of libzmq's automatic ids, where nobody seeded rand()


def attack(function: Attack) -> Attack:
    """Put ``function`` into the table."""
    ATTACKS[function.__name__.strip("_")] = function
    return function


def again(*errors: type[BaseException]) -> Iterator[contextlib.AbstractContextManager[None]]:
    """For ever; what the node does to a connection is no reason to stop."""
    while True:
        yield contextlib.suppress(OSError, *errors)


def pull(number: int, topic: str = LARGE, **fields: object) -> bytes:
    return wire.pack({"op": "pull", "id": number, "topic": topic, "queue": 0, "offset": 0, **fields})


@attack
def requests_without_end(ports: Endpoints) -> None:
    """One request of more and more frames of 1 MiB, at each port in turn."""
    for turn in again():
        for port in PORTS:
            with turn, RawPeer(ports[port]) as peer:
                peer.flood(frame(bytes(1 << 20), MORE), 1 << 30)


@attack
def empty_frames_without_end(ports: Endpoints) -> None:
    """Two bytes on the wire are 64 in memory."""
    for turn in again():
        for port in PORTS:
            with turn, RawPeer(ports[port]) as peer:
                peer.flood(frame(b"", MORE) * 10_000, 1 << 28)


@attack
def requests_by_half(ports: Endpoints) -> None:
    """A hundred connections, each with most of a frame, which then wait."""
    for turn in again():
        peers: list[RawPeer] = []
        with turn:
            for number in range(100):
                peers.append(peer := RawPeer(ports[PORTS[number % len(PORTS)]]))
                peer.socket.sendall(frame(bytes(2 << 20), MORE)[: 2 << 20])
        time.sleep(0.2)
        for one in peers:
            one.close()


@attack
def other_protocols(ports: Endpoints) -> None:
    """What a browser, a scanner, or an old ZeroMQ sends: TLS, HTTP, ZMTP 1.0 and 2.0."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2
    old = b"\x01\x00" + b"\x08\x00request" * 20
    second = b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x07request" * 20
    for turn in again():
        for port in PORTS:
            host, _, number = ports[port].removeprefix("tcp://").rpartition(":")
            for text in (hello, old, second, b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"):
                with turn, socket.create_connection((host, int(number)), 5) as peer:
                    peer.sendall(text)
                    time.sleep(0.01)
                    peer.sendall(text)


@attack
def answers_never_read(ports: Endpoints) -> None:
    """Ten clients with twenty pulls of 8 MiB each."""
    peers: list[RawPeer] = []
    for turn in again():
        with turn:
            peers = [one for one in peers if not one.is_ended()]
            while len(peers) < 10:
                peers.append(peer := RawPeer(ports["reader-0"], receive_bytes=4_096))
                for number in range(20):
                    peer.send(pull(number, max_bytes=8 << 20))
        time.sleep(0.05)


@attack
def lists_never_read(ports: Endpoints) -> None:
    """Status, topics and groups, asked for as often as the connection takes it."""
    asked = {"admin": "status", "coordinator": "topic.list"}
    peers: list[tuple[str, RawPeer]] = []
    for turn in again():
        for port, op in asked.items():
            with turn:
                peers.append((op, RawPeer(ports[port], receive_bytes=4_096, timeout_s=0.2)))
        for op, peer in peers:
            with turn:
                for number in range(100):
                    peer.send(wire.pack({"op": op, "id": number}))
        peers = peers[-20:]


@attack
def headers_too_long(ports: Endpoints) -> None:
    """60 MiB of JSON where a header belongs, and where a process allows less, 2 MiB of it."""
    for turn in again():
        for port in PORTS:
            for size in (60 << 20, 2_000_000):
                with turn, RawPeer(ports[port]) as peer:
                    peer.socket.sendall(frame(b'{"v":1,"id":1,"x":[' + b"[]," * (size // 3) + b"0]}"))
                    time.sleep(0.02)


@attack
def unknown_operations(ports: Endpoints) -> None:
    """Names of 0.8 MB."""
    for turn in again():
        for port in PORTS:
            with turn, RawPeer(ports[port], receive_bytes=4_096) as peer:
                for number in range(20):
                    peer.send(wire.pack({"op": "x" * 800_000, "id": number}))


@attack
def filters_of_waiting_pulls(ports: Endpoints) -> None:
    """Pulls that wait, each with 60 KB of tags of its own."""
    chosen = random.Random(1)
    for turn in again():
        peers: list[RawPeer] = []
        for _ in range(8):
            with turn:
                peers.append(peer := RawPeer(ports["reader-0"]))
                for number in range(800):
                    tags = "||".join(f"{chosen.getrandbits(200):060x}" for _ in range(1_000))
                    peer.send(pull(number, SMALL, offset=1 << 40, filter=tags, wait_ms=30_000))
                    peer.is_ended()
                    peer.socket.settimeout(5)
        for one in peers:
            one.close()


@attack
def dear_filters(ports: Endpoints) -> None:
    """SQL92 with 840 terms over messages with 30 KB of properties."""
    expression = " OR ".join(f"long CONTAINS 'q{number}'" for number in range(840))
    for turn in again():
        with turn, RawPeer(ports["reader-0"]) as peer:
            for number in range(1 << 30):
                peer.send(pull(number, filter=expression, filter_type="SQL92"))
                assert peer.socket.recv(1 << 16)


@attack
def idle_connections(ports: Endpoints) -> None:
    """Three hundred to each port, which say nothing."""
    for turn in again():
        peers: list[RawPeer] = []
        for port in PORTS:
            with turn:
                peers += [RawPeer(ports[port]) for _ in range(300)]
        time.sleep(0.5)
        for one in peers:
            one.close()


@attack
def ids_of_others(ports: Endpoints) -> None:
    """The automatic ids that libzmq would give next if it were not seeded, and ordinary connections that would get them."""
    for turn in again():
        for port in PORTS:
            peers: list[RawPeer] = []
            with turn:
                for number in range(40):
                    chosen = b"\0" + (FIRST_ID + number).to_bytes(4, "big")
                    peers.append(peer := RawPeer(ports[port], chosen))
                    peer.send(b"?")
                for _ in range(40):
                    peers.append(peer := RawPeer(ports[port]))
                    peer.send(b"?")
            for one in peers:
                one.close()


@attack
def joins_of_many_topics(ports: Endpoints) -> None:
    """``group.join`` with 100,000 names."""
    names = [f"t{number}" for number in range(100_000)]
    for turn in again():
        with turn, RawPeer(ports["coordinator"]) as peer:
            for number in range(1 << 30):
                header = {
                    "op": "group.join",
                    "id": number,
                    "group": "attacked",
                    "member": f"m{number}",
                    "topics": names,
                }
                peer.send(wire.pack(header))
                assert peer.socket.recv(1 << 16)


@attack
def joins_with_filters(ports: Endpoints) -> None:
    """Members with SQL92 expressions of 16 KB."""
    expression = " OR ".join(f"p{number} = {number}" for number in range(1_000))[:16_000].rpartition(" OR ")[0]
    for turn in again():
        with turn, RawPeer(ports["coordinator"]) as peer:
            for number in range(1 << 30):
                chosen = {"type": "SQL92", "expression": f"{expression} OR q = {number}"}
                header = {
                    "op": "group.join",
                    "group": f"g{number % 600}",
                    "member": "m",
                    "topics": [SMALL],
                    "filter": chosen,
                }
                peer.send(wire.pack({**header, "id": number}))
                assert peer.socket.recv(1 << 16)


@attack
def many_status_requests(ports: Endpoints) -> None:
    """Three hundred that wait."""
    for turn in again():
        peers: list[RawPeer] = []
        with turn:
            for number in range(300):
                peers.append(peer := RawPeer(ports["admin"]))
                peer.send(wire.pack({"op": "status", "id": number}))
        time.sleep(0.5)
        for one in peers:
            one.close()


if __name__ == "__main__":
    ATTACKS[sys.argv[1]](json.loads(sys.argv[2]))
