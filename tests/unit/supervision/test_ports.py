"""Goal: a node's ports are the documented ones, each its own, and whoever has one of them is named.

Method: the whole block is computed for the largest node there can be; real sockets stand in the way.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from commitmq.config import load
from commitmq.control import DISPATCHER_SLOTS
from commitmq.network.ports import (
    PORTS,
    advertised,
    candidates,
    clash,
    configured_port,
    holder_of,
    in_use,
    is_free,
    port_of,
    tcp_port,
)
from commitmq.security.start_rule import Listener

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
NODE_TOML = Path(__file__).resolve().parents[3] / "config" / "node.toml"


def test_ports_are_a_block_of_which_each_process_has_its_own() -> None:
    config = load(None, ["network.port=7310", "reader.count=16"])
    roles = [(name, -1) for name in ("admin", "writer", "coordinator", "cleanup", "pop", "transaction")]
    roles += [(f"dispatcher-{slot}", slot) for slot in range(DISPATCHER_SLOTS)]
    roles += [(f"reader-{number}", -1) for number in range(config.reader.count)]
    ports = [configured_port(name, config, slot) for name, slot in roles]
    assert sorted(ports) == list(range(7310, 7310 + PORTS))
    assert [configured_port(name, config) for name in ("recovery", "reput", "flush", "allocate", "worker-x")] == [0] * 5


ROLES = [("admin", -1), ("writer", -1), ("dispatcher-consume_queue", 0), ("reader-0", -1), ("pop", -1)]


@pytest.mark.parametrize(
    ("listeners", "told"),
    [
        (
            [Listener("metrics", "127.0.0.1", ports=(7310,), setting="metrics.port")],
            ["network.port=7310 gives it to the admin"],
        ),
        (
            [Listener("metrics", "127.0.0.1", ports=(7314,), setting="metrics.port")],
            [
                "port 7314 is assigned twice",
                "network.port=7310 (+4) gives it to dispatcher-consume_queue",
                "metrics.port=7314",
            ],
        ),
        (
            [Listener("dashboard", "localhost", ports=(7346,), setting="d.port")],
            ["(+36) gives it to pop", "d.port=7346"],
        ),
        ([Listener("names", "0.0.0.0", ports=(7311,), setting="n")], ["gives it to writer, and n=7311 to names"]),
        ([Listener("names", "::", ports=(7311,), setting="n")], ["gives it to writer, and n=7311 to names"]),
        (
            [Listener("broker", "127.0.0.1", ports=(7319, 7317), setting="b")],
            ["(+7) gives it to reader-0, and b=7319 (-2)"],
        ),
        (
            [
                Listener("broker", "127.0.0.1", ports=(9878, 9876), setting="b"),
                Listener("names", "127.0.0.1", ports=(9876,), setting="n"),
            ],
            ["port 9876", "b=9878 (-2) gives it to broker, and n=9876 to names"],
        ),
        ([Listener("metrics", "127.0.0.2", ports=(7310,), setting="m")], []),
        ([Listener("metrics", "127.0.0.1", ports=(7312, 0), setting="m")], []),
        ([Listener("metrics", "127.0.0.1"), Listener("names", "127.0.0.1", ports=(9876,), setting="n")], []),
        (
            [
                Listener("a", "127.0.0.1", ports=(0,), setting="a"),
                Listener("b", "127.0.0.1", ports=(0,), setting="b"),
            ],
            [],
        ),
    ],
)
def test_a_port_that_two_settings_give_away_is_told_with_both(listeners: list[Listener], told: list[str]) -> None:
    """A port of the block that no process of this node takes is free for a server."""
    sentence = clash(listeners, ROLES, load(None, ["network.port=7310"]))
    assert bool(sentence) == bool(told)
    for part in told:
        assert part in sentence
    others = [one for one in listeners if one.ports not in ((9878, 9876), (9876,))]
    assert not clash(others, ROLES, load(None, ["network.port=0"]))


def test_node_toml_says_where_each_process_listens() -> None:
    text = NODE_TOML.read_text(encoding="utf-8").partition("\nport = ")[0]
    told = dict(
        re.findall(r"(writer|coordinator|cleanup|ConsumeQueues|index|memory topics|first reader) (\+\d+)", text)
    )
    config = load(None, ["network.port=100"])
    roles = {
        "writer": ("writer", -1),
        "coordinator": ("coordinator", -1),
        "cleanup": ("cleanup", -1),
        "ConsumeQueues": ("dispatcher-consume_queue", 0),
        "index": ("dispatcher-index", 1),
        "memory topics": ("dispatcher-memory", 2),
        "first reader": ("reader-0", -1),
    }
    assert told == {name: f"+{configured_port(role, config, slot) - 100}" for name, (role, slot) in roles.items()}


def test_free_ports_are_those_a_process_had_before() -> None:
    fixed, free = load(None, ["network.port=7310"]), load(None, ["network.port=0"])
    assert port_of("writer", free, {"writer": 4242}) == 4242
    assert port_of("writer", fixed, {"writer": 4242}) == 7311
    assert port_of("reader-0", free, {}) == 0
    assert tcp_port(["tcp://[::1]:81", "ipc:///x:9"]) == 81
    assert tcp_port(["ipc:///x:9"]) == 0


def test_no_outgoing_connection_gets_the_port_of_a_process_that_comes_back() -> None:
    first, last = map(int, EPHEMERAL.read_text(encoding="ascii").split())
    drawn = [candidates(), candidates()]
    assert drawn[0] != drawn[1]
    for ports in drawn:
        assert len(set(ports)) == 64
        assert not [port for port in ports if first <= port <= last or port < 1024]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_that_somebody_has_is_not_free_and_its_holder_is_named(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as libzmq has it
        try:
            taken.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free(host, port)
        assert holder_of(port).startswith(f"process {os.getpid()} (")
        sentence = in_use(port, "coordinator", load(None, [f"network.port={port - 2}"]))
        assert sentence.startswith(f"port {port} is in use by process {os.getpid()} (")
        assert "this node's coordinator needs it (network.port + 2;" in sentence
        # A connection that was closed is in nobody's way, as it is in none of libzmq's.
        with socket.create_connection((host, port)), taken.accept()[0]:
            pass
    assert is_free(host, port)
    assert holder_of(port) == ""


def test_what_is_no_address_is_left_to_libzmq() -> None:
    assert is_free("no-such-interface.invalid", 80)


def test_clients_are_told_the_advertised_host() -> None:
    endpoints = ["tcp://0.0.0.0:7311", "ipc:///x/writer.ipc"]
    assert advertised(endpoints, load()) == endpoints
    named = load(None, ["network.advertised_host=broker.example.org"])
    assert advertised(endpoints, named) == ["tcp://broker.example.org:7311", "ipc:///x/writer.ipc"]
    assert advertised(["tcp://[::]:7311"], load(None, ["network.advertised_host=2001:db8::1"])) == [
        "tcp://[2001:db8::1]:7311"
    ]
