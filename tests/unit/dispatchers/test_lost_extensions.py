"""Goal: where extension files were lost, no new message's unit comes to lie at an address that an old unit still has, and
after a crash each unit whose address leads nowhere gets its record's tags code.

Method: the ConsumeQueue dispatcher writes units with extensions, the files go, and a new dispatcher goes on: with the folder
gone, with messages that got no extension in between, and with the extension switched off and on. Then with bytes of zeros at
many places, and what a group receives by bit maps is compared with the records.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_filter_bit_maps import EXPRESSIONS, Node

from commitmq.files.fd_cache import FdCache
from commitmq.format.java import java_string_hash
from commitmq.format.units import UNIT
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import MAX_ADDRESS, ExtensionReader
from commitmq_dispatchers import consume_queue


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


def look_at_all(node: Node) -> None:
    """A new dispatcher after a crash, until it has looked at everything."""
    node.start_dispatcher()
    for _ in range(10_000):
        node.dispatcher.flush(thorough=False)
        if node.dispatcher.remaking is None:
            break
    node.dispatcher.flush(thorough=True)


@pytest.mark.parametrize("which", [1, -1])
@pytest.mark.parametrize("at", ["folder", "file", "size", *range(0, 400, 50)])
@pytest.mark.parametrize("bit_maps", [True, False])
def test_units_that_lead_nowhere_get_their_tags_codes(
    tmp_path: Path, at: str | int, which: int, bit_maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consume_queue, "_LOOK_UNITS", 16)
    monkeypatch.setattr(consume_queue, "_LOOK_S", 0)
    node = Node(tmp_path, bit_maps=bit_maps)
    node.subscriptions.join("g", ["t"], EXPRESSIONS[1])
    node.subscriptions.write()
    node.send(random.Random(4), 150)
    node.dispatch_all()
    node.dispatcher.flush(thorough=True)
    folder = node.store.layout.consume_queue_ext
    files = sorted((folder / "t" / "0").iterdir())
    assert len(files) > 5
    if at == "folder":
        shutil.rmtree(folder / "t")
    elif at == "file":
        files[which].unlink()
    elif at == "size":
        os.truncate(files[which], 100)
    else:
        with open(files[which], "r+b") as file:
            file.seek(int(at))
            file.write(bytes(100))
    look_at_all(node)
    found = codes(node)
    resolved = ExtensionReader(folder, 500, FdCache(2)).resolve("t/0", found)
    real = found if resolved is None else resolved.codes
    tags = [one.properties.get("TAGS") for one in node.store.records["t", 0]]
    assert real.tolist() == [java_string_hash(tag) if tag else 0 for tag in tags]
    node.reader.close()
    assert node.pull("g", EXPRESSIONS[1])[0] == node.expected(EXPRESSIONS[1])
    if isinstance(at, int) and which == 1:
        assert (found <= MAX_ADDRESS).sum() > 100, "most units are whole"
    node.send(random.Random(5), 30)
    node.dispatch_all()
    assert node.pull("g", EXPRESSIONS[1])[0] == node.expected(EXPRESSIONS[1])
