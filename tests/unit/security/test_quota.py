"""Goal: quotas are read as they are written, one user's go before those of all, and nothing that is wrong is taken.

Method: texts and files, right and wrong ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from commitmq.config import NodeConfig
from commitmq.log import get_log
from commitmq.security.access_file import AccessFile, AccessTable, UserQuotas
from commitmq.security.policy import QUOTAS, Quota, Secret, User, parse_quota, quotas_from_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topics=10", ("topics", 10)),
        ("send_bytes_per_s=10MiB", ("send_bytes_per_s", 10 << 20)),
        ("pending_bytes = 1_000 kb", ("pending_bytes", 1_000_000)),
        ("connections=0", ("connections", 0)),
        ("pull_messages_per_s=default", ("pull_messages_per_s", None)),
    ],
)
def test_a_quota_is_a_name_and_a_number(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_quota(text) == expected


@pytest.mark.parametrize(
    "text", ["topics", "topics=", "topics=-1", "topics=1MiB", "taste=1", "send_bytes_per_s=1h", "topics=1.5"]
)
def test_what_is_no_quota_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no quota|write a whole number"):
        parse_quota(text)


@pytest.mark.parametrize(
    "members", [[], {"taste": 1}, {"topics": -1}, {"topics": True}, {"topics": "1"}, {"topics": 1 << 60}]
)
def test_a_file_with_wrong_quotas_is_damaged(members: object) -> None:
    with pytest.raises(ValueError, match="quota"):
        quotas_from_json(members)


def test_a_user_with_quotas_is_written_and_read() -> None:
    user = User("shop", Secret("a-secret-word"), quotas=(("topics", 3), ("connections", 0)))
    members = user.to_json()
    assert members["quotas"] == {"topics": 3, "connections": 0}
    assert dict(User.from_json("shop", members).quotas) == {"topics": 3, "connections": 0}
    assert "quotas" not in User("cook", Secret("a-secret-word")).to_json()


def test_every_quota_has_its_setting_and_is_off() -> None:
    assert Quota.of_settings(NodeConfig().flow) == Quota()
    flow = SimpleNamespace(**{f"user_{name}": number for number, name in enumerate(QUOTAS, 1)})
    found = Quota.of_settings(flow).laid_over({"topics": 0, "send_bytes_per_s": 100})
    assert (found.send_messages_per_s, found.send_bytes_per_s, found.topics, found.groups) == (1, 100, 0, 6)


def test_a_process_knows_the_quotas_of_the_file_when_it_looks(tmp_path: Path) -> None:
    flow = NodeConfig().flow
    quotas = UserQuotas(tmp_path, flow, get_log("test"))
    bounds = "bounds_sends", "bounds_pulls", "bounds_connections", "bounds_names"
    assert [getattr(quotas, name) for name in bounds] == [False] * 4
    file = AccessFile(tmp_path)
    for name, own in (("shop", (("send_bytes_per_s", 5),)), ("cook", (("pending_bytes", 7),))):

        def add(table: AccessTable, name: str = name, own: tuple[tuple[str, int], ...] = own) -> None:
            table.users[name] = User(name, Secret.make(), quotas=own)

        file.change(add)
    quotas.look(flow)
    assert [getattr(quotas, name) for name in bounds] == [True, False, True, False]
    assert (quotas.sends("shop"), quotas.sends("cook"), quotas.pulls("shop")) == ((0, 5), (0, 0), (0, 0))
    assert (quotas.of("cook").pending_bytes, quotas.of("nobody")) == (7, Quota())
    file.path.write_text("damaged")
    quotas.look(flow)
    assert quotas.sends("shop") == (0, 5), "those of before stay"
