"""Goal: what RocketMQ's own clients see of a node is what they see of RocketMQ's own broker.

Method: each scenario (the Java program in ``scenarios/``) runs against a node and against RocketMQ's broker 5.4.0, with the
clients of 5.4.0 and of 4.9.8. Its outcome has no clocks, ids and hosts, and must be equal. What the node does in another way
on purpose is in DIFFERENCES, and in the table of docs/rocketmq.md. All scenarios of a version begin together, because most
of them wait.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broker import Broker
from scenarios import ScenarioProgram, Side, both_sides

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

NEWEST, OLDER = "5.4.0", "4.9.8"

EVERYDAY = ("send_sync", "send_batch", "push_concurrent", "push_tags", "pull", "offsets_resume")
"""In the default suite, with the newest clients."""

SCENARIOS = (
    "offsets_reset_while_running",
    "retry_default_delay",
    "send_delay_level",
    "traces",
    "traces_in_own_topic",
    "transactions",
    "retry",
    "dead_letters",
    "dead_letters_at_once",
    "dead_letters_ordered",
    "share_concurrent",
    "share_ordered",
    "offsets_of_new_groups",
    "offsets_reset_before_start",
    "push_subscription_changes",
    "request_reply",
    "lookups",
    "push_ordered",
    "push_ordered_suspend",
    "push_broadcast",
    "push_sql",
    "push_several_topics",
    "push_batches",
    "send_back",
    "pull_blocks",
    "pull_offsets",
    "lite_pull_assign",
    "lite_pull_subscribe",
    "send_round_robin",
    "send_async",
    "send_oneway",
    "send_selected",
    "send_new_topic",
    "send_properties",
    "send_compressed",
    "send_large",
    "send_priority",
    "refused_sends",
    "refused_pulls",
    "refused_starts",
    "refused_administration",
)
"""With the clients of both versions; those that wait longest begin first."""

ONLY_NEWEST = (
    "timer",
    "timer_recall",
    "timer_refused",
    "pop",
    "pop_shared",
    "pop_retry",
    "push_heartbeat_2",
    "send_other_compressions",
)

OFTEN = (
    *EVERYDAY,
    "offsets_reset_while_running",
    "send_delay_level",
    "transactions",
    "retry",
    "dead_letters_ordered",
    "push_ordered",
    "push_broadcast",
    "push_sql",
    "request_reply",
    "lite_pull_subscribe",
    "refused_sends",
    "refused_pulls",
)
"""With the older clients too whenever the slow tests run: a scenario of each kind. The others are long."""

CASES = [
    *(pytest.param(NEWEST, name) for name in EVERYDAY),
    *(pytest.param(NEWEST, name, marks=pytest.mark.slow) for name in (*ONLY_NEWEST, *SCENARIOS)),
    *(
        pytest.param(OLDER, name, marks=(pytest.mark.slow, *([] if name in OFTEN else [pytest.mark.long])))
        for name in (*SCENARIOS, *EVERYDAY)
    ),
]


def _refused_sends(outcome: Any) -> None:
    outcome["queue of a topic without write permission"] = {"class": "MQBrokerException", "code": 16}
    outcome["batch too large"] = {"class": "MQBrokerException", "code": 13}


def _refused_pulls(outcome: Any) -> None:
    outcome["wrong expression"] = {"class": "MQBrokerException", "code": 23}


def _transactions(outcome: Any) -> None:
    outcome[-1] = False  # whether a message was committed more than once
    for line in outcome[1].values():
        line["properties"]["WAIT"] = "true"


DIFFERENCES: dict[str, Callable[[Any], None]] = {
    "refused_sends": _refused_sends,
    "refused_pulls": _refused_pulls,
    "transactions": _transactions,
}
"""By scenario: changes RocketMQ's outcome into the node's. docs/rocketmq.md says why each is so."""


@pytest.fixture(scope="module")
def sides(
    tmp_path_factory: pytest.TempPathFactory, rocketmq_broker_of_session: Callable[..., Broker]
) -> Iterator[tuple[Side, Side]]:
    with both_sides(tmp_path_factory.mktemp("sides"), rocketmq_broker_of_session) as found:
        yield found


@pytest.fixture(scope="module")
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sides: tuple[Side, Side]
) -> Iterator[Callable[[str], ScenarioProgram]]:
    """``program(version)``: runs the scenarios of that version that were selected."""
    folder: Path = tmp_path_factory.mktemp("clients")
    programs: dict[str, ScenarioProgram] = {}

    def of(version: str) -> ScenarioProgram:
        if version not in programs:
            programs[version] = ScenarioProgram(version, folder, sides)
            chosen = _chosen(request, version)
            programs[version].begin(name for name in (*ONLY_NEWEST, *SCENARIOS, *EVERYDAY) if name in chosen)
        return programs[version]

    yield of
    for one in programs.values():
        one.kill()


def _chosen(request: pytest.FixtureRequest, version: str) -> set[str]:
    """The scenarios of this version that were selected to run."""
    cases = [
        one.callspec.params for one in request.session.items if one.path == request.path and hasattr(one, "callspec")
    ]
    return {case["name"] for case in cases if case["version"] == version and "name" in case}


@pytest.mark.parametrize(("version", "name"), CASES)
def test_clients_see_the_same_of_a_node_and_of_rocketmq(
    version: str, name: str, program: Callable[[str], ScenarioProgram]
) -> None:
    theirs, ours = program(version).outcomes(name)
    expected = copy.deepcopy(theirs)
    if name in DIFFERENCES:
        DIFFERENCES[name](expected)
    assert ours == expected


def test_the_page_names_each_difference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rocketmq.md").read_text(encoding="utf-8")
    table = page.partition("These outcomes differ")[2]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(DIFFERENCES)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "more"), [(NEWEST, ONLY_NEWEST), (OLDER, ())])
def test_no_scenario_is_left_out(
    version: str, more: tuple[str, ...], program: Callable[[str], ScenarioProgram]
) -> None:
    assert set(program(version).ask("names")) == {*EVERYDAY, *SCENARIOS, *more}
