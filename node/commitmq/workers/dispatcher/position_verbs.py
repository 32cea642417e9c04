"""The verbs for a dispatcher's position: skip the record that it was parked at, move it back or forwards.

``skip`` and a reset to a later position add ranges to the dispatcher's state. From then on their records are taken out
of every batch, also when the dispatcher goes back to an older position of its own.
"""

from __future__ import annotations

from typing import Any

from commitmq.control import DispatcherWord
from commitmq.errors import CommitMQError
from commitmq.workers.dispatcher.dispatch_host import DispatcherHost


def skip_suspect(host: DispatcherHost) -> dict[str, Any]:
    """Skip for ever the record that the dispatcher was parked at. Returns it. Raises StoreError."""
    assert host.state is not None
    suspect = host.suspect()
    start = suspect["physical_offset"]
    if "size" not in suspect:
        raise CommitMQError("there is no record behind the dispatcher's position")
    host.state.skipped.append((start, start + suspect["size"]))
    host.state.save()
    host.forgive()
    return suspect


def move(host: DispatcherHost, to: int) -> None:
    """Continue at ``to``, a record's offset: forwards by skipping the range between, backwards by ``truncate``.

    Raises NotImplementedError when the dispatcher cannot go back, StoreError when its state cannot be written. Any
    exception of the dispatcher means that this process must end.
    """
    assert host.state is not None
    if to >= host.position:
        if to > host.position:
            host.state.skipped.append((host.position, to))
        host.state.save()
        host.forgive()
        host.context.tell(skipped=host.state.skipped)
        return
    was_parked, before = host.dispatcher is None, host.position
    try:
        if host.dispatcher is None:
            host.open()
        assert host.dispatcher is not None
        host.dispatcher.truncate(to)
    except Exception as error:
        if was_parked or not isinstance(error, NotImplementedError):
            # The dispatcher's state is unknown: as after a crash, the next process opens it again, or is parked
            # again.
            host.drop()
            host.set_position(before)
        raise
    # Skipped records behind ``to`` are wanted again: going back means all of them.
    host.state.skipped = [(start, min(end, to)) for start, end in host.state.skipped if start < to]
    host.state.position = to
    host.state.save()
    host.forgive()
    host.context.tell(skipped=host.state.skipped)
    host.set_position(to)
    host.context.control.put_dispatcher(host.slot, DispatcherWord.DURABLE, to)
