"""Goal: each rule of RocketMQ for reading (spec 9) holds at the broker's port: codes, positions, waits, offsets, times.

Method: one node whose oldest messages expired, spoken to by the frames of the protocol. Each test has topics of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from commitmq import Producer
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from expiring import AGE_SETTING, SETTINGS, make_old, segments, wait_for_first_segment, wait_until_durable
from pop_answers import pop
from rocketmq_peer import (
    asked,
    bound,
    connected,
    fill,
    heartbeat,
    make_group,
    make_topic,
    pull,
    records,
    send,
    served_node,
)

COMMITS, WAITS, SUBSCRIBES = 1, 2, 4
AT_ONCE = str(SUBSCRIBES)
BY_HEARTBEAT = "0"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of topic ``aged`` queue 0 has lost its first messages, queue 1 all, and queue 2 never had any."""
    with served_node(tmp_path_factory.mktemp("reading"), *SETTINGS, AGE_SETTING) as (node, found, _):
        with Producer(node.address) as producer:
            assert asked(found, make_topic("aged", 3))[0].code == 0
            for queue, count in ((1, 6), (0, 18)):
                for number in range(count):
                    producer.send("aged", b"%d".ljust(10_000) % number, queue=queue, ack="memory")
        wait_until_durable(node)
        bases = segments(node)
        make_old(node, bases[:2])
        wait_for_first_segment(node, bases[2])
        yield found


def fields_of(answer: Command) -> list[int]:
    return [int(answer.ext_fields[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset")]


def offset_of(group: str, topic: str, queue: int = 0, **fields: str) -> Command:
    asked_for = {"consumerGroup": group, "topic": topic, "queueId": str(queue), **fields}
    return request(RequestCode.QUERY_CONSUMER_OFFSET, asked_for)


def commit(group: str, topic: str, offset: int) -> Command:
    fields = {"consumerGroup": group, "topic": topic, "queueId": "0", "commitOffset": str(offset)}
    return request(RequestCode.UPDATE_CONSUMER_OFFSET, fields)


def bounds_of(port: int, topic: str, queue: int) -> tuple[int, int]:
    codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    least, end = asked(port, *(bound(topic, queue, code) for code in codes))
    return int(least.ext_fields["offset"]), int(end.ext_fields["offset"])


# ---------------------------------------------------------------- 9.1, 9.2, 9.4: status, code and positions


def test_the_status_of_a_read_decides_code_remark_and_where_to_go_on(port: int) -> None:
    fill(port, "statuses", b"a", b"b", b"c", properties={"TAGS": "blue"})
    least, end = bounds_of(port, "aged", 0)
    assert 0 < least < end
    cases = [
        (pull("g", "aged", 0, queue=2), 19, "NO_MATCHED_LOGIC_QUEUE", [0, 0, 0]),
        (pull("g", "aged", 5, queue=2), 21, "NO_MATCHED_LOGIC_QUEUE", [0, 0, 0]),
        (pull("g", "aged", least - 1), 21, "OFFSET_TOO_SMALL", [least, least, end]),
        (pull("g", "aged", end), 19, "OFFSET_OVERFLOW_ONE", [end, least, end]),
        (pull("g", "aged", end + 1), 21, "OFFSET_OVERFLOW_BADLY", [end, least, end]),
        (pull("g", "statuses", 1, subscription="red"), 20, "NO_MATCHED_MESSAGE", [3, 0, 3]),
        (pull("g", "statuses", 1, subscription="blue"), 0, "FOUND", [3, 0, 3]),
    ]
    commands = [one for one, *_ in cases]
    for one in commands:
        one.ext_fields["sysFlag"] = AT_ONCE
    found = [(one.code, one.remark, fields_of(one)) for one in asked(port, *commands)]
    assert found == [(code, remark, where) for _, code, remark, where in cases]


def test_every_answer_to_a_pull_names_the_broker_with_the_id_0_for_the_next_one(port: int) -> None:
    fill(port, "suggested", b"a")
    commands = [pull("g", topic, 0, sysFlag=AT_ONCE) for topic in ("suggested", "aged", "no-such-topic")]
    assert {one.ext_fields["suggestWhichBrokerId"] for one in asked(port, *commands)} == {"0"}


def test_a_pull_gets_its_records_as_they_are_stored_and_no_more_than_it_asks_for(port: int) -> None:
    fill(port, "numbers", *(b"%d" % one for one in range(5)))
    answer, all_of_them = asked(
        port,
        pull("g", "numbers", 1, sysFlag=AT_ONCE, maxMsgNums="2"),
        pull("g", "numbers", 0, sysFlag=AT_ONCE, maxMsgNums="0"),
    )
    found = records(answer.body)
    assert ([one.body for one in found], fields_of(answer)) == ([b"1", b"2"], [3, 0, 5])
    assert len(records(all_of_them.body)) == 1, "at least one, whatever is asked for"
    looked = [request(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(one.physical_offset)}) for one in found]
    assert b"".join(bytes(one.body) for one in asked(port, *looked)) == bytes(answer.body)


def test_a_pull_of_32_messages_has_256_kib_and_a_larger_one_more(port: int) -> None:
    """CommitMQ's own limits in the place of RocketMQ's transfer limits (spec 19)."""
    fill(port, "large", *(b"%d".ljust(30_000) % one for one in range(12)))
    usual, large = asked(port, *(pull("g", "large", 0, sysFlag=AT_ONCE, maxMsgNums=most) for most in ("32", "64")))
    assert (len(records(usual.body)), len(records(large.body))) == (8, 12)
    assert len(usual.body) <= 256 * 1024 < len(large.body)


# ---------------------------------------------------------------- 9.4: what is refused


def test_a_pull_without_a_known_group_or_subscription_has_24(port: int) -> None:
    fill(port, "subscribed", b"a")
    fill(port, "unsubscribed", b"a")
    unknown, _, *others = asked(
        port,
        pull("strangers", "subscribed", 0, sysFlag=BY_HEARTBEAT),
        heartbeat("one@1", "known", "subscribed"),
        pull("known", "unsubscribed", 0, sysFlag=BY_HEARTBEAT),
        pull("known", "subscribed", 0, sysFlag=BY_HEARTBEAT, subVersion="1"),
    )
    assert [one.code for one in (unknown, *others)] == [ResponseCode.SUBSCRIPTION_NOT_EXIST] * 2 + [0]
    assert "the consumer's group info not exist" in str(unknown.remark)
    assert "the consumer's subscription not exist" in str(others[0].remark)


def test_a_pull_of_a_newer_subscription_than_the_last_heartbeat_s_has_25(port: int) -> None:
    fill(port, "versions", b"a")
    _, newer, same, by_itself = asked(
        port,
        heartbeat("one@1", "versioned", "versions"),  # of version 1
        pull("versioned", "versions", 0, sysFlag=BY_HEARTBEAT, subVersion="2"),
        pull("versioned", "versions", 0, sysFlag=BY_HEARTBEAT, subVersion="1"),
        pull("versioned", "versions", 0, sysFlag=AT_ONCE, subVersion="2"),
    )
    assert (newer.code, newer.remark) == (
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        "the consumer's subscription not latest",
    )
    assert (same.code, by_itself.code) == (0, 0)


def test_a_group_that_must_not_read_a_topic_has_16_with_forbidden_type_5(port: int) -> None:
    for topic in ("secrets", "news"):
        fill(port, topic, b"a")

    def forbid(readable: str) -> Command:
        fields = {"group": "curious", "topic": "secrets", "readable": readable}
        return request(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, fields)

    def read(topic: str) -> Command:
        return pull("curious", topic, 0, sysFlag=BY_HEARTBEAT)

    beat = heartbeat("one@1", "curious", "secrets", "news")
    _, _, refused, other, _, allowed = asked(
        port, beat, forbid("false"), read("secrets"), read("news"), forbid("true"), read("secrets")
    )
    assert (refused.code, refused.ext_fields["forbiddenType"]) == (ResponseCode.NO_PERMISSION, "5")
    assert refused.remark == "the consumer group[curious] is forbidden for topic[secrets]"
    assert (other.code, allowed.code) == (0, 0)


def test_a_group_that_may_not_broadcast_has_16_with_forbidden_type_4(port: int) -> None:
    fill(port, "broadcasts", b"a")
    found = {}
    for group, enabled in (("quiet", False), ("loud", True)):
        *_, found[group] = asked(
            port,
            make_group(group, consumeBroadcastEnable=enabled),
            heartbeat("one@1", group, "broadcasts", model="BROADCASTING"),
            pull(group, "broadcasts", 0, sysFlag=BY_HEARTBEAT),
        )
    assert (found["quiet"].code, found["quiet"].ext_fields["forbiddenType"]) == (ResponseCode.NO_PERMISSION, "4")
    assert found["quiet"].remark == "the consumer group[quiet] can not consume by broadcast way"
    assert found["loud"].code == 0


def test_prechecks_come_in_rocketmqs_order(port: int) -> None:
    """Each pull breaks one rule less than the one before, so that the next rule answers."""
    assert asked(port, make_group("off", consumeEnable=False), make_topic("shut", 1, 2))[1].code == 0
    found = asked(
        port,
        pull("off", "no-such-topic", 0, queue=9, sysFlag=BY_HEARTBEAT),
        pull("on", "no-such-topic", 0, queue=9, sysFlag=BY_HEARTBEAT),
        pull("on", "shut", 0, queue=9, sysFlag=BY_HEARTBEAT),
        pull("on", "aged", 0, queue=9, sysFlag=BY_HEARTBEAT),
        pull("on", "aged", 0, queue=-1, sysFlag=BY_HEARTBEAT),
        pull("on", "aged", 0, sysFlag=BY_HEARTBEAT),
    )
    assert [(one.code, one.ext_fields.get("forbiddenType")) for one in found] == [
        (ResponseCode.NO_PERMISSION, "2"),
        (ResponseCode.TOPIC_NOT_EXIST, None),
        (ResponseCode.NO_PERMISSION, "3"),
        (ResponseCode.INVALID_PARAMETER, None),
        (ResponseCode.INVALID_PARAMETER, None),
        (ResponseCode.SUBSCRIPTION_NOT_EXIST, None),
    ]


def test_an_expression_that_cannot_be_parsed_has_23(port: int) -> None:
    fill(port, "parsed", b"a")

    def check(expression: str, kind: str) -> Command:
        subscription = {"topic": "parsed", "subString": expression, "expressionType": kind, "subVersion": 1}
        body = {"clientId": "one@1", "group": "g", "subscriptionData": subscription}
        return request(RequestCode.CHECK_CLIENT_CONFIG, body=dumps(body))

    commands = [
        pull("g", "parsed", 0, sysFlag=AT_ONCE, subscription="||"),
        pull("g", "parsed", 0, sysFlag=AT_ONCE, subscription="price >", expressionType="SQL92"),
        check("price >", "SQL92"),
        check("price > 1", "SQL92"),
        check("||", "TAG"),  # the check is for other types
    ]
    codes = [one.code for one in asked(port, *commands)]
    assert codes == [ResponseCode.SUBSCRIPTION_PARSE_FAILED] * 3 + [0, 0]


# ---------------------------------------------------------------- 9.5: waiting


def test_a_pull_that_waited_in_vain_has_19_and_one_without_the_suspend_bit_does_not_wait(port: int) -> None:
    assert asked(port, make_topic("silent"))[0].code == 0

    async def talk() -> tuple[Command, float, Command]:
        async with connected(port) as peer:
            began = time.monotonic()
            waited = await peer.ask(pull("g", "silent", 0, suspendTimeoutMillis="400"))
            waited_s = time.monotonic() - began
            # It would wait for longer than the answer is waited for.
            return (
                waited,
                waited_s,
                await peer.ask(pull("g", "silent", 0, sysFlag=AT_ONCE, suspendTimeoutMillis="15000")),
            )

    waited, waited_s, at_once = asyncio.run(talk())
    assert (waited.code, fields_of(waited)[0]) == (ResponseCode.PULL_NOT_FOUND, 0)
    assert waited_s >= 0.4
    assert at_once.code == ResponseCode.PULL_NOT_FOUND


def test_without_long_polling_a_pull_waits_for_the_short_time_whatever_it_asks_for(port: int) -> None:
    assert asked(port, make_topic("short"))[0].code == 0

    def change(text: str) -> Command:
        return request(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())

    async def talk() -> tuple[Command, float]:
        async with connected(port) as peer:
            began = time.monotonic()
            answer = await peer.ask(pull("g", "short", 0, suspendTimeoutMillis="30000"))
            return answer, time.monotonic() - began

    assert asked(port, change("longPollingEnable=false\nshortPollingTimeMills=300\n"))[0].code == 0
    try:
        answer, waited_s = asyncio.run(talk())
    finally:
        assert asked(port, change("longPollingEnable=true\nshortPollingTimeMills=1000\n"))[0].code == 0
    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert waited_s >= 0.3


def test_a_waiting_pull_is_answered_by_the_first_message_that_its_filter_wants(port: int) -> None:
    assert asked(port, make_topic("awaited"))[0].code == 0

    async def talk() -> Command:
        async with connected(port) as consumer, connected(port) as producer:
            waiting = asyncio.create_task(
                consumer.ask(pull("g", "awaited", 0, subscription="blue", suspendTimeoutMillis="15000"), 14)
            )
            for tag in ("red", "green", "blue"):
                assert not waiting.done()
                assert (await producer.ask(send("awaited", tag.encode(), {"TAGS": tag}))).code == 0
            return await waiting

    answer = asyncio.run(talk())
    assert ([one.body for one in records(answer.body)], fields_of(answer)[0]) == ([b"blue"], 3)


# ---------------------------------------------------------------- 9.6, 9.7: offsets of groups


def test_a_pull_stores_the_offset_that_it_commits_and_without_the_bit_none(port: int) -> None:
    fill(port, "committed", *(b"%d" % one for one in range(5)))
    found = {}
    for group, flag in (("careful", COMMITS | SUBSCRIBES), ("careless", SUBSCRIBES)):
        _, found[group] = asked(
            port,
            pull(group, "committed", 4, sysFlag=str(flag), commitOffset="3"),
            offset_of(group, "committed", setZeroIfNotFound="false"),
        )
    assert (found["careful"].code, found["careful"].ext_fields["offset"]) == (0, "3")
    assert found["careless"].code == ResponseCode.QUERY_NOT_FOUND


def test_an_offset_that_goes_back_is_stored_as_it_is_given_and_one_beyond_the_queue_is_its_end(port: int) -> None:
    """RocketMQ only logs that an offset went back, and keeps one beyond the queue (spec 19)."""
    fill(port, "stored", b"a", b"b")
    commands = [make_group("movers")]
    for offset in (2, 1, 0, 1_000):
        commands += [commit("movers", "stored", offset), offset_of("movers", "stored")]
    answers = asked(port, *commands)[1:]
    assert [one.code for one in answers] == [0] * 8
    assert [one.ext_fields["offset"] for one in answers[1::2]] == ["2", "1", "0", "2"]


def test_an_offset_that_nobody_stored_is_0_in_a_young_queue_and_22_elsewhere(port: int) -> None:
    fill(port, "young", b"a")
    young, not_zero, of_old, of_empty, of_nothing = asked(
        port,
        offset_of("new", "young"),
        offset_of("new", "young", setZeroIfNotFound="false"),
        offset_of("new", "aged", setZeroIfNotFound="true"),
        offset_of("new", "aged", 2),
        offset_of("new", "no-such-topic"),
    )
    assert (young.code, young.ext_fields["offset"]) == (0, "0")
    assert not_zero.code == of_old.code == of_empty.code == of_nothing.code == ResponseCode.QUERY_NOT_FOUND
    assert not_zero.remark == "Not found, do not set to zero, maybe this group boot first"
    assert of_old.remark == "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"


def test_a_deleted_group_keeps_its_offsets_unless_they_go_with_it(port: int) -> None:
    fill(port, "kept", b"a", b"b")

    def delete(clean: str) -> Command:
        return request(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "passing", "cleanOffset": clean})

    look = offset_of("passing", "kept", setZeroIfNotFound="false")
    _, stored, deleted, kept = asked(port, make_group("passing"), commit("passing", "kept", 2), delete("false"), look)
    assert (stored.code, deleted.code, kept.ext_fields.get("offset")) == (0, 0, "2")
    _, deleted, gone = asked(port, make_group("passing"), delete("true"), look)
    assert (deleted.code, gone.code) == (0, ResponseCode.QUERY_NOT_FOUND)


def test_offsets_go_with_their_topic(port: int) -> None:
    fill(port, "brief", b"a", b"b")
    look = offset_of("mourners", "brief", setZeroIfNotFound="false")
    _, _, before, deleted, made, after = asked(
        port,
        make_group("mourners"),
        commit("mourners", "brief", 2),
        look,
        request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "brief"}),
        make_topic("brief"),
        look,
    )
    assert (before.code, deleted.code, made.code) == (0, 0, 0)
    assert after.code == ResponseCode.QUERY_NOT_FOUND


def test_a_reset_is_shown_at_once_and_keeps_commits_away_until_a_pull_has_taken_it(port: int) -> None:
    fill(port, "moved", *(b"%d" % one for one in range(6)))
    reset = {"topic": "moved", "group": "moving", "queueId": "0", "offset": "2", "timestamp": "0", "isForce": "true"}
    look = offset_of("moving", "moved")
    _, _, done, shown, ignored, still, taken, found, _, after = asked(
        port,
        make_group("moving"),
        commit("moving", "moved", 5),
        request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset),
        look,
        commit("moving", "moved", 4),
        look,
        pull("moving", "moved", 5, sysFlag=AT_ONCE),
        pull("moving", "moved", 2, sysFlag=AT_ONCE),
        commit("moving", "moved", 3),
        look,
    )
    assert done.code == 0, done.remark
    assert (shown.ext_fields["offset"], still.ext_fields["offset"]) == ("2", "2")
    assert (ignored.code, ignored.remark) == (0, "Offset has been previously reset")
    assert (taken.code, taken.remark, fields_of(taken)[0]) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET", 2)
    assert (found.code, after.ext_fields["offset"]) == (0, "3")


@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_new_group_pops_an_old_queue_from_its_minimum_or_with_init_mode_1_its_last_message(
    port: int, mode: str
) -> None:
    """The rule of section 12.6; only this node has a queue that lost its first message."""
    least, end = bounds_of(port, "aged", 0)

    async def talk() -> Command:
        async with connected(port) as peer:
            command = pop(f"popper{mode}", "aged", 0, 32, initMode=mode)
            return await peer.until(command, lambda answer: answer.code == 0)

    found = [one.queue_offset for one in records(asyncio.run(talk()).body)]
    assert found == (list(range(least, end)) if mode == "0" else [end - 1])


# ---------------------------------------------------------------- 9.7: other reads


def test_the_earliest_store_time_is_that_of_the_first_message_that_is_left(port: int) -> None:
    def earliest(topic: str, queue: int) -> Command:
        return request(RequestCode.GET_EARLIEST_MSG_STORETIME, {"topic": topic, "queueId": str(queue)})

    least, end = bounds_of(port, "aged", 0)
    lost = bounds_of(port, "aged", 1)
    assert 0 < least < end
    assert lost == (6, 6), "everything of this queue expired"
    first, *others = asked(
        port,
        pull("g", "aged", least, sysFlag=AT_ONCE, maxMsgNums="1"),
        earliest("aged", 0),
        earliest("aged", 1),
        earliest("aged", 2),
        earliest("no-such-topic", 0),
    )
    (record,) = records(first.body)
    assert record.queue_offset == least
    assert [one.ext_fields["timestamp"] for one in others] == [str(record.store_timestamp), "-1", "-1", "-1"]


def test_a_look_at_a_place_without_a_record_has_1(port: int) -> None:
    answers = asked(
        port, *(request(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": one}) for one in ("0", "1", str(1 << 40)))
    )
    assert [one.code for one in answers] == [ResponseCode.SYSTEM_ERROR] * 3


def test_the_bounds_of_what_is_not_there_are_0(port: int) -> None:
    codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    places = (("no-such-topic", 0), ("aged", 2))
    answers = asked(port, *(bound(topic, queue, code) for topic, queue in places for code in codes))
    assert [(one.code, one.ext_fields["offset"]) for one in answers] == [(0, "0")] * 4
