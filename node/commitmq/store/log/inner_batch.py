"""Checks an inner batch before it is stored: a client batch (spec 2.8) that becomes the body of one record.

The messages inside are stored exactly as the client encoded them, and nothing reads them again before a consumer does.
So everything that a separate record is refused for is refused here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commitmq.kernels import codes
from commitmq.kernels.compiled import check_batch
from commitmq.store.log.run_check import MessageIllegalError, forbidden_names, sentence_of
from commitmq.store.queues.batch_consume_queue import MAX_INNER_MESSAGES

_names, _name_ends = forbidden_names()


def count_messages(data: Any) -> int:
    """Number of messages in the client batch ``data`` (any buffer), after checking all of them.

    Raises MessageIllegalError that names the bad message, or for more than MAX_INNER_MESSAGES.
    """
    out = np.zeros(2, np.int64)
    reason = check_batch(np.frombuffer(data, np.uint8), _names, _name_ends, out)
    count, position = (int(value) for value in out)
    if reason != codes.OK:
        raise MessageIllegalError(f"message {count} of the batch, at byte {position}: {sentence_of(reason)}")
    if count > MAX_INNER_MESSAGES:
        raise MessageIllegalError(f"the batch holds {count} messages, at most {MAX_INNER_MESSAGES} fit one record")
    return count
