"""Goal: only this server's names, its own pages, its own tokens and fresh links are let in.

Method: requests that differ from a good one in one thing; a clock that is handed in.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from commitmq.errors import StoreError
from commitmq_plugins.dashboard import DashboardSettings
from commitmq_plugins.dashboard.guard import (
    LINK_LIFE_S,
    SESSION_LIFE_S,
    TOKEN_HEADER,
    Login,
    Logins,
    RefusedError,
    Sessions,
    check_host,
    check_origin,
    cookie_of,
    make_link,
    set_cookie,
)
from commitmq_plugins.dashboard.process import LoginAttempts
from commitmq_plugins.http_server import Request

NAMES = DashboardSettings(host="192.0.2.7", names="mq.example; MQ2.example,x").host_names()


def request(**headers: str) -> Request:
    return Request("POST", "/topics", "", {name.replace("_", "-"): one for name, one in headers.items()})


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:1",
        "127.0.0.1:7380",
        "[::1]:7380",
        "[::1]",
        "192.0.2.7",
        "Mq.Example:80",
        "mq2.example",
        "x",
    ],
)
def test_our_names(host: str) -> None:
    assert check_host(request(host=host), NAMES) == host.lower()


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "evil.example:localhost", ":", "::1", "127.0.0.1:1:1", "localhost "],
)
def test_other_names(host: str) -> None:
    with pytest.raises(RefusedError) as raised:
        check_host(request(host=host), NAMES)
    assert raised.value.status == 421


def test_an_origin_is_the_servers_own() -> None:
    check_origin(request(origin="http://localhost:1"), "localhost:1")
    check_origin(request(origin="https://mq.example"), "mq.example")
    check_origin(request(**{TOKEN_HEADER: ""}), "localhost:1")
    for origin in (
        "http://localhost",
        "http://localhost:2",
        "null",
        "",
        "ftp://localhost:1",
        "http://localhost:1.evil",
    ):
        with pytest.raises(RefusedError):
            check_origin(request(origin=origin, **{TOKEN_HEADER: ""}), "localhost:1")
    with pytest.raises(RefusedError):
        check_origin(request(), "localhost:1")


def test_a_token_belongs_to_its_session_and_to_its_server() -> None:
    sessions = Sessions(10, 10)
    mine, other = sessions.new(), sessions.new()
    sessions.check_token(mine, sessions.token(mine))
    for session, token in ((mine, sessions.token(other)), (mine, ""), (mine, "é"), ("", sessions.token(""))):
        with pytest.raises(RefusedError):
            sessions.check_token(session, token)
    with pytest.raises(RefusedError):
        Sessions(10, 10).check_token(mine, sessions.token(mine))


def test_cookies() -> None:
    session = Sessions.new()
    name, text = set_cookie(session)
    assert (name, text.count(";")) == ("Set-Cookie", 3)
    assert cookie_of({"cookie": f"a=b; {text.partition(';')[0]}; c=d"}) == session
    for wrong in (
        "",
        "commitmq_session=",
        "commitmq_session=x",
        f"commitmq_session={session}0",
        "=;=",
        "commitmq_session=" + "G" * 32,
    ):
        assert cookie_of({"cookie": wrong}) == ""


def test_logins_are_bounded() -> None:
    sessions = Sessions(3, 3)
    logged_in = [sessions.log_in(Login(f"u{number}")) for number in range(5)]
    found = [sessions.login(one) for one in logged_in]
    assert found == [None, None, Login("u2"), Login("u3"), Login("u4")]
    assert len(set(logged_in)) == 5
    sessions.log_out(logged_in[3])
    sessions.log_out("never")
    assert [sessions.login(one) for one in (logged_in[3], "", "0" * 32)] == [None] * 3


def test_a_user_ends_only_sessions_of_its_own() -> None:
    sessions = Sessions(6, 3)
    owner = sessions.log_in(Login())
    robber = [sessions.log_in(Login("robber")) for _ in range(100)]
    others = [sessions.log_in(Login(f"u{number}")) for number in range(3)]
    assert sessions.login(owner) == Login()
    assert [sessions.login(one) for one in robber[-3:]] == [None, Login("robber"), Login("robber")]
    assert all(sessions.login(one) for one in others)


def test_a_login_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(3, 3)
    session = sessions.log_in(Login("ann"))
    assert sessions.login(session) == Login("ann")
    later = time.monotonic() + SESSION_LIFE_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert sessions.login(session) is None


def test_a_link_serves_once_for_a_minute_and_for_one_life(tmp_path: Path) -> None:
    folder = tmp_path / "workers" / "dashboard"
    with pytest.raises(StoreError, match="cannot read the dashboard's key"):
        make_link(folder)
    logins = Logins(folder)
    link, now = make_link(folder), time.monotonic()
    for wrong in ("", ".", "x", link + "0", link[:-1], "a" + link, link.replace("-", "-1"), "é.é"):
        with pytest.raises(RefusedError):
            logins.use(wrong, now)
    with pytest.raises(RefusedError):
        logins.use(link, now + LINK_LIFE_S + 2)
    assert logins.use(link, now) == ""
    for at in (now, now + LINK_LIFE_S - 2, now + LINK_LIFE_S + 2):
        with pytest.raises(RefusedError):
            logins.use(link, at)
    second = make_link(folder)
    with pytest.raises(RefusedError):
        Logins(folder).use(second, now)
    assert (folder / "login.key").stat().st_mode & 0o777 == 0o600
    assert (folder / "login.key").read_text() not in link


def test_a_link_names_its_user_and_nobody_else(tmp_path: Path) -> None:
    logins, now = Logins(tmp_path), time.monotonic()
    for name in ("ann", "a.b-c_d@e-1", "n" * 128):
        assert logins.use(make_link(tmp_path, name), now) == name
    link = make_link(tmp_path, "ann")
    for wrong in (
        link.replace("ann", "root"),
        link.replace("-ann", ""),
        link.replace("-ann", "-"),
        link.replace(".", "-x."),
    ):
        with pytest.raises(RefusedError):
            logins.use(wrong, now)
    assert logins.use(link, now) == "ann"


def test_secrets_are_not_found_by_trying() -> None:
    attempts = LoginAttempts()
    for number in range(10):
        attempts.check("ann", float(number))
        attempts.note("ann", float(number))
    with pytest.raises(RefusedError) as raised:
        attempts.check("ann", 10.0)
    assert raised.value.status == 429
    attempts.check("bob", 10.0)
    attempts.check("ann", 61.0)  # the first ones are a minute ago
    for number in range(100):
        attempts.note(f"u{number}", 61.0)
    with pytest.raises(RefusedError):
        attempts.check("carl", 62.0)
    attempts.check("carl", 122.0)
