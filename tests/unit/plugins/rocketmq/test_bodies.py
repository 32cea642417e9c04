"""Goal: bodies are what RocketMQ's programs write and read, its own kind of JSON included.

Method: bytes from the page, beside what the encoders make; round trips of maps with queues as keys (hypothesis); what
Java, Go and C++ clients send, as texts; a table of wrong bodies.
"""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq_plugins.rocketmq.remoting import bodies, fastjson
from commitmq_plugins.rocketmq.remoting.bodies import (
    HeartbeatData,
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    SubscriptionData,
    TopicConfigSerializeWrapper,
    crc32,
)
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode
from commitmq_plugins.rocketmq.remoting.fastjson import RemotingMessageQueue, dumps, loads, queue_map
from commitmq_plugins.rocketmq.remoting.frame import BodyError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
QUEUES = st.builds(RemotingMessageQueue, TEXT, TEXT, st.integers(-1, 1 << 31))
ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911"},"brokerName":"broker-a","cluster":"DefaultCluster",'
    b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
    b'"readQueueNums":8,"topicSysFlag":0,"writeQueueNums":8}]}'
)


def test_a_route_byte_for_byte() -> None:
    route = bodies.TopicRouteData(
        [bodies.QueueData("broker-a", 8, 8, 6)],
        [bodies.BrokerData("DefaultCluster", "broker-a", {0: "10.0.0.1:10911"})],
    )
    assert route.encode() == ROUTE
    assert bodies.TopicRouteData.from_json(loads(ROUTE)) == route


def test_a_route_of_an_older_name_server_has_bare_keys() -> None:
    route = bodies.TopicRouteData.from_json(loads(ROUTE.replace(b'{"0":', b"{0:")))
    assert route.broker_datas[0].broker_addrs == {0: "10.0.0.1:10911"}


def test_cluster_info_byte_for_byte() -> None:
    info = bodies.ClusterInfo(
        {"broker-a": bodies.BrokerData("C", "broker-a", {1: "b:2", 0: "a:1"})}, {"C": ["broker-a"]}
    )
    assert info.encode() == (
        b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{"0":"a:1","1":"b:2"},"brokerName":"broker-a","cluster":"C",'
        b'"enableActingMaster":false}},"clusterAddrTable":{"C":["broker-a"]}}'
    )
    assert bodies.ClusterInfo.from_json(loads(info.encode())) == info


def test_maps_with_queues_as_keys_byte_for_byte() -> None:
    queue = RemotingMessageQueue("T", "broker-a", 0)
    assert bodies.topic_stats_table({queue: bodies.TopicOffset(0, 42, 1763800000000)}) == (
        b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:{"lastUpdateTimestamp":1763800000000,'
        b'"maxOffset":42,"minOffset":0}},"topicPutTps":0.0}'
    )
    progress = bodies.ConsumeStats({queue: bodies.OffsetWrapper(42, 40, 42, 1763799990000)})
    assert progress.encode() == (
        b'{"consumeTps":0.0,"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:{"brokerOffset":42,'
        b'"consumerOffset":40,"lastTimestamp":1763799990000,"pullOffset":42}}}'
    )
    assert bodies.reset_offset_body({}) == b'{"offsetTable":{}}'


@given(st.dictionaries(QUEUES, st.integers(-(1 << 63), (1 << 63) - 1), max_size=4))
def test_queues_as_keys_come_back(offsets: dict[RemotingMessageQueue, int]) -> None:
    assert loads(bodies.reset_offset_body(offsets)) == {"offsetTable": offsets}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_the_lenient_reader_agrees_with_the_strict_one(value: object) -> None:
    for text in (dumps(value).decode(), json.dumps(value), json.dumps(value, indent=1)):
        assert fastjson._Lenient(text).document() == value


def test_bodies_that_would_cost_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    depth = fastjson.MAX_DEPTH + 1
    deepest = b"[" * depth + b"]" * depth
    assert loads(deepest) == fastjson._Lenient(deepest.decode()).document()
    wide = dumps([{"a": [number]} for number in range(100)])
    assert len(loads(wide)) == 100
    for deep in (b"[" + deepest + b"]", b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"):
        with pytest.raises(BodyError, match="nested more than 64 deep"):
            loads(memoryview(deep))
    texts = [{"a": '"[[[', "b": '{{\\\\"[', "c": "\\"}] * 100
    assert loads(dumps(texts)) == texts, "brackets in texts are no depth"
    monkeypatch.setattr(fastjson, "MAX_VALUES", 1_000)
    monkeypatch.setattr(fastjson, "MAX_CONTAINERS", 500)
    with pytest.raises(BodyError, match="1001 times ,"):
        loads(b"[" + b",".join([b"1"] * 1_002) + b"]")
    with pytest.raises(BodyError, match=r"501 times \[ or {"):
        loads(b"[" + b",".join([b"{}"] * 500) + b"]")
    with pytest.raises(BodyError, match="cannot be written"):
        dumps({"a": object()})


def test_what_only_fastjson_writes() -> None:
    assert loads(b"{0:'it\\'s \"x\"',name:[1,2,],-3:null}") == {"0": 'it\'s "x"', "name": [1, 2], "-3": None}
    assert loads(b'{1:"\\u0001\\"\\\\"}') == {"1": '\x01"\\'}
    assert loads(b'{1:"a\nb"}') == {"1": "a\nb"}


WRONG = [
    (b"", "a value is missing"),
    (b"\xff", "no UTF-8"),
    (b"{1:2", "a comma or a closing brace is missing"),
    (b"{1 2}", "a colon is missing"),
    (b"{[1]:2}", "a key is missing"),
    (b'{1:"a', "a text does not end"),
    (b'{1:"a\\', "a text does not end"),
    (b'{1:"\\q"}', "a wrong escape"),
    (b"{1:2}x", "something follows"),
    (b"{1:" * 100_000, "nested more than"),
    (b"[" * 100_000, "nested more than"),
    (b"{1:" + b"9" * 5000 + b"}", "more than 20 digits"),
    (b'{{"topic":1,"brokerName":"b"}:1}', "a queue needs the texts"),
    (b"[1 2]", "a comma or a closing bracket"),
    (b"{1:wrong}", "a value is missing"),
]


@pytest.mark.parametrize(("data", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_body_says_where(data: bytes, sentence: str) -> None:
    with pytest.raises(BodyError, match=sentence) as raised:
        loads(data)
    assert not raised.value.closes


HEARTBEAT = {
    "clientID": "10.0.0.1@4711#812",
    "consumerDataSet": [
        {
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": "g",
            "messageModel": "BROADCASTING",
            "subscriptionDataSet": [
                {
                    "classFilterMode": False,
                    "codeSet": ["2598919"],
                    "expressionType": "TAG",
                    "subString": "TagA",
                    "subVersion": 1700000000000,
                    "tagsSet": ["TagA"],
                    "topic": "t",
                }
            ],
            "unitMode": False,
        }
    ],
    "heartbeatFingerprint": 0,
    "producerDataSet": [{"groupName": "p"}, {"groupName": "CLIENT_INNER_PRODUCER"}],
    "withoutSub": False,
}


def test_a_heartbeat_of_the_go_client_has_codes_as_texts() -> None:
    found = HeartbeatData.decode(dumps(HEARTBEAT))
    assert (found.client_id, found.producer_groups) == ("10.0.0.1@4711#812", ["p", "CLIENT_INNER_PRODUCER"])
    (consumer,) = found.consumers
    assert (consumer.group_name, consumer.message_model) == ("g", "BROADCASTING")
    assert consumer.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert consumer.subscriptions == [SubscriptionData("t", "TagA", ["TagA"], [2598919], 1700000000000)]
    assert (found.heartbeat_fingerprint, found.without_sub) == (0, False)


@pytest.mark.parametrize(
    "members",
    [
        {"clientID": 7},
        {"producerDataSet": {"groupName": "p"}},
        {"producerDataSet": ["p"]},
        {"consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": None}]}]},
        {"consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "t", "codeSet": ["x"]}]}]},
        {"heartbeatFingerprint": 1.5},
        {"clientID": "x" * 256},
        {"producerDataSet": [{"groupName": "x" * 256}]},
        {"consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "t", "subString": "x" * 70_000}]}]},
        {"consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "t", "codeSet": [1] * 1_025}]}]},
    ],
)
def test_a_heartbeat_of_a_wrong_shape_is_refused(members: dict[str, object]) -> None:
    with pytest.raises(BodyError):
        HeartbeatData.decode(dumps({**HEARTBEAT, **members}))


def registration() -> RegisterBrokerBody:
    table = {
        "T": RemotingTopicConfig("T", 8, 4, 6, attributes={"message.type": "FIFO"}),
        "%RETRY%g": RemotingTopicConfig("%RETRY%g", 1, 1, 6),
    }
    return RegisterBrokerBody(TopicConfigSerializeWrapper(table, RemotingDataVersion(1763800000000, 3, 1)), [])


@pytest.mark.parametrize("compressed", [False, True])
def test_a_registration_comes_back(compressed: bool) -> None:
    data = registration().encode(compressed=compressed)
    found = RegisterBrokerBody.decode(data, compressed=compressed, version=493, max_bytes=1 << 20)
    assert found == registration()


def test_a_compressed_registration_of_version_4_has_no_mappings() -> None:
    plain = zlib.decompress(registration().encode(compressed=True))
    data = zlib.compress(plain[:-4])
    found = RegisterBrokerBody.decode(data, compressed=True, version=401, max_bytes=1 << 20)
    assert found.topics.topic_config_table == registration().topics.topic_config_table
    with pytest.raises(BodyError, match="before a count"):
        RegisterBrokerBody.decode(data, compressed=True, version=413, max_bytes=1 << 20)


def test_compressed_registrations_are_bounded() -> None:
    data = registration().encode(compressed=True)
    plain = zlib.decompress(data)

    def decode(data: bytes, max_bytes: int = 1 << 20) -> None:
        RegisterBrokerBody.decode(data, compressed=True, version=493, max_bytes=max_bytes)

    with pytest.raises(BodyError, match="more than 100 bytes after decompression"):
        decode(zlib.compress(bytes(1 << 24)), 100)
    with pytest.raises(BodyError, match="not compressed with zlib"):
        decode(b"xxxxxxxx")
    with pytest.raises(BodyError, match="ends too early"):
        decode(data[:-1])
    for cut in range(len(plain)):
        with pytest.raises(BodyError):
            decode(zlib.compress(plain[:cut]))
    size = int.from_bytes(plain[:4], "big")
    with pytest.raises(BodyError, match="claims 2147483647 entries"):
        decode(zlib.compress(plain[: 4 + size] + b"\x7f\xff\xff\xff" + plain[8 + size :]))
    with pytest.raises(BodyError, match="claims -1 bytes"):
        decode(zlib.compress(b"\xff\xff\xff\xff" + plain[4:]))


def test_the_checksum_has_no_sign() -> None:
    assert any(zlib.crc32(bytes([one])) > 0x7FFF_FFFF for one in range(10))
    assert all(0 <= crc32(bytes([one])) <= 0x7FFF_FFFF for one in range(256))
    assert crc32(b"123456789") == 0x4BF43926


def test_a_topics_short_form_may_have_no_attributes() -> None:
    assert RemotingTopicConfig.from_text("T 8 4 6 SINGLE_TAG") == RemotingTopicConfig("T", 8, 4, 6)
    assert RemotingTopicConfig.from_text('T 8 4 6 SINGLE_TAG {"a":"b c"}').attributes == {"a": "b c"}
    assert RemotingTopicConfig.from_text("T 8 4 6 SINGLE_TAG null").attributes == {}
    for text in ("T 8 4 6", "T x 4 6 SINGLE_TAG", ""):
        with pytest.raises(BodyError):
            RemotingTopicConfig.from_text(text)


def test_locks_of_the_page() -> None:
    body = (
        b'{"clientId":"10.0.0.5@4711#812","consumerGroup":"g",'
        b'"mqSet":[{"brokerName":"broker-a","queueId":0,"topic":"T"}],"onlyThisBroker":false}'
    )
    found = bodies.LockBatchRequestBody.decode(body)
    assert found == bodies.LockBatchRequestBody(
        "g", "10.0.0.5@4711#812", [RemotingMessageQueue("T", "broker-a", 0)], False
    )
    assert bodies.lock_answer(found.queues) == b'{"lockOKMQSet":[{"brokerName":"broker-a","queueId":0,"topic":"T"}]}'


def test_connections_of_the_page() -> None:
    client = bodies.ClientConnection("id", "1.2.3.4:5", LanguageCode.GO, 317, 7)
    assert bodies.ConsumerConnection([client]).encode() == (
        b'{"connectionSet":[{"clientAddr":"1.2.3.4:5","clientId":"id","language":"GO","version":317}],'
        b'"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING",'
        b'"subscriptionTable":{}}'
    )
    assert bodies.producer_table({"p": [client]}) == (
        b'{"data":{"p":[{"clientId":"id","language":"GO","lastUpdateTimestamp":7,"remoteIP":"/1.2.3.4:5","version":317}]}}'
    )
    assert bodies.consumer_list(["a", "b"]) == b'{"consumerIdList":["a","b"]}'


def test_acks_have_short_or_long_names() -> None:
    short = b'{"acks":[{"b":"Aw==","c":"g","it":60000,"pt":17,"q":2,"r":"0","rq":3,"so":40,"t":"T"}],"brokerName":"b"}'
    long_names = (
        b'{"acks":[{"bitSet":"Aw==","consumerGroup":"g","invisibleTime":60000,"popTime":17,"queueId":2,"retry":"0",'
        b'"reviveQueueId":3,"startOffset":40,"topic":"T"}]}'
    )
    expected = [bodies.BatchAck("g", "T", "0", 40, 2, 3, 17, 60000, "Aw==")]
    assert bodies.decode_batch_acks(short) == bodies.decode_batch_acks(long_names) == expected
    assert bodies.decode_batch_acks(b"{}") == []


def test_assignments_of_the_page() -> None:
    assert bodies.assignments([(RemotingMessageQueue("T", "broker-a", -1), "POP")]) == (
        b'{"messageQueueAssignments":[{"messageQueue":{"brokerName":"broker-a","queueId":-1,"topic":"T"},"mode":"POP"}]}'
    )


def test_integer_keys_become_texts() -> None:
    assert dumps({0: "a"}) == b'{"0":"a"}'
    assert dumps({"a": queue_map({})}) == b'{"a":{}}'
