"""Goal: a server moves frames both ways, and no peer costs more than its limits: slow, silent, greedy or hostile ones.

Method: a server in the test's own loop and peers with plain sockets (and TLS); limits so small that tests reach them.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from commitmq.log import get_log
from commitmq.plugin import failpoints
from commitmq_plugins.rocketmq.remoting import tls
from commitmq_plugins.rocketmq.remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import (
    Command,
    FrameParser,
    PeerGoneError,
    PeerSilentError,
    encode,
    request,
)
from commitmq_plugins.rocketmq.remoting.server import FlushBatch, RemotingConnection, RemotingServer, ServerLimits

ECHO, LATER, NEVER, FAIL, FAIL_LATER, GREAT, SLOW = range(1, 8)
GREAT_BYTES = 300_000


class Service:
    """Handles the requests of these tests."""

    def __init__(self, folder: Path) -> None:
        self.closed: list[RemotingConnection] = []
        self.taken = 0
        self.parked: list[tuple[RemotingConnection, Command]] = []
        self.release = asyncio.Event()
        path = folder / "segment"
        path.write_bytes(bytes(range(256)) * (GREAT_BYTES // 256 + 1))
        with path.open("rb") as file:
            self.segment = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def handle(self, connection: RemotingConnection, command: Command) -> Command | Awaitable[Command | None] | None:
        self.taken += 1
        if command.code == ECHO:
            return command.answer(ext_fields=command.ext_fields, body=bytes(command.body))
        if command.code == LATER:
            return self._later(command)
        if command.code == SLOW:
            return self._slow(command)
        if command.code == NEVER:
            self.parked.append((connection, command))
            return None
        if command.code == GREAT:
            view = memoryview(self.segment)
            pieces = [view[:100_000], view[100_000:GREAT_BYTES]]
            asyncio.get_running_loop().call_soon(connection.send, command.answer(), pieces)
            return None
        if command.code == FAIL:
            raise ValueError("no luck")
        return self._fail_later()

    async def _later(self, command: Command) -> Command:
        await asyncio.sleep(0.01)
        return command.answer(body=bytes(command.body))

    async def _slow(self, command: Command) -> Command:
        await self.release.wait()
        return command.answer()

    async def _fail_later(self) -> Command:
        await asyncio.sleep(0)
        raise ValueError("no luck later")


class Peer:
    """A client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._parser = FrameParser()
        self._found: list[Command] = []

    def put(self, *commands: Command) -> None:
        self.writer.write(b"".join(map(encode, commands)))

    def stop_reading(self) -> None:
        transport: Any = self.writer.transport
        transport.pause_reading()

    def go_on_reading(self) -> None:
        transport: Any = self.writer.transport
        transport.resume_reading()

    async def next(self) -> Command:
        while not self._found:
            data = await asyncio.wait_for(self.reader.read(65_536), 10)
            assert data, "the server ended the connection"
            self._found += self._parser.feed(data)
        return self._found.pop(0)

    async def ask(self, command: Command) -> Command:
        self.put(command)
        return await self.next()

    async def is_ended(self, timeout_s: float = 10.0) -> bool:
        try:
            while await asyncio.wait_for(self.reader.read(1 << 20), timeout_s):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


class Stage:
    """A server with its service, and a way to connect."""

    def __init__(self, server: RemotingServer, service: Service, port: int) -> None:
        self.server, self.service, self.port = server, service, port
        self._peers: list[Peer] = []

    async def connect(self, **options: Any) -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16, **options)
        self._peers.append(Peer(reader, writer))
        return self._peers[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    def end(self) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()


@asynccontextmanager
async def stage(folder: Path, secured: tls.Tls | None = None, **limits: Any) -> AsyncIterator[Stage]:
    service = Service(folder)
    server = RemotingServer(service.handle, service.closed.append, get_log("test"), ServerLimits(**limits), secured)
    made = Stage(server, service, await server.listen("127.0.0.1", 0))
    try:
        yield made
    finally:
        made.end()
        await server.close()
        assert server.connections == set()
        assert server._pending_bytes == 0


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


def test_answers_come_back_with_their_opaque_in_any_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            peer.put(Command(LATER, opaque=1, body=b"late"), Command(ECHO, opaque=2, body=b"soon"))
            found = [await peer.next(), await peer.next()]
            assert [(one.opaque, bytes(one.body)) for one in found] == [(2, b"soon"), (1, b"late")]

    run(main)


def test_a_oneway_request_has_no_answer_whatever_happens(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            for code in (ECHO, LATER, NEVER, FAIL, FAIL_LATER):
                peer.put(Command(code, flag=FLAG_ONEWAY, opaque=code))
            assert (await peer.ask(Command(LATER, opaque=99))).opaque == 99
            (connection,) = at.server.connections
            assert (connection._unanswered, connection._oneways) == (0, 1), "one waits, though nobody wants its answer"
            waiting, command = at.service.parked[0]
            waiting.send(command.answer())
            assert connection._oneways == connection.request_bytes == at.server._request_bytes == 0
            assert (await peer.ask(Command(ECHO, opaque=100))).opaque == 100

    run(main)


def test_a_handler_that_fails_is_an_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            for code in (FAIL, FAIL_LATER):
                answer = await peer.ask(Command(code, opaque=5))
                assert (answer.code, answer.opaque) == (ResponseCode.SYSTEM_ERROR, 5)
                assert str(answer.remark).startswith("ValueError, no luck")

    run(main)


def test_a_body_is_sent_from_the_mapped_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            peer.put(*(Command(GREAT, opaque=number) for number in range(20)))
            for number in range(20):
                answer = await peer.next()
                assert answer.opaque == number
                assert bytes(answer.body) == at.service.segment[:GREAT_BYTES]
            (connection,) = at.server.connections
            assert connection._unanswered == 0

    run(main)


def test_a_peer_that_does_not_read_is_not_read_from_and_then_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, high_water_bytes=100_000, max_unsent_bytes=20_000_000) as at:
            peer = await at.connect()
            peer.stop_reading()
            for number in range(4_000):
                peer.put(Command(ECHO, opaque=number, body=b"x" * 10_000))
            (connection,) = at.server.connections
            seen: list[tuple[bool, int, int]] = []
            while seen[-1:] != seen[-2:-1] or not seen or seen[-1][0]:  # the kernel's buffers fill over some time
                seen.append((connection._is_reading, at.service.taken, connection.unsent_bytes))
                await asyncio.sleep(0.2)
            _, taken, unsent_bytes = seen[-1]
            assert taken < 4_000
            assert 100_000 < unsent_bytes < 1_000_000
            peer.go_on_reading()
            for number in range(4_000):
                assert (await peer.next()).opaque == number

    run(main)


def test_a_peer_that_never_reads_loses_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_unsent_bytes=1_000_000) as at:
            peer = await at.connect()
            peer.stop_reading()
            peer.put(*(Command(GREAT, opaque=number) for number in range(200)))
            await at.until(lambda: len(at.service.closed) == 1)

    run(main)


@pytest.mark.parametrize("reason", ["silent", "frame", "unread"])
def test_a_peer_that_keeps_a_connection_for_nothing_loses_it(
    tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq_plugins.rocketmq.remoting.server._SCAN_S", 0.05)
    limits: dict[str, str] = {"silent": "idle_timeout_s", "frame": "frame_timeout_s", "unread": "send_timeout_s"}

    async def main() -> None:
        small: dict[str, Any] = {limits[reason]: 0.3}
        async with stage(tmp_path, **small) as at:
            peer = await at.connect()
            if reason == "silent":
                assert (await peer.ask(Command(ECHO))).code == 0
            elif reason == "frame":
                peer.writer.write(encode(Command(ECHO, body=b"x" * 100))[:50])
            else:
                peer.stop_reading()
                peer.put(*(Command(GREAT, opaque=number) for number in range(40)))
            await at.until(lambda: len(at.server.connections) == 1 or bool(at.service.closed))
            await at.until(lambda: len(at.service.closed) == 1)

    run(main)


def test_a_frame_in_pieces_is_one_frame(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            data = encode(Command(ECHO, opaque=4, body=b"x" * 500))
            for start in range(0, len(data), 100):
                peer.writer.write(data[start : start + 100])
                await asyncio.sleep(0.01)
            assert bytes((await peer.next()).body) == b"x" * 500
            assert at.server._pending_bytes == 0

    run(main)


def test_more_requests_than_allowed_are_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_requests=3) as at:
            peer = await at.connect()
            peer.put(*(Command(NEVER, opaque=number) for number in range(3)))
            answer = await peer.ask(Command(ECHO, opaque=9))
            assert (answer.opaque, answer.code) == (9, ResponseCode.SYSTEM_BUSY)
            connection, command = at.service.parked[1]
            connection.send(command.answer())
            assert (await peer.next()).opaque == 1
            assert (await peer.ask(Command(ECHO, opaque=10))).code == 0

    run(main)


def test_requests_without_an_answer_have_limited_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_request_bytes=1_000_000) as at:
            peer = await at.connect()
            peer.put(*(Command(SLOW, opaque=number % 2, body=b"x" * 100_000) for number in range(100)))
            (connection,) = at.server.connections
            await at.until(lambda: not connection._is_reading)
            await asyncio.sleep(0.1)
            assert 10 <= at.service.taken < 20
            at.service.release.set()
            for _ in range(100):
                assert (await peer.next()).code == 0
            assert connection.request_bytes == 0

    run(main)


def test_a_wrong_frame_ends_the_connection_after_the_answers_before_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer, other = await at.connect(), await at.connect()
            peer.writer.write(encode(Command(ECHO, opaque=3)) + b"GET / HTTP/1.1\r\n\r\n")
            assert (await peer.next()).opaque == 3
            assert await peer.is_ended()
            assert (await other.ask(Command(ECHO))).code == 0

    run(main)


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
def test_connections_are_limited_and_a_free_place_is_used(tmp_path: Path, limit: str) -> None:
    async def main() -> None:
        few: Any = {limit: 2}
        async with stage(tmp_path, **few) as at:
            first, second = await at.connect(), await at.connect()
            await first.ask(Command(ECHO))
            await second.ask(Command(ECHO))
            assert await (await at.connect()).is_ended()
            first.writer.close()
            await at.until(lambda: len(at.server.connections) == 1)
            assert (await (await at.connect()).ask(Command(ECHO))).code == 0

    run(main)


def test_there_are_no_more_connections_than_descriptors() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 400))\n"
        "from commitmq_plugins.rocketmq.remoting.server import limits_of\n"
        "from commitmq_plugins.rocketmq import RocketMQSettings\n"
        "found = limits_of(RocketMQSettings())\n"
        "print(found.max_connections, found.max_connections_per_address)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["144", "144"]  # of the hard limit 400, with 256 left for other files


def test_incomplete_frames_of_all_peers_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_pending_bytes=1_500_000) as at:
            small, great = await at.connect(), await at.connect()
            small.writer.write(encode(Command(ECHO, body=b"x" * 2_000_000))[:400_000])
            await at.until(lambda: at.server._pending_bytes == 400_000)
            great.writer.write(encode(Command(ECHO, body=b"x" * 2_000_000))[:1_400_000])
            assert await great.is_ended()
            assert at.server._pending_bytes == 400_000

    run(main)


def test_the_server_asks_its_peer(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            await peer.ask(Command(ECHO, opaque=1))
            (connection,) = at.server.connections
            asked = asyncio.ensure_future(connection.request(request(RequestCode.GET_CONSUMER_RUNNING_INFO), 5))
            got = await peer.next()
            assert got.code == RequestCode.GET_CONSUMER_RUNNING_INFO
            peer.put(got.answer(body=b"running"), Command(0, opaque=777, flag=1))
            assert bytes((await asked).body) == b"running"
            connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"}, oneway=True))
            assert (await peer.next()).ext_fields == {"consumerGroup": "g"}
            with pytest.raises(PeerSilentError, match="did not answer in"):
                await connection.request(request(RequestCode.GET_CONSUMER_RUNNING_INFO), 0.05)
            asked = asyncio.ensure_future(connection.request(request(RequestCode.GET_CONSUMER_RUNNING_INFO), 5))
            await asyncio.sleep(0.05)
            peer.writer.close()
            with pytest.raises(PeerGoneError):
                await asked
            with pytest.raises(PeerGoneError):
                await connection.request(request(RequestCode.GET_CONSUMER_RUNNING_INFO), 5)

    run(main)


def test_the_end_waits_for_what_is_handed_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            await peer.ask(Command(ECHO))
            (connection,) = at.server.connections
            connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, oneway=True), [b"x" * 5_000_000])
            connection.close()
            assert len((await peer.next()).body) == 5_000_000
            assert await peer.is_ended()

    run(main)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("certificate")
    names = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-out", names[0], "-keyout", names[1]], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return names


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("mode", ["permissive", "enforcing"])
def test_the_first_byte_decides_about_tls(tmp_path: Path, certificate: tuple[str, str], mode: str) -> None:
    async def main() -> None:
        async with stage(tmp_path, tls.load(mode, *certificate)) as at:
            peer = await at.connect(ssl=client_context())
            peer.put(
                *(Command(GREAT, opaque=number) for number in range(5)), Command(ECHO, opaque=5, body=b"y" * 100_000)
            )
            found = {answer.opaque: bytes(answer.body) for answer in [await peer.next() for _ in range(6)]}
            assert found == {**dict.fromkeys(range(5), at.service.segment[:GREAT_BYTES]), 5: b"y" * 100_000}
            plain = await at.connect()
            plain.put(Command(ECHO, opaque=7))
            if mode == "permissive":
                assert (await plain.next()).opaque == 7
            else:
                assert await plain.is_ended()

    run(main)


def test_tls_that_is_switched_off_or_broken_ends_the_connection(
    tmp_path: Path, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq_plugins.rocketmq.remoting.server._SCAN_S", 0.05)

    async def main() -> None:
        async with stage(tmp_path) as at:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await at.connect(ssl=client_context())
        async with stage(tmp_path, tls.load("permissive", *certificate), handshake_timeout_s=0.3) as at:
            broken, slow = await at.connect(), await at.connect()
            broken.writer.write(b"\x16\x03\x01\x00\x05hello")
            assert await broken.is_ended()
            slow.writer.write(b"\x16\x03")
            assert await slow.is_ended()
            assert (await (await at.connect(ssl=client_context())).ask(Command(ECHO))).code == 0

    run(main)


def test_a_connection_has_no_dictionary_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path) as at:
            socks = [socket.create_connection(("127.0.0.1", at.port)) for _ in range(3)]
            for sock in socks:
                sock.setblocking(False)
                sock.sendall(encode(Command(ECHO)))
            await at.until(lambda: at.service.taken == 3)
            assert all(not hasattr(connection, "__dict__") for connection in at.server.connections)
            for sock in socks:
                sock.close()
            await at.until(lambda: not at.server.connections)

    run(main)


def test_a_flood_of_one_peer_does_not_delay_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commitmq_plugins.rocketmq.remoting.server._TURN_S", 0.0)

    async def main() -> None:
        async with stage(tmp_path) as at:
            flood, calm = await at.connect(), await at.connect()
            assert (await calm.ask(Command(ECHO))).code == 0
            flood.put(*(Command(ECHO, opaque=number) for number in range(3_000)))
            await at.until(lambda: at.service.taken > 10)
            assert (await calm.ask(Command(ECHO, opaque=7))).opaque == 7
            assert at.service.taken < 2_000, "the flood was not over"
            for number in range(3_000):
                assert (await flood.next()).opaque == number
            assert at.server._behind == 0

    run(main)


def test_a_peer_that_goes_while_its_requests_wait_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq_plugins.rocketmq.remoting.server._TURN_S", 0.0)

    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            peer.put(*(Command(SLOW, opaque=number, body=b"x" * 100) for number in range(2_000)))
            await at.until(lambda: at.service.taken > 10)
            (connection,) = at.server.connections
            connection.abort()
            at.service.release.set()
            await asyncio.sleep(0.05)
            assert at.server._behind == at.server._pending_bytes == at.server._request_bytes == 0

    run(main)


def test_requests_of_all_peers_without_an_answer_have_limited_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_all_request_bytes=500_000) as at:
            peers = [await at.connect() for _ in range(4)]
            for peer in peers:
                peer.put(*(Command(SLOW, opaque=number, body=b"x" * 100_000) for number in range(20)))
            await at.until(lambda: at.server.is_full)
            await asyncio.sleep(0.1)
            assert 5 < at.service.taken < 20
            at.service.release.set()
            for peer in peers:
                for _ in range(20):
                    assert (await peer.next()).code == 0
            assert at.server._request_bytes == 0

    run(main)


def test_well_behaved_peers_go_on_beside_those_that_do_not_read_or_end_a_frame(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_unsent_bytes=2_000_000, max_pending_bytes=3_000_000) as at:
            calm = await at.connect()
            deaf, slow = [await at.connect() for _ in range(5)], [await at.connect() for _ in range(5)]
            for peer in deaf:
                peer.stop_reading()
                peer.put(*(Command(GREAT, opaque=number) for number in range(100)))
            for peer in slow:
                peer.writer.write(encode(Command(ECHO, body=b"x" * 2_000_000))[:1_000_000])
            for number in range(200):
                assert (await asyncio.wait_for(calm.ask(Command(ECHO, opaque=number)), 5)).opaque == number
            await at.until(lambda: len(at.service.closed) >= 7)
            assert sum(one.unsent_bytes for one in at.server.connections) < 5 * 3_000_000
            assert at.server._pending_bytes <= 3_000_000

    run(main)


def test_oneway_requests_beyond_the_limit_wait_instead_of_getting_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with stage(tmp_path, max_requests=10) as at:
            peer = await at.connect()
            for number in range(100):
                peer.put(Command(SLOW, flag=FLAG_ONEWAY, opaque=number, body=b"x" * 50_000))
            (connection,) = at.server.connections
            await at.until(lambda: not connection._is_reading)
            await asyncio.sleep(0.1)
            assert 10 <= at.service.taken < 40
            at.service.release.set()
            await at.until(lambda: at.service.taken == 100)
            assert (await peer.ask(Command(ECHO, opaque=100))).opaque == 100

    run(main)


def test_answers_that_are_encoded_already_have_the_failpoints_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[str] = []

    async def main() -> None:
        async with stage(tmp_path) as at:
            peer = await at.connect()
            peer.put(Command(NEVER, opaque=7))
            await at.until(lambda: bool(at.service.parked))
            connection, command = at.service.parked[0]
            monkeypatch.setattr(failpoints, "ACTIVE", True)
            monkeypatch.setattr(failpoints, "hit", hits.append)
            connection.send_frame(7, encode(command.answer()))
            assert (await peer.next()).opaque == 7
            monkeypatch.undo()
            assert connection._unanswered == 0

    run(main)
    assert hits == ["remoting.answer:before", "remoting.answer:after"]


def test_a_connection_that_fails_holds_up_no_other() -> None:
    flushed: list[int] = []

    class One:
        def __init__(self, number: int) -> None:
            self.number = number

        def flush(self) -> None:
            if self.number == 1:
                raise OSError("no luck")
            flushed.append(self.number)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        failed: list[Any] = []
        loop.set_exception_handler(lambda _, about: failed.append(about["exception"]))
        turn = FlushBatch(loop)
        turn.begin()
        for number in range(3):
            turn.add(One(number))
        turn.end()
        assert flushed == [0, 2]
        assert [str(one) for one in failed] == ["no luck"]

    run(main)
