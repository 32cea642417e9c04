"""Goal: on a node with keys nobody gets in without one, nobody does more than its policies say, and no secret is shown.

Method: a real node with keys, and clients with right, wrong, unknown and revoked keys; the attacks of a client that chooses
routing ids; raw sockets of ZeroMQ where our own client would not do it. One node serves all tests that leave it well.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import zmq

import commitmq
from commitmq import AuthenticationError, ConfigError, NodeUnavailableError, ProtocolError, SendError
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import Profile, load_profile
from commitmq.supervision.exit_codes import CliExit
from keyed_node import KeyedNode, keyed
from nodes import Node, eventually, started
from nodes import commitmq as command

REVOKED_WITHIN_S = 2.0


class Secured(KeyedNode):
    """It can be asked without a client."""

    def client(self, profile: Profile, role: str = "admin") -> Channel:
        """A channel with the keys in ``profile``, to the process of ``role``."""
        return Channel(self.node.endpoints()[role] if role != "admin" else f"tcp://{self.host_port}", keys=profile)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    # The start rule: with keys a node may listen for a network.
    with keyed(Secured(tmp_path_factory.mktemp("keys"))) as found:
        assert found.node.report()["node"]["insecure_listeners"] == []
        found.add("root", "--super")
        found.add("shop")
        found.store("acl", "allow", "shop", "Topic:orders", "Pub,Sub")
        found.store("acl", "allow", "shop", "Group:billing", "Sub")
        yield found


def raw(
    secured: Secured, keys: Profile | None, routing_id: bytes = b""
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if routing_id:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
    if keys is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.node_key.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
    dealer.connect(f"tcp://{secured.host_port}")
    return context, dealer


def received_until(peer: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        more = peer.recv(65_536)
        assert more, f"the node ended the connection after {received!r}"
        received += more
    return received


def test_a_user_sends_and_receives_encrypted(secured: Secured) -> None:
    with commitmq.connect(f"commitmq://{secured.host_port}", profile="shop") as connection:
        with connection.producer() as producer:
            producer.send("orders", b"one")
            producer.send_batch("orders", [b"%d" % n for n in range(500)])
            producer.send("orders", bytes(900_000))
        with connection.consumer("orders", group="billing", start="earliest") as consumer:
            count = 0
            while count < 502:
                batch = consumer.poll(5)
                assert batch, count
                count += len(batch)
            consumer.commit()
    # The same user by an address alone; over the network a client of this machine has no way around its rights.
    with commitmq.Producer(f"commitmq://shop@{secured.host_port}") as producer:
        assert producer.send("orders", b"two").queue_offset >= 0
        with pytest.raises(
            SendError, match=r"NO_PERMISSION: no entry of user shop allows Pub on Topic:secret"
        ) as refused:
            producer.send("secret", b"x")
        assert refused.value.outcome is commitmq.Outcome.NOT_STORED


def test_a_user_may_do_what_its_policies_allow_and_nothing_else(secured: Secured) -> None:
    with commitmq.connect(profile="root") as connection:  # its own address
        admin = connection.admin()
        admin.topic_create("private", queues=1)
        with connection.producer() as producer:
            producer.send("private", b"secret")
            producer.send("orders", b"made")
    with commitmq.connect(profile="shop") as connection:
        admin = connection.admin()
        assert connection.node == f"commitmq://shop@{secured.host_port}"
        for refused in (
            lambda: admin.topics(),
            lambda: admin.topic_delete("orders"),
            lambda: admin.topic_create("mine"),
            lambda: admin.status(),
            lambda: admin.groups(),
            lambda: connection.reader("private").poll(1),
            lambda: connection.consumer(["orders", "private"], group="billing"),
            lambda: connection.consumer("orders", group="others"),
        ):
            with pytest.raises(ProtocolError, match="NO_PERMISSION"):
                refused()
        admin.topic("orders")
    with commitmq.Admin(f"commitmq://root@{secured.host_port}") as root:
        assert "private" in [one.name for one in root.topics()]


def test_nobody_gets_in_without_a_key_with_an_unknown_or_a_wrong_one(secured: Secured) -> None:
    with pytest.raises(AuthenticationError, match="lets nobody in without keys"):
        commitmq.connect(f"tcp://{secured.host_port}", timeout_s=5)
    shop = load_profile("shop")
    stranger = zmq.curve_keypair()
    unknown = replace(shop, public_key=stranger[0].decode(), secret_key=stranger[1].decode())
    channel = secured.client(unknown)
    with pytest.raises(AuthenticationError, match="does not know the key of the profile shop"):
        channel.request("metadata", timeout_s=5)
    channel.close()
    # Another node's key: the client must not talk to whoever sits at the address.
    channel = secured.client(replace(shop, node_key=stranger[0].decode()))
    with pytest.raises(NodeUnavailableError, match="may not have the node key"):
        channel.request("metadata", timeout_s=2)
    channel.close()
    # Another user's public key without its secret.
    channel = secured.client(replace(shop, secret_key=stranger[1].decode()))
    with pytest.raises(NodeUnavailableError):
        channel.request("metadata", timeout_s=2)
    channel.close()
    assert f"key={stranger[0].decode()}" in secured.node.log().replace('"', ""), "the log tells which key was refused"


def test_every_port_asks(secured: Secured) -> None:
    """No process is forgotten: each tcp port of the node ends a connection without keys unanswered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asked = {}
    for role, endpoint in secured.node.endpoints().items():
        dealer = asked[role] = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(orjson.dumps({"v": 1, "op": "hello", "id": 1}))
    assert {"admin", "writer", "coordinator", "reader-0", "cleanup", "dispatcher-memory"} <= set(asked)
    time.sleep(0.5)
    assert not [role for role, dealer in asked.items() if dealer.poll(0)]
    for dealer in asked.values():
        dealer.close()
    context.destroy(0)


def test_a_revoked_key_is_refused_while_it_is_connected(secured: Secured) -> None:
    profile = secured.add("leaver", "--super")
    channel = secured.client(profile)
    assert channel.request("metadata", timeout_s=5)[0]["ok"]
    secured.store("user", "key", "remove", "leaver", profile.public_key, "--yes")
    removed = time.monotonic()

    def is_refused() -> bool:
        try:
            channel.request("metadata", timeout_s=5)
        except ProtocolError as error:
            assert error.code == "NO_PERMISSION"
            return True
        return False

    eventually(is_refused, "the key is refused", REVOKED_WITHIN_S)
    assert time.monotonic() - removed < REVOKED_WITHIN_S
    channel.close()
    again = secured.client(profile)
    with pytest.raises(AuthenticationError):
        again.request("metadata", timeout_s=5)
    again.close()
    # The same for a user that is disabled, and back.
    secured.store("user", "key", "add", "leaver", profile.public_key)
    channel = secured.client(profile)
    assert channel.request("status", timeout_s=5)[0]["ok"]
    secured.store("user", "alter", "leaver", "--disable")
    eventually(is_refused, "the user is refused", REVOKED_WITHIN_S)
    channel.close()


def test_clients_change_over_to_a_new_key_without_a_stop(secured: Secured) -> None:
    old, file = secured.add("mover", "--super"), secured.home / "commitmq" / "moved.toml"
    channel = secured.client(old)
    assert channel.request("metadata", timeout_s=5)[0]["ok"]
    words = ("user", "key", "rotate", "mover", "--node", secured.host_port, "--store", str(secured.node.store))
    ended = command(*words, "--output", str(file))
    assert ended.returncode == 0, ended.stderr
    assert f"commitmq user key remove mover {shlex.quote(old.public_key)} --store" in ended.stderr
    new = load_profile("moved")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert new.public_key != old.public_key
    for client in (channel, secured.client(old), secured.client(new)):
        assert client.request("metadata", timeout_s=5)[0]["ok"], "both keys are valid"
        client.close()
    again = command(*words, "--output", str(file))
    assert again.returncode == 1, "a profile is never written over"
    told = orjson.loads(command(*words, "--json").stdout)
    assert told["old_keys"] == [old.public_key, new.public_key]
    assert told["key"] in told["profile"]
    assert told["key"] in secured.store("user", "key", "list", "mover")
    for one in told["old_keys"]:
        secured.store("user", "key", "remove", "mover", one, "--yes")
    assert orjson.loads(secured.store("user", "key", "list", "mover", "--json")) == [told["key"]]
    secured.store("user", "add", "keyless")
    none = command("user", "key", "rotate", "keyless", *words[4:])
    assert (none.returncode, "user key new keyless" in none.stderr) == (2, True)


def test_a_stolen_routing_id_gives_no_rights(secured: Secured) -> None:
    """A client that takes the id of another one is still itself: rights are asked for each message."""
    identity = b"r" + os.urandom(16)
    status = orjson.dumps({"v": 1, "op": "status", "id": 1})
    context, root = raw(secured, load_profile("root"), identity)
    root.send(status)
    assert root.poll(5_000)
    assert orjson.loads(root.recv())["ok"]
    thief_context, thief = raw(secured, load_profile("shop"), identity)
    thief.send(status)
    assert thief.poll(5_000)
    answer = orjson.loads(thief.recv())
    assert answer["code"] == "NO_PERMISSION", answer
    root.close()
    context.destroy(0)
    # ... also when the other one has gone, and the node still remembers its id.
    thief.send(status)
    assert thief.poll(5_000)
    assert orjson.loads(thief.recv())["code"] == "NO_PERMISSION"
    thief_context.destroy(0)


def test_a_client_cannot_name_itself(secured: Secured) -> None:
    """The user id comes from the node's own thread; a property of that name in a peer's handshake changes nothing."""
    path = next(one for one in secured.node.report()["node"]["admin"] if one.startswith("ipc://")).removeprefix(
        "ipc://"
    )
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(path)
        peer.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
        properties = b"".join(
            bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
            for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""), (b"User-Id", b"uid=4711 local"))
        )
        ready = b"\x05READY" + properties
        peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        received_until(peer, b"READY")
        request = orjson.dumps({"v": 1, "op": "status", "id": 1})
        peer.sendall(b"\x00" + bytes([len(request)]) + request)
        received = received_until(peer, b'"ok":')
    assert b'"ok":true' in received, "the kernel's word counts: this account is the node's own"


def test_the_owner_needs_no_key_on_the_nodes_machine(secured: Secured) -> None:
    assert "orders" in secured.run("topic", "list", "--node", f"ipc://{secured.node.store}")
    assert command("topic", "list", "--node", f"ipc://{secured.home}").returncode == CliExit.CONFIG_ERROR
    assert "ready" in secured.store("status")


def test_profiles_that_others_can_read_or_that_are_damaged_are_refused(secured: Secured) -> None:
    path = secured.home / "commitmq" / "shop.toml"
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        commitmq.connect(profile="shop")
    path.chmod(0o600)
    path.write_text(text.replace("secret_key", "secrets_key"))
    with pytest.raises(ConfigError, match="damaged") as damaged:
        commitmq.connect(profile="shop")
    path.write_text(text)
    secret = text.split('secret_key = "')[1].split('"')[0]
    assert secret not in str(damaged.value)
    for name in ("../shop", "", ".hidden", "no such"):
        with pytest.raises(ConfigError):
            commitmq.connect(f"commitmq://{secured.host_port}", profile=name)
    with pytest.raises(ConfigError, match="needs a profile"):
        commitmq.connect(f"commitmq://{secured.host_port}")
    assert secret not in repr(load_profile("shop"))


def test_no_secret_is_in_a_log_or_an_answer(secured: Secured) -> None:
    security = secured.node.store / "config" / "security"
    secrets = [
        secured.home.joinpath("commitmq", f"{name}.toml").read_text().split('"')[-2] for name in ("root", "shop")
    ]
    secrets.append((security / "node.key").read_text().split('"')[-2])
    secrets += [one["secret"] for one in orjson.loads((security / "acl.json").read_bytes())["users"].values()]
    assert len(secrets) >= 5
    status = command("status", "--store", str(secured.node.store), "--json").stdout
    shown = secured.store("user", "list", "--json") + secured.store("user", "key", "list", "shop")
    for one in secrets:
        assert one not in secured.node.log()
        assert one not in status
        assert one not in shown
        for path in (secured.node.store / "run").iterdir():
            if path.is_file():
                assert one.encode() not in path.read_bytes(), path
    assert [oct(one.stat().st_mode & 0o077) for one in (security, security / "node.key", security / "acl.json")] == [
        "0o0"
    ] * 3


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_another_account_is_the_user_that_the_setting_names() -> None:
    """In a store that is shared with a group its members reach the sockets, and are no more than a user."""
    group, account, stranger = 54_321, 54_322, 54_323
    with tempfile.TemporaryDirectory(prefix="commitmq-keys-") as folder:
        Path(folder).chmod(0o755)
        node = Node(Path(folder) / "store", f"security.local_users={account}=shop")
        node.store.mkdir()
        os.chown(node.store, 0, group)
        node.store.chmod(0o2750)
        assert command("keys", "init", "--store", str(node.store)).returncode == 0
        with started(node):
            for arguments in (("user", "add", "shop"), ("acl", "allow", "shop", "Topic:orders", "Get")):
                assert command(*arguments, "--store", str(node.store)).returncode == 0
            # (A look at the table is at most 0.2 s old.)
            time.sleep(0.5)
            ipc = node.row("coordinator")["endpoints"][1]
            assert ipc.startswith("ipc://")
            describe = {"v": 1, "op": "topic.describe", "id": 1, "topic": "orders"}
            assert asked_as(account, group, ipc, describe) == "TOPIC_NOT_EXIST", "it may ask"
            assert asked_as(account, group, ipc, {**describe, "topic": "private"}) == "NO_PERMISSION"
            assert asked_as(account, group, ipc, {**describe, "op": "topic.own"}) == "NO_PERMISSION"
            assert asked_as(stranger, group, ipc, describe) == "NO_PERMISSION", "of the group, and no user"
            assert asked_as(stranger, stranger, ipc, describe) == "", "the folder is closed to others"
            assert asked_as(0, 0, ipc, describe) == "TOPIC_NOT_EXIST"
            assert node.log().count("a request was refused") >= 3


def asked_as(uid: int, gid: int, endpoint: str, header: dict[str, object]) -> str:
    """The code of the answer to a request of another account; empty without one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([gid])
            os.setgid(gid)
            os.setuid(uid)
            dealer = zmq.Context().socket(zmq.DEALER)
            dealer.connect(endpoint)
            dealer.send(orjson.dumps(header))
            if dealer.poll(2_000):
                os.write(writing, str(orjson.loads(dealer.recv()).get("code", "OK")).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_a_node_never_goes_on_without_the_keys_it_has_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that comes back without them would let everybody in."""
    secured = Secured(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(secured.home))
    secured.node.store.joinpath("commitlog").mkdir(parents=True)
    secured.store("keys", "init")
    with started(secured.node) as node:
        profile = secured.add("root", "--super")
        key = node.store / "config" / "security" / "node.key"
        key.rename(tmp_path / "taken")
        told = secured.run("status", "--node", secured.ipc)
        assert "users on  node keys on\n" in told
        assert "the node's keys are gone" in told
        assert "error: security: the node's keys are gone" in secured.run("doctor", "--node", secured.ipc, code=1)
        before = node.pids()["reader-0"]
        endpoint = node.endpoints()["reader-0"]
        os.kill(before, 9)
        eventually(lambda: "the node's keys are gone" in node.log(), "the reader refuses to serve")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(orjson.dumps({"v": 1, "op": "memory", "id": 1}))
        assert not dealer.poll(1_000)
        context.destroy(0)
        (tmp_path / "taken").rename(key)
        eventually(lambda: node.healed("reader-0", before), "the reader is back", 30)
        with commitmq.Reader("t", node=f"commitmq://{profile.name}@{secured.host_port}") as reader:
            assert not reader.poll(0.1)
        node.stop()
        key.rename(tmp_path / "taken")
        for arguments in (("start", "--background"), ("keys", "show"), ("keys", "init")):
            refused = command(*arguments, "--store", str(node.store))
            assert refused.returncode == CliExit.STORE_UNUSABLE, refused
            assert "the node's keys are gone" in refused.stderr
            assert "Put back a copy" in refused.stderr
        assert not node.store.joinpath("run", "node.json").exists()
        (tmp_path / "taken").rename(key)
        assert node.start().returncode == 0
