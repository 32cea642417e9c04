"""An exception belongs to the process or to a message; one that belongs to a message takes no other message along.

To the process belong the files, the memory, the writer, the coordinator and the supervisor (:data:`OF_THE_PROCESS`); such an
exception goes up. Every other one that comes while records are made from records belongs to one of these: :func:`isolated`
finds it by halving, hands it to ``set_aside``, and goes on with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from commitmq.errors import CorruptRecordError, ProtocolError, StoreError
from commitmq.files.room import StoppedWithoutRoom
from commitmq.workers.runtime.context import RestartWanted, SupervisorGone
from commitmq.workers.runtime.run_mover import WriterLost

OF_THE_PROCESS: Final = (
    OSError,
    MemoryError,
    StoreError,
    ProtocolError,
    WriterLost,
    SupervisorGone,
    RestartWanted,
    StoppedWithoutRoom,
)

_T = TypeVar("_T")
_R = TypeVar("_R")


def is_of_message(error: Exception) -> bool:
    """Whether ``error``, raised while a record was made from a record, belongs to that message."""
    return isinstance(error, CorruptRecordError) or not isinstance(error, OF_THE_PROCESS)


def isolated(
    items: Sequence[_T], work: Callable[[Sequence[_T]], Iterable[_R]], set_aside: Callable[[_T, Exception], object]
) -> list[_R]:
    """What ``work`` makes of ``items``. An item on which it fails is handed to ``set_aside``; the order of the others stays.

    ``work`` may be called several times with the same item, so it changes nothing. Each bad item costs as many calls as the
    number of ``items`` can be halved, twice. Raises what belongs to the process.
    """
    if not items:
        return []
    try:
        return list(work(items))
    except Exception as error:
        if not is_of_message(error):
            raise
        if len(items) == 1:
            set_aside(items[0], error)
            return []
    middle = len(items) // 2
    return [
        *isolated(items[:middle], work, set_aside),
        *isolated(items[middle:], work, set_aside),
    ]
