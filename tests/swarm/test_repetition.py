"""A reducer that dies costs its parts again, at their backups, and not the round; nobody steps apart for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from swarm.rounds import CODEC, GROUP, LAYOUT, NAME, PEERS, Member, Outcome, expected, run_round
from swarm.test_allreduce import Client, Dead, DyingTransfer, assert_whole

from tt_cli.run import load_run
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.average_buffer import MISSING
from tt_cli.swarm.allreduce.messages import (
    Accusation,
    Commitment,
    NotProven,
    Precommit,
    RoundRules,
    open_envelope,
    read_votes,
    verify,
)
from tt_cli.swarm.allreduce.result import outcome_of
from tt_cli.swarm.allreduce.votes import group_of, read_status
from tt_cli.swarm.audit.audits import Audits
from tt_cli.swarm.audit.evidence import EvidenceStore
from tt_cli.swarm.audit.sampling import AuditSampler, Place
from tt_cli.swarm.compression.gradient_buffer import NOBODY

RULES = RoundRules(NAME.run, LAYOUT, CODEC, "mean")
DEAD = str(PEERS[2])


class Gone(Member):
    """Takes part until it dies; then nobody hears of it. averages: that it gives to the others before, unsigned."""

    averages = 0
    cut = dict.fromkeys(("rpc_settle", "rpc_fetch_average"), PEERS)

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        given = 0
        async for message in super().rpc_aggregate_part(stream, context):
            if given == self.averages:
                raise ConnectionError("it is dead")
            given, message.peer_id = given + 1, b""
            yield message

    async def take_part(self) -> Outcome | None:
        await self.allreduce.run()
        return None


class DiesSending(Gone):
    """Sends each of the others the first of its parts."""

    allreduce_type = DyingTransfer


class DiesAveraging(Gone):
    """Has sent everything, and gives some averages before it has signed them."""

    averages = 1


def assert_repeated(outcomes: list[Outcome]) -> None:
    assert_whole(outcomes)
    for outcome in outcomes:
        repetition = outcome.commit.repetition
        assert repetition is not None and repetition.allreduce.name.lost == (2,)
        result = outcome_of(outcome.commit, 1.0, {}, frozenset(), {})
        assert result.complete and not result.problem and not result.rejected and DEAD in result.failed
        precommits = outcome.commit.precommits  # are kept beside the average, for who missed the round
        signed = read_votes(Precommit, precommits.values(), NAME.run, NAME.state_key, open_envelope).values()
        assert len({vote.voter for vote in signed if vote.average == outcome.commit._average}) == 3


@pytest.mark.parametrize("kind", [DiesSending, DiesAveraging])
def test_what_a_dead_reducer_left_its_backups_average_of_all_who_are_there(kind: type[Member]) -> None:
    members = [Member(0), Member(1), kind(2), Member(3)]
    outcomes = run_round(*members)
    assert_repeated(outcomes)
    left = [index for index, part in enumerate(LAYOUT.parts((1,) * 4)) if part.reducer == 2]
    backups = {index: outcomes[0].commit.phases[1].allreduce.parts[index].reducer for index in left}
    assert list(backups.values()) == [3, 0], "the next ones in order, each with one part"
    right = expected([member for member in members if member.number != 2])
    for part in (LAYOUT.parts((1,) * 4)[index] for index in left):
        wrong = outcomes[0].average[part.start : part.stop].numpy() - right[part.start : part.stop]
        assert numpy.linalg.norm(wrong) < 0.02 * numpy.linalg.norm(right[part.start : part.stop])


def test_a_member_in_client_mode_repeats_them_with_the_others() -> None:
    members = [Member(0), Member(1), DiesAveraging(2), Client(3)]
    outcomes = run_round(*members)
    assert_repeated(outcomes)


def test_who_never_began_may_be_in_another_group_and_nobody_stands_in_for_it() -> None:
    """A leader that tells each member another group must find no two that step."""
    for outcome in run_round(Member(0), Member(1), Dead(2), Member(3)):
        assert outcome.commit.repetition is None and outcome.commit.dropped


class NoBackup(Member):
    """Dies when it is to stand in for another one."""

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            if self.commit.repetition is not None:
                raise ConnectionError("it is dead")
            yield message

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        if group_of(message) != GROUP:
            raise ConnectionError("it is dead")
        return await super().rpc_settle(message, context)


def test_the_death_of_a_backup_too_costs_the_round() -> None:
    outcomes = run_round(Member(0), Member(1), DiesAveraging(2), NoBackup(3))
    for outcome in outcomes[:2]:
        result = outcome_of(outcome.commit, 1.0, {}, frozenset(), {})
        assert not result.complete and {DEAD, str(PEERS[3])} <= result.failed.keys()


class Returns(Member):
    """Alive, though its averages and its answers reach nobody until the others repeat its parts."""

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for _ in super().rpc_aggregate_part(stream, context):
            raise ConnectionError("cut off")
        return
        yield

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        raise ConnectionError("cut off")

    async def take_part(self) -> Outcome | None:
        await self.allreduce.run()
        others = [other.commit for other in self.everybody.values() if other is not self]
        while any(commit.repetition is None for commit in others):
            await asyncio.sleep(0.01)
        await self.commit.run()
        return Outcome(self.allreduce, self.commit, self.store)


def test_a_reducer_that_seemed_dead_signed_too_and_only_its_backups_average_is_committed() -> None:
    members = [Member(0), Member(1), Returns(2), Member(3)]
    *others, back = sorted(run_round(*members), key=lambda outcome: outcome.allreduce.me == PEERS[2])
    assert_repeated(others)
    assert back.commit.dropped, "nobody votes for what it signed"
    for outcome in others:
        assert outcome.commit.commitments[DEAD] == back.allreduce.commitment, "which they know by now"
        assert not outcome.commit.proofs


class HeldBack(Member):
    """Knows what the dead one signed, and says so when the others have gone on."""

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        status = read_status(message, len(self.allreduce.parts))
        if group_of(message) == GROUP and status.others:
            raise ConnectionError("lost on the way")
        return await super().rpc_settle(message, context)


class DiesAfterOne(Gone):
    """Dies when the first member has its averages and its word."""

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in Member.rpc_aggregate_part(self, stream, context):
            if context.remote_id != PEERS[0]:
                raise ConnectionError("it is dead")
            yield message


def test_who_holds_what_the_dead_one_signed_and_those_who_do_not_know_it_never_step_apart() -> None:
    """The first has voted for it, so it votes for nothing else; the others have not, and are too few without it."""
    outcomes = run_round(HeldBack(0), Member(1), DiesAfterOne(2), Member(3))
    steps = {tuple(outcome.store.hashes) for outcome in outcomes if not outcome.commit.dropped}
    assert len(steps) <= 1
    first = outcomes[0].commit
    dead = [vote for vote, part in zip(first._votes, first.allreduce.parts, strict=True) if part.reducer == 2]
    assert first.repetition is None and MISSING not in dead


def test_once_one_member_has_them_they_come_from_there() -> None:
    outcomes = run_round(Member(0), Member(1), DiesAfterOne(2), Member(3))
    assert_whole(outcomes)
    assert all(outcome.commit.repetition is None and not outcome.commit.dropped for outcome in outcomes)


class LyingBackup(Member):
    """Turns the sign of what it averages in the place of another one."""

    class Lying(AllReduce):
        def _put_own(self, place: int, encoded: bytes) -> None:
            if self.name.lost:
                part = self.parts[self.parts_of(self.me)[place]]
                values, codec = torch.empty(part.elements), self.codec.of(part.large)
                codec.decode_into(encoded, values)
                encoded = codec.encode(values.neg_())
            super()._put_own(place, encoded)

    allreduce_type = Lying


class InRepetition(AuditSampler):
    """Looks at what the last member averaged in the place of another one."""

    def pick(self, allreduce: AllReduce, silent: Collection[PeerID] = ()) -> Place | None:
        return (PEERS[3], 0) if allreduce.name.lost else None


def test_a_backup_that_lies_is_proven_guilty_by_an_audit(tmp_path: Path) -> None:
    outcomes = run_round(Member(0), Member(1), DiesAveraging(2), LyingBackup(3))
    assert_repeated(outcomes)
    there: dict[PeerID, Audits] = {}

    def stub(peer: PeerID) -> Any:
        async def rpc_audit(request: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
            return await there[peer].rpc_audit(request, context)

        context: Any = SimpleNamespace(remote_id=PEERS[0])
        return SimpleNamespace(rpc_audit=rpc_audit)

    for outcome in outcomes:
        there[outcome.allreduce.me] = Audits(
            load_run("emoji"),
            RULES,
            {GROUP: outcome.commit},
            stub,
            lambda peer: True,
            EvidenceStore(tmp_path / str(outcome.allreduce.me)),
            InRepetition(),
        )

    async def audit() -> None:
        mine = there[PEERS[0]]
        mine.begin(outcomes[0].commit)
        await asyncio.gather(*mine._audits)

    asyncio.run(audit())
    assert there[PEERS[0]].proofs.guilty() == {str(PEERS[3])}


def test_a_backup_signs_under_another_name_and_is_audited_by_it() -> None:
    outcomes = run_round(Member(0), Member(1), DiesAveraging(2), Member(3))
    again = outcomes[2].commit.phases[1].allreduce
    assert again.me == PEERS[3] and again.name.group_id == GROUP + bytes([2])
    signed, own = Commitment.read(again.commitment), Commitment.read(outcomes[2].allreduce.commitment)
    assert not signed.contradicts(own) and signed.position == own.position == 3
    parts = tuple(outcome.commit.phases[1].allreduce.show(str(again.me), str(again.me), 0) for outcome in outcomes)
    with pytest.raises(NotProven, match="is right"):
        verify(Accusation(again.commitment, again.inputs, 0, parts), RULES)
    with pytest.raises(NotProven, match="than its sender signed"):
        instead = tuple(outcome.allreduce.show(str(again.me), str(again.me), 0) for outcome in outcomes)
        verify(Accusation(again.commitment, again.inputs, 0, instead), RULES)


@pytest.mark.parametrize("lost", [(0, 1, 2, 3), (9,), ()])
def test_parts_of_nobody_are_in_no_cut(lost: tuple[int, ...]) -> None:
    assert {part.reducer for part in LAYOUT.repeated((1,) * 4, lost)} == {NOBODY}
