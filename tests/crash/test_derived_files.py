"""Goal: what a node derives from its log is made again by the node, whatever a power cut left of it, and a query says
"incomplete" until then.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from commitmq import Admin, Producer
from commitmq.format.index_header import HEADER_BYTES
from nodes import eventually, start_node


def test_an_index_of_which_only_headers_reached_the_device_is_made_again(tmp_path: Path) -> None:
    """Method: a node dies with all its processes; of each index file only the header is left."""
    settings = ("index.hash_slots=300", "index.max_items=200", "dispatch.batch_messages=100")
    with start_node(tmp_path, *settings) as node, Producer(node.address) as producer:
        producer.send_batch("t", [b"%d" % at for at in range(500)], keys=[f"k{at}" for at in range(500)])
        with Admin(node.address) as admin:
            eventually(lambda: admin.query("t", key="k499").complete, "everything is indexed")
        node.kill_all()
        files = sorted((node.store / "index").iterdir())
        assert len(files) > 2
        for path in files:
            with open(path, "r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(bytes(path.stat().st_size - HEADER_BYTES))
        halting = {"COMMITMQ_FAILPOINTS": "dispatcher.index.before_dispatch=stop@3"}
        assert node.start(**halting).returncode == 0
        producer.send("t", b"new", keys="k-new")
        with Admin(node.address) as admin:
            assert not admin.query("t", key="k-new").complete
            (told,) = node.report()["node"]["remaking"]
            assert (told["role"], told["phase"]) == ("dispatcher-index", "making files of the index again")
            assert 0 <= told["done"] < told["total"]
            os.kill(node.pids()["dispatcher-index"], signal.SIGCONT)
            eventually(lambda: admin.query("t", key="k-new").complete, "the index is whole")
            for key in ("k0", "k7", "k499", "k-new"):
                found = admin.query("t", key=key)
                assert (len(found), found.complete) == (1, True), key
        assert node.report()["node"]["remaking"] == []
