"""hivemind's averager, with rounds that either give every member the same average or none.

Members are matched by the state they hold: epoch and digest are part of the group's key, so unlike peers never meet. A
group may form ahead of its round. The local gradient survives a dropped round; the last average stays at hand for
members that missed it. What the trainer's process wants goes to the averager's through hivemind's pipe; gradients and
averages lie in memory that both see.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import achain, as_aiter

from tt_cli.identity.rate_limit import Crowded, Places, RateLimit
from tt_cli.run import RunConfig
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import SENDING, AllReduce
from tt_cli.swarm.allreduce.average_buffer import AverageBuffer, KeptAverages
from tt_cli.swarm.allreduce.clipping import centered_clip
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import (
    GROUP_BYTES,
    Accusation,
    NotProven,
    Precommit,
    RoundName,
    RoundRules,
    SignedJoin,
    SignedVote,
    Signer,
    read_votes,
    verify,
)
from tt_cli.swarm.allreduce.part_fetch import answer, fetch_parts
from tt_cli.swarm.allreduce.rendezvous import (
    SKEW,
    FalseGroup,
    LeaderRendezvous,
    entry_of,
    group_id_of,
    join_in,
    member_in,
    read_entry,
    read_join,
    roster_bytes,
)
from tt_cli.swarm.allreduce.result import RoundResult, outcome_of
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundGroup, RoundPlan, longest_search
from tt_cli.swarm.allreduce.shares import ALIKE, shares_of
from tt_cli.swarm.allreduce.votes import LockedAverage, group_of, liars_among, locked_by, most_say
from tt_cli.swarm.audit.audits import Audits
from tt_cli.swarm.audit.work import WorkAudits
from tt_cli.swarm.ballot import Ballot, OwnVotes
from tt_cli.swarm.clock import Clock, loop_time
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS, MAX_REDUCERS, PART_ELEMENTS, GradientBuffer
from tt_cli.swarm.hivemind_patches import take_long_messages
from tt_cli.swarm.membership.admission import NotAdmitted
from tt_cli.swarm.membership.rsa_identity import Identity
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.network.silent_connections import hang_up_on_silent
from tt_cli.swarm.records.consensus import shared_voices
from tt_cli.swarm.rounds import KeptRounds
from tt_cli.swarm.state.bridge import StateBridge, StateSource, TreeReader

logger = get_logger(__name__)

PULSE_SECONDS = 2.0
LOOK_SECONDS = 0.25
JOINS, JOINS_AT_ONCE = 20.0, 200.0  # of one peer: a second; a member asks ten times a second until there is a group
JOIN_BYTES = 2**15  # that count as one more: each vote in them is a signature to look at
PART_BYTES = 2 * PART_ELEMENTS  # of the largest part: fp16


class Averager(StateBridge, DecentralizedAverager):
    """The process that speaks for this peer in averaging rounds and hands out its state.

    identity: of this peer, whose key signs what it sends and what it reduces. shapes: name → shape of the gradients;
    empty for a peer that only hands out state. local: this peer's mean gradient. store: the last average. source,
    read_tree: see StateBridge. line: caps on traffic, if there are any. era: of this peer's state; whoever begins
    another one says so.
    """

    allreduce_type, commit_type, rendezvous_type, audits_type = AllReduce, CommitProtocol, LeaderRendezvous, Audits
    ballot_type: Callable[[Path], Ballot] = Ballot

    def __init__(
        self,
        run: RunConfig,
        dht: DHT,
        identity: Identity,
        shapes: Mapping[str, torch.Size],
        *,
        source: StateSource,
        read_tree: TreeReader,
        line: BandwidthLimiter | None = None,
        clock: Clock | None = None,
    ):
        self.clock, self.era = clock or Clock(), 0
        rules = RoundRules.of(run, shapes)
        self._line = line or BandwidthLimiter(None, None)
        self.local = GradientBuffer(rules.layout, rules.codec)
        self.store = AverageBuffer(rules.layout, rules.codec)
        self.traffic = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.max_weight = rules.most
        self.pulse = torch.full((1,), time.monotonic(), dtype=torch.float64).share_memory_()  # its process lived then
        self._seeking = longest_search(run.swarm.matchmaking_time)
        self._roster = torch.zeros(1, dtype=torch.int64).share_memory_()  # bytes of the joins that it sends as leader
        # in the averager's process:
        self._plan = RoundPlan()
        self._contribution: Any = None  # a future: to the round of this plan
        ballot = self.ballot_type(identity.path.with_suffix(".vote"))
        self._votes = OwnVotes(ballot, self.store, dht.client_mode, self.clock.dht_time)
        self._rounds, self._averages = KeptRounds(run.swarm.next_chunk_timeout), KeptAverages(self.store)
        self._fetches: set[asyncio.Task[None]] = set()
        self._joins = RateLimit(JOINS_AT_ONCE, JOINS, clock=self.clock.monotonic)
        self._telling, self._work = Places(2, MAX_MEMBERS), WorkAudits()
        self.signer = Signer(identity.key)
        self.audits = self.audits_type(run, rules, self._rounds, self._auditor, self._knows)
        if shapes:
            centered_clip.implementation()  # compiled or loaded before the fork: later it would delay a round
        self.share_state(run, dht, str(dht.peer_id), source, read_tree)
        super().__init__(
            averaged_tensors=[torch.zeros(1)],  # hivemind's own rounds, which never run
            dht=dht,
            start=True,
            prefix=run.identity,
            min_matchmaking_time=run.swarm.matchmaking_time,
            request_timeout=run.swarm.matchmaking_time * 0.8,
            allreduce_timeout=run.swarm.averaging_timeout,
            next_chunk_timeout=run.swarm.next_chunk_timeout,
            client_mode=dht.client_mode,
            allow_state_sharing=False,
            shutdown_timeout=2,
        )
        take_long_messages(self)

    # ---------------------------------------------------------------- in the host process

    def slow_line(self) -> str:
        """Words about caps on traffic, or a line as it was measured, with which this peer cannot keep up, or ""."""
        most = self.local.nbytes + self.store.buffer.nbytes  # of a reducer in a large group, each way
        line, swarm, roster = self._line, self._run.swarm, int(self._roster)
        more, never = "ask the organiser for a longer swarm.averaging_timeout", "use --client-mode: then it never leads"
        return (
            line.too_slow(most, swarm.averaging_timeout)
            or line.measured_too_slow(self.local.nbytes, SENDING * swarm.averaging_timeout, "its gradient", more)
            or line.measured_too_slow(roster, swarm.matchmaking_time, "the list of members that it sends", never)
        )

    @property
    def voted_with(self) -> frozenset[str]:
        """The members of the last round in which this peer voted before it began."""
        return self._votes.last.voting

    @property
    def upload(self) -> int:
        """Kbit/s that this peer's line sends, 0 where it is not known."""
        return self._line.upload

    def seek(self, plan: RoundPlan) -> StepControl:
        """Begin to look for the members that hold the same state; they wait for each other's `average`.

        The group is complete when all that are expected are there, else after the matchmaking time with those who came.
        """
        self._outer_pipe.send(("_prepare_round", [replace(plan, state_key=self._in_era(plan.state_key))], {}))
        now, longest = self.clock.dht_time(), self.matchmaking_kwargs["min_matchmaking_time"]
        timeout = self._seeking
        # a leader takes in who waits longer than itself, whoever of the two began earlier
        until = now + longest if plan.leader == str(self.peer_id) else now + timeout - 0.1
        return self.step(timeout=timeout, scheduled_time=until, allow_retries=False, require_trigger=True, wait=False)

    def _in_era(self, state_key: str) -> str:
        """The key in this era: of what was made before the organiser took the run back to a state nothing counts."""
        return f"{state_key}_{self.era}" if self.era else state_key

    def average(
        self, control: StepControl, contribution: Contribution, overtaken: Callable[[], bool] = lambda: False
    ) -> RoundResult:
        """Average `local` in the group that `control` seeks. Never raises for the swarm's faults.

        overtaken: asked while the group is sought; True when the others have made the step: nobody would come to it.
        """
        started = self.clock.monotonic()
        self._outer_pipe.send(("_contribute", [contribution], {}))
        try:
            # more piles up while rounds fail, or while this peer can tell nobody of it; the others would refuse it
            mine = contribution.allowed.get(str(self.peer_id), math.inf)
            control.weight = min(float(contribution.samples), self.max_weight, mine)
            control.allow_allreduce()
            limit = started + control.get_timeout() + self._run.swarm.averaging_timeout + 10.0
            while self.clock.monotonic() < limit and not (control.done() or control.began_allreduce):
                with contextlib.suppress(TimeoutError):
                    control.result(timeout=LOOK_SECONDS)
                    break
                if overtaken():
                    control.cancel()
                    return RoundResult(overtaken=True)
            result: RoundResult = control.result(timeout=limit - self.clock.monotonic())
            return result
        except Exception as error:  # hivemind passes on whatever broke in the averager's process
            if not control.done():
                control.cancel()
            words = " ".join(str(error).split()) or type(error).__name__
            return RoundResult(problem=words, seconds={"matchmaking": self.clock.monotonic() - started})

    def fetch_average(
        self, donors: Sequence[str], state_key: str, timeout: float, plan: RoundPlan | None = None
    ) -> str | None:
        """The average that others stepped with from the state `state_key`, into the store: the donor; None: no luck.

        plan: one of its trainers who do not lie must have precommitted it. Without it nobody vouches for the average:
        whether it is the right one shows in the digest of the state that it leads to.
        """
        future = self.future_type()
        self._outer_pipe.send(("_fetch_average", [list(donors), self._in_era(state_key), plan, future], {}))
        try:
            return future.result(timeout=timeout)
        except Exception as error:  # a time-out, or whatever broke in the averager's process
            logger.info(f"no average was fetched: {error!r}")
            self.drop_fetch()
            return None

    def drop_fetch(self) -> None:
        """Give up the average that is being fetched, if there is one: it must not get between a round's parts."""
        self._outer_pipe.send(("_drop_fetches", [], {}))

    def show_proofs(self, lacking: dict[str, list[str]]) -> None:
        """Show the proof against each of these peers to others who lack it."""
        self._outer_pipe.send(("_show_proofs", [lacking], {}))

    async def _show_proofs(self, lacking: dict[str, list[str]]) -> None:
        self.audits.show(lacking)

    def end(self) -> None:
        self.shutdown()
        if self.is_alive():
            self.kill()

    # ---------------------------------------------------------------- in the averager's process

    def _run_internal(self) -> None:
        torch.set_num_threads(1)
        super()._run_internal()

    @property
    def _p2p(self) -> P2P:
        return self._node

    @_p2p.setter
    def _p2p(self, p2p: P2P) -> None:
        StateBridge._p2p.fset(self, self._line.pace(p2p))  # type: ignore[attr-defined]
        loop, silent = asyncio.get_running_loop(), self._run.swarm.next_chunk_timeout / 2
        self._beating = loop.create_task(self._beat())
        self._hanging_up = loop.create_task(hang_up_on_silent(p2p, self.dht.pid, silent))
        if self.client_mode:  # nothing else is served then
            serving = self.audits.add_p2p_handlers(self._node, namespace=self.prefix)
            self._serving = loop.create_task(serving)

    async def add_p2p_handlers(self, p2p: P2P, *args: Any, **kwargs: Any) -> None:
        """Serve hivemind's methods, and those of audits."""
        await super().add_p2p_handlers(p2p, *args, **kwargs)
        await self.audits.add_p2p_handlers(p2p, namespace=self.prefix)

    async def _beat(self) -> None:
        while True:
            self.pulse[0] = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)

    def _stub(self, peer: PeerID) -> Any:
        return self.get_stub(self._p2p, peer, namespace=self.prefix)

    def _auditor(self, peer: PeerID) -> Any:
        return Audits.get_stub(self._p2p, peer, namespace=self.prefix)

    async def _prepare_round(self, plan: RoundPlan) -> None:
        self._keys().plan = self._plan = plan
        self._contribution = asyncio.get_running_loop().create_future()
        for seeker in (self._matchmaking, self._matchmaking.potential_leaders):
            seeker.target_group_size = max(2, min(len(plan.members), MAX_MEMBERS))

    async def _contribute(self, contribution: Contribution) -> None:
        if self._contribution is not None and not self._contribution.done():
            self._contribution.set_result(contribution)

    def _keys(self) -> LeaderRendezvous:
        keys = self._matchmaking.group_key_manager
        if not isinstance(keys, LeaderRendezvous):
            keys = self._matchmaking.group_key_manager = self.rendezvous_type(
                self.dht,
                self.prefix,
                lambda: self._matchmaking.step_control,
                self._handed_out,
                self._stub,
                self.signer.opened,
                self.next_chunk_timeout,
            )
        return keys

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Take members into a group as hivemind does, nobody else, and not who spoiled a round into the next one."""
        try:
            self._joins.charge(str(context.remote_id), 1 + len(request.gather) / JOIN_BYTES)
            join = member_in(request.gather, context.remote_id, self._membership, self.signer.opened)
        except (Crowded, NotAdmitted, ValueError) as error:
            logger.info(f"{context.remote_id} was not taken into the group: {error}")
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        peer_id, plan = str(context.remote_id), self._plan
        leads = plan.leader == str(self.peer_id) and join.group == (self.audits.rules.run, plan.state_key, plan.leader)
        now, attempt = self.clock.dht_time(), max(join.lock.attempt, self._votes.from_state(plan.state_key).attempt)
        fresh = abs(join.time - now) <= self._seeking + SKEW and attempt <= now  # no liar uses the numbers up
        if not (leads and fresh and plan.takes(peer_id)) or peer_id in self.audits.proofs.guilty():
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        begins = False
        async for message in super().rpc_join_group(request, context):
            if begins := message.code == averaging_pb2.BEGIN_ALLREDUCE:
                self._keys().told(message, context.remote_id)
            yield message
        if begins:  # all others would wait for who never hears of it: see AllReduce.rpc_aggregate_part
            await asyncio.sleep(self.next_chunk_timeout)

    def _join(self, plan: RoundPlan) -> bytes:
        """Sign this peer's word to the leader, and through it to all: earlier rounds from the state are over for it."""
        self._rounds.leave(plan.state_key)
        now, facts = self.clock.dht_time(), (not self.client_mode, self.upload, plan.steps)
        last = self._votes.from_state(plan.state_key)
        liars = 0 if plan.newcomer else liars_among(plan.swarm)  # whom a newcomer counts may not exist
        group, lock = (self.audits.rules.run, plan.state_key, plan.leader), replace(last.lock, liars=liars)
        join = SignedJoin(*group, now, *facts, self._membership.mine(), lock).sign(self.signer)
        leads = plan.leader == str(self.peer_id)
        self._roster[0] = roster_bytes(len(join), len(plan.members)) if leads else 0
        return entry_of(join, last.shown)

    def _handed_out(self, group: GroupInfo) -> Sequence[bytes]:
        """The entries as members of a group are told them; of one that this peer leads, votes stand with its own join.

        They are each member's newest for the one average that the group repeats, and so have room, whoever lies.
        """
        opened, leading = self.signer.opened, self._matchmaking.step_control
        own = join_in(leading.data_for_gather, self.peer_id, opened)
        if own.leader != str(self.peer_id):
            return group.gathered
        entries = dict(zip(group.peer_ids, map(read_entry, group.gathered), strict=True))
        joins = {peer: read_join(envelope, opened)[1] for peer, (envelope, _) in entries.items()}
        most = 2 * max(len(self._plan.members), len(self._plan.voices))  # of a group, some have left since
        shown = [vote for _, votes in entries.values() for vote in votes[:most]]
        signed, voices = self._read_votes(SignedVote, shown, own.state_key), self._voices(joins)
        made, newest = self._repeated(joins, voices, signed.values()), dict[str, tuple[int, bytes]]()
        for envelope, vote in signed.items():
            if made and vote.voter in voices and (vote.shares, vote.average) == (made.shares, made.average):
                said = vote.attempt, envelope
                newest[vote.voter] = max(said, newest.get(vote.voter, said))
        counting = [envelope for _, envelope in newest.values()]
        return [entry_of(join, counting if peer == self.peer_id else ()) for peer, (join, _) in entries.items()]

    def _read_votes(self, kind: type[SignedVote], votes: Iterable[bytes], state_key: str) -> dict[bytes, SignedVote]:
        return read_votes(kind, votes, self.audits.rules.run, state_key, self.signer.opened)

    def _knows(self, peer_id: str) -> bool:
        """True for a member of the swarm by this peer's last look at the records."""
        return peer_id in (self._plan.welcome or ())

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        self._rounds.seek()
        step._data_for_gather = self._join(self._plan)  # here, where it is known what this peer voted for
        try:
            await super()._step(step=step, future_for_init=future_for_init)
        finally:
            formed = self._keys().formed
            mine = {group_id for group_id, seeker, _ in formed if seeker is step}
            await self._rounds.sought({group_id for group_id, *_ in formed}, mine)
            await asyncio.get_running_loop().run_in_executor(None, release_freed_memory)

    async def _aggregate_with_group(self, group_info: GroupInfo, weight: float, **_: Any) -> RoundResult:
        """One round in a group that has formed, from the moment when this peer's gradient is ready."""
        began, commit = loop_time(), None
        try:
            contribution = await asyncio.wait_for(asyncio.shield(self._contribution), self.next_chunk_timeout)
            joins = self._keys().check(group_info, contribution.swarm, self._membership, self._seeking)
            shown = [vote for gathered in group_info.gathered for vote in read_entry(gathered)[1]]
            commit = self._begin(group_id_of(group_info.gathered), joins, weight, shown)
            self._running_groups[group_info.group_id].set_result(commit.allreduce)
            await self._rounds.begin(commit)
            uploads = [join.upload for join in joins.values()]
            async with self._line.measured(slow=joins[self.peer_id].upload < ALIKE * max(uploads)):
                await commit.allreduce.run()
            transferred, received = loop_time(), self.store.received
            await commit.run()
        except FalseGroup as error:
            return RoundResult(rejected={error.leader: str(error)}, problem=str(error))
        except Exception as error:
            if commit is None:
                raise MatchmakingException(f"the round failed: {error}") from error
            return RoundResult(problem=f"the round failed: {error}", voted=self._votes.after(commit, self._plan.voices))
        seconds = {"transfer": transferred - began, "commit": loop_time() - transferred}
        doubts, workless = dict[str, str](), dict[str, str]()
        for proof in (commit.double | commit.proofs).values():
            with contextlib.suppress(NotProven):
                self.audits.proofs.keep(verify(Accusation.read(proof), self.audits.rules), proof)
        if not commit.dropped:
            self._averages.committed(commit.allreduce.name.state_key, tuple(commit.precommits.values()))
            doubts, workless = self.audits.begin(commit), self._work.look(commit.allreduce.reducer)
        voted = self._votes.after(commit, self._plan.voices)
        result = outcome_of(commit, received, doubts, self.audits.proofs.guilty(), seconds)
        return replace(result, workless=workless, voted=voted)

    def _begin(
        self, group_id: bytes, joins: Mapping[PeerID, SignedJoin], weight: float, shown: Sequence[bytes] = ()
    ) -> CommitProtocol:
        """The two phases of this member's round in the group of those who joined so. weight: its samples.

        shown: votes by which members are locked. Raises FalseGroup where those that this peer showed are not there.
        """
        members = sorted(joins, key=PeerID.to_bytes)
        contribution: Contribution = self._contribution.result()
        listening = [peer for peer in members if joins[peer].listens]
        fastest = sorted(listening, key=lambda peer: -joins[peer].upload)[:MAX_REDUCERS]
        reducers = [peer for peer in listening if peer in fastest]
        spare = self.max_weight / 2 / len(members)  # of whose speed just rose the record says too little
        busy = 2 * (len(members) - 1) * PART_BYTES  # a part on every stream, before the next on one of them
        voices, state_key = self._voices(joins), joins[self.peer_id].state_key
        locks = {str(peer): join.lock for peer, join in joins.items()}
        made = self._locked_on(joins, voices, shown)
        group = RoundGroup(
            name=RoundName(self.audits.rules.run, state_key, group_id),
            me=self.peer_id,
            members=members,
            reducers=reducers,
            shares=made.shares if made else shares_of([joins[peer].upload for peer in reducers], len(members)),
            stub_of=self._stub,
            traffic=self.traffic,
            patience=self.next_chunk_timeout + self._line.seconds(busy, busy),
            longest=self._run.swarm.averaging_timeout,
            limits={
                peer: min(self.max_weight, contribution.allowed.get(peer, math.inf) + spare)
                for peer in map(str, members)
            },
            voices=voices,
            trainers=self._plan.voices or voices,
            swarm=0 if self._plan.newcomer else max(contribution.swarm, self._plan.swarm),
            steps=frozenset(str(peer) for peer, join in joins.items() if join.steps),
            attempt=1 + max(lock.attempt for lock in locks.values()),
            locked=made.average if made else b"",
            claims=frozenset(peer for peer, lock in locks.items() if made and lock.average == made.average),
        )
        aggregation, usual = self.audits.rules.aggregation, self.audits.usual
        allreduce = self.allreduce_type(group, self.signer, self.local, weight, self.store, aggregation, usual)
        said = {"samples": contribution.samples, "loss": contribution.loss}
        if not made:
            return self.commit_type(allreduce, said, keep=self._votes.keep)
        last = self._votes.from_state(state_key)
        before = last if last.average == made.average else None
        return self.commit_type(allreduce, {"samples": 0, "loss": 0.0}, before, self._votes.keep)

    def _voices(self, joins: Mapping[PeerID, SignedJoin]) -> dict[str, Fraction | int]:
        """Those of a group's members, by the passes with which they joined. Raises NotAdmitted for who has none."""
        admit = self._membership.admit
        return shared_voices({str(peer): admit(join.pass_text, str(peer)) for peer, join in joins.items()})

    @staticmethod
    def _repeated(
        joins: Mapping[PeerID, SignedJoin], voices: Mapping[str, Fraction | int], votes: Iterable[SignedVote]
    ) -> LockedAverage | None:
        """The average that a group of those who joined so repeats by these votes, None where it makes one."""
        liars = most_say({str(peer): join.lock.liars for peer, join in joins.items()}, voices)
        claimed = {join.lock.average for join in joins.values()}
        return locked_by([vote for vote in votes if vote.average in claimed], voices, liars)

    def _locked_on(
        self, joins: Mapping[PeerID, SignedJoin], voices: Mapping[str, Fraction | int], shown: Sequence[bytes]
    ) -> LockedAverage | None:
        """As `_repeated`, by the votes that were shown. Raises as `_begin`."""
        own = joins[self.peer_id]
        if max(join.lock.attempt for join in joins.values()) > self.clock.dht_time() + SKEW:
            raise FalseGroup(own.leader, "after more attempts than there can have been")
        made, mine = (
            self._repeated(joins, voices, self._read_votes(SignedVote, votes, own.state_key).values())
            for votes in (shown, self._votes.from_state(own.state_key).shown)
        )
        if mine and not (made and (made.average == mine.average or made.attempt > mine.attempt)):
            raise FalseGroup(own.leader, "without the votes that this peer has shown")
        return made

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member of the group sends its parts and takes the averages."""
        first = await asyncio.wait_for(anext(stream), self.next_chunk_timeout)
        commit = await self._rounds.find(first.group_id)
        if commit is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        async for message in commit.allreduce.rpc_aggregate_part(achain(as_aiter(first), stream), context):
            yield message

    async def rpc_roster(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """A member of a large group is told all joins, when this peer has them."""
        (group_id,), asker = wire.ROSTER_REQUEST.read(request), context.remote_id
        with self._telling.one(str(asker)):
            return wire.ROSTER.message((await self._keys().entries(group_id, asker),))

    async def rpc_settle(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """A member of the group says what it received, and is told what this peer has."""
        async with self._rounds.asked(group_of(request), context.remote_id) as commit:
            return await commit.answer(context.remote_id, request)

    async def rpc_precommit(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """A member of the group says that it has seen a quorum's votes, and is told whether this peer has."""
        group_id, signed = wire.PRECOMMITTED.read(request)
        async with self._rounds.asked(group_id, context.remote_id) as commit:
            return wire.PRECOMMITTED.message((group_id, await commit.precommit(context.remote_id, signed)))

    async def rpc_fetch_average(
        self, request: runtime_pb2.ExpertInfo, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """Parts of an average, as they travelled: of a round that is being settled, or of one of the last steps."""
        key, parts = wire.PARTS_REQUEST.read(request)
        average: AverageBuffer | None = self.store
        if isinstance(key, str):
            average, holds = self._averages.find(key), lambda: True
        elif (commit := self._rounds.get(key[:GROUP_BYTES])) is not None and context.remote_id in commit.members:
            holds = commit.holds
        else:
            return
        if average is None or not holds():
            return
        async for message in answer(average, parts, holds):
            self.traffic[0] += len(message.serialized_info)
            yield message
        await asyncio.sleep(self.next_chunk_timeout)  # the other side hangs up: see AllReduce.rpc_aggregate_part

    async def _fetch_average(
        self, donors: Sequence[str], state_key: str, plan: RoundPlan | None, future: MPFuture
    ) -> None:
        giver, fetch = None, asyncio.current_task()
        assert fetch is not None
        self._fetches.add(fetch)

        def check(average: bytes, votes: Sequence[bytes]) -> None:
            if plan is not None:
                signed = self._read_votes(Precommit, votes, state_key).values()
                plan.check_votes({vote.voter for vote in signed if vote.average == average})

        try:
            for donor in donors:
                try:
                    stub = self._stub(PeerID.from_base58(donor))
                    patience, traffic = self.next_chunk_timeout, self.traffic
                    if await fetch_parts(stub, state_key, self.store, None, patience, traffic, check):
                        giver = donor
                        break
                except Exception as error:  # a donor may fail in any way; the next one is asked
                    logger.info(f"fetching the average from {donor} failed: {error!r}")
        finally:
            self._fetches.discard(fetch)
            if not future.done():
                future.set_result(giver)

    async def _drop_fetches(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()

    def taking_may_wait(self) -> bool:
        """A state that is taken over leaves the line to an average, which the others will not keep for long."""
        return bool(self._fetches)
