"""Bugs that are put in on purpose, to test the simulator: each is a piece of a real module's source that is changed.

A mutant runs in a process of its own, in which the module is compiled from the changed source.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """module: below tt_cli.swarm. old: what stands there once. new: in its place. scenario: where it is looked for."""

    module: str
    old: str
    new: str
    scenario: str = "everything"


MUTANTS = {
    "commit: half is heard": Mutant(
        "allreduce.votes",
        "is_quorum(sum(those[peer] for peer in there & those.keys()), total, lying)",
        "bool(there)",
        "moment",
    ),
    "commit: who dropped counts as heard": Mutant(
        "allreduce.commit", "in self._answered.items() if gone]", "in self._answered.items() if False]", "moment"
    ),
    "commit: parts may be missing": Mutant(
        "allreduce.commit",
        "not self.agreement.reached or not self.holds() or bool(self.store.missing())",
        "False",
        "split",
    ),
    "commit: averages need no signature": Mutant(
        "allreduce.commit", " or lacks or bool(self.unsigned)", " or lacks", "wrong"
    ),
    "commit: two unlike signatures are nothing": Mutant(
        "allreduce.settling", "if mine and signed[one].contradicts(signed[other]):", "if False:", "two-faced"
    ),
    "commit: few senders are enough": Mutant(
        "allreduce.allreduce", "(members >= FEWEST and 2 * used <= members)", "False", "moment"
    ),
    "repetition: what came of it does not matter": Mutant(
        "allreduce.commit",
        "self.dropped = again.dropped = again.dropped or bool(self.unsigned)",
        "self.dropped = again.dropped = False",
        "backup",
    ),
    "shares: each cuts by what it thinks of its own line": Mutant(
        "averager",
        "shares_of([joins[peer].upload for peer in reducers], len(members))",
        "shares_of([joins[peer].upload * (peer != self.peer_id) for peer in reducers], len(members))",
        "calm",
    ),
    "claims: who owes a round counts for nobody": Mutant(
        "records.claim_limits",
        "owing = self._owing if mine is not None and mine.samples_per_second else",
        "owing = self._owing or",
    ),
    "quorum: a plan of the minority": Mutant(
        "allreduce.round_plan", "return self._are_enough(self.members)", "return True", "partition"
    ),
    "quorum: any minority": Mutant(
        "allreduce.votes",
        "return 2 * some > voices + max(liars_among(voices), liars)",
        "return some > 0",
        "partition",
    ),
    "quorum: a group of just over half": Mutant(
        "allreduce.round_plan",
        "return is_quorum(sum(self.voices.get(peer, 1) for peer in self._counting(peers)), self.swarm)",
        "return 2 * sum(self.voices.get(peer, 1) for peer in self._counting(peers)) > self.swarm",
        "leader",
    ),
    "catch-up: votes for an average are nothing": Mutant(
        "collaboration", "if followed := self.take_over.follow(view, plan):", "if followed := False:", "partition"
    ),
    "quorum: only those in the same state count": Mutant(
        "participants.selector",
        "counted, newcomer = self.counted(view, {record.peer_id for record in here}, false)",
        "counted, newcomer = {record.peer_id for record in here} | {self._me}, False",
        "partition",
    ),
    "quorum: whoever has a record counts": Mutant(
        "participants.selector",
        "return others & self._met | {self._me}, False",
        "return others | {self._me}, False",
        "phantoms",
    ),
    "quorum: newcomers take any group": Mutant(
        "allreduce.round_plan",
        "vouched = self.newcomer and with_steps > liars_among(len(group.peer_ids))",
        "vouched = self.newcomer",
        "restart",
    ),
    "lock: what was voted for is forgotten": Mutant(
        "allreduce.votes", "return max(ranked, default=None)", "return None", "moment"
    ),
    "commit: a quorum's votes are enough": Mutant(
        "allreduce.commit", "self.dropped = not self._has_quorum(self.precommits)", "self.dropped = False", "precommit"
    ),
    "lock: whoever leads is believed": Mutant(
        "averager",
        "if mine and not (made and (made.average == mine.average or made.attempt > mine.attempt)):",
        "if False:",
        "precommit",
    ),
    "lock: one vote is enough": Mutant("allreduce.votes", "if heard > liars:", "if True:", "locks"),
    "lock: what nobody can give is kept": Mutant(
        "ballot", "if now >= self._stuck[1] + (group.longest if away else 0.0):", "if False:", "moment"
    ),
    "commit: newcomers vote": Mutant(
        "allreduce.commit", "group.steps, group.trainers, group.swarm)", "(), group.trainers, group.swarm)"
    ),
    "quorum: newcomers count by their records": Mutant(
        "allreduce.round_plan",
        "vouched = self.newcomer and with_steps > liars_among(len(group.peer_ids))",
        "vouched = False",
        "phantoms",
    ),
    "quorum: unseen is gone": Mutant("network.connectivity", "if not unseen:", "if True:", "long"),
    "quorum: records expire at once": Mutant(
        "records.publisher", "ends.get(peer, now) + self._life for peer in here", "now for peer in here", "partition"
    ),
    "records: who was cut off is not sought": Mutant(
        "records.publisher", "[*lost[:MOST_PINGED], *table.initial]", "[]", "apart"
    ),
    "reduce: each sender weighs the same": Mutant(
        "allreduce.reducer", "self.weights[sender] = weight\n", "self.weights[sender] = 8.0\n", "calm"
    ),
    "reduce: the average is made for each anew": Mutant(
        "allreduce.allreduce",
        "return self.store.codec.message(self.store.get(index), ",
        "return self.store.codec.message(self.encoded(index) if position else self.store.get(index), ",
        "calm",
    ),
    "catch-up: nobody is ever behind": Mutant(
        "records.consensus", "return self.epoch > epoch and bool(self.donors())", "return False", "hang"
    ),
    "quorum: peers vote, not users": Mutant(
        "records.consensus", "Fraction(1, peers[user]) if user and peers[user] > 1 else 1", "1", "lying user"
    ),
    "audit: its own mistakes are proofs": Mutant(
        "allreduce.messages",
        "if part_hash(right.encoded) == commitment.outputs[accusation.index]:",
        "if False:",
        "calm",
    ),
    "audit: the guilty are whoever spoke": Mutant(
        "audit.audits",
        "finding.guilty = verify(accusation, self.rules)",
        "finding.guilty = Commitment.read(accusation.commitment, self.rules.opened).reducer",
        "calm",
    ),
    "commit: who is gone is not counted": Mutant(
        "allreduce.commit",
        "return are_enough(peers, self._electorates)",
        "return are_enough(peers, electorates_of(dict.fromkeys(self._votes_heard(), 1)))",
        "moment",
    ),
    "quorum: a peer that lost all goes on alone": Mutant(
        "network.connectivity", "if not found.answered and self._initial:", "if False:", "long"
    ),
    "catch-up: chunks are taken as they come": Mutant(
        "state.client", "if not await asyncio.to_thread(target.tree.holds, index, data):", "if False:", "donor"
    ),
    "catch-up: a state that nobody is given is a goal for ever": Mutant(
        "catch_up",
        "if attempts >= ATTEMPTS and now >= since + VAIN_ROUNDS * self._run.swarm.averaging_timeout:",
        "if False:",
        "lying keeper",
    ),
    "DHT: one initial peer keeps newcomers out": Mutant(
        "records.dht_protocol",
        "UNFIT.get().append(str(error))",
        "raise RuntimeError(str(error)) from None",
        "lying keeper",
    ),
    "records: who seems behind is gone": Mutant("records.publisher", " | self._late(view)", "", "lying keeper"),
    "selection: who spoiled a round stays out": Mutant(
        "participants.selector", "if SPOILED in result.problem or TOO_FEW in result.problem:", "if False:", "partition"
    ),
    "orders: one who votes alone undoes them": Mutant("records.publisher", "self._absent())", "())", "orders"),
    "orders: none is heard while one catches up": Mutant(
        "collaboration", "self._behind(view) and self.orders.due is None and", "self._behind(view) and", "orders"
    ),
    "orders: who missed one is followed": Mutant(
        "records.publisher", "known[1] > now and known[0].era == era}", "known[1] > now}", "orders"
    ),
    "memory: rounds are kept": Mutant("rounds", "for old in list(self)[:-KEPT_GROUPS]:", "for old in ():", "calm"),
    "memory: averages are kept": Mutant(
        "allreduce.average_buffer", "for old in list(self._kept)[:-KEPT_AVERAGES]:", "for old in ():", "hang"
    ),
}


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Compiles one module from a changed source."""

    def __init__(self, module: str, source: str):
        name = f"tt_cli.swarm.{module}"
        super().__init__(name, str(ROOT / f"{name.replace('.', '/')}.py"))
        self._source = source

    def find_spec(self, fullname: str, *_: Any) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


def changed(name: str) -> str:
    """The source of the mutant's module with the bug in it. Raises ValueError where the code is another one now."""
    mutant = MUTANTS[name]
    source = (ROOT / f"tt_cli/swarm/{mutant.module.replace('.', '/')}.py").read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.module} has not once {mutant.old!r}")
    return source.replace(mutant.old, mutant.new)


def apply(name: str) -> None:
    """Have the mutant's module compiled from its changed source from now on. Before it is imported."""
    finder = _Changed(MUTANTS[name].module, changed(name))
    if finder.name in sys.modules:
        raise RuntimeError("too late: it is imported")
    sys.meta_path.insert(0, finder)


def caught(name: str, most: int) -> str:
    """The words of the first violation within `most` schedules; "" without one."""
    code = f"from simulation.mutants import search; search({name!r}, {most})"
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def search(name: str, most: int) -> None:
    """Print the first violation that the mutant leads to."""
    apply(name)
    from simulation.schedule import Schedule, run

    for seed in range(most):
        result = run(Schedule.drawn(seed, MUTANTS[name].scenario))
        if result.violation:
            return print(f"{result.schedule.scenario} {seed}: {result.violation}"[:150])
