"""A cap on traffic: what the paced streams let through, and what the kernel counts on the line of a capped peer."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from testbed.launched import Launched
from testbed.namespaces import Network

from tt_cli.run import load_run
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.network import bandwidth
from tt_cli.swarm.network.bandwidth import (
    ACKNOWLEDGED,
    CATCH_UP_SECONDS,
    LOOK_SECONDS,
    OVERHEAD,
    BandwidthLimiter,
    PacedReader,
    PacedWriter,
    TokenBucket,
    UploadMeter,
)
from tt_cli.swarm.network.tcp_counters import acknowledged_bytes

pytestmark = pytest.mark.slow

MBIT = 1e6
WAIT = 120.0


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(bandwidth, "asyncio", SimpleNamespace(sleep=clock.sleep, Event=asyncio.Event))
    yield clock


def test_a_byte_costs_what_it_takes_on_the_line(clock: Clock) -> None:
    line = BandwidthLimiter(max_upload=8 * MBIT, max_download=80 * MBIT, clock=clock.monotonic)

    async def send() -> None:
        for _ in range(100):
            await line.send(10_000)

    started = clock.now
    asyncio.run(send())
    seconds = 1e6 * OVERHEAD * 8 / (8 * MBIT - bandwidth.RESERVED)
    assert seconds - CATCH_UP_SECONDS <= clock.now - started <= seconds
    assert line.seconds(1e6, 0) == pytest.approx(seconds)


def test_what_comes_in_costs_acknowledgements_going_out(clock: Clock) -> None:
    line = BandwidthLimiter(max_upload=0.1 * MBIT, clock=clock.monotonic)

    async def receive() -> None:
        await line.receive(1_000_000)

    started = clock.now
    asyncio.run(receive())
    assert clock.now - started == pytest.approx(1e6 * ACKNOWLEDGED * 8 / 0.09e6, abs=2 * CATCH_UP_SECONDS)


def test_idle_time_is_not_saved_up(clock: Clock) -> None:
    pace = TokenBucket(8 * MBIT, clock.monotonic)
    pace.charge(1000)
    clock.now += 3600
    before = clock.now
    assert pace.charge(1_000_000) >= before - CATCH_UP_SECONDS + 1.0


def test_a_line_without_a_cap_changes_nothing() -> None:
    p2p = SimpleNamespace(call_binary_stream_handler=1, add_binary_stream_handler=2)
    assert BandwidthLimiter().pace(p2p) is p2p and p2p.call_binary_stream_handler == 1  # type: ignore[arg-type]
    assert BandwidthLimiter().seconds(1e9, 1e9) == 0.0
    with pytest.raises(ValueError, match="rate of 0"):
        BandwidthLimiter(max_upload=0.0)


def words_of(line: BandwidthLimiter, roster: int = 0) -> str:
    """What a peer with this line is told, whose gradient takes 125 MB. roster: bytes that it sends as a leader."""
    run = load_run("emoji").replaced({"swarm.averaging_timeout": 120.0, "swarm.matchmaking_time": 5.0})
    moved = SimpleNamespace(nbytes=125 * 10**6)
    peer = SimpleNamespace(local=moved, store=SimpleNamespace(buffer=moved), _line=line, _run=run, _roster=roster)
    return Averager.slow_line(peer)  # type: ignore[arg-type]


def test_caps_with_which_a_round_takes_too_long_are_told() -> None:
    def words(cap: float | None) -> str:
        return words_of(BandwidthLimiter(cap, cap))

    assert words(None) == words(100 * MBIT) == ""
    assert "a round may take this peer 430 s" in words(5 * MBIT) and "allow 35.7 Mbit/s each way" in words(5 * MBIT)
    assert words(36.0 * MBIT) == ""


@pytest.mark.parametrize("most", [60_000, 250_000, 6_000_000, 251_000_000, 252_500_000, 7_000_000_000])
def test_the_cap_that_is_advised_is_enough(most: int) -> None:
    words = BandwidthLimiter(1e3, 1e3).too_slow(most, 60.0)
    advised = float(words.partition("allow ")[2].split()[0]) * MBIT
    assert advised and not BandwidthLimiter(advised, advised).too_slow(most, 60.0)


def test_a_line_that_was_measured_to_be_too_slow_is_told(clock: Clock) -> None:
    wire = Wire(clock)
    meter = UploadMeter(wire, clock.monotonic)
    line = BandwidthLimiter(meter=meter)

    def words(mbit: float, roster: int = 0, *, strained: bool = True) -> str:
        for _ in range(bandwidth.ROUNDS):  # what was measured before is forgotten
            wire.rate, wire.began = mbit * MBIT, clock.now
            meter.begin()
            with line.writing():
                looked(meter, clock, 2.0)
        if not strained:
            meter.begin()
            looked(meter, clock, 2.0)
        return words_of(line, roster)

    meter.begin()
    with line.writing():
        looked(meter, clock, 0.5)
    assert meter.strained and words_of(line) == "", "a round of less than a second says nothing"
    assert words(17.0) == words(17.0, 10 * 10**6) == ""
    told = words(10.0)
    assert "sends 10.00 Mbit/s, as measured" in told and "its gradient takes 100 s, and the others wait 60 s" in told
    assert "It needs 16.67 Mbit/s" in told and "swarm.averaging_timeout" in told
    assert words(10.0, strained=False) == "", "it had nothing to send that it could not"
    told = words(17.0, 20 * 10**6)
    assert "the list of members that it sends takes 9 s, and the others wait 5 s" in told and "--client-mode" in told


class Wire:
    """A line of 10 Mbit/s whose kernel tells what arrived: of one connection, then of a second one too."""

    def __init__(self, clock: Clock):
        self._clock, self.began, self.rate = clock, clock.now, 10 * MBIT

    def __call__(self) -> dict[int, int]:
        sent = int((self._clock.now - self.began) * self.rate / 8)
        return {1: sent // 2, 2: sent - sent // 2} if self._clock.now < self.began + 20 else {3: sent}


def looked(meter: UploadMeter, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds / LOOK_SECONDS)):
        clock.now += LOOK_SECONDS
        meter.look()


def test_the_upload_is_what_arrived_in_the_best_second_of_the_last_rounds(clock: Clock) -> None:
    clock.now = 100.0
    wire = Wire(clock)
    meter = UploadMeter(wire, clock.monotonic)
    line = BandwidthLimiter(meter=meter)
    assert meter.rate == line.upload == 0
    meter.begin()
    looked(meter, clock, 0.75)
    assert meter.rate == 0, "less than a second says nothing"
    looked(meter, clock, 2.0)
    assert meter.rate == pytest.approx(10 * MBIT, rel=1e-4) and line.upload == pytest.approx(10_000, rel=1e-3)
    assert BandwidthLimiter(4 * MBIT, meter=meter).upload == 4_000
    wire.rate = 1 * MBIT
    for _ in range(2 * bandwidth.ROUNDS):  # in which there was no more to send
        wire.began = clock.now
        meter.begin()
        looked(meter, clock, 2.0)
        assert meter.rate == pytest.approx(10 * MBIT, rel=1e-4) and not meter.strained
    for expected in (10, 10, 10, 10, 1):  # a round that was slower counts when the faster ones are long ago
        wire.began = clock.now
        meter.begin()
        with line.writing():
            looked(meter, clock, 2.0)
        assert meter.rate == pytest.approx(expected * MBIT, rel=1e-4) and meter.strained


def test_a_cap_counts_until_something_was_measured() -> None:
    assert BandwidthLimiter(4 * MBIT).upload == 4_000 and BandwidthLimiter().upload == 0


def test_in_a_round_states_wait_for_its_end_or_their_turn_if_that_is_soon() -> None:
    async def pass_round() -> None:
        clock = Clock()
        meter = UploadMeter(dict, clock.monotonic)
        line = BandwidthLimiter(meter=meter, clock=clock.monotonic)
        async with asyncio.timeout(5.0):
            async with line.measured(slow=False):
                assert await line.give_way(100), "its turn is a millisecond later"
                waiting = [asyncio.create_task(line.give_way(10**6)) for _ in range(3)]
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert [task.result() for task in done] == [False], "the third one's is more than 10 s away"
            assert all(await asyncio.gather(*waiting[:2], line.give_way(10**9))), "the round is over"
        assert len(asyncio.all_tasks()) == 1, "nothing looks at the line any more"

    asyncio.run(pass_round())


def test_a_slow_line_waits_for_itself_when_it_was_measured(clock: Clock) -> None:
    clock.now = 100.0
    meter = UploadMeter(Wire(clock), clock.monotonic)
    meter.begin()
    looked(meter, clock, 2.0)
    line = BandwidthLimiter(meter=meter, clock=clock.monotonic)

    async def sent(slow: bool) -> float:
        line.begin(slow)
        started = clock.now
        for number in range(40):
            if number == 10:  # the first ones went as fast as they could
                assert clock.now == started
                clock.now += bandwidth.FREE_SECONDS
            await line.send(2**18)
        line.end()
        return clock.now - started

    assert asyncio.run(sent(slow=False)) == bandwidth.FREE_SECONDS
    whole = 40 * 2**18 * OVERHEAD * 8 / (bandwidth.PACE * meter.rate)
    assert asyncio.run(sent(slow=True)) == pytest.approx(whole, rel=0.02), "also for what went at once"


def test_the_kernel_tells_what_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(receiver.recv(2**16))
            inode = os.fstat(sender.fileno()).st_ino
            while acknowledged_bytes(os.getpid())[inode] < 100_000:
                pass  # the last acknowledgement is on its way
            assert acknowledged_bytes(os.getpid())[os.fstat(receiver.fileno()).st_ino] == 0
    assert inode not in acknowledged_bytes(os.getpid()) and inode not in acknowledged_bytes(2**22 + 1)


def test_bytes_arrive_as_they_were_sent() -> None:
    message = bytes(range(256)) * 1000

    async def pass_through() -> bytes:
        here, there = socket.socketpair()
        reader, answering = await asyncio.open_connection(sock=here)
        _, writer = await asyncio.open_connection(sock=there)
        line = BandwidthLimiter(1000 * MBIT, 1000 * MBIT)
        sending = PacedWriter(writer, line)
        for piece in (message[:9], memoryview(message)[9:]):
            sending.write(piece)
        drained = asyncio.create_task(sending.drain())
        received = await PacedReader(reader, line).readexactly(len(message))
        await drained
        sending.close()
        with pytest.raises(asyncio.IncompleteReadError):
            await PacedReader(reader, line).readexactly(1)
        answering.close()
        return received

    assert asyncio.run(pass_through()) == message


@pytest.mark.netns
def test_the_kernel_counts_no_more_than_the_cap_and_nobody_takes_the_peer_for_dead(tmp_path: Path) -> None:
    """Two peers make rounds; one is capped at 5 Mbit/s each way, its parts have up to 2^18 elements."""
    cap, steps = 5.0, 2
    with Network(hosts=2) as network:
        members: list[Launched] = []
        known: list[str] = []
        try:
            for number, host in enumerate(network.hosts):
                caps = ["--max-upload", cap, "--max-download", cap] if number else []
                command = ["--run", "emoji", "--part", 0.3, "--home", tmp_path / str(number), "--host", host.address]
                command += ["--micro-batch-seconds", 0.3, "--target-batch-size", 32, "--matchmaking-time", 2, *caps]
                command += [*known, "--seed", number, "--wait-for-go"]
                with host.entered():
                    log = tmp_path / f"log{number}"
                    members.append(Launched(f"peer {number}", "testbed.simulated_peer", command, log))
                if not known:
                    members[0].wait_for(lambda: members[0].of("listening"), WAIT, "the DHT")
                    known = ["--initial-peer", members[0].of("listening")[0]["addresses"][0]]
            for member in members:
                member.wait_for(lambda member=member: member.of("ready"), WAIT, "ready")  # type: ignore[misc]
            before, started = network.traffic()[1], time.monotonic()
            for member in members:
                member.go()
            capped = members[1]

            def together() -> list[dict[str, object]]:
                return [line for line in capped.of("round") if len(line["members"]) == 2]

            capped.wait_for(lambda: len(together()) >= steps, WAIT, f"{steps} rounds of both")
            counted, seconds = network.traffic()[1].since(before), time.monotonic() - started
        finally:
            for member in members:
                member.kill()
    assert counted.sent * 8 <= cap * MBIT * seconds
    assert counted.received * 8 <= cap * MBIT * seconds
    assert {line["outcome"] for line in together()} == {"committed"} and {line["mended"] for line in together()} == {0}
    assert all(line["received"] == 1.0 for line in together())
    assert counted.sent > steps * 1_000_000
