"""Simulated lines: what they carry in all, how connections share them, and that the real meter and pacing see it."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from simulation.lines import FRAMES, HEAD, MBIT, PIECE, WINDOW, Lines, Rate
from simulation.machine import Machine, key_of, measured_line, run_of
from simulation.network import Channel, Line, Network, Node
from simulation.rounds import rounds_over
from simulation.state import gradient_of
from simulation.virtual import EPOCH, Process, in_virtual_time

SECOND = round(MBIT / FRAMES)  # bytes of messages that 1 Mbit/s carries in one


def test_connections_share_a_line_and_the_narrower_of_two_lines_counts() -> None:
    ends: dict[tuple[int, int], float] = {}

    async def send() -> None:
        lines, loop = Lines({0: Rate(up=MBIT), 2: Rate(down=MBIT / 4)}), asyncio.get_running_loop()
        over = asyncio.Event()

        def arrived(connection: tuple[int, int]) -> None:
            ends[connection] = loop.time() - EPOCH
            if len(ends) == 3:
                over.set()

        for connection in ((0, 1), (0, 2), (3, 2)):
            lines.carry(connection, SECOND, lambda connection=connection: arrived(connection))  # type: ignore[misc]
        await over.wait()
        assert lines.acknowledged(0) == {1: SECOND, 2: SECOND} and lines.acknowledged(3) == {2: SECOND}
        assert not lines.acknowledged(1)

    in_virtual_time(send())
    slack = 4 * 4 * PIECE / SECOND
    assert ends[0, 1] == pytest.approx(2.0, abs=slack), "half of the sender's line each"
    assert max(ends[0, 2], ends[3, 2]) == pytest.approx(8.0, rel=1e-3), "all that the receiver's line carries"
    assert abs(ends[0, 2] - ends[3, 2]) < slack


def test_a_stream_has_room_for_so_much_that_nobody_read() -> None:
    async def send() -> None:
        lines = Lines({}, factor=1000.0)
        channel = Channel(Network(random.Random(0), Line(delay=0.0), (), {}, lines), 0, 1, "rpc_state_chunks!")
        message = runtime_pb2.ExpertInfo(serialized_info=bytes(64))
        sent = 0

        async def write() -> None:
            nonlocal sent
            while True:
                await channel.send(message)
                sent += 1

        writing = asyncio.create_task(write())
        size = HEAD + 1000 * message.ByteSize()
        await asyncio.sleep(1.0)
        assert (full := sent) == -(-WINDOW // size)
        reading = aiter(channel)
        for read in range(5):
            await anext(reading)
            await asyncio.sleep(1.0)
            assert sent <= full + read + 1
        assert sent > full
        writing.cancel()

    in_virtual_time(send())


def test_the_meter_sees_what_a_line_carries() -> None:
    async def send() -> None:
        network = Network(random.Random(0), Line(), (), {}, Lines({0: Rate(up=10 * MBIT), 2: Rate(down=2 * MBIT)}))
        limiter = measured_line(network, 0)
        node = Node(network, 0, PeerID.from_base58(key_of(0).peer_id), Process([]), limiter)
        assert node.limiter is limiter and limiter.upload == 0
        message = runtime_pb2.ExpertInfo(serialized_info=bytes(2**16))
        async with limiter.measured(slow=False):
            for target in (1, 2):
                channel = Channel(network, 0, target, "rpc_state_chunks!", limiter)

                async def write(channel: Channel = channel) -> None:
                    while True:
                        await channel.send(message)

                async def read(channel: Channel = channel) -> None:
                    async for _ in channel:
                        pass

                asyncio.get_running_loop().call_later(10.0, asyncio.create_task(write()).cancel)
                asyncio.get_running_loop().call_later(10.0, asyncio.create_task(read()).cancel)
            await asyncio.sleep(10.0)
        assert limiter.upload == pytest.approx(10_000 / FRAMES, rel=0.05)

    in_virtual_time(send())


def test_small_vectors_pass_for_large_ones_in_a_whole_swarm() -> None:
    """A line carries a gradient that stands for 5 kB and its average, so a step lasts as long as that takes."""

    async def run() -> None:
        gradient = sum(tensor.numel() for tensor in gradient_of(0).values())
        lines = Lines({2: Rate(10_000.0, 10_000.0)}, factor=5_000 / gradient)
        network = Network(random.Random(0), Line(), (), {}, lines)
        machines = [Machine(network, number, run_of(3, "mean"), lambda *_: None) for number in range(3)]
        for machine in machines:
            machine.start()
        await asyncio.sleep(60.0)
        while len({machine.state.epoch for machine in machines}) > 1:  # amid a step
            await asyncio.sleep(0.1)
        assert len({machine.state.digest for machine in machines}) == 1
        assert 3 <= machines[0].state.epoch <= 60 / 1.2 + 1
        assert 0 < machines[2].line.upload <= 100, "of 80, measured by the piece"
        for machine in machines:
            assert machine.error is None
            machine.kill()

    in_virtual_time(run())


@pytest.mark.parametrize("delayed", [False, True])
def test_without_delayed_updates_nothing_is_computed_amid_a_round_however_long_it_is(delayed: bool) -> None:
    """With them all of it counts for the next step, one step late."""
    samples: list[int] = []

    async def run() -> None:
        gradient = sum(tensor.numel() for tensor in gradient_of(0).values())
        lines = Lines({number: Rate(10_000.0, 10_000.0) for number in range(3)}, factor=40_000 / gradient)
        network, swarm_run = Network(random.Random(0), Line(), (), {}, lines), run_of(3, "mean")
        patient = {"swarm.averaging_timeout": 60.0, "swarm.next_chunk_timeout": 20.0}
        slow = swarm_run.replaced({"optimizer.delayed": delayed, **patient})
        machines = [
            Machine(network, number, slow, lambda machine, *_: samples.append(machine.last_round.samples))
            for number in range(3)
        ]
        for machine in machines:
            machine.start()
        await asyncio.sleep(150.0)
        for machine in machines:
            assert machine.error is None
            machine.kill()

    in_virtual_time(run())
    alone = 3 * run_of(3, "mean").swarm.target_batch_size  # where each computes all of it before it hears of the others
    assert len(samples) >= 9 and (max(samples) > 2 * alone) == delayed and (max(samples) <= alone) != delayed, samples


def test_rounds_learn_what_lines_carry() -> None:
    """The first is cut evenly; later ones leave the slow line its own gradient, and end soon after it has sent that."""
    mbit, gradients = (20.0, 20.0, 20.0, 2.0), {"weight": torch.ones(2048, 1024)}
    first, second = in_virtual_time(rounds_over(mbit, gradients, rounds=2))
    assert not any(first.problems + second.problems) and set(first.uploads) == {0.0}
    assert second.uploads[3] == pytest.approx(2.0, rel=0.15) and min(second.uploads[:3]) > 4 * second.uploads[3]
    alone = 8 * 2048 * 1024 / 2e6
    assert first.seconds > 1.4 * alone and alone < second.seconds < 1.4 * alone
