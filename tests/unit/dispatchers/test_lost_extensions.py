"""Goal: where extension files were lost, no new message's unit comes to lie at an address that an old unit still has.

Method: the ConsumeQueue dispatcher writes units with extensions, the files go, and a new dispatcher goes on: with the folder
gone, with messages that got no extension in between, and with the extension switched off and on.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_filter_bit_maps import Node

from commitmq.files.fd_cache import FdCache
from commitmq.format.units import UNIT
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import MAX_ADDRESS, ExtensionReader


def codes(node: Node) -> np.ndarray:
    """What each unit of the queue has for a tags code, from the first on."""
    queue = ConsumeQueue(node.store.layout.consume_queue / "t" / "0", 2_000)
    queue.refresh()
    data = b""
    while len(data) < queue.max_offset * UNIT.itemsize:
        data += queue.read_units(len(data) // UNIT.itemsize, queue.max_offset)
    return np.frombuffer(data, UNIT)["tags_code"].astype(np.int64)


@pytest.mark.parametrize("without", [0, 30], ids=["at once", "after units without extension"])
def test_addresses_never_begin_anew(tmp_path: Path, without: int) -> None:
    node = Node(tmp_path, bit_maps=False)
    enabled = node.config
    node.send(random.Random(1), 60)
    node.dispatch_all()
    node.dispatcher.flush(thorough=True)
    shutil.rmtree(node.store.layout.consume_queue_ext)
    if without:
        node.config = replace(enabled, consume_queue=replace(enabled.consume_queue, enable_ext=False))
        node.start_dispatcher()
        node.send(random.Random(2), without)
        node.dispatch_all()
        node.dispatcher.flush(thorough=True)
        node.config = enabled
    node.start_dispatcher()
    node.send(random.Random(3), 60)
    node.dispatch_all()
    found = codes(node)
    old, plain, new = np.split(found, [60, 60 + without])
    assert (old <= MAX_ADDRESS).all()
    assert (plain > MAX_ADDRESS).all()
    assert (new <= MAX_ADDRESS).all()
    assert new.min() > old.max(), "an old address may lead to a new message's unit"
    resolved = ExtensionReader(node.store.layout.consume_queue_ext, 500, FdCache(2)).resolve("t/0", found)
    assert resolved is not None
    assert (resolved.codes[:60] == old).all(), "what is lost leads nowhere"
    assert (resolved.codes[-60:] > MAX_ADDRESS).all()
