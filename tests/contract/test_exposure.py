"""Goal: a real node refuses to be open to a network, with an exit code of its own, before anything is bound or changed.

Method: the command starts nodes whose listeners are on wildcards, with and without users, TLS and the explicit word. The rule
itself is tested in tests/unit/security/test_start_rule.py.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, eventually, free_port, started

TOKEN = "a-token-of-this-test-0123456789"
ROCKETMQ = ("plugins.rocketmq.enable=true", "plugins.rocketmq.host=0.0.0.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.255.255.1"])
def test_the_native_ports_are_refused_before_the_folder_is_touched(tmp_path: Path, host: str) -> None:
    node = Node(tmp_path / "store")
    ended = node.start(f"network.host={host}")
    assert ended.returncode == CliExit.INSECURE_LISTENER, ended.stderr
    assert f"native on {host} WITHOUT AUTHENTICATION OR ENCRYPTION" in ended.stderr
    assert not node.store.exists()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        pytest.param(
            ("metrics.enable=true", "metrics.host=::", "metrics.port=0"),
            "metrics on :: WITHOUT AUTHENTICATION OR",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*ROCKETMQ, "plugins.rocketmq.namesrv_port=0"),
            "rocketmq on 0.0.0.0 WITHOUT AUTHENTICATION OR",
            marks=pytest.mark.slow,
        ),
        ((*ROCKETMQ, "plugins.rocketmq.tls_mode=enforcing"), "rocketmq_namesrv on 0.0.0.0 WITHOUT AUTHENTICATION;"),
    ],
)
def test_servers_of_plugins_are_refused_before_they_run(tmp_path: Path, settings: tuple[str, ...], name: str) -> None:
    node = Node(tmp_path / "store")
    try:
        ended = node.start(*settings)
        assert ended.returncode == CliExit.INSECURE_LISTENER, ended.stderr
        assert name in ended.stderr
        remedy = {"metrics": "", "rocketmq": "make users", "rocketmq_namesrv": "have no name server"}[name.split()[0]]
        assert f"Keep it on loopback (127.0.0.1), or {remedy}" in ended.stderr
        assert not (node.store / "commitlog").exists(), "the store was opened"
    finally:
        node.end()


@pytest.mark.slow
def test_users_and_tls_open_rocketmqs_server_and_the_word_opens_the_rest(tmp_path: Path) -> None:
    node = Node(tmp_path / "store", "plugins.rocketmq.vip_port=false", f"network.store_port={free_port()}")
    with started(node):
        node.stop()
        assert commitmq("user", "add", "root", "--super", "--store", str(node.store)).returncode == 0
        safe = (*ROCKETMQ, "plugins.rocketmq.tls_mode=enforcing")
        assert node.start(*safe).returncode == CliExit.INSECURE_LISTENER, "the name server asks nobody"
        assert node.start(*ROCKETMQ, "plugins.rocketmq.namesrv_port=0").returncode == CliExit.INSECURE_LISTENER
        assert node.start(*safe, "plugins.rocketmq.namesrv_port=0").returncode == 0
        assert node.report()["node"]["insecure_listeners"] == []
        assert node.stop().returncode == 0
        tokens = tmp_path / "tokens"
        tokens.write_text(f"{TOKEN}\n")
        tokens.chmod(0o600)
        metrics = ("metrics.enable=true", "metrics.host=0.0.0.0", "metrics.port=0", f"metrics.token_file={tokens}")
        ended = node.start(*metrics)
        assert ended.returncode == CliExit.INSECURE_LISTENER
        assert "metrics on 0.0.0.0 WITHOUT ENCRYPTION" in ended.stderr, "a token is asked for, and nothing is encrypted"
        assert node.start(*metrics, "security.insecure_listeners=metrics;native").returncode == 0
        assert node.report()["node"]["insecure_listeners"] == ["metrics"], "native is on loopback"
        found = eventually(lambda: (node.row("worker-metrics") or {}).get("endpoints"), "metrics are served")
        address = str(found[0]).replace("0.0.0.0", "127.0.0.1")
        assert [
            status(address, "/metrics"),
            status(address, "/metrics", f"Bearer {TOKEN}x"),
            status(address, "/metrics", f"Bearer {TOKEN}"),
            status(address, "/health/live"),
        ] == [401, 401, 200, 200]


def status(address: str, path: str, authorization: str = "") -> int:
    asked = urllib.request.Request(address + path, headers={"Authorization": authorization} if authorization else {})
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
