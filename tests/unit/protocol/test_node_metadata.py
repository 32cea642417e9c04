"""Goal: a client finds the best endpoint of each process: a Unix socket on the node's host, else tcp.

Method: answers of a supervisor, with and without the store's token file on this host.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq import NodeUnavailableError
from commitmq.protocol.directory import Metadata, parse_metadata


def metadata(store: Path, token: str, *, host: str = "0.0.0.0", address: str = "tcp://10.9.8.7:7310") -> Metadata:
    answer = {
        "node": "n",
        "token": token,
        "epoch": 1,
        "store": str(store),
        "segment_bytes": 65536,
        "properties_crc": True,
        "endpoints": {
            "writer": [f"tcp://{host}:1", f"ipc://{store}/w"],
            "reader": [[f"tcp://{host}:2", f"ipc://{store}/r0"], [f"tcp://{host}:3", f"ipc://{store}/r1"]],
            "coordinator": [],
        },
    }
    return parse_metadata(answer, address)


def test_the_same_host_is_told_by_the_token(tmp_path: Path) -> None:
    assert not metadata(tmp_path, "t").same_host
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "token").write_text("t\n")
    assert metadata(tmp_path, "t").same_host
    assert not metadata(tmp_path, "other").same_host
    assert not metadata(tmp_path, "").same_host


def test_endpoints_by_host(tmp_path: Path) -> None:
    far = metadata(tmp_path, "t")
    assert far.endpoint("writer") == "tcp://10.9.8.7:1", "a node that listens everywhere is where we found it"
    assert far.count("reader") == 2
    assert far.endpoint("reader", 3) == "tcp://10.9.8.7:3"
    with pytest.raises(NodeUnavailableError, match="has no coordinator"):
        far.endpoint("coordinator")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "token").write_text("t")
    (tmp_path / "w").touch()
    near = metadata(tmp_path, "t", host="127.0.0.1")
    assert near.endpoint("writer") == f"ipc://{tmp_path}/w"
    assert near.endpoint("reader") == "tcp://127.0.0.1:2", "its Unix socket cannot be reached"
