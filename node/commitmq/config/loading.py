"""Where a node's settings come from, in rising order, and which of them a running node takes.

1. the defaults and a profile (:mod:`commitmq.config.schema`),
2. a TOML file (``--config``),
3. the environment: ``COMMITMQ__SECTION__KEY=value``, also ``COMMITMQ__PLUGINS__NAME__KEY`` and ``COMMITMQ__PROFILE``,
4. single keys (``--set section.key=value``).

A value of the environment and of ``--set`` is read as a TOML value; where the setting is a text, anything else is the
text itself. A variable that begins with ``COMMITMQ__`` and names no setting is an error, as a wrong key in a file is:
a misspelt name would go unnoticed else. Variables with a single underscore (``COMMITMQ_NODE``) have other meanings.

A running node takes another value of the settings marked ``live``. A setting is live only if its process re-reads it safely.
None of them names a file, a program, an address or a listener: whoever may change settings must not reach more than a node's
limits and intervals (CVE-2023-33246 was such a verb).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from commitmq.config.schema import (
    DEFAULT_PROFILE,
    NodeConfig,
    checked,
    from_mapping,
    of_profile,
    profile_name,
    section_of,
    validated,
    with_plugins,
)
from commitmq.errors import ConfigError

PREFIX: Final = "COMMITMQ__"
_SET: Final = "--set"


def load(
    path: Path | None = None,
    overrides: Iterable[str] = (),
    profile: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> NodeConfig:
    """The configuration of all layers. ``environment`` holds any variables; only those with :data:`PREFIX` count.

    The profile is the argument, else the last ``profile=NAME`` of ``overrides``, else the environment's, else the
    file's. Raises ConfigError for an unreadable file, bad TOML, an unknown key, a wrong type or a value out of range;
    its sentence names the file, the variable or ``--set``.
    """
    data = {} if path is None else _read(path)
    pairs = [*_variables(environment or {}), *((*_split(override), _SET) for override in overrides)]
    for name, text, where in pairs:
        _require_utf8(name, text, where)
    file = None if path is None else str(path).encode(errors="backslashreplace").decode()
    in_file = profile_name(data.pop("profile", DEFAULT_PROFILE), str(file))
    asked = [profile_name(_value_of(text), where) for name, text, where in pairs if name == "profile"]
    base = of_profile(profile_name(profile, "--profile") if profile is not None else (asked or [in_file])[-1])
    config = from_mapping(data, base=base, where=str(file))
    before = dict(flat(base))
    sources = {name: f"file {file}" for name, value in flat(config) if value != before.get(name)}
    given = {name for name in sources if not name.startswith("plugins.")}
    for name, text, where in pairs:
        if name != "profile":
            config = with_text(config, name, text, where)
            sources[name] = where if where == _SET else f"environment {where}"
            if not name.startswith("plugins."):
                given.add(name)
    return replace(validated(config), given=frozenset(given), sources=sources)


def flat(config: NodeConfig) -> list[tuple[str, Any]]:
    """``(section.key, value)`` of every key; of plugins ``plugins.NAME.key`` of those that were given."""
    values = config.to_dict()
    plugins = values.pop("plugins", {})
    del values["profile"]
    sections = [*values.items(), *((f"plugins.{name}", section) for name, section in plugins.items())]
    return [(f"{section}.{key}", value) for section, keys in sections for key, value in keys.items()]


def with_text(config: NodeConfig, name: str, text: str, where: str) -> NodeConfig:
    """``config`` with the value that ``text`` writes for ``section.key``. Raises ConfigError, which names ``where``."""
    section_name, dot, key = name.partition(".")
    if not dot:
        raise ConfigError(f"{where}: {name!r} is no setting; write section.key, as in commit_log.flush_mode")
    if section_name == "plugins":
        plugin, dot, key = key.partition(".")
        if not dot or not plugin or not key:
            raise ConfigError(f"{where}: {name!r} is no setting; those of plugins are plugins.NAME.key")
        return with_plugins(config, {plugin: {key: _value_of(text)}}, where)
    section = section_of(config, section_name, where)
    value = _value_of(text)
    if not isinstance(value, str) and any(one.name == key and type(one.default) is str for one in fields(section)):
        value = text.strip()  # "16" is a text where the setting is one
    return replace(
        config, **{section_name: replace(section, **{key: checked(section, section_name, key, value, where)})}
    )


def _require_utf8(name: str, text: str, where: str) -> None:
    """Raises ConfigError for bytes of a command line or an environment that are no text: other processes could not be told."""
    try:
        (name + text).encode()
    except UnicodeEncodeError as error:
        sentence = f"{where}: {name}={text!r} is not UTF-8".encode(errors="backslashreplace").decode()
        raise ConfigError(sentence) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _split(override: str) -> tuple[str, str]:
    """Name and text of an argument of ``--set``."""
    name, separator, text = override.partition("=")
    if not separator or ("." not in name and name.strip() != "profile"):
        raise ConfigError(f"--set {override!r}: write section.key=value, for example commit_log.flush_mode=async")
    return name.strip(), text


def _variables(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """``(section.key, text, variable)`` of the variables that are settings, in the order of their names.

    A name in capital letters means small ones. A plugin or a key of one that is not all in small letters is written as
    it is: ``COMMITMQ__plugins__MyPlugin__key``.
    """
    found = []
    for variable in sorted(environment):
        if not variable.startswith(PREFIX):
            continue
        parts = variable.removeprefix(PREFIX).split("__")
        words = [part.lower() if part.isupper() else part for part in parts]
        if not all(words) or (len(words) < 2 and words != ["profile"]):
            raise ConfigError(
                f"environment variable {variable} is no setting: write {PREFIX}SECTION__KEY, for example"
                f" {PREFIX}COMMIT_LOG__FLUSH_MODE=async"
            )
        found.append((".".join(words), environment[variable], variable))
    return found


def _value_of(text: str) -> Any:
    """``text`` parsed as a TOML value, else the text itself."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()  # a bare word is a string: users forget to quote it inside shell quotes


@cache
def live_keys() -> frozenset[str]:
    """``section.key`` of each live setting."""
    config = NodeConfig()
    sections = [one.name for one in fields(config) if is_dataclass(getattr(config, one.name))]
    return frozenset(
        f"{name}.{key.name}" for name in sections for key in fields(getattr(config, name)) if key.metadata.get("live")
    )


def live_values(config: NodeConfig) -> dict[str, dict[str, Any]]:
    """``{section: {key: value}}`` of all live settings, for :func:`with_live_values` in another process."""
    values: dict[str, dict[str, Any]] = {}
    for name in sorted(live_keys()):
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = getattr(getattr(config, section), key)
    return values


def with_live_values(config: NodeConfig, values: Mapping[str, Mapping[str, Any]]) -> NodeConfig:
    """``config`` with ``values``, checked. Raises ConfigError."""
    return replace(validated(from_mapping(values, base=config)), given=config.given, sources=config.sources)
