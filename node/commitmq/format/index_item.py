"""An item of an IndexFile (spec 4.1), for one item and for arrays of items.

    offset   field                why it is there
    0        keyHash i4           of topic and key; a look-up compares it before it reads the log
    4        physical offset i8   where the record begins in the log
    12       time difference i4   seconds since the file's begin timestamp
    16       previous item i4     number of the next older item of the same slot; 0 ends the chain

The fields have numpy's names of types, so this module needs no numpy: ``numpy.dtype(ITEM_FIELDS)``.
"""

from __future__ import annotations

import struct
from typing import Final

ITEM_STRUCT: Final = struct.Struct(">iqii")
ITEM_FIELDS: Final = [("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
