"""Goal: a dead letter goes to its topic again once, whatever dies while it is resent, and an administrator sees and bounds it.

Method: real nodes with dead letters made by send-backs. The requests of a resend are cut one by one, before they reach the
node and after they were answered, and the resend is repeated; the program is killed at random moments; then whole topics are
read.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncAdmin,
    DeadLetterFilter,
    NodeUnavailableError,
    Producer,
    ProtocolError,
    TopicNotFoundError,
)
from commitmq.errors import CommitMQError
from commitmq.format.constants import DEAD_LETTER_PASSES
from delays import Peer, everything
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("dlq"), "topics.default_queues=2", "groups.auto_create=true") as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


def bury(node: Node, group: str, topic: str, count: int, **more: Any) -> list[bytes]:
    """Send ``count`` messages to ``topic`` and send them back as dead letters of ``group``. Returns the bodies."""
    bodies = [b"%s-%d" % (topic.encode(), number) for number in range(count)]
    with Admin(node.address) as admin, Producer(node.address) as producer, Peer(node) as peer:
        for name, queues in ((topic, 2), (f"%DLQ%{group}", 1), (f"%RETRY%{group}", 1)):
            admin.topic_create(name, queues)
        assert peer.hello()["ok"]
        for body in bodies:
            sent = producer.send(topic, body, keys=body.decode(), properties={"colour": "red"}, **more)
            answer = peer.ask(
                b"", op="send_back", group=group, topic=topic, queue=sent.queue, queue_offset=sent.queue_offset,
                physical_offset=sent.physical_offset, delay_level=-1,
            )  # fmt: skip
            assert answer["ok"], answer
            place = answer["queue_offset"]
        eventually(lambda: admin.offsets(f"%DLQ%{group}")[0].max > place, "the last one can be read")
    return bodies


def copies(node: Node, topic: str) -> Counter[bytes]:
    return Counter(bytes(one.body) for one in everything(node, topic))


def test_dead_letters_go_to_their_topic_again_once(node: Node, admin: Admin) -> None:
    bodies = bury(node, "first", "first", 5, tags="hot", sharding_key="k")
    assert [bytes(one.message.body) for one in admin.dlq_list("first")] == bodies
    planned = admin.dlq_resend("first", dry_run=True)
    assert (planned.sent, planned.topics, planned.complete) == (5, {"first": 5}, True)
    assert copies(node, "first") == Counter(bodies), "a dry run sends nothing"
    seen: list[tuple[int, int]] = []
    done = admin.dlq_resend("first", on_progress=lambda *now: seen.append(now))
    assert (done.sent, done.sent_before, done.failed, seen[-1]) == (5, 0, 0, (5, 5))
    assert [tuple(one) for one in done.positions] == [("%DLQ%first", 0, 5)]
    assert copies(node, "first") == Counter(bodies + bodies)
    again = [one for one in admin.query("first", begin=0, max_messages=99) if "DLQ_ORIGIN_TOPIC" in one.properties]
    assert Counter(bytes(one.body) for one in again) == Counter(bodies)
    first = min(again, key=lambda one: one.physical_offset)
    assert (first.tags, first.keys, first.properties["colour"]) == ("hot", ["first-0"], "red")
    assert first.reconsume_times == 0
    assert first.properties["DLQ_ORIGIN_TOPIC"] == "first"
    assert admin.message(first.properties["DLQ_ORIGIN_MESSAGE_ID"]).body == first.body
    assert not {"RETRY_TOPIC", "DELAY", "ORIGIN_MESSAGE_ID"} & set(first.properties)
    assert len({one.queue_id for one in again}) == 1, "one sharding key, one queue"
    assert admin.dlq_resend("first").examined == 0
    assert admin.dlq_list("first") == []
    assert [one.state for one in admin.dlq_list("first", all_states=True)] == ["resent"] * 5
    assert copies(node, "first") == Counter(bodies + bodies)


def test_a_filter_leaves_others_behind_for_the_next_time(node: Node, admin: Admin) -> None:
    bodies = bury(node, "some", "some", 6)
    one = admin.dlq_resend("some", DeadLetterFilter(offsets=[1, 4]))
    assert (one.sent, one.left, one.positions[0].offset) == (2, 4, 0)
    assert admin.dlq_resend("some", DeadLetterFilter(key="some-0")).positions[0].offset == 1
    assert admin.dlq_list("some", DeadLetterFilter(topic="other")) == []
    assert [x.message.queue_offset for x in admin.dlq_list("some")] == [2, 3, 5]
    two = admin.dlq_resend("some", max_messages=2)
    assert (two.sent, two.complete) == (2, False)
    three = admin.dlq_resend("some")
    assert (three.sent, three.sent_before, three.positions[0].offset) == (1, 1, 6)
    assert copies(node, "some") == Counter(bodies + bodies)


def test_a_letter_whose_topic_has_gone_stays_and_says_why(node: Node, admin: Admin) -> None:
    bury(node, "mixed", "mixed-gone", 2)
    kept = bury(node, "mixed", "mixed-kept", 2)
    admin.topic_delete("mixed-gone")
    done = admin.dlq_resend("mixed")
    assert (done.sent, done.failed, done.positions[0].offset) == (2, 2, 0)
    assert "mixed-gone" in done.failures[0].reason
    assert admin.dlq_resend("mixed").sent_before == 2
    assert copies(node, "mixed-kept") == Counter(kept + kept)
    with pytest.raises(TopicNotFoundError, match="group nobody has no dead letters"):
        admin.dlq_list("nobody")


def test_the_topic_and_the_group_of_resends_are_the_systems(node: Node, admin: Admin) -> None:
    bury(node, "owned", "owned", 1)
    assert admin.dlq_resend("owned").sent == 1
    assert admin.topic(DEAD_LETTER_PASSES).system
    assert not admin.topic_delete_idle(DEAD_LETTER_PASSES, int(time.time() * 1000) + 60_000)
    with pytest.raises(ProtocolError, match="is a system topic"):
        admin.topic_delete(DEAD_LETTER_PASSES)
    with pytest.raises(ProtocolError, match="is a system topic"):
        admin.topic_update(DEAD_LETTER_PASSES, 2)
    document = admin.export_config(offsets=True)
    assert DEAD_LETTER_PASSES not in {one["name"] for one in document["topics"]}
    assert "CMQ_DEAD_LETTERS" not in {one["name"] for one in document["groups"]}
    listed = [
        json.loads(commitmq("group", "list", *more, "--json", "--node", node.address).stdout)
        for more in ([], ["--all"])
    ]
    assert ["CMQ_DEAD_LETTERS" in {one["name"] for one in groups} for groups in listed] == [False, True]


def test_a_resent_letter_stays_resent_when_its_topic_is_deleted(node: Node, admin: Admin) -> None:
    bury(node, "outlived", "outlived", 4)
    assert admin.dlq_resend("outlived", max_messages=2).sent == 2
    assert admin.dlq_purge("outlived", until=admin.dlq_show("outlived", 2).message.store_timestamp).purged >= 1

    def states() -> list[str]:
        return [one.state for one in admin.dlq_list("outlived", all_states=True)]

    before = states()
    assert before[:3] == ["resent", "resent", "purged"]
    admin.topic_delete("outlived")
    assert states() == before
    admin.topic_create("outlived", 2)
    assert states() == before, "nor does a new topic of the name change that"


def test_groups_with_dead_letters_are_listed_page_by_page(node: Node, admin: Admin) -> None:
    bury(node, "zz-few", "zz-few", 2)
    bury(node, "zz-more", "zz-more", 3)
    admin.topic_create("%DLQ%zz-none", 1)

    def told(*words: str) -> Any:
        return json.loads(commitmq(*words, "--json", "--node", node.address).stdout)

    few, more = {"group": "zz-few", "dead": 2}, {"group": "zz-more", "dead": 3}
    assert told("dlq", "list", "--after", "zz") == {"groups": [few, more], "next": None}
    assert told("dlq", "list", "--after", "zz", "--max", "1") == {"groups": [few], "next": "zz-few"}
    assert told("dlq", "list", "--after", "zz-few", "--max", "1") == {"groups": [more], "next": "zz-more"}
    told("dlq", "purge", "zz-few", "--yes")
    assert told("dlq", "list", "--after", "zz")["groups"] == [more]
    shown = commitmq("dlq", "list", "--after", "zz", "--max", "2", "--node", node.address)
    assert "zz-more" in shown.stdout
    assert "there are more groups: --after zz-more" in shown.stderr
    found = {one["what"]: (one["says"], one["do"]) for one in told("doctor")["findings"]}
    assert found["group zz-more"] == ("3 dead letters", "`commitmq dlq list zz-more`; then resend or purge them")
    assert "group zz-few" not in found
    assert commitmq("dlq", "list", "--all", "--node", node.address).returncode == 2
    assert commitmq("dlq", "list", "zz-few", "--after", "zz", "--node", node.address).returncode == 2


def test_a_purge_counts_what_was_not_resent(node: Node, admin: Admin) -> None:
    bury(node, "half-resent", "half-resent", 4)
    assert admin.dlq_resend("half-resent", DeadLetterFilter(offsets=[1, 2])).sent == 2
    assert admin.dlq_purge("half-resent", dry_run=True).purged == 2
    assert admin.dlq_purge("half-resent").purged == 2


def test_a_purge_moves_the_position_and_a_resend_begins_behind_it(node: Node, admin: Admin) -> None:
    bodies = bury(node, "purged", "purged", 3)
    middle = admin.dlq_show("purged", 1).message.store_timestamp
    time.sleep(0.005)
    more = bury(node, "purged", "purged", 2)
    assert admin.dlq_purge("purged", dry_run=True).purged == 5
    spared = admin.dlq_purge("purged", until=admin.dlq_show("purged", 2).message.store_timestamp)
    assert spared.purged >= 3
    assert middle
    assert admin.dlq_purge("purged", until=middle).purged == 0
    assert admin.dlq_show("purged", 0).state == "purged"
    assert admin.dlq_resend("purged").sent == 2
    assert copies(node, "purged") == Counter(bodies + more + more)
    with pytest.raises(ProtocolError, match="has no message 99"):
        admin.dlq_show("purged", 99)


class Cut(Exception):
    """The program dies here."""


def test_a_resend_that_dies_anywhere_doubles_nothing(node: Node) -> None:
    """Every request of a resend is the last one once: before it reaches the node, and after its answer."""
    bodies = bury(node, "cut", "cut", 4)
    survived, number, after = False, 0, False
    rounds = 0
    while not survived:
        with Admin(node.address) as admin:
            whole, calls = admin._request, 0

            def cut(*words: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == number + 1 and not after:  # noqa: B023
                    raise Cut
                answer = whole(*words, **named)  # noqa: B023
                if calls == number + 1:  # noqa: B023
                    raise Cut
                return answer

            admin._request = cut  # type: ignore[method-assign]
            try:
                admin.dlq_resend("cut", DeadLetterFilter(offsets=[1, 2, 3]) if rounds % 3 == 1 else None)
                survived = calls <= number
            except Cut:
                pass
        found = copies(node, "cut")
        assert set(found) == set(bodies)
        assert max(found.values()) <= 2, f"call {number} {'after' if after else 'before'}: {found}"
        number, after = (number + 1, False) if after else (number, True)
        rounds += 1
    assert copies(node, "cut") == Counter(bodies + bodies)
    assert rounds > 20, "it was cut often"


def test_a_pass_that_slept_is_refused(node: Node) -> None:
    """A second pass begins and resends while the first one is between its look-up and its send."""
    bodies = bury(node, "slept", "slept", 3)
    with Admin(node.address) as sleeper, Admin(node.address) as other:
        whole = sleeper._request

        def slow(role: str, op: str, fields: dict[str, Any], **named: Any) -> Any:
            if op == "send" and fields["topic"] == "slept" and fields["sequence"] + fields["queue"] >= 0:
                sleeper._request = whole  # type: ignore[method-assign]
                assert other.dlq_resend("slept").sent == 3
            return whole(role, op, fields, **named)

        sleeper._request = slow  # type: ignore[method-assign]
        with pytest.raises(CommitMQError, match="another resend of the dead letters of group slept has begun"):
            sleeper.dlq_resend("slept")
    assert copies(node, "slept") == Counter(bodies + bodies)


@pytest.mark.slow
def test_a_killed_program_doubles_nothing(node: Node) -> None:
    bodies = bury(node, "killed", "killed", 60)
    words = [
        sys.executable,
        "-m",
        "commitmq.cli.main",
        "dlq",
        "resend",
        "killed",
        "--rate",
        "60",
        "--node",
        node.address,
    ]
    for turn in range(6):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as program:
            time.sleep(0.5 + 0.07 * turn)
            program.kill()
    with Admin(node.address) as admin:
        admin.dlq_resend("killed", rate=100_000)
    assert copies(node, "killed") == Counter(bodies + bodies)


def test_the_command_line(node: Node, admin: Admin) -> None:
    bury(node, "shell", "shell", 3)

    def run(*words: str) -> str:
        done = commitmq("dlq", *words, "--node", node.address)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert "shell-1" in run("list", "shell")
    shown = run("show", "shell", "1")
    assert "colour=red" in shown
    assert shown.rstrip().endswith("shell-1")
    assert json.loads(run("show", "shell", "1", "--json"))["origin_topic"] == "shell"
    assert "3 dead letters of group shell would be resent" in run("resend", "shell", "--dry-run")
    done = json.loads(run("resend", "shell", "--offset", "0", "--rate", "1000", "--json"))
    assert (done["sent"], done["left"], done["positions"]) == (1, 2, [["%DLQ%shell", 0, 1]])
    assert "2 dead letters of group shell given up" in run("purge", "shell", "--yes")
    assert run("list", "shell") == "group shell has no such dead letters\n"
    assert [one["state"] for one in json.loads(run("list", "shell", "--all", "--json"))["dead_letters"]] == [
        "resent", "purged", "purged",
    ]  # fmt: skip
    missing = commitmq("dlq", "list", "no-such", "--node", node.address)
    assert missing.returncode == 1
    assert "group no-such has no dead letters" in missing.stderr


def test_the_rate_bounds_a_resend_and_the_twin_does_the_same(node: Node) -> None:
    bury(node, "paced", "paced", 6)

    async def resend() -> float:
        async with AsyncAdmin(node.address) as admin:
            began = time.monotonic()
            assert (await admin.dlq_resend("paced", rate=10)).sent == 6
            return time.monotonic() - began

    assert asyncio.run(resend()) >= 0.5
    with Admin(node.address) as admin:
        for wrong in ({"rate": 0}, {"max_messages": 0}):
            with pytest.raises(ValueError, match="must be"):
                admin.dlq_resend("paced", **wrong)  # type: ignore[arg-type]
        assert [one.keys for one in admin.query(DEAD_LETTER_PASSES, begin=0, max_messages=999)].count(["paced"]) == 1
    with Admin("tcp://127.0.0.1:9", timeout_s=0.2) as nowhere, pytest.raises(NodeUnavailableError):
        nowhere.dlq_resend("paced")
