"""Goal: the rows of a question depend on the question and the store alone: not on how often a frame was used before, on
filters being pushed down, on unions, joins, views or caches, nor on the number of partitions.

Method: RocketMQ's golden store, whose messages.jsonl its own classes wrote. Random predicates, each as SQL and as Python, are
asked of one frame in random combinations; the rows of messages.jsonl that the Python passes are the answer. The seed is
printed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from golden_stores import GoldenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
SCHEMA = (
    "topic string, queue_id int, queue_offset bigint, physical_offset bigint, store_timestamp timestamp, tags string"
)
Line = dict[str, Any]


@dataclass(frozen=True)
class Predicate:
    """The same condition for Spark and for a line of messages.jsonl."""

    sql: str
    holds: Callable[[Line], bool]

    def __and__(self, other: Predicate) -> Predicate:
        return Predicate(f"({self.sql}) AND ({other.sql})", lambda line: self.holds(line) and other.holds(line))

    def __or__(self, other: Predicate) -> Predicate:
        return Predicate(f"({self.sql}) OR ({other.sql})", lambda line: self.holds(line) or other.holds(line))


def drawn(choose: random.Random, lines: list[Line], depth: int = 2) -> Predicate:
    """A random condition on columns that a source could cut its reading by, and on one that it could not."""
    if depth and choose.random() < 0.6:
        left, right = drawn(choose, lines, depth - 1), drawn(choose, lines, depth - 1)
        return left & right if choose.random() < 0.5 else left | right
    line = choose.choice(lines)
    kind = choose.randrange(6)
    if kind == 0:
        topic = line["topic"]
        return Predicate(f"topic = '{topic}'", lambda one: one["topic"] == topic)
    if kind == 1:
        topics = {choose.choice(lines)["topic"] for _ in range(2)}
        listed = ", ".join(f"'{one}'" for one in sorted(topics))
        return Predicate(f"topic IN ({listed})", lambda one: one["topic"] in topics)
    if kind == 2:
        queue = line["queue_id"]
        return Predicate(f"queue_id = {queue}", lambda one: one["queue_id"] == queue)
    if kind == 3:
        offset = line["queue_offset"]
        return Predicate(f"queue_offset > {offset}", lambda one: one["queue_offset"] > offset)
    if kind == 4:
        stamp = line["store_timestamp"]
        return Predicate(f"store_timestamp <= timestamp_millis({stamp})", lambda one: one["store_timestamp"] <= stamp)
    return Predicate("tags IS NULL", lambda one: not one["properties"].get("TAGS"))


@contextmanager
def pushing_down(spark: SparkSession, wanted: bool) -> Iterator[None]:
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, str(wanted).lower())
    try:
        yield
    finally:
        spark.conf.set(PUSHDOWN, before or "false")


def load(spark: SparkSession, golden: GoldenStore, partitions: int) -> DataFrame:
    topics = ",".join(sorted({line["topic"] for line in golden.messages}))
    return (
        spark.read.format("commitmq")
        .schema(SCHEMA)
        .options(store=str(golden.root), topics=topics, minPartitions=str(partitions))
        .load()
    )


def places(frame: DataFrame) -> Counter[int]:
    return Counter(row.physical_offset for row in frame.select("physical_offset").collect())


def expected(lines: list[Line], *predicates: Predicate) -> Counter[int]:
    """What a union of the rows of each predicate holds."""
    found: Counter[int] = Counter()
    for predicate in predicates:
        found.update(line["physical_offset"] for line in lines if predicate.holds(line))
    return found


@pytest.mark.parametrize("pushdown", [False, True])
def test_a_frame_answers_every_question_as_if_it_were_the_first(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], pushdown: bool
) -> None:
    golden = golden_stores["clean"]
    lines = golden.messages
    one, other = sorted({line["topic"] for line in lines})[:2]
    with pushing_down(spark, pushdown):
        frame = load(spark, golden, 2)
        of_one = frame.where(f"topic = '{one}'")
        of_other = frame.where(f"topic = '{other}'")
        counts = Counter(line["topic"] for line in lines)
        assert of_one.count() == counts[one]
        assert frame.where(f"topic = '{one}' OR topic = '{other}'").count() == counts[one] + counts[other]
        assert frame.count() == len(lines)
        assert of_one.union(of_other).count() == counts[one] + counts[other]
        frame.createOrReplaceTempView("messages")
        row = spark.sql(
            f"SELECT (SELECT count(*) FROM messages WHERE topic = '{one}') a, "
            f"(SELECT count(*) FROM messages WHERE topic = '{other}') b, (SELECT count(*) FROM messages) c"
        ).first()
        assert row is not None
        assert (row.a, row.b, row.c) == (counts[one], counts[other], len(lines))


def ask_at_random(spark: SparkSession, golden: GoldenStore, questions: int, seed: int) -> None:
    sys.stderr.write(f"seed {seed}\n")
    choose = random.Random(seed)
    lines = golden.messages
    frame = load(spark, golden, choose.choice([1, 2, 5]))
    for _ in range(questions):
        first, second = drawn(choose, lines), drawn(choose, lines)
        kind = choose.choice(["where", "twice", "union", "join", "view", "cache"])
        with pushing_down(spark, choose.random() < 0.5):
            if choose.random() < 0.2:
                frame = load(spark, golden, choose.choice([1, 2, 5]))
            where = frame.where(first.sql)
            if kind == "where":
                found, wanted = where, expected(lines, first)
            elif kind == "twice":
                found, wanted = where.where(second.sql), expected(lines, first & second)
            elif kind == "union":
                found, wanted = where.union(frame.where(second.sql)), expected(lines, first, second)
            elif kind == "join":
                found = where.join(frame.where(second.sql).select("physical_offset"), "physical_offset")
                wanted = expected(lines, first & second)
            elif kind == "view":
                frame.createOrReplaceTempView("asked")
                found = spark.sql(
                    f"SELECT * FROM asked WHERE {first.sql} UNION ALL SELECT * FROM asked WHERE {second.sql}"
                )
                wanted = expected(lines, first, second)
            else:
                cached = where.cache()
                found, wanted = cached.union(frame.where(second.sql)), expected(lines, first, second)
            assert places(found) == wanted, (kind, first.sql, second.sql)
            where.unpersist()


def test_random_questions_to_one_frame(spark: SparkSession, golden_stores: dict[str, GoldenStore]) -> None:
    ask_at_random(spark, golden_stores["clean"], 12, random.randrange(1 << 32))


@pytest.mark.long
def test_many_random_questions(spark: SparkSession, golden: GoldenStore) -> None:
    ask_at_random(spark, golden, 25, random.randrange(1 << 32))
