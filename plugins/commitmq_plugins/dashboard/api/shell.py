"""The command line that does the same as a change: to copy into a shell."""

from __future__ import annotations

import shlex


def command(*words: str | int | None) -> str:
    """``commitmq`` and the words, quoted for a shell; None is left out."""
    return shlex.join(["commitmq", *(str(one) for one in words if one is not None)])
