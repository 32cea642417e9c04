"""Goal: what clients say of themselves cannot fill the table of counts, and every member is counted once.

Method: a registry with members of many versions, and the table that its counts go to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq.counting import OTHER, CountReader, CountTable
from commitmq_plugins.rocketmq.broker import counting
from commitmq_plugins.rocketmq.broker.counting import CONSUMER_CONNECTIONS, ServerCounts
from commitmq_plugins.rocketmq.broker.registry import ClientChannelInfo, ConsumerGroup
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode


class Clients:
    """The part of a registry that is counted: one group of each name, with members of these versions."""

    def __init__(self, **groups: list[int]) -> None:
        self.producers: dict[str, dict[int, ClientChannelInfo]] = {}
        self.groups = {
            name: ConsumerGroup(
                name, {at: ClientChannelInfo(f"c{at}", LanguageCode.JAVA, one, 0) for at, one in enumerate(versions)}
            )
            for name, versions in groups.items()
        }


def consumers(path: Path) -> dict[tuple[str, str], int]:
    reader = CountReader(path)
    found = {
        (one.labels["consumer_group"], one.labels["version"]): values[0]
        for _, one, values in reader.rows()
        if one.name == CONSUMER_CONNECTIONS.name
    }
    reader.close()
    return found


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_LOOK_NS", 0)


def look(counts: ServerCounts, clients: Clients) -> None:
    counts.look(clients)  # type: ignore[arg-type]


def test_versions_that_rocketmq_does_not_know_have_one_label(tmp_path: Path) -> None:
    counts = ServerCounts(CountTable(tmp_path / "counts", 100))
    look(counts, Clients(g=[493, 493, 611, 612, 32_767, -1, 7]))
    assert consumers(tmp_path / "counts") == {("g", "v5_4_0"): 2, ("g", "v5_9_9"): 1, ("g", "other"): 4}


def test_a_client_with_ever_new_versions_makes_few_rows(tmp_path: Path) -> None:
    table = CountTable(tmp_path / "counts", 1_000)
    counts = ServerCounts(table)
    look(counts, Clients(honest=[493]))
    for version in range(-1_000, 1_000):
        look(counts, Clients(evil=[version], honest=[493]))
    assert len(table) <= 40
    look(counts, Clients(late=[453], honest=[493]))
    found = consumers(tmp_path / "counts")
    assert (found["honest", "v5_4_0"], found["late", "other"]) == (1, 1)
    assert sum(found.values()) == 2


def test_groups_without_a_row_of_their_own_are_added_up(tmp_path: Path) -> None:
    counts = ServerCounts(CountTable(tmp_path / "counts", 1))
    look(counts, Clients(a=[493], b=[493, 493], c=[453]))
    assert consumers(tmp_path / "counts") == {("a", "v5_4_0"): 1, (OTHER, OTHER): 3}
    look(counts, Clients(c=[453]))
    assert consumers(tmp_path / "counts") == {("a", "v5_4_0"): 0, (OTHER, OTHER): 1}
