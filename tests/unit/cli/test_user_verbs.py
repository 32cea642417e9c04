"""Goal: the verbs of users and of what they may do lose nothing silently: they show what they replace, ask before damage, and
say from where an entry counts.

Method: a store without a node; the verbs in this process, without a terminal, and with one that answers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.cli import output
from commitmq.cli.main import main


class Terminal(io.StringIO):
    """Standard input of somebody who sits before it."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., str]
ORDERS = "Topic:orders"


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A verb's output; what it complains of where its exit code is not 0."""
    (tmp_path / "commitlog").mkdir()
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--store", str(tmp_path)])
        found = capfd.readouterr()
        assert int(ended.value.code or 0) == code, found.err
        return found.out if code == 0 else found.out + found.err

    for name in ("root", "clerk"):
        run("user", "add", name, *(("--super",) if name == "root" else ()))
    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions that are answered with a no."""
    questions: list[str] = []

    def no(question: str) -> None:
        questions.append(question)
        raise SystemExit(1)

    monkeypatch.setattr(output, "confirm", no)
    return questions


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())


def test_an_entry_is_never_replaced_silently(run: Run) -> None:
    assert "before" not in run("acl", "allow", "clerk", ORDERS, "Pub,Sub")
    refused = run("acl", "deny", "clerk", ORDERS, "Delete", code=2)
    assert f"user clerk has the entry {ORDERS} Allow Pub,Sub" in refused
    assert "--replace" in refused
    assert f"commitmq acl remove clerk {ORDERS}" in refused
    assert "Pub, Sub" in run("acl", "list", "clerk"), "nothing was changed"
    told = run("acl", "allow", "clerk", ORDERS, "Pub", "--from", "10.1.0.0/16")
    assert f"before: {ORDERS} Allow Pub,Sub\nafter:  {ORDERS} Allow Pub from 10.1.0.0/16\n" in told
    assert f"before: {ORDERS} Allow Pub from 10.1.0.0/16\nafter:  {ORDERS} Deny Delete\n" in run(
        "acl", "deny", "clerk", ORDERS, "Delete", "--replace"
    )
    assert "before" not in run("acl", "deny", "clerk", ORDERS, "Delete"), "it is the same"


def test_a_test_says_from_where(run: Run) -> None:
    run("acl", "allow", "clerk", ORDERS, "Pub", "--from", "10.1.0.0/16")
    refused = run("acl", "test", "clerk", "Pub", ORDERS, code=1)
    assert refused == (
        f"refused from 127.0.0.1: no entry of user clerk allows Pub on {ORDERS}\n"
        f"does not count from 127.0.0.1: {ORDERS} Allow Pub from 10.1.0.0/16\n"
    )
    told = json.loads(run("acl", "test", "clerk", "Pub", ORDERS, "--json", code=1))
    assert (told["allowed"], told["from"], told["other_addresses"][0]["from"]) == (False, "127.0.0.1", ["10.1.0.0/16"])
    allowed = run("acl", "test", "clerk", "Pub", ORDERS, "--from", "10.1.2.3")
    assert allowed == f"allowed from 10.1.2.3: the entry {ORDERS} of user clerk allows Pub\n"
    assert "does not count" not in run("acl", "test", "clerk", "Sub", ORDERS, code=1), "it speaks of Pub only"


def test_an_unknown_user_is_one_sentence_and_code_1(run: Run) -> None:
    for words in (("user", "show"), ("user", "delete"), ("acl", "list"), ("user", "key", "list")):
        assert run(*words, "nobody", code=1) == "commitmq: there is no user 'nobody'; `commitmq user list` shows them\n"
    assert run("acl", "test", "nobody", "Pub", ORDERS, code=1).startswith("commitmq: there is no user 'nobody'")


def test_a_user_and_a_key_are_taken_after_a_question(
    run: Run, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "k" * 40
    run("user", "key", "add", "clerk", key)
    assert "give --yes" in run("user", "delete", "clerk", code=2)
    assert "give --yes" in run("user", "key", "remove", "clerk", key, code=2)
    on_a_terminal(monkeypatch)
    run("user", "delete", "clerk", code=1)
    run("user", "key", "remove", "clerk", key, code=1)
    assert asked == ["Delete user clerk with its keys and entries?", f"Take the key {key} from user clerk?"]
    assert run("user", "key", "list", "clerk") == key + "\n", "nothing was changed"
    run("user", "key", "remove", "clerk", key, "--yes")
    assert run("user", "key", "list", "clerk") == ""
    run("user", "delete", "clerk", "--yes")


def test_the_last_super_user_stays(run: Run) -> None:
    refused = run("user", "delete", "root", "--yes", code=2)
    assert "root is the last super user that is enabled" in refused
    run("user", "add", "second", "--super")
    run("user", "alter", "second", "--disable")
    assert "last super user" in run("user", "delete", "root", "--yes", code=2)
    run("user", "delete", "root", "--yes", "--force")


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (("dlq", "purge", "kitchen"), "Give up all dead letters of group kitchen?"),
        (("transaction", "resolve", "77", "rollback"), "Roll back transaction 77, whose message nobody gets then?"),
    ],
)
def test_verbs_of_a_node_ask_before_they_reach_it(
    words: tuple[str, ...], question: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main([*words, "--node", "tcp://127.0.0.1:1"])
    assert ended.value.code == 2, "without a terminal"
    on_a_terminal(monkeypatch)
    with pytest.raises(SystemExit):
        main([*words, "--node", "tcp://127.0.0.1:1"])
    assert asked == [question]


def test_a_rotation_that_failed_can_be_repeated(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("keys", "init")
    node, out = ("--node", "db.example:7310"), ("--output", str(tmp_path / "new.toml"))
    run("user", "key", "new", "clerk", *node)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "ACTIVE", True)
        patch.setattr(failpoints, "_points", failpoints.parse("disk.replace.acl:before=errno:ENOSPC"))
        run("user", "key", "rotate", "clerk", *node, *out, code=74)
    assert not (tmp_path / "new.toml").exists(), "the profile of a key that the node does not know"
    run("user", "key", "rotate", "clerk", *node, *out)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "ACTIVE", True)
        patch.setattr(failpoints, "_points", failpoints.parse("disk.sync_folder.acl:before=errno:ENOSPC"))
        run("user", "key", "rotate", "clerk", *node, "--output", str(tmp_path / "newer.toml"), code=74)
    assert (tmp_path / "newer.toml").exists(), "the node knows this key"


def test_the_profile_of_a_new_user_can_be_json(run: Run, tmp_path: Path) -> None:
    run("keys", "init")
    words = ("--profile-for", "db.example:7310", "--json")
    shown = json.loads(run("user", "add", "shop", *words))
    assert (shown["name"], shown["type"], shown["key"] in shown["profile"]) == ("shop", "Normal", True)
    copied = json.loads(run("user", "copy", "shop", "kiosk", *words, "--output", str(tmp_path / "kiosk.toml")))
    assert (copied["name"], copied["key"] in Path(copied["output"]).read_text()) == ("kiosk", True)


@pytest.mark.parametrize("verb", [("add", "shop"), ("copy", "clerk", "shop")])
def test_a_user_whose_profile_cannot_be_written_is_not_added(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    # The user was there, without a key and with a secret that nobody had seen, and the next try was refused.
    run("keys", "init")
    (tmp_path / "taken.toml").write_text("another's")
    words = ("user", *verb, "--profile-for", "db.example:7310", "--output")
    run(*words, str(tmp_path / "taken.toml"), code=1)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "ACTIVE", True)
        patch.setattr(failpoints, "_points", failpoints.parse("disk.replace.acl:before=errno:ENOSPC"))
        run(*words, str(tmp_path / "new.toml"), code=74)
    assert not (tmp_path / "new.toml").exists()
    assert (tmp_path / "taken.toml").read_text() == "another's"
    assert "shop" not in run("user", "list")
    run(*words, str(tmp_path / "new.toml"))
    assert "shop" in run("user", "list")
