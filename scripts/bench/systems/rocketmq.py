"""RocketMQ: a name server and a broker of the published artifacts, and their Java client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.system import HOST, Command, Durability, Server, free_port, free_ports
from bench.systems import jvm

# The start script of the release has the same flags but a heap of 8 GB, and AlwaysPreTouch, which would show as memory
# that an idle broker takes.
_BROKER_FLAGS = {
    "-Xms": "4g",
    "-Xmx": "4g",
    "-XX:+UseG1GC": "",
    "-XX:G1HeapRegionSize=": "16m",
    "-XX:G1ReservePercent=": "25",
    "-XX:InitiatingHeapOccupancyPercent=": "30",
    "-XX:SoftRefLRUPolicyMSPerMB=": "0",
    "-XX:-OmitStackTraceInFastThrow": "",
    "-XX:MaxDirectMemorySize=": "4g",
}
_NAME_SERVER_FLAGS = {"-Xms": "256m", "-Xmx": "256m"}

_BROKER = {
    # A batch of 1000 messages of 4 KiB is larger than the default of 4 MiB.
    "maxMessageSize": str(16 << 20),
    # Sends that wait longer are refused; under a full load of this benchmark they would be, by the default of 200 ms.
    "waitTimeMillsInSendQueue": "10000",
    "sendThreadPoolQueueCapacity": "100000",
    # One pull gets 32 messages or 256 KiB by default, and 8 or 64 KiB when they are older than the messages in memory.
    "maxTransferCountOnMessageInMemory": "4096",
    "maxTransferBytesOnMessageInMemory": str(4 << 20),
    "maxTransferCountOnMessageInDisk": "4096",
    "maxTransferBytesOnMessageInDisk": str(4 << 20),
    # This release's TransactionMetricsFlushService spins until this interval has passed once since the start of the
    # broker (apache/rocketmq issue 10515): by the default of 10 s, one core is gone for 10 s.
    "transactionMetricFlushInterval": "1000",
}

# Its accumulator makes batches of single messages that are sent without waiting, several times as fast. The sizes and the
# time are Kafka's here.
_AUTO_BATCH = {"autoBatch": "true", "batchMaxBytes": str(256 << 10), "totalBatchMaxBytes": str(128 << 20)}

_CLIENTS = {
    "producer": {
        "maxMessageSize": str(16 << 20),
        # Late is not lost.
        "sendMsgTimeout": "30000",
        # Bodies of 4 KiB and more are compressed by default; no other client does this by default.
        "compressMsgBodyOverHowmuch": str(2**31 - 1),
        # A failed send counts as failed.
        "retryTimesWhenSendFailed": "0",
        "retryTimesWhenSendAsyncFailed": "0",
    },
    "producer, pipeline": {**_AUTO_BATCH, "batchMaxDelayMs": "5"},
    "producer, rate": {**_AUTO_BATCH, "batchMaxDelayMs": "1"},
    "producer, batch": {"messages outstanding": "4000"},
    "consumer": {"maxNums of a pull": "4096", "messages fetched ahead": "20000"},
    # A client learns of its group's retry topic after 30 s by default: only the warm-up is shorter by this.
    "handler": {"pollNameServerInterval": "1000"},
}
# As the setting above; each turn takes the queues of topics that the client has learnt of.
_DRIVER_FLAGS = {**jvm.DRIVER_FLAGS, "-Drocketmq.client.rebalance.waitInterval=": "1000"}


BROKER_NAME: Final = "bench"
"""The driver names it in requests."""


def client_settings() -> dict[str, str]:
    """All settings of the clients with other values than the defaults."""
    found = {"clients: warm-up": jvm.WARM_UP}
    found["client JVM"] = " ".join(name + value for name, value in _DRIVER_FLAGS.items())
    for section, values in _CLIENTS.items():
        found |= {f"{section}: {key}": value for key, value in values.items()}
    return found


def driver(folder: Path) -> list[str]:
    """Command line of the client, which writes its log below its home folder."""
    flags = {**_DRIVER_FLAGS, "-Duser.home=": str(folder / "client")}
    return [*jvm.java("rocketmq", "commitmq.bench.rocketmq.RocketMqDriver", flags), json.dumps(_CLIENTS)]


class RocketMQ:
    """Apache RocketMQ."""

    name = "RocketMQ"
    works = frozenset(
        {"send", "pipeline", "batch", "read", "end_to_end", "mixed", "query", "ready"}
        | {"delayed", "timers", "timers_ready", "transactions", "share", "retry", "push", "connections"}
    )

    @property
    def version(self) -> str:
        """The versions of broker and client."""
        return jvm.version("rocketmq")

    def missing(self) -> str | None:
        """The reason why it cannot run here."""
        return jvm.missing()

    def install(self) -> None:
        """Build the Java project."""
        jvm.install()

    def settings(self, durability: Durability) -> dict[str, str]:
        """All settings with other values than the defaults."""
        flags = " ".join(name + value for name, value in _BROKER_FLAGS.items())
        found = {"broker JVM": flags, **{f"broker: {key}": value for key, value in _broker(durability).items()}}
        found["name server JVM"] = " ".join(name + value for name, value in _NAME_SERVER_FLAGS.items())
        return {**found, **client_settings()}

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """Name server and broker; ``hints`` are not used."""
        return _Server(folder, durability).launch()


def _broker(durability: Durability) -> dict[str, str]:
    return {"flushDiskType": "SYNC_FLUSH" if durability == "flushed" else "ASYNC_FLUSH", **_BROKER}


class _Server(Server):
    ready_within_s = 120.0

    def __init__(self, folder: Path, durability: Durability) -> None:
        super().__init__(folder)
        self._home = folder / "home"
        self._store = folder / "store"
        self._name_server_port = free_port()
        # It listens at two below its port as well, and at one above it.
        self._broker_port = free_ports(4) + 2
        self._name_server_conf = folder / "namesrv.conf"
        self._broker_conf = folder / "broker.conf"
        self._log_bytes = 0
        self._home.mkdir()
        _write(
            self._name_server_conf,
            {
                "listenPort": str(self._name_server_port),
                "bindAddress": HOST,
                "kvConfigPath": str(self._home / "kvConfig.json"),
            },
        )
        _write(
            self._broker_conf,
            {
                "brokerClusterName": "bench",
                "brokerName": BROKER_NAME,
                "brokerId": "0",
                "brokerIP1": HOST,
                "brokerIP2": HOST,
                "bindAddress": HOST,
                "listenPort": str(self._broker_port),
                "haListenPort": str(self._broker_port + 1),
                "namesrvAddr": self.address,
                "storePathRootDir": str(self._store),
                "storePathCommitLog": str(self._store / "commitlog"),
                **_broker(durability),
            },
        )

    @property
    def address(self) -> str:
        """The address of the name server, which knows the broker's."""
        return f"{HOST}:{self._name_server_port}"

    def commands(self) -> list[Command]:
        log = self.folder / "broker.log"
        self._log_bytes = log.stat().st_size if log.exists() else 0
        home = {"-Duser.home=": str(self._home), "-Drocketmq.home.dir=": str(self._home)}
        name_server = jvm.java("rocketmq", "org.apache.rocketmq.namesrv.NamesrvStartup", {**_NAME_SERVER_FLAGS, **home})
        broker = jvm.java("rocketmq", "org.apache.rocketmq.broker.BrokerStartup", {**_BROKER_FLAGS, **home})
        return [
            Command("namesrv", [*name_server, "-c", str(self._name_server_conf)]),
            Command("broker", [*broker, "-c", str(self._broker_conf)]),
        ]

    def is_ready(self) -> bool:
        # Its port is open before that, but before it has registered itself with the name server no client finds it.
        with (self.folder / "broker.log").open("rb") as log:
            log.seek(self._log_bytes)
            return b"boot success" in log.read()

    @property
    def broker_port(self) -> int:
        return self._broker_port

    def driver(self) -> list[str]:
        return driver(self.folder)

    def store_files(self) -> Iterator[Path]:
        return (path for path in self._store.rglob("*") if path.is_file())


def _write(path: Path, settings: dict[str, str]) -> None:
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
