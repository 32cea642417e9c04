"""Administration of the broker itself: requests 25, 26, 28, 45, 306, 316, 329, 402 and 907 (remoting 1.10)."""

from __future__ import annotations

import shutil
import time

from commitmq.control import DispatcherWord, Word
from commitmq.errors import ProtocolError, StoreError
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.store.metadata import json_config
from commitmq_plugins.rocketmq.broker.admin_queues import Queues
from commitmq_plugins.rocketmq.broker.broker_config import LOCKED, BrokerConfig, ConfigError, parse_properties
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.runtime_info import RuntimeFigures, runtime_table
from commitmq_plugins.rocketmq.remoting.bodies.data_version import DataVersion
from commitmq_plugins.rocketmq.remoting.bodies.routes import kv_table
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler


class AdminBroker:
    """See the module."""

    def __init__(self, node: Node, settings: BrokerConfig, counting: Counting, queues: Queues) -> None:
        self._node, self._settings, self._counting, self._queues = node, settings, counting, queues
        self._started_ms = time.time_ns() // 1_000_000
        self._changes = 0
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.UPDATE_BROKER_CONFIG: self.update,
            RequestCode.GET_BROKER_CONFIG: self.config,
            RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            RequestCode.GET_ALL_DELAY_OFFSET: self.delay_offsets,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clean,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.expire,
            RequestCode.GET_BROKER_HA_STATUS: self.ha_status,
        }

    # ------------------------------------------------------------ settings

    def update(self, connection: Connection, command: Command) -> Command:
        """Request 25."""
        try:
            wanted = parse_properties(bytes(command.body).decode())
            if not LOCKED.isdisjoint(wanted):
                return command.answer(ResponseCode.NO_PERMISSION, "Can not update config in black list.")
            self._settings.change(wanted)
        except (UnicodeDecodeError, ConfigError) as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        self._changes += 1
        return command.answer()

    def config(self, connection: Connection, command: Command) -> Command:
        """Request 26."""
        version = dumps(DataVersion(self._started_ms, self._changes).to_json()).decode()
        return command.answer(ext_fields={"version": version}, body=self._settings.text().encode())

    # ------------------------------------------------------------ state

    async def runtime_info(self, connection: Connection, command: Command) -> Command:
        """Request 28."""
        control, counting = self._node.control, self._counting
        disk = shutil.disk_usage(self._node.layout.root)
        rates = {}
        for name in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS", "BROKER_GET_MISS"):
            minute = counting.broker(name).tps
            rates[name] = (minute, minute, minute)
        figures = RuntimeFigures(
            boot_ms=self._started_ms,
            now_ms=time.time_ns() // 1_000_000,
            put_total=counting.broker_total("BROKER_PUT_NUMS"),
            put_bytes=counting.broker_total("BROKER_PUT_SIZE"),
            puts=counting.puts,
            clock_s=time.monotonic(),
            put_rates=rates["BROKER_PUT_NUMS"],
            found_rates=rates["BROKER_GET_NUMS"],
            missed_rates=rates["BROKER_GET_MISS"],
            log_begin=control.get(Word.MIN_OFFSET),
            log_end=control.get(Word.WRITTEN),
            flushed=control.get(Word.FLUSHED),
            dispatched=control.dispatcher(0, DispatcherWord.DISPATCHED),
            earliest_ms=await self._earliest_ms(),
            disk_total=disk.total,
            disk_free=disk.free,
            log_folder=str(self._node.layout.root / "commitlog"),
            delay_offsets=await self._delay_progress(),
            today=counting.now(),
            mornings=counting.mornings(),
        )
        return command.answer(body=kv_table(runtime_table(figures)))

    async def _earliest_ms(self) -> int:
        """When the oldest message of the log was stored; -1 for an empty log."""
        begin = self._node.control.get(Word.MIN_OFFSET)
        if begin >= self._node.control.get(Word.WRITTEN):
            return -1
        try:
            line = self._node.line("reader-0")
            _, frames = await self._node.exchange(line, "view", {"physical_offset": begin})
        except ProtocolError:
            return -1
        record = b"".join(frames)
        width = 20 if record[39] & 0x10 else 8
        return int.from_bytes(record[48 + width : 56 + width], "big")

    def _delays(self) -> dict[int, int]:
        """Next queue offset of each delay level, as the mover last wrote it."""
        try:
            found = json_config.load(self._node.layout.config / "delayOffset.json") or {}
            return {int(level): int(offset) for level, offset in (found.get("offsetTable") or {}).items()}
        except (StoreError, ValueError, AttributeError):
            return {}

    async def _delay_progress(self) -> dict[int, tuple[int, int]]:
        """Next queue offset and end of each delay level that was used."""
        delays = self._delays()
        if not delays:
            return {}
        try:
            bounds = await self._queues.bounds(SCHEDULE_TOPIC, max(delays))
        except ProtocolError:
            bounds = {}
        return {level: (at, max(at, bounds.get(level - 1, (0, 0))[1])) for level, at in delays.items()}

    def delay_offsets(self, connection: Connection, command: Command) -> Command:
        """Request 45."""
        return command.answer(body=dumps({"offsetTable": {str(level): at for level, at in self._delays().items()}}))

    def ha_status(self, connection: Connection, command: Command) -> Command:
        """Request 907: this broker is a master without slaves."""
        client = {"activated": False, "lastReadTimestamp": 0, "lastWriteTimestamp": 0, "masterFlushOffset": 0,
                  "maxOffset": 0, "transferredByteInSecond": 0}  # fmt: skip
        body = {
            "haClientRuntimeInfo": client,
            "haConnectionInfo": [],
            "inSyncSlaveNums": 0,
            "master": True,
            "masterCommitLogMaxOffset": self._node.control.get(Word.WRITTEN),
        }
        return command.answer(body=dumps(body))

    # ------------------------------------------------------------ cleaning

    def clean(self, connection: Connection, command: Command) -> Command:
        """Requests 306 and 316: the node removes the files of what expired, or was deleted, by itself."""
        return command.answer()

    async def expire(self, connection: Connection, command: Command) -> Command:
        """Request 329: segments of the log that are too old go now, at any hour."""
        await self._node.ask("cleanup", "expire", timeout_s=30.0)
        return command.answer()
