"""Goal: a client reaches a node by a name of which only one address leads to it, whichever that is, and does so at once.

Method: a stand-in for the resolver, real listeners on loopback addresses of both families, and real channels. An address that
is silent is one whose listener accepts nothing any more: its queue is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import zmq

from commitmq import NodeUnavailableError
from commitmq.protocol import channel as name_addresses
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel, NameAddresses
from commitmq.protocol.directory import Directory
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, encode, request

Names = dict[str, list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """The names that there are, with the addresses that the resolver has for each."""
    known: Names = {}
    original = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if str(host).endswith(".invalid"):  # a real resolver may think about it for as long as it likes
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        hosts = known.get(host, [host])
        return [one for each in hosts for one in original(each, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(name_addresses, "_first", {})
    return known


@contextlib.contextmanager
def answering(host: str) -> Iterator[int]:
    """A ROUTER on ``host`` that answers each request; its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.IPV6, 1)
    port = router.bind_to_random_port(f"tcp://{f'[{host}]' if ':' in host else host}", 20_000, 32_000)
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            if router.poll(20):
                peer, header = router.recv_multipart()
                router.send_multipart([peer, wire.ok(orjson.loads(header)["id"])])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield port
    finally:
        stop.set()
        thread.join()
        router.close(0)
        context.term()


@contextlib.contextmanager
def silent(host: str, port: int) -> Iterator[None]:
    """Nothing on ``port`` of ``host`` takes or refuses a connection."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((host, port))
        yield


@contextlib.contextmanager
def ending(host: str, port: int) -> Iterator[None]:
    """Another program, which ends each connection."""
    with socket.create_server((host, port)) as listener:
        listener.settimeout(0.05)
        stop = threading.Event()

        def end() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    listener.accept()[0].close()

        thread = threading.Thread(target=end)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def asked(endpoint: str, timeout_s: float = 10) -> float:
    """How long a request to ``endpoint`` takes, in seconds."""
    began = time.monotonic()
    channel = Channel(endpoint)
    try:
        assert channel.request("status", timeout_s=timeout_s)[0]["ok"]
    finally:
        channel.close()
    return time.monotonic() - began


@pytest.mark.parametrize("listens", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("order", [["127.0.0.1", "::1"], ["::1", "127.0.0.1"]], ids=["IPv4 first", "IPv6 first"])
def test_the_address_that_answers_is_found_and_remembered(names: Names, listens: str, order: list[str]) -> None:
    names["node"] = order
    with answering(listens) as port:
        assert asked(f"tcp://node:{port}") < 3
        # A further connection begins where the first one ended.
        assert NameAddresses(f"tcp://node:{port}").next(0.0) == f"tcp://{'[::1]' if ':' in listens else listens}:{port}"
        assert asked(f"tcp://node:{port}") < 3


@pytest.mark.parametrize("other", [silent, ending])
def test_an_address_that_is_silent_or_someone_elses_is_passed_over(names: Names, other: Callable[..., Any]) -> None:
    names["node"] = ["127.0.0.2", "127.0.0.3", "::1"]
    with answering("::1") as port, other("127.0.0.2", port), other("127.0.0.3", port):
        directory = Directory(f"tcp://node:{port}")
        try:
            deadline = time.monotonic() + 10
            while True:
                try:
                    assert directory.request("status", timeout_s=5)["ok"]
                    break
                except NodeUnavailableError:  # a peer that ends the connection looks like a node that stops
                    assert time.monotonic() < deadline
        finally:
            directory.close()


def test_a_node_that_comes_late_or_moves_is_found(names: Names) -> None:
    names["node"] = ["127.0.0.2", "127.0.0.3"]
    with answering("127.0.0.4") as port:
        threading.Timer(0.5, names.__setitem__, ("node", ["127.0.0.2", "127.0.0.4"])).start()
        assert asked(f"tcp://node:{port}") < 5


def test_without_an_answer_the_time_is_kept_and_a_wrong_name_is_told(names: Names) -> None:
    names["node"] = ["127.0.0.2", "::1"]
    began = time.monotonic()
    with pytest.raises(NodeUnavailableError):
        asked("tcp://node:9", timeout_s=0.7)
    with pytest.raises(NodeUnavailableError):
        asked("tcp://no.such.name.invalid:9", timeout_s=0.7)
    assert time.monotonic() - began < 5


def test_patience_grows_with_each_round(names: Names) -> None:
    """A host may be far away: whoever needs a second for a connection gets it in the end; one that stands is left alone."""
    names["node"] = ["127.0.0.2", "::1"]
    found = NameAddresses("tcp://node:9")
    now, waits = 0.0, []
    for _ in range(12):
        assert found.next(now).endswith(":9")
        began = now
        while not found.is_over(now):
            now += 0.05
        waits.append(round(now - began, 2))
    assert waits == sorted(waits)
    assert waits[0] < 0.4
    assert 3.9 < waits[-1] < 4.2
    found.next(now)
    assert found.note(zmq.EVENT_CONNECTED)
    assert not found.is_over(now + 1_000)


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:7310", "tcp://10.0.0.1:7310", "ipc:///tmp/localhost:7310"])
def test_an_address_is_no_name(endpoint: str) -> None:
    assert not NameAddresses.has_name(endpoint)


@pytest.mark.parametrize("other", [None, silent])
def test_rocketmqs_protocol_too(names: Names, other: Callable[..., Any] | None) -> None:
    names["node"] = ["127.0.0.2", "::1"]
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser()
        while data := await reader.read(65_536):
            for command in parser.feed(data):
                writer.write(encode(Command(0, opaque=command.opaque, flag=1)))
        writer.close()
        ended.set()

    async def main() -> None:
        server = await asyncio.start_server(serve, "::1", 0)
        port = server.sockets[0].getsockname()[1]
        with other("127.0.0.2", port) if other is not None else contextlib.nullcontext():
            client = RemotingClient("node", port)
            assert (await client.request(request(RequestCode.GET_BROKER_CLUSTER_INFO))).code == 0
            await client.close()
        server.close()
        await ended.wait()

    asyncio.run(main())
