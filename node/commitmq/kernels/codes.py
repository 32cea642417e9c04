"""The numbers and the one row type that the compiled kernels and their callers share.

``hatch_build.py`` hands the numbers of this module, and those of :mod:`commitmq.format.constants`, to the compiler; a
name here is the same name there.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from commitmq.format.constants import SysFlag

# Reasons why bytes are no valid record, of all kernels that check records; store.log.run_check and store.recovery.scan
# have the sentences.
OK: Final = 0
REASON_SHORT: Final = 1
REASON_MAGIC: Final = 2
REASON_LENGTHS: Final = 3
REASON_BODY_CRC: Final = 4
REASON_RECORD_CRC: Final = 5
REASON_PHYSICAL_OFFSET: Final = 6
REASON_PROPERTIES: Final = 7
REASON_RECORD_CRC_MISSING: Final = 8
REASON_TOPIC: Final = 9
REASON_QUEUE: Final = 10
REASON_SYS_FLAG: Final = 11
REASON_RESERVED_FIELD: Final = 12
REASON_RECORD_SIZE: Final = 13
REASON_BODY_SIZE: Final = 14
REASON_FORBIDDEN_PROPERTY: Final = 15
REASON_CRC_SLOT: Final = 16
REASON_COUNT: Final = 17
REASON_UTF8: Final = 18
REASON_SEQUENCE: Final = 19
REASON_ZEROS: Final = 20
REASON_PROPERTIES_SIZE: Final = 21
REASON_TOO_MANY_PAIRS: Final = 22

SECTOR_BYTES: Final = 512
"""Sectors lost in a power cut read as zeros of this alignment; most devices lose 4096 bytes at once."""
MARK_DIGITS: Final = 12
"""Of the sequence at the end of a producer's mark, see :mod:`commitmq.format.producer_mark`."""
MAX_PAIRS: Final = 512
"""Of a record whose properties are put into another order; bounds the work for a hostile record."""
MAX_V1_TOPIC_BYTES: Final = 127
"""A topic with more has two bytes of length."""
TIMER_UNIT_BYTES: Final = 52
"""One unit of the timer log (spec 12.2)."""

# sysFlag bits that a client may set: compressed, and the compression type.
CLIENT_SYS_FLAGS: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK

# Results of a walk and of a scan.
WALK_LIMIT: Final = 0  # the limit was reached exactly
WALK_FULL: Final = 1  # all rows are filled
WALK_BLANK: Final = 2  # a filler: the log continues in the next segment
WALK_BAD: Final = 3  # no record here, see the reason

# What a walk fills, one row a record. Spans are (start, size) in bytes from the record's first byte; a missing part has
# size 0.
ROW: Final = np.dtype(
    [
        ("physical_offset", np.int64),
        ("queue_offset", np.int64),
        ("tags_code", np.int64),
        ("store_timestamp", np.int64),
        ("born_timestamp", np.int64),
        ("prepared_offset", np.int64),
        ("inner_base", np.int64),  # value of INNER_BASE (spec 2.8), -1 when absent or no number
        ("size", np.int32),
        ("queue_id", np.int32),
        ("topic", np.int32),  # index into the batch's list of topics
        ("sys_flag", np.int32),
        ("delay_level", np.int32),  # value of DELAY, 0 when absent or no number
        ("reconsume_times", np.int32),
        ("body_start", np.int32),
        ("body_size", np.int32),
        ("properties_start", np.int32),
        ("properties_size", np.int32),
        ("keys_start", np.int32),
        ("keys_size", np.int32),
        ("uniq_start", np.int32),
        ("uniq_size", np.int32),
        ("tags_start", np.int32),
        ("tags_size", np.int32),
        ("topic_start", np.int32),
        ("topic_size", np.int32),
        ("multi_start", np.int32),  # INNER_MULTI_DISPATCH (spec 3.10)
        ("multi_offsets_start", np.int32),  # INNER_MULTI_QUEUE_OFFSET
        ("multi_size", np.int16),
        ("multi_offsets_size", np.int16),
        ("inner_num", np.int16),  # value of INNER_NUM, -1 when absent or no number up to 32767
    ],
    align=True,
)

# Results of comparing a candidate with its record.
NO_MATCH: Final = 0
MATCH: Final = 1
NO_RECORD: Final = 2  # the bytes at this place are not a complete record of the expected size

# Kinds of keys that a query of an index can ask for.
BY_KEY: Final = 0
BY_UNIQUE_KEY: Final = 1
BY_TAG: Final = 2

# Columns of the rows that find_marks fills.
MARK_ID_START: Final = 0
MARK_ID_SIZE: Final = 1
MARK_EPOCH: Final = 2
MARK_SEQUENCE: Final = 3
MARK_FOLLOWS: Final = 4

# Results of reading a property's value as a number.
ABSENT: Final = 0
NUMBER: Final = 1
NO_NUMBER: Final = 2
UNDECIDED: Final = 3  # rare forms, left to the caller: digits that are not ASCII, many digits, NaN

# How text_tests compares.
EQUALS: Final = 0
CONTAINS: Final = 1
STARTS_WITH: Final = 2
ENDS_WITH: Final = 3

# Rows of the matrix that heads fills. Starts are positions in the stretch, sizes bytes, times milliseconds.
FIELD_QUEUE_ID: Final = 0
FIELD_FLAG: Final = 1
FIELD_QUEUE_OFFSET: Final = 2
FIELD_SYS_FLAG: Final = 3
FIELD_BORN_TIMESTAMP: Final = 4
FIELD_STORE_TIMESTAMP: Final = 5
FIELD_STORE_HOST: Final = 6
FIELD_STORE_HOST_SIZE: Final = 7
FIELD_RECONSUME_TIMES: Final = 8
FIELD_BODY: Final = 9
FIELD_BODY_SIZE: Final = 10
FIELD_TOPIC: Final = 11
FIELD_TOPIC_SIZE: Final = 12
FIELD_PROPERTIES: Final = 13
FIELD_PROPERTIES_SIZE: Final = 14
FIELDS: Final = 15

# Values of ``crc_from`` of heads: no record needs a CRC, and no record's CRC is checked.
NO_CRC_NEEDED: Final = (1 << 63) - 1
UNCHECKED: Final = -1

# An index file in 32-bit words.
INDEX_HEADER_WORDS: Final = 10
INDEX_ITEM_WORDS: Final = 5

# Results of an insertion into an index file.
INSERT_DONE: Final = 0
INSERT_FULL: Final = 1  # the file is full: continue in a new one
INSERT_SPACE: Final = 2  # the next item is beyond the allocated space

# Words of an insertion's state (int64).
STATE_COUNT: Final = 0  # number of the next item
STATE_SLOTS: Final = 1  # slots in use
STATE_BEGIN_TIMESTAMP: Final = 2
STATE_BEGIN_OFFSET: Final = 3
STATE_END_TIMESTAMP: Final = 4
STATE_END_OFFSET: Final = 5
STATE_ROW: Final = 6  # row of the batch at which to continue
STATE_LAST_OFFSET: Final = 7  # the newest record that has items, in this file or an older one; -1 when none has
STATE_LAST_ITEMS: Final = 8  # how many of its items exist
STATE_WORDS: Final = 9
