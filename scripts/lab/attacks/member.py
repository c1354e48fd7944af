"""A training peer that misbehaves in one way. Options: those of `scripts.lab.lockstep_trainer`, `attack` and `number`.

It is a real peer until the step FIRST_STEP: the others have trained with it before it turns.
"""

from __future__ import annotations

from typing import Any

from hivemind.averaging.group_info import GroupInfo

from scripts.lab import lockstep_trainer
from scripts.lab.attacks.gradients import GRADIENTS, poison
from scripts.lab.attacks.records import RECORDS, false_bytes, false_state
from scripts.lab.attacks.rounds import ROUNDS, Round
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import LockedState

FIRST_STEP = 3
FALSE_DONOR = "false donor"
MEMBERS = (*ROUNDS, *GRADIENTS, *RECORDS, FALSE_DONOR)


def spoil_rounds(attack: str, number: int) -> None:
    """In the averager's process."""
    honest = Averager._begin

    def begin(averager: Averager, group_info: GroupInfo, weight: float) -> CommitProtocol:
        commit = honest(averager, group_info, weight)
        step = int(averager._plan.state_key.split("_")[0]) + 1
        if step >= FIRST_STEP:
            ROUNDS[attack](Round(commit.allreduce, commit, number, step))
        return commit

    Averager._begin = begin  # type: ignore[method-assign]


def spoil_gradients(attack: str, number: int) -> None:
    """In the host process, when a gradient is put into a round: once for each."""
    honest = Collaboration._hold

    def hold(collaboration: Collaboration) -> None:
        honest(collaboration)
        step = collaboration.epoch + 1
        if step >= FIRST_STEP:
            poison(collaboration.averager.local, attack, number, step)

    Collaboration._hold = hold  # type: ignore[method-assign]


def spoil_records(attack: str) -> None:
    """On their way to the DHT; this peer itself goes on with the truth."""
    honest, published = PeerDirectory._send, 0

    def send(board: PeerDirectory, record: PeerRecord) -> Any:
        nonlocal published
        published += 1
        lie = {**RECORDS[attack](record, published), "vote": True} if record.epoch + 1 >= FIRST_STEP else {}
        return honest(board, record.model_copy(update=lie))

    PeerDirectory._send = send  # type: ignore[method-assign]


def spoil_state(number: int) -> None:
    """Hand out other bytes than the signed ones; or a state of its own, which it says is ahead of everybody's."""
    honest = PeerDirectory._send
    held: dict[str, LockedState] = {}

    def snapshot(state: LockedState) -> tuple[bytes, StateBuffer]:
        buffer = StateBuffer.new()
        with state._lock:
            tree = (false_state if number % 2 else false_bytes)(state._shared, buffer)
        return tree.manifest(), buffer

    def send(board: PeerDirectory, record: PeerRecord) -> Any:
        if number % 2 and "state" in held and record.epoch + 1 >= FIRST_STEP:
            buffer = StateBuffer.new()
            with held["state"]._lock:
                tree = false_state(held["state"]._shared, buffer)
            buffer.close()
            record = record.model_copy(update={"epoch": tree.step, "digest": tree.digest, "vote": True})
        return honest(board, record)

    class Held(LockedState):
        def __init__(self, shared: Any):
            super().__init__(shared)
            held["state"] = self

    from tt_cli.swarm import collaboration

    collaboration.LockedState = Held  # type: ignore[misc, attr-defined]
    LockedState.snapshot = snapshot  # type: ignore[method-assign]
    PeerDirectory._send = send  # type: ignore[method-assign]


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Train as the others do, but for one thing."""
    attack, number = options.pop("attack"), options.pop("number")
    if attack in ROUNDS:
        spoil_rounds(attack, number)
    elif attack in GRADIENTS:
        spoil_gradients(attack, number)
    elif attack in RECORDS:
        spoil_records(attack)
    elif attack == FALSE_DONOR:
        spoil_state(number)
    else:
        raise ValueError(f"no attack of a member is called {attack!r}")
    lockstep_trainer.main(options, emit, orders)
