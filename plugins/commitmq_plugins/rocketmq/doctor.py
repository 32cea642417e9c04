"""``commitmq rocketmq``: verbs about clusters of RocketMQ's protocol, to which they connect as clients do.

``doctor`` examines name servers, then brokers, then topics, and makes trials: a topic and a group of its own, deleted
again. Others ask single clients through a broker: their stacks (request 307), and to handle one message (request 309),
for which the broker waits 10 s. Every wait here has an end too.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import click

from commitmq.cli.options import json_option, timeout_option
from commitmq.cli.output import fail, print_json, read_secret
from commitmq.errors import CommitMQError
from commitmq.format.record import Record, decode_record
from commitmq.semantics.pop import ReceiptHandle
from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.rocketmq.peer import (
    ADVICE,
    AddressError,
    CheckResult,
    CheckState,
    NameServers,
    Peer,
    PeerOptions,
    PeerRefusedError,
    Report,
    SessionCredentials,
    examine_tls,
    judge_address,
    parse_address,
    version_text,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import as_object, dumps, load_object, loads
from commitmq_plugins.rocketmq.remoting.frame import Command, PeerGoneError, RemotingError
from commitmq_plugins.rocketmq.remoting.headers import (
    AckMessageRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GroupQueueRequestHeader,
    PopMessageRequestHeader,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SendMessageRequestHeaderV2,
    TopicRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

CLOCK_S: Final = 5.0
"""A greater difference between two clocks is reported: delays, timers and POP go by the broker's."""
START_S: Final = 3.0
"""For so long a broker that has just started may not tell its state: RocketMQ's takes its first figures a second later."""
_AGAIN_S: Final = 0.25
_RUNTIME: Final = re.compile(r"(\d{1,6}) days, (\d{1,2}) hours, (\d{1,2}) minutes, (\d{1,2}) seconds")
_MS: Final = re.compile(r"\d{1,15}")
_MIB: Final = 1024 * 1024
_PERMISSIONS: Final = {"6": "read and write", "4": "read only", "2": "write only"}
_ANY: Final = "COMMITMQ_DOCTOR"


class Broker:
    """What the doctor asks a broker: its address, version, clock and settings. Nothing is changed.

    One process of a broker, at the address that clients get. ``number`` 0 is the master.
    """

    def __init__(self, name: str, number: int, address: str, terms: PeerOptions, report: Report) -> None:
        self.name, self.number, self.address, self._terms, self._report = name, number, address, terms, report
        self.peer: Peer | None = None
        """There after :meth:`examine`, when the broker answers."""
        self.settings: dict[str, str] = {}

    @property
    def where(self) -> str:
        role = "" if self.number == 0 else f" (slave {self.number})"
        return f"{self.name}{role} {self.address}"

    def _say(self, state: CheckState, check: str, detail: str, advice: str = "") -> None:
        self._report(CheckResult(state, check, self.where, detail, advice))

    def report_to(self, report: Report) -> None:
        """Tell ``report`` everything from now on."""
        self._report = report

    async def examine(self, seen: str | None) -> None:
        """``seen`` is the IP at which the name server was reached."""
        try:
            host, port = parse_address(self.address)
        except AddressError as error:
            self._say(CheckState.FAILED, "address", str(error), ADVICE)
            return
        state, judgement = judge_address(host, seen)
        self._say(state, "address", judgement, "" if state == CheckState.OK else ADVICE)
        peer = Peer(host, port, self._terms)
        try:
            answer = await peer.answer(RequestCode.GET_BROKER_RUNTIME_INFO)
        except RemotingError as error:
            self._say(CheckState.FAILED, "broker", str(error), ADVICE)
            await peer.close()
            return
        self.peer = peer
        self._say(CheckState.OK, "broker", f"answers in {peer.took_s * 1000:.0f} ms, {version_text(answer.version)}")
        await examine_tls(peer, self._report)
        await self._vip(host, port)
        await self._clock(peer, answer)
        await self._settings(peer)
        await self._pop(peer)

    async def _vip(self, host: str, port: int) -> None:
        vip = Peer(host, max(1, port - 2), self._terms)
        try:
            await vip.answer(RequestCode.GET_BROKER_RUNTIME_INFO)
            detail = f"port {vip.port} answers"
        except RemotingError:
            detail = f"port {vip.port} does not answer: only clients with vipChannelEnabled=true need it"
        finally:
            await vip.close()
        self._say(CheckState.OK, "VIP channel", detail)

    async def _clock(self, peer: Peer, answer: Command) -> None:
        """``answer`` tells the broker's state, or refuses to: then it is asked again for a while."""
        deadline = time.monotonic() + START_S
        try:
            while answer.code == ResponseCode.SYSTEM_ERROR and time.monotonic() < deadline:
                await asyncio.sleep(_AGAIN_S)
                answer = await peer.answer(RequestCode.GET_BROKER_RUNTIME_INFO)
            if answer.code:
                raise PeerRefusedError(answer.code, answer.remark)
        except RemotingError as error:
            self._say(CheckState.UNKNOWN, "clock", f"the broker does not tell its state: {error}")
            return
        self._read_clock(bytes(answer.body), peer.took_s)

    def _read_clock(self, body: bytes, took_s: float) -> None:
        """From the time of the start and the time since, which is in whole seconds."""
        try:
            table = as_object(as_object(loads(body), "runtime info").get("table"), "table")
        except RemotingError as error:
            self._say(CheckState.UNKNOWN, "clock", str(error))
            return
        boot, runtime = str(table.get("bootTimestamp", "")), _RUNTIME.search(str(table.get("runtime", "")))
        if not _MS.fullmatch(boot) or runtime is None:
            self._say(CheckState.UNKNOWN, "clock", "the broker does not say when it started")
            return
        days, hours, minutes, seconds = (int(part) for part in runtime.groups())
        began_s = int(boot) / 1000 + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        now_s = time.time()
        # Its clock showed a time of this second while ours went from now_s - took_s to now_s.
        ahead_s, behind_s = began_s - now_s, now_s - took_s - (began_s + 1)
        self.say_clock(ahead_s, behind_s)

    def say_clock(self, ahead_s: float, behind_s: float) -> None:
        """The broker's clock is ahead, or behind, by so much at least; both are negative when neither is sure."""
        if ahead_s > CLOCK_S or behind_s > CLOCK_S:
            word = f"{ahead_s:.1f} s ahead of" if ahead_s > 0 else f"{behind_s:.1f} s behind"
            self._say(CheckState.WARNING, "clock", f"{word} this machine's", "set both machines' clocks by NTP")
        else:
            self._say(CheckState.OK, "clock", f"as this machine's, within {CLOCK_S:g} s")

    # ------------------------------------------------------------ settings

    async def _settings(self, peer: Peer) -> None:
        try:
            answer = await peer.ask(RequestCode.GET_BROKER_CONFIG)
        except RemotingError as error:
            self._say(CheckState.UNKNOWN, "settings", str(error))
            return
        text = bytes(answer.body).decode("utf-8", "replace")
        pairs = (line.partition("=") for line in text.splitlines())
        self.settings = {name.strip(): value.strip() for name, sign, value in pairs if sign}
        self._switch("enablePropertyFilter", "SQL filters", "consumers with SQL92 expressions are refused")
        self._switch("timerWheelEnable", "timer", "messages at a time of their own, and POP, are refused")
        self._switch("autoCreateTopicEnable", "topics by sends", "topics are made by `mqadmin updateTopic`", good=True)
        self._switch("autoCreateSubscriptionGroup", "groups by use", "groups are made by `mqadmin updateSubGroup`",
                     good=True)  # fmt: skip
        self._number("defaultTopicQueueNums", "queues of a new topic", 1)
        self._number("maxMessageSize", "largest message", _MIB)
        permission = self.settings.get("brokerPermission", "")
        state = CheckState.OK if permission == "6" else CheckState.WARNING
        if permission:
            self._say(state, "permission", _PERMISSIONS.get(permission, f"brokerPermission={permission}"))
        role, flush = self.settings.get("brokerRole", "?"), self.settings.get("flushDiskType", "?")
        self._say(CheckState.OK, "role and flush", f"{role}, {flush}")
        own_name = self.settings.get("brokerName", self.name)
        if own_name != self.name:
            self._say(CheckState.FAILED, "name", f"the broker at this address calls itself {own_name}",
                      "two brokers have one address, or it leads elsewhere")  # fmt: skip

    def _switch(self, key: str, check: str, otherwise: str, *, good: bool = False) -> None:
        """A setting that is on or off; ``good``: off is as good."""
        value = self.settings.get(key)
        if value is None:
            self._say(CheckState.UNKNOWN, check, f"the broker has no setting {key}")
        elif value.lower() == "true":
            self._say(CheckState.OK, check, "on")
        else:
            self._say(CheckState.OK if good else CheckState.WARNING, check, f"off ({key}={value}): {otherwise}")

    def _number(self, key: str, check: str, unit: int) -> None:
        value = self.settings.get(key, "")
        if not _MS.fullmatch(value):
            self._say(CheckState.UNKNOWN, check, f"the broker has no setting {key}")
        elif unit == 1:
            self._say(CheckState.OK, check, value)
        else:
            self._say(CheckState.OK, check, f"{int(value) / unit:g} MiB")

    async def _pop(self, peer: Peer) -> None:
        """A question of POP that changes nothing; any answer but "not supported" means that the broker has POP."""
        header = GroupQueueRequestHeader(_ANY, _ANY, 0)
        try:
            answer = await peer.answer(RequestCode.POLLING_INFO, header.encode())
        except RemotingError as error:
            self._say(CheckState.UNKNOWN, "POP", str(error))
            return
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            self._say(CheckState.WARNING, "POP", "not supported: consumers with clientRebalance=false get nothing")
        elif self.settings.get("timerWheelEnable", "true").lower() != "true":
            self._say(CheckState.WARNING, "POP", "refused while timerWheelEnable is false")
        else:
            self._say(CheckState.OK, "POP", "supported")

    async def close(self) -> None:
        if self.peer is not None:
            await self.peer.close()


_ROUNDS: Final = 3
_REMOVAL_PAUSE_S: Final = 0.3
_Result = TypeVar("_Result")


async def finished(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``work``, which is not interrupted: a cancellation in the meantime is raised after its end."""
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
    """A trial of one broker: a topic and a group of the doctor's own, messages to and fro, and everything deleted again.

    Whatever ends the trial - a refusal, a time limit, Ctrl-C, SIGTERM - the deletion runs to its end, and each of its waits
    has one. Only a doctor that is killed leaves its topic behind. The topic's name has the time, so that a later doctor finds
    it.

    Deletes a topic and a group of the doctor, and looks whether they are gone.
    """

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
                    self._say(CheckState.UNKNOWN, check, f"not tried, because {setting} is off")
                    continue
                if not await self._try(check, step) and is_needed:
                    for left, _, _ in self._steps[at + 1 :]:
                        self._say(CheckState.UNKNOWN, left, f"not tried, because this failed: {check}")
                    break
        finally:
            if self._is_made:
                await finished(self._remove(removal))

    async def _remove(self, removal: Removal) -> None:
        left = await removal.run()
        if left:
            advice = f"`mqadmin deleteTopic` and `mqadmin deleteSubGroup` remove {self.name}"
            self._say(CheckState.FAILED, "delete what the trial made", "; ".join(left), advice)
        else:
            self._say(CheckState.OK, "delete what the trial made", "topic, group and offsets are gone")

    def _say(self, state: CheckState, check: str, detail: str, advice: str = "") -> None:
        self._report(CheckResult(state, check, self._broker.where, detail, advice))

    async def _try(self, check: str, step: Callable[[], Awaitable[str]]) -> bool:
        try:
            detail = await step()
        except PeerRefusedError as refusal:
            advice = "this account may not" if refusal.code == ResponseCode.NO_PERMISSION else ""
            self._say(CheckState.FAILED, check, str(refusal), advice)
            return False
        except (CommitMQError, ValueError) as error:
            self._say(CheckState.FAILED, check, str(error))
            return False
        self._say(CheckState.OK, check, detail)
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


_AT_A_TIME: Final = 8
_OLD_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """``topics``: routes to look at. ``write``: try each master with a topic of the doctor's own. ``most``: of the brokers."""

    name_servers: list[tuple[str, int]]
    topics: tuple[str, ...] = ()
    write: bool = False
    most: int = 64
    terms: PeerOptions = field(default_factory=PeerOptions)


class Examination:
    """The whole examination: name servers, then brokers, then a topic, then trials.

    Tells ``report`` each finding as soon as it has it, in the same order each time.
    """

    def __init__(self, wanted: DoctorOptions, report: Report) -> None:
        self._wanted, self._report = wanted, report
        self.reached = False
        """Whether a name server answered."""

    async def run(self) -> None:
        """Raises nothing of the servers' making."""
        peers = [Peer(host, port, self._wanted.terms) for host, port in self._wanted.name_servers]
        names = NameServers(peers, self._report)
        brokers: list[Broker] = []
        try:
            await names.examine()
            if not names.peers:
                return
            self.reached = True
            await self._brokers(names, brokers)
            await names.examine_template()
            for topic in self._wanted.topics:
                await names.examine_topic(topic)
            masters = [one for one in brokers if one.number == 0 and one.peer is not None]
            await self._remains(names, masters)
            if self._wanted.write:
                for broker in masters:
                    await Trial(names, broker, self._report).run()
        finally:
            await finished(_close([*peers, *brokers]))

    async def _brokers(self, names: NameServers, brokers: list[Broker]) -> None:
        """Examine the brokers, several at a time."""
        table = names.info.broker_addr_table
        places = [(name, number, table[name].broker_addrs[number])
                  for name in sorted(table) for number in sorted(table[name].broker_addrs)]  # fmt: skip
        seen = await names.peers[0].ip()
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def examine(place: tuple[str, int, str]) -> list[CheckResult]:
            found: list[CheckResult] = []
            broker = Broker(*place, self._wanted.terms, found.append)
            brokers.append(broker)
            async with limit:
                await broker.examine(seen)
            return found

        tasks = [asyncio.ensure_future(examine(place)) for place in places[: self._wanted.most]]
        try:
            for task in tasks:
                for finding in await task:
                    self._report(finding)
        finally:
            for task in tasks:
                task.cancel()
        for broker in brokers:
            broker.report_to(self._report)
        brokers.sort(key=lambda one: (one.name, one.number))
        if len(places) > self._wanted.most:
            detail = f"{len(places) - self._wanted.most} of {len(places)} were not looked at"
            self._report(CheckResult(CheckState.WARNING, "brokers", "", detail, "--most names a greater number"))

    async def _remains(self, names: NameServers, masters: list[Broker]) -> None:
        """Topics of doctors that were killed. With ``write`` they are deleted, if no doctor can be using them."""
        try:
            topics = await names.topics(PREFIX)
        except RemotingError:
            return
        for topic in topics:
            age = age_s(topic)
            if age is None or age < _OLD_S:
                continue
            left = [f"a doctor was killed {age / 60:.0f} minutes ago and left it"]
            if self._wanted.write:
                left = [why for broker in masters if broker.peer is not None
                        for why in await finished(Removal(names, broker.peer, topic).run())]  # fmt: skip
            if left:
                advice = "" if self._wanted.write else "--write deletes it"
                self._report(CheckResult(CheckState.WARNING, "remains of a trial", topic, "; ".join(left), advice))
            else:
                self._report(CheckResult(CheckState.OK, "remains of a trial", topic, "deleted"))


async def _close(connections: list[Peer | Broker]) -> None:
    for one in connections:
        await one.close()


__all__ = ["PeerOptions", "SessionCredentials", "handled", "stacks"]

_CLIENT_S: Final = 10.0
"""So long a broker waits for a client."""
_AT_ONCE: Final = 16


async def stacks(
    host: str, port: int, group: str, client_ids: Sequence[str], terms: PeerOptions
) -> list[tuple[str | None, str | None]]:
    """For each of these consumers of ``group`` the stack of its threads; or None, and the reason why there is none."""
    peer, gate = Peer(host, port, terms), asyncio.Semaphore(_AT_ONCE)

    async def one(client_id: str) -> tuple[str | None, str | None]:
        fields = {"consumerGroup": group, "clientId": client_id, "jstackEnable": "true"}
        async with gate:
            try:
                found = await _object(peer, RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
            except RemotingError as error:
                return None, str(error)
        stack = found.get("jstack")
        return (stack, None) if isinstance(stack, str) and stack else (None, "the client's answer has no stack")

    try:
        return list(await asyncio.gather(*map(one, client_ids)))
    finally:
        await peer.close()


async def handled(
    host: str, port: int, group: str, client_id: str, message_id: str, terms: PeerOptions
) -> tuple[str, str | None, int | None]:
    """Let a consumer of ``group`` handle one message now: its result as RocketMQ names it, remark, milliseconds.

    Raises RemotingError.
    """
    peer = Peer(host, port, terms)
    fields = {"consumerGroup": group, "clientId": client_id, "msgId": message_id}
    try:
        found = await _object(peer, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields)
    finally:
        await peer.close()
    remark, spent_ms = found.get("remark"), found.get("spentTimeMills")
    return str(found.get("consumeResult")), None if remark is None else str(remark), _number(spent_ms)


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


async def _object(peer: Peer, code: RequestCode, fields: dict[str, str]) -> dict[str, Any]:
    """The object in the answer's body. Raises RemotingError, whose text says what to do."""
    try:
        return load_object((await peer.ask(code, fields, wait_s=_CLIENT_S)).body)
    except PeerRefusedError as error:
        if error.code == ResponseCode.NO_PERMISSION and peer.terms.keys is None:
            raise RemotingError(f"{error}; --access-key signs the request as a user") from None
        raise
    except PeerGoneError as error:
        raise RemotingError(f"{error}; a server with tls_mode=enforcing needs --tls") from None


@click.group()
def rocketmq() -> None:
    """Examine a cluster of RocketMQ's protocol."""


@rocketmq.command()
@click.argument("namesrv")
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Also look at this topic's route; repeatable.")
@click.option(
    "--write", is_flag=True, help="Also send, receive and commit on a topic of the doctor's own; it is deleted."
)
@timeout_option(3.0, "Seconds of each wait.", least_s=0.05)
@click.option("--tls", is_flag=True, help="Connect with TLS. Certificates are not checked.")
@click.option("--access-key", metavar="USER", help="Sign each request as this user; standard input has the secret.")
@click.option("--most", type=click.IntRange(1, 10_000), default=64, show_default=True, help="Most brokers to look at.")
@json_option
def doctor(
    namesrv: str,
    topics: tuple[str, ...],
    write: bool,
    timeout_s: float,
    tls: bool,
    access_key: str | None,
    most: int,
    as_json: bool,
) -> None:
    """Connect as a client does, and say what works.

    NAMESRV is one name server or several, as HOST:PORT;HOST:PORT, of CommitMQ or of RocketMQ. Without --write nothing is
    changed. Exit code 0: everything works, perhaps with warnings; 1: something does not; 69: no name server answers.
    """
    from commitmq_plugins.rocketmq.peer import AddressError, CheckState, PeerOptions, SessionCredentials, parse_all

    try:
        places = parse_all(namesrv)
    except AddressError as error:
        raise click.BadParameter(str(error), param_hint="NAMESRV") from error
    if not places:
        raise click.BadParameter("it names no server", param_hint="NAMESRV")
    findings: list[CheckResult] = []

    def report(finding: CheckResult) -> None:
        findings.append(finding)
        if not as_json:
            click.echo(finding.line())

    wanted = DoctorOptions(
        places,
        topics,
        write,
        most,
        PeerOptions(timeout_s, tls, SessionCredentials(access_key, read_secret()) if access_key else None),
    )
    examination = Examination(wanted, report)
    interrupted = not _ran(examination.run())
    works = not interrupted and examination.reached and all(one.state != CheckState.FAILED for one in findings)
    if as_json:
        print_json({"works": works, "findings": [one.to_json() for one in findings]})
    if interrupted:
        raise SystemExit(int(CliExit.INTERRUPTED))
    if not examination.reached:
        fail(f"no name server answers at {namesrv}", CliExit.NODE_UNAVAILABLE)
    if not works:
        raise SystemExit(int(CliExit.FAILURE))


def _ran(work: Any) -> bool:
    """False when Ctrl-C or SIGTERM ended ``work``, which has cleaned up by then."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return False
    return True
