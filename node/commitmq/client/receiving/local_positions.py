"""The commits of a broadcasting consumer: into a file of its own. It takes the place of a group's committer."""

from __future__ import annotations

from commitmq.client.receiving.assignment import Assignment, Queue
from commitmq.client.receiving.commits import Committer, Progress
from commitmq.client.receiving.position_file import PositionFile, Positions
from commitmq.client.receiving.settings import ConsumerSettings
from commitmq.errors import StoreError
from commitmq.log import get_log

DEFAULT_MEMBER = "DEFAULT"

_log = get_log("consumer")


class LocalPositions:
    """Used by the thread that polls."""

    def __init__(self, settings: ConsumerSettings, assignment: Assignment) -> None:
        """Raises StoreError when another consumer has the file, or it cannot be read."""
        assert settings.group is not None
        self._group = settings.group
        self._assignment = assignment
        self._broker_name = ""
        self._file = PositionFile(settings.positions_folder, settings.member or DEFAULT_MEMBER, settings.group)
        try:
            self.kept = self._file.load()
        except BaseException:
            self._file.close()
            raise

    def begin(self, committer: Committer, deadline: float) -> None:
        """Ask the node whether the group may broadcast, and for the name that the file has for it. Raises ProtocolError."""
        answer = committer.ask("group.broadcast", {"group": self._group}, deadline)
        self._broker_name = str(answer["broker"])

    def close(self) -> None:
        self._file.close()

    def commit(self, progress: Progress, deadline: float) -> dict[Queue, int]:
        """Keep these offsets. Raises StoreError."""
        if not progress.offsets:
            return {}
        # A topic's offsets are of one incarnation: what is kept of an earlier one goes.
        anew = {
            topic
            for topic, incarnation in progress.incarnations.items()
            if self.kept.incarnations.get(topic, incarnation) != incarnation
        }
        kept = self.kept
        offsets = {queue: offset for queue, offset in kept.offsets.items() if queue[0] not in anew}
        generations = {queue: one for queue, one in kept.log_generations.items() if queue not in progress.offsets}
        learnt = {queue: one for queue, one in progress.log_generations.items() if queue in progress.offsets}
        made = Positions(
            {**offsets, **progress.offsets},
            {**kept.incarnations, **progress.incarnations},
            {**generations, **learnt},
        )
        self._file.store(made, self._broker_name)
        self.kept = made
        with self._assignment.lock:
            for key, offset in progress.offsets.items():
                state = self._assignment.owned.get(key)
                if state is not None:
                    state.committed = state.settled = offset
        return dict(progress.offsets)

    def commit_quietly(self, progress: Progress, deadline: float) -> bool:
        """False when the disk refused: the caller tries again later."""
        try:
            self.commit(progress, deadline)
        except StoreError as error:
            _log.warning("positions could not be kept, it will be tried again", group=self._group, error=str(error))
            return False
        return True
