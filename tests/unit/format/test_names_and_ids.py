"""Goal: identifiers are RocketMQ's (spec 2.10) and no illegal name reaches the file system (spec 2.7).

Method: random hosts and offsets go there and back; names at and beyond each limit; the list of forbidden topics is compared
with the one in the spec's text.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Host
from commitmq.format.message_id import offset_message_id, pack_host, parse_offset_message_id, unpack_host
from commitmq.store.metadata.topic_config import FORBIDDEN_TOPICS, is_send_forbidden, validate_group, validate_topic
from record_strategies import hosts

SPEC = Path(__file__).resolve().parents[3] / "docs" / "spec" / "rocketmq-store.md"


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


def test_modules_for_single_sends_are_light() -> None:
    """A client that sends single messages must not load numpy."""
    code = (
        "import sys\n"
        "from commitmq.format import record, properties, message_id, constants, java, client_batch, compression\n"
        "from commitmq.store.metadata import topic_config\n"
        "print([name for name in ('numpy', 'zmq', 'lz4', 'zstandard') if name in sys.modules])"
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
    # The limits' row about topic names, from "sends to" to "are refused".
    rule = SPEC.read_text(encoding="utf-8").partition("\n### 2.7 ")[2].partition("\n### ")[0]
    named = re.findall(r"sends to (`.*?) are refused", rule)
    assert len(named) == 1
    in_the_spec = {name for name in re.findall(r"`([^`]+)`", named[0]) if not name.startswith("[")}
    assert len(in_the_spec) >= 6
    assert in_the_spec == FORBIDDEN_TOPICS


def test_a_pop_retry_topic_of_the_second_form_has_one_plus() -> None:
    validate_topic("%RETRY%group+topic")
    for name in ("a+b", "%DLQ%a+b", "%RETRY%+b", "%RETRY%a+", "%RETRY%a+b+c", "%RETRY%a+b/c", "%RETRY%a+" + "b" * 250):
        with pytest.raises(InvalidMessageError):
            validate_topic(name)
