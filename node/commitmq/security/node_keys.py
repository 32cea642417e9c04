"""The node's own key pair, ``config/security/node.key``: with it the tcp ports of the native protocol speak CURVE only.

The public key is for profiles: a client connects to no node with another one. `commitmq keys init` makes the file once.
A node that has it asks everybody for a key. It is read at the start of a node, and again by each process that binds a
port.

Once it is there it must stay: ``node.key.configured`` beside it says that there were keys. It is made after the file,
and by the node before its first port asks for a key, so no death in between leaves keys that clients know without it.
Without the file nothing that needs it continues, because a node without keys lets everybody in.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk_space import kind_of
from commitmq.security.policy import Secret, check_key

_MODE: Final = 0o600
_MAX_FILE_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class KeyPair:
    """CURVE keys in Z85."""

    public: str
    secret: Secret

    @classmethod
    def make(cls) -> KeyPair:
        """A new one, of the system's randomness."""
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public.decode(), Secret(secret.decode()))


def node_key_path(root: Path) -> Path:
    """The file of the store ``root``."""
    return root / "config" / "security" / "node.key"


def _configured_path(root: Path) -> Path:
    return node_key_path(root).with_name("node.key.configured")


def load_node_keys(root: Path) -> KeyPair | None:
    """The keys of the store ``root``; None where there never were any. Raises StoreError for a file that cannot be
    used, and for one that is gone.
    """
    path, configured = node_key_path(root), _configured_path(root)
    try:
        had_keys = configured.exists()  # asked first: `keys init` makes it after the file
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        if had_keys:
            raise StoreError(
                "the node's keys are gone, and without them everybody would be let in. Put back a copy of the file; or remove"
                f" {configured} too, and the node has no keys: then no profile is valid any more",
                path=path,
            ) from None
        return None
    except OSError as error:
        raise StoreError(f"cannot read the node's keys: {error.strerror}", path=path) from error
    if mode & 0o077:
        raise StoreError(f"other accounts can read the node's secret key: chmod 600 {path}", path=path)
    try:
        members = tomllib.loads(data.decode())
        return KeyPair(check_key(members["public_key"]), Secret(check_key(members["secret_key"])))
    except (ValueError, KeyError, TypeError):
        # (The error itself would show a part of the secret.)
        raise StoreError("the file of the node's keys is damaged: put back a copy", path=path) from None


def keep_node_keys(root: Path) -> None:
    """Note that the store ``root`` has keys, durably: without their file nothing continues from now. Raises StoreError."""
    path = _configured_path(root)
    try:
        if not path.exists():
            with disk.opened(path, os.O_WRONLY | os.O_CREAT, "node_key_configured", _MODE):
                pass
            disk.sync_folder(path.parent, "node_key_configured")
    except OSError as error:
        raise kind_of(error)(f"cannot note that the node has keys: {error.strerror}", path=path) from error


def make_node_keys(root: Path) -> KeyPair:
    """Make the keys of the store ``root``. Raises FileExistsError when it has some, StoreError; also when they are gone."""
    path = node_key_path(root)
    try:
        if (owner := os.stat(root).st_uid) != os.geteuid():
            raise StoreError(
                f"the node's keys are made by the store's owner, uid {owner}, who runs its node", path=path
            )
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                disk.sync_folder(folder.parent)
        if path.exists():
            keep_node_keys(root)
            raise FileExistsError(f"the node has keys already, in {path}")
        load_node_keys(root)  # new ones in the place of lost ones would make all profiles invalid
        keys = KeyPair.make()
        text = (
            "# The node's keys (CURVE). Whoever has this file can pretend to be the node: keep its mode at 0600.\n"
            f'public_key = "{keys.public}"\nsecret_key = "{keys.secret.reveal()}"\n'
        )
        atomic_file.replace(path, text.encode(), "node_key", mode=_MODE)
        keep_node_keys(root)
        return keys
    except FileExistsError:
        raise
    except OSError as error:
        raise kind_of(error)(f"cannot make the node's keys: {error.strerror}", path=path) from error
