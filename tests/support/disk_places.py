"""The places of :mod:`commitmq.files.disk` in the sources: every call, what it is about, and the failpoints on its sides.

A call of :mod:`commitmq.files.atomic_file` stands for the calls that it makes there.
"""

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
    "reserve": ("reserve", 3), "resize": ("resize", 2),
}  # fmt: skip
# The function of commitmq.files.atomic_file, its operation, and which argument says what the call is about.
REPLACING = {"replace": ("content", 2), "write_beside": ("beside", 2), "take_name": ("name", 1)}
CONTENT = ("open", "sync", "replace", "sync_folder")  # what atomic_file.replace does
PASSING_CONTENT = ("open", "replace")  # and if the content need not survive a power cut
STEPS = {
    "content": CONTENT, "passing_content": PASSING_CONTENT, "beside": ("open", "sync"), "passing_beside": ("open",),
    "name": ("replace",),
}  # fmt: skip
# No files of a store.
NOT_OF_A_STORE = {"baseline.py", "export.py", "position_file.py", "snapshot.py", "support.py"}


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
        if path.name in ("disk.py", "atomic_file.py", *NOT_OF_A_STORE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Name) and function.id == "overwrite":
                assert isinstance(node, ast.Call)
                what = node.args[2]
                assert isinstance(what, ast.Constant), f"{path}: {ast.unparse(node)} does not say what it is about"
                yield from ((path, operation, str(what.value)) for operation in ("open", "sync", "sync_folder"))
                continue
            if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
                continue
            assert isinstance(node, ast.Call)
            if function.value.id == "atomic_file":
                if (
                    function.attr == "make_way"
                ):  # a rename of what nobody made for us, before the call that is in the table
                    continue
                operation, place = REPLACING[function.attr]
                argument = node.args[place]
                assert isinstance(argument, ast.Constant), f"{path}: {ast.unparse(node)} does not say what it is about"
                passing = any(one.arg == "durable" and ast.unparse(one.value) == "False" for one in node.keywords)
                yield path, f"passing_{operation}" if passing else operation, str(argument.value)
                continue
            if function.value.id != "disk" or function.attr not in (*OPERATIONS, "open_folder"):
                continue
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
                for kind in (*queue_kinds(), *(["queue_folder"] if path.parent.name == "commitmq_dispatchers" else [])):
                    yield path, operation, kind


@cache
def places() -> set[str]:
    """Every place without its side: ``disk.sync.segment``."""
    found = {"disk.open.folder", "disk.rename.aside"}  # sync_folder's and set_aside's own
    for _, operation, what in calls():
        found |= {f"disk.{one}.{what}" for one in STEPS.get(operation, (operation,))}
    return found


def contents() -> set[str]:
    """What files are written for that replace others; each has a failpoint of its own, ``WHAT.write``."""
    return {what for _, operation, what in calls() if operation.endswith(("content", "beside"))}
