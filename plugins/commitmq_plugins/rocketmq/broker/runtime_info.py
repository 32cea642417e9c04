"""GET_BROKER_RUNTIME_INFO's table: every key of remoting 1.10 in the form that tools parse. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commitmq_plugins.rocketmq.broker.put_times import PutTimes
from commitmq_plugins.rocketmq.remoting.codes import VERSION

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_CAPACITIES: Final = {"send": 10_000, "pull": 100_000, "litePull": 100_000, "query": 20_000, "ack": 100_000}
_END_CAPACITY: Final = 100_000
"""RocketMQ's usual sizes of queues that this server does not have: dashboards show a share of them."""
_POOL_BUFFERS: Final = 2_147_483_647


@dataclass(slots=True)
class RuntimeFigures:
    """What the table is made of. Times in ms, rates per second over 10 s, 60 s and 600 s."""

    boot_ms: int
    now_ms: int
    put_total: int
    put_bytes: int
    puts: PutTimes
    clock_s: float
    """The monotonic time."""
    put_rates: tuple[float, float, float]
    found_rates: tuple[float, float, float]
    missed_rates: tuple[float, float, float]
    log_begin: int
    log_end: int
    flushed: int
    dispatched: int
    earliest_ms: int
    disk_total: int
    disk_free: int
    log_folder: str
    delay_offsets: dict[int, tuple[int, int]]
    today: tuple[int, int]
    """Messages that users sent and got, until now; ``mornings``: when yesterday and when today began."""
    mornings: tuple[tuple[int, int], tuple[int, int]]


def runtime_table(figures: RuntimeFigures) -> dict[str, str]:
    """The table of KVTable."""
    used = 1 - figures.disk_free / figures.disk_total if figures.disk_total else 0.0
    mean = figures.put_bytes / figures.put_total if figures.put_total else 0.0
    total = [found + missed for found, missed in zip(figures.found_rates, figures.missed_rates, strict=True)]
    table = {
        "bootTimestamp": str(figures.boot_ms),
        "runtime": _duration(figures.now_ms - figures.boot_ms),
        "putMessageEntireTimeMax": str(figures.puts.longest_ms),
        "putMessageTimesTotal": str(max(1, figures.put_total)),
        "putMessageFailedTimes": str(figures.puts.failed),
        "putMessageSizeTotal": str(figures.put_bytes),
        "putMessageDistributeTime": figures.puts.classes(figures.clock_s),
        "putMessageAverageSize": str(mean),
        "dispatchMaxBuffer": "0",
        "getMessageEntireTimeMax": "0",
        "putTps": _rates(figures.put_rates),
        "getFoundTps": _rates(figures.found_rates),
        "getMissTps": _rates(figures.missed_rates),
        "getTotalTps": _rates(total),
        "getTransferredTps": _rates(figures.found_rates),
        "putLatency99": f"{figures.puts.share_ms(0.99, figures.clock_s):.2f}",
        "putLatency999": f"{figures.puts.share_ms(0.999, figures.clock_s):.2f}",
        "commitLogDiskRatio": str(used),
        f"commitLogDiskRatio_{figures.log_folder}": str(used),
        "consumeQueueDiskRatio": str(used),
        "commitLogMinOffset": str(figures.log_begin),
        "commitLogMaxOffset": str(figures.log_end),
        "brokerActive": "true",
        "brokerVersionDesc": "V5_4_0",
        "brokerVersion": str(VERSION),
        "dispatchBehindBytes": str(max(0, figures.log_end - figures.dispatched)),
        "pageCacheLockTimeMills": "0",
        "earliestMessageTimeStamp": str(figures.earliest_ms),
        "startAcceptSendRequestTimeStamp": "0",
        "timerReadBehind": "0",
        "timerOffsetBehind": "0",
        "timerCongestNum": "0",
        "timerEnqueueTps": "0.0",
        "timerDequeueTps": "0.0",
        "remainTransientStoreBufferNumbs": str(_POOL_BUFFERS),
        "remainHowManyDataToFlush": human_bytes(max(0, figures.log_end - figures.flushed)),
        "commitLogDirCapacity": f"Total : {human_bytes(figures.disk_total)}, Free : {human_bytes(figures.disk_free)}.",
        "EndTransactionQueueSize": "0",
        "EndTransactionThreadPoolQueueCapacity": str(_END_CAPACITY),
    }
    yesterday, today = figures.mornings
    for at, kind in enumerate(("Put", "Get")):
        table[f"msg{kind}TotalYesterdayMorning"] = str(yesterday[at])
        table[f"msg{kind}TotalTodayMorning"] = str(today[at])
        table[f"msg{kind}TotalTodayNow"] = str(figures.today[at])
    for kind, capacity in _CAPACITIES.items():
        table[f"{kind}ThreadPoolQueueSize"] = table[f"{kind}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        table[f"{kind}ThreadPoolQueueCapacity"] = str(capacity)
    for level, (offset, end) in figures.delay_offsets.items():
        table[f"scheduleMessageOffset_{level}"] = f"{offset},{end}"
    return table


def human_bytes(count: int) -> str:
    """As RocketMQ shows a number of bytes: ``0 B``, ``1.5 KiB``."""
    if count < 1_024:
        return f"{count} B"
    value, unit = float(count), -1
    while value >= 1_024 and unit + 1 < len(_UNITS):
        value, unit = value / 1_024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def _duration(ms: int) -> str:
    seconds = max(0, ms) // 1_000
    days, hours, minutes = seconds // 86_400, seconds // 3_600 % 24, seconds // 60 % 60
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]"


def _rates(rates: tuple[float, ...] | list[float]) -> str:
    return " ".join(str(float(rate)) for rate in rates)
