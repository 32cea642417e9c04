"""Profiles: the key pair of a user and the key of a node, in a file that only its owner can read.

``~/.config/commitmq/NAME.toml`` (or below ``$XDG_CONFIG_HOME``), mode 0600; ``commitmq user key new`` makes one. Keys are
CURVE's, as Z85 text of 40 characters. A client that has a profile connects to no other node than the one with this key.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.errors import ConfigError

MAX_FILE_BYTES: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}").fullmatch
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}").fullmatch
_FIELDS: Final = ("node", "node_key", "public_key", "secret_key")


def is_key(text: object) -> bool:
    """Whether ``text`` is a CURVE key in Z85."""
    return isinstance(text, str) and _KEY(text) is not None


@dataclass(frozen=True, slots=True)
class Profile:
    """``node`` is its address, ``host:port``; ``node_key`` its public key. The other two are the user's."""

    name: str
    node: str
    node_key: str
    public_key: str
    secret_key: str = field(repr=False)

    def text(self, user: str) -> str:
        """The content of the file."""
        lines = [f"{name} = {_quoted(getattr(self, name))}" for name in _FIELDS]
        head = f"# The profile of user {user} for CommitMQ's clients. It holds a secret: keep its mode at 0600."
        return "\n".join((head, *lines, ""))


def profile_path(name: str) -> Path:
    """The file of the profile ``name``. Raises ConfigError for what is no name."""
    if not isinstance(name, str) or not _NAME(name):
        raise ConfigError(f"a profile's name has 1 to 64 letters, digits and . _ -, not {name!r:.100}")
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "commitmq" / f"{name}.toml"


def load_profile(name: str) -> Profile:
    """Raises ConfigError for a profile that is missing, damaged, or that other accounts can read."""
    path = profile_path(name)
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no profile {name}: {path} is missing; `commitmq user key new` on the node's machine makes it"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the profile {path} holds a secret, and other accounts can read it: chmod 600 {path}")
    try:
        members = tomllib.loads(data.decode()) if len(data) <= MAX_FILE_BYTES else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        members = {}  # the error would show a part of the secret
    for one in _FIELDS:
        if type(members.get(one)) is not str or (one != "node" and not is_key(members[one])):
            raise ConfigError(f"the profile {path} is damaged: {one} must be a text, for keys of 40 characters")
    return Profile(name, *(members[one] for one in _FIELDS))


def _quoted(text: str) -> str:
    """A TOML string; neither keys nor addresses have quotes or backslashes."""
    return f'"{text}"'
