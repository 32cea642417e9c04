"""Creates a project for a new plugin: the template beside this module, under another name.

The template is a working project itself, called example-plugin; creating a plugin means replacing that name.
"""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from commitmq.errors import CommitMQError
from commitmq.plugin.loading import candidates, is_name
from commitmq.supervision.roster import FIXED_DISPATCHER_SLOTS

TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", re.ASCII)


class PluginProjectError(CommitMQError):
    """A project cannot be created with this name or at this place; nothing was written."""


def check_name(name: str, verbs: set[str]) -> str:
    """The module name for a plugin called ``name``. ``verbs`` are taken. Raises PluginProjectError."""
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or not is_name(module):
        raise PluginProjectError(
            f"{name!r:.100} is no name for a plugin: up to 40 of a-z, 0-9 and single dashes, a letter first"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or _is_module(module):
        raise PluginProjectError(f"there is a Python module {module} already; choose another name")
    if module in FIXED_DISPATCHER_SLOTS:
        raise PluginProjectError(f"{module} is the name of a dispatcher of the node itself; choose another name")
    if any(one.name == module for one in candidates()):
        raise PluginProjectError(f"a plugin called {module} is installed already; choose another name")
    if module.replace("_", "-") in verbs:
        raise PluginProjectError(f"there is a verb `commitmq {name}` already; choose another name")
    return module


def write(name: str, parent: Path, verbs: set[str]) -> Path:
    """Write the project ``name`` into a new folder of that name in ``parent``. Returns the folder. Raises
    PluginProjectError for an unusable name and for a folder that exists.
    """
    module = check_name(name, verbs)
    dashed = module.replace("_", "-")
    folder = parent / dashed
    if folder.exists():
        raise PluginProjectError(f"{folder} exists already")
    replacements = {
        "example_plugin": module,
        "example-plugin": dashed,
        "ExamplePlugin": "".join(part.capitalize() for part in module.split("_")),
    }

    def renamed(text: str) -> str:
        for old, new in replacements.items():
            text = text.replace(old, new)
        return text

    making = parent / f".{dashed}.new"
    try:
        for source in _template_files():
            target = making / renamed(str(source.relative_to(TEMPLATE)))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(source.read_text(encoding="utf-8")), encoding="utf-8")
        making.rename(folder)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise PluginProjectError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def _template_files() -> list[Path]:
    """The template's own files, without files that tools left between them."""
    files = [path for path in TEMPLATE.rglob("*") if path.is_file()]
    parts = {path: path.relative_to(TEMPLATE).parts for path in files}
    return sorted(path for path in files if not any(part.startswith((".", "__pycache__")) for part in parts[path]))


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return True
