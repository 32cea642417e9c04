"""Goal: RocketMQ's mqadmin, Dashboard and exporter show and change the node as they do RocketMQ's own broker.

Method: a node and a broker of RocketMQ, each behind a name server of its own, with the same topics, groups, clients and
messages. The same commands, in the same order, by one JVM for each. Outputs must be equal after what depends on time, place or
the two programs' own topics is taken out. The Dashboard and the exporter are replayed by the requests of their sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import mqadmin_commands as commands
import pytest
from mqadmin import BROKER, CLUSTER, Admin, comparable, exported

from nodes import eventually, free_ports, start_node

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.timeout(420)]
_OWN_TOPICS: Final = {
    *("SELF_TEST_TOPIC", "TBW102", "BenchmarkTest", "OFFSET_MOVED_EVENT", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRACE_TOPIC"),
    *("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", BROKER, CLUSTER),
    *("RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"),
    f"{CLUSTER}_REPLY_TOPIC",
}
_OWN_SETTINGS: Final = {
    *("namesrvAddr", "listenPort", "storePathRootDir", "mappedFileSizeCommitLog", "enablePropertyFilter"),
    *("defaultTopicQueueNums", "diskMaxUsedSpaceRatio", "fileReservedTime", "brokerIP1"),
}
"""Settings that the two programs have with other values in these tests, or by intention."""
_OWN_FIGURES: Final = {
    *("brokerActive", "brokerVersionDesc", "commitLogMinOffset", "dispatchBehindBytes", "dispatchMaxBuffer"),
    *("msgPutTotalTodayMorning", "msgPutTotalTodayNow", "msgPutTotalYesterdayMorning", "msgGetTotalTodayMorning"),
    *("msgGetTotalTodayNow", "msgGetTotalYesterdayMorning", "putMessageFailedTimes", "remainTransientStoreBufferNumbs"),
    *("sendThreadPoolQueueCapacity", "pullThreadPoolQueueCapacity", "litePullThreadPoolQueueCapacity"),
    *("queryThreadPoolQueueCapacity", "ackThreadPoolQueueCapacity", "EndTransactionThreadPoolQueueCapacity"),
    *("sendThreadPoolQueueSize", "pullThreadPoolQueueSize", "queryThreadPoolQueueSize", "ackThreadPoolQueueSize"),
    *("timerOffsetBehind", "pageCacheLockTimeMills"),
}
"""Figures of brokerStatus that depend on the state alone."""


class Both:
    """The same for RocketMQ's broker and for the node, at the same time."""

    def __init__(self, theirs: Admin, ours: Admin) -> None:
        self.theirs, self.ours = theirs, ours
        self._threads = ThreadPoolExecutor(2)

    def each(self, action: Callable[[Admin], Any]) -> tuple[Any, Any]:
        """What ``action`` gives for RocketMQ's broker, and for the node."""
        theirs, ours = self._threads.map(action, (self.theirs, self.ours))
        return theirs, ours

    def outputs(self, wanted: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
        """The text of each command; a command that comes twice is told apart by its place."""

        def run(admin: Admin) -> dict[str, str]:
            return {f"{at} {command}": admin.run(command) for at, command in enumerate(wanted)}

        return self.each(run)


@pytest.fixture(scope="module")
def both(
    mqadmin_of: Callable[..., Admin],
    rocketmq_broker_of_session: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("mqadmin")
    first = free_ports(8)  # RocketMQ's broker takes the port two below its own, too
    with (
        rocketmq_broker_of_session(
            folder / "theirs",
            namesPort=first,
            listenPort=first + 3,
            brokerName=BROKER,
            brokerClusterName=CLUSTER,
            # The end of the transaction comes; on a busy machine a check may come before it, and the message twice.
            transactionTimeOut=600_000,
            transactionCheckInterval=600_000,
        ),
        start_node(
            folder,
            f"network.store_port={first + 6}",
            "commit_log.append_properties_crc=false",  # as RocketMQ's: records have the same size
            "plugins.rocketmq.enable=true",
            "plugins.rocketmq.vip_port=false",
            f"plugins.rocketmq.namesrv_port={first + 5}",
        ),
        mqadmin_of(folder / "of-theirs", first, first + 3) as theirs,
        mqadmin_of(folder / "of-ours", first + 5, first + 6) as ours,
    ):
        found = Both(theirs, ours)
        found.each(_make)
        yield found


def _make(admin: Admin) -> None:
    """Topics, groups, messages of all kinds, clients that stay and clients that have gone."""
    for command in commands.MAKE:
        text = admin.run(command)
        assert "success" in text, text
    for at in range(8):
        tag = "B" if at < 4 else "A"
        ids = admin.ask("@send", "T1", at % 4, f"body {at}", "KEYS", f"K{at} common", "TAGS", tag)
        if at == 1:
            admin.places |= ids
    admin.ask("@send", "T2", 0, "bad")
    for at in range(4):
        admin.ask("@send", "Popped", 0, f"popped {at}")
    admin.ask("@half", "PT", "Tx", "done", "commit")
    admin.places["traced"] = admin.ask("@traced", "T3", 0, "traced")["unique"]
    admin.ask("@producer", "PG", "T1")
    _consume(admin, "G1", "T1", "*", 8)
    admin.ask("@persist", "G1")
    _consume(admin, "G2", "T1", "A", 4)
    admin.ask("@stop", "G2")
    admin.ask("@push", "GD", "T2", "*", 1, 0)
    eventually(lambda: " 1 " in _row(admin.run("topicStatus -t %DLQ%GD")), "a dead letter", 60)
    admin.ask("@stop", "GD")
    popped: list[dict[str, Any]] = []

    def pop() -> bool:
        popped.extend(admin.ask("@pop", "GP", "Popped", 32))
        return len(popped) == 4

    eventually(pop, "popped messages", 60)
    for one in popped[:2]:
        assert admin.ask("@ack", "GP", "Popped", one["queue"], one["offset"], one["handle"])
    eventually(lambda: "Pub" in admin.run("queryMsgTraceById -i {traced}"), "the trace", 60)
    # RocketMQ shows a count when it has sampled it, each 10 s.
    eventually(lambda: _row(admin.run("statsAll -t T1")).split()[-2:] == ["8", "8"], "statistics", 60)


def _consume(admin: Admin, group: str, topic: str, expression: str, count: int) -> None:
    admin.ask("@push", group, topic, expression, 0, 16)
    eventually(lambda: len(admin.ask("@received", group)) == count, f"{count} messages for {group}", 60)


def _row(text: str) -> str:
    """The first row of a table."""
    rows = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return f"{' '.join(rows[0].split())} " if rows else ""


def _is_own(name: str) -> bool:
    """Whether a topic or group is a broker's or a tool's own. The node makes POP's topics with the first pop."""
    own = name in _OWN_TOPICS or name.startswith(("rmq_sys_", "%RETRY%GP", "%DLQ%GP", "GP_"))
    return own or name.endswith("TOOLS_CONSUMER")


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """What differs, in a form that can be read."""
    found = [
        f"{name}\n  theirs {theirs[name]}\n  ours   {ours.get(name)}"
        for name in theirs
        if theirs[name] != ours.get(name)
    ]
    return "\n".join(found + [f"{name}\n  only ours {ours[name]}" for name in ours if name not in theirs])


def _compare(texts: tuple[dict[str, str], dict[str, str]]) -> None:
    theirs, ours = ({name: comparable(text) for name, text in one.items()} for one in texts)
    differences = _differences(theirs, ours)
    assert not differences, differences


def test_what_mqadmin_shows_is_the_same(both: Both) -> None:
    _compare(both.outputs(commands.SHOW))


def test_what_mqadmin_lists_is_the_same(both: Both) -> None:
    theirs, ours = both.outputs(tuple(commands.LISTS))

    def kept(texts: dict[str, str]) -> dict[str, list[str]]:
        columns = dict(zip(texts, commands.LISTS.values(), strict=True))
        return {
            name: [line for line in comparable(text) if len(words := line.split()) > columns[name]
                   and not _is_own(words[columns[name]])]
            for name, text in texts.items()
        }  # fmt: skip

    shown = kept(theirs), kept(ours)
    for name in [name for name in shown[0] if "statsAll" in name]:
        _check_counts(*(one.pop(name) for one in shown), only_active=name.endswith("-a"))
    differences = _differences(*shown)
    assert not differences, differences


def _check_counts(theirs: list[str], ours: list[str], *, only_active: bool) -> None:
    """Rows of statsAll: RocketMQ's counts are those of the last minute in its first hour, the node's those of the day."""

    def rows(lines: list[str]) -> dict[tuple[str, ...], list[str]]:
        found = {}
        for words in (line.split() for line in lines if not line.startswith("#Topic")):
            names = 1 if words[-1] == "NO_CONSUMER" else 2
            found[tuple(words[:names])] = [word for word in words[names:] if word != "RATE"]
        return found

    expected, found = rows(theirs), rows(ours)
    assert set(expected) <= set(found)
    assert only_active or set(expected) == set(found)
    for key, figures in expected.items():
        assert all(one in ("0", other) for one, other in zip(figures, found[key], strict=True)), (
            key,
            figures,
            found[key],
        )


def test_the_figures_and_settings_of_the_broker_are_the_same(both: Both) -> None:
    def table(text: str, mark: str) -> dict[str, str]:
        pairs = (line.partition(mark) for line in text.splitlines() if mark in line)
        return {name.split()[-1]: value.strip() for name, _, value in pairs}

    for command in ("brokerStatus -b {broker}", "brokerStatus -c {cluster}"):
        theirs, ours = (table(text, ": ") for text in both.each(lambda admin: admin.run(command)))  # noqa: B023
        assert {name for name in theirs if "DiskRatio_" not in name} <= set(ours)
        figures = [{name: one[name] for name in _OWN_FIGURES} for one in (theirs, ours)]
        assert not (differences := _differences(*figures)), differences
    for command in ("getBrokerConfig -b {broker}", "getBrokerConfig -c {cluster}"):
        theirs, ours = (table(text, "=  ") for text in both.each(lambda admin: admin.run(command)))  # noqa: B023
        assert len(ours) > 20
        settings = [{name: one[name] for name in ours if name not in _OWN_SETTINGS} for one in (theirs, ours)]
        assert not (differences := _differences(*settings)), differences
    theirs, ours = (table(text, "=  ") for text in both.each(lambda admin: admin.run("getNamesrvConfig")))
    wanted = {"clusterTest", "orderMessageEnable"}
    assert wanted <= set(theirs) & set(ours)  # (RocketMQ's has those of its network library, too)


def test_clusters_and_producers_are_the_same(both: Both) -> None:
    def row(admin: Admin) -> list[str]:
        return _row(admin.run("clusterList")).replace(admin.places["broker"], "ADDRESS").split()

    theirs, ours = both.each(row)
    assert theirs[:5] == ours[:5] == [CLUSTER, BROKER, "0", "ADDRESS", "V5_4_0"]
    assert len(theirs) == len(ours)
    assert theirs[-1] == ours[-1] == "true"
    theirs, ours = both.each(lambda admin: admin.run("producer -b {broker}"))
    ids = [{word.split(",")[0] for word in text.split() if word.startswith("clientId=127.0.0.1@")}
           for text in (theirs, ours)]  # fmt: skip
    assert ids[0] == ids[1] != set()


def test_what_mqadmin_exports_is_the_same(both: Both) -> None:
    for command in ("exportMetadata -c {cluster} -f {home}", "exportMetadata -b {broker} -t -f {home}",
                    "exportMetadata -b {broker} -g -f {home}", "exportConfigs -c {cluster} -f {home}",
                    "exportMetrics -c {cluster} -f {home}"):  # fmt: skip
        texts = both.each(lambda admin: admin.run(command).replace(admin.places["home"], "HOME"))  # noqa: B023
        assert texts[0] == texts[1]
        assert "success" in texts[0]

    def metadata(admin: Admin) -> dict[str, Any]:
        found = exported(_home(admin), "metadata.json")
        tables = {**found["topicConfigTable"], **found["subscriptionGroupTable"]}
        return {name: one for name, one in tables.items() if not _is_own(name)}

    differences = _differences(*both.each(metadata))
    assert not differences, differences
    configs = [exported(_home(admin), "configs.json") for admin in (both.theirs, both.ours)]
    assert configs[0]["clusterScale"] == configs[1]["clusterScale"]
    shown = [{name: value for name, value in one["brokerConfigs"][BROKER].items() if name not in _OWN_SETTINGS}
             for one in configs]  # fmt: skip
    assert not (differences := _differences(*shown)), differences

    def metrics(admin: Admin) -> dict[str, Any]:
        found = exported(_home(admin), "metrics.json")
        return {
            "days": found["totalData"]["totalOneDayNum"],
            "version": found["evaluateReport"][BROKER]["runtimeVersion"],
        }

    theirs, ours = both.each(metrics)
    assert theirs["version"] == ours["version"]
    assert all(count in (0, ours["days"][name]) for name, count in theirs["days"].items()), (theirs, ours)


def _home(admin: Admin) -> Any:
    return admin.home


def _without_retries(found: Any) -> Any:
    """A client comes to the queues of its retry topic some time in its first minute."""
    return [one for one in (sorted(found.items()) if isinstance(found, dict) else found) if "%RETRY%" not in str(one)]


def test_the_dashboard_sees_the_same(both: Both) -> None:
    def replay(admin: Admin) -> Any:
        return admin.ask("@dashboard", "T1", "G1", "127.0.0.1@G1", "G2", "GD", "K1",
                         *(admin.places[name] for name in ("unique", "offset", "traced")))  # fmt: skip

    theirs, ours = both.each(replay)
    for one in (theirs, ours):
        del one["broker settings"]["fileReservedTime"]  # the tests set RocketMQ's
        one["topics"] = [name for name in one["topics"] if not _is_own(name)]
        one["types of topics"] = {name: kind for name, kind in one["types of topics"].items() if not _is_own(name)}
        for group in ("G1", "G2"):
            one[f"{group}: topics"] = _without_retries(one[f"{group}: topics"])
            one[f"{group}: progress"] = _without_retries(one[f"{group}: progress"])
            one[f"{group}: groups"] = [name for name in one[f"{group}: groups"] if not _is_own(name)]
    differences = _differences(theirs, ours)
    assert not differences, differences
    assert len(ours) > 60
    assert ours["trace"]
    assert ours["consumed again by unique id"].startswith("CR_SUCCESS")


def test_the_exporter_sees_the_same(both: Both) -> None:
    theirs, ours = both.each(lambda admin: admin.ask("@exporter", "T1", "T2", "Tx", "Popped"))
    for one in (theirs, ours):
        del one["Tx: TOPIC_PUT_SIZE"]  # the server ends transactions without their messages
    for name in theirs:
        if name.split()[-1].endswith(("_NUMS", "_SIZE")):  # of the last minute, which may be over
            both_count = all(isinstance(one[name], list) and one[name][0] for one in (theirs, ours))
            theirs[name], ours[name] = (
                one[name] if both_count or isinstance(one[name], str) else "a figure" for one in (theirs, ours)
            )
    differences = _differences(theirs, ours)
    assert not differences, differences
    for name in (
        "T1@G1: GROUP_GET_NUMS",
        "T2@GD: SNDBCK_PUT_NUMS",
        "Popped@GP: GROUP_ACK_NUMS",
        "Popped@GP: GROUP_CK_NUMS",
    ):
        assert not isinstance(ours[name], str) or ours[name] == "a figure", name


def test_what_mqadmin_changes_is_the_same(both: Both) -> None:
    """The last one: it deletes what the others look at."""

    def files(admin: Admin) -> None:
        topics = [{"topicName": f"L{at}", "readQueueNums": at, "writeQueueNums": at, "perm": 6} for at in (1, 2)]
        (_home(admin) / "topics.json").write_text(json.dumps(topics), encoding="utf-8")
        groups = [{"groupName": f"L{at}", "retryMaxTimes": at} for at in (3, 4)]
        (_home(admin) / "groups.json").write_text(json.dumps(groups), encoding="utf-8")

    both.each(files)
    _compare(both.outputs(commands.CHANGE))
    for command in commands.REFUSED:
        text = both.ours.run(command)
        assert "CODE: 3 " in text, f"{command}: {text}"
