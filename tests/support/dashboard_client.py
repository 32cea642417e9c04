"""A visitor of the dashboard: a browser's cookie and forms, or a program's JSON."""

from __future__ import annotations

import http.client
import json
import re
import time
from dataclasses import dataclass
from html import unescape
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True, slots=True)
class Answer:
    """``took_s``: from the request to the last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Visitor:
    """Keeps the cookie of its session, and the token of its last page."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.origin = f"http://127.0.0.1:{port}"
        self.cookie = ""
        self.token = ""

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        """One request, with the cookie; ``Content_Type`` is the header Content-Type."""
        given = {"Host": f"127.0.0.1:{self.port}", **({"Cookie": self.cookie} if self.cookie else {})}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        began = time.monotonic()
        try:
            connection.request(method, path, body, given)
            got = connection.getresponse()
            answer = Answer(
                got.status, {k.lower(): v for k, v in got.getheaders()}, got.read(), time.monotonic() - began
            )
        finally:
            connection.close()
        if cookie := answer.headers.get("set-cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer

    def get(self, path: str) -> Answer:
        """A page, or JSON. A page's token is kept for the next form."""
        answer = self.ask("GET", path)
        if found := re.search(rb'name="token" value="([0-9a-f]+)"', answer.body):
            self.token = found[1].decode()
        return answer

    def read(self, path: str) -> Any:
        """JSON under /api/v1, which must be there."""
        answer = self.get(f"/api/v1{path}")
        assert answer.status == 200, answer.text
        return answer.json

    def change(self, path: str, **values: Any) -> Answer:
        """A POST of JSON, as a program does it."""
        token = self.read("/session")["token"]
        headers = {"Content_Type": "application/json", "X_CommitMQ_Token": token}
        return self.ask("POST", f"/api/v1{path}", json.dumps(values), **headers)

    def submit(self, path: str, **values: Any) -> Answer:
        """A form of the last page, as a browser sends it."""
        form = urlencode({"token": self.token, **values}, doseq=True)
        return self.ask("POST", path, form, Content_Type="application/x-www-form-urlencoded", Origin=self.origin)


def texts(html: str) -> str:
    """The text of a page, without its markup."""
    return unescape(re.sub(r"<[^>]*>", " ", html))
