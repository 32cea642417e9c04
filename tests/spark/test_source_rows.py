"""Goal: rows, columns, filters and offsets of the source are right, also where Spark itself would be too slow to ask.

Method: plan and tasks of the source run in this process; golden stores and messages.jsonl say what is right, damaged
copies of them what happens otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from source_reading import planned, read_table

from commitmq.errors import ConfigError, StoreError
from commitmq.format.compression import decompress
from commitmq_plugins.spark.columns import OF_UNITS
from commitmq_plugins.spark.jobs.export import is_whole_json
from commitmq_plugins.spark.options import DataLossError, SourceOptions
from golden_stores import GOLDEN_SEGMENT_BYTES, GoldenStore

CopyGolden = Callable[[str], GoldenStore]


def places(table: Any) -> list[int]:
    return list(table["physical_offset"].to_pylist())


def topic_of(golden: GoldenStore) -> tuple[str, list[dict[str, Any]]]:
    """The topic with most messages, and these."""
    topic = Counter(message["topic"] for message in golden.messages).most_common(1)[0][0]
    return topic, [message for message in golden.messages if message["topic"] == topic]


@pytest.mark.parametrize("least", [1, 2, 60])
def test_partitions_read_every_message_once_and_in_the_order_of_the_log(golden: GoldenStore, least: int) -> None:
    found = places(read_table(["physical_offset"], least=least, store=golden.root))
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert {message["physical_offset"] for message in golden.messages} <= set(found)


def test_partitions_are_of_about_equal_size(golden: GoldenStore) -> None:
    topic, messages = topic_of(golden)
    parts = planned(SourceOptions.parse({"store": str(golden.root), "topics": topic}), least=4)
    counts = [sum(one.count for one in part.slices) for part in parts]
    assert sum(counts) == len(messages)
    assert max(counts) <= 2 * len(messages) / 4


def test_columns_of_units_are_those_of_the_records(golden: GoldenStore) -> None:
    names = sorted(OF_UNITS)
    alone = read_table(names, store=golden.root)
    with_records = read_table([*names, "sys_flag"], store=golden.root)
    assert alone.to_pylist() == with_records.select(names).to_pylist()


def test_several_stores_are_read_as_one(golden_stores: dict[str, GoldenStore]) -> None:
    stores = [str(one.root) for one in golden_stores.values()]
    table = read_table(["store", "topic"], store=",".join(stores))
    found = Counter(table["store"].to_pylist())
    assert found == {store: read_table(["topic"], store=store).num_rows for store in stores}


def test_bodies_are_as_stored_or_decompressed(golden: GoldenStore) -> None:
    expected = {message["physical_offset"]: message for message in golden.messages}
    for row in read_table(["physical_offset", "body", "body_size"], decompress="true", store=golden.root).to_pylist():
        message = expected.pop(row["physical_offset"], None)
        if message is not None:
            stored = bytes.fromhex(message["body_hex"])
            flags = message["sys_flag"]
            assert row["body"] == (decompress(stored, flags) if flags & 1 else stored)
            assert row["body_size"] == len(stored)
    assert not expected


@pytest.mark.parametrize("wanted", ["TagA", "TagA || TagB", "🚀x", "nobody has this"])
def test_a_tag_filter_passes_those_tags_and_no_other(golden: GoldenStore, wanted: str) -> None:
    tags = {part.strip() for part in wanted.split("||")}
    expected = {m["physical_offset"] for m in golden.messages if m["properties"].get("TAGS") in tags}
    found = {
        row["physical_offset"]
        for row in read_table(["physical_offset", "topic"], store=golden.root, tags=wanted).to_pylist()
        if not row["topic"].startswith("%DLQ%")
    }
    assert found == expected


def test_a_key_filter_passes_messages_that_have_one_of_the_keys(golden: GoldenStore) -> None:
    keys = next(m["properties"]["KEYS"] for m in golden.messages if "KEYS" in m["properties"]).split()
    wanted = {keys[0], "order-4"}
    expected = {
        m["physical_offset"] for m in golden.messages if wanted & set(m["properties"].get("KEYS", "").split(" "))
    }
    assert expected
    table = read_table(["physical_offset", "keys", "topic"], store=golden.root, keys=",".join(wanted))
    assert {
        one for one, t in zip(places(table), table["topic"].to_pylist(), strict=True) if "%DLQ%" not in t
    } == expected


def test_offsets_begin_and_end_where_they_say(golden: GoldenStore) -> None:
    topic, messages = topic_of(golden)
    ends = Counter(message["queue_id"] for message in messages)
    start = {topic: {"0": 2, "1": -1, "2": -2}}
    end = {topic: {"0": 5, "3": ends[3] - 1}}
    table = read_table(
        ["queue_id", "queue_offset"],
        store=golden.root,
        topics=topic,
        startingOffsets=json.dumps(start),
        endingOffsets=json.dumps(end),
    )
    found: dict[int, list[int]] = {}
    for row in table.to_pylist():
        found.setdefault(row["queue_id"], []).append(row["queue_offset"])
    assert found == {0: [2, 3, 4], 2: list(range(ends[2])), 3: list(range(ends[3] - 1))}
    assert read_table(["topic"], store=golden.root, startingOffsets="latest").num_rows == 0
    by_store = json.dumps({str(golden.root): {topic: {"0": 1}}})
    assert (
        read_table(["topic"], store=golden.root, topics=topic, startingOffsets=by_store).num_rows == len(messages) - 1
    )


def test_times_begin_and_end_where_they_say(golden: GoldenStore) -> None:
    topic, messages = topic_of(golden)
    stamps = sorted(message["store_timestamp"] for message in messages)
    low, high = stamps[len(stamps) // 3], stamps[2 * len(stamps) // 3]
    table = read_table(
        ["physical_offset"], store=golden.root, topics=topic, startingTimestamp=low, endingTimestamp=high
    )
    expected = {m["physical_offset"] for m in messages if low <= m["store_timestamp"] < high}
    assert expected
    assert set(places(table)) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "option store"),
        ({"stoer": "x"}, "no option 'stoer'"),
        ({"minPartitions": "none"}, "minPartitions"),
        ({"minPartitions": "0"}, "minPartitions"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        ({"startingOffsets": "soon"}, "startingOffsets"),
        ({"startingOffsets": '{"T": {"0": "x"}}'}, "startingOffsets"),
        ({"startingOffsets": '{"T": {"0": -3}}'}, "-3 is no offset"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "either startingOffsets or"),
        ({"endingTimestamp": "yesterday"}, "endingTimestamp"),
        ({"topics": "a", "topicsPattern": "b"}, "topicsPattern"),
        ({"topicsPattern": "("}, "topicsPattern"),
        ({"tags": "||"}, "tags"),
        ({"transfer": "pigeon"}, "transfer"),
        ({"group": "a b"}, "group"),
        ({"maxOffsetsPerTrigger": "5", "maxBytesPerTrigger": "5"}, "maxBytesPerTrigger"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match="(?i)" + says.replace("(", r"\(")):
        SourceOptions.parse({"store": "x", **options} if options else {})


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        read_table(store=tmp_path)


# ---------------------------------------------------------------- what is missing


def test_an_offset_that_is_not_there_is_a_gap(golden: GoldenStore, tmp_path: Path) -> None:
    topic, messages = topic_of(golden)
    start = json.dumps({topic: {"0": 10_000}, "Nothing": {"1": 3}})
    with pytest.raises(DataLossError) as caught:
        read_table(["topic"], store=golden.root, topics=topic, startingOffsets=start)
    gaps = {(gap.topic, gap.queue_id): gap for gap in caught.value.gaps}
    ends = Counter(message["queue_id"] for message in messages)
    assert (gaps[topic, 0].first, gaps[topic, 0].end) == (ends[0], 10_000)
    assert (gaps["Nothing", 1].first, gaps["Nothing", 1].end) == (0, 3)
    report = tmp_path / "gaps"
    table = read_table(
        ["topic"], store=golden.root, topics=topic, startingOffsets=start, failOnDataLoss="false", gapReport=report
    )
    assert table.num_rows == len(messages) - ends[0]
    assert reported(report) == {(topic, 0, ends[0], 10_000), ("Nothing", 1, 0, 3)}


def reported(folder: Path) -> set[tuple[str, int, int, int]]:
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {(line["topic"], line["queue_id"], line["first"], line["end"]) for line in lines}


def test_damaged_records_are_named_one_by_one_and_the_rest_is_read(golden_copy: CopyGolden, tmp_path: Path) -> None:
    golden = golden_copy("clean")
    bad = [golden.messages[40], golden.messages[41], golden.messages[200]]
    flip(golden, bad[0]["physical_offset"] + 6)  # magic
    flip(golden, bad[1]["physical_offset"] + bad[1]["total_size"] - 1 - 300)  # body or properties
    flip(golden, bad[2]["physical_offset"] + 100)  # body
    with pytest.raises(DataLossError, match="no sound record"):
        read_table(store=golden.root)
    report = tmp_path / "gaps"
    found = places(read_table(store=golden.root, failOnDataLoss="false", gapReport=report))
    whole = places(read_table(["physical_offset"], store=golden.root))
    missing = {message["physical_offset"] for message in bad}
    named = reported(report)
    assert set(whole) - set(found) <= missing
    assert {(m["topic"], m["queue_id"], m["queue_offset"], m["queue_offset"] + 1) for m in (bad[0], bad[2])} <= named
    assert len(named) == len(whole) - len(found)


def flip(golden: GoldenStore, offset: int) -> None:
    base = offset - offset % GOLDEN_SEGMENT_BYTES
    with (golden.layout.commit_log / f"{base:020d}").open("r+b") as file:
        file.seek(offset - base)
        byte = file.read(1)[0]
        file.seek(offset - base)
        file.write(bytes([byte ^ 0x10]))


def test_a_body_s_crc_is_looked_at_unless_told_not_to(golden_copy: CopyGolden) -> None:
    golden = golden_copy("clean")
    message = next(m for m in golden.messages if m["total_size"] > 1000)
    flip(golden, message["physical_offset"] + 400)
    with pytest.raises(DataLossError, match="CRC"):
        read_table(["body"], store=golden.root)
    assert message["physical_offset"] in places(read_table(["physical_offset", "queue_id"], store=golden.root))
    assert read_table(["body"], store=golden.root, checkCrc="false").num_rows


def test_expired_segments_are_no_loss_unless_their_messages_are_asked_for(golden_copy: CopyGolden) -> None:
    golden = golden_copy("clean")
    (golden.layout.commit_log / f"{0:020d}").unlink()
    topic, messages = topic_of(golden)
    found = places(read_table(["physical_offset", "body"], store=golden.root, topics=topic))
    assert found == sorted(m["physical_offset"] for m in messages if m["physical_offset"] >= GOLDEN_SEGMENT_BYTES)
    start = json.dumps({topic: {"0": 0}})
    with pytest.raises(DataLossError, match="expired"):
        read_table(["body"], store=golden.root, topics=topic, startingOffsets=start)


def test_a_missing_segment_in_the_middle_is_refused(golden_copy: CopyGolden) -> None:
    golden = golden_copy("clean")
    (golden.layout.commit_log / f"{GOLDEN_SEGMENT_BYTES:020d}").unlink()
    with pytest.raises(StoreError, match="missing"):
        read_table(store=golden.root)


def test_a_torn_end_is_not_read(golden_copy: CopyGolden) -> None:
    golden = golden_copy("clean")
    last = max(golden.messages, key=lambda message: message["physical_offset"])
    flip(golden, last["physical_offset"] + 100)
    found = places(read_table(["physical_offset"], store=golden.root))
    assert last["physical_offset"] not in found
    assert len(found) == read_table(["physical_offset"], store=golden.root).num_rows > 400


def test_what_the_log_has_and_no_queue_is_a_gap(golden_copy: CopyGolden, tmp_path: Path) -> None:
    golden = golden_copy("clean")
    whole = read_table(["topic", "queue_id", "queue_offset", "physical_offset"], store=golden.root).to_pylist()
    last = max(whole, key=lambda message: message["physical_offset"])
    topic, queue, offset = last["topic"], last["queue_id"], last["queue_offset"]
    at = 20 * offset
    path = golden.layout.consume_queue / topic / str(queue) / f"{at - at % 1000:020d}"
    units = bytearray(path.read_bytes())
    units[at % 1000 : at % 1000 + 20] = bytes(20)
    path.write_bytes(units)
    with pytest.raises(DataLossError, match="not in its queue"):
        read_table(["topic"], store=golden.root)
    report = tmp_path / "gaps"
    table = read_table(["physical_offset", "body"], store=golden.root, failOnDataLoss="false", gapReport=report)
    assert last["physical_offset"] not in places(table)
    assert reported(report) == {(topic, queue, offset, offset + 1)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingTimestamp": "--5"}, "startingTimestamp: it is milliseconds"),
        ({"minPartitions": "²"}, "minPartitions: it is a number above 0"),
        ({"keys": ","}, "keys: ',' names nothing"),
        ({"topics": " , "}, "topics: ' , ' names nothing"),
        ({"startingTimestamp": "9", "endingTimestamp": "8"}, "endingTimestamp: 8 .* is before startingTimestamp"),
        (
            {"startingOffsets": '{"t": {"0": 9}}', "endingOffsets": '{"t": {"0": 8}}'},
            "queue 0 of 't' ends at 8, before",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SourceOptions.parse({"store": "s", **options})


def test_what_follows_a_json_body_is_seen() -> None:
    assert all(is_whole_json(body) for body in (b'{"id": 3}', b" [1]\n", b"3", b"no json", b"{'id': 3}", b"", b"\xff"))
    assert not any(is_whole_json(body) for body in (b'{"id": 3} trailing', b"{} {}", b"1 2"))
