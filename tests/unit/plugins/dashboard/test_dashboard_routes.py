"""Goal: OpenAPI document, documentation and settings say what the server has; without its extra it says so.

Method: the references of the document; the tables of docs/dashboard.md beside routes and settings; a process
in which jinja2 cannot be found.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import NodeConfig, from_mapping
from commitmq.security.start_rule import exposed
from commitmq_plugins.dashboard import DashboardSettings, commitmq_workers
from commitmq_plugins.dashboard.api.routes import ROOT, ROUTES, document, match

PAGE = Path(__file__).parents[4] / "docs" / "dashboard.md"


def config(**settings: Any) -> NodeConfig:
    return from_mapping({"plugins": {"dashboard": settings}})


def test_the_document_is_whole() -> None:
    made = json.loads(json.dumps(document(ROUTES)))
    assert made["openapi"].startswith("3.1")
    assert set(made["paths"]) == {one.api_path for one in ROUTES}
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(made)):
        assert reference in made["components"]["schemas"]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            named = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            assert ("requestBody" in operation) == (method == "post")
    names = [one.answers.__name__ for one in ROUTES]
    assert len({one.work.__name__ for one in ROUTES}) == len(ROUTES), "operation ids are unique"
    assert set(names) <= set(made["components"]["schemas"])


def test_paths() -> None:
    assert match("/topics/{topic}", "/topics/%25DLQ%25a%2Fb") == {"topic": "%DLQ%a/b"}
    assert match("/topics/{topic}", "/topics/") is None
    assert match("/topics/{topic}", "/topics/a/b") is None
    assert match("/topics", "/topics") == {}
    with pytest.raises(UnicodeDecodeError):
        match("/topics/{topic}", "/topics/%ff")


def test_the_page_lists_all_routes_and_settings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(GET|POST)` \| `(\S+)` \|", text, re.MULTILINE))
    assert rows >= {(one.method, one.api_path.removeprefix(ROOT)) for one in ROUTES}
    settings = dict(re.findall(r"^\| `([a-z_]+)` \| (\S+) \|", text, re.MULTILINE))
    assert list(settings) == [one.name for one in dataclasses.fields(DashboardSettings)]
    for one in dataclasses.fields(DashboardSettings):
        shown = {True: "true", False: "false", "": "empty"}.get(one.default, str(one.default))
        assert settings[one.name] == shown, one.name


def test_each_page_has_its_pictures() -> None:
    text = (PAGE.parent / "dashboard-pictures.md").read_text(encoding="utf-8")
    names = [f"{one.picture}-{scheme}.png" for one in ROUTES if one.method == "GET" for scheme in ("light", "dark")]
    assert re.findall(r"\(pictures/dashboard/([^)]+)\)", text) == names
    sizes = {path.name: path.stat().st_size for path in (PAGE.parent / "pictures" / "dashboard").iterdir()}
    assert set(sizes) == set(names)
    assert sum(sizes.values()) < 800_000


def test_it_is_off_until_it_is_turned_on() -> None:
    assert commitmq_workers(config()) == []
    [spec] = commitmq_workers(config(enable=True))
    assert spec.name == "dashboard"
    assert exposed(spec.listeners, has_users=False) == []
    [spec] = commitmq_workers(config(enable=True, host="0.0.0.0"))
    for has_users in (False, True):
        [open_one] = exposed(spec.listeners, has_users=has_users)
        assert open_one.name == "dashboard"


def test_a_missing_extra_is_named() -> None:
    program = """
import sys
sys.modules["jinja2"] = None
from commitmq.config import from_mapping
from commitmq.errors import MissingExtraError
from commitmq_plugins.dashboard import commitmq_workers
assert commitmq_workers(from_mapping({})) == []
try:
    commitmq_workers(from_mapping({"plugins": {"dashboard": {"enable": True}}}))
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == (
        "the dashboard needs jinja2, which is not installed: pip install 'commitmq[dashboard]'"
    )


def test_the_plugin_is_light_where_it_is_off() -> None:
    heavy = ("jinja2", "zmq", "numpy", "psutil")
    program = f"import commitmq_plugins.dashboard, sys; print([one for one in {heavy} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
