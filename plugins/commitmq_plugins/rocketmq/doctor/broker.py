"""What the doctor asks a broker: its address, version, clock and settings. Nothing is changed."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final

from commitmq_plugins.rocketmq.doctor import peer as addresses
from commitmq_plugins.rocketmq.doctor.peer import (
    AddressError,
    Finding,
    Peer,
    PeerRefusedError,
    Report,
    State,
    Terms,
    examine_tls,
    version_text,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import as_object, loads
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError
from commitmq_plugins.rocketmq.remoting.headers import PollingInfoRequestHeader

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
    """One process of a broker, at the address that clients get. ``number`` 0 is the master."""

    def __init__(self, name: str, number: int, address: str, terms: Terms, report: Report) -> None:
        self.name, self.number, self.address, self._terms, self._report = name, number, address, terms, report
        self.peer: Peer | None = None
        """There after :meth:`examine`, when the broker answers."""
        self.settings: dict[str, str] = {}

    @property
    def where(self) -> str:
        role = "" if self.number == 0 else f" (slave {self.number})"
        return f"{self.name}{role} {self.address}"

    def _say(self, state: State, check: str, detail: str, advice: str = "") -> None:
        self._report(Finding(state, check, self.where, detail, advice))

    def report_to(self, report: Report) -> None:
        """Tell ``report`` everything from now on."""
        self._report = report

    async def examine(self, seen: str | None) -> None:
        """``seen`` is the IP at which the name server was reached."""
        try:
            host, port = addresses.parse(self.address)
        except AddressError as error:
            self._say(State.FAILED, "address", str(error), addresses.ADVICE)
            return
        state, judgement = addresses.judge(host, seen)
        self._say(state, "address", judgement, "" if state == State.OK else addresses.ADVICE)
        peer = Peer(host, port, self._terms)
        try:
            answer = await peer.answer(RequestCode.GET_BROKER_RUNTIME_INFO)
        except RemotingError as error:
            self._say(State.FAILED, "broker", str(error), addresses.ADVICE)
            await peer.close()
            return
        self.peer = peer
        self._say(State.OK, "broker", f"answers in {peer.took_s * 1000:.0f} ms, {version_text(answer.version)}")
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
        self._say(State.OK, "VIP channel", detail)

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
            self._say(State.UNKNOWN, "clock", f"the broker does not tell its state: {error}")
            return
        self._read_clock(bytes(answer.body), peer.took_s)

    def _read_clock(self, body: bytes, took_s: float) -> None:
        """From the time of the start and the time since, which is in whole seconds."""
        try:
            table = as_object(as_object(loads(body), "runtime info").get("table"), "table")
        except RemotingError as error:
            self._say(State.UNKNOWN, "clock", str(error))
            return
        boot, runtime = str(table.get("bootTimestamp", "")), _RUNTIME.search(str(table.get("runtime", "")))
        if not _MS.fullmatch(boot) or runtime is None:
            self._say(State.UNKNOWN, "clock", "the broker does not say when it started")
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
            self._say(State.WARNING, "clock", f"{word} this machine's", "set both machines' clocks by NTP")
        else:
            self._say(State.OK, "clock", f"as this machine's, within {CLOCK_S:g} s")

    # ------------------------------------------------------------ settings

    async def _settings(self, peer: Peer) -> None:
        try:
            answer = await peer.ask(RequestCode.GET_BROKER_CONFIG)
        except RemotingError as error:
            self._say(State.UNKNOWN, "settings", str(error))
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
        state = State.OK if permission == "6" else State.WARNING
        if permission:
            self._say(state, "permission", _PERMISSIONS.get(permission, f"brokerPermission={permission}"))
        role, flush = self.settings.get("brokerRole", "?"), self.settings.get("flushDiskType", "?")
        self._say(State.OK, "role and flush", f"{role}, {flush}")
        own_name = self.settings.get("brokerName", self.name)
        if own_name != self.name:
            self._say(State.FAILED, "name", f"the broker at this address calls itself {own_name}",
                      "two brokers have one address, or it leads elsewhere")  # fmt: skip

    def _switch(self, key: str, check: str, otherwise: str, *, good: bool = False) -> None:
        """A setting that is on or off; ``good``: off is as good."""
        value = self.settings.get(key)
        if value is None:
            self._say(State.UNKNOWN, check, f"the broker has no setting {key}")
        elif value.lower() == "true":
            self._say(State.OK, check, "on")
        else:
            self._say(State.OK if good else State.WARNING, check, f"off ({key}={value}): {otherwise}")

    def _number(self, key: str, check: str, unit: int) -> None:
        value = self.settings.get(key, "")
        if not _MS.fullmatch(value):
            self._say(State.UNKNOWN, check, f"the broker has no setting {key}")
        elif unit == 1:
            self._say(State.OK, check, value)
        else:
            self._say(State.OK, check, f"{int(value) / unit:g} MiB")

    async def _pop(self, peer: Peer) -> None:
        """A question of POP that changes nothing; any answer but "not supported" means that the broker has POP."""
        header = PollingInfoRequestHeader(_ANY, _ANY, 0)
        try:
            answer = await peer.answer(RequestCode.POLLING_INFO, header.encode())
        except RemotingError as error:
            self._say(State.UNKNOWN, "POP", str(error))
            return
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            self._say(State.WARNING, "POP", "not supported: consumers with clientRebalance=false get nothing")
        elif self.settings.get("timerWheelEnable", "true").lower() != "true":
            self._say(State.WARNING, "POP", "refused while timerWheelEnable is false")
        else:
            self._say(State.OK, "POP", "supported")

    async def close(self) -> None:
        if self.peer is not None:
            await self.peer.close()
