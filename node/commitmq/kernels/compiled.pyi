"""Types of the compiled module; what its functions do stands in their sources, ``*.pxi`` beside this file."""

import numpy as np
from numpy.typing import NDArray

# words.pxi
def word_searches(buf: NDArray[np.uint8], at: int, end: int) -> tuple[int, int, int, bool]: ...
def word_comparison(
    left: NDArray[np.uint8], left_at: int, right: NDArray[np.uint8], right_at: int, size: int
) -> bool: ...
def word_loads(buf: NDArray[np.uint8], at: int) -> tuple[int, int, int]: ...
def word_stores(buf: NDArray[np.uint8], at: int, number: int, size: int) -> None: ...

# records.pxi
def crc32_tables(buf: NDArray[np.uint8], start: int, size: int, seed: int) -> int: ...
def crc32(buf: NDArray[np.uint8], start: int, size: int, seed: int) -> int: ...
def sum_of_crcs(buffer: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int32]) -> int: ...
def scan_until(
    segment: NDArray[np.uint8],
    start: int,
    stop: int,
    end: int,
    base_offset: int,
    require_crc: bool,
    out: NDArray[np.int64],
) -> int: ...
def scan(
    segment: NDArray[np.uint8], start: int, end: int, base_offset: int, require_crc: bool, out: NDArray[np.int64]
) -> int: ...
def find_record(
    segment: NDArray[np.uint8], start: int, stop: int, base_offset: int, budget: int, out: NDArray[np.int64]
) -> int: ...
def lacks_a_sector(segment: NDArray[np.uint8], start: int, stop: int, base_offset: int) -> bool: ...

# walk.pxi
def hash_on(buf: NDArray[np.uint8], start: int, end: int, value: int) -> int: ...
def string_hash(buf: NDArray[np.uint8], start: int, end: int) -> int: ...
def walk(
    segment: NDArray[np.uint8],
    start: int,
    limit: int,
    base_offset: int,
    rows: NDArray[np.void],
    topics: NDArray[np.int64],
    table: NDArray[np.int32],
    out: NDArray[np.int64],
) -> int: ...
def walk_timer_chain(
    data: NDArray[np.uint8], base: int, position: int, stop: int, slot_ms: int, positions: NDArray[np.int64]
) -> int: ...

# run.pxi
def properties_reason(
    buf: NDArray[np.uint8], start: int, end: int, names: NDArray[np.uint8], name_ends: NDArray[np.int64]
) -> int: ...
def check_run(
    buf: NDArray[np.uint8],
    topic: NDArray[np.uint8],
    queue_id: int,
    max_body: int,
    max_record: int,
    v6_flags: int,
    crc_slot: bool,
    names: NDArray[np.uint8],
    name_ends: NDArray[np.int64],
    special_from: int,
    moved: bool,
    mark: NDArray[np.uint8],
    sequence: int,
    ends: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int: ...
def store_run(
    run: NDArray[np.uint8],
    start: int,
    end: int,
    segment: NDArray[np.uint8],
    at: int,
    base_offset: int,
    queue_offset: int,
    store_timestamp: int,
    born_host: NDArray[np.uint8],
    keep_born: bool,
    store_host: NDArray[np.uint8],
    crc_slot: bool,
) -> None: ...
def check_batch(
    buf: NDArray[np.uint8], names: NDArray[np.uint8], name_ends: NDArray[np.int64], out: NDArray[np.int64]
) -> int: ...
def measure_batch(
    buf: NDArray[np.uint8], max_body: int, max_properties: int, empty_record: int, out: NDArray[np.int64]
) -> int: ...
def encode_batch(
    buf: NDArray[np.uint8],
    head: NDArray[np.uint8],
    topic: NDArray[np.uint8],
    slot: NDArray[np.uint8],
    run: NDArray[np.uint8],
    sizes: NDArray[np.int64],
) -> None: ...

# readdress.pxi
def readdress(
    buf: NDArray[np.uint8],
    starts: NDArray[np.int64],
    topic: NDArray[np.uint8],
    queue_id: int,
    store_v6: bool,
    more: NDArray[np.uint8],
    more_ends: NDArray[np.int64],
    reorder: bool,
    crc_slot: bool,
    out: NDArray[np.uint8],
    ends: NDArray[np.int64],
    result: NDArray[np.int64],
) -> int: ...

# properties.pxi
def match_tags(
    log: NDArray[np.uint8],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    wanted: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    verdicts: NDArray[np.uint8],
) -> int: ...
def tags_codes(run: NDArray[np.uint8], ends: NDArray[np.int64], codes: NDArray[np.int64]) -> int: ...
def match_keys(
    log: NDArray[np.uint8],
    base: int,
    limit: int,
    offsets: NDArray[np.int64],
    topic: NDArray[np.uint8],
    key: NDArray[np.uint8],
    kind: int,
    begin: int,
    end: int,
    sizes: NDArray[np.int64],
    verdicts: NDArray[np.uint8],
) -> int: ...
def find_marks(
    log: NDArray[np.uint8], properties: NDArray[np.int64], sizes: NDArray[np.int64], marks: NDArray[np.int64]
) -> int: ...
def find_properties(
    log: NDArray[np.uint8],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    names: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    whole: NDArray[np.bool_],
) -> int: ...
def text_tests(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    needles: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    how: int,
    found: NDArray[np.bool_],
) -> None: ...
def same_text(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    other_starts: NDArray[np.int64],
    other_lengths: NDArray[np.int64],
    found: NDArray[np.bool_],
) -> None: ...
def whole_numbers(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    least: int,
    greatest: int,
    values: NDArray[np.int64],
    states: NDArray[np.uint8],
) -> None: ...
def decimal_numbers(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    values: NDArray[np.float64],
    states: NDArray[np.uint8],
) -> None: ...

# arrow.pxi
def heads(
    log: NDArray[np.uint8],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
    crc_from: int,
    check_body: bool,
    fields: NDArray[np.int64],
    why: NDArray[np.int64],
) -> int: ...
def split(
    frame: NDArray[np.uint8],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
) -> int: ...
def elements(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    room: int,
    fields: NDArray[np.int64],
    owners: NDArray[np.int64],
) -> int: ...
def gather(
    log: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64], out: NDArray[np.uint8]
) -> None: ...
def message_ids(
    log: NDArray[np.uint8],
    hosts: NDArray[np.int64],
    host_sizes: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None: ...
def measure_properties(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int32],
    totals: NDArray[np.int64],
) -> None: ...
def take_properties(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    name_offsets: NDArray[np.int32],
    names: NDArray[np.uint8],
    value_offsets: NDArray[np.int32],
    values: NDArray[np.uint8],
) -> None: ...
def property_values(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    names: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    found: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None: ...
def number_alike(
    buf: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    firsts: NDArray[np.int64],
) -> int: ...

# index.pxi
def insert(
    words: NDArray[np.int32],
    slots: int,
    max_items: int,
    allocated: int,
    log: NDArray[np.uint8],
    base: int,
    rows: NDArray[np.void],
    state: NDArray[np.int64],
) -> int: ...
def count_items(log: NDArray[np.uint8], base: int, rows: NDArray[np.void], counts: NDArray[np.int64]) -> None: ...
def check_chains(
    words: NDArray[np.int32],
    slots: int,
    count: int,
    heads: NDArray[np.int32],
    wrong_items: NDArray[np.int64],
    wrong_slots: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None: ...
def find_strays(
    words: NDArray[np.int32], slots: int, count: int, floor: int, high: int, strays: NDArray[np.uint8]
) -> int: ...
def undo(words: NDArray[np.int32], slots: int, max_items: int, count: int) -> int: ...
def items_below(words: NDArray[np.int32], slots: int, count: int, offset: int) -> int: ...
def walk_key_chain(
    words: NDArray[np.int32],
    slots: int,
    max_items: int,
    hashed: int,
    start: int,
    before: int,
    floor: int,
    begin: int,
    end: int,
    begin_timestamp: int,
    budget: int,
    offsets: NDArray[np.int64],
    items: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int: ...
