"""Whole rounds between members in one process: equal bytes for all, whatever one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from simulation.virtual import in_virtual_time
from swarm.rounds import CODEC, GROUP, LAYOUT, NAME, PEERS, SIGNERS, WEIGHTS, Member, Outcome, expected, run_round

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import ANSWERING, AllReduce
from tt_cli.swarm.allreduce.average_buffer import part_hash
from tt_cli.swarm.allreduce.messages import Accusation, Commitment, Opening, Precommit, RoundRules, verify
from tt_cli.swarm.allreduce.reducer import Reducer
from tt_cli.swarm.allreduce.result import outcome_of
from tt_cli.swarm.allreduce.settling import PATIENCE
from tt_cli.swarm.allreduce.votes import read_status
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer

RULES = RoundRules(NAME.run, LAYOUT, CODEC, "mean")


class Client(Member):
    """Accepts no connections."""

    client = True


def error(outcome: Outcome, members: list[Member]) -> float:
    right = expected(members)
    return float(numpy.linalg.norm(outcome.average.numpy() - right) / numpy.linalg.norm(right))


def assert_whole(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.store.missing()
        assert not outcome.agreement.lost and not outcome.agreement.disputed
        assert outcome.store.hashes == outcomes[0].store.hashes
        assert torch.equal(outcome.average, outcomes[0].average)


@pytest.mark.parametrize("kinds", [[Member] * 2, [Member] * 4, [Member, Client], [Member, Member, Client, Client]])
def test_all_members_hold_the_same_bytes_and_they_are_the_average(kinds: list[type[Member]]) -> None:
    members = [kind(number) for number, kind in enumerate(kinds)]
    outcomes = run_round(*members)
    assert len(outcomes) == len(members)
    assert_whole(outcomes)
    for outcome in outcomes:
        assert not outcome.allreduce.failed and not outcome.allreduce.rejected and not outcome.agreement.differing
        assert outcome.commit.repaired == 0
        assert error(outcome, members) < 0.02
    encoded = outcomes[0].store.buffer.nbytes
    sent, received = (sum(int(each.allreduce.traffic[side]) for each in outcomes) for side in (0, 1))
    reducers = len(outcomes[0].allreduce.reducers)
    senders = len(members)
    assert sent == received == 2 * encoded * (senders - reducers + (reducers - 1))


@pytest.mark.parametrize("shares", [(2, 1, 1), (1, 0, 3), (0, 0, 1)])
def test_reducers_have_their_shares_and_the_average_is_the_same(shares: tuple[int, ...]) -> None:
    members = [Member(number) for number in range(3)]
    for member in members:
        member.shares = shares
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert error(outcomes[0], members) < 0.02
    encoded = GradientBuffer(LAYOUT, CODEC).nbytes
    for outcome, share in zip(outcomes, shares, strict=True):
        sent = int(outcome.allreduce.traffic[0]) / encoded
        assert sent == pytest.approx(1 + share / sum(shares), abs=0.02), "its gradient, and its averages for all"


def test_who_reduces_nothing_costs_nothing_when_it_dies() -> None:
    members = [Member(0), Member(1), Dead(2)]
    for member in members:
        member.shares = (1, 1, 0)
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert outcomes[0].allreduce.gone() == {str(PEERS[2])}
    assert error(outcomes[0], members[:2]) < 0.02


class Idle(Member):
    """Has no samples."""

    weight = 0.0


def test_who_has_no_samples_sends_none_and_reduces_as_the_others() -> None:
    members = [Member(0), Member(1), Idle(2), Member(3)]
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert error(outcomes[0], [member for member in members if member.number != 2]) < 0.02
    assert [outcome.allreduce.used for outcome in outcomes] == [4] * 4
    assert all(not outcome.allreduce.reducer.failed and not outcome.commit.dropped for outcome in outcomes)
    encoded, sent = GradientBuffer(LAYOUT, CODEC).nbytes, [int(outcome.allreduce.traffic[0]) for outcome in outcomes]
    assert sent[2] == pytest.approx(0.75 * encoded, rel=0.02) and sent[0] == pytest.approx(1.5 * encoded, rel=0.02)


@pytest.mark.parametrize("members", [[Idle(0), Idle(1)], [Idle(0), Idle(1), Idle(2)]])
def test_nobody_steps_where_nobody_has_samples(members: list[Member]) -> None:
    """With zeros as the average moments would move the parameters all the same."""
    for outcome in run_round(*members):
        assert outcome.commit.dropped and not outcome.commit.precommitted
        result = outcome_of(outcome.commit, 1.0, {}, frozenset(), {})
        assert result.problem == f"this peer received what 0 of {len(members)} members sent" and not result.rejected


class SendsWithoutWeight(Member):
    """Signs that it has no samples, and sends parts."""

    class Sending(AllReduce):
        async def _outgoing(self, indexes: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
            self.weight = 1.0
            async for message in super()._outgoing(indexes):
                message.weight = 0.0
                yield message

    weight, allreduce_type = 0.0, Sending


class SendsNothing(Member):
    """Signs for samples and for no parts."""

    class Signing(AllReduce):
        async def _opening(self, reducer: PeerID) -> Opening:
            return replace(await super()._opening(reducer), hashes=())

    allreduce_type = Signing


@pytest.mark.parametrize("kind", [SendsWithoutWeight, SendsNothing])
def test_samples_and_parts_come_together_or_not_at_all(kind: type[Member]) -> None:
    members = [Member(0), Member(1), kind(2)]
    for member in members:
        member.shares = (1, 1, 0)
    outcomes = run_round(*members)
    assert_whole(outcomes[:2])
    assert error(outcomes[0], members[:2]) < 0.02
    assert outcomes[0].allreduce.rejected.keys() == {str(PEERS[2])}


def test_the_same_contributions_give_the_same_bytes_in_any_order_of_arrival() -> None:
    class Late(Member):
        async def take_part(self) -> Outcome | None:
            await asyncio.sleep(0.1)  # what comes later must not be added later
            return await super().take_part()

    orders = [[Member, Member, Member], [Late, Member, Member], [Member, Member, Late]]
    rounds = [run_round(*(kind(number) for number, kind in enumerate(kinds))) for kinds in orders]
    assert rounds[0][0].store.hashes == rounds[1][0].store.hashes == rounds[2][0].store.hashes


class DyingTransfer(AllReduce):
    """Its connections to the others break after their first part."""

    async def _outgoing(self, indexes: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._outgoing(indexes):
            yield message
            return


class DyingSender(Member):
    """It is never heard of again after its first parts."""

    allreduce_type = DyingTransfer


def test_a_sender_that_stops_is_left_out_of_the_rest_and_still_gets_the_average() -> None:
    members = [Member(0), Member(1), DyingSender(2)]
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert all("stopped sending" in reason for reason in outcomes[0].allreduce.reducer.failed.values())


class Dead(Member):
    """In the group, but not there any more."""

    cut = dict.fromkeys(("rpc_aggregate_part", "rpc_settle"), PEERS)

    async def take_part(self) -> Outcome | None:
        return None


def test_without_one_reducer_nobody_has_the_average() -> None:
    outcomes = run_round(Member(0), Member(1), Dead(2))
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.agreement.lost == outcome.store.missing() != []
        assert outcome.allreduce.failed.keys() == {str(PEERS[2])}
        assert outcome.allreduce.gone() == {str(PEERS[2])}


def test_without_one_client_the_others_have_the_average() -> None:
    class DeadClient(Dead):
        client = True

    members = [Member(0), Member(1), DeadClient(2)]
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert error(outcomes[0], members[:2]) < 0.02


def test_a_reducer_whose_stream_opens_late_has_no_more_time_for_its_averages() -> None:
    """Both together would be longer than the round, of which nobody would have a word then."""

    class Caller(Member):
        def stub(self, peer: PeerID) -> Any:
            async def rpc_aggregate_part(stream: Any) -> Any:
                await asyncio.sleep(2 * self.patience - 0.1)
                return nothing()

            async def nothing() -> AsyncIterator[averaging_pb2.AveragingData]:
                await asyncio.Event().wait()
                yield averaging_pb2.AveragingData()

            return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)

    async def transfer() -> float:
        caller, loop = Caller(0), asyncio.get_running_loop()
        caller.everybody, caller.patience, caller.longest = {PEERS[0]: caller, PEERS[1]: Member(1)}, 10.0, 20.0
        caller.prepare()
        began = loop.time()
        await caller.allreduce.run()
        assert caller.allreduce.failed.keys() == {str(PEERS[1])}
        return loop.time() - began

    assert in_virtual_time(transfer()) <= ANSWERING * 20.0


class FallsSilent(Member):
    """Reduces for one member only; the others' connections break after the first part."""

    favourite = PEERS[0]

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        answers = 0
        async for message in super().rpc_aggregate_part(stream, context):
            yield message
            answers += 1
            if context.remote_id != self.favourite and answers == 1:
                raise ConnectionError("cut off")


def test_what_a_reducer_did_not_send_comes_from_a_member_that_has_it() -> None:
    members = [Member(0), Member(1), FallsSilent(2), Member(3)]
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert error(outcomes[0], members) < 0.6  # the cut members' last parts did not reach the reducer
    assert [outcome.commit.repaired > 0 for outcome in outcomes] == [False, True, False, True]


class DiesAfterSendingToOne(FallsSilent):
    """As above, and then it is gone for good: it says nothing more, and nobody can ask it."""

    cut = dict.fromkeys(("rpc_settle", "rpc_fetch_average"), PEERS)

    async def take_part(self) -> Outcome | None:
        await self.allreduce.run()
        return None


def test_one_that_has_a_part_and_does_not_give_it_leaves_time_to_ask_the_next() -> None:
    """As long as settling waits for an answer it did not: three times as long as for a part, which was the rest."""

    class FallsSilentForOne(Member):
        async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
            async for message in super().rpc_aggregate_part(stream, context):
                if message.peer_id and context.remote_id == PEERS[3]:
                    raise ConnectionError("cut off")
                yield message

    class Mute(Member):
        async def rpc_fetch_average(self, message: runtime_pb2.ExpertInfo) -> AsyncIterator[runtime_pb2.ExpertInfo]:
            await asyncio.Event().wait()
            yield message

    class Lacking(Member):
        def prepare(self) -> None:
            super().prepare()
            self.commit._ends = asyncio.get_running_loop().time() + (PATIENCE - 0.1) * self.patience

        def stub(self, peer: PeerID) -> Any:
            stub = super().stub(peer)
            ask = stub.rpc_fetch_average

            async def rpc_fetch_average(message: runtime_pb2.ExpertInfo) -> Any:
                await asyncio.sleep(0.1)
                return await ask(message)

            stub.rpc_fetch_average = rpc_fetch_average
            return stub

    outcomes = run_round(Mute(0), Member(1), FallsSilentForOne(2), Lacking(3))
    assert outcomes[3].commit.repaired and not outcomes[3].commit.dropped


def test_a_reducer_that_dies_after_one_member_has_all_costs_no_round() -> None:
    outcomes = run_round(Member(0), Member(1), DiesAfterSendingToOne(2), Member(3))
    assert len(outcomes) == 3
    assert_whole(outcomes)
    assert not any(outcome.commit.dropped for outcome in outcomes)


class OutOfTime(Member):
    """Has none left to repeat anything."""

    def prepare(self) -> None:
        super().prepare()
        self.commit._ends = loop_time()


def test_averages_that_nobody_heard_their_reducer_sign_are_made_again() -> None:
    class SignsNothing(DiesAfterSendingToOne):
        async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
            async for message in super().rpc_aggregate_part(stream, context):
                message.peer_id = b""
                yield message

    outcomes = run_round(Member(0), Member(1), SignsNothing(2), Member(3))
    assert_whole(outcomes)
    for outcome in outcomes:
        assert outcome.commit.repetition is not None and not outcome.commit.dropped

    for outcome in run_round(OutOfTime(0), OutOfTime(1), SignsNothing(2), OutOfTime(3)):
        result = outcome_of(outcome.commit, 1.0, {}, frozenset(), {})
        assert not result.complete and result.problem == f"{PEERS[2]}: nobody heard what it signed"
        assert str(PEERS[2]) in result.failed and not result.rejected


class TwoFaced(Member):
    """Sends one member another average than the rest."""

    deceived = (PEERS[0],)

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            if context.remote_id in self.deceived:
                changed = bytearray(message.tensor_part.buffer)
                changed[-1] ^= 1
                lie = averaging_pb2.AveragingData.FromString(message.SerializeToString())
                lie.tensor_part.buffer = bytes(changed)
                yield lie
            else:
                yield message


def test_the_majority_decides_where_a_reducer_says_unlike_things() -> None:
    members = [Member(0), Member(1), TwoFaced(2)]
    outcomes = run_round(*members)
    assert_whole(outcomes)
    assert [outcome.commit.repaired > 0 for outcome in outcomes] == [True, False, False]
    assert all(outcome.agreement.differing for outcome in outcomes)
    assert error(outcomes[0], members) < 0.02


def test_who_cannot_fetch_the_majoritys_bytes_does_not_keep_its_own() -> None:
    class Mute(Member):
        cut = {"rpc_fetch_average": PEERS}

    class MuteTwoFaced(Mute, TwoFaced):
        pass

    deceived, *others = run_round(Member(0), Mute(1), MuteTwoFaced(2))
    assert deceived.store.missing() == sorted(deceived.agreement.wanted) != []
    assert_whole(others)


class SignsBoth(TwoFaced):
    """Signs for each what it sends to it."""

    deceived = (PEERS[0], PEERS[1])

    def prepare(self) -> None:
        super().prepare()
        self.signed: dict[PeerID, bytes] = {}

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        sent = []
        async for message in super().rpc_aggregate_part(stream, context):
            sent.append(part_hash(message.tensor_part.buffer))
            if self.allreduce.commitment and len(sent) == len(self.allreduce.parts_of(self.peer)):
                signed = replace(Commitment.read(self.allreduce.commitment), outputs=tuple(sent))
                message.peer_id = self.signed[context.remote_id] = signed.sign(SIGNERS[self.number])
            yield message


def test_who_signs_unlike_averages_is_proven_guilty_by_both_and_nobody_steps() -> None:
    members = [Member(0), Member(1), SignsBoth(2), Member(3)]
    liar = str(PEERS[2])
    for outcome in run_round(*members):
        result = outcome_of(outcome.commit, 1.0, {}, frozenset(), {})
        assert outcome.commit.dropped and not result.complete
        if outcome.allreduce.me != PEERS[2]:
            assert (
                result.rejected == {liar: "signed unlike averages"}
                and result.problem == f"{liar}: signed unlike averages"
            )
            assert verify(Accusation.read(outcome.commit.proofs[liar]), RULES) == liar


class Duplicitous(SignsBoth):
    """Says to the first member, whatever it asks, that all is as that one has it; the others have another average."""

    deceived = (PEERS[0],)

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        answer = await super().rpc_settle(message, context)
        if context.remote_id not in self.deceived:
            return answer
        asked, mine = (read_status(word, len(self.allreduce.parts)) for word in (message, answer))
        self.hashes = asked.hashes
        vote = self.allreduce.group.vote(self.peer, self.hashes).sign(self.allreduce.signer)
        return replace(mine, hashes=self.hashes, vote=vote, commitment=self.signed[context.remote_id]).pack(GROUP)

    async def rpc_precommit(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        answer = await super().rpc_precommit(message, context)
        if context.remote_id not in self.deceived:
            return answer
        signed = self.allreduce.group.vote(self.peer, self.hashes, Precommit).sign(self.allreduce.signer)
        return wire.PRECOMMITTED.message((GROUP, (signed,)))


def test_one_that_alone_accepts_connections_makes_no_two_step_otherwise() -> None:
    members = [Member(0), Duplicitous(1), Member(2), Member(3)]
    for honest in (members[0], *members[2:]):
        honest.client = True
    deceived, _, *others = run_round(*members)
    assert deceived.store.hashes != others[0].store.hashes and len(deceived.commit.statuses) == 1
    assert deceived.commit.dropped and not any(outcome.commit.dropped for outcome in others)
    for outcome in others:
        assert len(outcome.commit.precommits) == 3, "it hears one of them alone"


def test_one_with_other_averages_that_does_not_say_who_signed_them_holds_nobody_up() -> None:
    class Secretive(Member):
        """Answers what it is asked once by each, and not what others signed for it."""

        async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
            if read_status(message, len(self.allreduce.parts)).others:
                raise ConnectionError("no more")
            return await super().rpc_settle(message, context)

    secretive, *others, _ = run_round(Secretive(0), Member(1), Member(3), TwoFaced(2))
    steps = {tuple(outcome.store.hashes) for outcome in (secretive, *others) if not outcome.commit.dropped}
    assert len(steps) <= 1 and not others[0].commit.dropped, "a quorum votes for what the others hold"


def test_two_members_that_disagree_drop_the_round() -> None:
    outcomes = run_round(Member(0), TwoFaced(2))
    for outcome in outcomes:
        assert outcome.agreement.disputed and not outcome.agreement.lost
        assert {outcome.allreduce.parts[index].reducer for index in outcome.agreement.disputed} == {1}


@pytest.mark.parametrize("estranged", [False, True])
def test_an_average_of_half_of_the_gradients_is_dropped_by_all_and_by_who_made_it(estranged: bool) -> None:
    """It hears of one other member's gradient alone. estranged: it and the first lose every word to each other."""
    members = [Member(number) for number in range(4)]
    first, _, half_heard, fourth = members
    half_heard.cut = {"rpc_aggregate_part": set(PEERS) - {fourth.peer}}
    if estranged:
        first.cut = {"rpc_settle": {half_heard.peer}}
        half_heard.cut["rpc_settle"] = {first.peer}
    outcomes = run_round(*members)
    assert (str(PEERS[2]) in outcomes[0].commit.statuses) is not estranged
    for number in (0, 1, 3):
        commit = outcomes[number].commit
        assert commit.dropped and commit.unsigned == {str(PEERS[2]): "used what 2 of 4 members sent"}, number
    made = outcomes[2]
    assert made.commit.dropped
    result = outcome_of(made.commit, 1.0, {}, frozenset(), {})
    assert not result.complete and result.problem == "this peer received what 2 of 4 members sent"


class Late(Member):
    """Its averages get lost, and it is still busy when the others have given up."""

    given_up: asyncio.Event

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for _ in super().rpc_aggregate_part(stream, context):
            pass
        return
        yield

    async def take_part(self) -> Outcome | None:
        await self.allreduce.run()
        assert not self.store.missing(), "it has the whole average"
        await self.given_up.wait()
        await self.commit.run()
        return Outcome(self.allreduce, self.commit, self.store)


class GivesUp(OutOfTime):
    async def take_part(self) -> Outcome | None:
        outcome = await super().take_part()
        assert self.commit.dropped
        if all(each.commit.dropped for each in self.everybody.values() if isinstance(each, GivesUp)):
            (late,) = [each for each in self.everybody.values() if isinstance(each, Late)]
            late.given_up.set()
        return outcome


def test_who_comes_late_does_not_commit_what_the_others_have_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "given_up", asyncio.Event(), raising=False)
    members = [GivesUp(0), GivesUp(1), Late(2), GivesUp(3)]
    for member in members:
        member.patience = 0.5
    outcomes = run_round(*members)
    assert len(outcomes) == 4
    for number in (0, 1, 3):
        assert outcomes[number].agreement.lost
    late = outcomes[2]
    assert late.agreement.unheard == "heard from 0 of 3 others" and late.commit.dropped


class Deaf(Member):
    """The first calls that compare what arrived get lost."""

    lost = 2

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        if self.lost:
            self.lost -= 1
            raise ConnectionError("lost on the way")
        return await super().rpc_settle(message, context)


def test_lost_messages_are_repeated() -> None:
    outcomes = run_round(Member(0), Deaf(1), Member(2))
    assert_whole(outcomes)
    assert all(len(outcome.commit.statuses) == 2 for outcome in outcomes)


class Huge(Member):
    """Finite numbers that no gradient has."""

    class Big(AllReduce):
        def encoded(self, index: int) -> bytes:
            part = self.parts[index]
            values = torch.full((part.elements,), 1e30 if part.large else 6e4)
            return self.codec.of(part.large).encode(values)

    allreduce_type = Big


def test_numbers_beyond_all_gradients_are_left_out() -> None:
    outcomes = run_round(Member(0), Member(1), Huge(2))
    assert_whole(outcomes)
    assert any("beyond" in reason for outcome in outcomes for reason in outcome.allreduce.reducer.rejected.values())
    large = outcomes[0].average[: LAYOUT.boundary]
    assert float(large.abs().max()) < 10


class Forger(Member):
    """Reduces honestly but answers with parts that are too long."""

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            forged = averaging_pb2.AveragingData(code=message.code, tensor_part=message.tensor_part)
            forged.tensor_part.buffer += b"\x00"
            yield forged


def test_a_reducer_that_answers_nonsense_is_told_and_its_parts_come_from_itself_as_they_should_be() -> None:
    outcomes = run_round(Member(0), Member(1), Forger(2))
    for outcome in outcomes[:2]:
        assert outcome.allreduce.rejected.keys() == {str(PEERS[2])}
    assert_whole(outcomes)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 100.5, 0.5, 5e-324])
def test_a_weight_that_nobody_may_claim_is_refused(weight: float) -> None:
    class Boaster(Member):
        def prepare(self) -> None:
            super().prepare()
            self.allreduce.weight = weight

    members = [Member(0), Member(1), Boaster(2)]
    outcomes = run_round(*members)
    for outcome in outcomes[:2]:
        assert "weight" in outcome.allreduce.rejected[str(PEERS[2])]


def reducer(senders: int = 2) -> tuple[Reducer, list[str]]:
    names = [f"p{number}" for number in range(senders)]
    parts = LAYOUT.parts((1,))
    return Reducer(
        CODEC, parts, GradientBuffer(LAYOUT, CODEC), 1.0, "p0", dict.fromkeys(names, 100.0), lambda *_: None
    ), names


def ones(elements: int, large: bool) -> runtime_pb2.Tensor:
    return CODEC.message(CODEC.of(large).encode(torch.ones(elements)), elements, large)


def test_a_weight_that_changes_between_parts_is_refused() -> None:
    async def send() -> None:
        made, names = reducer()
        first, second = made.parts[0], made.parts[1]
        await made.take(names[1], ones(first.elements, first.large), 3.0)
        await made.take(names[1], ones(second.elements, second.large), 4.0)

    with pytest.raises(ValueError, match="changes between parts"):
        asyncio.run(send())


def test_more_parts_than_there_are_and_parts_of_another_size_are_refused() -> None:
    async def send(extra: bool) -> None:
        made, names = reducer()
        for part in made.parts:
            await made.take(names[1], ones(part.elements + (not extra), part.large), 3.0)
        await made.take(names[1], ones(256, True), 3.0)

    with pytest.raises(ValueError, match="more parts"):
        asyncio.run(send(extra=True))
    with pytest.raises(ValueError, match="shape"):
        asyncio.run(send(extra=False))


def test_who_is_out_is_not_blamed_for_the_parts_that_it_still_sends() -> None:
    """They were on their way when it was given up."""
    made, names = reducer()

    async def send() -> None:
        await made.fail(names[1], "did not answer")
        for part in made.parts:
            await made.take(names[1], ones(part.elements, part.large), 3.0)

    asyncio.run(send())
    assert made.failed == {names[1]: "did not answer"} and made.rejected == {}


def test_nobody_outside_the_group_sends_and_nobody_twice() -> None:
    member = Member(0)
    other = Member(1)
    member.everybody = other.everybody = {member.peer: member, other.peer: other}

    async def call(peer: PeerID) -> int:
        member.prepare()

        async def nothing() -> AsyncIterator[averaging_pb2.AveragingData]:
            return
            yield

        context: Any = type("Context", (), {"remote_id": peer})
        async for message in member.allreduce.rpc_aggregate_part(nothing(), context):
            return int(message.code)
        return 0

    assert asyncio.run(call(PEERS[3])) == averaging_pb2.PROTOCOL_VIOLATION
    assert asyncio.run(call(PEERS[0])) == averaging_pb2.PROTOCOL_VIOLATION
    assert WEIGHTS[0] == member.allreduce.weight


class Boaster(Member):
    """Says that it computed more than anybody could."""

    def prepare(self) -> None:
        super().prepare()
        self.commit._said = {"samples": 10**12, "loss": 3e12}


def test_what_a_member_says_of_its_work_counts_as_far_as_it_may_weigh() -> None:
    """Else the others' samples would be a share of nothing, and the slow among them left out for it."""
    for outcome in run_round(Member(0), Boaster(1), Member(2)):
        result = outcome_of(outcome.commit, 1.0, {}, frozenset(), {})
        assert result.members[str(PEERS[1])] == {"samples": 100, "loss": 300.0}
        assert result.samples_and_loss()[0] == 10 + 100 + 70
