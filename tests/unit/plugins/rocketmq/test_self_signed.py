"""Goal: a server without a certificate makes one: its key is its owner's alone, it is used again, and what is wrong with it is
told or mended.

Method: the real file and real handshakes in the test's own loop; files and folders that tests damage by hand.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commitmq.errors import ConfigError
from commitmq.log import get_log
from commitmq_plugins.rocketmq import RocketMQSettings
from commitmq_plugins.rocketmq.remoting import tls
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, encode
from commitmq_plugins.rocketmq.remoting.server import RemotingConnection, RemotingServer, tls_of
from commitmq_plugins.rocketmq.remoting.tls import Tls, TlsUnavailableError, load_or_make

LOG = get_log("test")


def path_of(folder: Path) -> Path:
    return folder / "workers" / "rocketmq_broker" / tls.FILE


def test_it_is_made_once_and_used_again(tmp_path: Path) -> None:
    path = path_of(tmp_path)
    before = os.umask(0)
    try:
        load_or_make(path, LOG)
    finally:
        os.umask(before)
    made = path.read_bytes()
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    assert made.count(b"PRIVATE KEY") == 2
    load_or_make(path, LOG)
    assert path.read_bytes() == made
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("fault", ["gone", "damaged", "empty", "cut", "readable", "at its end"])
def test_an_unusable_one_is_replaced(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(tmp_path)
    if fault == "at its end":
        monkeypatch.setattr(tls, "_VALID", datetime.timedelta(hours=12))
    load_or_make(path, LOG)
    monkeypatch.undo()
    made = path.read_bytes()
    actions: dict[str, Callable[[], Any]] = {
        "gone": path.unlink,
        "damaged": partial(path.write_bytes, made.replace(b"BEGIN CERTIFICATE", b"BEGIN NOTHING")),
        "empty": partial(path.write_bytes, b""),
        "cut": partial(path.write_bytes, made[:-100]),
        "readable": partial(path.chmod, 0o640),
        "at its end": lambda: None,
    }
    actions[fault]()
    load_or_make(path, LOG)
    assert path.read_bytes() != made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = path.read_bytes()
    load_or_make(path, LOG)
    assert path.read_bytes() == again


def test_a_file_that_a_death_left_has_no_say_about_the_mode(tmp_path: Path) -> None:
    path = path_of(tmp_path)
    path.parent.mkdir(parents=True)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(b"half")
    beside.chmod(0o644)
    load_or_make(path, LOG)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_made_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workers").write_bytes(b"a file where the folder should be")
    with pytest.raises(
        TlsUnavailableError, match=r"cannot be made or read: .*; make it possible, or name tls_certificate"
    ):
        load_or_make(path_of(tmp_path), LOG)
    folder = tmp_path / "folder" / tls.FILE
    folder.mkdir(parents=True)
    with pytest.raises(TlsUnavailableError, match="is no file"):
        load_or_make(folder, LOG)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(TlsUnavailableError, match=r"pip install 'commitmq\[node\]'"):
        load_or_make(tmp_path / "other" / tls.FILE, LOG)


def test_the_settings_of_a_certificate_go_together(tmp_path: Path) -> None:
    RocketMQSettings().check()
    with pytest.raises(ValueError, match="go together"):
        RocketMQSettings(tls_certificate="/c.pem").check()
    assert tls_of(RocketMQSettings(tls_mode="disabled"), tmp_path, LOG) is None
    with pytest.raises(ConfigError, match=r"tls_certificate and tls_key: /no/c\.pem and /no/k\.pem cannot be used"):
        tls_of(RocketMQSettings(tls_certificate="/no/c.pem", tls_key="/no/k.pem"), tmp_path, LOG)
    found = tls_of(RocketMQSettings(tls_mode="enforcing"), tmp_path, LOG)
    assert found is not None
    assert (found.context, found.is_required) == (None, True)
    assert list(tmp_path.iterdir()) == [], "nothing is made before a client asks"


# ---------------------------------------------------------------- in a server


def echo(connection: RemotingConnection, command: Command) -> Command:
    return command.answer(body=bytes(command.body))


async def asked(port: int, context: ssl.SSLContext | None) -> bytes:
    """The body of one answer; empty when the connection ended."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return b""
    try:
        writer.write(encode(Command(1, body=b"hello")))
        parser = FrameParser(1 << 20)
        while data := await reader.read(65_536):
            for answer in parser.feed(data):
                return bytes(answer.body)
        return b""
    finally:
        writer.close()


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def serving(found: Tls | None, talk: Callable[[int], Any]) -> Any:
    async def main() -> Any:
        server = RemotingServer(echo, lambda connection: None, LOG, tls=found)
        port = await server.listen("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                return await talk(port)
        finally:
            await server.close()

    return asyncio.run(main())


def test_both_kinds_of_clients_are_served_and_one_certificate_is_made_for_all(tmp_path: Path) -> None:
    path = path_of(tmp_path)
    calls = []

    def make() -> ssl.SSLContext:
        calls.append(threading.current_thread() is threading.main_thread())
        return load_or_make(path, LOG)

    async def talk(port: int) -> None:
        answers = await asyncio.gather(*(asked(port, trusting() if number % 2 else None) for number in range(8)))
        assert answers == [b"hello"] * 8
        knowing = ssl.create_default_context(cafile=str(path))
        knowing.check_hostname = False
        assert await asked(port, knowing) == b"hello"

    serving(tls.load("permissive", "", "", make), talk)
    assert calls == [False], "made once, in a thread"


def test_without_a_certificate_plain_clients_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_AGAIN_S", 600)
    blocked = tmp_path / "workers"
    blocked.write_bytes(b"")
    tries = []

    def make() -> ssl.SSLContext:
        tries.append(1)
        return load_or_make(path_of(tmp_path), LOG)

    async def talk(port: int) -> None:
        assert await asyncio.gather(*(asked(port, trusting()) for _ in range(5))) == [b""] * 5
        assert await asked(port, trusting()) == b""
        assert tries == [1], "a failure holds for a moment"
        assert await asked(port, None) == b"hello"
        blocked.unlink()
        assert found is not None
        found._again_s = 0.0
        assert await asked(port, trusting()) == b"hello"

    found = tls.load("permissive", "", "", make)
    serving(found, talk)
