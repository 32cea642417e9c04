"""The node's configuration: every key, its type, default and limits, in one place.

``config/node.toml`` lists the same keys, each with a one-line reason; a test compares the two. Where
values come from: :mod:`commitmq.config.loading`. An unknown key, a wrong type or a value out of range raises a
:class:`ConfigError` that names the key; nothing is silently ignored.

The settings that give a store's files their sizes bind only a store that has none yet: see
:mod:`commitmq.store.geometry`, and :attr:`NodeConfig.given` for the settings that bind every store.

Defaults follow RocketMQ where it has the same setting (named in the comments of ``node.toml``), except for the sizes of
segments and index files: the profile ``server`` has RocketMQ's, and the default profile is for a laptop.

Profiles: sets of defaults for machines of different sizes. A profile sets only the sizes of a *new* store, and the
memory and disk space taken in advance. An existing store keeps its sizes, and every given key overrides the profile.

    key                              dev      small (default)   server
    commit_log.segment_bytes         16 MiB   64 MiB            1 GiB        RocketMQ's own default is server's
    commit_log.preallocate_segments  1        1                 2
    commit_log.warm_ahead_bytes      8 MiB    32 MiB            64 MiB
    index.hash_slots                 50,000   1,000,000         5,000,000
    index.max_items                  200,000  4,000,000         20,000,000
    memory.budget_bytes              32 MiB   0 (75 % of the available memory)
    memory.segment_bytes             4 MiB    16 MiB            16 MiB
    disk after the first message     40 MiB   140 MiB           3.1 GiB

RocketMQ opens a store only with the sizes of its own configuration: the sizes of ``server`` are its defaults; for
another profile its configuration needs them (``mappedFileSizeCommitLog``, ``maxHashSlotNum``, ``maxIndexNum``).

Sizes and times may have units: ``64MiB``, ``1GB``, ``500ms``, ``3d``. A setting's name says its unit (``segment_bytes``,
``flush_interval_ms``, ``hours``), and a plain number counts that unit. A number with another unit is converted, and refused
unless the result is a whole number: ``500ms`` is not a whole number of seconds. Sizes: ``B``, ``KB MB GB TB`` are powers of
1000, ``KiB MiB GiB TiB`` of 1024. Times: ``us ms s min h d w``. Case does not matter.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, Final

from commitmq.errors import ConfigError

SIZES: Final = {"B": 1, **{f"{prefix}B": 1000**at for at, prefix in enumerate("KMGT", 1)},
                **{f"{prefix}iB": 1024**at for at, prefix in enumerate("KMGT", 1)}}  # fmt: skip
# In microseconds, the smallest unit that any setting counts.
TIMES: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_SIZES_OF_NAMES: Final = {"bytes": 1, "mib": 1 << 20, "gib": 1 << 30}
_TIMES_OF_NAMES: Final = {"us": 1, "ms": 1_000, "s": 1_000_000, "hours": 3_600_000_000}
_TEXT: Final = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_WORDS: Final = {
    "bytes": "bytes", "mib": "MiB", "gib": "GiB", "us": "microseconds", "ms": "milliseconds", "s": "seconds",
    "hours": "hours",
}  # fmt: skip


def unit_of(name: str) -> str:
    """The unit that the numbers of the setting ``name`` count, as the end of its name says; "" for a plain number."""
    last = name.rpartition("_")[2]
    return last if last in _WORDS else ""


def word_of(unit: str) -> str:
    """``unit`` in words: "bytes", "milliseconds"."""
    return _WORDS[unit]


def accepted(unit: str) -> str:
    """Part of an error message: how a value that counts ``unit`` may be written."""
    table = SIZES if unit in _SIZES_OF_NAMES else TIMES
    example = "64MiB" if table is SIZES else "500ms" if unit in ("us", "ms") else "3d"
    return f"a number of {_WORDS[unit]}, or one with a unit ({', '.join(table)}), as in {example}"


def parse(text: str, unit: str) -> int:
    """``text`` as a whole number of ``unit`` (see :func:`unit_of`). Raises ValueError with the accepted forms."""
    exact = _exact(text, unit)
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of {_WORDS[unit]}; write {accepted(unit)}")
    return int(exact)


def parse_float(text: str, unit: str) -> float:
    """``text`` as a number of ``unit``; it need not be a whole number. Raises ValueError."""
    return float(_exact(text, unit))


def _exact(text: str, unit: str) -> Fraction:
    table, base = (SIZES, _SIZES_OF_NAMES) if unit in _SIZES_OF_NAMES else (TIMES, _TIMES_OF_NAMES)
    found = _TEXT.fullmatch(text.strip())
    factor = None
    if found is not None:
        wanted = found[2].lower()
        factor = (
            base[unit] if not wanted else next((value for name, value in table.items() if name.lower() == wanted), None)
        )
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not {accepted(unit)}")
    return Fraction(found[1].replace("_", "")) * factor / base[unit]


def human(count: int) -> str:
    """``count`` bytes as a setting writes them, exactly: ``64MiB``, ``131072``."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % SIZES[name] == 0:
            return f"{count // SIZES[name]}{name}"
    return str(count)


DEFAULT_PROFILE: Final = "small"

PROFILES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "dev": {
        "commit_log": {"segment_bytes": 16 << 20, "preallocate_segments": 1, "warm_ahead_bytes": 8 << 20},
        "index": {"hash_slots": 50_000, "max_items": 200_000},
        "memory": {"budget_bytes": 32 << 20, "segment_bytes": 4 << 20},
    },
    # The defaults of commitmq.config themselves.
    DEFAULT_PROFILE: {},
    "server": {
        "commit_log": {"segment_bytes": 1 << 30, "preallocate_segments": 2, "warm_ahead_bytes": 64 << 20},
        "index": {"hash_slots": 5_000_000, "max_items": 20_000_000},
    },
}


_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
MEMORY_LEAST_SEGMENTS = 4  # with fewer segments, evicting one would evict a large part of all messages


def setting(
    default: bool | int | float | str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a plugin's configuration dataclass: its default (which gives the type) and its limits."""
    return _key(default, low, high, choices)


def _key(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    *,
    live: bool = False,
) -> Any:
    """``live``: the processes take another value while they run (:mod:`commitmq.config.loading`)."""
    return field(default=default, metadata={"low": low, "high": high, "choices": choices, "live": live})


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    host: str = _key("127.0.0.1")
    port: int = _key(7310, 0, 65535)
    advertised_host: str = _key("")
    store_host: str = _key("127.0.0.1")
    store_port: int = _key(10911, 1, 65535)
    cluster_name: str = _key("DefaultCluster")
    broker_name: str = _key("commitmq")
    max_frame_bytes: int = _key(64 * 1024 * 1024, 65536)
    max_local_connections: int = _key(1_024, 0, 65_536)
    max_connections: int = _key(2_000, 16, 100_000)
    max_client_connections: int = _key(1_500, 8, 100_000)
    first_request_timeout_ms: int = _key(10_000, 100, 86_400_000)
    max_pending_bytes: int = _key(256 * 1024 * 1024, 1024 * 1024)
    max_growth_bytes: int = _key(64 * 1024 * 1024, 1024 * 1024)
    max_unsent_bytes: int = _key(256 * 1024 * 1024, 1024 * 1024)


@dataclass(frozen=True, slots=True)
class CommitLogConfig:
    segment_bytes: int = _key(64 * 1024 * 1024, 65536)
    max_message_bytes: int = _key(4 * 1024 * 1024, 10)
    max_run_bytes: int = _key(16 * 1024 * 1024, 4096)
    append_properties_crc: bool = _key(True)
    flush_mode: str = _key("sync", choices=("sync", "async"))
    flush_interval_ms: int = _key(500, 1)
    flush_least_pages: int = _key(4, 0)
    flush_thorough_interval_ms: int = _key(10_000, 1)
    sync_flush_timeout_ms: int = _key(5_000, 1)
    writer_sync_bytes: int = _key(65_536, 0)
    writer_sync_slow_ms: int = _key(20, 1)
    max_clock_lead_ms: int = _key(10_800_000, 1_000)
    max_mapped_segments: int = _key(64, 2)
    populate_window_bytes: int = _key(4 * 1024 * 1024, 0)
    preallocate_segments: int = _key(1, 0, 16)
    warm_ahead_bytes: int = _key(32 * 1024 * 1024, 0)
    mlock: bool = _key(False)
    transient_store_pool: bool = _key(False)
    transient_store_pool_size: int = _key(5, 2, 128)
    commit_least_pages: int = _key(4, 0)
    commit_thorough_interval_ms: int = _key(200, 1)
    allow_cut: int = _key(-1, -1)


@dataclass(frozen=True, slots=True)
class ConsumeQueueConfig:
    file_bytes: int = _key(6_000_000, 20)
    enable_ext: bool = _key(False)
    ext_file_bytes: int = _key(50_331_648, 64, 1 << 31)
    enable_filter_bit_map: bool = _key(False)
    flush_interval_ms: int = _key(1_000, 1)
    flush_least_pages: int = _key(2, 0)
    flush_thorough_interval_ms: int = _key(60_000, 1)
    max_open_files: int = _key(16_384, 8)
    batch_file_bytes: int = _key(13_800_000, 46)
    enable_lmq: bool = _key(False)
    enable_multi_dispatch: bool = _key(False)
    max_lmq_queues: int = _key(20_000, 1)


@dataclass(frozen=True, slots=True)
class IndexConfig:
    enable: bool = _key(True)
    hash_slots: int = _key(1_000_000, 1)
    max_items: int = _key(4_000_000, 2)


@dataclass(frozen=True, slots=True)
class ProducersConfig:
    max_entries: int = _key(50_000, 1)
    window: int = _key(8, 1, 1024)
    expiry_ms: int = _key(604_800_000, 1_000)
    snapshot_bytes: int = _key(256 * 1024 * 1024, 65536)
    snapshot_interval_ms: int = _key(60_000, 10)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    enable: bool = _key(True)
    exactly_once: bool = _key(True)
    batch_messages: int = _key(4_096, 1, 1_000_000)
    persist_interval_ms: int = _key(5_000, 10)


@dataclass(frozen=True, slots=True)
class TimerConfig:
    enable: bool = _key(True)
    exactly_once: bool = _key(True)
    max_delay_ms: int = _key(259_200_000, 1_000, 31_536_000_000)
    roll_window_s: int = _key(172_800, 2, 604_740)
    slot_messages: int = _key(2_147_483_647, 1, 2_147_483_647)
    batch_messages: int = _key(8_192, 1, 1_000_000)
    persist_interval_ms: int = _key(1_000, 10)
    log_file_bytes: int = _key(100 * 1024 * 1024, 1_040)


@dataclass(frozen=True, slots=True)
class PopConfig:
    enable: bool = _key(True)
    exactly_once: bool = _key(True)
    revive_queues: int = _key(8, 1, 256)
    retry_topics_v2: bool = _key(False)
    read_retry_topics_v1: bool = _key(True)
    min_invisible_ms: int = _key(2_000, 2_000)
    max_invisible_ms: int = _key(43_200_000, 2_000, 172_800_000)
    max_messages: int = _key(256, 1, 4_096)
    max_bytes: int = _key(4 * 1024 * 1024, 1, 64 * 1024 * 1024)
    max_wait_ms: int = _key(60_000, 0, 600_000)
    max_parked: int = _key(10_000, 1)
    max_acks: int = _key(1_024, 1, 65_536)
    max_groups: int = _key(10_000, 1, 1_000_000)
    max_ordered_queues: int = _key(10_000, 1, 1_000_000)
    max_in_flight: int = _key(1_000_000, 1)
    max_in_flight_of_group: int = _key(200_000, 1)
    max_in_flight_of_queue: int = _key(20_000, 1)
    max_in_flight_of_client: int = _key(20_000, 1)
    commit_interval_ms: int = _key(200, 10)
    persist_interval_ms: int = _key(1_000, 10)


@dataclass(frozen=True, slots=True)
class TransactionConfig:
    enable: bool = _key(True)
    exactly_once: bool = _key(True)
    timeout_ms: int = _key(6_000, 1)
    check_interval_ms: int = _key(30_000, 10)
    check_max: int = _key(15, 1, 10_000)
    op_interval_ms: int = _key(3_000, 1)
    op_max_bytes: int = _key(4_096, 32, 65_536)
    batch_messages: int = _key(256, 1, 10_000)
    session_timeout_ms: int = _key(15_000, 100)
    max_producers: int = _key(10_000, 1)
    max_producers_per_user: int = _key(2_500, 1)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    enable: bool = _key(True)
    budget_bytes: int = _key(0, 0)
    segment_bytes: int = _key(16 * 1024 * 1024, 256 * 1024)
    folder: str = _key("")


@dataclass(frozen=True, slots=True)
class TopicsConfig:
    auto_create: bool = _key(True, live=True)
    default_queues: int = _key(4, 1, 1024, live=True)
    max_topics: int = _key(100_000, 1, live=True)
    snapshot_interval_ms: int = _key(1_000, 10)
    max_deleted: int = _key(100_000, 1)
    reply_queues: int = _key(8, 1, 256)
    delete_timeout_ms: int = _key(5_000, 1, live=True)


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    count: int = _key(1, 1, 16)
    max_pull_messages: int = _key(8_192, 1)
    max_pull_bytes: int = _key(8 * 1024 * 1024, 4096)
    max_query_messages: int = _key(64, 1, 8_192)
    max_query_items: int = _key(100_000, 1_000)
    max_wait_ms: int = _key(30_000, 0)
    max_parked_pulls: int = _key(100_000, 1)
    max_parked_bytes: int = _key(64 * 1024 * 1024, 4_096)
    sweep_interval_ms: int = _key(1_000, 1)


@dataclass(frozen=True, slots=True)
class FlowConfig:
    client_send_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    client_send_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    topic_send_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    topic_send_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    client_pull_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    client_pull_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    topic_pull_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    topic_pull_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    group_pull_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    group_pull_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    user_send_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    user_send_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    user_pull_messages_per_s: int = _key(0, 0, 1 << 40, live=True)
    user_pull_bytes_per_s: int = _key(0, 0, 1 << 50, live=True)
    user_topics: int = _key(0, 0, 1 << 40, live=True)
    user_groups: int = _key(0, 0, 1 << 40, live=True)
    user_connections: int = _key(0, 0, 1 << 40, live=True)
    user_pending_bytes: int = _key(0, 0, 1 << 50, live=True)
    send_queue_wait_ms: int = _key(0, 0, 60_000)
    page_cache_busy_ms: int = _key(0, 0, 60_000)
    max_buckets: int = _key(10_000, 1, 1_000_000)
    refuse_sends: bool = _key(False, live=True)


@dataclass(frozen=True, slots=True)
class FilterConfig:
    sql_enabled: bool = _key(True)
    max_compiled: int = _key(1_024, 1)
    max_subscriptions: int = _key(4_096, 0)
    max_kept_expression_bytes: int = _key(4_096, 0, 65_536)
    max_kept_bytes: int = _key(4 * 1024 * 1024, 0)


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    auto_create: bool = _key(True, live=True)
    heartbeat_interval_ms: int = _key(1_000, 50, live=True)
    session_timeout_ms: int = _key(6_000, 200, live=True)
    disconnect_grace_ms: int = _key(2_000, 0, live=True)
    offsets_interval_ms: int = _key(5_000, 50)
    max_groups: int = _key(10_000, 1, live=True)
    max_group_settings_bytes: int = _key(65_536, 1_024, 1 << 30, live=True)
    max_settings_bytes: int = _key(8 * 1024 * 1024, 1_024, 1 << 30, live=True)
    max_members_per_group: int = _key(1_000, 1, live=True)
    max_topics_per_member: int = _key(1_024, 1, live=True)
    max_member_bytes: int = _key(1024 * 1024, 4_096, live=True)
    max_membership_bytes: int = _key(128 * 1024 * 1024, 65_536, live=True)
    max_listed_clients: int = _key(5_000, 1, 1_000_000, live=True)


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    batch_messages: int = _key(16_384, 1)
    batch_bytes: int = _key(32 * 1024 * 1024, 65536)
    queue_batches: int = _key(8, 1)
    coalesce_us: int = _key(300, 0, 100_000)
    unawaited_coalesce_us: int = _key(10_000, 0, 1_000_000)
    park_after: int = _key(5, 2, 100)
    plugin_memory_bytes: int = _key(1024**3, 32 * 1024 * 1024)
    plugin_niceness: int = _key(5, 0, 19)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    warning_ratio: float = _key(0.90, 0.35, 1.0, live=True)
    check_interval_ms: int = _key(500, 10)


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    hours: int = _key(72, 0, live=True)
    delete_when: str = _key("04", live=True)
    clean_ratio: float = _key(0.75, 0.10, 1.0, live=True)
    forced_ratio: float = _key(0.85, 0.30, 1.0, live=True)
    clean_forcibly: bool = _key(True, live=True)
    store_bytes: int = _key(0, 0, live=True)
    keep_unconsumed: bool = _key(False, live=True)
    batch_files: int = _key(10, 1, live=True)
    check_interval_ms: int = _key(10_000, 10, live=True)
    delete_interval_ms: int = _key(100, 0, 60_000, live=True)

    @property
    def hours_of_day(self) -> frozenset[int]:
        """``delete_when`` as numbers. Raises ValueError when it is no list of hours."""
        return frozenset(int(part) for part in self.delete_when.split(";") if part.strip())


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    poll_interval_ms: int = _key(200, 10, 1_000)
    status_age_ms: int = _key(200, 0, 60_000)
    restart_backoff_ms: int = _key(100, 1, live=True)
    restart_backoff_max_ms: int = _key(10_000, 1, live=True)
    restart_window_s: int = _key(60, 1, live=True)
    start_timeout_s: int = _key(120, 1)
    stop_timeout_s: int = _key(60, 1, live=True)
    hang_timeout_s: int = _key(60, 2, live=True)
    plugin_load_timeout_s: int = _key(10, 1)
    server_wait_s: int = _key(5, 0, 3_600)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    enable: bool = _key(False)
    host: str = _key("127.0.0.1")
    port: int = _key(9311, 0, 65_535)
    token_file: str = _key("")
    age_ms: int = _key(1_000, 0, 3_600_000)
    queue_topics: str = _key("")
    top_queues: int = _key(50, 0, 10_000)
    idle_after_s: int = _key(3_600, 1)
    max_series: int = _key(50_000, 1_000, 1_000_000)
    max_counts: int = _key(10_000, 100, 1_000_000)
    max_positions: int = _key(20_000, 100, 1_000_000)
    max_connections: int = _key(32, 1, 10_000)
    max_request_bytes: int = _key(8_192, 512, 1_048_576)
    timeout_ms: int = _key(10_000, 100, 600_000)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    insecure_listeners: str = _key("")
    local_users: str = _key("")


@dataclass(frozen=True, slots=True)
class AuditConfig:
    enable: bool = _key(True)
    max_file_bytes: int = _key(16 * 1024 * 1024, 65_536)
    max_files: int = _key(10, 2, 1_000)
    refusals_per_second: int = _key(20, 0, 100_000)
    changes_per_second: int = _key(100, 0, 100_000)
    user_bytes_per_second: int = _key(2_048, 64, 1 << 30)
    uses_per_hour: int = _key(10_000, 0, 1_000_000)


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = _key("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), live=True)
    format: str = _key("text", choices=("text", "json"))
    max_bytes: int = _key(16 * 1024 * 1024, 65_536, live=True)
    files: int = _key(10, 2, 1_000, live=True)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The whole configuration; immutable, so that every process of a node works from the same values."""

    profile: str = DEFAULT_PROFILE
    network: NetworkConfig = field(default_factory=NetworkConfig)
    commit_log: CommitLogConfig = field(default_factory=CommitLogConfig)
    consume_queue: ConsumeQueueConfig = field(default_factory=ConsumeQueueConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    producers: ProducersConfig = field(default_factory=ProducersConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    timer: TimerConfig = field(default_factory=TimerConfig)
    pop: PopConfig = field(default_factory=PopConfig)
    transaction: TransactionConfig = field(default_factory=TransactionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    log: LogConfig = field(default_factory=LogConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The sections ``[plugins.NAME]``; their plugins check them (see :mod:`commitmq.plugin.loading`)."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Keys (``section.key``) that a user set: all keys of ``--set`` and of the environment, and those keys of a file
    that differ from the default, because ``node.toml`` lists every key. A given size must agree with the store's files.
    """
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each key that was given has its value from, in words: ``file /etc/node.toml``, ``environment NAME``,
    ``--set``, ``config set``; ``plugins.NAME.key`` too.
    """

    @property
    def sync_flush(self) -> bool:
        """True when an ack of ``flushed`` waits for fdatasync and consumers see flushed messages only."""
        return self.commit_log.flush_mode == "sync"

    def to_dict(self) -> dict[str, Any]:
        """Plain ``{"profile": name, section: {key: value}}``, fit for JSON and for :func:`from_mapping`."""
        values: dict[str, Any] = {"profile": self.profile}
        values |= {
            section.name: {key.name: getattr(getattr(self, section.name), key.name) for key in fields(section_value)}
            for section in fields(self)
            if is_dataclass(section_value := getattr(self, section.name))
        }
        if self.plugins:
            values["plugins"] = {name: dict(section) for name, section in self.plugins.items()}
        return values


def of_profile(name: str) -> NodeConfig:
    return from_mapping(PROFILES[name], base=NodeConfig(profile=name), where=f"profile {name}")


def profile_name(name: Any, where: str) -> str:
    """``name``, which is a profile's. Raises ConfigError."""
    if name not in PROFILES:
        raise ConfigError(f"{where}: profile={name!r} must be one of {', '.join(PROFILES)}")
    return str(name)


def from_mapping(
    data: Mapping[str, Any], *, base: NodeConfig | None = None, where: str = "configuration"
) -> NodeConfig:
    """A config with ``{section: {key: value}}`` laid over ``base``, or over the profile that ``data`` names."""
    config = base or of_profile(profile_name(data.get("profile", DEFAULT_PROFILE), where))
    for section_name, values in data.items():
        if section_name == "profile":
            continue
        if section_name == "plugins":
            config = with_plugins(config, values, where)
            continue
        section = section_of(config, section_name, where)
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: [{section_name}] must be a table of keys")
        changed = section
        for key, value in values.items():
            changed = replace(changed, **{key: checked(section, section_name, key, value, where)})
        config = replace(config, **{section_name: changed})
    return config


def validated(config: NodeConfig) -> NodeConfig:
    """``config`` unchanged, after a check of the rules that span several keys. Raises ConfigError."""
    log = config.commit_log
    if log.segment_bytes % 4096:
        raise ConfigError(f"commit_log.segment_bytes={log.segment_bytes} must be a multiple of the 4096-byte page")
    if config.groups.session_timeout_ms < 2 * config.groups.heartbeat_interval_ms:
        raise ConfigError(
            f"groups.session_timeout_ms={config.groups.session_timeout_ms} must be at least twice "
            f"groups.heartbeat_interval_ms={config.groups.heartbeat_interval_ms}, or a single late heartbeat ends a session"
        )
    if config.network.max_frame_bytes < log.max_run_bytes + 65536:
        raise ConfigError("network.max_frame_bytes must exceed commit_log.max_run_bytes by at least 65536")
    _check_advertised_host(config.network)
    _check_retention(config.retention)
    memory = config.memory
    if memory.segment_bytes % 4096:
        raise ConfigError(f"memory.segment_bytes={memory.segment_bytes} must be a multiple of the 4096-byte page")
    if memory.budget_bytes and memory.budget_bytes < MEMORY_LEAST_SEGMENTS * memory.segment_bytes:
        raise ConfigError(
            f"memory.budget_bytes={memory.budget_bytes} must hold {MEMORY_LEAST_SEGMENTS} segments of"
            f" memory.segment_bytes={memory.segment_bytes}: make the segments smaller, or the budget larger"
        )
    queues = config.consume_queue
    if queues.enable_multi_dispatch and not queues.enable_lmq:
        raise ConfigError(
            "consume_queue.enable_multi_dispatch needs consume_queue.enable_lmq: the queues it fills are LMQs"
        )
    # RocketMQ rounds a ConsumeQueue file up to whole units (spec 1.3). CommitMQ must do the same, or their file names
    # differ.
    units_bytes = -(-queues.file_bytes // 20) * 20
    batch_bytes = -(-queues.batch_file_bytes // 46) * 46
    if (units_bytes, batch_bytes) != (queues.file_bytes, queues.batch_file_bytes):
        queues = replace(queues, file_bytes=units_bytes, batch_file_bytes=batch_bytes)
        config = replace(config, consume_queue=queues)
    return config


def _check_advertised_host(network: NetworkConfig) -> None:
    """Refuse an advertised host that is not a host alone, or that no client could connect to."""
    host = network.advertised_host
    label = f"network.advertised_host={host!r}"
    if not host:
        return
    if host in ("*", "0.0.0.0", "::"):
        raise ConfigError(f"{label} is no address that a client can connect to; write the one that clients reach")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        if len(host) > 253 or not all(_HOST_LABEL.fullmatch(one) for one in labels) or labels[-1].isdigit():
            raise ConfigError(
                f"{label} must be a host name or an IP address alone, without scheme, port or brackets"
            ) from None


def _check_retention(retention: RetentionConfig) -> None:
    try:
        hours = retention.hours_of_day
    except ValueError:
        hours = frozenset({-1})
    if not all(0 <= hour <= 23 for hour in hours):
        raise ConfigError(
            f'retention.delete_when={retention.delete_when!r} must be hours from 0 to 23, as in "04" or "04;16"'
        )
    if retention.clean_ratio > retention.forced_ratio:
        raise ConfigError(
            f"retention.clean_ratio={retention.clean_ratio} must not exceed retention.forced_ratio="
            f"{retention.forced_ratio}: expired files are deleted before others"
        )


def with_plugins(config: NodeConfig, sections: Any, where: str) -> NodeConfig:
    """``config`` with the values of ``[plugins.NAME]`` sections laid over its own; only their plugins can check them."""
    if not isinstance(sections, Mapping) or not all(isinstance(values, Mapping) for values in sections.values()):
        raise ConfigError(f"{where}: [plugins] holds one table for each plugin, as in [plugins.NAME]")
    merged = {name: dict(values) for name, values in config.plugins.items()}
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    return replace(config, plugins=merged)


def section_from(schema: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass ``schema`` with ``values`` laid over its defaults, each checked. Raises ConfigError
    for an unknown key, a wrong type, a value out of range, or a refusal by ``schema.check()``.
    """
    section = schema()
    for key, value in values.items():
        section = replace(section, **{key: checked(section, where, key, value, "configuration")})
    check = getattr(section, "check", None)
    if check is not None:
        try:
            check()
        except ValueError as error:
            raise ConfigError(f"configuration: [{where}]: {error}") from error
    return section


def section_of(config: NodeConfig, name: str, where: str) -> Any:
    """The section ``name`` of ``config``. Raises ConfigError with those that exist."""
    names = [section.name for section in fields(config) if is_dataclass(getattr(config, section.name))]
    if name not in names:
        raise ConfigError(f"{where}: there is no section {name!r}; sections are {', '.join(names)}")
    return getattr(config, name)


_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def checked(section: Any, section_name: str, key: str, value: Any, where: str) -> Any:
    """``value`` as ``section`` keeps it under ``key``: with its unit taken out, within its limits. Raises ConfigError."""
    by_name = {one.name: one for one in fields(section)}
    if key not in by_name:
        raise ConfigError(f"{where}: there is no key {section_name}.{key}; keys are {', '.join(by_name)}")
    wanted = type(by_name[key].default)
    label = f"{where}: {section_name}.{key}={value!r}"
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    unit = unit_of(key)
    if wanted is int and unit and isinstance(value, str):
        try:
            value = parse(value, unit)
        except ValueError as error:
            raise ConfigError(f"{label}: {error}") from error
    if type(value) is not wanted:
        more = f" ({accepted(unit)})" if wanted is int and unit else ""
        raise ConfigError(f"{label} must be {_IN_WORDS.get(wanted, wanted.__name__)}{more}")
    # A plugin's section may have plain defaults, without any of this metadata.
    low, high, choices = (by_name[key].metadata.get(name) for name in ("low", "high", "choices"))
    if choices and value not in choices:
        raise ConfigError(f"{label} must be one of {', '.join(choices)}")
    if low is not None and value < low:
        raise ConfigError(f"{label} is below the least allowed value {low}")
    if high is not None and value > high:
        raise ConfigError(f"{label} is above the greatest allowed value {high}")
    return value
