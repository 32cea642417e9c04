"""Frames of every request kind, mutated: what any program may send to the ports of RocketMQ's clients.

``python mutated_frames.py PORT… --count N --seed S`` sends N frames in chunks, each over a connection of its own, and each
further frame that ends its connection over one more. It checks that each request that a decoder can read has exactly one
answer, and that a wrong frame ends its connection. It prints the counts as JSON. The same seed gives the same frames.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from commitmq_plugins.rocketmq.remoting.codes import SERIALIZE_JSON, SERIALIZE_ROCKETMQ, RequestCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameError, FrameParser, encode

TOPIC, GROUP, CLIENT = "mutated", "mutants", "mutant@1"
CHUNK = 50
CONNECTIONS = 32
PATIENCE_S = 30.0
_MAX_FRAME_BYTES = 1 << 20
_NOW = "1763800000000"

_QUEUE = {"topic": TOPIC, "queueId": "0", "consumerGroup": GROUP, "group": GROUP}
_SEND = {"a": "pg", "b": TOPIC, "c": "TBW102", "d": "2", "e": "0", "f": "0", "g": _NOW, "h": "0",
         "i": "UNIQ_KEY\x01K\x02TAGS\x01t\x02", "j": "0", "k": "false"}  # fmt: skip
_SEND_1 = {"producerGroup": "pg", "topic": TOPIC, "defaultTopic": "TBW102", "defaultTopicQueueNums": "2", "queueId": "0",
           "sysFlag": "0", "bornTimestamp": _NOW, "flag": "0", "properties": "KEYS\x01k\x02"}  # fmt: skip
_HANDLE = f"0 {_NOW} 2000 0 0 commitmq 0 0"
_BROKER = {"brokerName": "mutbroker", "brokerAddr": "127.0.0.1:1", "clusterName": "mutcluster", "brokerId": "0",
           "haServerAddr": "127.0.0.1:2", "bodyCrc32": "0", "compressed": "false",
           "heartbeatTimeoutMillis": "10000"}  # fmt: skip
_SUBSCRIPTION = {
    "topic": TOPIC,
    "subString": "*",
    "subVersion": 1,
    "tagsSet": ["a"],
    "codeSet": [97],
    "expressionType": "TAG",
}
_HEARTBEAT = {
    "clientID": CLIENT,
    "producerDataSet": [{"groupName": "pg"}],
    "consumerDataSet": [
        {
            "groupName": GROUP,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [_SUBSCRIPTION],
        }
    ],
}
_QUEUES = {
    "consumerGroup": GROUP,
    "clientId": CLIENT,
    "mqSet": [{"topic": TOPIC, "brokerName": "commitmq", "queueId": 0}],
}
_ACKS = {
    "b": "commitmq",
    "acks": [{"c": GROUP, "t": TOPIC, "r": "0", "so": 0, "q": 0, "rq": 0, "pt": int(_NOW), "it": 2000, "b": "AQ=="}],
}
_REGISTRATION = {
    "topicConfigSerializeWrapper": {
        "dataVersion": {"counter": 1, "stateVersion": 0, "timestamp": int(_NOW)},
        "topicConfigTable": {"muttopic": {"topicName": "muttopic", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}},
    },
    "filterServerList": [],
}
_ELEMENT = struct.pack(">iiiii", 22 + 1 + 4, 0, 0, 0, 1) + b"x" + struct.pack(">H", 4) + b"a\x01b\x02"

KNOWN: dict[int, tuple[dict[str, str], bytes]] = {
    RequestCode.SEND_MESSAGE: (_SEND_1, b"body"),
    RequestCode.SEND_MESSAGE_V2: (_SEND, b"body"),
    RequestCode.SEND_BATCH_MESSAGE: ({**_SEND, "m": "true"}, _ELEMENT * 3),
    RequestCode.PULL_MESSAGE: (
        {**_QUEUE, "queueOffset": "0", "maxMsgNums": "8", "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": "50",
         "subVersion": "0", "subscription": "a || b", "expressionType": "TAG"}, b""),
    RequestCode.LITE_PULL_MESSAGE: (
        {**_QUEUE, "queueOffset": "0", "maxMsgNums": "8", "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0",
         "subVersion": "0", "subscription": "x > 1", "expressionType": "SQL92"}, b""),
    RequestCode.UPDATE_CONSUMER_OFFSET: ({**_QUEUE, "commitOffset": "1"}, b""),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: ({**_QUEUE, "timestamp": _NOW}, b""),
    RequestCode.HEART_BEAT: ({}, dumps(_HEARTBEAT)),
    RequestCode.UNREGISTER_CLIENT: ({"clientID": CLIENT, "producerGroup": "pg", "consumerGroup": GROUP}, b""),
    RequestCode.CHECK_CLIENT_CONFIG: (
        {}, dumps({"clientId": CLIENT, "group": GROUP, "subscriptionData": {**_SUBSCRIPTION, "expressionType": "SQL92"}})),
    RequestCode.CONSUMER_SEND_MSG_BACK: ({"offset": "0", "group": GROUP, "delayLevel": "1", "originTopic": TOPIC}, b""),
    RequestCode.END_TRANSACTION: (
        {"producerGroup": "pg", "tranStateTableOffset": "0", "commitLogOffset": "0", "commitOrRollback": "8",
         "fromTransactionCheck": "false", "msgId": "m", "transactionId": "t"}, b""),
    RequestCode.LOCK_BATCH_MQ: ({}, dumps(_QUEUES)),
    RequestCode.UNLOCK_BATCH_MQ: ({}, dumps(_QUEUES)),
    RequestCode.QUERY_MESSAGE: (
        {"topic": TOPIC, "key": "k", "maxNum": "4", "beginTimestamp": "0", "endTimestamp": "9" * 15}, b""),
    RequestCode.VIEW_MESSAGE_BY_ID: ({"offset": "0"}, b""),
    RequestCode.SEND_REPLY_MESSAGE_V2: ({**_SEND, "i": "REPLY_TO_CLIENT\x01nobody\x02"}, b"reply"),
    RequestCode.RECALL_MESSAGE: ({"topic": TOPIC, "recallHandle": "djE", "producerGroup": "pg"}, b""),
    RequestCode.POP_MESSAGE: (
        {**_QUEUE, "queueId": "-1", "maxMsgNums": "4", "invisibleTime": "2000", "pollTime": "60", "bornTime": "0",
         "initMode": "0", "expType": "TAG", "exp": "*", "order": "false"}, b""),
    RequestCode.PEEK_MESSAGE: ({**_QUEUE, "maxMsgNums": "4"}, b""),
    RequestCode.ACK_MESSAGE: ({**_QUEUE, "extraInfo": _HANDLE, "offset": "0"}, b""),
    RequestCode.BATCH_ACK_MESSAGE: ({}, dumps(_ACKS)),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: ({**_QUEUE, "extraInfo": _HANDLE, "offset": "0", "invisibleTime": "3000"}, b""),
    RequestCode.NOTIFICATION: ({**_QUEUE, "pollTime": "50", "bornTime": "0"}, b""),
    RequestCode.POLLING_INFO: (_QUEUE, b""),
    RequestCode.QUERY_ASSIGNMENT: (
        {}, dumps({"topic": TOPIC, "consumerGroup": GROUP, "clientId": CLIENT, "strategyName": "AVG",
                   "messageModel": "CLUSTERING"})),
    RequestCode.SET_MESSAGE_REQUEST_MODE: (
        {}, dumps({"topic": TOPIC, "consumerGroup": "others", "mode": "PULL", "popShareQueueNum": 0})),
    RequestCode.UPDATE_AND_CREATE_TOPIC: (
        {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6",
         "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}, b""),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: ({}, dumps({"groupName": GROUP, "retryMaxTimes": 3})),
    RequestCode.QUERY_CONSUME_QUEUE: ({**_QUEUE, "index": "0", "count": "4"}, b""),
    RequestCode.REGISTER_BROKER: (_BROKER, dumps(_REGISTRATION)),
    RequestCode.PUT_KV_CONFIG: ({"namespace": "mut", "key": "k", "value": "v"}, b""),
    RequestCode.GET_KV_CONFIG: ({"namespace": "mut", "key": "k"}, b""),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: (
        {"topic": "muttopic"},
        dumps({"queueDatas": [{"brokerName": "mutbroker", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}]})),
    RequestCode.UPDATE_NAMESRV_CONFIG: ({}, b"mutated=1\n"),
    RequestCode.UPDATE_BROKER_CONFIG: ({}, b"mutated=1\n"),
    RequestCode.QUERY_DATA_VERSION: (_BROKER, dumps({"counter": 1, "timestamp": int(_NOW)})),
}  # fmt: skip
"""Fields and body of the kinds that have some of their own."""
OTHERS = {
    **_QUEUE, **_BROKER, "groupName": GROUP, "consumerGroupName": GROUP, "clientId": "absent@1", "offset": "0",
    "timestamp": _NOW, "isForce": "false", "cluster": "mutcluster", "srcGroup": GROUP, "destGroup": GROUP,
    "statsName": "TOPIC_PUT_NUMS", "statsKey": TOPIC, "msgId": "0", "offline": "false", "msgStoreTime": "0",
    "namespace": "mut",
}  # fmt: skip
"""Fields of all other kinds together."""
CODES = sorted({*KNOWN, *(int(code) for code in RequestCode)} - {RequestCode.CLONE_GROUP_OFFSET})
NUMBERS = (
    "",
    "abc",
    "-1",
    "0",
    str(2**31 - 1),
    str(2**31),
    str(-(2**63)),
    str(2**63 - 1),
    str(2**63),
    "9" * 5_000,
    "1e9",
    "\x00",
    "١٢",
)

Mutation = Callable[[random.Random, Command], bytes]


def _encoded(command: Command) -> bytes:
    """Its frame; as JSON where the other form has no room for it."""
    try:
        return encode(command)
    except FrameError:
        command.serialize = SERIALIZE_JSON
        return encode(command)


def _framed(header: bytes, body: bytes, serialize: int = SERIALIZE_JSON) -> bytes:
    return struct.pack(">iI", 4 + len(header) + len(body), serialize << 24 | len(header)) + header + body


def _field(rng: random.Random, command: Command) -> bytes:
    """A field that is missing, extreme, long or no text."""
    if command.ext_fields:
        name = rng.choice(list(command.ext_fields))
        if rng.random() < 0.3:
            del command.ext_fields[name]
        else:
            command.ext_fields[name] = rng.choice(
                (*NUMBERS, "x" * rng.choice((300, 20_000)), "\x01\x02\x00", "🦊" * 50)
            )
    return _encoded(command)


def _type(rng: random.Random, command: Command) -> bytes:
    """Members of the header with other types than texts and integers."""
    plain = Command(command.code, command.opaque, command.flag, ext_fields=command.ext_fields)
    header = json.loads(encode(plain)[8:])
    odd: Any = rng.choice((None, True, [], {}, 1.5, -1, 10**30, "7", [[]], {"a": {"b": 1}}))
    if rng.random() < 0.5 and command.ext_fields:
        header["extFields"][rng.choice(list(command.ext_fields))] = odd
    else:
        header[rng.choice(("code", "opaque", "flag", "version", "language", "extFields", "remark"))] = odd
    return _framed(json.dumps(header).encode(), bytes(command.body))


def _deep(rng: random.Random, command: Command) -> bytes:
    """JSON nested very deep, in the header or in the body."""
    depth = rng.choice((100, 1_000, 20_000))
    deep = b"[" * depth + b"]" * (depth if rng.random() < 0.5 else 0)
    if rng.random() < 0.5:
        return _framed(b'{"code":%d,"opaque":%d,"extFields":{"a":%s}}' % (command.code, command.opaque, deep), b"")
    command.body = b'{"a":' + deep + b"}"
    return _encoded(command)


def _flip(rng: random.Random, command: Command) -> bytes:
    """Other bytes anywhere behind the length."""
    data = bytearray(_encoded(command))
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(4, len(data))] = rng.randrange(256)
    return bytes(data)


def _flip_body(rng: random.Random, command: Command) -> bytes:
    """Other bytes in the body, and a body that is cut or goes on."""
    body = bytearray(command.body or b"{}")
    for _ in range(rng.choice((1, 2, 8))):
        body[rng.randrange(len(body))] = rng.choice((0, 1, 2, 34, 44, 58, 91, 123, 125, 128, 255, rng.randrange(256)))
    command.body = rng.choice((bytes(body), bytes(body[: rng.randrange(len(body) + 1)]), bytes(body) * 2))
    return _encoded(command)


def _length(rng: random.Random, command: Command) -> bytes:
    """A wrong length, header length or form."""
    data = bytearray(_encoded(command))
    kind = rng.randrange(3)
    if kind == 0:
        length = rng.choice((0, 3, 4, -1, len(data) - 5, len(data) - 3, 2**31 - 1, -(2**31), _MAX_FRAME_BYTES + 1))
        data[:4] = struct.pack(">i", length)
    elif kind == 1:
        data[5:8] = rng.choice((0, 1, len(data), 0xFFFFFF)).to_bytes(3, "big")
    else:
        data[4] = rng.randrange(256)
    return bytes(data)


def _counts(rng: random.Random, command: Command) -> bytes:
    """Huge or negative counts in the binary form."""
    command.serialize = SERIALIZE_ROCKETMQ
    data = bytearray(_encoded(command))
    for _ in range(rng.choice((1, 2))):
        at = rng.randrange(8, max(9, len(data) - 4))
        data[at : at + 4] = rng.choice(
            (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00", b"\x00\x00\x00\x00")
        )
    return bytes(data)


def _bomb(rng: random.Random, command: Command) -> bytes:
    """A compressed body that explodes, and one that claims to be compressed."""
    command.code = rng.choice((RequestCode.REGISTER_BROKER, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_MESSAGE))
    command.ext_fields = {
        **KNOWN[command.code][0],
        "compressed": "true",
        "f": "257",
        "sysFlag": "257",
        "bodyCrc32": "0",
    }
    command.body = rng.choice((_BOMB, _BOMB[:-10], b"\x78\x9c\x00", bytes(50)))
    return _encoded(command)


def _garbage(rng: random.Random, command: Command) -> bytes:
    return rng.choice(
        (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(rng.randrange(1, 200)), b"\x00" * 64, b"\x16\x03\x01\x00\xa5")
    )


def _cut(rng: random.Random, command: Command) -> bytes:
    data = _encoded(command)
    return data[: rng.randrange(len(data))]


def _twice(rng: random.Random, command: Command) -> bytes:
    return _encoded(command) * 2


def _flags(rng: random.Random, command: Command) -> bytes:
    """An answer that nobody asked for, a one-way request, other flags."""
    command.flag = rng.choice((1, 2, 3, -1, 1 << 20))
    return _encoded(command)


def _text(rng: random.Random, command: Command) -> bytes:
    """NULs and bytes that are no UTF-8 inside the header."""
    data = bytearray(_encoded(command))
    header_end = 8 + int.from_bytes(data[5:8], "big")
    for _ in range(rng.choice((1, 3))):
        data[rng.randrange(8, header_end)] = rng.choice((0, 0xFF, 0xC0, 0xED, 0x80, 9))
    return bytes(data)


def _plain(rng: random.Random, command: Command) -> bytes:
    return _encoded(command)


_BOMB = zlib.compress(bytes(40 << 20), 9)
_MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (_plain, 20), (_field, 25), (_type, 10), (_flip, 8), (_flip_body, 14), (_text, 4), (_counts, 4), (_flags, 5),
    (_twice, 4), (_deep, 3), (_length, 2), (_cut, 1), (_garbage, 1),
)  # fmt: skip


def frames(seed: int, count: int, *, with_bombs: bool = True) -> list[bytes]:
    """``count`` frames, each of one seeded mutation."""
    rng = random.Random(seed)
    kinds = [one for one, _ in _MUTATIONS]
    weights = [weight for _, weight in _MUTATIONS]
    found = []
    for number in range(count):
        code = rng.choice(CODES)
        fields, body = KNOWN.get(code, (OTHERS, b""))
        command = Command(code, opaque=number + 1, ext_fields=dict(fields), body=body)
        command.serialize = rng.choice((SERIALIZE_JSON, SERIALIZE_JSON, SERIALIZE_ROCKETMQ))
        if with_bombs and rng.random() < 0.001:
            found.append(_bomb(rng, command))
        else:
            found.append(rng.choices(kinds, weights)[0](rng, command))
    return found


class WrongAnswerError(AssertionError):
    """A request without its answer, or a connection that should have ended."""


def _ends_its_connection(frame: bytes) -> bool:
    """Whether nothing can follow the frame: it is wrong, or what comes next would count as its rest."""
    decoder = FrameParser(_MAX_FRAME_BYTES)
    decoder.feed(frame)
    return decoder.error is not None or decoder.pending_bytes > 0


def connections(chunk: list[bytes]) -> list[tuple[list[bytes], bytes]]:
    """``chunk`` in connections: frames that are answered, then one that ends the connection, or nothing.

    A wrong frame ends its connection at once, answers that are under way included. So it comes when all are there.
    """
    whole = [frame for frame in chunk if not _ends_its_connection(frame)]
    last = [frame for frame in chunk if _ends_its_connection(frame)] or [b""]
    return [(whole, last[0]), *(([], frame) for frame in last[1:])]


async def _talk(port: int, whole: list[bytes], last: bytes, counts: Counter[str]) -> None:
    """Send ``whole`` over one connection, take the answers, then send ``last``. Raises WrongAnswerError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    parser, is_ended = FrameParser(), False
    try:
        for data in (b"".join(whole), last):
            if not data:
                continue
            decoder = FrameParser(_MAX_FRAME_BYTES)
            wanted = Counter(one.opaque for one in decoder.feed(data) if not one.is_response and not one.is_oneway)
            writer.write(data)
            is_ended = await _answers(reader, parser, wanted, decoder.error, counts)
            # Of a frame with a wrong rest the part before it may have an answer, or not any more.
            if is_ended and decoder.error is None:
                raise WrongAnswerError(f"the connection ended before the answers to {dict(wanted)}")
        counts["ended" if is_ended else "kept"] += 1
    finally:
        writer.transport.abort()


async def _answers(
    reader: asyncio.StreamReader,
    parser: FrameParser,
    wanted: Counter[int],
    error: FrameError | None,
    counts: Counter[str],
) -> bool:
    """Take the answers to ``wanted``, and the end of the connection where ``error`` asks for it; True when it ended."""
    deadline = time.monotonic() + PATIENCE_S
    while error is not None or wanted:
        try:
            async with asyncio.timeout(max(0.01, deadline - time.monotonic())):
                received = await reader.read(1 << 18)
        except TimeoutError:
            raise WrongAnswerError(f"no answer to {dict(wanted)}, or no end after {error}") from None
        except ConnectionError:
            received = b""
        if not received:
            return True
        for answer in parser.feed(received):
            if not answer.is_response:
                continue
            counts[str(answer.code)] += 1
            counts["answered"] += 1
            wanted[answer.opaque] -= 1
            if wanted[answer.opaque] < 0:
                raise WrongAnswerError(f"two answers to {answer.opaque}, or one that nobody asked for")
            if not wanted[answer.opaque]:
                del wanted[answer.opaque]
    return False


async def attack(ports: list[int], count: int, seed: int) -> Counter[str]:
    """Send ``count`` frames to the ports in turn."""
    counts: Counter[str] = Counter()
    chunks = iter(range(0, count, CHUNK))

    async def one(worker: int) -> None:
        for start in chunks:
            size = min(CHUNK, count - start)
            for whole, last in connections(frames(seed + start, size)):
                await _talk(ports[start // CHUNK % len(ports)], whole, last, counts)

    async with asyncio.TaskGroup() as group:
        for worker in range(CONNECTIONS):
            group.create_task(one(worker))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", nargs="+", type=int)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args()
    began = time.monotonic()
    counts = asyncio.run(attack(asked.ports, asked.count, asked.seed))
    sys.stdout.write(json.dumps({**counts, "seconds": round(time.monotonic() - began, 1)}) + "\n")


if __name__ == "__main__":
    main()
