"""Checking an inner batch on its way in: a client batch (spec 2.8) that becomes the body of one record.

The messages inside are stored exactly as the client encoded them and nobody looks at them again before a consumer does,
so everything that is refused of a record of its own is refused of them here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commitmq.kernels import raw
from commitmq.kernels.run import check_batch
from commitmq.store.log.append import MessageIllegalError, forbidden_names, sentence_of
from commitmq.store.queues.batch_consume_queue import MAX_INNER_MESSAGES

_names, _name_ends = forbidden_names()


def count_messages(data: Any) -> int:
    """How many messages the client batch in ``data`` (any buffer) holds, all of them checked.

    Raises MessageIllegalError that names the bad one, or for more than MAX_INNER_MESSAGES.
    """
    out = np.zeros(2, np.int64)
    reason = check_batch(np.frombuffer(data, np.uint8), _names, _name_ends, out)
    count, position = (int(value) for value in out)
    if reason != raw.OK:
        raise MessageIllegalError(f"message {count} of the batch, at byte {position}: {sentence_of(reason)}")
    if count > MAX_INNER_MESSAGES:
        raise MessageIllegalError(f"the batch holds {count} messages, at most {MAX_INNER_MESSAGES} fit one record")
    return count
