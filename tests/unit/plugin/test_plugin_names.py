"""Goal: a plugin's author needs one module of names, and importing it costs a node's start nothing.

Method: each name is loaded; the template of ``commitmq plugins new`` is read; a fresh interpreter says what was imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from commitmq import plugin
from commitmq.plugin import hookspecs
from commitmq.plugin.project import TEMPLATE
from nodes import environment


@pytest.mark.parametrize("name", plugin.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(plugin, name) is not None
    assert name in dir(plugin)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Consumer'"):
        plugin.Consumer  # noqa: B018


def test_every_kind_of_thing_that_a_hook_returns_is_there() -> None:
    specs = {name for name in vars(hookspecs) if name.endswith("Spec") or name == "ConfigSection"}
    assert specs <= set(plugin.__all__)


def test_the_template_needs_nothing_else() -> None:
    imported = set()
    for path in TEMPLATE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("commitmq"):
                imported.add(node.module)
    assert imported <= {"commitmq", "commitmq.plugin", "commitmq.testing"}


def test_the_module_with_the_hooks_stays_light() -> None:
    code = (
        "import sys; from commitmq.plugin import ConfigSection, DispatcherSpec, hookimpl, setting;"
        "print(sorted({'numpy', 'zmq', 'isal', 'sqlite3'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
