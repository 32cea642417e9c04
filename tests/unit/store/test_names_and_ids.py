"""Goal: identifiers are RocketMQ's (spec 2.10) and no illegal name reaches the file system (spec 2.7)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_strategies import hosts

from commitmq.errors import InvalidMessageError
from commitmq.store.format import Host
from commitmq.store.message_id import (
    UniqueIdGenerator,
    offset_message_id,
    pack_host,
    parse_offset_message_id,
    unpack_host,
)
from commitmq.store.topic_name import FORBIDDEN_TOPICS, is_send_forbidden, validate_group, validate_topic


@given(hosts, st.integers(0, 2**63 - 1))
def test_offset_message_id_round_trip(host: Host, offset: int) -> None:
    message_id = offset_message_id(host.ip, host.port, offset)
    assert re.fullmatch(r"[0-9A-F]{32}|[0-9A-F]{56}", message_id)
    assert parse_offset_message_id(message_id) == (host, offset)
    assert unpack_host(pack_host(host)) == host


def test_offset_message_id_example() -> None:
    assert offset_message_id("127.0.0.1", 10911, 1758) == "7F00000100002A9F00000000000006DE"


@pytest.mark.parametrize("text", ["", "7F", "Z" * 32, "7F00000100002A9F 0000000000006D", "0" * 40])
def test_what_is_no_offset_message_id(text: str) -> None:
    with pytest.raises(ValueError, match="offset message id"):
        parse_offset_message_id(text)


def test_unique_ids_are_unique_across_threads() -> None:
    generator = UniqueIdGenerator()
    made: list[list[str]] = []
    threads = [threading.Thread(target=lambda: made.append(generator.take(5_000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [one for part in made for one in part]
    assert len(ids) == len(set(ids)) == 20_000
    assert all(re.fullmatch(r"[0-9A-F]{32}", one) for one in ids[:100])


def test_parts_of_a_unique_id() -> None:
    unique_id = UniqueIdGenerator().next()
    assert int(unique_id[8:12], 16) == os.getpid() & 0xFFFF
    now = time.localtime()
    month = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    assert abs(month + int(unique_id[20:28], 16) / 1000 - time.time()) < 5


def test_a_forked_child_makes_other_ids() -> None:
    code = (
        "import os\nfrom commitmq.store.message_id import UniqueIdGenerator\n"
        "g = UniqueIdGenerator()\nr, w = os.pipe()\n"
        "if os.fork() == 0:\n    os.write(w, g.next().encode()); os._exit(0)\n"
        "os.wait(); child = os.read(r, 99).decode(); print(child[12:20] != g.next()[12:20])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "True\n"


def test_modules_for_single_sends_are_light() -> None:
    """A client that sends single messages must not load numpy or numba."""
    code = (
        "import sys\n"
        "from commitmq.store import record, properties, crc, message_id, topic_name, format, java\n"
        "from commitmq.store import client_batch, compression\n"
        "print([name for name in ('numpy', 'numba', 'zmq', 'lz4', 'zstandard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["a", "Orders-2_x|%", "T" * 127, "%RETRY%" + "g" * 248, "%DLQ%" + "g" * 250])
def test_legal_topics(name: str) -> None:
    validate_topic(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        "a/b",
        "..",
        ".",
        "a.b",
        "ü",
        "a\n",
        "a\0",
        "T" * 128,
        "%RETRY%" + "g" * 249,
        "x%RETRY%" + "g" * 120,
    ],
)
def test_illegal_topics(name: str) -> None:
    with pytest.raises(InvalidMessageError, match="topic"):
        validate_topic(name)


def test_groups() -> None:
    validate_group("g" * 120)
    for bad in ("", "g" * 121, "a@b", "a/b"):
        with pytest.raises(InvalidMessageError, match="group"):
            validate_group(bad)


def test_forbidden_topics() -> None:
    assert is_send_forbidden("SCHEDULE_TOPIC_XXXX")
    assert not is_send_forbidden("%RETRY%g")
    assert len(FORBIDDEN_TOPICS) == 8
