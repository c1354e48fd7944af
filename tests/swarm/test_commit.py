"""What members make of each other's hashes, and how a whole average comes to who missed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.rounds import CODEC, GROUP, LAYOUT, NAME, PEERS, SIGNERS, Member, run_round

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, MISSING, AverageBuffer, KeptAverages, part_hash
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import (
    Accusation,
    NotProven,
    Precommit,
    RoundName,
    RoundRules,
    SignedVote,
    average_hash,
    open_envelope,
    read_votes,
    verify,
)
from tt_cli.swarm.allreduce.part_fetch import answer, fetch_parts, request
from tt_cli.swarm.allreduce.result import DOUBLE, late_of, outcome_of
from tt_cli.swarm.allreduce.votes import (
    PartStatus,
    agree,
    electorates_of,
    group_of,
    is_quorum,
    liars_among,
    read_status,
)
from tt_cli.swarm.compression.gradient_buffer import MAX_REDUCERS

A, B = part_hash(b"a"), part_hash(b"b")
HASHES = st.lists(st.sampled_from([A, B, MISSING]), min_size=3, max_size=3)


@given(st.dictionaries(st.sampled_from("vwxyz"), HASHES, min_size=1))
@settings(deadline=None)
def test_members_that_know_the_same_come_to_the_same_average(hashes: dict[str, list[bytes]]) -> None:
    ends = {}
    for me, own in hashes.items():
        found = agree(own, hashes, electorates_of(dict.fromkeys(hashes, 1)))
        for index, (wanted, holders) in found.wanted.items():
            assert wanted != own[index] and holders and all(hashes[peer][index] == wanted for peer in holders)
        mended = [found.wanted[index][0] if index in found.wanted else one for index, one in enumerate(own)]
        ends[me] = mended if found.reached else None
    assert len({str(end) for end in ends.values()}) == 1
    for end in ends.values():
        assert end is None or MISSING not in end


@pytest.mark.parametrize(
    ("column", "outcome"),
    [
        ([A, A, A], "A"),
        ([A, A, MISSING], "A"),
        ([MISSING, A, A], "A"),
        ([MISSING, MISSING, A], "unconfirmed"),
        ([A, A, B], "A"),
        ([B, A, B], "B"),
        ([A, B, MISSING], "disputed"),
        ([MISSING, MISSING, MISSING], "lost"),
    ],
)
def test_what_becomes_of_a_part(column: list[bytes], outcome: str) -> None:
    votes = {peer: [one] for peer, one in zip("mxy", column, strict=True)}
    found = agree([column[0]], votes, electorates_of(dict.fromkeys("mxy", 1)))
    wrong = {"lost": found.lost, "disputed": found.disputed, "unconfirmed": found.unconfirmed}
    assert [name for name, parts in wrong.items() if parts] == [outcome] * (outcome in wrong)
    if outcome in "AB":
        end = found.wanted[0][0] if found.wanted else column[0]
        assert end == {"A": A, "B": B}[outcome]
    assert bool(found.differing) == (A in column and B in column)


@pytest.mark.parametrize(
    ("column", "silent", "commits"),
    [
        ([A], 1, False),
        ([A], 2, False),
        ([A, A], 1, True),
        ([A, A], 2, False),
        ([A, A, B], 1, False),  # the silent one may hold B too
        ([A, A, A, B], 1, False),
        ([A, A, A, B], 0, True),
        ([A, A, A, A, B], 1, True),
        ([A, A, MISSING], 2, False),  # 3 of 5: two others and a liar may be as many
        ([A, A, A, MISSING], 1, False),  # who lacks it may tell another one of B
        ([A, A, A, A], 1, True),
    ],
)
def test_who_did_not_hear_enough_commits_nothing(column: list[bytes], silent: int, commits: bool) -> None:
    votes = {str(number): [one] for number, one in enumerate(column)}
    voices = dict.fromkeys(map(str, range(len(column) + silent)), 1)
    assert agree([column[0]], votes, electorates_of(voices)).reached is commits


@pytest.mark.parametrize(
    ("voices", "voting", "trainers", "commits"),
    [
        ([1, 1, 1], 2, 3, True),
        ([1, 1, 1], 2, 4, False),  # one of the four lies: it and one of two honest ones are not enough
        ([1, 1, 1], 3, 4, True),
        ([1, 1, 1, 1], 3, 7, False),  # of whom two may lie
        ([1, 1, 1, 1, 1], 4, 7, True),
        ([Fraction(1, 2), Fraction(1, 2), 1], 2, 2, False),  # one user's two peers
        ([1, 1, Fraction(1, 2), Fraction(1, 2)], 2, 3, True),
    ],
)
def test_votes_count_by_users_and_by_how_many_of_the_swarm_may_lie(
    voices: list[Fraction | int], voting: int, trainers: int, commits: bool
) -> None:
    members = {str(number): voice for number, voice in enumerate(voices)}
    votes = {peer: [A] if int(peer) < voting else [MISSING] for peer in members}
    assert agree([A], votes, electorates_of(members, liars_among(trainers))).reached is commits


@pytest.mark.parametrize(
    ("voting", "commits"), [("abc", False), ("xyz", False), ("xyza", False), ("abcx", True), ("xyab", True)]
)
def test_a_part_needs_the_votes_of_those_who_have_made_steps_and_of_all(voting: str, commits: bool) -> None:
    """Of a, b and c and the newcomers x, y and z: a quorum of three is two, and one of six four."""
    votes = {peer: [A] if peer in voting else [MISSING] for peer in "abcxyz"}
    assert agree([A], votes, electorates_of(dict.fromkeys("abcxyz", 1), steps="abc")).reached is commits


@pytest.mark.parametrize("liars", [0, 1])
def test_one_alone_who_has_made_steps_commits_what_newcomers_commit(liars: int) -> None:
    """Of four trainers, of whom one may lie, as a member knows that has made steps; those who begin do not."""
    for voting, commits in (("axy", True), ("xy", False)):
        votes = {peer: [A] if peer in voting else [MISSING] for peer in "axy"}
        assert agree([A], votes, electorates_of(dict.fromkeys("axy", 1), liars, "a")).reached is commits


@pytest.mark.parametrize(("voting", "commits"), [("acl", False), ("abcl", True), ("acln", False), ("abcln", True)])
def test_a_quorum_of_the_trainers_votes_wherever_they_are(voting: str, commits: bool) -> None:
    """Of a, b, c, d and l, who lies, leads, and tells a and c of a group with b, and b and d of one with a."""
    voices, trainers = dict.fromkeys("abcln", 1), dict.fromkeys("abcdl", 1)  # n has just begun
    votes = {peer: [A] if peer in voting else [MISSING] for peer in voices}
    for steps in ("", "abcl"):
        electorates = electorates_of(voices, liars_among(5), steps, trainers, 5)
        assert agree([A], votes, electorates).reached is commits


@given(st.lists(st.sampled_from([A, B]), min_size=2, max_size=7), st.data())
@settings(deadline=None)
def test_whoever_hears_whom_no_two_commit_other_bytes(column: list[bytes], data: st.DataObject) -> None:
    ends = set()
    dropped = data.draw(st.sets(st.sampled_from(range(len(column)))))
    for me, own in enumerate(column):
        heard = data.draw(st.sets(st.sampled_from([one for one in range(len(column)) if one != me])))
        votes = {str(one): [column[one]] for one in heard | {me}}
        everybody = electorates_of(dict.fromkeys(map(str, range(len(column))), 1))
        found = agree([own], votes, everybody, {*map(str, heard & dropped)})
        assert bool(found.unheard) != is_quorum(1 + len(heard - dropped), len(column))
        if found.reached and me not in dropped:
            ends.add(found.wanted[0][0] if found.wanted else own)
    assert len(ends) <= 1


@pytest.mark.parametrize("members", range(1, 100))
def test_two_quorums_have_an_honest_member_in_common_where_less_than_a_third_lie(members: int) -> None:
    liars, quorum = liars_among(members), next(some for some in range(members + 1) if is_quorum(some, members))
    assert 3 * liars < members <= 3 * (liars + 1)
    assert members / 2 < quorum <= members - liars, "more than half, and the honest are enough"
    assert 2 * quorum - members > liars


def message(value: object) -> runtime_pb2.ExpertInfo:
    return runtime_pb2.ExpertInfo(serialized_info=MSGPackSerializer.dumps(value))


def test_a_status_arrives_as_it_was() -> None:
    said = {"samples": 5, "loss": 2.5}
    sent = PartStatus((A, B), said, b"vote", b"signed", {"x": 2}, {"y": b"", "z": b"heard"}, True, {"x": b"vote"})
    assert group_of(sent.pack(GROUP)) == GROUP
    assert read_status(sent.pack(GROUP), 2) == sent


@pytest.mark.parametrize("clipped", [{"x": 3}, {"x": 0}, {"x": "1"}, {"x": 1.5}])
def test_nonsense_about_who_was_clipped_is_not_shown(clipped: dict[object, object]) -> None:
    assert read_status(message([GROUP, A + B, b"", {}, b"", clipped, {}, False, {}]), 2).clipped == {}


@pytest.mark.parametrize(
    "value",
    [
        [GROUP, A, b"", {}, b"", {}, {}, False, {}],
        [GROUP, A + B + A, b"", {}, b"", {}, {}, False, {}],
        [GROUP, "words", b"", {}, b"", {}, {}, False, {}],
        [GROUP, A + B, b"", 5, b"", {}, {}, False, {}],
        [GROUP, A + B, b"", {}, "words", {}, {}, False, {}],
        [GROUP, A + B, "vote", {}, b"", {}, {}, False, {}],
        [GROUP, A + B, {}, b"", {}, {}, False, {}],
        [GROUP, A + B, b"", {}, b"", [], {}, False, {}],
        [GROUP, A + B, b"", {}, b"", {}, [], False, {}],
        [GROUP, A + B, b"", {}, b"", {}, {"x": 5}, False, {}],
        [GROUP, A + B, b"", {}, b"", {}, {}, 5, {}],
        [GROUP, A + B, b"", {}, b"", {}, {}, False, {"x": 5}],
        [GROUP, A + B, b"", {}, b"", {}, {}, False],
        [GROUP, A + B, b"", {}, b"", {}, {}],
        [GROUP, A + B, b"", {}, b"", {}],
        [GROUP, A + B, b"", {}],
        [GROUP, A + B],
        {},
        7,
        None,
    ],
    ids=str,
)
def test_what_is_no_status_of_this_round_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        read_status(message(value), 2)


@pytest.mark.parametrize("said", [{"samples": -1, "loss": 1.0}, {"samples": 10**13, "loss": 1.0}, {"samples": "9"}])
def test_nonsense_about_samples_is_not_shown(said: dict[str, object]) -> None:
    assert read_status(message([GROUP, A, b"", said, b"", {}, {}, False, {}]), 1).said == {}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), "low", None])
def test_nonsense_about_the_loss_is_not_shown(loss: object) -> None:
    assert read_status(message([GROUP, A, b"", {"samples": 4, "loss": loss}, b"", {}, {}, False, {}]), 1).said == {}


@pytest.mark.parametrize("value", [None, [1, None], ["key"], ["key", [-1]], ["key", ["0"]], ["key", 5]], ids=str)
def test_what_is_no_request_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        wire.PARTS_REQUEST.read(message(value))


def test_a_request_arrives_as_it_was() -> None:
    assert wire.PARTS_REQUEST.read(request("3_abc", None)) == ("3_abc", None)
    assert wire.PARTS_REQUEST.read(request(GROUP, [2, 4])) == (GROUP, (2, 4))


def donor_stub(messages: list[runtime_pb2.ExpertInfo]) -> Any:
    async def stream() -> AsyncIterator[runtime_pb2.ExpertInfo]:
        for one in messages:
            yield one

    async def rpc_fetch_average(_: runtime_pb2.ExpertInfo) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        return stream()

    return SimpleNamespace(rpc_fetch_average=rpc_fetch_average)


def sent_by(store: AverageBuffer) -> list[runtime_pb2.ExpertInfo]:
    async def collect() -> list[runtime_pb2.ExpertInfo]:
        return [one async for one in answer(store, None, lambda: True)]

    return asyncio.run(collect())


def take(
    messages: list[runtime_pb2.ExpertInfo], check: Callable[..., None] = lambda average, votes: None
) -> tuple[bool, AverageBuffer, int]:
    store, traffic = AverageBuffer(LAYOUT, CODEC), torch.zeros(2, dtype=torch.int64)
    whole = asyncio.run(fetch_parts(donor_stub(messages), "key", store, None, 5.0, traffic, check))
    return whole, store, int(traffic[1])


@pytest.fixture(scope="module")
def averaged() -> AverageBuffer:
    return run_round(Member(0), Member(1))[0].store


def test_a_whole_average_comes_to_who_missed_the_round(averaged: AverageBuffer) -> None:
    whole, store, received = take(sent_by(averaged))
    assert whole and store.parts == averaged.parts and store.hashes == averaged.hashes and not store.missing()
    assert received == store.buffer.nbytes
    assert store.buffer.read(0, LAYOUT.boundary) == averaged.buffer.read(0, LAYOUT.boundary)


def test_a_donor_without_it_or_that_goes_away_gives_none(averaged: AverageBuffer) -> None:
    assert not take([])[0]
    assert not take(sent_by(averaged)[:-1])[0]


def test_a_store_that_went_on_sends_no_more(averaged: AverageBuffer) -> None:
    left = iter([True, True, False])

    async def collect() -> int:
        return len([one async for one in answer(averaged, None, lambda: next(left))])

    assert asyncio.run(collect()) == 3  # the header and two parts


def test_bytes_that_do_not_fit_are_refused(averaged: AverageBuffer) -> None:
    good = sent_by(averaged)
    changed = bytearray(good[1].serialized_info)
    changed[-1] ^= 1
    with pytest.raises(ValueError, match="another hash"):
        take([good[0], runtime_pb2.ExpertInfo(serialized_info=bytes(changed)), *good[2:]])


def test_bytes_that_are_no_part_are_refused_though_their_hash_is_right(averaged: AverageBuffer) -> None:
    good = sent_by(averaged)
    short = good[1].serialized_info[:-1]
    reducers, joined, votes = MSGPackSerializer.loads(good[0].serialized_info)
    lied = message([reducers, part_hash(short) + joined[HASH_BYTES:], votes])
    with pytest.raises(ValueError, match="bytes for"):
        take([lied, runtime_pb2.ExpertInfo(serialized_info=short), *good[2:]])


@pytest.mark.parametrize(
    "header",
    [7, [[], b""], [[1] * (MAX_REDUCERS + 1), b""], [2, b""], [[1, 1], b"short"], [[1, 1], "words"], [[-1, 2], b""]],
    ids=["number", "none", "many", "count", "short", "words", "negative"],
)
def test_a_header_that_cannot_be_is_refused(header: object) -> None:
    with pytest.raises(ValueError):
        take([message([*header, []] if isinstance(header, list) else header)])


def test_members_sign_what_they_commit_and_a_quorum_of_that_is_kept_with_the_average() -> None:
    outcomes = run_round(*map(Member, range(4)))
    for outcome in outcomes:
        average = average_hash(outcome.store.shares, outcome.store.hashes)
        signed, about = outcome.commit.precommits, (NAME.run, NAME.state_key, open_envelope)
        found = read_votes(Precommit, signed.values(), *about)
        assert {vote.voter for vote in found.values()} == signed.keys() and len(signed) >= 3
        assert {vote.average for vote in found.values()} == {average}
        assert not read_votes(SignedVote, signed.values(), *about), "they are no votes"
        assert not read_votes(Precommit, signed.values(), NAME.run, "6_abc", open_envelope), "of another state"
        assert not read_votes(Precommit, signed.values(), "other-12345678", *about[1:])
        shown = read_votes(SignedVote, outcome.commit.last_vote().shown, *about).values()
        assert {(vote.voter, vote.average) for vote in shown} == {(str(peer), average) for peer in PEERS}
    kept, votes = KeptAverages(outcome.store, lambda: 0.0), tuple(outcome.commit.precommits.values())
    kept.committed(NAME.state_key, votes)
    (found,) = (average for average in [kept.find(NAME.state_key)] if average)
    outcome.store.open((1,))
    seen = list[tuple[bytes, tuple[bytes, ...]]]()
    whole, store, _ = take(sent_by(found), lambda *told: seen.append(told))
    assert whole and seen == [(average, votes)] and not store.votes, "nobody has checked them"


class Unsigned(CommitProtocol):
    """Votes, and signs something else: nothing, another average, another round, or as another member."""

    def status(self, others: dict[str, bytes] | None = None) -> PartStatus:
        said, mine = super().status(others), self.allreduce
        if not said.vote:
            return said
        vote = SignedVote.read(said.vote, mine.signer.opened)
        signed = {
            "nothing": b"",
            "another average": replace(vote, hashes=(bytes(32),)).sign(mine.signer),
            "another round": replace(vote, name=replace(vote.name, group_id=bytes(32))).sign(mine.signer),
            "as another": vote.sign(SIGNERS[0]),
        }
        return replace(said, vote=signed[self.way])

    way = ""


@pytest.mark.parametrize("way", ["nothing", "another average", "another round", "as another"])
def test_votes_count_only_as_they_were_signed(way: str) -> None:
    liar = Member(3)
    liar.commit_type = type("Unsigned", (Unsigned,), {"way": way})
    *honest, _ = run_round(*map(Member, range(3)), liar)
    for outcome in honest:
        assert not outcome.commit.dropped and str(PEERS[3]) not in outcome.commit.statuses
        assert len(outcome.commit.last_vote().shown) == 3


class Precommitting(Member):
    """Precommits, and signs something else."""

    way = ""

    async def rpc_precommit(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        group_id, (signed,) = wire.PRECOMMITTED.read(await super().rpc_precommit(message, context))
        return wire.PRECOMMITTED.message((group_id, (self.signed(signed),)))

    def signed(self, signed: bytes) -> bytes:
        said, signer = Precommit.read(signed), self.allreduce.signer
        vote = self.allreduce.group.vote(self.peer, self.store.hashes)
        return {
            "": signed,
            "nothing": b"",
            "nonsense": b"precommit",
            "a vote": vote.sign(signer),
            "another average": replace(said, hashes=(bytes(32),)).sign(signer),
            "another round": replace(said, name=replace(said.name, group_id=bytes(32))).sign(signer),
            "as another": said.sign(SIGNERS[0]),
        }[self.way]


@pytest.mark.parametrize("way", ["", "nothing", "nonsense", "a vote", "another average", "another round", "as another"])
def test_of_four_three_must_have_precommitted_and_signed_that(way: str) -> None:
    members = [Member(0), Member(1), Member(2), type("Liar", (Precommitting,), {"way": way})(3)]
    members[0].cut = members[1].cut = {"rpc_precommit": PEERS[2:]}
    members[2].cut = {"rpc_precommit": PEERS}
    for outcome in run_round(*members)[:2]:
        assert outcome.commit.dropped == (way != "") and outcome.commit.precommitted


class Withholding(Member):
    """Tells nobody what the others signed."""

    way = ""

    async def rpc_precommit(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        if wire.PRECOMMITTED.read(message)[1]:
            answer = await super().rpc_precommit(message, context)
            if self.way != "hangs when it is told":
                return answer
        if self.way.startswith("hangs"):
            await asyncio.Event().wait()
        if self.way == "breaks off":
            raise ConnectionError("no more")
        return wire.PRECOMMITTED.message((GROUP, ()))


@pytest.mark.parametrize("way", ["hangs", "hangs when it is told", "breaks off", "knows nothing"])
def test_one_that_tells_nobody_what_all_signed_keeps_nobody_from_the_step(way: str) -> None:
    members = [Member(0), Member(1), Member(2), type("Withholding", (Withholding,), {"way": way})(3)]
    members[0].client = members[1].client = True
    for member in members:
        member.ends = 6.0  # by then no answer of who was told of a precommit is awaited
    for outcome in run_round(*members):
        commit = outcome.commit
        assert not commit.dropped and len(commit.precommits) >= 3 and len(commit.last_vote().shown) >= 3


class DoubleVoter(Member):
    """Votes for the first two members as they do, and for the third one otherwise."""

    told_all = False

    def told(self, peer: PeerID, message: runtime_pb2.ExpertInfo) -> runtime_pb2.ExpertInfo:
        status, mine = read_status(message, len(self.allreduce.parts)), self.allreduce
        if (peer != PEERS[2] and not self.told_all) or not status.vote:
            return message
        hashes = (bytes(15) + b"!", *status.hashes[1:])
        vote = mine.group.vote(mine.me, hashes).sign(mine.signer)
        return replace(status, hashes=hashes, vote=vote).pack(mine.group_id)

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        return self.told(context.remote_id, await super().rpc_settle(message, context))

    def stub(self, peer: PeerID) -> Any:
        stub = super().stub(peer)
        ask = stub.rpc_settle

        async def rpc_settle(message: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
            return await ask(self.told(peer, message), timeout)

        stub.rpc_settle = rpc_settle
        return stub


def test_who_signs_unlike_votes_is_guilty_by_that_and_nobody_drops_the_round_for_it() -> None:
    *honest, _ = run_round(*map(Member, range(3)), DoubleVoter(3))
    rules = RoundRules(NAME.run, LAYOUT, CODEC, "mean")
    for outcome in honest:
        assert not outcome.commit.dropped and not outcome.commit.proofs
        ((guilty, proof),) = outcome.commit.double.items()
        assert guilty == str(PEERS[3]) == verify(Accusation.read(proof), rules)
        assert outcome_of(outcome.commit, 1.0, {}, frozenset(), {}).rejected == {guilty: DOUBLE}


class Silent(Member):
    """In client mode, so that it calls the others and they wait for that."""

    client = True

    async def take_part(self) -> None:
        await self.allreduce.run()


class Staller(DoubleVoter):
    """Votes otherwise than all others, who ask what it knows of that, and then says nothing more."""

    told_all = True

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        if read_status(message, len(self.allreduce.parts)).others:
            await asyncio.Event().wait()
        return await super().rpc_settle(message, context)


@pytest.mark.parametrize("kind", [Silent, Staller])
def test_whoever_is_waited_for_in_vain_in_settling_has_held_the_round_up(kind: type[Member]) -> None:
    *honest, late = [*map(Member, range(3)), kind(3)]
    for outcome in run_round(*honest, late)[:3]:
        assert not outcome.commit.dropped and late_of(outcome.commit)[str(late.peer)] > late.patience / 2


@pytest.mark.parametrize(("name", "signer"), [(NAME, 2), (replace(NAME, run="other-12345678"), 3)])
def test_unlike_votes_that_prove_nothing_about_who_shows_them_are_no_proof(name: RoundName, signer: int) -> None:
    """As its own vote, before it has voted on all parts, and as what it told somebody else: who kept that as a proof
    would be taken for a slanderer."""
    votes = [SignedVote(name, str(PEERS[signer]), 1, (1,), (bytes([n]) * 32,)).sign(SIGNERS[signer]) for n in (1, 2)]

    class Framing(Member):
        async def take_part(self) -> None:
            await self.allreduce.run()
            said = replace(self.commit.status(), vote=votes[0], votes={str(self.peer): votes[1]})
            assert MISSING in said.hashes
            for peer in PEERS[:3]:
                await self.stub(peer).rpc_settle(said.pack(GROUP), timeout=10.0)
            await self.commit.run()

    for outcome in run_round(*map(Member, range(3)), Framing(3)):
        assert not outcome.commit.double and str(PEERS[3]) in outcome.commit.statuses


def test_an_average_for_which_nobody_honest_need_have_voted_is_not_taken(averaged: AverageBuffer) -> None:
    def check(average: bytes, votes: Sequence[bytes]) -> None:
        raise NotProven("no votes")

    with pytest.raises(NotProven, match="no votes"):
        take(sent_by(averaged), check)
