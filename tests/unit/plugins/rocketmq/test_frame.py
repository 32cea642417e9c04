"""Goal: frames are RocketMQ's, byte for byte, and no bytes from outside do more than end their connection.

Method: round trips of any command in both forms and in any pieces (hypothesis); frames composed by hand from the page;
a table of wrong frames with the sentence for each; mutated frames.
"""

from __future__ import annotations

import json
import random
import struct

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq_plugins.rocketmq.remoting import frame
from commitmq_plugins.rocketmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    SERIALIZE_JSON,
    SERIALIZE_ROCKETMQ,
    VERSION,
    LanguageCode,
    RequestCode,
    ResponseCode,
)
from commitmq_plugins.rocketmq.remoting.frame import (
    AnswerForm,
    Command,
    FrameError,
    FrameParser,
    encode,
    encode_head,
    request,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT = st.integers(-(1 << 31), (1 << 31) - 1)
SHORT = st.integers(-(1 << 15), (1 << 15) - 1)


def commands() -> st.SearchStrategy[Command]:
    return st.builds(
        Command,
        code=SHORT,
        opaque=INT,
        flag=INT,
        language=st.sampled_from(LanguageCode),
        version=SHORT,
        remark=st.none() | TEXT.filter(bool),
        ext_fields=st.dictionaries(TEXT.filter(bool), TEXT.filter(bool), max_size=5),
        body=st.binary(max_size=100),
        serialize=st.sampled_from([SERIALIZE_JSON, SERIALIZE_ROCKETMQ]),
    )


def parts(command: Command) -> tuple[object, ...]:
    return (
        command.code,
        command.opaque,
        command.flag,
        command.language,
        command.version,
        command.remark,
        command.ext_fields,
        bytes(command.body),
        command.serialize,
    )


@given(st.lists(commands(), max_size=4), st.lists(st.integers(1, 60), max_size=20))
def test_any_command_comes_back_from_any_pieces(sent: list[Command], cuts: list[int]) -> None:
    stream = b"".join(map(encode, sent))
    parser = FrameParser()
    received: list[Command] = []
    at = 0
    for size in [*cuts, len(stream)]:
        received += parser.feed(stream[at : at + size])
        at += size
    assert parser.error is None
    assert parser.pending_bytes == 0
    assert [parts(command) for command in received] == [parts(command) for command in sent]
    assert [command.frame_bytes for command in received] == [len(encode(command)) for command in sent]


def wire(header: object, body: bytes = b"") -> bytes:
    """A frame with a JSON header; bytes are taken as they are."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">ii", 4 + len(data) + len(body), len(data)) + data + body


def one(data: bytes) -> Command:
    parser = FrameParser()
    found = parser.feed(data)
    assert parser.error is None, parser.error
    assert len(found) == 1
    return found[0]


def test_the_pages_example_of_a_send() -> None:
    text = (
        '{"code":310,"extFields":{"a":"pg","b":"T","i":"UNIQ_KEY\\u00010A\\u0002TAGS\\u0001TagA\\u0002"},"flag":0,'
        '"language":"JAVA","opaque":7,"serializeTypeCurrentRPC":"JSON","version":493}'
    )
    command = one(wire(text.encode(), b"body"))
    assert parts(command) == (
        RequestCode.SEND_MESSAGE_V2,
        7,
        0,
        LanguageCode.JAVA,
        493,
        None,
        {"a": "pg", "b": "T", "i": "UNIQ_KEY\x010A\x02TAGS\x01TagA\x02"},
        b"body",
        SERIALIZE_JSON,
    )
    assert encode(command) == wire(text.encode(), b"body")


def test_an_answer_byte_for_byte() -> None:
    asked = Command(34, opaque=9, language=LanguageCode.GO, version=317, serialize=SERIALIZE_ROCKETMQ)
    header = (
        b'{"code":0,"extFields":{"IS_SUB_CHANGE":"true"},"flag":1,"language":"JAVA","opaque":9,'
        b'"serializeTypeCurrentRPC":"JSON","version":493}'
    )
    answer = asked.answer(ext_fields={"IS_SUB_CHANGE": "true"})
    assert encode(answer) == wire(header)
    assert encode_head(answer, 1000) == struct.pack(">ii", 4 + len(header) + 1000, len(header)) + header


def test_an_answer_from_a_form_is_the_encoded_one() -> None:
    form = AnswerForm({"TRACE_ON": "100%"}, ("msgId", "queueId", "transactionId"))
    for unique in ("KEY", 'a "quoted" \\ one', "ü\x01", "%s"):
        answer = Command(1, opaque=3).answer(
            ext_fields={"TRACE_ON": "100%", "msgId": "0A", "queueId": "2", "transactionId": unique}
        )
        assert form.frame(3, (b'"0A"', b'"2"', orjson.dumps(unique))) == encode(answer)
    with pytest.raises(ValueError, match="must be there once"):
        AnswerForm({"x": "@msgId@"}, ("msgId",))


def test_a_binary_header_byte_for_byte() -> None:
    header = bytes.fromhex("0069 09 013d 00000007 00000002 00000003") + b"why"
    fields = bytes.fromhex("0005") + b"topic" + bytes.fromhex("00000001") + b"T"
    header += struct.pack(">i", len(fields)) + fields
    data = struct.pack(">iI", 4 + len(header) + 2, 1 << 24 | len(header)) + header + b"hi"
    command = one(data)
    assert parts(command) == (
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        7,
        FLAG_ONEWAY,
        LanguageCode.GO,
        317,
        "why",
        {"topic": "T"},
        b"hi",
        SERIALIZE_ROCKETMQ,
    )
    assert encode(command) == data


def test_what_real_decoders_accept_is_accepted() -> None:
    command = one(
        wire(b'{"code":"105","extFields":{"topic":"T","n":4,"x":true,"gone":null,"y":1.5},"language":"COBOL"}')
    )
    assert command.code == 105
    assert command.ext_fields == {"topic": "T", "n": "4", "x": "true", "y": "1.5"}
    assert command.language == LanguageCode.OTHER
    assert (command.opaque, command.flag, command.version) == (0, 0, 0)
    assert one(wire({"code": 1, "language": 9})).language == LanguageCode.GO
    assert one(wire(b'{"code":1,"remark":"a\nb\x01"}')).remark == "a\nb\x01"
    assert one(wire(b'{"code":1,"remark":"\\ud800x"}')).remark == "?x"


def test_half_a_surrogate_pair_does_not_stop_an_answer() -> None:
    command = Command(1, remark="\ud800x", ext_fields={"a": "\udc00"})
    for serialize in (SERIALIZE_JSON, SERIALIZE_ROCKETMQ):
        command.serialize = serialize
        back = one(encode(command))
        assert (back.remark, back.ext_fields) == ("?x", {"a": "?"})


def framed(word: int, rest: bytes, length: int | None = None) -> bytes:
    return struct.pack(">iI", 4 + len(rest) if length is None else length, word) + rest


BINARY = struct.pack(">hbhii", 1, 0, 493, 1, 0)
WRONG = [
    (b"GET / HTTP/1.1\r\n\r\n", "a frame claims 1195725856 bytes"),
    (b"\xff\xff\xff\xff", "a frame claims -1 bytes"),
    (b"\0\0\0\3", "a frame claims 3 bytes"),
    (framed(2 << 24, b""), "serialization 2"),
    (framed(100, b"{}"), "a header claims 100 bytes of a frame of 6"),
    (framed(2 << 20, b"", 5 << 20), "at most 1048576 are allowed"),
    (framed(0, b""), "the header is no JSON"),
    (wire(b"[]"), "no JSON object but list"),
    (wire(b"{"), "the header is no JSON"),
    (wire(b'"\xff"'), "the header is no UTF-8"),
    (wire(b"[" * 100_000), "the header is"),
    (wire(b'{"a":' * 100_000), "the header is"),
    (wire(b'{"extFields":{"a":' + b"[" * 900 + b"]" * 900 + b"}}"), "a header field is no text"),
    (wire({"code": "x"}), "the header's code is no integer: 'x'"),
    (wire({"code": True}), "the header's code is no integer"),
    (wire({"code": 1 << 31}), "does not fit 32 bits"),
    (wire({"opaque": 1e99}), "the header's opaque is no integer"),
    (wire({"extFields": []}), "extFields are no JSON object"),
    (framed(1 << 24 | 5, b"12345"), "a ROCKETMQ header has 21 bytes at least"),
    (framed(1 << 24 | 21, BINARY + struct.pack(">ii", -1, 0)), "a text at byte 17 claims -1 bytes"),
    (framed(1 << 24 | 21, BINARY + struct.pack(">ii", 5, 0)), "a text at byte 17 claims 5 bytes, 4 are left"),
    (framed(1 << 24 | 21, BINARY + struct.pack(">ii", 0, 9)), "the fields claim 9 bytes, 0 are left"),
    (framed(1 << 24 | 22, BINARY + struct.pack(">iib", 0, 1, 0)), "ends within the length of a text"),
    (framed(1 << 24 | 25, BINARY + struct.pack(">iihh", 0, 4, -2, 0)), "claims -2 bytes"),
]


@pytest.mark.parametrize(("data", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_frame_ends_the_connection_and_says_why(data: bytes, sentence: str) -> None:
    parser = FrameParser()
    good = encode(Command(34, opaque=5))
    assert [command.opaque for command in parser.feed(good + data)] == [5]
    assert parser.error is not None
    assert sentence in str(parser.error)
    assert parser.error.closes
    assert parser.feed(good) == []


def test_a_wrong_header_is_refused_before_its_frame_is_there() -> None:
    parser = FrameParser()
    parser.feed(struct.pack(">i", 1 << 20))
    assert parser.error is None
    parser.feed(struct.pack(">I", 7 << 24))
    assert parser.error is not None


def test_a_frame_may_have_the_limit_and_not_a_byte_more() -> None:
    command = Command(10, body=b"x" * 1000)
    size = len(encode(command)) - 4
    assert len(FrameParser(size).feed(encode(command))) == 1
    parser = FrameParser(size - 1)
    assert parser.feed(encode(command)) == []
    assert parser.error is not None


def test_a_body_stays_what_it_was_when_more_is_received() -> None:
    parser = FrameParser()
    first, second = encode(Command(1, body=b"first")), encode(Command(1, body=b"second"))
    assert parser.feed(first[:20]) == []
    (command,) = parser.feed(first[20:] + second[:20])
    parser.feed(second[20:])
    assert bytes(command.body) == b"first"


def test_requests_of_pop_need_json() -> None:
    command = request(RequestCode.POP_MESSAGE)
    assert one(encode(command)).code == 200050
    command.serialize = SERIALIZE_ROCKETMQ
    with pytest.raises(FrameError, match="does not fit a ROCKETMQ header"):
        frame.encode(command)


def test_flags_say_who_waits() -> None:
    assert request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, oneway=True).is_oneway
    assert not request(RequestCode.GET_CONSUMER_RUNNING_INFO).is_oneway
    answer = Command(999, opaque=3).not_supported()
    assert answer.is_response
    assert answer.flag == FLAG_RESPONSE
    assert (answer.code, answer.remark) == (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 999 not supported")
    assert answer.version == VERSION


def test_mutated_frames_only_ever_end_their_connection() -> None:
    chance = random.Random(17)
    originals = [
        encode(
            Command(310, 7, ext_fields={"a": "pg", "e": "1", "i": "K\x01V\x02"}, body=b"x" * 50, serialize=serialize)
        )
        for serialize in (SERIALIZE_JSON, SERIALIZE_ROCKETMQ)
    ]
    ended = 0
    for _ in range(20_000):
        data = bytearray(chance.choice(originals))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        parser = FrameParser()
        parser.feed(bytes(data))
        ended += parser.error is not None
        assert parser.pending_bytes <= len(data)
    assert 5_000 < ended < 20_000


def test_a_small_body_does_not_keep_what_was_read_with_it() -> None:
    """A request that waits would keep all of a read in memory."""
    small, great = Command(1, body=b"x" * 100), Command(2, body=b"y" * 100_000)
    found = FrameParser().feed(encode(small) * 10 + encode(great))
    assert [type(one.body) for one in found] == [bytes] * 10 + [memoryview]
    assert [bytes(one.body) for one in found] == [small.body] * 10 + [great.body]


def test_commands_come_one_by_one_and_those_not_asked_for_are_counted() -> None:
    one = encode(Command(1, body=b"abc"))
    parser = FrameParser()
    parser.add(one * 3 + one[:7])
    for left in (2, 1, 0):
        assert parser.next() is not None
        assert parser.pending_bytes == left * len(one) + 7
    assert parser.next() is None
    assert parser.pending_bytes == 7
    assert [bytes(found.body) for found in parser.feed(one[7:])] == [b"abc"]
