"""A node with keys, whose users' profiles are in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from commitmq.protocol.node_address import Profile, load_profile
from nodes import Node, commitmq, started


class KeyedNode:
    """Not started yet: :func:`keyed` does that."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.home = folder / "home"
        self.node = Node(folder / "store", *settings)

    def run(self, *arguments: str, code: int = 0) -> str:
        """The output of a verb that ends with ``code``."""
        ended = commitmq(*arguments, XDG_CONFIG_HOME=str(self.home), COMMITMQ_NODE="")
        assert ended.returncode == code, f"{arguments}: {ended.stdout} {ended.stderr}"
        return ended.stdout

    def store(self, *arguments: str, code: int = 0) -> str:
        """The same with ``--store``."""
        return self.run(*arguments, "--store", str(self.node.store), code=code)

    @property
    def host_port(self) -> str:
        return f"127.0.0.1:{self.node.address.rpartition(':')[2]}"

    @property
    def ipc(self) -> str:
        """The address for the node's own account."""
        return f"ipc://{self.node.store}"

    def add(self, name: str, *options: str) -> Profile:
        """A new user with a profile of its name."""
        output = str(self.home / "commitmq" / f"{name}.toml")
        self.store("user", "add", name, *options, "--profile-for", self.host_port, "--output", output)
        return load_profile(name)


_Keyed = TypeVar("_Keyed", bound=KeyedNode)


@contextmanager
def keyed(found: _Keyed) -> Iterator[_Keyed]:
    """Make its keys and start it. Clients of this process find its profiles meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(found.home))
        patch.delenv("COMMITMQ_NODE", raising=False)
        found.node.store.joinpath("commitlog").mkdir(parents=True)
        found.store("keys", "init")
        with started(found.node):
            yield found
