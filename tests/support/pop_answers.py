"""A conversation about POP with a broker, ours or RocketMQ's: what its answers say of what is left, and of what came back.

Both are started with retry topics of the second form (enableRetryTopicV2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commitmq.semantics.pop import parse_info
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import load_object
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from rocketmq_peer import Peer, connected, has_code, records, send

TOPIC = {"defaultTopic": "TBW102", "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}
NOTHING = (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND)
EXPECTED = {
    "rests": ["4", "2", "1", "0"],
    "of_one": ["2", "1", "0"],
    "empty": "0",
    "ordered": ["1", "0"],
    "back": {"topic": "Again", "times": 1, "flag": "2", "keys": {"2@0"}, "ack": 0},
    "retries": ["%RETRY%Backs+Again"],
}
"""What both say."""


def pop(group: str, topic: str, queue: int, most: int, **fields: str) -> Command:
    """A pop that does not wait, unless ``pollTime`` says so. It may be repeated: without a time it is born when it comes."""
    usual = {"invisibleTime": "60000", "pollTime": "0", "initMode": "0", "order": "false"}
    asked = {"consumerGroup": group, "topic": topic, "queueId": str(queue), "maxMsgNums": str(most),
             "bornTime": "0"}  # fmt: skip
    return request(RequestCode.POP_MESSAGE, {**usual, **asked, **fields})


async def pop_answers(port: int) -> dict[str, Any]:
    """See the module."""
    async with connected(port) as peer:
        await _fill(peer, "Left", (3, 2))
        found: dict[str, Any] = {"rests": [], "of_one": []}
        for most in (1, 2, 1, 32):
            answer = await peer.until(pop("Counters", "Left", -1, most), has_code(0))
            found["rests"].append(answer.ext_fields["restNum"])
        for queue, most in ((0, 1), (1, 1), (0, 32)):
            answer = await peer.until(pop("Singles", "Left", queue, most), has_code(0))
            found["of_one"].append(answer.ext_fields["restNum"])
        empty = await peer.until(pop("Counters", "Left", -1, 32), has_code(*NOTHING))
        found["empty"] = empty.ext_fields["restNum"]
        found["ordered"] = []
        for codes in ((0,), NOTHING):
            answer = await peer.until(pop("Walkers", "Left", 0, 2, order="true"), has_code(*codes))
            found["ordered"].append(answer.ext_fields["restNum"])
        found["back"] = await _come_back(peer)
        topics = load_object((await peer.until(request(RequestCode.GET_ALL_TOPIC_CONFIG))).body)["topicConfigTable"]
        found["retries"] = sorted(name for name in topics if name.startswith("%RETRY%Backs") and name.endswith("Again"))
        return found


async def _fill(peer: Peer, topic: str, counts: tuple[int, ...]) -> None:
    """A new topic whose queues have so many messages."""
    queues = str(len(counts))
    fields = {**TOPIC, "topic": topic, "readQueueNums": queues, "writeQueueNums": queues}
    await peer.until(request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))
    for queue, count in enumerate(counts):
        for number in range(count):
            await peer.until(send(topic, b"%d-%d" % (queue, number), queue=queue))
        bound = request(RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": str(queue)})
        await peer.until(bound, ends_at(count))


def ends_at(offset: int) -> Callable[[Command], bool]:
    """Whether an answer to GET_MAX_OFFSET says ``offset``."""
    return lambda answer: answer.ext_fields.get("offset") == str(offset)


async def _come_back(peer: Peer) -> dict[str, Any]:
    """A message that nobody acknowledges in time, and how it is acknowledged then."""
    await _fill(peer, "Again", (1,))
    await peer.until(pop("Backs", "Again", 0, 1, invisibleTime="2000"), has_code(0))
    again = pop("Backs", "Again", -1, 1, invisibleTime="60000", pollTime="2000")
    answer = await peer.until(again, has_code(0))
    (record,) = records(answer.body)
    handle = record.properties["POP_CK"]
    ack = {"consumerGroup": "Backs", "topic": "%RETRY%Backs+Again", "queueId": str(record.queue_id),
           "extraInfo": handle, "offset": str(record.queue_offset)}  # fmt: skip
    acked = await peer.ask(request(RequestCode.ACK_MESSAGE, ack))
    return {
        "topic": record.topic,
        "times": record.reconsume_times,
        "flag": handle.split(" ")[4],
        "keys": set(parse_info(answer.ext_fields["startOffsetInfo"])),
        "ack": acked.code,
    }
