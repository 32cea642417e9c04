"""Goal: settings under RocketMQ's names say what the node does, and refuse what it cannot change; the runtime table has
every key in the form that tools parse. Method: texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq.config import NodeConfig
from commitmq_plugins.rocketmq.broker.admin_server import RuntimeFigures, human_bytes, runtime_table
from commitmq_plugins.rocketmq.broker.broker_config import BrokerConfig, BrokerConfigError, parse_properties
from commitmq_plugins.rocketmq.broker.counting import PutTimes


def _config() -> BrokerConfig:
    return BrokerConfig(NodeConfig(), Path("/s"), "127.0.0.1:10911", ["127.0.0.1:9876"], 8)


def test_what_is_changed_is_shown_and_counts() -> None:
    config = _config()
    config.change({"longPollingEnable": "false", "shortPollingTimeMills": "50", "brokerName": "commitmq"})
    assert (config.long_polling, config.short_polling_ms) == (False, 50)
    assert parse_properties(config.text())["longPollingEnable"] == "false"


@pytest.mark.parametrize(
    "wanted",
    [{"brokerName": "b"}, {"noSuchKey": "1"}, {"shortPollingTimeMills": "soon"}, {"estimateAccumulation": "maybe"}],
)
def test_what_cannot_change_is_refused_as_a_whole(wanted: dict[str, str]) -> None:
    config = _config()
    before = config.text()
    with pytest.raises(BrokerConfigError):
        config.change({"longPollingEnable": "false", **wanted})
    assert config.text() == before
    assert config.long_polling


def test_the_delay_levels_have_rocketmqs_words() -> None:
    shown = parse_properties(_config().text())["messageDelayLevel"]
    assert shown == "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def test_properties_are_read_as_java_writes_them() -> None:
    assert parse_properties("#Wed Nov 25\na=1\n\nns=127.0.0.1\\:9876\n b = x=y \n") == {
        "a": "1",
        "ns": "127.0.0.1:9876",
        "b": "x=y",
    }


def test_the_runtime_table_is_in_the_form_that_tools_parse() -> None:
    rates = (1.5, 1.0, 0.5)
    puts = PutTimes(0.0)
    puts.failed = 3
    puts.add(0.0255, 1.0)
    figures = RuntimeFigures(0, 93_784_000, 10, 50, puts, 61.0, rates, rates, rates, 0, 100, 40, 90, 7, 1 << 40, 1 << 39, "/s",
                             {3: (5, 6)}, (9, 8), ((1, 2), (4, 6)))  # fmt: skip
    table = runtime_table(figures)
    assert table["runtime"] == "[ 1 days, 2 hours, 3 minutes, 4 seconds ]"
    assert [float(one) for one in table["putTps"].split(" ")] == [1.5, 1.0, 0.5]
    assert [float(one) for one in table["getTotalTps"].split(" ")] == [3.0, 2.0, 1.0]
    assert table["scheduleMessageOffset_3"] == "5,6"
    assert [table[f"msgPutTotal{one}"] for one in ("YesterdayMorning", "TodayMorning", "TodayNow")] == ["1", "4", "9"]
    assert [table[f"msgGetTotal{one}"] for one in ("YesterdayMorning", "TodayMorning", "TodayNow")] == ["2", "6", "8"]
    assert table["dispatchBehindBytes"] == "10"
    assert table["remainHowManyDataToFlush"] == "60 B"
    assert table["commitLogDirCapacity"] == "Total : 1.0 TiB, Free : 512.0 GiB."
    assert table["commitLogDirCapacity"].split(" ")[2:4] == ["1.0", "TiB,"]
    classes = [one for one in table["putMessageDistributeTime"].split(" ") if one]
    assert len(classes) == 13
    assert classes[2] == "[10~50ms]:1"
    assert [table[f"putMessage{one}"] for one in ("EntireTimeMax", "FailedTimes")] == ["25", "3"]
    assert [table[f"putLatency{one}"] for one in ("99", "999")] == ["0.00", "0.00"], "as in RocketMQ of one message"
    assert human_bytes(1_536) == "1.5 KiB"
