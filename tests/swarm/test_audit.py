"""A wrong average is proven by what members signed, and nobody is by anything else."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.rounds import (
    CODEC,
    GROUP,
    LAYOUT,
    NAME,
    PEERS,
    SHAPES,
    SIGNERS,
    WEIGHTS,
    DecodedCopies,
    Member,
    Outcome,
    flattened,
    run_round,
)

from tt_cli.run import load_run
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.commit import unsigned_by
from tt_cli.swarm.allreduce.messages import (
    GROUP_BYTES,
    Accusation,
    Commitment,
    Inputs,
    NotProven,
    Opening,
    Precommit,
    RoundName,
    RoundRules,
    SignedVote,
    Signer,
    verify,
)
from tt_cli.swarm.audit import audits as audits_module
from tt_cli.swarm.audit import evidence
from tt_cli.swarm.audit.audits import APART, MOST_AUDITS, Audits, Finding
from tt_cli.swarm.audit.evidence import Court, EvidenceStore
from tt_cli.swarm.audit.sampling import AuditSampler, Place
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import Partition

RULES = RoundRules(NAME.run, LAYOUT, CODEC, "centered_clip")
SPARSE = codec_of(load_run("emoji").replaced({"optimizer": {"name": "local", "sparse": 64}}))
SPARSE_LAYOUT = Partition(SHAPES, 4096, SPARSE.block)


class Clipping(Member):
    """In a round with CenteredClip."""

    def __init__(self, number: int):
        super().__init__(number)
        self.aggregation = "centered_clip"


class Liar(Clipping):
    """Reduces to the negative of the average."""

    def prepare(self) -> None:
        super().prepare()
        self.reduce_to(torch.neg)


@cache
def honest_round() -> list[Outcome]:
    return run_round(*(Clipping(number) for number in range(4)))


@cache
def lying_round() -> list[Outcome]:
    return run_round(Clipping(0), Clipping(1), Liar(2), Clipping(3))


class Sparse(Clipping):
    """In a round of local steps that send the largest elements alone."""

    codec, layout = SPARSE, SPARSE_LAYOUT


class SparseLiar(Sparse, Liar):
    """Reduces to the negative of the average."""


def commitments(outcome: Outcome) -> dict[str, bytes]:
    return outcome.commit.commitments


def audits_of(
    outcomes: list[Outcome],
    silent: Collection[PeerID],
    rounds: Any,
    rules: RoundRules = RULES,
    patience: float = 20.0,
    **more: Any,
) -> Audits:
    """The first member's, in a round in which the silent ones answer nothing."""
    transfers = {outcome.allreduce.me: outcome.allreduce for outcome in outcomes}
    for transfer in transfers.values():
        transfer._shown.clear()

    class Stub:
        def __init__(self, peer: PeerID):
            self.peer = peer

        async def rpc_audit(self, request: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
            if self.peer in silent:
                raise ConnectionError("nobody there")
            group_id, asked, part = wire.AUDIT_REQUEST.read(request)
            assert group_id == GROUP
            return runtime_pb2.ExpertInfo(serialized_info=transfers[self.peer].show(str(PEERS[0]), asked, part))

    run = load_run("emoji").replaced({"swarm.next_chunk_timeout": patience})
    return Audits(run, rules, rounds, Stub, lambda peer: True, **more)


def audited(
    outcomes: list[Outcome], reducer: int, index: int, silent: tuple[int, ...] = (), rules: RoundRules = RULES
) -> Finding:
    """The first member looks at one part."""
    audits = audits_of(outcomes, [PEERS[number] for number in silent], {}, rules)
    return asyncio.run(audits.audit(outcomes[0].allreduce, (PEERS[reducer], index), commitments(outcomes[0])))


def test_each_auditor_asks_those_after_itself_first() -> None:
    outcomes, asked = honest_round(), list[PeerID]()
    audits = audits_of(outcomes, [], {})
    stub_of = audits._stub_of

    def noted(peer: PeerID) -> Any:
        asked.append(peer)
        return stub_of(peer)

    audits._stub_of = noted
    auditor = max(outcomes, key=lambda outcome: str(outcome.allreduce.me))  # the last, so it begins with the first
    me, members = auditor.allreduce.me, auditor.allreduce.members
    reducer, _, third = [peer for peer in members if peer != me]
    middle = next(outcome for outcome in outcomes if outcome.allreduce.me == third)
    for transfer, place in ((auditor.allreduce, (reducer, 0)), (middle.allreduce, (reducer, 0))):
        asked.clear()
        assert not asyncio.run(audits.audit(transfer, place, commitments(auditor))).doubts
        others = [peer for peer in members if peer not in (transfer.me, reducer)]
        after = sorted(others, key=lambda peer: str(peer) <= str(transfer.me))
        assert asked == [reducer, *[reducer] * (transfer.me != reducer), *after], "who reduced it shows its part first"
    assert after != others, "not from the first on"


def test_an_audit_of_many_asks_some_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would take longer than a step, and no audit would come to its end."""
    monkeypatch.setattr(audits_module, "SHOWING", 3)
    outcomes, asked = lying_round(), list[PeerID]()
    audits, place, two = audits_of(outcomes, [], {}), (PEERS[2], 0), asyncio.Barrier(2)
    stub_of = audits._stub_of

    class Stub:
        def __init__(self, peer: PeerID):
            self.peer, self.rest = peer, stub_of(peer)

        async def rpc_audit(self, request: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
            asked.append(self.peer)
            if len(asked) in (2, 3):  # the first parts, after the inputs
                await two.wait()
            return await self.rest.rpc_audit(request, timeout)

    audits._stub_of = Stub
    finding = asyncio.run(audits.audit(outcomes[0].allreduce, place, commitments(outcomes[0])))
    assert finding.guilty == str(PEERS[2]) and len(asked) == 4


def test_an_audit_ends_when_another_round_begins() -> None:
    """What was sent is overwritten then, and the round needs the lines."""
    outcomes = lying_round()
    rounds: dict[bytes, Any] = {GROUP: None}
    audits, asked = audits_of(outcomes, [], rounds), list[PeerID]()
    stub_of = audits._stub_of

    def noted(peer: PeerID) -> Any:
        asked.append(peer)
        if len(asked) == 2:  # the reducer for its inputs, then a sender
            rounds[b"the next"] = None
        return stub_of(peer)

    audits._stub_of = noted
    rest = (PEERS[2], 0), commitments(outcomes[0]), audits._overtaken()
    finding = asyncio.run(audits.audit(outcomes[0].allreduce, *rest))
    assert len(asked) == 2 and not finding.proven and not finding.doubts


def test_an_honest_round_stands_every_audit() -> None:
    outcomes = honest_round()
    assert not outcomes[0].agreement.differing
    for reducer in (1, 2, 3):
        for index in range(len(outcomes[0].allreduce.parts_of(PEERS[reducer]))):
            assert audited(outcomes, reducer, index) == Finding()
    assert unsigned_by(outcomes[0].allreduce, commitments(outcomes[0]), {}) == {}


def test_a_lying_reducer_is_proven_by_what_was_signed() -> None:
    outcomes = lying_round()
    assert outcomes[0].store.hashes == outcomes[1].store.hashes and not outcomes[0].agreement.differing
    for index in range(len(outcomes[0].allreduce.parts_of(PEERS[2]))):
        finding = audited(outcomes, 2, index)
        assert finding.guilty == str(PEERS[2]) and not finding.doubts
        assert verify(Accusation.read(finding.proven), RULES) == str(PEERS[2])
        assert audited(outcomes, 1, 0) == Finding()


def test_members_hold_one_average_of_sparse_messages_and_a_wrong_one_is_proven() -> None:
    honest = [Sparse(number) for number in range(4)]
    outcomes = run_round(*honest)
    for outcome in outcomes:
        assert not outcome.store.missing() and not outcome.commit.dropped and not outcome.allreduce.rejected
        assert outcome.store.buffer.dump() == outcomes[0].store.buffer.dump()
    sent = [dict(DecodedCopies(member.allreduce._local)) for member in honest]
    mean = sum(weight * flattened(tensors) for weight, tensors in zip(WEIGHTS, sent, strict=True)) / sum(WEIGHTS)
    assert float((outcomes[0].average - mean).norm() / mean.norm()) < 0.1, "divided by the weight of all members"
    large = SHAPES["weight"].numel()
    assert sum(len(outcomes[0].store.get(index)) for index in range(len(outcomes[0].store.parts))) < 0.17 * large

    rules = replace(RULES, layout=SPARSE_LAYOUT, codec=SPARSE)
    lying = run_round(Sparse(0), Sparse(1), SparseLiar(2), Sparse(3))
    assert lying[0].store.hashes == lying[1].store.hashes
    for index in range(len(lying[0].allreduce.parts_of(PEERS[2]))):
        finding = audited(lying, 2, index, rules=rules)
        assert verify(Accusation.read(finding.proven), rules) == finding.guilty == str(PEERS[2])
        assert audited(lying, 1, 0, rules=rules) == audited(outcomes, 2, index, rules=rules) == Finding()


def test_who_does_not_show_its_part_is_named_and_nobody_is_proven() -> None:
    finding = audited(lying_round(), 2, 0, silent=(3,))
    assert not finding.proven and finding.doubts == {str(PEERS[3]): "did not show what it sent"}
    finding = audited(lying_round(), 2, 0, silent=(2,))
    assert not finding.proven and "did not show its inputs" in finding.doubts[str(PEERS[2])]


def test_who_averages_what_nobody_in_the_round_sent_is_named_for_it() -> None:
    """It has signed that itself with a key of its own, so that the average follows from it, as an audit finds."""
    outcomes, stranger = honest_round(), Signer(RSAPrivateKey())
    lying, signed = outcomes[2].allreduce, Commitment.read(commitments(outcomes[0])[str(PEERS[2])])
    inputs, hashes = Inputs.read(lying.inputs), (bytes(32),) * len(signed.outputs)
    openings = {Opening.read(opening).sender: opening for opening in inputs.openings}
    openings[stranger.peer_id] = Opening(NAME, stranger.peer_id, str(PEERS[2]), 90.0, 1.0, hashes).sign(stranger)
    order = sorted(openings, key=lambda sender: PeerID.from_base58(sender).to_bytes())
    made = Inputs(tuple(map(openings.__getitem__, order)), (len(hashes),) * len(order)).pack()
    digest = hashlib.sha256(made).digest()
    envelope = replace(signed, complete=len(order), inputs=digest).sign(SIGNERS[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lying, "inputs", made)
        audit = audits_of(outcomes, [], {}).audit(outcomes[0].allreduce, (PEERS[2], 0), {str(PEERS[2]): envelope})
        finding = asyncio.run(audit)
    assert finding == Finding(doubts={str(PEERS[2]): "averaged what nobody in the round sent"})


class InOrder(AuditSampler):
    """Picks the first part of each reducer, one after the other."""

    def pick(self, allreduce: AllReduce, silent: Collection[PeerID] = ()) -> Place | None:
        return next(((peer, 0) for peer in PEERS[1:] if peer not in silent), None)


def test_after_who_does_not_answer_the_next_that_looks_wrong_is_asked() -> None:
    """Not after who answered, be it that a sender did not."""

    async def doubts(*silent: PeerID) -> dict[str, str]:
        rounds = {GROUP: outcomes[0].commit}
        audits = audits_of(outcomes, silent, rounds, patience=1.0, sampler=InOrder())
        audits.begin(rounds[GROUP])
        await asyncio.gather(*audits._audits)
        return audits.begin(rounds[GROUP])

    outcomes = honest_round()
    assert list(asyncio.run(doubts(*PEERS[1:]))) == [str(peer) for peer in PEERS[1:]]
    assert asyncio.run(doubts(*PEERS[2:])) == {str(PEERS[2]): "did not show what it sent"}


@pytest.mark.parametrize("part", [None, 0], ids=["inputs", "part"])
def test_while_one_leaves_an_audit_hanging_the_next_that_looks_wrong_is_asked(
    monkeypatch: pytest.MonkeyPatch, part: int | None
) -> None:
    """Where steps are short there would be time for one of them alone in each round."""
    monkeypatch.setattr(audits_module, "SOON", 0.01)
    outcomes, hung = honest_round(), list[PeerID]()

    async def look() -> dict[str, str]:
        rounds = {GROUP: outcomes[0].commit}
        audits = audits_of(outcomes, [], rounds, patience=8.0, sampler=InOrder())
        stub_of, last = audits._stub_of, asyncio.Event()

        class Stub:
            def __init__(self, peer: PeerID):
                self.peer, self.rest = peer, stub_of(peer)

            async def rpc_audit(self, request: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
                _, reducer, index = wire.AUDIT_REQUEST.read(request)
                if self.peer != PEERS[3] and reducer == str(self.peer) and index == part:
                    await last.wait()
                    hung.append(self.peer)
                    raise ValueError("only now")
                if self.peer == PEERS[3] and reducer == str(self.peer):
                    last.set()
                return await self.rest.rpc_audit(request, timeout)

        audits._stub_of = Stub
        audits.begin(rounds[GROUP])
        await asyncio.gather(*audits._audits)
        return audits.begin(rounds[GROUP])

    doubts = asyncio.run(look())
    assert hung == PEERS[1:3] and doubts.keys() == {str(peer) for peer in hung}


class OnePart(AuditSampler):
    """Picks the first part of one reducer, once."""

    def pick(self, allreduce: AllReduce, silent: Collection[PeerID] = ()) -> Place | None:
        return None if silent else (PEERS[2], 0)


@pytest.mark.parametrize("part", [None, 0], ids=["inputs", "part"])
@pytest.mark.parametrize("conduct", ["hangs", "refuses", "hangs, then refuses"])
def test_who_says_nothing_is_named_though_another_round_begins(part: int | None, conduct: str) -> None:
    """Where steps are short it begins before an answer is late. Who has overwritten what it sent just before is not."""
    outcomes, asked = honest_round(), list[PeerID]()
    patience = 4.0 if conduct == "refuses" else 0.5

    async def doubts() -> dict[str, str]:
        rounds: dict[bytes, Any] = {GROUP: outcomes[0].commit}
        audits = audits_of(outcomes, [], rounds, patience=patience, sampler=OnePart())
        loop, stub_of, all_asked = asyncio.get_running_loop(), audits._stub_of, asyncio.Event()

        class Stub:
            def __init__(self, peer: PeerID):
                self.peer, self.rest = peer, stub_of(peer)

            async def rpc_audit(self, request: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
                if wire.AUDIT_REQUEST.read(request)[2] != part:
                    return await self.rest.rpc_audit(request, timeout)
                asked.append(self.peer)
                if len(asked) == MOST_AUDITS:
                    loop.call_later(0.9 * APART * patience, rounds.__setitem__, b"the next", None)
                    all_asked.set()
                async with asyncio.timeout(timeout):
                    await all_asked.wait()
                    await asyncio.sleep({"hangs": 2 * timeout, "refuses": 0.0}.get(conduct, 0.6 * patience))
                raise ValueError("it is overwritten")

        audits._stub_of = Stub
        for _ in range(MOST_AUDITS + 1):
            audits.begin(rounds[GROUP])
        await asyncio.gather(*audits._audits)
        return audits.begin(rounds[GROUP])

    found = asyncio.run(doubts())
    assert asked == [PEERS[2]] * MOST_AUDITS, "no more wait at once"
    words = "did not show what it sent" if part == 0 else "did not show its inputs in time"
    assert found == ({} if conduct == "refuses" else {str(PEERS[2]): words})


@pytest.mark.parametrize(
    ("later", "changes"),
    [(2, None), (2, {"inputs": bytes(32)}), (1, {"inputs": bytes(32)})],
    ids=["nothing", "unlike", "another one's"],
)
def test_what_a_reducer_says_later_keeps_no_audit_from_what_was_signed_first(
    tmp_path: Path, later: int, changes: dict[str, Any] | None
) -> None:
    outcomes, liar = run_round(Clipping(0), Clipping(1), Liar(2), Clipping(3)), str(PEERS[2])
    commit = outcomes[0].commit
    said = commit.statuses[str(PEERS[later])]
    signed = b"" if changes is None else replace(Commitment.read(said.commitment), **changes).sign(SIGNERS[later])

    async def audit() -> None:
        await commit.answer(PEERS[later], replace(said, commitment=signed).pack(GROUP))
        audits.begin(commit)
        await asyncio.gather(*audits._audits)

    audits = audits_of(outcomes, [], {GROUP: commit}, proofs=EvidenceStore(tmp_path), sampler=OnePart())
    asyncio.run(audit())
    assert audits.proofs.guilty() == {liar, *([str(PEERS[later])] if changes else [])}
    assert Accusation.read(audits.proofs.read(liar)).index == 0


def test_who_signs_nothing_or_something_else_is_named() -> None:
    outcomes = honest_round()
    allreduce, signed = outcomes[0].allreduce, commitments(outcomes[0])
    mine = Commitment.read(signed[str(PEERS[1])])
    for envelope in (
        b"",
        signed[str(PEERS[2])],
        replace(mine, name=replace(NAME, state_key="6_abc")).sign(SIGNERS[1]),
        replace(mine, outputs=mine.outputs[::-1]).sign(SIGNERS[1]),
        replace(mine, position=2).sign(SIGNERS[1]),
        replace(mine, complete=2).sign(SIGNERS[1]),
    ):
        assert unsigned_by(allreduce, signed | {str(PEERS[1]): envelope}, {}).keys() == {str(PEERS[1])}


def proof() -> Accusation:
    return Accusation.read(audited(lying_round(), 2, 1).proven)


def test_a_proof_that_is_changed_proves_nothing() -> None:
    made = proof()
    assert verify(made, RULES) == str(PEERS[2])
    changed = bytearray(made.parts[0])
    changed[-1] ^= 1
    for wrong in (
        replace(made, parts=(bytes(changed), *made.parts[1:])),
        replace(made, parts=made.parts[:-1]),
        replace(made, inputs=made.inputs + b"\x00"),
        replace(made, index=99),
        replace(made, index=-1),
        replace(made, commitment=made.commitment[:-1]),
    ):
        with pytest.raises(NotProven):
            verify(wrong, RULES)
    with pytest.raises(NotProven, match="another run"):
        verify(made, replace(RULES, run="other-12345678"))


def test_two_unlike_commitments_to_one_round_are_a_proof_and_nothing_less_is() -> None:
    envelope = commitments(honest_round()[0])[str(PEERS[1])]
    mine = Commitment.read(envelope)

    def accused(other: Commitment, signer: int = 1) -> Accusation:
        return Accusation(envelope, other.sign(SIGNERS[signer]), Accusation.UNLIKE, ())

    for unlike in (replace(mine, outputs=mine.outputs[::-1]), replace(mine, complete=2), replace(mine, position=2)):
        packed = accused(unlike).pack()
        assert verify(Accusation.read(packed), RULES) == str(PEERS[1])
    elsewhere = replace(mine.name, group_id=b"other"), replace(mine.name, state_key="6_abc")
    for wrong in (
        accused(mine),
        *(accused(replace(mine, name=name, outputs=mine.outputs[::-1])) for name in elsewhere),
        accused(replace(mine, outputs=mine.outputs[::-1]), signer=2),
        replace(accused(mine), inputs=b"nothing"),
    ):
        with pytest.raises(NotProven):
            verify(wrong, RULES)


def test_two_unlike_votes_in_one_round_are_a_proof_and_nothing_less_is() -> None:
    mine = SignedVote(NAME, str(PEERS[1]), 1, (1, 1), (bytes(32),))

    def accused(other: SignedVote, signer: int = 1, index: int = Accusation.UNLIKE_VOTES) -> Accusation:
        return Accusation(mine.sign(SIGNERS[1]), other.sign(SIGNERS[signer]), index, ())

    unlike = replace(mine, hashes=(b"1" * 32,))
    assert verify(Accusation.read(accused(unlike).pack()), RULES) == str(PEERS[1])
    elsewhere = replace(NAME, group_id=b"other"), replace(NAME, state_key="6_abc")
    for wrong in (
        accused(mine),
        *(accused(replace(unlike, name=name)) for name in elsewhere),
        accused(unlike, signer=2),
        accused(unlike, index=Accusation.UNLIKE),
        accused(Precommit(*vars(unlike).values())),  # who is not heard may vote otherwise than a quorum, and go with it
        replace(accused(unlike), inputs=b"nothing"),
    ):
        with pytest.raises(NotProven):
            verify(wrong, RULES)
    with pytest.raises(NotProven, match="another run"):
        verify(accused(unlike), replace(RULES, run="other-12345678"))


def test_who_has_no_samples_keeps_nobody_from_being_proven_guilty_or_honest() -> None:
    class Idle(Clipping):
        weight = 0.0

    outcomes = run_round(Clipping(0), Clipping(1), Idle(2), Clipping(3))
    assert not audited(outcomes, 1, 0).proven and not audited(outcomes, 1, 0).doubts
    made = audited(run_round(Clipping(0), Idle(1), Liar(2), Clipping(3)), 2, 0)
    assert made.guilty == str(PEERS[2]) and verify(Accusation.read(made.proven), RULES) == str(PEERS[2])


def test_shares_of_nobody_are_no_commitment() -> None:
    mine = Commitment.read(commitments(honest_round()[0])[str(PEERS[1])])
    unlike = replace(mine, shares=(2, 1, 1, 1))
    assert unsigned_by(honest_round()[0].allreduce, {str(PEERS[1]): unlike.sign(SIGNERS[1])}, {}).keys() >= {
        str(PEERS[1])
    }
    for shares in ((), (1, 0, 1), (1,) * 65):
        with pytest.raises(NotProven):
            replace(mine, shares=shares)


def test_an_honest_reducer_is_not_proven_guilty_by_its_own_words() -> None:
    outcomes = honest_round()
    allreduce = outcomes[1].allreduce
    index = 0
    parts = tuple(outcome.allreduce.encoded(allreduce.parts_of(PEERS[1])[index]) for outcome in outcomes)
    with pytest.raises(NotProven, match="is right"):
        verify(Accusation(allreduce.commitment, allreduce.inputs, index, parts), RULES)


def resigned(change: Any) -> Accusation:
    """The lying reducer's proof with inputs of its own making."""
    made = proof()
    inputs = change(Inputs.read(made.inputs)).pack()
    commitment = replace(Commitment.read(made.commitment), inputs=hashlib.sha256(inputs).digest())
    return Accusation(commitment.sign(SIGNERS[2]), inputs, made.index, made.parts)


def forged(inputs: Inputs) -> Inputs:
    """The first sender's opening, signed by the reducer instead."""
    opening = Opening.read(inputs.openings[0])
    return replace(inputs, openings=(opening.sign(SIGNERS[2]), *inputs.openings[1:]))


def old(inputs: Inputs) -> Inputs:
    """An opening of the first sender for another round."""
    opening = replace(Opening.read(inputs.openings[0]), name=RoundName(NAME.run, "4_old", b"other"))
    return replace(inputs, openings=(opening.sign(SIGNERS[0]), *inputs.openings[1:]))


def weighs(weight: float) -> Callable[[Inputs], Inputs]:
    """An opening of the first sender with a weight that no honest reducer takes, be it with it in league."""

    def change(inputs: Inputs) -> Inputs:
        opening = replace(Opening.read(inputs.openings[0]), weight=weight)
        return replace(inputs, openings=(opening.sign(SIGNERS[0]), *inputs.openings[1:]))

    return change


@pytest.mark.parametrize(
    "change",
    [
        forged,
        old,
        weighs(0.5),
        weighs(1e19),
        lambda inputs: replace(inputs, openings=inputs.openings[::-1]),
        lambda inputs: replace(inputs, used=(10**6, *inputs.used[1:])),
        lambda inputs: replace(inputs, openings=inputs.openings[1:], used=inputs.used[1:]),
        lambda inputs: replace(inputs, openings=(b"nothing", *inputs.openings[1:])),
    ],
)
def test_inputs_that_nobody_signed_are_proof_enough(change: Any) -> None:
    assert verify(replace(resigned(change), parts=()), RULES) == str(PEERS[2])


@given(st.lists(st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=70), max_size=9))
@settings(deadline=None)
def test_signed_fields_that_cannot_be_are_refused(fields: list[Any]) -> None:
    try:
        envelope = SIGNERS[0].sign(fields)
    except OverflowError:
        return
    assert wire.ENVELOPE.read(envelope)[1] == SIGNERS[0]._public
    for read in (Opening.read, Commitment.read):
        for kind in ("opening", "averages"):
            with pytest.raises(NotProven):
                read(SIGNERS[0].sign([kind, *fields]))


async def stream(packed: bytes, chunk: int = 1000) -> AsyncIterator[runtime_pb2.ExpertInfo]:
    for start in range(0, len(packed), chunk):
        yield runtime_pb2.ExpertInfo(serialized_info=packed[start : start + chunk])


def test_a_court_keeps_what_is_proven_and_hears_no_slanderer_again(tmp_path: Path) -> None:
    kept_here = EvidenceStore(tmp_path / "accusations")
    court, packed = Court(RULES, kept_here), proof().pack()
    assert kept_here.guilty() == frozenset()
    asyncio.run(court.hear(stream(packed), str(PEERS[2]), "anna", 60.0))
    assert kept_here.guilty() == {str(PEERS[2])}
    kept = kept_here.read(str(PEERS[2]))
    assert verify(Accusation.read(kept), RULES) == str(PEERS[2])
    assert not kept_here.keep(str(PEERS[2]), packed), "it is known"
    for words in (packed[:-1], b"", b"x" * 5000):
        with pytest.raises(NotProven):
            asyncio.run(Court(RULES, kept_here).hear(stream(words), str(PEERS[2]), "ben", 60.0))
    with pytest.raises(NotProven):
        asyncio.run(court.hear(stream(b"lies"), str(PEERS[2]), "ben", 60.0))
    with pytest.raises(ValueError, match="no time"):
        asyncio.run(court.hear(stream(packed), str(PEERS[2]), "ben", 60.0))


def test_who_lies_under_ever_new_names_takes_no_more_memory(tmp_path: Path) -> None:
    court = Court(RULES, EvidenceStore(tmp_path))

    async def lie(number: int) -> None:
        with pytest.raises(NotProven):
            await court.hear(stream(b"lies"), str(PEERS[2]), f"liar {number}", 60.0)

    async def lie_again_and_again() -> None:
        for number in (*range(evidence.MOST_SLANDERERS + 1), 0):
            await lie(number)
        with pytest.raises(ValueError, match="no time"):
            await court.hear(stream(b"lies"), str(PEERS[2]), f"liar {evidence.MOST_SLANDERERS}", 60.0)

    asyncio.run(lie_again_and_again())


async def silence() -> AsyncIterator[runtime_pb2.ExpertInfo]:
    yield runtime_pb2.ExpertInfo(serialized_info=b"it begins")
    await asyncio.Event().wait()


def test_who_names_another_one_or_comes_to_no_end_is_not_heard_again(tmp_path: Path) -> None:
    court, packed = Court(RULES, EvidenceStore(tmp_path)), proof().pack()
    with pytest.raises(NotProven, match="another one"):
        asyncio.run(court.hear(stream(packed), str(PEERS[1]), "anna", 60.0))
    with pytest.raises(TimeoutError):
        asyncio.run(court.hear(silence(), str(PEERS[2]), "ben", 0.01))
    for accuser in ("anna", "ben"):
        with pytest.raises(ValueError, match="no time"):
            asyncio.run(court.hear(stream(packed), str(PEERS[2]), accuser, 60.0))
    asyncio.run(court.hear(stream(packed), str(PEERS[2]), "carla", 60.0))


def test_true_accusations_find_a_place_however_many_there_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One accuser brings a few; where the store is full the oldest goes."""
    monkeypatch.setattr(evidence, "verify", lambda accusation, rules: accusation.commitment.decode())
    kept_here = EvidenceStore(tmp_path)
    courts, packed = Court(RULES, kept_here), lambda name: replace(proof(), commitment=name.encode()).pack()
    for number in range(evidence.MOST_KEPT + 2):
        name, accuser = f"guilty{number}", f"accuser{number // evidence.MOST_OF_ONE}"
        asyncio.run(courts.hear(stream(packed(name)), name, accuser, 60.0))
    with pytest.raises(ValueError, match="no time"):
        asyncio.run(courts.hear(stream(packed("one more")), "one more", "accuser0", 60.0))
    assert kept_here.guilty() == {f"guilty{number}" for number in range(2, evidence.MOST_KEPT + 2)}


def test_an_accusation_of_nobody_in_this_swarm_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TT_HOME", str(tmp_path))
    known: set[str] = set()
    audits = Audits(load_run("emoji"), RULES, {}, lambda peer: None, known.__contains__)
    context: Any = SimpleNamespace(remote_id=PEERS[0])
    packed = proof().pack()

    async def said() -> AsyncIterator[runtime_pb2.ExpertInfo]:
        yield wire.ACCUSED.message((str(PEERS[2]),))
        assert known, "read on"
        async for chunk in stream(packed):
            yield chunk

    with pytest.raises(ValueError, match="nobody here knows"):
        asyncio.run(audits.rpc_accuse(said(), context))
    assert audits.proofs.guilty() == frozenset()
    known.add(str(PEERS[2]))
    asyncio.run(audits.rpc_accuse(said(), context))
    assert audits.proofs.guilty() == {str(PEERS[2])}


def test_an_accusation_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST_BYTES", 10**4)
    with pytest.raises(NotProven, match="without end"):
        asyncio.run(Court(RULES, EvidenceStore(tmp_path)).hear(stream(bytes(10**6)), "anna", "ben", 60.0))


def test_only_members_are_shown_something_and_not_for_ever() -> None:
    allreduce: AllReduce = honest_round()[1].allreduce
    reducer = str(PEERS[1])
    with pytest.raises(ValueError, match="not a member"):
        allreduce.show("stranger", reducer, None)
    with pytest.raises(ValueError, match="no such part"):
        allreduce.show(str(PEERS[0]), reducer, 10**6)
    with pytest.raises(ValueError, match="too often"):
        for _ in range(100):
            allreduce.show(str(PEERS[0]), reducer, 0)
    assert allreduce.show(str(PEERS[2]), reducer, None) == allreduce.inputs


def test_nobody_is_shown_what_is_still_being_sent() -> None:
    """Else it could send another member's gradient as its own, before that one's has come."""
    _, asked, *_ = run_round(*(Clipping(number) for number in range(4)))
    asked.commit.over.clear()
    request = wire.AUDIT_REQUEST.message((GROUP, str(PEERS[0]), 0))

    audits = Audits(load_run("emoji"), RULES, {GROUP[:GROUP_BYTES]: asked.commit}, lambda peer: None, lambda peer: True)
    context: Any = SimpleNamespace(remote_id=PEERS[2])
    with pytest.raises(ValueError, match="still sending"):
        asyncio.run(audits.rpc_audit(request, context))
    asked.commit.over.set()
    shown = bytes(asyncio.run(audits.rpc_audit(request, context)).serialized_info)
    assert shown == asked.allreduce.encoded(asked.allreduce.parts_of(PEERS[0])[0])
    for name, shape in SHAPES.items():  # the next gradient is there, and its round has not begun
        asked.allreduce._local.encode(name, torch.ones(shape))
    with pytest.raises(ValueError, match="nobody has been sent"):
        asyncio.run(audits.rpc_audit(request, context))


def test_who_never_was_in_a_round_here_is_shown_the_proof_and_believes_it_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a newcomer, which would go on inviting the guilty one."""
    run, guilty, sizes = load_run("emoji"), str(PEERS[2]), list[int]()
    there: dict[str, Audits] = {}
    for name in ("knows", "newcomer"):
        monkeypatch.setenv("TT_HOME", str(tmp_path / name))
        there[name] = Audits(run, RULES, {}, lambda peer: Stub(), lambda peer: True)

    class Stub:
        async def rpc_accuse(self, chunks: AsyncIterator[runtime_pb2.ExpertInfo]) -> runtime_pb2.ExpertInfo:
            async def counted() -> AsyncIterator[runtime_pb2.ExpertInfo]:
                async for chunk in chunks:
                    sizes.append(len(chunk.serialized_info))
                    yield chunk

            context: Any = SimpleNamespace(remote_id=PEERS[0])
            return await there["newcomer"].rpc_accuse(counted(), context)

    async def shown() -> None:
        there["knows"].show({guilty: [str(PEERS[1])]})
        assert there["knows"]._showing is not None
        await there["knows"]._showing

    assert there["knows"].proofs.keep(guilty, proof().pack())
    asyncio.run(shown())
    assert there["newcomer"].proofs.guilty() == {guilty} and len(sizes) > 1
    sizes.clear()
    asyncio.run(shown())
    assert len(sizes) == 1, "what is known is not sent again"
