"""Goal: in a real browser the dashboard works without a script, an error, or a request to another place, light and dark.

Method: chromium, driven by Playwright, on a real node; skipped where one is missing. Somebody who types and clicks finds
a message by key, resets a group after a preview, and resends a dead letter. Hostile names and bodies go through every page.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer
from commitmq_plugins.dashboard.pages.views import PAGES
from delays import Peer
from nodes import Node, eventually, free_ports, start_node

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium")
    arguments = ["--disable-background-networking", *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_ports(1)
    settings = ("plugins.dashboard.enable=true", f"plugins.dashboard.port={port}", "plugins.dashboard.age_ms=0")
    with start_node(tmp_path_factory.mktemp("browser"), *settings, "groups.auto_create=true") as node:
        eventually(lambda: "worker-dashboard" in ready(node), "the dashboard is ready")
        fill(node)
        yield f"http://127.0.0.1:{port}"


def ready(node: Node) -> set[str]:
    return {row["role"] for row in node.report()["processes"] if row["state"] == "ready"}


def fill(node: Node) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer, Peer(node) as peer:
        for name in ("orders", "%DLQ%desk", "%RETRY%desk"):
            admin.topic_create(name, 1)
        assert peer.hello()["ok"]
        for number in range(5):
            body = HOSTILE.encode() if number == 4 else b"cup %d" % number
            sent = producer.send("orders", body, keys=[f"k{number}"], tags=HOSTILE, properties={"p": HOSTILE})
        place: Any = {"queue": 0, "queue_offset": sent.queue_offset, "physical_offset": sent.physical_offset}
        assert peer.ask(b"", op="send_back", group="desk", topic="orders", delay_level=-1, **place)["ok"]
        admin.commit_offsets("desk", [("orders", 0, 5)])
        eventually(lambda: admin.offsets("%DLQ%desk")[0].max == 1, "the dead letter can be read")
        eventually(lambda: len(admin.query("orders", key="k4")) == 1, "the index has all")


@pytest.fixture(params=["light", "dark"])
def page(chromium: Any, origin: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that has no complaint at its end."""
    context = chromium.new_context(color_scheme=request.param, base_url=origin)
    made = context.new_page()
    wrong: list[str] = []
    made.on("console", lambda message: wrong.append(message.text))
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("request", lambda one: None if one.url.startswith(origin + "/") else wrong.append(one.url))
    made.on("dialog", lambda one: wrong.append("a dialog"))
    yield made
    context.close()
    assert wrong == []


def test_every_page(page: Any, tmp_path: Path) -> None:
    page.goto("/search?topic=orders&key=k4")
    page.locator("tbody a").first.click()
    one = page.url.partition("/messages/")[2].partition("?")[0]
    shots = Path(os.environ.get("COMMITMQ_SCREENSHOTS") or tmp_path)
    scheme = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
    for shown in PAGES:
        if shown.method != "GET":
            continue
        path = shown.path.replace("{topic}", "orders").replace("{group}", "desk").replace("{id}", one)
        answer = page.goto(path + ("?to=earliest" if path.endswith("/reset") else ""))
        assert answer.status == 200, path
        assert page.locator("h1").count() == 1
        assert page.title().endswith("CommitMQ"), "a script ran"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the window"
        shot = page.screenshot(path=shots / f"{path.strip('/').replace('/', '-')[:20] or 'overview'}-{scheme}.png")
        assert len(shot) > 5_000


def test_three_flows(page: Any, origin: str) -> None:
    # A message by its key: 3 clicks.
    page.goto("/")
    page.get_by_role("navigation").get_by_role("link", name="Search").click()
    page.get_by_label("Topic", exact=True).fill("orders")
    page.get_by_label("Key", exact=True).fill("k2")
    page.get_by_role("button", name="Search").click()
    page.locator("tbody a").first.click()
    assert page.locator("pre").inner_text() == "cup 2"
    # A group back to its beginning, after a preview: 4 clicks.
    page.goto("/")
    page.get_by_role("link", name="Groups").click()
    page.locator("tbody").get_by_role("link", name="desk").click()
    page.get_by_label("Continue at").fill("earliest")
    page.get_by_role("button", name="Preview").click()
    assert "nothing has changed" in page.locator("main").inner_text()
    page.get_by_label("Type the group's name").fill("desk")
    page.get_by_role("button", name="Reset").click()
    assert "Done" in page.locator("main").inner_text()
    # A dead letter: 4 clicks.
    page.goto("/")
    page.get_by_role("link", name="Dead letters").click()
    page.locator("tbody").get_by_role("link", name="desk").click()
    if page.locator("tbody input").count():
        page.locator("tbody input").first.check()
        page.get_by_label("Type the group's name").fill("desk")
        page.get_by_role("button", name="Resend").click()
        assert "1 of 1 were sent" in page.locator("main").inner_text()
    else:  # the run before, in the other colours, has sent it
        assert "No dead letter" in page.locator("main").inner_text()
