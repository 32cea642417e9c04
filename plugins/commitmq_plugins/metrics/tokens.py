"""Who may read ``/metrics``: whoever sends a token of ``metrics.token_file``, as ``Authorization: Bearer TOKEN``.

The file has a token a line, so that a new one can come before the old one goes; blank lines and lines that begin with
``#`` are left out. It is read again when it has changed. A later file that is missing or wrong changes nothing: the tokens
of before stay, the log tells once, and each look tries again. ``/health`` needs no token: a probe has none, and learns only
whether the node serves.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.log import Log
from commitmq.security.user import Secret

LEAST_CHARACTERS: Final = 16
MOST_TOKENS: Final = 16
_MOST_BYTES: Final = 64 * 1024
_SCHEME: Final = "bearer"


class Tokens:
    """Made while a node starts: raises StoreError for a file that cannot be used."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path, self._log = path, log
        self._told = ""
        self._seen = self._state()
        self._digests = self._read()

    def allows(self, authorization: str) -> bool:
        """Whether the header ``Authorization`` of a request has a token of the file."""
        self._look()
        scheme, _, told = authorization.strip().partition(" ")
        digest = hashlib.sha256(told.strip().encode(errors="replace")).digest()
        # Each is compared, in a time that tells nothing of the tokens.
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        return scheme.lower() == _SCHEME and any(found)

    def _look(self) -> None:
        if (state := self._state()) == self._seen:
            return
        try:
            self._digests = self._read()
        except StoreError as error:
            if (reason := str(error)) != self._told:
                self._told = reason
                self._log.error("the tokens of metrics cannot be read; those of before stay", error=reason)
            return
        self._seen, self._told = state, ""
        self._log.info("the tokens of metrics were read", count=len(self._digests))

    def _state(self) -> tuple[int, int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size

    def _read(self) -> list[bytes]:
        try:
            with open(self._path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise StoreError(f"cannot read metrics.token_file: {error.strerror}", path=self._path) from error
        if mode & 0o007:
            raise StoreError(
                f"every account of this machine can read metrics.token_file: chmod o= {self._path}", path=self._path
            )
        lines = [one.strip() for one in data.decode(errors="replace").splitlines()]
        tokens = [one for one in lines if one and not one.startswith("#")]
        if not 0 < len(tokens) <= MOST_TOKENS or len(data) > _MOST_BYTES:
            raise StoreError(f"metrics.token_file has 1 to {MOST_TOKENS} tokens, one a line", path=self._path)
        try:
            secrets = [Secret(one) for one in tokens]
        except ValueError as error:
            raise StoreError(f"metrics.token_file: {error}", path=self._path) from None
        if any(len(one.reveal()) < LEAST_CHARACTERS for one in secrets):
            raise StoreError(
                f"metrics.token_file: a token has {LEAST_CHARACTERS} characters or more, as `openssl rand -hex 32` makes",
                path=self._path,
            )
        return [hashlib.sha256(one.reveal().encode()).digest() for one in secrets]
