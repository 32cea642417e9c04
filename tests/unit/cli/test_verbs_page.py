"""Goal: the page of verbs is whole and true: mqadmin's commands are all there, and ours, and nothing that does not exist.

Method: the code spans of docs/verbs.md are compared with the commands that click knows, and with the list that
``mqadmin`` of RocketMQ 5.4.0 prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from commitmq.cli import main as main_module

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "verbs.md").read_text(encoding="utf-8")
SPANS = re.findall(r"`([^`]+)`", PAGE)
OURS = list(dict.fromkeys(one for one in SPANS if one.startswith("commitmq ")))
MQADMIN = re.findall(
    r"\w+",
    """
    updateTopic updateTopicList deleteTopic updateSubGroup updateSubGroupList setConsumeMode deleteSubGroup
    updateBrokerConfig updateTopicPerm topicRoute topicStatus topicClusterList addBroker removeBroker
    resetMasterFlushOffset brokerStatus queryMsgById queryMsgByKey queryMsgByUniqueKey queryMsgByOffset queryMsgTraceById
    printMsg printMsgByQueue sendMsgStatus brokerConsumeStats producerConnection consumerConnection consumerProgress
    consumerStatus cloneGroupOffset producer clusterList topicList updateKvConfig deleteKvConfig wipeWritePerm
    addWritePerm resetOffsetByTime skipAccumulatedMessage updateOrderConf cleanExpiredCQ deleteExpiredCommitLog
    cleanUnusedTopic startMonitoring statsAll allocateMQ checkMsgSendRT clusterRT getNamesrvConfig updateNamesrvConfig
    getBrokerConfig getConsumerConfig queryCq sendMessage consumeMessage updateStaticTopic remappingStaticTopic
    exportMetadata exportConfigs exportMetrics exportMetadataInRocksDB exportPopRecord haStatus getSyncStateSet
    getBrokerEpoch getControllerMetaData getControllerConfig updateControllerConfig electMaster cleanBrokerMetadata
    dumpCompactionLog getColdDataFlowCtrInfo updateColdDataFlowCtrGroupConfig removeColdDataFlowCtrGroupConfig
    setCommitLogReadAheadMode createUser updateUser deleteUser getUser listUser copyUser createAcl updateAcl deleteAcl
    getAcl listAcl copyAcl rocksDBConfigToJson checkRocksdbCqWriteProgress switchTimerEngine
    """,
)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every verb that runs something, with its path; of plugins only the built-in ones."""

    def below(path: str, command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
        if not isinstance(command, click.Group):
            yield path, command
            return
        if command.invoke_without_command:
            yield path, command
        inner = click.Context(command, parent=context)
        for name in command.list_commands(inner):
            found = command.get_command(inner, name)
            assert found is not None
            yield from below(f"{path} {name}", found, inner)

    root = click.Context(main_module.cli)
    for verb in (*main_module.VERBS, *main_module.BUILT_IN_VERBS):
        command = main_module.cli.get_command(root, verb)
        assert command is not None
        yield from below(f"commitmq {verb}", command, root)


COMMANDS = dict(commands())


def path_of(span: str) -> str | None:
    """The path of the verb that a span of the page names; None for no verb."""
    words = span.split()
    return next((path for n in range(len(words), 1, -1) if (path := " ".join(words[:n])) in COMMANDS), None)


@pytest.mark.parametrize("span", [one for one in OURS if not one.startswith("commitmq --")])
def test_what_the_page_names_exists(span: str) -> None:
    path = path_of(span)
    assert path is not None, "there is no such verb"
    command = COMMANDS[path]
    rest = span.removeprefix(path).split()
    options = {name for one in command.params if isinstance(one, click.Option) for name in one.opts}
    assert {one for one in rest if one.startswith("-")} <= options
    values = [one for one in rest if not one.startswith("-")]
    assert len(values) <= sum(isinstance(one, click.Argument) for one in command.params), "it takes no such word"


def test_every_verb_is_on_the_page() -> None:
    assert len(COMMANDS) > 70, "the search finds no verbs"
    assert COMMANDS.keys() - {path_of(one) for one in OURS} == set()


def test_every_verb_writes_json_or_is_named_as_one_that_does_not() -> None:
    (sentence,) = re.findall(r"These verbs have none:(.*?)\.\n\*", PAGE, re.DOTALL)
    without = set(re.findall(r"`([^`]+)`", sentence))
    found = {path for path, one in COMMANDS.items() if not any("--json" in parameter.opts for parameter in one.params)}
    assert found == without


def test_every_command_of_mqadmin_is_on_the_page_once() -> None:
    assert len(set(MQADMIN)) == len(MQADMIN) == 90
    named = [one for one in SPANS if re.fullmatch(r"[a-z]+[A-Z]\w*|producer", one)]
    assert sorted(named) == sorted(MQADMIN)
