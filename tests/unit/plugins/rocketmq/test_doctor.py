"""Goal: the doctor says of each thing whether it works, whatever a server answers; it always ends, and leaves nothing behind.

Method: addresses are judged by themselves. A cluster of stubs answers well, lies, is silent or dies at each step of a trial;
the examination is cancelled at each step too, and the command is interrupted by signals.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.rocketmq import doctor
from commitmq_plugins.rocketmq.doctor import PREFIX, DoctorOptions, Examination, age_s, new_name
from commitmq_plugins.rocketmq.peer import (
    AddressError,
    CheckResult,
    CheckState,
    PeerOptions,
    judge_address,
    parse_address,
    parse_all,
    plain,
    version_text,
)
from commitmq_plugins.rocketmq.remoting.bodies import QueueData
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from stub_cluster import NAME, StubCluster, stub_cluster

SOON = PeerOptions(0.3)
Play = Callable[[StubCluster], Awaitable[Any]]
TRIAL = [
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.PULL_MESSAGE,
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
]


def play(folder: Path, talk: Play) -> Any:
    """What ``talk`` returns."""

    async def run() -> Any:
        async with stub_cluster(folder) as cluster:
            cluster.now_ms = lambda: int(time.time() * 1000)
            return await talk(cluster)

    return asyncio.run(run())


async def examine(cluster: StubCluster, **wanted: Any) -> list[CheckResult]:
    findings: list[CheckResult] = []
    wanted = {"name_servers": [("127.0.0.1", cluster.names_port)], "terms": SOON, **wanted}
    await Examination(DoctorOptions(**wanted), findings.append).run()
    return findings


def of(findings: list[CheckResult], check: str) -> list[CheckResult]:
    return [one for one in findings if one.check == check]


# ---------------------------------------------------------------- addresses, versions, texts


@pytest.mark.parametrize(
    ("host", "seen", "state"),
    [
        ("10.1.2.3", "10.9.9.9", CheckState.OK),
        ("0.0.0.0", "127.0.0.1", CheckState.FAILED),
        ("::", "10.1.2.3", CheckState.FAILED),
        ("127.0.0.1", "127.0.0.1", CheckState.OK),
        ("127.0.0.1", "::1", CheckState.OK),
        ("127.0.0.1", "10.1.2.3", CheckState.FAILED),
        ("::ffff:127.0.0.1", "10.1.2.3", CheckState.FAILED),
        ("::1", "10.1.2.3", CheckState.FAILED),
        ("169.254.1.1", "10.1.2.3", CheckState.WARNING),
        ("172.17.0.2", "10.1.2.3", CheckState.WARNING),
        ("172.17.0.2", "172.17.0.3", CheckState.OK),
        ("172.18.0.2", "172.17.0.3", CheckState.WARNING),
        ("192.168.1.2", "8.8.8.8", CheckState.WARNING),
        ("8.8.4.4", "8.8.8.8", CheckState.OK),
        ("fe80::1", "fe80::2%eth0", CheckState.WARNING),
        ("broker.example", "10.1.2.3", CheckState.WARNING),
    ],
)
def test_traps_in_addresses(host: str, seen: str, state: CheckState) -> None:
    found, why = judge_address(host, seen)
    assert found == state, why
    assert host in why


def test_addresses_are_read() -> None:
    assert parse_all("a:1;b , [::1]:2;") == [("a", 1), ("b", 9876), ("::1", 2)]
    for wrong in ("a", "a:", ":1", "a:0", "a:65536", "a:1x", "a:٣"):
        with pytest.raises(AddressError):
            parse_address(wrong)


@pytest.mark.parametrize(
    ("number", "text"), [(493, "V5_4_0"), (492, "V5_4_0_SNAPSHOT"), (401, "V4_9_4"), (233, "V4_1_0"), (213, "V4_0_0")]
)
def test_versions_have_rocketmqs_names(number: int, text: str) -> None:
    assert version_text(number) == text
    assert "before" in version_text(0)


def test_a_servers_text_is_one_short_line() -> None:
    assert plain("a\nb\x1b[31m\t c") == "a b\N{REPLACEMENT CHARACTER}[31m c"
    assert len(plain("x" * 10_000)) < 500


def test_names_of_trials() -> None:
    name = new_name()
    age = age_s(name)
    assert age is not None
    assert 0 <= age < 5
    assert new_name() != name
    assert age_s(f"{PREFIX}soon_1") is None
    assert age_s("orders") is None


# ---------------------------------------------------------------- a cluster that works


def test_everything_works(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> None:
        findings = await examine(cluster, write=True, topics=("TBW102", "nothing"))
        wrong = [one.line() for one in findings if one.state != CheckState.OK]
        assert wrong == [f"FAILED  route nothing at {cluster.names}: no broker has this topic"]
        assert [one.detail for one in of(findings, "cluster")] == ["1 brokers: stub"]
        assert "8 queues to read" in of(findings, "route")[0].detail
        assert of(findings, "largest message")[0].detail == "4 MiB"
        assert of(findings, "broker")[0].detail.endswith("V5_4_0")
        assert of(findings, "topics by sends")[-1].detail == "on, at stub"
        for code in TRIAL:
            assert cluster.asked[code], code.name
        left_nothing(cluster)

    play(tmp_path, talk)


def left_nothing(cluster: StubCluster) -> None:
    assert cluster.topics == set()
    assert cluster.groups == set()
    assert [one for one in cluster.routes.topics() if one.startswith(PREFIX)] == []


def test_without_write_nothing_is_changed(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> None:
        await examine(cluster)
        assert set(cluster.asked) == {
            RequestCode.GET_BROKER_RUNTIME_INFO, RequestCode.GET_BROKER_CONFIG, RequestCode.POLLING_INFO,
        }  # fmt: skip

    play(tmp_path, talk)


def test_settings_and_clocks_that_harm_are_named(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        cluster.now_ms = lambda: int(time.time() * 1000) + 3_600_000
        cluster.settings |= {"enablePropertyFilter": "false", "timerWheelEnable": "false", "brokerPermission": "4",
                             "brokerName": "other"}  # fmt: skip
        return await examine(cluster, write=True)

    findings = play(tmp_path, talk)
    wrong = {one.check: one.detail for one in findings if one.state != CheckState.OK}
    assert wrong.keys() == {
        *(
            "SQL filters",
            "pull with a SQL filter",
            "timer",
            "POP",
            "POP and acknowledge",
            "permission",
            "clock",
            "name",
        ),
    }
    assert wrong["permission"] == "read only"
    clocks = [one.detail for one in of(findings, "clock")]
    assert len(clocks) == 2, "by the broker's state, and by the time of a message"
    for detail in clocks:
        assert 3_500 < float(detail.partition(" s ahead")[0]) < 3_700


def test_a_broker_that_has_just_started_is_asked_again(tmp_path: Path) -> None:
    """RocketMQ's broker fails to tell its state until it has taken its first figures, a second after its start."""

    async def talk(cluster: StubCluster) -> list[CheckResult]:
        stated = time.monotonic() + 1.2

        def early(command: Command) -> Command:
            if time.monotonic() > stated:
                del cluster.answers[RequestCode.GET_BROKER_RUNTIME_INFO]
            return command.answer(ResponseCode.SYSTEM_ERROR, "java.util.NoSuchElementException")

        cluster.answers[RequestCode.GET_BROKER_RUNTIME_INFO] = early
        return await examine(cluster)

    (found,) = of(play(tmp_path, talk), "clock")
    assert found.state == CheckState.OK, found.detail


def test_a_broker_that_never_tells_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "START_S", 0.5)

    async def talk(cluster: StubCluster) -> list[CheckResult]:
        cluster.answers[RequestCode.GET_BROKER_RUNTIME_INFO] = lambda command: command.answer(
            ResponseCode.SYSTEM_ERROR, "no figures"
        )
        return await examine(cluster)

    findings = play(tmp_path, talk)
    (found,) = of(findings, "clock")
    assert found.state == CheckState.UNKNOWN
    assert "SYSTEM_ERROR: no figures" in found.detail
    assert of(findings, "largest message"), "the rest is examined"


# ---------------------------------------------------------------- lies, silence, death


def test_addresses_that_lead_nowhere(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        dead = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
        port = dead.sockets[0].getsockname()[1]
        cluster.register("ends", f"127.0.0.1:{port}")
        cluster.register("everywhere", f"0.0.0.0:{cluster.broker_port}")
        cluster.register("text", "nonsense")
        cluster.register("closed", "127.0.0.1:1", 1)
        try:
            return await examine(cluster)
        finally:
            dead.close()

    findings = play(tmp_path, talk)
    failed = {(one.check, one.where.split()[0]) for one in findings if one.state == CheckState.FAILED}
    assert failed == {
        ("broker", "ends"),
        ("address", "everywhere"),
        ("name", "everywhere"),
        ("address", "text"),
        ("broker", "closed"),
    }
    assert "(slave 1)" in next(one.where for one in findings if one.where.startswith("closed"))


def test_no_more_brokers_than_wanted(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        for number in range(5):
            cluster.register(f"zz{number}", f"127.0.0.1:{number + 1}")
        return await examine(cluster, most=1)

    findings = play(tmp_path, talk)
    assert of(findings, "broker")[0].where.startswith(NAME)
    assert len(of(findings, "address")) == 1
    assert of(findings, "brokers")[0].detail == "5 of 6 were not looked at"


@pytest.mark.parametrize("noise", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'\0\0\0\x10\0\0\0\x0c{"code":"x"}'])
def test_what_is_no_name_server(noise: bytes) -> None:
    async def talk() -> tuple[bool, list[CheckResult], float]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(noise)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        findings: list[CheckResult] = []
        places = [("127.0.0.1", server.sockets[0].getsockname()[1]), ("127.0.0.1", 1)]
        examination = Examination(DoctorOptions(places, terms=SOON), findings.append)
        began = time.monotonic()
        await examination.run()
        server.close()
        return examination.reached, findings, time.monotonic() - began

    reached, findings, took_s = asyncio.run(talk())
    assert not reached
    assert [(one.check, one.state) for one in findings] == [("name server", CheckState.FAILED)] * 2
    assert took_s < 5, "every wait has an end"


def test_a_broker_in_the_place_of_a_name_server_is_named(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        cluster.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = lambda command: command.not_supported()
        return await examine(cluster, name_servers=[("127.0.0.1", cluster.broker_port)])

    [finding] = play(tmp_path, talk)
    assert (finding.check, finding.state) == ("name server", CheckState.FAILED)
    assert finding.advice == "this is a broker: name its name server, whose port is usually 9876"


def test_name_servers_that_differ(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        async with stub_cluster(tmp_path) as other:
            places = [("127.0.0.1", cluster.names_port), ("127.0.0.1", other.names_port)]
            return await examine(cluster, name_servers=places)

    (found,) = of(play(tmp_path, talk), "name servers agree")
    assert found.state == CheckState.WARNING
    assert found.detail.count(f"{NAME}/0") == 2


def refuse(command: Command) -> Command:
    return command.answer(ResponseCode.NO_PERMISSION, "who are you")


def nonsense(command: Command) -> Command:
    return command.answer(ext_fields={"offset": "x", "queueOffset": "y", "popTime": "z"}, body=b"\xff{")


@pytest.mark.parametrize("answer", [refuse, nonsense, lambda _command: None], ids=["refused", "nonsense", "silent"])
@pytest.mark.parametrize("code", TRIAL)
def test_a_trial_that_fails_anywhere_leaves_nothing(code: RequestCode, answer: Any, tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        cluster.answers[code] = answer
        findings = await examine(cluster, write=True)
        left_nothing(cluster)
        if answer is refuse and code == TRIAL[0]:
            assert not cluster.asked[RequestCode.DELETE_TOPIC_IN_BROKER], "there is nothing to delete"
        return findings

    findings = play(tmp_path, talk)
    if answer is nonsense and code in (*TRIAL[:2], RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.ACK_MESSAGE):
        return  # a success whose fields nobody needs
    assert [one.check for one in findings if one.state == CheckState.FAILED] != []


@pytest.mark.parametrize("code", [RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.DELETE_SUBSCRIPTIONGROUP])
def test_what_cannot_be_deleted_is_named(code: RequestCode, tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> list[CheckResult]:
        cluster.answers[code] = refuse
        return await examine(cluster, write=True)

    (found,) = of(play(tmp_path, talk), "delete what the trial made")
    assert found.state == CheckState.FAILED
    assert "NO_PERMISSION: who are you" in found.detail
    assert PREFIX in found.advice


@pytest.mark.parametrize("code", [*TRIAL, RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.GET_TOPIC_CONFIG])
def test_a_trial_that_is_interrupted_anywhere_leaves_nothing(code: RequestCode, tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> None:
        calls = 0

        def stop_here(command: Command) -> Command:
            nonlocal calls
            calls += 1
            if calls == 1:
                task.cancel()
            return cluster.usual(command)

        cluster.answers[code] = stop_here
        task = asyncio.ensure_future(examine(cluster, write=True))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls
        left_nothing(cluster)

    play(tmp_path, talk)


def test_remains_of_killed_doctors_are_found_and_deleted(tmp_path: Path) -> None:
    old, young = f"{PREFIX}{int(time.time()) - 3_600}_a", new_name()

    async def talk(cluster: StubCluster) -> tuple[list[CheckResult], list[CheckResult], list[str]]:
        for topic in (old, young):
            cluster.topics.add(topic)
            cluster.routes.put_topic(topic, [QueueData(NAME, 1, 1, 6)])
        seen = await examine(cluster)
        deleted = await examine(cluster, write=True)
        return seen, deleted, [one for one in cluster.routes.topics() if one.startswith(PREFIX)]

    seen, deleted, left = play(tmp_path, talk)
    check = "remains of a trial"
    assert [(one.where, one.state) for one in of(seen, check)] == [(old, CheckState.WARNING)]
    assert [(one.where, one.detail) for one in of(deleted, check)] == [(old, "deleted")]
    assert left == [young], "another doctor may be at work with it"


# ---------------------------------------------------------------- the command


async def command(*arguments: str, stop: tuple[asyncio.Event, signal.Signals] | None = None) -> tuple[int, str, str]:
    """Exit code and output of ``commitmq rocketmq doctor``."""
    pipe = asyncio.subprocess.PIPE
    words = [sys.executable, "-m", "commitmq.cli.main", "rocketmq", "doctor", *arguments]
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    if stop is not None:
        await asyncio.wait_for(stop[0].wait(), 60)
        process.send_signal(stop[1])
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_the_command_prints_lines_or_json(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> None:
        code, out, err = await command(cluster.names, "--write")
        assert (code, err) == (CliExit.OK, "")
        assert f"ok      name server {cluster.names}: answers in " in out
        cluster.answers[RequestCode.ACK_MESSAGE] = refuse
        code, out, _ = await command(cluster.names, "--write", "--json")
        report = json.loads(out)
        assert code == CliExit.FAILURE
        assert report["works"] is False
        assert [one["check"] for one in report["findings"] if one["state"] == "failed"] == ["POP and acknowledge"]

    play(tmp_path, talk)


def test_exit_codes_without_a_name_server() -> None:
    code, _, err = asyncio.run(command("127.0.0.1:1", "--timeout", "0.5"))
    assert code == CliExit.NODE_UNAVAILABLE
    assert err == "commitmq: no name server answers at 127.0.0.1:1\n"
    assert asyncio.run(command("no:port"))[0] == CliExit.USAGE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_deletes_what_it_made(number: signal.Signals, tmp_path: Path) -> None:
    async def talk(cluster: StubCluster) -> None:
        cluster.answers[RequestCode.PULL_MESSAGE] = lambda _command: None
        code, out, _ = await command(
            cluster.names, "--write", "--json", "--timeout", "50", stop=(cluster.waiting, number)
        )
        assert code == CliExit.INTERRUPTED
        assert json.loads(out)["findings"][-1]["check"] == "delete what the trial made"
        left_nothing(cluster)

    play(tmp_path, talk)
