"""A node with users, which serves RocketMQ's clients too: one user owns all, a thief has a topic and a group of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import commitmq
from commitmq.security.policy import Secret
from commitmq_plugins.rocketmq.peer import SessionCredentials
from commitmq_plugins.rocketmq.remoting.frame import Command
from keyed_node import KeyedNode, keyed
from nodes import free_port
from rocketmq_client import served


class Robbed(KeyedNode):
    """``keys`` are those of ``robber``, the thief, and of ``owner``, a user with all rights. In the native protocol they
    have the profiles ``thief`` and ``root``.
    """

    port: int
    keys: dict[str, SessionCredentials]

    def signed(self, command: Command, name: str = "robber") -> Command:
        """``command``, signed by a user."""
        self.keys[name].sign(command)
        return command

    def add_signer(self, name: str, *options: str) -> None:
        """A new user of RocketMQ's protocol."""
        told = json.loads(self.store("user", "add", name, "--json", *options))
        self.keys[name] = SessionCredentials(name, Secret(told["secret"]))


@contextmanager
def robbed_node(folder: Path, *settings: str) -> Iterator[Robbed]:
    """All rights to the topic ``mine`` and the group ``thieves`` are the thief's; the topic ``secrets`` is the owner's."""
    port = free_port()
    own = (
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={free_port()}",
        f"network.store_port={port}",
    )
    with keyed(Robbed(folder, *own, *settings)) as found:
        found.port, found.keys = port, {}
        served(port)
        found.add("root", "--super")
        found.add("thief")
        found.add_signer("robber")
        found.add_signer("owner", "--super")
        for name in ("thief", "robber"):
            found.store("acl", "allow", name, "Topic:mine", "All")
            found.store("acl", "allow", name, "Group:thieves", "All")
        with commitmq.Admin(found.ipc) as admin:
            admin.topic_create("secrets", 1)
            admin.topic_create("mine", 1)
        yield found
