"""Publishing this peer's record, reading everybody's, and what follows from them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hivemind.dht import DHT, DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, get_dht_time, get_logger
from hivemind.utils.timed_storage import ValueWithExpiration
from pydantic import ValidationError

from tt_cli.identity.passes import CLOCK_LEEWAY, era_of
from tt_cli.run import RunConfig
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.membership.admission import Admission, NotAdmitted, admits, membership_at
from tt_cli.swarm.membership.control_notices import LIFE_SECONDS, ControlNotices, notice_key
from tt_cli.swarm.membership.rsa_identity import Identity, owners_of, peer_id_of
from tt_cli.swarm.records.claim_limits import ClaimLimits, boasting
from tt_cli.swarm.records.consensus import STEPS_APART, SwarmState, Vote, voters_among
from tt_cli.swarm.records.dht_protocol import MOST_READ
from tt_cli.swarm.records.peer_record import RENEW_SECONDS, HistoryRecord, PeerRecord, history_key, peers_key

__all__ = ["PeerDirectory", "SwarmState", "read_history", "read_records"]

logger = get_logger(__name__)

QUICK_SECONDS, CALM_SECONDS = 0.4, 3.0
LONG_ROUND_SECONDS, IN_ROUND_SECONDS = 3.0, 2.5  # without a word of what to expect: then a look every so often
NEAR_SECONDS = 1.0  # pace when a step is a few seconds off: then all new samples are told
SILENT_RENEWALS = 2.5  # without a word for so long who votes has no voice: it may hang, or have ended
TOUCH_SECONDS, MOST_PINGED = 15.0, 32
DHT_SECONDS, HISTORY_SECONDS = 10.0, 600.0  # for an answer; on the DHT
TICK = 0.002  # seconds between two records at least: their milliseconds tell them apart
LIVES = 2  # times `statistics_expiration`: for so long after it was sent a record counts at most
TELL_SECONDS = 60.0

Tell = Callable[[BaseException], None]


def lives_of(run: RunConfig) -> dict[bytes, float]:
    """For how many seconds from now a node takes a record, by the DHT's key.

    Run files may differ here: what readers find wrong would cost them all else in an answer, so they look at its time.
    """
    lives = {peers_key: LIVES * run.swarm.statistics_expiration, history_key: HISTORY_SECONDS, notice_key: LIFE_SECONDS}
    return {DHTID.generate(key(run.identity)).to_bytes(): life + CLOCK_LEEWAY for key, life in lives.items()}


# What a record says for screens alone, or of when it was written: nobody needs to know at once.
SHOWN = {"samples", "samples_per_second", "total_samples", "loss", "figures", "inner_steps", "time"}
SHOWN |= {"bytes_sent", "bytes_received", "sent_per_hour", "received_per_hour"}
NEEDED = PeerRecord.model_fields.keys() - SHOWN


def read_records(dht: DHT, run: RunConfig, now: float | None = None) -> list[PeerRecord]:
    """Everybody's newest valid record. Empty when the DHT does not answer in time. now: DHT time."""
    with contextlib.suppress(TimeoutError):
        return _read(dht, run, get_dht_time() if now is None else now)[0]
    return []


def _read(dht: DHT, run: RunConfig, now: float, latest: bool = True) -> tuple[list[PeerRecord], frozenset[str]]:
    """The records, and the peer ids of those that claim a step which the run does not have. latest: see `DHTNode`."""
    newest: dict[str, PeerRecord] = {}
    for record in _parse(_entries(dht, peers_key(run.identity), latest), run, membership_at(dht), now):
        known = newest.setdefault(record.peer_id, record)  # one key can sign under more than one subkey
        newest[record.peer_id] = max(known, record, key=lambda one: one.time)
    possible = [record for record in newest.values() if record.epoch <= run.schedule.total_steps]
    return possible, frozenset(newest) - {record.peer_id for record in possible}


def _entries(dht: DHT, key: str, latest: bool = True) -> dict[Any, Any]:
    """Subkey → value of all records under a key. Raises TimeoutError when the DHT does not answer in time."""
    found = dht.get(key, latest=latest, return_future=True).result(timeout=DHT_SECONDS)
    if isinstance(found, ValueWithExpiration) and isinstance(found.value, dict):
        return {subkey: getattr(entry, "value", None) for subkey, entry in found.value.items()}
    return {}


def _parse(entries: Mapping[Any, Any], run: RunConfig, membership: Admission, now: float) -> Iterator[PeerRecord]:
    for subkey, value in entries.items():
        try:
            record = PeerRecord.model_validate(value)
            if [record.peer_id] != [peer_id_of(owner) for owner in owners_of(subkey)]:
                continue
            life = LIVES * run.swarm.statistics_expiration
            if not -CLOCK_LEEWAY <= now - record.time <= life + CLOCK_LEEWAY:
                continue  # however long its owner lets it lie on the DHT
            if record.era != era_of(membership.notice()):
                continue  # the organiser has taken the run back since, or this peer has not heard of it yet
            # its pass knows better than itself; in an open run there are none
            user = membership.admit(record.pass_text, record.peer_id)
            yield record.changed(**{"user": user[:80]} if user else {"pass_text": ""})
        except NotAdmitted as error:
            logger.info(f"ignored the record of {record.peer_id}: {error}")
        except ValueError as error:
            logger.warning(f"ignored a malformed record of run {run.identity}: {error}")


def read_history(dht: DHT, run: RunConfig) -> HistoryRecord | None:
    """The longest history that an auxiliary peer published."""
    histories, found = [], dict[Any, Any]()
    with contextlib.suppress(TimeoutError):
        found = _entries(dht, history_key(run.identity))
    for value in found.values():
        with contextlib.suppress(ValidationError, NotAdmitted):
            history = HistoryRecord.model_validate(value)
            membership_at(dht).admit(history.pass_text, history.peer_id)
            if all(epoch <= run.schedule.total_steps for epoch, _, _ in history.steps):
                histories.append(history)
    return max(histories, key=lambda history: len(history.steps), default=None)


def hear_notice(dht: DHT, run: RunConfig) -> None:
    """Take up the organiser's newest notice from the DHT: records count that are of the era which it began."""
    if run.membership.authority_key is not None:
        with contextlib.suppress(TimeoutError):
            for text in _entries(dht, notice_key(run.identity)).values():
                membership_at(dht).hear(text)


async def keep_in_touch(dht: DHT, node: DHTNode, peers: Sequence[str]) -> None:
    """In the DHT's process: ping those that dropped out, so that who answers is in the routing table, and not avoided.

    And this node's initial peers: one of them that ended and began anew knows nobody, and nobody asks it.
    """

    async def ping(peer: PeerID) -> None:
        if await node.protocol.call_ping(peer) is not None:
            node.blacklist.register_success(peer)

    table = node.protocol.routing_table
    lost = [peer for peer in map(PeerID.from_base58, peers) if peer not in table or peer in node.blacklist]
    await asyncio.gather(*map(ping, dict.fromkeys([*lost[:MOST_PINGED], *table.initial])))


def too_unlike(unexpected: float, missing: float, members: int) -> bool:
    """Tell whether a peer has to tell its samples. unexpected: how many more or fewer than the others expect of it.

    missing: for a step, as they expect. Each keeps a third of its share of that to itself at most. So more than two
    thirds of it are missing in truth; what comes beyond begins nothing.
    """
    return 3 * unexpected * members >= missing > 0


class PeerDirectory:
    """Keeps this peer's record on the DHT and the view of the others fresh, in the background.

    A record expires `statistics_expiration` seconds after its last renewal; it is renewed every third of that, at once
    when the epoch is new, and after `pace` seconds when something else is that others need: see `_is_needed`. tell:
    gets what goes wrong with the DHT.
    """

    def __init__(
        self, run: RunConfig, dht: DHT, identity: Identity, tell: Tell = lambda error: None, clock: Clock | None = None
    ):
        self._clock = clock or Clock()
        self._threads = list[threading.Thread]()
        self._tell, self._told = tell, -float("inf")
        self._run, self._dht = run, dht
        self._owner, self._peer_id = RSASignatureValidator(identity.key).local_public_key, identity.peer_id
        self._lock = self._clock.condition()
        self._record: PeerRecord | None = None
        self._published: PeerRecord | None = None
        self._sent: PeerRecord | None = None  # what the others were sent last, and had
        self._published_at = self._read_all_at = -float("inf")
        self._history: tuple[object, float] = None, -float("inf")  # the steps that were sent last, and when
        self.view = SwarmState.of(())  # the swarm as of the last read, a few seconds old at most
        self._reads_begun = self._reads_ended = 0
        self._answered = False  # the last read
        self.blind = True  # the last fresh view was none: this peer's DHT node did not answer
        self.read_at = self._clock.monotonic()  # the last read ended
        self._stopping = self._writing = self._kept = self._look_due = False  # kept: what was published, by some node
        self._urgent = self._wanted = False  # urgent: the record is to be stored; wanted: a fresh view
        self._known: dict[str, tuple[PeerRecord, float]] = {}  # by peer id, with the time until which it counts
        self._heard: dict[str, float] = {}  # trainers, with the time until which they count as part of the swarm
        self._behind: dict[str, float] = {}  # trainers, with the DHT time since when they seem to be
        self._parted: set[str] = set()
        self._refused: set[str] = set()  # whose passes do not count any more
        self._pinged = self._clock.monotonic()
        self._membership = membership_at(dht)
        self._notices = ControlNotices(run, dht, self._clock)
        self.era, self._before = 0, list[PeerRecord]()  # of the order that came last; who voted then
        self._claims = ClaimLimits(self._clock.monotonic)
        self._life = run.swarm.statistics_expiration
        self._renewal = min(RENEW_SECONDS, self._life / 3)
        self._vote = Vote(self._life, SILENT_RENEWALS * self._renewal, self._clock.boottime)
        self.pace, self._expected_at = QUICK_SECONDS, self._clock.monotonic()

    def expect(self, seconds: float) -> None:
        """Nothing needs this peer's attention for so long: look and publish less often, but be back in time.

        Said all the time but in rounds: in a long one looks are rarer, and the first word after it brings one.
        """
        with self._lock:
            before, self._expected_at = self._pause(), self._clock.monotonic()
            self.pace = min(CALM_SECONDS, max(QUICK_SECONDS, seconds / 3))
            if self.pace < before:
                self._lock.notify_all()

    def _pause(self) -> float:
        """Seconds between two looks, as things are."""
        long = self._clock.monotonic() > self._expected_at + LONG_ROUND_SECONDS
        return max(self.pace, IN_ROUND_SECONDS) if long else self.pace

    def _is_time(self) -> bool:
        """Tell whether to look. With the lock."""
        due = self._clock.monotonic() >= self.read_at + self._pause()
        return due or self._look_due or self._wanted or self._stopping

    def publish(self, record: PeerRecord) -> None:
        """Make this the peer's record: sent when it is due, at once when its state is new or its samples end a wait."""
        with self._lock:
            record = record.changed(vote=self._vote.of(record))
            previous, self._record = self._record, record
            told = self._published.samples if self._published is not None else 0
            if previous is None or previous.state != record.state or record.samples - told >= self._missing(told) > 0:
                self._urgent = True
                self._lock.notify_all()

    def renew(self) -> None:
        """Publish the record at once, new or not: who missed this peer in a round sees that it lives."""
        with self._lock:
            self._urgent = True
            self._lock.notify_all()

    def stepped(self, epoch: int, digest: str) -> None:
        """This peer made a step, with others or as the only one, and holds this state now."""
        with self._lock:
            self._vote.stepped(epoch, digest)

    def publish_history(self, history: HistoryRecord) -> None:
        """Replace this auxiliary peer's history (kept ten minutes), where it is another or was sent long ago."""
        now, (steps, sent_at) = self._clock.monotonic(), self._history
        if history.steps == steps and now < sent_at + HISTORY_SECONDS / 3:
            return
        self._history = history.steps, now
        mine = {"peer_id": self._peer_id, "time": self._clock.dht_time()}
        self._put(history_key, history.model_copy(update=mine), HISTORY_SECONDS)

    @property
    def told(self) -> PeerRecord | None:
        """The record that the others were sent last, and had; with no more samples and speed than they believe."""
        if (sent := self._sent) is None:
            return None
        samples, speed = min(sent.samples, self._claims.most), min(sent.samples_per_second, self._claims.speed)
        return sent.changed(samples=int(samples), samples_per_second=speed)

    def trainers(self) -> frozenset[str]:
        """Peer ids of all trainers of which this peer heard lately, not more than a step from what most hold.

        They count for as long again as their records do: a DHT that loses sight of half a swarm must not make the other
        half think that it is the whole. Who said goodbye does not count.
        """
        return frozenset(self._heard)

    def parted(self) -> frozenset[str]:
        """Peer ids of those who said goodbye and have not come back."""
        return frozenset(self._parted)

    def met(self, peer_ids: Iterable[str]) -> None:
        """These were in a round with this peer."""
        until = self._clock.monotonic() + self._life
        with self._lock:
            self._claims.met(peer_ids)
            self._heard = self._heard | dict.fromkeys(peer_ids, until)  # never changed: others read it without the lock

    def fresh_view(self) -> SwarmState:
        """The swarm as of a read of all nodes, begun after this call; the last one known when none ends in time."""
        with self._lock:
            self._wanted = True
            self._lock.notify_all()
            wanted = self._reads_begun + 1
            ended = self._lock.wait_for(lambda: self._reads_ended >= wanted or self._stopping, DHT_SECONDS)
            self.blind = not (ended and self._answered)
            return self.view

    def start(self) -> None:
        """Begin to publish and to look: side by side, so that one that takes long does not hold up the other."""
        self._threads = [self._clock.thread(self._write, "board writer"), self._clock.thread(self._look, "board")]

    def _write(self) -> None:
        while not self._stopping:
            with self._lock:
                self._lock.wait_for(lambda: self._stopping or self._is_due(), self._pause())
                record, self._writing = self._record, self._is_due()
                urgent, self._urgent = self._urgent, False
            if record is None or not self._writing or self._stopping:
                continue
            with self._failures_told():
                self._store(record)
            with self._lock:
                self._published_at, self._writing = self._clock.monotonic(), False
                self._look_due |= urgent
                self._lock.notify_all()

    def _look(self) -> None:
        while not self._stopping:
            with self._lock:
                # A node that lacks this peer's newest word seems to be behind, and others are asked, too. Of two peers
                # that start together one at least is to see the other: the first look comes after the first word.
                most = QUICK_SECONDS if self._reads_ended else DHT_SECONDS
                self._lock.wait_for(lambda: not (self._writing or self._is_due()) or self._stopping, most)
                latest, self._wanted, self._look_due = self._wanted, False, False
                self._reads_begun += 1
                if latest:
                    self._read_all_at = self._clock.monotonic()
            read, claiming, answered = list[PeerRecord](), frozenset[str](), False
            with self._failures_told():
                read, claiming = _read(self._dht, self._run, self._clock.dht_time(), latest)
                answered = True
            records = self._remember(read)
            with self._lock:
                view = SwarmState.of(self._claims.bounded(records, self._peer_id), self._absent())
            boasters = boasting(records, self._run.swarm.target_batch_size)
            view = replace(view, claiming=claiming, boasting=boasters)
            self._count_trainers(view)
            with self._failures_told():
                self._keep_in_touch()
                self._notices.look()
            with self._lock:
                self.view, self._reads_ended, self.read_at = view, self._reads_begun, self._clock.monotonic()
                self._answered = answered
                self._lock.notify_all()
                rest = max(0.0, self._read_all_at + QUICK_SECONDS - self._clock.monotonic())
                self._lock.wait_for(lambda: self._look_due or self._stopping, rest)
                self._lock.wait_for(self._is_time, max(0.0, self._pause() - rest))

    def _is_due(self) -> bool:
        """Tell whether this peer's record is to be published now. With the lock."""
        age = self._clock.monotonic() - self._published_at
        return self._record is not None and (
            self._urgent or age >= self._renewal or (age >= self.pace and self._is_needed())
        )

    def _is_needed(self) -> bool:
        """Tell whether others need what is new in the record."""
        new, old = self._record, self._published
        if new is None or old is None or new is old or not self._kept:
            return new is not None and not self._kept
        speed, told = new.samples_per_second, old.samples_per_second
        changed = abs(speed - told) > told / 4 or any(getattr(new, name) != getattr(old, name) for name in NEEDED)
        missing, untold = self._missing(old.samples), new.samples - old.samples
        near = self.pace < NEAR_SECONDS and untold != 0 and missing > 0
        expected = old.untold(self._clock.monotonic() - self._published_at)
        left, members = missing - expected - self.untold(), len(self._others()) + 1
        return changed or near or too_unlike(abs(untold - expected), left, members)

    def _others(self) -> list[PeerRecord]:
        """All other members that hold the state of this peer's record."""
        own = self._record
        return [r for r in self.view.members(*own.state) if r.peer_id != own.peer_id] if own is not None else []

    def _missing(self, told: int) -> int:
        """Samples that a step lacks, as all have told. told: what this peer did."""
        return self._run.swarm.target_batch_size - told - sum(record.samples for record in self._others())

    def untold(self) -> float:
        """Samples that the others at this peer's state have computed since they told theirs, as their speeds say."""
        latest = self._clock.monotonic() + self._life
        ends = ((record, self._known.get(record.peer_id, (record, latest))[1]) for record in self._others())
        return sum(record.untold(latest - until) for record, until in ends)

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Report failures of the DHT now and then, and try again: without this thread a peer is blind."""
        try:
            yield
        except Exception as error:  # whatever its process raised, or the pipe to it
            logger.warning(f"the DHT failed: {error!r}")
            if self._clock.monotonic() > self._told + TELL_SECONDS and not self._stopping:
                self._told = self._clock.monotonic()
                self._tell(error)

    def _remember(self, read: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Records that count now: what was read, what was read before and has not expired, and this peer's own.

        A look-up that fails must not make the others seem gone: a peer that thinks it is alone would step alone.
        """
        now = self._clock.monotonic()
        for record in read:
            known = self._known.get(record.peer_id)
            if record.time > known[0].time if known else len(self._known) < MOST_READ:
                self._known[record.peer_id] = (record, now + self._life)
        era = era_of(self._membership.notice())
        counting = {peer: known for peer, known in self._known.items() if known[1] > now and known[0].era == era}
        passes = {peer_id: record.pass_text for peer_id, (record, _) in counting.items()}
        self._refused = {peer_id for peer_id, text in passes.items() if not admits(self._membership, text, peer_id)}
        self._known = {peer_id: known for peer_id, known in counting.items() if peer_id not in self._refused}
        with self._lock:
            own = self._record
        others = [record for record in self._voicing(now) if own is None or record.peer_id != own.peer_id]
        text = self._membership.mine()
        mine = [own.changed(pass_text=text)] if own is not None and own.era == era else []
        return mine + [record for record in others if not record.left]

    def _voicing(self, now: float) -> list[PeerRecord]:
        """The records that count; who was silent for long votes no more, unless most were: then it is the line.

        Of those who ended or hang, each at its own step, the last word would hold the middle back, and decide alone.
        """
        since = now + self._life - SILENT_RENEWALS * self._renewal
        voters = [record.peer_id for record, _ in self._known.values() if record.vote]
        silent = {peer for peer in voters if self._known[peer][1] < since}
        if 2 * len(silent) > len(voters):
            silent = set()
        return [r.changed(vote=False) if r.peer_id in silent else r for r, _ in self._known.values()]

    def _absent(self) -> list[PeerRecord]:
        """After an order to go back: votes of those who voted until then, for as long as they count though not seen.

        Nobody votes before its first step from there: one who lies would decide alone, and could undo the order.
        """
        notice = self._membership.notice()
        if notice is not None and (to := notice.rollback) is not None and to.order != self.era:
            before, self.era = self._before or voters_among(self.view.records), to.order
            self._before = [record.changed(epoch=to.step, digest=to.digest, vote=True) for record in before]
        heard = {peer for peer in self._heard if not self._membership.is_banned(peer)} | {self._peer_id}
        self._before = [record for record in self._before if record.peer_id in heard]
        return self._before

    def _count_trainers(self, view: SwarmState) -> None:
        """Count who is seen until its record has expired, and for as long again, whenever the next look ends."""
        now = self._clock.monotonic()
        ends = {record.peer_id: until for record, until in self._known.values()}
        here = {record.peer_id for record in view.trainers()}
        ahead = {r.peer_id for r in view.records if r.averages and not r.client_mode and r.epoch > view.epoch}
        # who is far ahead is not gone: the records of the dead may hold the middle back
        seen = here | ahead | self._late(view)
        gone = {record.peer_id for record, _ in self._known.values() if record.left or record.peer_id not in seen}
        gone |= self._refused
        with self._lock:
            left = {record.peer_id for record, _ in self._known.values() if record.left}
            parted = self._parted if len(self._parted) < MOST_READ else set[str]()
            self._parted = parted - {record.peer_id for record in view.records} | left
            heard = self._heard | {peer: ends.get(peer, now) + self._life for peer in here}
            self._heard = {peer: until for peer, until in heard.items() if until > now and peer not in gone}

    def _late(self, view: SwarmState) -> set[str]:
        """Those who seem behind and may not be: their word is older than that, as where a line is slow or was cut."""
        now, silence = self._clock.dht_time(), SILENT_RENEWALS * self._renewal
        behind = {r.peer_id: r.time for r in view.records if r.averages and r.epoch < view.epoch - STEPS_APART}
        self._behind = {peer: self._behind.get(peer, now) for peer in behind if peer in self._heard}
        return {peer for peer, since in self._behind.items() if behind[peer] <= since and now < since + silence}

    def _keep_in_touch(self) -> None:
        """Ping the other trainers now and then: who answered late once may have dropped out of the DHT's tables.

        Gradients fill slow lines for minutes, and the DHT's messages wait behind them.
        """
        if self._clock.monotonic() < self._pinged + TOUCH_SECONDS:
            return
        self._pinged = self._clock.monotonic()
        unreachable = {self._peer_id} | {record.peer_id for record in self.view.records if record.client_mode}
        peers = sorted(self.trainers() - unreachable)
        self._dht.run_coroutine(partial(keep_in_touch, peers=peers), return_future=True)

    def _store(self, record: PeerRecord) -> None:
        with self._lock:
            self._vote.about_to_store()
            self._published, self._kept = record, False
            sent = record.changed(vote=self._vote.of(record), time=self._time())
        if self._send(sent).result(timeout=DHT_SECONDS):
            with self._lock:
                self._vote.stored()
                self._sent, self._kept = sent, True

    def _time(self) -> float:
        """DHT time for a record; after the clock was set back that of the last one, which nodes would keep instead."""
        now, last = self._clock.dht_time(), self._sent.time if self._sent is not None else 0.0
        return max(now, last + TICK) if last < now + self._life + CLOCK_LEEWAY else now

    def _send(self, record: PeerRecord) -> MPFuture[bool]:
        return self._put(peers_key, record, self._life)

    def _put(self, key: Callable[[str], str], record: PeerRecord | HistoryRecord, seconds: float) -> MPFuture[bool]:
        """Onto the DHT for so long, signed, with this peer's pass."""
        value = record.model_copy(update={"pass_text": self._membership.mine()}).model_dump()
        place, until = key(self._run.identity), record.time + seconds
        return self._dht.store(place, subkey=self._owner, value=value, expiration_time=until, return_future=True)

    def stop(self) -> None:
        """Withdraw the record, so that the others do not wait for this peer, and end the thread."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(timeout=2.0)
        if not self._threads or self._record is None or not self._dht.is_alive():
            return
        gone = self._send(self._record.changed(left=True, time=self._time()))
        with contextlib.suppress(TimeoutError):
            gone.result(timeout=1.0)
