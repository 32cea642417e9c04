"""Goal: a query finds exactly the messages that have the key, the newest first to the limit, and says when it cannot know.

Method: one real node with small index files, so that they roll many times; one topic whose keys share hashes ("Aa" and
"BB"). What a query finds is compared with what was sent. The command line is run as users run it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

from commitmq import Admin, AsyncAdmin, Message, Producer, QueryResult, SendResult
from commitmq.errors import ProtocolError
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, start_node

COUNT = 300
TOPIC = "orders"


class Sent(NamedTuple):
    result: SendResult
    body: bytes
    keys: list[str]
    tag: str | None


class Served(NamedTuple):
    node: Node
    admin: Admin
    sent: list[Sent]

    def bodies(self, **wanted: str) -> list[bytes]:
        """What a query must find, in the order of the log."""
        rows = sorted(self.sent, key=lambda one: one.result.physical_offset)
        if "key" in wanted:
            return [one.body for one in rows if wanted["key"] in one.keys]
        return [one.body for one in rows if one.tag == wanted["tag"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ("index.hash_slots=50", "index.max_items=97", "reader.max_query_items=1000")
    with start_node(tmp_path_factory.mktemp("query"), *settings) as node:
        sent = []
        with Producer(node.address) as producer, Admin(node.address) as admin:
            for number in range(COUNT):
                keys = [f"order-{number}", "Aa" if number % 2 else "BB", *(["é🚀"] if number % 7 == 0 else [])]
                tag = (None, "TagA", "TagB")[number % 3]
                body = f"body {number}".encode()
                sent.append(Sent(producer.send(TOPIC, body, keys=keys, tags=tag, ack="memory"), body, keys, tag))
            producer.send("other", b"the same keys, another topic", keys=["Aa", "order-7"], tags="TagA")
            yield Served(node, admin, sent)


def bodies(result: QueryResult) -> list[bytes]:
    assert result.complete
    return [message.body for message in result]


@pytest.mark.parametrize("key", ["Aa", "BB", "é🚀", "order-7", "order-299", "C#"])
def test_a_key_finds_its_messages_and_no_others_of_the_same_hash(served: Served, key: str) -> None:
    result = served.admin.query(TOPIC, key=key, max_messages=1_000)
    assert bodies(result) == served.bodies(key=key)
    assert result.next is None


@pytest.mark.parametrize("tag", ["TagA", "TagB", "none"])
def test_a_tag(served: Served, tag: str) -> None:
    assert bodies(served.admin.query(TOPIC, tag=tag, max_messages=1_000)) == served.bodies(tag=tag)


def test_a_unique_key_and_a_message_id(served: Served) -> None:
    for one in (served.sent[0], served.sent[150], served.sent[-1]):
        assert bodies(served.admin.query(TOPIC, unique_key=one.result.unique_id)) == [one.body]
        # A unique key is no key, though its item has the same hash.
        assert bodies(served.admin.query(TOPIC, key=one.result.unique_id)) == []
        assert served.admin.message(one.result.msg_id).body == one.body
    with pytest.raises(ValueError, match="hex digits"):
        served.admin.message("order-7")


def test_the_newest_win_the_limit_and_next_goes_on(served: Served) -> None:
    expected = served.bodies(key="Aa")
    found: list[bytes] = []
    following = None
    while True:
        result = served.admin.query(TOPIC, key="Aa", max_messages=13, continue_from=following)
        page = bodies(result)
        assert page == expected[len(expected) - len(found) - len(page) : len(expected) - len(found)]
        found = page + found
        following = result.next
        if following is None:
            break
        assert len(page) == 13
    assert found == expected


def test_times_cut_to_the_millisecond(served: Served) -> None:
    first, last = served.sent[40].result.store_timestamp, served.sent[200].result.store_timestamp
    within = [one for one in served.sent if first <= one.result.store_timestamp <= last]
    inside = sorted(within, key=lambda one: one.result.physical_offset)
    by_key = served.admin.query(TOPIC, key="BB", begin=first, end=last, max_messages=1_000)
    assert bodies(by_key) == [one.body for one in inside if "BB" in one.keys]
    begin, end = datetime.fromtimestamp(first / 1000, UTC), datetime.fromtimestamp(last / 1000, UTC)
    by_time = served.admin.query(TOPIC, begin=begin, end=end, max_messages=1_000)
    assert bodies(by_time) == [one.body for one in inside]
    paged: list[bytes] = []
    following = None
    while True:
        result = served.admin.query(TOPIC, begin=first, end=last, max_messages=7, continue_from=following)
        paged += bodies(result)
        following = result.next
        if following is None:
            break
    assert paged == [one.body for one in inside]


def test_what_was_just_sent_is_found(served: Served) -> None:
    with Producer(served.node.address) as producer:
        for number in range(20):
            sent = producer.send("fresh", b"new", keys=[f"fresh-{number}"])
            result = served.admin.query("fresh", key=f"fresh-{number}")
            assert [message.physical_offset for message in result] == [sent.physical_offset]
            assert result.complete
            assert result.indexed_to >= result.log_end > sent.physical_offset


def test_a_deleted_topic_takes_its_messages_with_it(served: Served) -> None:
    with Producer(served.node.address) as producer:
        producer.send("gone", b"old", keys=["k"])
        assert len(served.admin.query("gone", key="k")) == 1
        served.admin.topic_delete("gone")
        with pytest.raises(ProtocolError, match="TOPIC_NOT_EXIST"):
            served.admin.query("gone", key="k")
        producer.send("gone", b"new", keys=["k"])
        assert bodies(served.admin.query("gone", key="k")) == [b"new"]


@pytest.mark.parametrize(
    "fields",
    [
        {"key": ""},
        {"key": 7},
        {"key": "a", "type": "hash"},
        {"key": "a", "type": []},
        {"key": "a b"},
        {"key": "a", "max": 0},
        {"key": "a", "begin": "now"},
        {"key": "a", "next": "somewhere"},
        {"key": "a", "next": "1-2-" + "9" * 40},
        {"key": "a", "next": "1-2-" + "9" * 19},
        {"key": "a", "next": f"1-{1 << 63}-2"},
        {},
    ],
)
def test_a_bad_request_is_refused(served: Served, fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="INVALID_PARAMETER"):
        served.admin._ask("reader", "query", {"topic": TOPIC, **fields})


@pytest.mark.parametrize("following", ["0-0-0", "20261121024525538-5-100", "20261121024525538-9999999-99999999"])
def test_a_next_that_leads_nowhere_finds_no_wrong_message(served: Served, following: str) -> None:
    result = served.admin.query(TOPIC, key="Aa", continue_from=following, max_messages=1_000)
    assert set(bodies(result)) <= set(served.bodies(key="Aa"))


def test_arguments_that_do_not_go_together(served: Served) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"key": "a", "tag": "b"},
        {"key": "a", "max_messages": 0},
        {"begin": 0, "continue_from": "x"},
    ]
    for arguments in cases:
        with pytest.raises(ValueError, match=r".+"):
            served.admin.query(TOPIC, **arguments)


def test_what_cannot_be_sent_is_refused_with_a_sentence(served: Served) -> None:
    cases: list[dict[str, Any]] = [{"key": "\udcff"}, {"key": "a", "begin": 1 << 70}]
    for arguments in cases:
        with pytest.raises(ProtocolError, match="INVALID_PARAMETER: a value cannot be sent"):
            served.admin.query(TOPIC, **arguments)
    ended = commitmq("query", "--topic", TOPIC, "--key", "\udcff", "--node", served.node.address)
    assert (ended.returncode, ended.stdout) == (CliExit.FAILURE, "")
    assert ended.stderr.startswith("commitmq: INVALID_PARAMETER")


def test_asyncio(served: Served) -> None:
    async def ask() -> tuple[QueryResult, Message]:
        async with AsyncAdmin(served.node.address) as admin:
            return await admin.query(TOPIC, key="order-7"), await admin.message(served.sent[7].result.msg_id)

    result, message = asyncio.run(ask())
    assert bodies(result) == [message.body] == [b"body 7"]


def test_command_line(served: Served) -> None:
    def run(*arguments: str) -> str:
        ended = commitmq("query", "--node", served.node.address, *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    table = run("--topic", TOPIC, "--key", "order-7").splitlines()
    assert table[0].split()[:2] == ["STORED", "(UTC)"]
    assert len(table) == 2
    assert table[1].endswith("body 7")
    document = json.loads(run("--topic", TOPIC, "--tag", "TagA", "--max", "5", "--json"))
    assert [one["body"].encode() for one in document["messages"]] == served.bodies(tag="TagA")[-5:]
    assert document["complete"] is True
    more = json.loads(
        run("--topic", TOPIC, "--tag", "TagA", "--max", "5", "--json", "--continue", document["next"]),
    )
    assert [one["body"].encode() for one in more["messages"]] == served.bodies(tag="TagA")[-10:-5]
    assert "body 11" in run("--id", served.sent[11].result.msg_id)
    stamp = str(served.sent[60].result.store_timestamp)
    assert "body 60" in run("--topic", TOPIC, "--begin", stamp, "--end", stamp)
    for wrong in (["--topic", TOPIC], ["--key", "a"], ["--topic", TOPIC, "--key", "a", "--tag", "b"], ["--id", "x"]):
        assert commitmq("query", "--node", served.node.address, *wrong).returncode == CliExit.USAGE
    nothing = commitmq("query", "--node", served.node.address, "--topic", TOPIC, "--key", "never-sent")
    assert (nothing.returncode, "no message was found" in nothing.stderr) == (0, True)
