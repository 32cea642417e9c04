"""Goal: the jobs over stores do in parallel what the verbs of ``store`` do: the same reports, the same files.

Method: RocketMQ's golden stores, whole and damaged, and a segment of bodies that hold perfect records; small pieces, so that
every store is cut many times.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from commitmq.config import NodeConfig, load
from commitmq.errors import CorruptRecordError
from commitmq.offline.extents import find_start, pieces_of
from commitmq.offline.findings import StoreFinding
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild as rebuild_here
from commitmq.offline.verify import verify as verify_here
from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.spark.commands import pipeline
from commitmq_plugins.spark.jobs.rebuild import rebuild, verify
from damaged_stores import damage
from golden_stores import GoldenStore
from tricky_log import SEGMENT_BYTES, build, segment_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = ("index.hash_slots=200", "index.max_items=500")
PIECE_BYTES = 20_000


@pytest.fixture(scope="module")
def config() -> NodeConfig:
    return load(None, SETTINGS)


def here(root: Path, config: NodeConfig) -> dict[str, Any]:
    """What ``store verify`` says."""
    with HeldStore(root, config) as store:
        report = verify_here(store)
    report.seconds = 0
    return report.to_json()


def findings_here(root: Path, config: NodeConfig) -> list[StoreFinding]:
    with HeldStore(root, config) as store:
        return verify_here(store).findings


def in_spark(spark: SparkSession, roots: list[Path], config: NodeConfig) -> list[dict[str, Any]]:
    reports = verify(spark, roots, config=config, piece_bytes=PIECE_BYTES)
    for report in reports.values():
        report.seconds = 0
    return [reports[root].to_json() for root in roots]


def test_golden_stores_are_sound(
    spark: SparkSession, golden_copy: Callable[[str], GoldenStore], config: NodeConfig
) -> None:
    roots = [golden_copy(name).root for name in ("clean", "crash")]
    reports = in_spark(spark, roots, config)
    assert [(one["findings"], one["records"], one["index_items"]) for one in reports] == [
        ([], 410, 1097),
        ([], 412, 1121),
    ]


@pytest.mark.parametrize("seed", [100, 103])
def test_damage_is_told_as_store_verify_tells_it(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], tmp_path: Path, config: NodeConfig, seed: int
) -> None:
    chance = random.Random(seed)
    roots, done = [], []
    for number in range(2):
        root = tmp_path / str(number)
        shutil.copytree(golden_stores[chance.choice(["clean", "crash"])].root, root)
        done.append(damage(root, chance))
        roots.append(root)
    for what, root, found in zip(done, roots, in_spark(spark, roots, config), strict=True):
        assert found == here(root, config), f"seed {seed}: {what}"


def test_a_missing_segment_is_told_as_store_verify_tells_it(
    spark: SparkSession, golden_copy: Callable[[str], GoldenStore], config: NodeConfig
) -> None:
    root = golden_copy("clean").root
    (root / "commitlog" / f"{131_072:020d}").unlink()
    assert in_spark(spark, [root], config) == [here(root, config)]
    assert here(root, config)["findings"][0]["kind"] == "log.segment"


def test_records_in_bodies_fool_nobody(spark: SparkSession, tmp_path: Path, config: NodeConfig) -> None:
    """Goal: pieces that begin at a perfect record in a body are noticed, whatever follows it."""
    root = tmp_path / "store"
    root.mkdir()
    log, offsets = build(root / "commitlog", ["joined", "chain"] * 30, 5)
    pieces = pieces_of(log.segments(), SEGMENT_BYTES, 2_000)
    starts = [find_start(segment_of(log, piece.base), piece) for piece in pieces]
    assert sum(start not in (-1, *offsets) for start in starts) > 3
    log.close()
    (report,) = verify(spark, [root], config=config, piece_bytes=2_000).values()
    assert (report.records, report.findings) == (len(offsets), findings_here(root, config))
    assert "log.record" not in {one.kind for one in report.findings}


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Files by name; index files, whose names come from the clock, by their order."""
    found = [
        (path.relative_to(folder).as_posix(), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()
    ]
    return found if folder.name != "index" else [("", data) for _, data in found]


def test_a_rebuild_into_an_empty_folder_makes_rocketmqs_files(
    spark: SparkSession, golden_copy: Callable[[str], GoldenStore], tmp_path: Path, config: NodeConfig
) -> None:
    root, into = golden_copy("clean").root, tmp_path / "into"
    (done,) = rebuild(spark, [root], config=config, into=into, piece_bytes=PIECE_BYTES).values()
    assert done.records == 410
    for name in ("consumequeue", "index"):
        assert contents(into / name) == contents(root / name)


def test_a_rebuild_in_place_makes_what_store_rebuild_makes(
    spark: SparkSession, golden_copy: Callable[[str], GoldenStore], tmp_path: Path, config: NodeConfig
) -> None:
    root = golden_copy("crash").root
    shutil.rmtree(root / "consumequeue")
    (next((root / "index").iterdir())).unlink()
    shutil.copytree(root, tmp_path / "copy")
    with HeldStore(tmp_path / "copy", config) as store:
        rebuild_here(store)
    rebuild(spark, [root], config=config, piece_bytes=PIECE_BYTES)
    for name in ("consumequeue", "index"):
        assert contents(root / name) == contents(tmp_path / "copy" / name)
    assert here(root, config)["findings"] == []


def test_a_damaged_log_is_refused_by_the_error_that_store_rebuild_gives(
    spark: SparkSession, golden_copy: Callable[[str], GoldenStore], config: NodeConfig
) -> None:
    root = golden_copy("clean").root
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[60_000:60_200] = bytes(200)
    path.write_bytes(data)
    before = contents(root / "consumequeue")
    with pytest.raises(CorruptRecordError, match="in the middle of the log"):
        rebuild(spark, [root], config=config, piece_bytes=PIECE_BYTES)
    assert contents(root / "consumequeue") == before


def test_the_verbs(spark: SparkSession, golden_copy: Callable[[str], GoldenStore], tmp_path: Path) -> None:
    """Goal: what both verbs print, and exit with. They find the session of these tests, which spares two JVMs."""
    root = golden_copy("clean").root
    rest = [*(part for setting in SETTINGS for part in ("--set", setting)), "--master", "local[2]"]
    unit = root / "consumequeue" / "GoldenNormal" / "0" / f"{0:020d}"
    unit.write_bytes(b"\x01" + unit.read_bytes()[1:])
    found = CliRunner().invoke(pipeline, ["verify", str(root), "--json", *rest])
    assert found.exit_code == CliExit.DAMAGE_FOUND, found.output
    (store,) = json.loads(found.stdout)["stores"]
    assert [(one["kind"], one["offset"]) for one in store["findings"]] == [("queue.wrong", 0)]
    done = CliRunner().invoke(pipeline, ["rebuild", str(root), "--only", "queues", *rest])
    assert done.exit_code == 0, done.output
    assert "rebuilt queues from 410 records" in done.stdout
    sound = CliRunner().invoke(pipeline, ["verify", str(root), *rest])
    assert (sound.exit_code, sound.stdout.split(":")[0]) == (0, "sound")
