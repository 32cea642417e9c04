"""Finds the parts that plugins add to a node, in a process of its own, because importing foreign code can do anything.

:func:`discover` imports every plugin and calls the hooks that declare dispatchers, workers and filters. It reports the
name of each plugin before it touches the plugin. So when the process hangs or ends, its parent knows the culprit and
asks again without it. At a node's start the parent is the supervisor (role ``discovery``); for ``commitmq plugins`` it
is :func:`discover_in_child`. No other process of a node imports a plugin's module, except the processes that run a part
of that plugin.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from commitmq.config import NodeConfig, from_mapping
from commitmq.plugin import loading as plugins
from commitmq.protocol import wire

_MAX_ATTEMPTS = 20
_START_S = 60.0


def discover(config: NodeConfig, leave_out: Mapping[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Load all plugins except ``leave_out`` and call their hooks. ``say`` gets the name of each plugin before its
    import, and again before each of its hooks.

    Returns ``plugins`` (reports), ``dispatchers`` and ``workers`` (dicts with name, factory, plugin), ``filters``
    (dicts with type, factory, plugin), ``config_errors`` (sentences about ``[plugins.NAME]`` sections).
    """
    loaded = plugins.load_each(plugins.candidates(), before=lambda one: say(one.name), leave_out=leave_out)
    loaded.before = say
    config_errors = loaded.check_config(config)
    dispatchers = [
        {"name": spec.name, "factory": spec.factory, "can_undo": bool(spec.can_undo), "plugin": report.name,
         "built_in": report.is_built_in}
        for report, spec in loaded.dispatchers(config)
    ]  # fmt: skip
    workers = [
        {"name": spec.name, "factory": spec.factory, "is_server": bool(spec.is_server), "plugin": report.name,
         "built_in": report.is_built_in, "listeners": [asdict(one) for one in spec.listeners]}
        for report, spec in loaded.workers(config)
    ]  # fmt: skip
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
    """:func:`discover` in a child process, again and again until no plugin ends it or delays it for ``timeout_s``."""
    leave_out: dict[str, str] = {}
    for _ in range(_MAX_ATTEMPTS):
        found, culprit, why = _ask_child(config, leave_out, timeout_s)
        if found is not None:
            return found
        if not culprit or culprit in leave_out or culprit in plugins.BUILT_IN:
            break
        leave_out[culprit] = why
    return {
        "plugins": [],
        "dispatchers": [],
        "workers": [],
        "filters": [],
        "config_errors": [f"plugins cannot be listed: {why}"],
    }


def _ask_child(
    config: NodeConfig, leave_out: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, Any] | None, str, str]:
    """Run one child. Returns its result, or None, the plugin it touched last, and how the child ended.

    The time starts again with each plugin. The time that Python and the built-in code take on a slow machine does not
    count against a plugin.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "commitmq.supervision.discovery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(orjson.dumps({"config": config.to_dict(), "leave_out": dict(leave_out)}))
            child.stdin.close()
        culprit, pending, patience_s = "", b"", _START_S
        deadline = time.monotonic() + patience_s
        while select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = child.stdout.read(1 << 16)
            if not chunk:
                return None, culprit, f"the process that imported it ended with {child.wait()}"
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                message = orjson.loads(line)
                if "found" in message:
                    child.kill()  # a plugin may have left threads or exit handlers that wait
                    return message["found"], "", ""
                culprit = message["loading"]
                patience_s = _START_S if culprit in plugins.BUILT_IN else timeout_s
                deadline = time.monotonic() + patience_s
        child.kill()
        return None, culprit, f"its import, or a hook of it, took longer than {patience_s:g} s"


def main() -> int:
    """The child: a request on standard input, progress and result as JSON lines on standard output."""
    request = orjson.loads(sys.stdin.buffer.read())
    # The output of a plugin's import must not mix with the lines.
    lines = os.dup(1)
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        data = memoryview(wire.dumps(message) + b"\n")
        while data:
            data = data[os.write(lines, data) :]

    found = discover(from_mapping(request["config"]), request["leave_out"], lambda name: write({"loading": name}))
    write({"found": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
