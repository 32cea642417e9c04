"""The address of a node's supervisor, as a caller or the environment names it.

``tcp://host:port``, ``ipc://path``, or ``commitmq://PROFILE@host:port``: a connection with the keys of a profile
(:mod:`commitmq.protocol.node_address`). ``ipc://`` may name the folder of a store on this machine: the node that runs there.

Profiles: the key pair of a user and the key of a node, in a file that only its owner can read.

``~/.config/commitmq/NAME.toml`` (or below ``$XDG_CONFIG_HOME``), mode 0600; ``commitmq user key new`` makes one. Keys are
CURVE's, as Z85 text of 40 characters. A client that has a profile connects to no other node than the one with this key.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from commitmq.errors import ConfigError, NodeAddressError

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


DEFAULT_NODE: Final = "tcp://127.0.0.1:7310"
SECURE: Final = "commitmq"
MAX_NODES: Final = 64


def several_addresses(node: str | Iterable[str] | None) -> list[str] | None:
    """The checked addresses that a comma-separated string or a list names; None for one address, as
    :func:`node_address` takes it. Raises NodeAddressError.
    """
    if node is None or isinstance(node, str):
        text = node or os.environ.get("COMMITMQ_NODE") or ""
        if "," not in text:
            return None
        node = text.split(",")
    addresses = [node_address(one.strip() or " ") for one in node]
    if not 0 < len(addresses) <= MAX_NODES:
        raise NodeAddressError(f"give 1 to {MAX_NODES} node addresses, not {len(addresses)}")
    if len(set(addresses)) < len(addresses):
        raise NodeAddressError(f"a node address comes twice: {', '.join(addresses)}")
    return addresses


def node_address(node: str | None) -> str:
    """``node``, else the environment's COMMITMQ_NODE, else the local default. Raises NodeAddressError for nonsense."""
    if not isinstance(node, str | None) or "," in (node or os.environ.get("COMMITMQ_NODE") or ""):
        raise NodeAddressError(
            "these are several node addresses, and only Producer and AsyncProducer take several: make a client for each node"
        )
    address = node or os.environ.get("COMMITMQ_NODE") or DEFAULT_NODE
    told = f"node address {address!r}" + (" (from COMMITMQ_NODE)" if address == os.environ.get("COMMITMQ_NODE") else "")
    if "://" not in address:
        address = f"tcp://{address}"
    scheme = address.partition("://")[0]
    if scheme not in ("tcp", "ipc", SECURE):
        raise NodeAddressError(f"{told} must start with tcp://, {SECURE}:// or ipc://, for example {DEFAULT_NODE}")
    if scheme != "ipc":
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise NodeAddressError(f"{told}: {error}") from error
        if not host or not port:
            raise NodeAddressError(f"{told} needs a host and a port, for example {DEFAULT_NODE}")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.password is not None:
            raise NodeAddressError(f"{told} has more than a host and a port, for example {DEFAULT_NODE}")
        if scheme == SECURE and not parts.username:
            raise NodeAddressError(f"{told} needs a profile: profile=NAME, or {SECURE}://NAME@host:port")
        if scheme == SECURE:
            profile_path(parts.username or "")
        elif parts.username is not None:
            raise NodeAddressError(
                f"{told} has more than a host and a port; with a profile it is {SECURE}://NAME@host:port"
            )
    return address


def with_profile(node: str | None, profile: str | None) -> str | None:
    """``node`` with the keys of ``profile``; without ``node`` the profile's own. Raises NodeAddressError, ConfigError."""
    if profile is None:
        return node
    address = node or load_profile(profile).node
    scheme, _, rest = address.rpartition("://")
    name, at, host = rest.rpartition("@")
    if scheme not in ("", "tcp", SECURE) or (at and name != profile):
        raise NodeAddressError(f"node address {address!r} does not go with the profile {profile!r}")
    return node_address(f"{SECURE}://{profile}@{host}")


def endpoint_of(address: str) -> tuple[str, Profile | None]:
    """The ZeroMQ endpoint of an address that :func:`node_address` made, and the keys to connect with. Raises
    ConfigError for a profile that cannot be used, NodeAddressError for a store on which no node runs.
    """
    scheme, _, rest = address.partition("://")
    if scheme == SECURE:
        name, _, host = rest.rpartition("@")
        return f"tcp://{host}", load_profile(name)
    if scheme == "ipc" and (folder := Path(rest)).is_dir():
        try:
            return str(json.loads((folder / "run" / "node.json").read_text(encoding="utf-8"))["admin"][1]), None
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            raise NodeAddressError(f"no node runs on the store {folder}, or this account cannot see it") from None
    return address, None
