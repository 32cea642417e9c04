"""Goal: a node never runs on a setting that nobody asked for, and config/node.toml tells the truth.

Method: the shipped file is compared with the defaults key by key; every way to give a wrong value must be a ConfigError
whose text names the key, and every right one must arrive.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.config import NodeConfig, from_mapping, load, section_from, setting, validated
from commitmq.config.schema import PROFILES
from commitmq.errors import ConfigError

NODE_TOML = Path(__file__).resolve().parents[3] / "config" / "node.toml"

SECTIONS = [section for section in fields(NodeConfig) if is_dataclass(getattr(NodeConfig(), section.name))]
ALL_KEYS = [(section.name, key) for section in SECTIONS for key in fields(getattr(NodeConfig(), section.name))]
KEY_IDS = [f"{section}.{key.name}" for section, key in ALL_KEYS]


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- the shipped file


def test_node_toml_lists_every_key_with_its_default() -> None:
    listed = tomllib.loads(NODE_TOML.read_text(encoding="utf-8"))
    assert listed == NodeConfig().to_dict()


def test_node_toml_keeps_the_order_of_the_code() -> None:
    listed = tomllib.loads(NODE_TOML.read_text(encoding="utf-8"))
    defaults = NodeConfig().to_dict()
    assert list(listed) == list(defaults)
    assert [(section, *listed[section]) for section in listed if section != "profile"] == [
        (section, *defaults[section]) for section in defaults if section != "profile"
    ]


def test_node_toml_gives_each_key_one_line_of_reason() -> None:
    lines = NODE_TOML.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w+ = ", line):
            above = lines[number - 1]
            assert above.startswith("# "), f"no comment above: {line}"
            assert len(above.split()) >= 4, f"a comment that says nothing above: {line}"


def test_node_toml_loads_to_the_defaults() -> None:
    assert load(NODE_TOML) == validated(NodeConfig())


def test_sizes_of_the_profile_server_are_those_of_rocketmq() -> None:
    config = load(profile="server")
    assert config.commit_log.segment_bytes == 1_073_741_824
    assert config.consume_queue.file_bytes == 300_000 * 20
    assert config.consume_queue.batch_file_bytes == 300_000 * 46
    assert config.index.hash_slots == 5_000_000
    assert config.index.max_items == 20_000_000
    assert config.commit_log.max_message_bytes == 4_194_304


def test_a_node_listens_on_loopback_and_flushes_before_it_answers_unless_told_otherwise() -> None:
    assert load().network.host == "127.0.0.1"
    assert load().sync_flush is True
    assert load(overrides=["commit_log.flush_mode=async"]).sync_flush is False


# ---------------------------------------------------------------- every key


@pytest.mark.parametrize(("section", "key"), ALL_KEYS, ids=KEY_IDS)
def test_a_default_is_within_its_own_limits(section: str, key: Any) -> None:
    assert from_mapping({section: {key.name: key.default}}) == NodeConfig()


@pytest.mark.parametrize(("section", "key"), ALL_KEYS, ids=KEY_IDS)
def test_values_outside_the_limits_are_refused_by_name(section: str, key: Any) -> None:
    low, high, choices = (key.metadata[name] for name in ("low", "high", "choices"))
    outside: list[object] = [] if low is None else [type(key.default)(low) - 1]
    outside += [] if high is None else [type(key.default)(high) + 1]
    outside += ["no such choice"] if choices else []
    for value in outside:
        with pytest.raises(ConfigError, match=rf"{section}\.{key.name}="):
            from_mapping({section: {key.name: value}})


@pytest.mark.parametrize(("section", "key"), ALL_KEYS, ids=KEY_IDS)
def test_numbers_have_a_least_value(section: str, key: Any) -> None:
    # A limit that is missing shows as a node that starts with a negative size or a zero interval.
    if type(key.default) in (int, float):
        assert key.metadata["low"] is not None


@pytest.mark.parametrize(("section", "key"), ALL_KEYS, ids=KEY_IDS)
def test_a_value_of_another_type_is_refused_by_name(section: str, key: Any) -> None:
    wrong: list[object] = [None, [], {}, b"x"]
    if type(key.default) is not str:
        wrong.append("text")
    if type(key.default) is not bool:
        wrong += [True, False]  # bool is an int to Python, and never meant as one here
    if type(key.default) in (int, bool, str):
        wrong.append(1.5)
    if type(key.default) in (bool, str):
        wrong.append(1)
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"{section}\.{key.name}="):
            from_mapping({section: {key.name: value}})


# ---------------------------------------------------------------- the layers


def test_a_file_goes_over_the_defaults_and_set_goes_over_the_file(tmp_path: Path) -> None:
    path = file_with(tmp_path, "[commit_log]\nsegment_bytes = 131072\nflush_interval_ms = 7\n[reader]\ncount = 2\n")
    config = load(path, ["commit_log.segment_bytes=262144", "network.host=::1"])
    assert config.commit_log.segment_bytes == 262_144
    assert config.commit_log.flush_interval_ms == 7
    assert config.reader.count == 2
    assert config.network.host == "::1"
    assert config.groups == NodeConfig().groups


def test_of_two_settings_of_one_key_the_last_counts() -> None:
    assert load(overrides=["reader.count=2", "reader.count=3"]).reader.count == 3


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("commit_log.flush_mode=async", "commit_log", "flush_mode", "async"),
        ('commit_log.flush_mode="async"', "commit_log", "flush_mode", "async"),
        ("commit_log.append_properties_crc=false", "commit_log", "append_properties_crc", False),
        ("commit_log.segment_bytes=1_048_576", "commit_log", "segment_bytes", 1_048_576),
        ("commit_log.segment_bytes = 0x100000", "commit_log", "segment_bytes", 1_048_576),
        ("disk.warning_ratio=0.5", "disk", "warning_ratio", 0.5),
        ("disk.warning_ratio=1", "disk", "warning_ratio", 1.0),
        ("network.host=192.0.2.1", "network", "host", "192.0.2.1"),
        ("network.port=0", "network", "port", 0),
    ],
)
def test_set_reads_toml_values_and_bare_words(override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(load(overrides=[override]), section), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("", "section.key=value"),
        ("commit_log.segment_bytes", "section.key=value"),
        ("segment_bytes=131072", "section.key=value"),
        ("commitlog.segment_bytes=131072", "no section 'commitlog'"),
        ("commit_log.segment_byte=131072", r"no key commit_log\.segment_byte"),
        ("commit_log.segment_bytes=1GiX", "'1GiX' is not a number of bytes, or one with a unit .B, KB"),
        ("commit_log.segment_bytes=3d", "'3d' is not a number of bytes"),
        ("commit_log.segment_bytes=", "'' is not a number of bytes"),
        ("commit_log.flush_interval_ms=1MiB", "'1MiB' is not a number of milliseconds, or one with a unit .us, ms"),
        ("supervisor.restart_window_s=500ms", "'500ms' is no whole number of seconds"),
        ("index.hash_slots=1MiB", "must be a whole number"),
        ("profile=laptop", "--set: profile='laptop' must be one of dev, small, server"),
        ("commit_log.segment_bytes.x=1", r"no key commit_log\.segment_bytes\.x"),
        ("commit_log.flush_mode=never", "must be one of sync, async"),
        ("network.port=65536", "above the greatest allowed value 65535"),
        ("network.port=-1", "below the least allowed value 0"),
    ],
)
def test_a_wrong_set_is_refused_and_says_how_to_write_it(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=[override])


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_after_set_raises_anything_but_a_config_error(section: str, value: str) -> None:
    for override in (section, f"{section}={value}", f"commit_log.{section}={value}", f"network.host={value}"):
        try:
            config = load(overrides=[override])
        except ConfigError:
            continue
        assert isinstance(config, NodeConfig)


# ---------------------------------------------------------------- files that cannot be used


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(path)


@pytest.mark.parametrize("data", [b"[commit_log", b"a = \xff\xfe", b"[commit_log]\nsegment_bytes = \n"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[commitlog]\nsegment_bytes = 131072\n", "no section 'commitlog'"),
        ("[commit_log]\nmappedFileSizeCommitLog = 131072\n", r"no key commit_log\.mappedFileSizeCommitLog"),
        ("commit_log = 3\n", r"\[commit_log\] must be a table"),
        ("segment_bytes = 131072\n", "no section 'segment_bytes'"),
    ],
)
def test_an_unknown_name_in_a_file_is_an_error_with_the_files_name(tmp_path: Path, text: str, message: str) -> None:
    path = file_with(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


# ---------------------------------------------------------------- rules over several keys


def test_a_segment_is_a_whole_number_of_pages() -> None:
    with pytest.raises(ConfigError, match=r"segment_bytes=131073 .*4096"):
        load(overrides=["commit_log.segment_bytes=131073"])


def test_a_session_outlives_a_late_heartbeat() -> None:
    with pytest.raises(ConfigError, match="session_timeout_ms=1999"):
        load(overrides=["groups.session_timeout_ms=1999", "groups.heartbeat_interval_ms=1000"])
    load(overrides=["groups.session_timeout_ms=2000", "groups.heartbeat_interval_ms=1000"])


def test_a_frame_holds_the_longest_run() -> None:
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        load(overrides=["network.max_frame_bytes=16777216"])


@pytest.mark.parametrize(("asked", "got"), [(20, 20), (21, 40), (39, 40), (40, 40), (5_999_999, 6_000_000)])
def test_a_consume_queue_file_is_rounded_up_to_whole_units(asked: int, got: int) -> None:
    assert load(overrides=[f"consume_queue.file_bytes={asked}"]).consume_queue.file_bytes == got


def test_a_configuration_survives_its_own_dictionary() -> None:
    config = load(overrides=["commit_log.segment_bytes=131072", "network.host=::1", "disk.warning_ratio=0.75"])
    assert from_mapping(config.to_dict()) == config
    assert config != NodeConfig()


# ---------------------------------------------------------------- profiles, units, what was given


def test_a_profile_goes_under_everything_that_is_given(tmp_path: Path) -> None:
    path = file_with(tmp_path, 'profile = "server"\n[index]\nhash_slots = 7\n')
    config = load(path, ["commit_log.preallocate_segments=3"])
    assert config.profile == "server"
    assert config.commit_log.segment_bytes == 1 << 30
    assert config.index.hash_slots == 7
    assert config.commit_log.preallocate_segments == 3
    assert load(path, ["profile=dev"]).commit_log.segment_bytes == 16 << 20, "--set goes over the file"
    assert load(path, ["profile=dev"], "small").profile == "small", "--profile goes over both"
    assert load(profile="small") == load(), "the defaults are those of the default profile"


def test_a_profile_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile: profile='big' must be one of dev, small, server"):
        load(profile="big")
    with pytest.raises(ConfigError, match=r"node\.toml: profile=3 must be one of dev"):
        load(file_with(tmp_path, "profile = 3\n"))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_a_configuration_that_can_be_used(name: str) -> None:
    config = load(profile=name)
    assert config.profile == name
    assert from_mapping(config.to_dict()) == config


def test_node_toml_tells_what_the_other_profiles_have() -> None:
    text = NODE_TOML.read_text(encoding="utf-8")
    base = {f"{section}.{key.name}": key.default for section, key in ALL_KEYS}
    told = dict(re.findall(r"([a-z_]+\.[a-z_]+) = (\d+, \d+)", text.partition("\nprofile = ")[0]))
    wanted = {}
    for name in {f"{section}.{key}" for one in PROFILES.values() for section, keys in one.items() for key in keys}:
        section, key = name.split(".")
        values = [PROFILES[profile].get(section, {}).get(key, base[name]) for profile in ("dev", "server")]
        wanted[name] = f"{values[0]}, {values[1]}"
    assert told == wanted


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("commit_log.segment_bytes=64MiB", "commit_log", "segment_bytes", 64 << 20),
        ("commit_log.max_run_bytes = 4 mb", "commit_log", "max_run_bytes", 4_000_000),
        ("retention.store_bytes=1.5GiB", "retention", "store_bytes", 3 << 29),
        ('retention.store_bytes="2TB"', "retention", "store_bytes", 2 * 10**12),
        ("retention.hours=3d", "retention", "hours", 72),
        ("retention.hours=12", "retention", "hours", 12),
        ("groups.session_timeout_ms=1min", "groups", "session_timeout_ms", 60_000),
        ("producers.expiry_ms=2h", "producers", "expiry_ms", 7_200_000),
        ("dispatch.coalesce_us=2ms", "dispatch", "coalesce_us", 2_000),
        ("supervisor.stop_timeout_s=60000ms", "supervisor", "stop_timeout_s", 60),
    ],
)
def test_sizes_and_times_have_units_in_a_file_and_with_set(
    tmp_path: Path, override: str, section: str, key: str, value: int
) -> None:
    assert getattr(getattr(load(overrides=[override]), section), key) == value
    text = override.partition("=")[2].strip().strip('"')
    config = load(file_with(tmp_path, f'[{section}]\n{key} = "{text}"\n'))
    assert getattr(getattr(config, section), key) == value


def test_a_plugins_settings_take_units_too() -> None:
    @dataclass(frozen=True)
    class Section:
        most_bytes: int = setting(1, 0)

    assert section_from(Section, {"most_bytes": "2KiB"}, "plugins.x").most_bytes == 2048


def test_limits_hold_for_values_with_units() -> None:
    with pytest.raises(ConfigError, match="below the least allowed value 65536"):
        load(overrides=["commit_log.segment_bytes=1KiB"])


def test_what_was_given_is_known(tmp_path: Path) -> None:
    path = file_with(tmp_path, "[index]\nhash_slots = 1000000\nmax_items = 7\n")
    config = load(path, ["commit_log.segment_bytes=67108864", "profile=small"])
    assert config.given == {"index.max_items", "commit_log.segment_bytes"}, "a file may list defaults"
    assert load(NODE_TOML).given == frozenset()


@pytest.mark.parametrize("host", ["", "broker-1.example.org", "192.0.2.7", "2001:db8::7", "localhost", "my_host"])
def test_an_advertised_host_is_a_host(host: str) -> None:
    assert load(overrides=[f"network.advertised_host={host}"]).network.advertised_host == host


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "*", "tcp://a", "a:7310", "[::1]", "300.1.1.1", "10.0.0", "a b", "-a", "a..b", "a" * 254]
)
def test_an_advertised_host_that_nobody_can_connect_to_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.advertised_host="):
        load(overrides=[f"network.advertised_host={host}"])


def test_a_plugins_section_may_have_plain_defaults() -> None:
    """A dataclass as anybody would write it, without the limits that ``setting`` adds."""

    @dataclass(frozen=True)
    class Section:
        name: str = "x"
        count: int = 5
        ratio: float = 0.5
        on: bool = False

    assert section_from(Section, {}, "plugins.plain") == Section()
    given = {"name": "y", "count": 7, "ratio": 1, "on": True}
    assert section_from(Section, given, "plugins.plain") == Section("y", 7, 1.0, True)
    with pytest.raises(ConfigError, match="must be a whole number"):
        section_from(Section, {"count": "many"}, "plugins.plain")


# ---------------------------------------------------------------- the environment


def test_the_environment_goes_over_the_file_and_set_over_the_environment(tmp_path: Path) -> None:
    path = file_with(tmp_path, "[network]\nport = 1\n[reader]\ncount = 2\n[index]\nmax_items = 7\n")
    environment = {"COMMITMQ__NETWORK__PORT": "2", "COMMITMQ__READER__COUNT": "3", "COMMITMQ_NODE": "x", "HOME": "/"}
    config = load(path, ["network.port=3"], environment=environment)
    assert (config.network.port, config.reader.count, config.index.max_items) == (3, 3, 7)
    assert config.sources == {
        "network.port": "--set",
        "reader.count": "environment COMMITMQ__READER__COUNT",
        "index.max_items": f"file {path}",
    }
    assert config.given == set(config.sources)
    assert load(path, ["network.port=3"]).reader.count == 2, (
        "a program that does not name the environment is left alone"
    )


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("COMMITMQ__NETWORK__PORT", "0", "network.port", 0),
        ("COMMITMQ__NETWORK__HOST", "192.0.2.1", "network.host", "192.0.2.1"),
        ("COMMITMQ__network__broker_name", "true", "network.broker_name", "true"),
        ("COMMITMQ__RETENTION__DELETE_WHEN", "16", "retention.delete_when", "16"),
        ("COMMITMQ__RETENTION__DELETE_WHEN", '"04;16"', "retention.delete_when", "04;16"),
        ("COMMITMQ__COMMIT_LOG__MLOCK", "true", "commit_log.mlock", True),
        ("COMMITMQ__RETENTION__STORE_BYTES", "1.5GiB", "retention.store_bytes", 3 << 29),
        ("COMMITMQ__DISK__WARNING_RATIO", "1", "disk.warning_ratio", 1.0),
    ],
)
def test_a_variable_has_a_value_as_set_has(variable: str, text: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    got = getattr(getattr(load(environment={variable: text}), section), name)
    assert got == value
    assert type(got) is type(value)


def test_a_plugins_settings_and_the_profile_come_from_the_environment_too(tmp_path: Path) -> None:
    environment = {
        "COMMITMQ__PLUGINS__ROCKETMQ__ENABLE": "true",
        "COMMITMQ__plugins__MyPlugin__key": "x",
        "COMMITMQ__PROFILE": "dev",
    }
    config = load(file_with(tmp_path, "[plugins.rocketmq]\nport = 7\n"), environment=environment)
    assert config.plugins == {"rocketmq": {"port": 7, "enable": True}, "MyPlugin": {"key": "x"}}
    assert config.profile == "dev"
    assert config.sources["plugins.rocketmq.enable"] == "environment COMMITMQ__PLUGINS__ROCKETMQ__ENABLE"
    assert config.given == frozenset(), "sizes of files do not depend on plugins"
    assert load(None, ["profile=server"], environment=environment).profile == "server"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("COMMITMQ__NETWORK__PROT", "1", r"no key network\.prot"),
        ("COMMITMQ__NETWRK__PORT", "1", "no section 'netwrk'"),
        ("COMMITMQ__NETWORK__PORT", "high", "must be a whole number"),
        ("COMMITMQ__NETWORK__PORT", "65536", "above the greatest allowed value"),
        ("COMMITMQ__COMMIT_LOG__FLUSH_MODE", "never", "must be one of sync, async"),
        ("COMMITMQ__PORT", "1", "COMMITMQ__SECTION__KEY"),
        ("COMMITMQ__", "1", "COMMITMQ__SECTION__KEY"),
        ("COMMITMQ__NETWORK__", "1", "COMMITMQ__SECTION__KEY"),
        ("COMMITMQ__PLUGINS__ROCKETMQ", "1", r"plugins\.NAME\.key"),
        ("COMMITMQ__PROFILE", "laptop", "must be one of dev, small, server"),
        ("COMMITMQ__NETWORK__PORT__X", "1", r"no key network\.port\.x"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(environment={variable: text})
    assert variable in str(caught.value)
