"""Goal: the program in examples/ that reads a store with Spark prints the counts of that store.

Method: a real node stores messages and stops; the program runs in the session of these tests, on the folder that is left.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commitmq import Producer
from nodes import start_node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "spark_counts.py"


def test_spark_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_node(tmp_path) as node, Producer(node.address) as producer:
        producer.send_batch("orders", [b"x"] * 3, tags="drink")
        producer.send_batch("orders", [b"x"] * 2, tags="food")
        producer.send("bills", b"x")
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), str(node.store)])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "bills, tag None: 1 messages",
        "orders, tag drink: 3 messages",
        "orders, tag food: 2 messages",
    ]
