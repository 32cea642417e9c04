"""Goal: a node's address is taken as people write it, and nonsense is refused.

Method: addresses and what becomes of them.
"""

from __future__ import annotations

import pytest

from commitmq.protocol.node_address import node_address


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tcp://10.0.0.1:5", "tcp://10.0.0.1:5"),
        ("10.0.0.1:5", "tcp://10.0.0.1:5"),
        ("tcp://[::1]:5", "tcp://[::1]:5"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_node_addresses(given: str, expected: str) -> None:
    assert node_address(given) == expected


@pytest.mark.parametrize("given", ["http://x:1", "tcp://host", "tcp://host:", "tcp://host:99999", "tcp://host:x"])
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ValueError, match="node address"):
        node_address(given)


def test_the_environment_names_the_default_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMITMQ_NODE", raising=False)
    assert node_address(None) == "tcp://127.0.0.1:7310"
    monkeypatch.setenv("COMMITMQ_NODE", "tcp://h:1")
    assert node_address(None) == "tcp://h:1"
