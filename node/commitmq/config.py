"""The node's configuration: every key, its type, default and limits, in one place.

``config/node.toml`` lists the same keys with one line why each; a test holds the two together. Values come from, in
rising order: the defaults here, a TOML file (``--config``), single keys (``--set section.key=value``). An unknown key,
a wrong type or a value out of range is a :class:`ConfigError` that names the key; nothing is silently ignored.

Defaults follow RocketMQ where it has the same setting (``spec`` names in the comments of ``node.toml``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from commitmq.errors import ConfigError

MEMORY_LEAST_SEGMENTS = 4  # below that, evicting a segment would be evicting a large part of everything


def setting(
    default: bool | int | float | str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a plugin's configuration dataclass: its default (which gives the type) and its limits."""
    return _key(default, low, high, choices)


def _key(default: Any, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    host: str = _key("127.0.0.1")
    port: int = _key(7310, 0, 65535)
    store_host: str = _key("127.0.0.1")
    store_port: int = _key(10911, 0, 65535)
    max_frame_bytes: int = _key(64 * 1024 * 1024, 65536)
    max_local_connections: int = _key(1_024, 0, 65_536)


@dataclass(frozen=True, slots=True)
class CommitLogConfig:
    segment_bytes: int = _key(1024**3, 65536)
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
    max_mapped_segments: int = _key(64, 2)
    populate_window_bytes: int = _key(4 * 1024 * 1024, 0)
    preallocate_segments: int = _key(2, 0, 16)
    warm_ahead_bytes: int = _key(64 * 1024 * 1024, 0)
    mlock: bool = _key(False)
    transient_store_pool: bool = _key(False)
    transient_store_pool_size: int = _key(5, 2, 128)
    commit_least_pages: int = _key(4, 0)
    commit_thorough_interval_ms: int = _key(200, 1)


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
    hash_slots: int = _key(5_000_000, 1)
    max_items: int = _key(20_000_000, 2)


@dataclass(frozen=True, slots=True)
class ProducersConfig:
    max_entries: int = _key(50_000, 1)
    window: int = _key(8, 1, 1024)
    expiry_ms: int = _key(604_800_000, 1_000)
    snapshot_bytes: int = _key(256 * 1024 * 1024, 65536)
    snapshot_interval_ms: int = _key(60_000, 10)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    enable: bool = _key(True)
    budget_bytes: int = _key(0, 0)
    segment_bytes: int = _key(16 * 1024 * 1024, 256 * 1024)
    folder: str = _key("")


@dataclass(frozen=True, slots=True)
class TopicsConfig:
    auto_create: bool = _key(True)
    default_queues: int = _key(4, 1, 1024)
    max_topics: int = _key(100_000, 1)


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    count: int = _key(1, 1, 16)
    max_pull_messages: int = _key(8_192, 1)
    max_pull_bytes: int = _key(8 * 1024 * 1024, 4096)
    max_query_messages: int = _key(64, 1, 8_192)
    max_query_items: int = _key(100_000, 1_000)
    max_wait_ms: int = _key(30_000, 0)
    max_parked_pulls: int = _key(100_000, 1)
    sweep_interval_ms: int = _key(1_000, 1)


@dataclass(frozen=True, slots=True)
class FilterConfig:
    sql_enabled: bool = _key(True)
    max_compiled: int = _key(1_024, 1)


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    auto_create: bool = _key(True)
    heartbeat_interval_ms: int = _key(1_000, 50)
    session_timeout_ms: int = _key(6_000, 200)
    offsets_interval_ms: int = _key(5_000, 50)
    max_groups: int = _key(10_000, 1)
    max_members_per_group: int = _key(1_000, 1)


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
    warning_ratio: float = _key(0.90, 0.35, 1.0)
    check_interval_ms: int = _key(500, 10)


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    hours: int = _key(72, 0)
    delete_when: str = _key("04")
    clean_ratio: float = _key(0.75, 0.10, 1.0)
    forced_ratio: float = _key(0.85, 0.30, 1.0)
    clean_forcibly: bool = _key(True)
    store_bytes: int = _key(0, 0)
    keep_unconsumed: bool = _key(False)
    batch_files: int = _key(10, 1)
    check_interval_ms: int = _key(10_000, 10)
    delete_interval_ms: int = _key(100, 0, 60_000)

    @property
    def hours_of_day(self) -> frozenset[int]:
        """``delete_when`` as numbers. Raises ValueError when it is no list of hours."""
        return frozenset(int(part) for part in self.delete_when.split(";") if part.strip())


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    poll_interval_ms: int = _key(200, 10, 1_000)
    restart_backoff_ms: int = _key(100, 1)
    restart_backoff_max_ms: int = _key(10_000, 1)
    restart_window_s: int = _key(60, 1)
    start_timeout_s: int = _key(120, 1)
    stop_timeout_s: int = _key(60, 1)
    hang_timeout_s: int = _key(60, 2)
    plugin_load_timeout_s: int = _key(10, 1)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The whole configuration; immutable, so that every process of a node works from the same values."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    commit_log: CommitLogConfig = field(default_factory=CommitLogConfig)
    consume_queue: ConsumeQueueConfig = field(default_factory=ConsumeQueueConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    producers: ProducersConfig = field(default_factory=ProducersConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the sections ``[plugins.NAME]`` say; their plugins check them (see :mod:`commitmq.plugins`)."""

    @property
    def sync_flush(self) -> bool:
        """True when an ack of ``flushed`` waits for fdatasync and consumers see flushed messages only."""
        return self.commit_log.flush_mode == "sync"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain ``{section: {key: value}}``, fit for JSON and for :func:`from_mapping`."""
        values: dict[str, dict[str, Any]] = {
            section.name: {key.name: getattr(getattr(self, section.name), key.name) for key in fields(section_value)}
            for section in fields(self)
            if is_dataclass(section_value := getattr(self, section.name))
        }
        if self.plugins:
            values["plugins"] = {name: dict(section) for name, section in self.plugins.items()}
        return values


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> NodeConfig:
    """Defaults, then the TOML file at ``path``, then each ``section.key=value`` of ``overrides``.

    Raises ConfigError for an unreadable file, bad TOML, an unknown key, a wrong type or a value out of range.
    """
    config = NodeConfig()
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        config = from_mapping(data, base=config, where=str(path))
    for override in overrides:
        config = _apply_override(config, override)
    return validated(config)


def from_mapping(
    data: Mapping[str, Any], *, base: NodeConfig | None = None, where: str = "configuration"
) -> NodeConfig:
    """A config with the values of ``{section: {key: value}}`` laid over ``base`` (default: the defaults)."""
    config = base or NodeConfig()
    for section_name, values in data.items():
        if section_name == "plugins":
            config = _with_plugins(config, values, where)
            continue
        section = _section(config, section_name, where)
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: [{section_name}] must be a table of keys, not {type(values).__name__}")
        changed = section
        for key, value in values.items():
            changed = replace(changed, **{key: _checked(section, section_name, key, value, where)})
        config = replace(config, **{section_name: changed})
    return config


def validated(config: NodeConfig) -> NodeConfig:
    """``config`` itself, after the rules that span several keys; raises ConfigError."""
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
    # RocketMQ rounds a ConsumeQueue file up to whole units (spec 1.3); so do we, or the two would disagree on names.
    units_bytes = -(-queues.file_bytes // 20) * 20
    batch_bytes = -(-queues.batch_file_bytes // 46) * 46
    if (units_bytes, batch_bytes) != (queues.file_bytes, queues.batch_file_bytes):
        queues = replace(queues, file_bytes=units_bytes, batch_file_bytes=batch_bytes)
        config = replace(config, consume_queue=queues)
    return config


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
            f"{retention.forced_ratio}: what is expired goes before what is not"
        )


def _with_plugins(config: NodeConfig, sections: Any, where: str) -> NodeConfig:
    """``config`` with the values of ``[plugins.NAME]`` sections, which only their plugins can check, laid over its own."""
    if not isinstance(sections, Mapping) or not all(isinstance(values, Mapping) for values in sections.values()):
        raise ConfigError(f"{where}: [plugins] holds one table for each plugin, as in [plugins.NAME]")
    merged = {name: dict(values) for name, values in config.plugins.items()}
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    return replace(config, plugins=merged)


def section_from(schema: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass ``schema`` with ``values`` laid over its defaults, each checked.

    Raises ConfigError for an unknown key, a wrong type, a value out of range, or what ``schema.check()`` refuses.
    """
    section = schema()
    for key, value in values.items():
        section = replace(section, **{key: _checked(section, where, key, value, "configuration")})
    check = getattr(section, "check", None)
    if check is not None:
        try:
            check()
        except ValueError as error:
            raise ConfigError(f"configuration: [{where}]: {error}") from error
    return section


def _apply_override(config: NodeConfig, override: str) -> NodeConfig:
    name, separator, text = override.partition("=")
    section_name, dot, key = name.strip().partition(".")
    if not separator or not dot:
        raise ConfigError(f"--set {override!r}: write section.key=value, for example commit_log.flush_mode=async")
    if section_name == "plugins":
        plugin, dot, key = key.partition(".")
        if not dot:
            raise ConfigError(f"--set {override!r}: write plugins.NAME.key=value")
        return _with_plugins(config, {plugin: {key: _value_of(text)}}, "--set")
    section = _section(config, section_name, "--set")
    checked = _checked(section, section_name, key, _value_of(text), "--set")
    return replace(config, **{section_name: replace(section, **{key: checked})})


def _value_of(text: str) -> Any:
    """The TOML value that ``text`` is, else the text itself."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()  # a bare word is a string: quoting it inside shell quotes is what nobody remembers


def _section(config: NodeConfig, name: str, where: str) -> Any:
    names = [section.name for section in fields(config) if section.name != "plugins"]
    if name not in names:
        raise ConfigError(f"{where}: there is no section {name!r}; sections are {', '.join(names)}")
    return getattr(config, name)


def _checked(section: Any, section_name: str, key: str, value: Any, where: str) -> Any:
    by_name = {one.name: one for one in fields(section)}
    if key not in by_name:
        raise ConfigError(f"{where}: there is no key {section_name}.{key}; keys are {', '.join(by_name)}")
    wanted = type(by_name[key].default)
    label = f"{where}: {section_name}.{key}={value!r}"
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{label} must be {wanted.__name__}, not {type(value).__name__}")
    limits = by_name[key].metadata
    if limits["choices"] and value not in limits["choices"]:
        raise ConfigError(f"{label} must be one of {', '.join(limits['choices'])}")
    if limits["low"] is not None and value < limits["low"]:
        raise ConfigError(f"{label} is below the least allowed value {limits['low']}")
    if limits["high"] is not None and value > limits["high"]:
        raise ConfigError(f"{label} is above the greatest allowed value {limits['high']}")
    return value
