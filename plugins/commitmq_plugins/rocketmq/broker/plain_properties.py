"""The properties of a plain message with what a broker adds to them (spec 5.4), without a dictionary for each message.

A broker writes properties in the order of a Java HashMap (spec 2.5), which depends on their names alone. So the order is
found once for each set of names, and kept as a template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

from commitmq.format.constants import Property
from commitmq.format.java import hash_map_order
from commitmq.format.properties import BROKER_BUCKETS
from commitmq.store.log.run_check import SPECIAL_PROPERTIES

_PAIRS: Final = re.compile("(?:[^\x01\x02]+\x01[^\x01\x02]+\x02)+")
_MAX_FORMS: Final = 1_024
_MAX_NAMES_LENGTH: Final = 2_048
_WAIT: Final = "WAIT"
WAITED: Final = ("TRAN_MSG", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY",
                 "INNER_NUM", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "__PSEQ__")  # fmt: skip
"""What a message has that waited somewhere, or was stored in a special way. A consumer sends it back with all of that."""
DROPPED: Final = ("POP_CK", Property.CRC32)
"""What the broker takes away from a single message."""
_NOT_PLAIN: Final = frozenset({*SPECIAL_PROPERTIES, *WAITED, *DROPPED, Property.REPLY_TO_CLIENT})


class Completed(NamedTuple):
    """``encoded``: as the record has them. ``waits``: the sender does not forbid to wait for the flush."""

    encoded: bytes
    unique: str
    waits: bool


class _Form(NamedTuple):
    """``pick`` takes the values of ``template`` from the list of names and values; places in that list."""

    template: str
    pick: Any
    unique: int
    wait: int


class PlainProperties:
    """See the module. ``marks`` are the properties that are added to each message."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = dict(marks)
        self._forms: dict[tuple[str, ...], _Form | None] = {}

    def completed(self, text: str) -> Completed | None:
        """The properties ``text`` of a send with those that are added. None for a message that is not plain: it waits
        or waited somewhere, its sender waits for a reply, it has no unique key, or its properties are not as clients write
        them.
        """
        if _PAIRS.fullmatch(text) is None:
            return None
        flat = text[:-1].replace("\x02", "\x01").split("\x01")
        names = tuple(flat[::2])
        try:
            form = self._forms[names]
        except KeyError:
            form = self._new_form(names)
        if form is None:
            return None
        encoded = (form.template % form.pick(flat)).encode("utf-8", "replace")
        return Completed(encoded, flat[form.unique], form.wait < 0 or flat[form.wait] != "false")

    def _new_form(self, names: tuple[str, ...]) -> _Form | None:
        if sum(map(len, names)) > _MAX_NAMES_LENGTH:
            return None
        form = self._form(names)
        if len(self._forms) >= _MAX_FORMS:
            self._forms.clear()
        self._forms[names] = form
        return form

    def _form(self, names: tuple[str, ...]) -> _Form | None:
        known = set(names)
        if (
            len(known) != len(names)
            or Property.UNIQUE_KEY not in known
            or not known.isdisjoint(_NOT_PLAIN)
            or not known.isdisjoint(self._marks)
        ):
            return None
        template, places = "", []
        for name in hash_map_order([*names, *self._marks], BROKER_BUCKETS):
            if name in known:
                template += f"{name.replace('%', '%%')}\x01%s\x02"
                places.append(2 * names.index(name) + 1)
            else:
                template += f"{name}\x01{self._marks[name].replace('%', '%%')}\x02"
        wait = 2 * names.index(_WAIT) + 1 if _WAIT in known else -1
        return _Form(template, itemgetter(*places), 2 * names.index(Property.UNIQUE_KEY) + 1, wait)
