"""A training peer that attacks every round from step 2 on. TT_TEST_ATTACKS: JSON, the peer's name → its attack.

flips   sends its gradient times -100, signed as it should be
lies    reduces to the negative of the average, sends all the same bytes and signs them

Parts are small, so that a tiny model has many.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from end_to_end import patient_peer
from hivemind.averaging.group_info import GroupInfo

from tt_cli.peer import trainer
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.compression import gradient_buffer
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, TensorPart

gradient_buffer.PART_ELEMENTS = 1024
ATTACKS: dict[str, str] = json.loads(os.environ["TT_TEST_ATTACKS"])
mine: list[str] = []


def times(allreduce: AllReduce, encoded: bytes, part: TensorPart, factor: float) -> bytes:
    """An encoded part, multiplied."""
    values = torch.empty(part.elements)
    allreduce.codec.of(part.large).decode_into(encoded, values)
    most = 1e30 if part.large else 6e4
    return allreduce.codec.of(part.large).encode(values.mul_(factor).clamp_(-most, most))


def flip(allreduce: AllReduce) -> None:
    flipped = GradientBuffer(allreduce.store.layout, allreduce.codec)
    for index, part in enumerate(allreduce.parts):
        flipped.write(part.start, part.stop, times(allreduce, allreduce.encoded(index), part, -100.0))
    allreduce._local = allreduce.reducer._own = flipped


def lie(allreduce: AllReduce) -> None:
    reducer = allreduce.reducer
    honest = reducer._keep
    reducer._keep = lambda place, encoded: honest(place, times(allreduce, encoded, reducer.parts[place], -1.0))


def begin(averager: Averager, group_info: GroupInfo, weight: float) -> CommitProtocol:
    """As the averager's, attacked."""
    commit = honest_begin(averager, group_info, weight)
    if int(averager._plan.state_key.split("_")[0]) >= 2:
        for attack in mine:
            {"flips": flip, "lies": lie}[attack](commit.allreduce)
    return commit


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As the trainer's."""
    mine.extend([ATTACKS[options["user"]]] if options["user"] in ATTACKS else [])
    trainer.main(options, emit, orders)


honest_begin = Averager._begin
Averager._begin = begin  # type: ignore[method-assign]
patient_peer.install()
