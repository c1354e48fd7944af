"""A swarm of real peers under one attack, and how it fares, for scripts/bench attacks."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from testbed.attacks.intruder import BANNED, EXPIRED, FORGED, REPLAYED
from testbed.attacks.member import ANOTHERS, COPIED, FIRST_STEP
from testbed.attacks.stranger import Facts, facts_of
from testbed.attacks.table import STRANGER, Attack
from testbed.disturbance import digests_of, need, states_of, tell_logs
from testbed.passes import HOUR, Issuer, key_file
from testbed.tiny_words import tiny_words
from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import (
    Event,
    Failure,
    Finished,
    Listening,
    Log,
    Phase,
    Round,
    Saved,
    Step,
    Synchronised,
    Trouble,
)
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.task import task_of
from tt_cli.task.task import trained

STALLED = 150.0  # seconds for the next step; then the swarm has stopped
HELD_OUT = 256  # examples of the final loss
SPARSE, INNER_LR = 256, 4e-3  # of local steps: elements of each 4,096, and AdamW's rate
NAMES = ("anna", "ben", "cleo", "dora", "emil", "fred", "gina", "hans", "iris", "jan")
NEWCOMER, ATTACKER = "late", "mallory"


@dataclass(frozen=True)
class Size:
    """Of one experiment. longest: seconds after which a peer computes one more micro-batch for a step.

    kind: what is trained, as in a run file. local: by local steps with sparse messages, one inner step to a global one.
    """

    honest: int
    attackers: int
    steps: int
    micro_batch: int = 8
    longest: float = 5.0
    kind: str = "dalle"
    local: bool = False


def attacked_run(size: Size, attackers: int) -> RunConfig:
    """A run with a model of 267,000 parameters, or 35,000 of language; each peer has one micro-batch in every step."""
    sizes: dict[str, object] = {"model.dim": 64, "model.depth": 2, "model.heads": 2, "model.dim_head": 32}
    if size.kind != "dalle":
        sizes = {"schedule.peak_lr": 5e-2}  # of LAMB
    optimizer: dict[str, object] = {"optimizer": {"min_8bit_size": 4096}, "swarm.large_tensor": 4096}
    if size.local:
        inner = {"name": "local", "inner_batch": size.micro_batch, "sparse": SPARSE}
        optimizer = {"optimizer": inner, "swarm.large_tensor": 1024, "schedule.peak_lr": INNER_LR}
    return (load_run("emoji") if size.kind == "dalle" else tiny_words()).replaced(
        {
            **sizes,
            **optimizer,
            "run.name": "bench-attacks",
            "schedule.total_steps": size.steps,
            "swarm.target_batch_size": size.micro_batch * (size.honest + attackers),
            "swarm.matchmaking_time": 5.0,
            "swarm.averaging_timeout": 30.0,
            "swarm.next_chunk_timeout": 8.0,
            "swarm.statistics_expiration": 15.0,
        }
    )


def run_attacked(size: Size, attack: Attack | None, folder: Path) -> dict[str, Any]:
    """Seven honest peers, say, and the attackers, until the honest ones have made all steps."""
    attackers = size.attackers if attack is not None and attack.by_member else 0
    run, issuer = attacked_run(size, attackers), None
    if attack is not None and not attack.by_member:
        issuer = Issuer()
        run = issuer.closed(run)
    gate, facts = folder / "gate", folder / "facts.json"
    with LocalSwarm(run.to_toml(), folder) as swarm:
        if issuer is not None:
            issuer.admit(folder / "aux", run, "aux", "organiser")
        swarm.start_aux()
        common = {"batch_size": size.micro_batch, "lockstep": True, "longest": size.longest, "gate": str(gate)}

        def start(name: str, seed: int, **more: Any) -> LocalPeer:
            if issuer is not None and not name.startswith(ATTACKER):
                issuer.admit(folder / name, run, "trainer", name)
            module = more.pop("module", "testbed.peer")
            return swarm.start_trainer(name, module=module, seed=seed, **common, **more)

        honest = [start(name, seed) for seed, name in enumerate(NAMES[: size.honest])]
        bad = []
        for number in range(size.attackers if attack is not None else 0):
            assert attack is not None
            name = f"{ATTACKER}-{number}"
            if attack.by_member:
                seed = 100 if attack.name == COPIED else 100 + number  # one device's work under all of their names
                bad.append(start(name, seed, attacks={attack.name: FIRST_STEP}, number=number))
            elif attack.module == STRANGER:
                bad.append(swarm.start(name, attack.module, {"attack": attack.name, "facts": str(facts)}))
            else:
                assert issuer is not None
                options = intrude(attack, issuer, run, folder, name)
                bad.append(start(name, 100 + number, module=attack.module, **options))
        trainers = [*honest, *(bad if attackers else [])]
        need(swarm, lambda: all(in_training(member) for member in trainers), "the start of all", trainers)
        gate.touch()
        late: list[LocalPeer] = []
        told = -1
        while not all(_saved(member, size.steps) for member in honest):
            newest = max((event.epoch for member in honest for event in member.of(Step)), default=0)
            if newest != told and (leak := _facts(honest)) is not None:
                leak.write(facts)
            if attack is not None and attack.newcomer and not late and newest >= size.steps // 3:
                late.append(start(NEWCOMER, 50))
            reached = newest
            if not swarm.wait(lambda reached=reached: _moved(honest, reached, size.steps), STALLED):
                tell_logs(trainers)
                write_events(folder, trainers)
                return {"problem": f"no step after {newest} within {STALLED:.0f} s"}
            told = newest
        if late:
            swarm.wait(lambda: bool(late[0].of(Step)) or bool(late[0].of(Finished)), STALLED)
        write_events(folder, [*honest, *bad, *late])
        return {
            **outcome(run, size, honest),
            "noticed": noticed([*honest, *late], bad),
            "strangers": tries(bad) or (intruded(bad, [*honest, *late]) if issuer is not None else {}),
            "newcomer": newcomer(late, honest),
        }


def write_events(folder: Path, members: list[LocalPeer]) -> None:
    """Keep all that each member told, a line of JSON for each event."""
    for member in members:
        (folder / f"{member.name}.jsonl").write_text("".join(event.to_json() + "\n" for event in list(member.events)))


def intrude(attack: Attack, issuer: Issuer, run: RunConfig, folder: Path, name: str) -> dict[str, str]:
    """Give an intruder the pass that should not count; returns its further options."""
    home, victim = folder / name, folder / NAMES[0]
    if attack.name == FORGED:
        Issuer().admit(home, run, "trainer", name)
        return {}
    issuer.admit(home, run, "trainer", name, lasts=-HOUR if attack.name == EXPIRED else HOUR)
    if attack.name in (REPLAYED, ANOTHERS):
        stolen = key_file(victim, run, "trainer").with_suffix(".pass").read_text()
        key_file(home, run, "trainer").with_suffix(".pass").write_text(stolen)
    if attack.name == BANNED:
        everybody = [path.parent for path in folder.glob("*/runs") if not path.parent.name.startswith(ATTACKER)]
        issuer.ban(everybody, run, [f"{ATTACKER}-{number}" for number in range(10)])
    return {"victim": issuer.admit(victim, run, "trainer", NAMES[0])} if attack.name == ANOTHERS else {}


def in_training(member: LocalPeer) -> bool:
    """Or it has ended."""
    return any(event.phase == "training" for event in member.of(Phase)) or not member.running


def _saved(member: LocalPeer, step: int) -> bool:
    return any(event.epoch >= step for event in member.of(Saved)) or not member.running


def _moved(honest: list[LocalPeer], reached: int, steps: int) -> bool:
    newest = max((event.epoch for member in honest for event in member.of(Step)), default=0)
    return newest > reached or all(_saved(member, steps) for member in honest)


def _facts(honest: list[LocalPeer]) -> Facts | None:
    """What a member could tell a stranger now."""
    steps = [member.of(Step)[-1] for member in honest if member.of(Step)]
    return facts_of(honest, max(steps, key=lambda event: event.epoch)) if steps else None


def outcome(run: RunConfig, size: Size, honest: list[LocalPeer]) -> dict[str, Any]:
    """Loss of the final state, rounds lost, the time of each step."""
    saved = {member.name: load(Path(member.of(Saved)[-1].path)) for member in honest if member.of(Saved)}
    states = [state for state in saved.values() if state.step >= size.steps]
    times: dict[int, float] = {}
    for event in (event for member in honest for event in member.of(Step)):
        times[event.epoch] = min(event.at, times.get(event.epoch, float("inf")))
    gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    lost = [sum(event.outcome in ("failed", "dropped") for event in member.of(Round)) for member in honest]
    return {
        "loss": held_out_loss(run, states[0].parameters) if states else None,
        "finished": len(states),
        "digests_at_the_end": len({state.digest() for state in states}),
        "steps_with_unlike_digests": sum(len(found) > 1 for found in digests_of(honest).values()),
        "rounds_lost": max(lost),
        "seconds_per_step": statistics.median(gaps.values()) if gaps else None,
        "longest_step_s": max(gaps.values(), default=None),
        "longest_step": max(gaps, key=lambda step: gaps[step], default=None),
        "seconds": max(times.values()) - min(times.values()) if times else None,
        **({} if gaps else {"problem": "the honest peers did not make two steps"}),
    }


@torch.no_grad()
def held_out_loss(run: RunConfig, parameters: dict[str, torch.Tensor]) -> float:
    """Of the same examples for every row, which nobody trained on."""
    task = task_of(run)
    model = task.filled_model(parameters, "the last state").eval()
    return float(task.losses(model, task.held_out(HELD_OUT, HELD_OUT)[0])[0])


def first_loss(run: RunConfig) -> float:
    """Of the weights that a run begins with."""
    return held_out_loss(
        run, {name: parameter.detach() for name, parameter in trained(task_of(run).new_model()).items()}
    )


def noticed(honest: list[LocalPeer], bad: list[LocalPeer]) -> dict[str, Any]:
    """How many honest peers named an attacker, and in which words most often."""
    marks = {member.name for member in bad}
    for member in bad:
        marks |= {mark for event in member.of(Listening) for mark in (event.peer_id, f"…{event.peer_id[-6:]}")}
    words: Counter[str] = Counter()
    by = 0
    for member in honest:
        said = {line for event in member.events for line in _lines(event) if any(mark in line for mark in marks)}
        by += bool(said)
        words.update(_without(line, marks) for line in said)
    most = words.most_common(1)
    return {"by": by, "of": len(honest), "words": most[0][0] if most else ""}


def _lines(event: Event) -> Iterator[str]:
    match event:
        case Log(message=message):
            yield message
        case Trouble():
            yield event.words
        case Round():
            yield from (f"{peer}: {why}" for peer, why in event.rejected.items())


def _without(line: str, marks: set[str]) -> str:
    for mark in sorted(marks, key=len, reverse=True):
        line = line.replace(mark, ATTACKER)
    return line[:160]


def tries(bad: list[LocalPeer]) -> dict[str, Any]:
    """Door → tries, refused ones, and the words most often said; {} where the attackers are members."""
    doors: dict[str, list[dict[str, Any]]] = {}
    for member in bad:
        for event in member.of(Log):
            if event.message.startswith("{"):
                tried = json.loads(event.message)
                doors.setdefault(tried["door"], []).append(tried)
    return {
        door: {
            "tries": len(found),
            "refused": sum(tried["refused"] for tried in found),
            "words": Counter(tried["words"] for tried in found).most_common(1)[0][0],
            "got": next((tried["words"] for tried in found if not tried["refused"]), ""),
        }
        for door, found in doors.items()
    }


def intruded(bad: list[LocalPeer], honest: list[LocalPeer]) -> dict[str, Any]:
    """As `tries`, for training peers: what they got to."""
    ids = {event.peer_id for member in bad for event in member.of(Listening)}
    met = any(ids & set(event.members) for member in honest for event in member.of(Round))
    taken = [event for member in bad for event in member.of(Synchronised) if event.source not in ("seed", "backup")]
    words = Counter(event.message for member in bad for event in member.of(Failure))
    told = words.most_common(1)[0][0] if words else ""
    return {
        "round": {"tries": 1, "refused": int(not met), "words": told, "got": "it was in a round" if met else ""},
        "state": {"tries": 1, "refused": int(not taken), "words": told, "got": "it has the state" if taken else ""},
    }


def newcomer(late: list[LocalPeer], honest: list[LocalPeer]) -> dict[str, Any]:
    """Whether who joined in the middle took the honest state over; {} where nobody did."""
    if not late:
        return {}
    true = {(event.epoch, event.digest) for member in honest for event in states_of(member)}
    taken = [event for event in late[0].of(Synchronised) if event.source not in ("", "seed", "backup")]
    return {"taken": len(taken), "false": sum((event.epoch, event.digest) not in true for event in taken)}
