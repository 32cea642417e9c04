"""Goal: in a real browser the dashboard works without a script, an error, or a request to another place, light and dark.

Method: chromium, driven by Playwright, on a real node; skipped where one is missing. Somebody who types and clicks finds
a message by key, resets a group after a preview, and resends a dead letter. Hostile names and bodies go through the pages of
messages. With COMMITMQ_SCREENSHOTS=docs/pictures/dashboard the pictures of the documentation are made anew.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from commitmq import Admin, Producer
from commitmq_plugins.dashboard.api.routes import ROUTES, Route
from delays import Peer
from nodes import Node, eventually, free_ports, start_node
from transactions import send_half

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
    settings = [f"plugins.dashboard.{one}" for one in ("enable=true", f"port={port}", "age_ms=0", "history_s=1")]
    # The pictures of the documentation show the store's place.
    shown = "COMMITMQ_SCREENSHOTS" in os.environ
    folder = Path(tempfile.mkdtemp("", "demo-", "/var/tmp")) if shown else tmp_path_factory.mktemp("browser")
    with start_node(folder, *settings, "groups.auto_create=true") as node:
        eventually(lambda: "worker-dashboard" in ready(node), "the dashboard is ready")
        fill(node)
        yield f"http://127.0.0.1:{port}"


def ready(node: Node) -> set[str]:
    return {row["role"] for row in node.report()["processes"] if row["state"] == "ready"}


def fill(node: Node) -> None:
    with Admin(node.address) as admin, Producer(node.address, trace=True) as producer, Peer(node) as peer:
        for name in ("orders", "bills", "hostile", "%DLQ%desk", "%RETRY%desk"):
            admin.topic_create(name, 1)
        assert peer.hello()["ok"]
        for number in range(5):
            sent = producer.send(
                "orders", b"cup %d" % number, keys=[f"k{number}"], tags="hot", properties={"table": "7"}
            )
        place: Any = {"queue": 0, "queue_offset": sent.queue_offset, "physical_offset": sent.physical_offset}
        assert peer.ask(b"", op="send_back", group="desk", topic="orders", delay_level=-1, **place)["ok"]
        admin.commit_offsets("desk", [("orders", 0, 5)])
        admin.commit_offsets("late", [("orders", 0, 1)])
        producer.send("hostile", HOSTILE.encode(), keys=["h"], tags=HOSTILE, properties={HOSTILE: HOSTILE})
        producer.send("bills", b"a bill", delay=3_600, keys="bill-1")
        assert send_half(peer, "bills", b"half a bill", KEYS="bill-2")["ok"]
        eventually(lambda: admin.offsets("%DLQ%desk")[0].max == 1, "the dead letter can be read")
        eventually(lambda: len(admin.query("orders", key="k4")) == 1, "the index has all")
        eventually(lambda: len(admin.query("hostile", key="h")) == 1, "and the last")


@pytest.fixture(params=["light", "dark"])
def page(chromium: Any, origin: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that has no complaint at its end."""
    window = {"width": 900, "height": 560}
    context = chromium.new_context(color_scheme=request.param, base_url=origin, viewport=window)
    made = context.new_page()
    wrong: list[str] = []
    made.on("console", lambda message: wrong.append(message.text))
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("request", lambda one: None if one.url.startswith(origin + "/") else wrong.append(one.url))
    made.on("dialog", lambda one: wrong.append("a dialog"))
    yield made
    context.close()
    assert wrong == []


def values_of(page: Any) -> dict[str, str]:
    """What stands for the names in the paths of pages, and the query that some need."""

    def read(path: str) -> Any:
        return page.request.get(f"/api/v1{path}").json()

    message = read("/search?topic=orders&key=k4")["messages"][0]["message_id"]
    (waiting,) = read("/delayed")["messages"]
    (half,) = read("/transactions")["transactions"]
    return {
        "/delayed/{handle}": f"/delayed/{quote(waiting['handle'], safe='')}",
        "/transactions/{id}": f"/transactions/{half['id']}?decision=commit",
        "/groups/{group}/reset": "/groups/desk/reset?to=earliest",
        "/search": "/search?topic=orders&key=k4",
        "{topic}": "orders",
        "{group}": "desk",
        "{id}": message,
    }


def shot(page: Any, shown: Route, folder: Path) -> None:
    """A picture of the page, with few colours: a file of some kilobytes."""
    scheme = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
    path = folder / f"{shown.picture}-{scheme}.png"
    assert len(page.screenshot(path=path)) > 5_000
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    with images.open(path) as found:
        small = found.convert("RGB").quantize(8, kmeans=2, dither=images.Dither.NONE)
    small.save(path, optimize=True, bits=3)
    assert path.stat().st_size < 40_000


def test_every_page(page: Any, tmp_path: Path) -> None:
    values = values_of(page)
    shots = Path(os.environ.get("COMMITMQ_SCREENSHOTS") or tmp_path)
    shots.mkdir(parents=True, exist_ok=True)
    for shown in ROUTES:
        if shown.method != "GET":
            continue
        path = shown.path
        for name, value in values.items():
            path = path.replace(name, value) if name.startswith("{") or name == shown.path else path
        answer = page.goto(path)
        assert answer.status == 200, path
        assert page.locator("h1").count() == 1
        assert page.title().endswith("CommitMQ"), "a script ran"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the window"
        shot(page, shown, shots)
    page.goto("/search?topic=hostile&key=h")
    page.locator("tbody a").first.click()
    assert page.title().endswith("CommitMQ"), "a script ran"
    for path in ("/topics/hostile/messages", "/topics/hostile/tail", "/topics?q=%3Cscript%3E"):
        page.goto(path)
        assert page.title().endswith("CommitMQ"), "a script ran"


def test_the_live_view_loads_itself(page: Any, origin: str) -> None:
    page.goto("/topics/orders/tail?every=1")
    page.wait_for_url("**seen=**", timeout=10_000)
    assert page.locator("tbody tr").count() >= 5


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
