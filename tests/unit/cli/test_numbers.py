"""Goal: a number or a name that cannot be is refused in a sentence before a node is asked, at each verb that takes one.

Method: the verbs against an address where no node is: whoever gets as far as asking ends with another exit code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq.cli import main as main_module
from commitmq.supervision.exit_codes import CliExit

TOO_LARGE = [str(1 << 63), "9" * 23, "9" * 5000]
OFFSETS = [
    "consume t --from {}",
    "group reset g t --to {}",
    "query --topic t --begin {}",
    "query --topic t --begin 0 --end {}",
    "dispatcher reset d --yes --to {}",
    "start --store {store} --set no.such_key=1 --allow-cut {}",  # the key: whoever accepts the number starts no node here
]
OTHERS = [
    "topic create t --queues {}",
    "topic update t --queues {}",
    "query --topic t --key k --max {}",
    "group reset g t --to 0 --queue {}",
    "produce t --queue {}",
    "produce t --timeout {}",
    "consume t --timeout {}",
    "status --timeout {}",
]


def refused(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: CliExit = CliExit.USAGE
) -> str:
    monkeypatch.setenv("COMMITMQ_NODE", "tcp://127.0.0.1:9")
    with pytest.raises(SystemExit) as ended:
        main_module.main(line.split(" "))
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (code, ""), said.err
    return said.err


@pytest.mark.parametrize("line", OFFSETS + OTHERS)
def test_a_number_that_nothing_can_have_is_refused(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in TOO_LARGE[:2] if line in OTHERS or "allow" in line else TOO_LARGE:
        said = refused(line.format(number, store=tmp_path / "store"), capsys, monkeypatch)
        assert "too large" in said or "range" in said
        assert len(said) < 600
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("options", ["", " --file {empty}", " --format jsonl --file {empty}", " --file {blank}"])
def test_a_topic_that_cannot_be_is_refused_before_there_are_lines(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text("\n\n")
    line = "produce bad/topic" + options.format(empty=tmp_path / "empty", blank=tmp_path / "blank")
    assert "bad/topic" in refused(line, capsys, monkeypatch, CliExit.FAILURE)
