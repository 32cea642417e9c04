"""A trial of one broker: a topic and a group of the doctor's own, messages to and fro, and everything deleted again.

Whatever ends the trial - a refusal, a time limit, Ctrl-C, SIGTERM - the deletion runs to its end, and each of its waits has
one. Only a doctor that is killed leaves its topic behind. The topic's name has the time, so that a later doctor finds it.

Deletes a topic and a group of the doctor, and looks whether they are gone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from commitmq.errors import CommitMQError
from commitmq.format.record import Record, decode_record
from commitmq.semantics.pop import ReceiptHandle
from commitmq_plugins.rocketmq.doctor.broker import CLOCK_S, Broker
from commitmq_plugins.rocketmq.doctor.peer import Finding, NameServers, Peer, PeerRefusedError, Report, State
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import RemotingError
from commitmq_plugins.rocketmq.remoting.headers import (
    AckMessageRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    PopMessageRequestHeader,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SendMessageRequestHeaderV2,
    TopicRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

_ROUNDS: Final = 3
_REMOVAL_PAUSE_S: Final = 0.3
_Result = TypeVar("_Result")


async def finished(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``work``, which is not interrupted: a cancellation meanwhile is raised after its end."""
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            interrupted = error
        except Exception:
            break
    if interrupted is not None:
        task.exception()
        raise interrupted
    return task.result()


class Removal:
    """A registration that was under way may bring a topic back, so a topic that is still there is deleted again."""

    def __init__(self, names: NameServers, broker: Peer, name: str) -> None:
        self._names, self._broker, self._name = names, broker, name

    async def run(self) -> list[str]:
        """What is left, and why; empty when everything is gone. Raises nothing."""
        left: list[str] = []
        for round_number in range(_ROUNDS):
            if round_number:
                await asyncio.sleep(_REMOVAL_PAUSE_S)
            left = await self._delete()
            if not left:
                break
        return left

    async def _delete(self) -> list[str]:
        left = []
        # A group may have topics of its own as soon as it is used.
        topics = [self._name, f"%RETRY%{self._name}", f"%DLQ%{self._name}"]
        group = DeleteSubscriptionGroupRequestHeader(self._name, clean_offset=True).encode()
        try:
            for topic in topics:
                await self._broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequestHeader(topic).encode())
            await self._broker.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, group)
            for topic in topics:
                answer = await self._broker.answer(RequestCode.GET_TOPIC_CONFIG, TopicRequestHeader(topic).encode())
                if answer.code == ResponseCode.SUCCESS:
                    left.append(f"{self._broker.address} still has topic {topic}")
        except RemotingError as error:
            left.append(f"{self._broker.address}: {error}")
        for peer in self._names.peers:
            left += await self._forgotten(peer, topics)
        return left

    async def _forgotten(self, peer: Peer, topics: list[str]) -> list[str]:
        """Let a name server forget the topics. Returns what it keeps."""
        left = []
        try:
            for topic in topics:
                header = DeleteTopicFromNamesrvRequestHeader(topic)
                await peer.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, header.encode())
                if await self._names.route(peer, topic) is not None:
                    left.append(f"{peer.address} still has topic {topic}")
        except RemotingError as error:
            left.append(f"{peer.address}: {error}")
        return left


PREFIX: Final = "COMMITMQ_DOCTOR_"
_INVISIBLE_MS: Final = 10_000
_SUSPEND_AND_SUBSCRIPTION: Final = 2 | 4
_FIRST: Final = 1
"""POP's init mode of this request: from the end. The group's committed offset is there, so the mode does not count."""
_PAUSE_S: Final = 0.05
_SQL: Final = "pull with a SQL filter"
_POP: Final = "POP and acknowledge"
_SWITCHES: Final = {_SQL: "enablePropertyFilter", _POP: "timerWheelEnable"}
"""The settings without which a broker refuses a step."""
_GROUP: Final = {
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeBroadcastEnable": True,
    "retryQueueNums": 1,
    "retryMaxTimes": 16,
    "brokerId": 0,
    "whichBrokerWhenConsumeSlowly": 1,
    "notifyConsumerIdsChangedEnable": True,
}


class TrialError(RemotingError):
    """A server's answer is not what the trial needs."""


def new_name() -> str:
    """A name that no other doctor has: the time in seconds, and a random number."""
    return f"{PREFIX}{int(time.time())}_{os.urandom(4).hex()}"


def age_s(name: str) -> float | None:
    """How old a topic of a doctor is; None for a name that is none of a doctor's."""
    seconds = name.removeprefix(PREFIX).partition("_")[0]
    return (
        time.time() - int(seconds)
        if name.startswith(PREFIX) and 0 < len(seconds) < 13 and seconds.isdecimal()
        else None
    )


class Trial:
    """See the module."""

    def __init__(self, names: NameServers, broker: Broker, report: Report) -> None:
        assert broker.peer is not None
        self._names, self._broker, self._report = names, broker, report
        self._peer: Peer = broker.peer
        self._wait_s = broker.peer.terms.timeout_s
        self.name = new_name()
        self._number = 0
        self._is_made = False
        self._sent_s = (0.0, 0.0)
        self._steps: list[tuple[str, Callable[[], Awaitable[str]], bool]] = [
            ("create a topic", self._create, True),
            ("create a group", self._create_group, False),
            ("route of a new topic", self._route, False),
            ("send", self._send_one, True),
            ("pull", self._pull, True),
            ("commit an offset", self._commit, False),
            (_SQL, self._filter, False),
            (_POP, self._pop, False),
        ]

    async def run(self) -> None:
        """All steps. What a needed step refuses leaves out the later ones."""
        removal = Removal(self._names, self._peer, self.name)
        try:
            for at, (check, step, is_needed) in enumerate(self._steps):
                setting = _SWITCHES.get(check, "")
                if self._broker.settings.get(setting, "true").lower() != "true":
                    self._say(State.UNKNOWN, check, f"not tried, because {setting} is off")
                    continue
                if not await self._try(check, step) and is_needed:
                    for left, _, _ in self._steps[at + 1 :]:
                        self._say(State.UNKNOWN, left, f"not tried, because this failed: {check}")
                    break
        finally:
            if self._is_made:
                await finished(self._remove(removal))

    async def _remove(self, removal: Removal) -> None:
        left = await removal.run()
        if left:
            advice = f"`mqadmin deleteTopic` and `mqadmin deleteSubGroup` remove {self.name}"
            self._say(State.FAILED, "delete what the trial made", "; ".join(left), advice)
        else:
            self._say(State.OK, "delete what the trial made", "topic, group and offsets are gone")

    def _say(self, state: State, check: str, detail: str, advice: str = "") -> None:
        self._report(Finding(state, check, self._broker.where, detail, advice))

    async def _try(self, check: str, step: Callable[[], Awaitable[str]]) -> bool:
        try:
            detail = await step()
        except PeerRefusedError as refusal:
            advice = "this account may not" if refusal.code == ResponseCode.NO_PERMISSION else ""
            self._say(State.FAILED, check, str(refusal), advice)
            return False
        except (CommitMQError, ValueError) as error:
            self._say(State.FAILED, check, str(error))
            return False
        self._say(State.OK, check, detail)
        return True

    # ------------------------------------------------------------ steps

    async def _create(self) -> str:
        header = CreateTopicRequestHeader(self.name, "TBW102", 1, 1, 6)
        self._is_made = True  # also if the answer never comes
        try:
            await self._peer.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, header.encode())
        except PeerRefusedError:
            self._is_made = False
            raise
        return self.name

    async def _create_group(self) -> str:
        await self._peer.ask(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=dumps({"groupName": self.name, **_GROUP})
        )
        return self.name

    async def _route(self) -> str:
        """Each name server hears of the topic, with the address that it has for this broker."""
        for peer in self._names.peers:
            until = time.monotonic() + self._wait_s
            while True:
                route = await self._names.route(peer, self.name)
                brokers = (
                    [] if route is None else [one for one in route.broker_datas if one.broker_name == self._broker.name]
                )
                if brokers:
                    break
                if time.monotonic() > until:
                    raise TrialError(f"{peer.address} does not know the topic after {self._wait_s:g} s")
                await asyncio.sleep(_PAUSE_S)
            if brokers[0].broker_addrs.get(0) != self._broker.address:
                raise TrialError(f"{peer.address} leads to {brokers[0].broker_addrs.get(0)}")
        return "every name server has it"

    async def _send_one(self) -> str:
        offset = await self._send()
        began_s, ended_s = self._sent_s
        return f"stored at offset {offset} in {(ended_s - began_s) * 1000:.0f} ms"

    def _body(self, number: int) -> bytes:
        return f"message {number} of {self.name}".encode()

    async def _send(self) -> int:
        number, self._number = self._number, self._number + 1
        properties = (
            f"UNIQ_KEY\x01{os.urandom(16).hex().upper()}\x02TAGS\x01doctor\x02WAIT\x01true\x02number\x01{number}\x02"
        )
        header = SendMessageRequestHeaderV2(
            self.name, self.name, "TBW102", 1, 0, 0, int(time.time() * 1000), 0, properties, 0
        )
        began_s = time.time()
        answer = await self._peer.ask(RequestCode.SEND_MESSAGE_V2, header.encode(), self._body(number))
        self._sent_s = began_s, time.time()
        return int(answer.ext_fields["queueOffset"]) if "queueOffset" in answer.ext_fields else _missing("queueOffset")

    async def _pull(self) -> str:
        began_s = time.time()
        record = await self._pulled(0, "*", "TAG")
        if bytes(record.body) != self._body(0):
            raise TrialError("the message that was pulled has another body than the one that was sent")
        stored_s, (sent_s, answered_s) = record.store_timestamp / 1000, self._sent_s
        if self._is_off(stored_s):
            self._broker.say_clock(stored_s - answered_s, sent_s - stored_s)
        return f"the message came back in {(time.time() - began_s) * 1000:.0f} ms"

    def _is_off(self, stored_s: float) -> bool:
        """Whether the broker stored the message at a time at which, by our clock, it did not."""
        sent_s, answered_s = self._sent_s
        return not sent_s - CLOCK_S <= stored_s <= answered_s + CLOCK_S

    async def _pulled(self, offset: int, expression: str, kind: str) -> Record:
        """The first message from ``offset`` on that the expression wants; the broker may need a moment to have it."""
        until = time.monotonic() + self._wait_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            header = PullMessageRequestHeader(
                self.name,
                self.name,
                0,
                offset,
                1,
                _SUSPEND_AND_SUBSCRIPTION,
                0,
                int(left_s * 1000),
                0,
                expression,
                kind,
            )
            answer = await self._peer.answer(RequestCode.PULL_MESSAGE, header.encode(), wait_s=left_s)
            if answer.code == ResponseCode.SUCCESS:
                return decode_record(bytes(answer.body))
            if answer.code not in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY):
                raise PeerRefusedError(answer.code, answer.remark)
            if time.monotonic() >= until:
                raise TrialError(f"no message within {self._wait_s:g} s")
            await asyncio.sleep(_PAUSE_S)

    async def _commit(self) -> str:
        commit = UpdateConsumerOffsetRequestHeader(self.name, self.name, 0, self._number)
        await self._peer.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit.encode())
        found = await self._committed()
        if found != self._number:
            raise TrialError(f"offset {self._number} was committed, and the broker answers {found}")
        return f"the broker answers {found}, as committed"

    async def _committed(self) -> int:
        query = QueryConsumerOffsetRequestHeader(self.name, self.name, 0)
        answer = await self._peer.ask(RequestCode.QUERY_CONSUMER_OFFSET, query.encode())
        return int(answer.ext_fields.get("offset", ""))

    async def _filter(self) -> str:
        await self._pulled(0, "number BETWEEN 0 AND 1", "SQL92")
        return "the message was found by its property"

    async def _pop(self) -> str:
        offset = await self._send()
        until = time.monotonic() + self._wait_s
        while True:
            left_s = max(0.1, until - time.monotonic())
            header = PopMessageRequestHeader(
                self.name,
                self.name,
                -1,
                1,
                _INVISIBLE_MS,
                int(left_s * 1000),
                int(time.time() * 1000),
                _FIRST,
                "TAG",
                "*",
            )
            answer = await self._peer.answer(RequestCode.POP_MESSAGE, header.encode(), wait_s=left_s)
            if answer.code == ResponseCode.SUCCESS:
                break
            if answer.code not in (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
                raise PeerRefusedError(answer.code, answer.remark)
            if time.monotonic() >= until:
                raise TrialError(f"no message within {self._wait_s:g} s")
        record = decode_record(bytes(answer.body))
        if bytes(record.body) != self._body(self._number - 1) or record.queue_offset != offset:
            raise TrialError("another message than the one that was sent came")
        fields = answer.ext_fields
        handle = ReceiptHandle(
            int(fields.get("startOffsetInfo", "").split(" ")[-1]),
            int(fields.get("popTime", "")),
            int(fields.get("invisibleTime", "")),
            int(fields.get("reviveQid", "")),
            0,
            self._broker.name,
            0,
            offset,
        )
        ack = AckMessageRequestHeader(self.name, self.name, 0, str(handle), offset)
        await self._peer.ask(RequestCode.ACK_MESSAGE, ack.encode())
        while (
            await self._committed() <= offset and time.monotonic() < until
        ):  # a late commit would outlive the deletion
            await asyncio.sleep(_PAUSE_S)
        return "a message was received and acknowledged"


def _missing(field: str) -> int:
    raise TrialError(f"the answer has no {field}")
