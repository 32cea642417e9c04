"""Goal: a store that lost what was acknowledged is refused at every start until a person decides; and whatever is cut from a
log is told at the end of the start, in ``status`` and by ``store verify``.

Method: the real command. Our store is stopped in order and loses its last segment, or is killed and left with a torn end; the
golden store is started with the wrong size first, as it was seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import Producer, Reader
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, GoldenStore
from nodes import Node, eventually, start_node, started

SEGMENT_BYTES = 1 << 16
SETTINGS = (f"commit_log.segment_bytes={SEGMENT_BYTES}", "commit_log.max_message_bytes=16384")
COUNT = 300


def send(node: Node, first: int, count: int) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("orders", [b"%d " % number + b"x" * 500 for number in range(first, first + count)], queue=0)


def numbers(node: Node) -> list[int]:
    found: list[int] = []
    with Reader(queues=[("orders", 0)], node=node.address) as consumer:
        while batch := consumer.poll(2.0):
            found += [int(message.body.split()[0]) for message in batch]
    return found


@pytest.mark.parametrize(
    ("loss", "without"),
    [
        pytest.param("zeroed", "", marks=pytest.mark.slow),
        pytest.param("deleted", "", marks=pytest.mark.long),
        pytest.param("zeroed", "position", marks=pytest.mark.long),
        pytest.param("deleted", "position", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(300)
def test_a_store_that_lost_its_last_segment_is_refused_until_a_person_decides(
    tmp_path: Path, loss: str, without: str
) -> None:
    """The second start must find what the first one refused on; neither may change it."""
    with start_node(tmp_path, *SETTINGS, "commit_log.preallocate_segments=0") as node:
        send(node, 0, COUNT)
        assert node.stop().returncode == 0
        layout = StoreLayout(node.store)
        last = max(path for path in layout.commit_log.iterdir() if any(path.read_bytes()[:8]))
        kept = last.read_bytes()
        if loss == "zeroed":
            last.write_bytes(bytes(SEGMENT_BYTES))
        else:
            last.unlink()
        if without:
            (layout.own / without).unlink()
        sentences = set()
        for _ in range(2):
            refused = node.start()
            assert refused.returncode == CliExit.STORE_UNUSABLE, refused.stdout
            assert "Nothing was changed" in refused.stderr
            sentences.add(refused.stderr.splitlines()[-1])
        assert len(sentences) == 1
        words = re.search(r"commitmq start (--allow-cut \d+)`", sentences.pop())
        assert words is not None
        assert words[1] == f"--allow-cut {int(last.name)}"
        # The way back: what was lost is put there again.
        last.write_bytes(kept)
        if not without:
            assert node.start().returncode == 0
            assert numbers(node) == list(range(COUNT))
            assert node.stop().returncode == 0
            last.write_bytes(bytes(SEGMENT_BYTES))
        else:
            last.unlink()
        allowed = node.run(*node.arguments(), "--background", *words[1].split())
        assert allowed.returncode == 0, allowed.stderr
        assert "WARNING: this start cut the log" in allowed.stderr
        assert (
            f"ended the log at offset {int(last.name)}, behind which there is nothing, as was allowed" in allowed.stderr
        )
        read = numbers(node)
        assert read == list(range(len(read)))
        assert 0 < len(read) < COUNT
        send(node, len(read), 10)
        assert numbers(node) == list(range(len(read) + 10))
        assert node.stop().returncode == 0
        ended = node.start()
        assert ended.returncode == 0, "it was decided once and for all"
        assert "cut" not in ended.stderr


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_store_that_lost_its_first_segment_is_refused_until_a_person_decides(tmp_path: Path, how: str) -> None:
    """Also in its first life, and where the segment that is left was made ahead and is empty."""
    with start_node(tmp_path, *SETTINGS) as node:
        # With one message a batch the dispatcher is never behind, so it reads no log by itself.
        count = 100 if how == "stopped" else 20
        for number in range(count):
            send(node, number, 1)
        layout = StoreLayout(node.store)
        if how == "stopped":
            assert node.stop().returncode == 0
        else:
            eventually(lambda: len(list(layout.commit_log.iterdir())) == 2, "a segment is made ahead")
            node.kill_all()
        first = layout.commit_log / segment_name(0)
        kept = first.read_bytes()
        first.unlink()
        sentences = set()
        for _ in range(2):
            refused = node.start()
            assert refused.returncode == CliExit.STORE_UNUSABLE, refused.stdout
            sentences.add(refused.stderr.splitlines()[-1])
        (sentence,) = sentences
        assert "segments are missing at the log's beginning: it began at physical offset 0" in sentence
        verified = node.run("store", "verify", str(node.store))
        assert verified.returncode == CliExit.DAMAGE_FOUND, verified.stdout
        assert "segments are missing at the log's beginning" in verified.stdout
        first.write_bytes(kept)
        assert node.start().returncode == 0
        assert numbers(node) == list(range(count))
        assert node.stop().returncode == 0
        if how == "stopped":
            first.unlink()
            words = re.search(r"or remove (\S+) to continue", sentence)
            assert words is not None
            Path(words[1]).unlink()
            for _ in range(2):
                assert node.start().returncode == 0
                left = numbers(node)
                assert left == list(range(left[0], count))
                assert node.stop().returncode == 0


def test_a_cut_is_told_by_start_status_and_verify(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        send(node, 0, 20)
        node.kill_all()
        layout = StoreLayout(node.store)
        sidecar = Sidecar.load(layout.sidecar)
        assert sidecar is not None
        end = max(sidecar.flushed, _log_end(layout))
        with (layout.commit_log / segment_name(0)).open("r+b") as file:
            file.seek(end)
            file.write(bytes(8) + b"an append that was not finished")
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        assert f"from offset {end} on" in ended.stderr
        assert "this start cut the log" in node.log().split("node is ready")[-1]
        assert numbers(node) == list(range(20))
        (cut,) = node.report()["node"]["cuts"]
        assert (cut["log_end"], cut["by"], cut["done"]) == (end, "recovery", True)
        (copy,) = cut["copies"]
        assert Path(copy).read_bytes()[8:].startswith(b"an append that was not finished")
        assert copy in node.run("status", "--store", str(node.store)).stdout
        assert node.stop().returncode == 0
        arguments = [part for setting in node.settings for part in ("--set", setting)]
        verified = node.run("store", "verify", str(node.store), *arguments)
        assert verified.returncode == 0
        assert copy in verified.stdout
        told = json.loads(node.run("store", "verify", str(node.store), "--json", *arguments).stdout)
        assert [one["id"] for one in told["cuts"]] == [cut["id"]]
        ended = node.start()
        assert "cut" not in ended.stderr, "a start tells what it cut itself"
        assert len(node.report()["node"]["cuts"]) == 1, "what was cut once stays in status"


def _log_end(layout: StoreLayout) -> int:
    from commitmq.store.log.commit_log import CommitLog

    log = CommitLog(layout.commit_log, SEGMENT_BYTES)
    end = max(start + size for start, size in log.iter_spans())
    log.close()
    return end


@pytest.mark.parametrize("name", ["clean", pytest.param("crash", marks=pytest.mark.slow)])
def test_a_wrong_size_at_the_first_start_costs_a_rocketmq_store_nothing(
    golden_copy: Callable[[str], GoldenStore], name: str
) -> None:
    """As it was seen: only the size of the segments given, refused; then all sizes."""
    golden = golden_copy(name)
    before = golden.layout.checkpoint.read_bytes()
    had_abort = golden.layout.abort.exists()
    sizes = (f"commit_log.segment_bytes={GOLDEN_SEGMENT_BYTES}", "commit_log.max_message_bytes=16384")
    node = Node(golden.root, *sizes)
    try:
        refused = node.start("consume_queue.file_bytes=6000000")
        assert refused.returncode == CliExit.STORE_UNUSABLE
        assert golden.layout.checkpoint.read_bytes() == before
        assert golden.layout.abort.exists() == had_abort
        assert not golden.layout.sidecar.exists()
        ended = node.start(
            f"consume_queue.file_bytes={GOLDEN_QUEUE_FILE_BYTES}", "index.hash_slots=200", "index.max_items=500"
        )
        assert ended.returncode == 0, ended.stderr
        wanted = sum(line["topic"].endswith("Normal") for line in golden.messages)
        topic = next(line["topic"] for line in golden.messages if line["topic"].endswith("Normal"))
        with Reader([topic], node=node.address, start="earliest") as consumer:
            found = 0
            while found < wanted:
                batch = consumer.poll(20.0)
                assert len(batch), f"{found} of {wanted}"
                found += len(batch)
        assert node.stop().returncode == 0
    finally:
        node.end()


@pytest.mark.parametrize("content", ['{"version":99999,"users":{},"policies":{}}', "", None])
def test_a_start_without_the_users_that_there_were_is_refused(tmp_path: Path, content: str | None) -> None:
    node = Node(tmp_path / "store")
    node.store.joinpath("commitlog").mkdir(parents=True)
    assert node.run("user", "add", "ann", "--store", str(node.store)).returncode == 0
    security = node.store / "config" / "security"
    kept = (security / "acl.json").read_bytes()
    (security / "acl.json").unlink()
    if content is not None:
        (security / "acl.json").write_text(content)
    refused = node.start()
    assert refused.returncode == CliExit.STORE_UNUSABLE
    assert "the file of users" in refused.stderr
    assert "Put back a copy" in refused.stderr
    (security / "acl.json").write_bytes(kept)
    with started(node):
        pass
