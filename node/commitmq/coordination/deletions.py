"""Deletes topics: a topic ends at one physical offset, agreed with the writer, and no part of it comes back.

A deletion takes more than one file and more than one process. The steps, each durable before the next begins:

1. The *ending*, ``{name: incarnation}`` in ``commitmq/deleting_topics.json``. From the moment the file has it the topic
   is deleted: every later failure is repaired by doing the rest again, never by restoring the topic. No topic of the
   name can be created. This holds also while the file is not yet durable, because its folder's sync failed: a process
   may have read it already, and have forgotten the topic's queue offsets. The file is written again before step 3.
2. The other processes learn of the ending with the next TOPICS_VERSION. The processes that take sends (the writer, the
   process of memory topics) then take no more for this incarnation, forget its queue offsets, and store that version in
   their word of the control block. Only then the coordinator reads the log's end: this is where the topic ends. All its
   records lie below, because the appending processes have stopped. The records of a later incarnation will lie at or
   above, because none exists before step 6.
3. The *tombstone*, ``{name: log's end}`` in ``commitmq/deleted_topics.json``.
4. The topic is dropped through the topics journal (:mod:`commitmq.store.metadata.topic_files`).
5. The groups' offsets of the topic are dropped through the offsets journal.
6. The ending is removed. The other processes learn of the tombstone with the next TOPICS_VERSION, and the request is
   answered.

After the death of a process:

* The coordinator, before step 1: the topic is unchanged. Between any later two steps: its successor finds the ending,
  announces it with a version of its own, and does steps 2 to 6 again before the name can be used. All steps can be done
  twice: the tombstone only grows, while there is no newer topic that it could cover, and removing a removed topic
  changes nothing. Between step 6 and the news: the successor's version makes all processes read the files again.
  Without the ending a crash between 3 and 4 would leave a topic whose messages had vanished, and one between 4 and 5 a
  topic whose next incarnation starts with its predecessor's group offsets.
* The writer, before it has confirmed: its successor reads the endings before it takes a send, counts none of these
  topics among its queue offsets, and confirms. Records that the predecessor had stored without publishing count as
  written by then, so they lie below the tombstone. The same holds after it has confirmed: a word that a dead process
  stored is right, because no later process can miss the ending.
* The node, or the machine: as if all processes died. A power cut may take back records that a tombstone counts; then
  recovery lowers the tombstone to the log's new end (:mod:`commitmq.store.metadata.deleted_topics`).

A writer that does not run delays step 2. The request is refused after ``topics.delete_timeout_ms``, with that reason.
The deletion continues by itself, and the same request again waits for the same deletion.

A tombstone can be dropped when the log holds nothing below it and the ConsumeQueue dispatcher has removed the old
incarnation's queue files. Until then a start would take those files for the next incarnation's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.deleted_topics import load_endings, load_tombstones


@dataclass(slots=True)
class Ending:
    """A decided deletion. ``version``: the TOPICS_VERSION with which other processes learn of it; 0 before that."""

    incarnation: int
    version: int = 0


class Deletions:
    """The files of the module's text. Every writing method raises StoreError, and can then be called again."""

    def __init__(self, layout: StoreLayout, tombstones: dict[str, int], endings: dict[str, int]) -> None:
        """Use :meth:`load`."""
        self._layout = layout
        self.tombstones = tombstones
        self.endings = {name: Ending(incarnation) for name, incarnation in endings.items()}
        self.is_doubtful = False
        """Whether the endings file may differ from :attr:`endings`, or go with the power: a write of it failed."""
        self._untold = set(tombstones)
        self._told: dict[str, int] = {}  # the version with which other processes learn of a tombstone

    @classmethod
    def load(cls, layout: StoreLayout) -> Deletions:
        """Raises StoreError for files that cannot be read in either generation."""
        return cls(layout, load_tombstones(layout), load_endings(layout))

    def is_ending(self, name: str, incarnation: int | None = None) -> bool:
        """Whether the deletion of this incarnation of the name (None: of any) is decided and not finished."""
        found = self.endings.get(name)
        return found is not None and incarnation in (None, found.incarnation)

    def __len__(self) -> int:
        """Number of names with an ending or a tombstone."""
        return len(self.tombstones) + sum(name not in self.tombstones for name in self.endings)

    def begin(self, name: str, incarnation: int) -> None:
        """Step 1. After a StoreError the topic is not deleted.

        A failure that left the ending where other processes may read it is none: the deletion is decided, and
        :attr:`is_doubtful` until :meth:`settle` has made it durable.
        """
        was_doubtful = self.is_doubtful
        try:
            self._persist({**self._numbers(), name: incarnation})
        except StoreError:
            if not self._may_be_read(name):
                self.is_doubtful = was_doubtful
                raise
        if failpoints.ACTIVE:
            failpoints.hit("deletion.decided")
        self.endings[name] = Ending(incarnation)

    def _may_be_read(self, name: str) -> bool:
        """Whether a process that reads the endings now may find one of ``name``."""
        try:
            return name in load_endings(self._layout)
        except StoreError:
            return True  # another process may have better luck

    def settle(self) -> None:
        """Write the endings as they are."""
        self._persist(self._numbers())

    def _numbers(self) -> dict[str, int]:
        return {name: one.incarnation for name, one in self.endings.items()}

    def _persist(self, numbers: dict[str, int]) -> None:
        self.is_doubtful = True
        json_config.persist(self._layout.endings, numbers)
        self.is_doubtful = False

    def tell(self, version: int) -> None:
        """Other processes learn of everything decided or done so far with TOPICS_VERSION ``version``."""
        for ending in self.endings.values():
            ending.version = ending.version or version
        for name in self._untold:
            self._told[name] = version
        self._untold.clear()

    def untold(self) -> list[tuple[str, int]]:
        """``(name, incarnation)`` of the endings that are not announced yet."""
        return [(name, one.incarnation) for name, one in self.endings.items() if not one.version]

    def heard(self, version: int) -> list[str]:
        """Names of the endings that the processes that take sends have confirmed: step 2 is over for them."""
        return [name for name, one in self.endings.items() if 0 < one.version <= version]

    def bury(self, names: Iterable[str], log_end: int) -> None:
        """Step 3: the topics of ``names`` end at physical offset ``log_end``."""
        kept = dict(self.tombstones)
        for name in names:
            kept[name] = max(log_end, kept.get(name, 0))
        json_config.persist(self._layout.tombstones, kept)
        if failpoints.ACTIVE:
            failpoints.hit("deletion.buried")
        self.tombstones = kept
        self._untold.update(names)

    def finish(self, names: Iterable[str]) -> dict[str, int]:
        """Step 6. Returns the removed incarnations."""
        gone = {name: self.endings[name].incarnation for name in names}
        left = {name: incarnation for name, incarnation in self._numbers().items() if name not in gone}
        if failpoints.ACTIVE:
            failpoints.hit("deletion.before_finish")
        self._persist(left)
        if failpoints.ACTIVE:
            failpoints.hit("deletion.finished")
        for name in gone:
            del self.endings[name]
        return gone

    def prune(self, log_begin: int, carried_out: int) -> None:
        """Drop tombstones that hide no records any more; the file follows with the next :meth:`bury`.

        ``log_begin``: the log's smallest physical offset. ``carried_out``: the ConsumeQueue dispatcher has removed the
        queues of topics deleted up to this TOPICS_VERSION.
        """
        for name in [name for name, offset in self.tombstones.items() if offset <= log_begin]:
            if name not in self.endings and 0 < self._told.get(name, 0) <= carried_out:
                del self.tombstones[name], self._told[name]
