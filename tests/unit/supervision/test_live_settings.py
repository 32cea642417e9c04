"""Goal: a change of a setting is kept before it counts, comes back at the next start, and never keeps a node from starting.

Method: the class on files as deaths, persons and other versions leave them; errors of the disk by failpoints' own means.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from commitmq.config import NodeConfig, load
from commitmq.errors import ConfigError, StoreError
from commitmq.files import atomic_file
from commitmq.supervision.live_settings import LiveSettings


def opened(path: Path, config: NodeConfig | None = None, life: str = "b/1") -> LiveSettings:
    return LiveSettings(path, config or load(), life)


def test_a_change_is_kept_and_given_up(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    settings = opened(path)
    assert settings.set("log.max_bytes", "1MiB").log.max_bytes == 1 << 20
    again = opened(path, life="c/2")
    assert again.config.log.max_bytes == 1 << 20
    assert again.row("log.max_bytes")["source"] == "config set"
    assert again.unset("log.max_bytes") == load()
    assert opened(path).config == load()
    assert not opened(path).notes


def test_a_kept_change_goes_over_file_and_environment_and_set_of_a_new_start_over_it(tmp_path: Path) -> None:
    path, file = tmp_path / "settings.json", tmp_path / "node.toml"
    file.write_text("[retention]\nhours = 5\nbatch_files = 3\n")
    environment = {"COMMITMQ__RETENTION__BATCH_FILES": "4"}
    settings = opened(path, load(file, environment=environment))
    settings.set("retention.hours", "7")
    settings.set("retention.batch_files", "8")
    config = opened(path, load(file, environment=environment)).config
    assert (config.retention.hours, config.retention.batch_files) == (7, 8)
    typed = load(file, ["retention.hours=9"])
    new = opened(path, typed, life="another")
    assert new.config.retention.hours == 9
    assert "--set retention.hours counts" in new.notes[0]
    assert opened(path, typed, life="b/1").config.retention.hours == 7, (
        "the same life: the change is newer than the start"
    )
    assert settings.unset("retention.hours").retention.hours == 5
    assert settings.row("retention.hours")["source"] == f"file {file}"


def test_a_disk_that_refuses_keeps_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = opened(tmp_path / "settings.json")
    settings.set("log.level", "ERROR")
    before = settings.config

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(atomic_file, "replace", full)
    with pytest.raises(StoreError, match="No space left on device; nothing was changed"):
        settings.set("log.level", "DEBUG")
    with pytest.raises(StoreError):
        settings.unset("log.level")
    assert settings.config is before
    assert settings.row("log.level")["value"] == "ERROR"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"settings": 3}', '{"settings": {"log.level": 3}}', '{"other": {}}', "\x00\xff"],
)
def test_a_damaged_file_counts_as_none_and_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    settings = opened(path)
    assert settings.config == load()
    assert "cannot be read" in settings.notes[0]
    settings.set("log.level", "ERROR")
    assert opened(path).config.log.level == "ERROR", "the next change writes it anew"


def test_what_does_not_fit_any_more_is_left_out_and_the_rest_counts(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    kept = {
        "network.port": {"value": 1},
        "groups.session_timeout_ms": {"value": 300},
        "gone.key": {"value": 1},
        "log.files": {},
        "log.level": {"value": "ERROR"},
    }
    path.write_text(json.dumps({"settings": kept}))
    settings = opened(path)
    assert settings.config.log.level == "ERROR"
    assert len(settings.notes) == 4
    assert settings.config.network == load().network


def test_settings_that_depend_on_each_other_come_back_together(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    settings = opened(path)
    for name, text in (
        ("forced_ratio", "0.95"),
        ("clean_ratio", "0.9"),
        ("clean_ratio", "0.5"),
        ("forced_ratio", "0.6"),
    ):
        settings.set(f"retention.{name}", text)
    again = opened(path)
    assert (again.config.retention.forced_ratio, again.config.retention.clean_ratio) == (0.6, 0.5)
    assert not again.notes


def test_only_live_settings_that_exist_can_change(tmp_path: Path) -> None:
    settings = opened(tmp_path / "settings.json")
    for name in ("network.port", "plugins.rocketmq.enable", "nonsense", "log.nonsense", "", "log", "sources.x"):
        with pytest.raises(ConfigError):
            settings.set(name, "1")
        with pytest.raises(ConfigError):
            settings.unset(name)
    with pytest.raises(ConfigError, match="more than 4096 characters"):
        settings.set("retention.delete_when", "4;" * 5_000)
    assert not (tmp_path / "settings.json").exists()


def test_rows_show_no_secret_of_a_plugin(tmp_path: Path) -> None:
    config = load(None, ["plugins.x.password=canary", "plugins.x.size=3"])
    rows = {row["key"]: row for row in opened(tmp_path / "settings.json", config).rows()}
    assert rows["plugins.x.password"]["value"] == "***"
    assert (rows["plugins.x.size"]["value"], rows["plugins.x.size"]["default"]) == (3, None)
