"""The reason why a node cannot start, as a sentence for the person at the terminal."""

from __future__ import annotations

from commitmq.errors import CommitMQError
from commitmq.files.no_space import tells_of_no_space
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit

# A role that dies this often before it is ready, while the node starts, will not come up at the next try either.
START_ATTEMPTS = 3


class StartFailed(CommitMQError):
    """The node cannot start. The sentence and the exit code are for the person at the terminal."""

    def __init__(self, message: str, code: CliExit) -> None:
        super().__init__(message)
        self.code = code


def with_a_way_out(sentence: str, layout: StoreLayout) -> str:
    """``sentence``; when it reports a full disk, also how to free space without a node."""
    if "store expire" in sentence or not tells_of_no_space(sentence):
        return sentence
    return (
        f"{sentence}. The disk of the store has no space left for the files of a start. Nothing is lost. To free some: "
        f"`commitmq store expire {layout.root} --keep-bytes N` deletes the oldest segments without a node (--dry-run says "
        "which)"
    )
