"""What plugins add to a node: asked in a process of its own, because importing somebody's code can do anything.

:func:`discover` imports every plugin and calls the hooks that say what runs where. It says the name of each plugin before
it touches it, so that when the process hangs or ends, whoever waits for it knows the culprit, and asks again without it.
At a node's start that is the supervisor (role ``discovery``); for ``commitmq plugins`` it is :func:`discover_in_child`.
No other process of a node imports a plugin's module, except the ones that run a part of that plugin.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from commitmq import plugins
from commitmq.config import NodeConfig, from_mapping

_MAX_ATTEMPTS = 20


def discover(config: NodeConfig, leave_out: Mapping[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Load all plugins but ``leave_out`` and ask them; ``say`` is called with the name of each before it is touched.

    Returns ``plugins`` (reports), ``dispatchers`` and ``workers`` (dicts with name, factory, plugin), ``filters`` (dicts
    with type, factory, plugin), ``config_errors`` (sentences about ``[plugins.NAME]`` sections).
    """
    loaded = plugins.load_each(plugins.candidates(), before=lambda one: say(one.name), leave_out=leave_out)
    say("")
    config_errors = loaded.check_config(config)
    dispatchers = [
        {"name": spec.name, "factory": spec.factory, "can_undo": spec.can_undo, "plugin": report.name,
         "built_in": report.is_built_in}
        for report, spec in loaded.dispatchers(config)
    ]  # fmt: skip
    workers = [
        {"name": spec.name, "factory": spec.factory, "plugin": report.name, "built_in": report.is_built_in}
        for report, spec in loaded.workers(config)
    ]
    filters = [
        {"type": spec.type, "factory": spec.factory, "plugin": report.name, "built_in": report.is_built_in}
        for report, spec in loaded.filters(config)
    ]
    return {
        "plugins": [report.to_json() for report in loaded.reports],
        "dispatchers": dispatchers,
        "workers": workers,
        "filters": filters,
        "config_errors": config_errors,
    }


def discover_in_child(config: NodeConfig, *, timeout_s: float) -> dict[str, Any]:
    """:func:`discover` in a child process, again and again until no plugin ends it or holds it up for ``timeout_s``."""
    leave_out: dict[str, str] = {}
    for _ in range(_MAX_ATTEMPTS):
        request = orjson.dumps({"config": config.to_dict(), "leave_out": leave_out})
        child = subprocess.Popen(
            [sys.executable, "-m", "commitmq.discovery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            output, _ = child.communicate(request, timeout=timeout_s)
            why = f"the process that imported it ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            why = f"its import, or a hook of it, took longer than {timeout_s:g} s"
        found, culprit = _read(output)
        if found is not None:
            return found
        if not culprit or culprit in leave_out:
            break
        leave_out[culprit] = why
    return {
        "plugins": [],
        "dispatchers": [],
        "workers": [],
        "filters": [],
        "config_errors": [f"plugins cannot be listed: {why}"],
    }


def _read(output: bytes) -> tuple[dict[str, Any] | None, str]:
    """The result, if the child came that far, and the plugin it touched last."""
    culprit = ""
    for line in output.splitlines():
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # a plugin printed something
        if isinstance(message, dict) and "loading" in message:
            culprit = message["loading"]
        elif isinstance(message, dict) and "found" in message:
            return message["found"], culprit
    return None, culprit


def main() -> int:
    """The child's side: a request on standard input, progress and result as JSON lines on standard output."""
    request = orjson.loads(sys.stdin.buffer.read())

    def write(message: dict[str, Any]) -> None:
        sys.stdout.buffer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()

    found = discover(from_mapping(request["config"]), request["leave_out"], lambda name: write({"loading": name}))
    write({"found": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
