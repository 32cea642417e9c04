"""The places of :mod:`commitmq.files.disk` in the sources: every call, what it is about, and the failpoints on its sides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ROOTS = (PROJECT / "node" / "commitmq", PROJECT / "dispatchers" / "commitmq_dispatchers")
# The function, its operation, and which argument says what the call is about.
OPERATIONS = {
    "open_file": ("open", 2), "opened": ("open", 2), "sync": ("sync", 1), "sync_folder": ("sync_folder", 1),
    "rename": ("rename", 2), "replace": ("replace", 2), "unlink": ("unlink", 1), "map_file": ("map", 2),
    "reserve": ("reserve", 3), "resize": ("resize", 2), "replace_content": ("content", 2),
}  # fmt: skip
CONTENT = ("open", "sync", "replace", "sync_folder")  # what replace_content does


@cache
def queue_kinds() -> list[str]:
    """What the files of queues are called, each a class of its own."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources())
    return sorted(set(re.findall(r'place: ClassVar\[str\] = "(\w+)"', text)) - {"journal"})


def sources() -> list[Path]:
    return sorted(path for root in ROOTS for path in root.rglob("*.py"))


def calls() -> Iterator[tuple[Path, str, str]]:
    """``(file, operation, what)`` of every call; what is a variable for is all it may be."""
    for path in sources():
        if path.name == "disk.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
                continue
            if function.value.id != "disk" or function.attr not in (*OPERATIONS, "open_folder"):
                continue
            assert isinstance(node, ast.Call)
            if function.attr == "open_folder":
                yield path, "open", "folder"
                continue
            operation, place = OPERATIONS[function.attr]
            if len(node.args) <= place:
                assert operation == "sync_folder", f"{path}: {ast.unparse(node)} does not say what it is about"
                yield path, operation, "folder"
                continue
            argument = node.args[place]
            if isinstance(argument, ast.Constant):
                yield path, operation, str(argument.value)
            else:
                for kind in (*queue_kinds(), *(["queue_folder"] if path.name == "background_sync.py" else [])):
                    yield path, operation, kind


@cache
def places() -> set[str]:
    """Every place without its side: ``disk.sync.segment``."""
    found = {"disk.open.folder"}  # sync_folder's own
    for _, operation, what in calls():
        found |= {f"disk.{one}.{what}" for one in (CONTENT if operation == "content" else (operation,))}
    return found


def contents() -> set[str]:
    """What :func:`commitmq.files.disk.replace_content` is called for; each has a failpoint of its own, ``WHAT.write``."""
    return {what for _, operation, what in calls() if operation == "content"}
