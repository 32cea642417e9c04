"""Goal: whatever is wrong with a plugin, it is named with its distribution and the reason, and nothing else suffers.

Method: real distributions (modules with an entry point's metadata) in one folder, one mistake each; `commitmq plugins --all`
and the status of a real node must name every one of them, and the node must run with all that is well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer
from nodes import Node, commitmq, environment, eventually

HEAD = "from commitmq.plugin import ConfigSection, DispatcherSpec, FilterSpec, WorkerSpec, hookimpl\n"


def hook(name: str, body: str, arguments: str = "config") -> str:
    return f"{HEAD}@hookimpl\ndef commitmq_{name}({arguments}):\n    {body}\n"


# module: (its code, where it fails, a part of the reason)
BROKEN: dict[str, tuple[str, str, str]] = {
    "no_import": ("import there_is_no_such_module\n", "import", "No module named 'there_is_no_such_module'"),
    "bad_syntax": ("def broken(:\n", "import", "SyntaxError"),
    "exits_softly": ("raise SystemExit(3)\n", "import", "SystemExit: 3"),
    "raises": ("1 / 0\n", "import", "ZeroDivisionError"),
    "ends_the_process": ("import os\nos._exit(0)\n", "import", "the process that imported it ended"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "import", "ended"),
    "hangs": ("import time\ntime.sleep(3600)\n", "import", ""),
    "wrong_signature": (hook("dispatchers", "return []", "nodes"), "registration", "nodes"),
    "unknown_hook": (hook("dispatcher", "return []"), "registration", "there is no hook commitmq_dispatcher; hooks are"),
    "other_version": ("COMMITMQ_HOOK_API = 99\n", "registration", "version 99 of the hooks, this node has version 1"),
    "raises_in_dispatchers": (hook("dispatchers", "1 / 0"), "commitmq_dispatchers", "ZeroDivisionError"),
    "raises_in_workers": (hook("workers", "1 / 0"), "commitmq_workers", "ZeroDivisionError"),
    "raises_in_filters": (hook("filters", "1 / 0"), "commitmq_filters", "ZeroDivisionError"),
    "raises_in_config": (hook("config", "1 / 0", ""), "commitmq_config", "ZeroDivisionError"),
    "hangs_in_a_hook": (hook("workers", "import time; time.sleep(3600)"), "import", ""),
    "ends_in_a_hook": (hook("config", "import os; os._exit(1)", ""), "import", "ended"),
    "prints": ("print('{', end='')\nprint('{}')\nraise ImportError('enough')\n", "import", "enough"),
    "exits_in_a_hook": (hook("dispatchers", "raise SystemExit"), "commitmq_dispatchers", "SystemExit"),
    "nonsense_dispatchers": (hook("dispatchers", "return 42"), "commitmq_dispatchers", "not iterable"),
    "nonsense_in_the_list": (hook("dispatchers", "return ['x']"), "commitmq_dispatchers", "a list of DispatcherSpec"),
    "nonsense_workers": (hook("workers", "return [object()]"), "commitmq_workers", "a list of WorkerSpec"),
    "nonsense_filters": (hook("filters", "return [None]"), "commitmq_filters", "a list of FilterSpec"),
    "nonsense_config": (hook("config", "return 'x'", ""), "commitmq_config", "must return a ConfigSection"),
    "a_schema_without_defaults": (
        hook("config", "return ConfigSection('mine', int.from_bytes)", ""), "commitmq_config", "Error",
    ),
    "bad_name": (hook("dispatchers", "return [DispatcherSpec('../x', 'a:b')]"), "commitmq_dispatchers", "is no name"),
    "bad_factory": (
        hook("dispatchers", "return [DispatcherSpec('x', 'a.b')]"), "commitmq_dispatchers", "must be module:attribute",
    ),
    "factory_is_no_text": (
        hook("dispatchers", "return [DispatcherSpec('x', 7)]"), "commitmq_dispatchers", "must be module:attribute",
    ),
    "takes_our_name": (
        hook("dispatchers", "return [DispatcherSpec('consume_queue', 'a:b')]"), "commitmq_dispatchers", "exists already",
    ),
    "takes_our_name_first": (
        hook("dispatchers", "return [DispatcherSpec('index', 'a:b')]").replace("@hookimpl", "@hookimpl(trylast=True)"),
        "commitmq_dispatchers", "a dispatcher of the node's own",
    ),
    "stores_topics": (
        hook("dispatchers", "return [DispatcherSpec('x', 'a:b', stores_topics=True)]"),
        "commitmq_dispatchers", "memory topics",
    ),
    "takes_our_filter": (hook("filters", "return [FilterSpec('SQL92', 'a:b')]"), "commitmq_filters", "already"),
}  # fmt: skip

WELL = {
    # Found after the others, by its name, so that all of them came first.
    "zz_well": hook("dispatchers", "return [DispatcherSpec('well', 'zz_well:Well', can_undo=object())]")
    + """
class Well:
    def open(self, view):
        self.position = view.position
        return view.position
    def dispatch(self, batch):
        self.position = batch.end
    def flush(self, *, thorough):
        return self.position, 0
    def truncate(self, offset):
        raise NotImplementedError
    def expire(self, min_offset):
        pass
    def query(self, request):
        return {"position": self.position}
    def close(self):
        pass
""",
    "zz_twice": "",
    "zz_no_class": hook("dispatchers", "return [DispatcherSpec('no_class', 'zz_no_class:Missing')]"),
    "zz_bad_command": HEAD + "@hookimpl\ndef commitmq_register_commands(cli):\n    1 / 0\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like an environment with all these distributions in it."""
    root = tmp_path_factory.mktemp("plugins")
    codes = {**{name: code for name, (code, _, _) in BROKEN.items()}, **WELL}
    for name, code in codes.items():
        (root / f"{name}.py").write_text(code)
        metadata = root / f"dist_{name}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.2\n")
        entry = "zz_well" if name == "zz_twice" else name
        (metadata / "entry_points.txt").write_text(f"[commitmq]\n{entry} = {name}\n")
    return root


@pytest.fixture(scope="module")
def variables(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("loading") / "store", "supervisor.plugin_load_timeout_s=1")
    try:
        ended = node.start(**variables)
        assert ended.returncode == 0, ended.stderr
        yield node
        assert node.stop().returncode == 0, node.log_tail()
    finally:
        node.end()


@pytest.fixture(scope="module")
def in_status(node: Node) -> list[dict[str, Any]]:
    return list(node.report()["plugins"])


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> list[dict[str, Any]]:
    config = tmp_path_factory.mktemp("config") / "node.toml"
    config.write_text("[supervisor]\nplugin_load_timeout_s = 1\n")
    ended = commitmq("plugins", "--all", "--json", "--config", str(config), **variables)
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_named_with_its_distribution_and_the_reason(
    name: str, listed: list[dict[str, Any]], in_status: list[dict[str, Any]]
) -> None:
    _, where, reason = BROKEN[name]
    for reports in (listed, in_status):
        report = next(one for one in reports if one["name"] == name)
        assert (report["distribution"], report["version"]) == (f"dist-{name}", "1.2")
        assert report["failed_in"] == where, report
        assert reason in report["failure"], report


def test_a_name_that_two_have_is_the_first_ones(listed: list[dict[str, Any]], in_status: list[dict[str, Any]]) -> None:
    for reports in (listed, in_status):
        both = sorted((one for one in reports if one["name"] == "zz_well"), key=lambda one: bool(one["failure"]))
        assert [bool(one["failure"]) for one in both] == [False, True]
        assert "another plugin is called 'zz_well' too" in both[1]["failure"]


def test_the_node_runs_on_with_what_is_well(node: Node, in_status: list[dict[str, Any]]) -> None:
    for name in ("commitmq_dispatchers.consume_queue", "commitmq_dispatchers.index", "commitmq_plugins.sql92"):
        assert next(one for one in in_status if one["name"] == name)["failure"] is None
    with Producer(node.address) as producer:
        end = producer.send("T", b"x").physical_offset
    with Admin(node.address) as admin:

        def ours() -> dict[str, Any]:
            return {row["name"]: row for row in admin.dispatchers()}

        rows = ours()
        assert {"consume_queue", "index", "no_class"} <= rows.keys()
        if "well" in rows:  # the other distribution of that name may be the first one
            eventually(lambda: ours()["well"]["position"] > end, "the well one has seen the message")
            assert admin.dispatcher_query("well", {})["position"] > end
        eventually(lambda: "Missing" in str(ours()["no_class"]["last_error"]), "the missing class is named")


def test_a_command_that_cannot_be_added_is_one_line(variables: dict[str, str], folder: Path) -> None:
    # The command line imports plugins itself: those that no process survives are for `commitmq plugins` to find.
    only = f"zz_bad_command=zz_bad_command,{','.join(f'{n}={n}' for n in ('no_import', 'raises', 'unknown_hook'))}"
    alone = environment()
    alone_paths = folder / "alone"
    alone_paths.mkdir(exist_ok=True)
    for name in ("zz_bad_command", "no_import", "raises", "unknown_hook"):
        (alone_paths / f"{name}.py").write_bytes((folder / f"{name}.py").read_bytes())
    path = f"{alone_paths}:{alone['PYTHONPATH']}"
    ended = commitmq("--help", COMMITMQ_PLUGINS=only, PYTHONPATH=path)
    assert ended.returncode == 0
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 4, ended.stderr
    for name, where in (
        ("zz_bad_command", "commitmq_register_commands"), ("no_import", "import"), ("raises", "import"),
        ("unknown_hook", "registration"),
    ):  # fmt: skip
        assert any(f"plugin {name} failed in {where}" in line for line in lines), lines
    listed = json.loads(commitmq("plugins", "--json", COMMITMQ_PLUGINS=f"{only},nonsense", PYTHONPATH=path).stdout)
    assert {one["distribution"] for one in listed if one["name"] in only} == {"COMMITMQ_PLUGINS"}
    broken = next(one for one in listed if one["name"] == "nonsense")
    assert "'nonsense' is not name=module" in broken["failure"]
