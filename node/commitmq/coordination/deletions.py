"""How a topic ends: at one place in the log, decided together with the writer, and without a trace of it coming back.

Deleting takes more than one file and more than one process. The steps, each durable before the next begins:

1. The *ending*, ``{name: incarnation}`` in ``commitmq/deleting_topics.json``. From here on the topic is deleted: every
   later failure is repaired by doing the rest again, never by bringing it back. No topic of the name can be created.
2. The others hear of it with the next TOPICS_VERSION. Who takes sends (the writer, the process of memory topics) then takes
   no more for this incarnation, forgets its queue offsets, and stores in its word of the control block that it has heard
   that version. Only then the log's end is read: this is where the topic ends. All records of it lie below, because who
   appends has stopped; a later incarnation's will lie at or above, because there is none before step 6.
3. The *tombstone*, ``{name: log's end}`` in ``commitmq/deleted_topics.json``.
4. The topic is dropped through the topics journal (:mod:`commitmq.store.metadata.topic_files`).
5. The groups' offsets of it are dropped through the offsets journal.
6. The ending is taken back. The others hear of the tombstone with the next TOPICS_VERSION, and the request is answered.

Whoever dies, and when:

* The coordinator, before 1: the topic is as it was. Between any later two: its successor finds the ending, announces it
  with a version of its own, and does 2 to 6 again before the name can be used. All steps can be done twice: the tombstone
  only grows, while there is no newer topic that it could cover, and what is gone cannot go again. Between 6 and the news:
  its successor's version makes everyone read the files again. Without the ending a crash between 3 and 4 would leave a
  topic whose messages had vanished, and one between 4 and 5 a topic whose next incarnation starts with its predecessor's
  group offsets.
* The writer, before it has heard: its successor reads the endings before it takes a send, counts nothing of these topics
  among its queue offsets, and says that it has heard. What its predecessor had stored without publishing it counts as
  written by then, so it lies below the tombstone. The same after it has heard: a word that a dead process stored is right,
  because none that is started later can miss the ending.
* The node, or the machine: as if all of them died. A power cut may take records back that a tombstone counts, then
  recovery lowers it to the log's new end (:mod:`commitmq.store.metadata.deleted_topics`).

A writer that does not run puts step 2 off. The request is refused after ``topics.delete_timeout_ms``, saying so; the
deletion goes on by itself, and the same request again waits for the same deletion.

A tombstone can go when the log holds nothing below it and the ConsumeQueue dispatcher has removed the old incarnation's
queue files: until then a start would take them for the next incarnation's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commitmq import failpoints
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.deleted_topics import load_endings, load_tombstones


@dataclass(slots=True)
class Ending:
    """A deletion that is decided. ``version``: the TOPICS_VERSION that the others hear of it with; 0 before that."""

    incarnation: int
    version: int = 0


class Deletions:
    """The files of the module's text. Everything that writes raises StoreError, and can then be done again."""

    def __init__(self, layout: StoreLayout, tombstones: dict[str, int], endings: dict[str, int]) -> None:
        """Use :meth:`load`."""
        self._layout = layout
        self.tombstones = tombstones
        self.endings = {name: Ending(incarnation) for name, incarnation in endings.items()}
        self.is_doubtful = False
        """Whether the file of the endings may be ahead of :attr:`endings`: a write failed, and nobody knows how far it got."""
        self._untold = set(tombstones)
        self._told: dict[str, int] = {}  # the version that the others hear of a tombstone with

    @classmethod
    def load(cls, layout: StoreLayout) -> Deletions:
        """Raises StoreError for files that cannot be read in either generation."""
        return cls(layout, load_tombstones(layout), load_endings(layout))

    def is_ending(self, name: str, incarnation: int | None = None) -> bool:
        """Whether the deletion of this incarnation of the name, or of any, is decided and not finished."""
        found = self.endings.get(name)
        return found is not None and incarnation in (None, found.incarnation)

    def __len__(self) -> int:
        """Names that something is remembered of."""
        return len(self.tombstones) + sum(name not in self.tombstones for name in self.endings)

    def begin(self, name: str, incarnation: int) -> None:
        """Step 1. After a StoreError the topic is not deleted, but :meth:`settle` must make sure that the disk agrees."""
        self._persist({**self._numbers(), name: incarnation})
        if failpoints.ACTIVE:
            failpoints.hit("deletion.decided")
        self.endings[name] = Ending(incarnation)

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
        """The others hear of everything that is decided or done up to now with TOPICS_VERSION ``version``."""
        for ending in self.endings.values():
            ending.version = ending.version or version
        for name in self._untold:
            self._told[name] = version
        self._untold.clear()

    def untold(self) -> list[tuple[str, int]]:
        """``(name, incarnation)`` of the endings that nobody was told of yet."""
        return [(name, one.incarnation) for name, one in self.endings.items() if not one.version]

    def heard(self, version: int) -> list[str]:
        """Names of the endings that who takes sends has heard of: step 2 is over for them."""
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
        """Step 6; returns the incarnations that are gone."""
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
        """Forget tombstones that hide nothing any more; the file follows with the next :meth:`bury`.

        ``log_begin``: the log's smallest physical offset. ``carried_out``: the TOPICS_VERSION up to which the ConsumeQueue
        dispatcher has removed what belongs to deleted topics.
        """
        for name in [name for name, offset in self.tombstones.items() if offset <= log_begin]:
            if name not in self.endings and 0 < self._told.get(name, 0) <= carried_out:
                del self.tombstones[name], self._told[name]
