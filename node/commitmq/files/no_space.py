"""The one place that knows the errors for a lack of space. They pass when space is freed."""

from __future__ import annotations

import errno
import os
from typing import Final

from commitmq.errors import DiskFullError, StoreError

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
"""The device is full, or the account's quota is used up: deleting files helps."""


def is_no_space(error: BaseException | None) -> bool:
    """Whether ``error`` says that there is no space: an error of the system, or a StoreError made of one."""
    if isinstance(error, StoreError):
        return isinstance(error, DiskFullError) or is_no_space(error.__cause__)
    return isinstance(error, OSError) and error.errno in NO_SPACE


def kind_of(error: OSError) -> type[StoreError]:
    """The class for an error of a file of the store: DiskFullError when it cannot grow, else StoreError.

    That is without space, and for a file at its limit (RLIMIT_FSIZE, or the file system's).
    """
    return DiskFullError if is_no_space(error) or error.errno == errno.EFBIG else StoreError


def tells_of_no_space(sentence: str) -> bool:
    """Whether a sentence that another process wrote says that there is no space."""
    return any(os.strerror(number) in sentence for number in NO_SPACE)
