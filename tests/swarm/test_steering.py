"""What a peer makes of the organiser's notices."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.utils.timed_storage import ValueWithExpiration
from peer.states import trained
from swarm.made import SteppedClock, record
from swarm.test_takeover import publisher, take_over
from testbed.passes import Issuer

from tt_cli.identity.passes import Notice, RollBack, era_of
from tt_cli.run import load_run
from tt_cli.supervisor.events import Event, Log, Synchronised
from tt_cli.swarm.membership.control_notices import EVERY_SECONDS, LIFE_SECONDS, ControlNotices
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.records.publisher import SwarmState

NOBODY: frozenset[str] = frozenset()


class Hears:
    """A membership that knows one notice."""

    def __init__(self, rollback: RollBack | None = None, paused: str = "") -> None:
        self.newest: Notice | None = Notice("run", 1, 0.0, NOBODY, NOBODY, paused, rollback)

    def notice(self) -> Notice | None:
        return self.newest


def back_to(step: int, order: int = 1, digest: str = "aa") -> RollBack:
    return RollBack(step=step, digest=digest, source="somewhere", order=order)


def test_an_order_is_due_until_it_is_carried_out_also_after_a_restart(tmp_path: Path) -> None:
    hears: Any = Hears(back_to(5))
    steering = OrganiserOrders(hears, tmp_path / "trainer.era")
    assert (steering.era, steering.due) == (0, back_to(5))
    steering.done(back_to(5))
    assert (steering.era, steering.due) == (1, None)
    again = OrganiserOrders(hears, tmp_path / "trainer.era")
    assert (again.era, again.due) == (1, None)
    hears.newest = Hears(back_to(3, order=2)).newest
    assert again.due == back_to(3, order=2)
    assert (tmp_path / "trainer.era").stat().st_mode & 0o777 == 0o600


def test_who_begins_again_from_before_the_state_of_an_order_goes_there_once_more(tmp_path: Path) -> None:
    hears: Any = Hears(back_to(5))
    steering = OrganiserOrders(hears, tmp_path / "trainer.era")
    steering.done(back_to(5))
    for epoch, due in ((5, None), (7, None), (4, back_to(5))):
        again = OrganiserOrders(hears, tmp_path / "trainer.era")
        again.begin(epoch)
        assert (again.era, again.due) == (int(due is None), due)


@pytest.mark.parametrize("content", [b"", b"five\n", b"-3", b"\xff\xfe", b"9" * 100_000])
def test_a_damaged_note_of_the_era_breaks_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trainer.era").write_bytes(content)
    hears: Any = Hears(back_to(5))
    assert OrganiserOrders(hears, tmp_path / "trainer.era").era >= 0


def test_without_orders_there_is_nothing_to_do(tmp_path: Path) -> None:
    hears: Any = Hears()
    steering = OrganiserOrders(hears, tmp_path / "trainer.era")
    assert (steering.paused, steering.due, era_of(hears.notice())) == ("", None, 0)
    hears.newest = None
    assert (steering.paused, steering.due, era_of(None)) == ("", None, 0)
    hears.newest = Hears(paused="new data").newest
    assert steering.paused == "the organiser paused the run: new data"


def test_a_peer_goes_back_to_the_checkpoint_that_is_ordered_and_to_no_other() -> None:
    said: list[Event] = []
    mine, then, other = trained(steps=4), trained(steps=2), trained(seed=1, steps=2)
    order = back_to(2, digest=then.digest)
    taking = take_over(mine, None, said)
    taking._ways_back = lambda wanted: [publisher(other), publisher(then)] if wanted == order else []
    assert taking.go_back(order, SwarmState.of([]))
    assert (mine.epoch, mine.digest) == (2, then.digest)
    assert [event.epoch for event in said if isinstance(event, Synchronised)] == [2]
    assert any("not what is needed" in event.message for event in said if isinstance(event, Log))


def test_a_peer_without_the_checkpoint_waits_for_one_who_has_it() -> None:
    said: list[Event] = []
    mine = trained(steps=4)
    taking, order = take_over(mine, None, said), back_to(2)
    assert not taking.go_back(order, SwarmState.of([]))
    assert not said  # nobody has it yet: nothing failed
    assert not taking.go_back(order, SwarmState.of([record("a", epoch=2, digest="aa")]))
    assert mine.epoch == 4


def test_a_notice_is_passed_on_before_it_would_be_gone_and_not_at_each_look() -> None:
    hears: Any = Hears()
    hears.notice_text, hears.hear = lambda: "signed", lambda text: False
    stored: list[float] = []
    clock, run = SteppedClock(), Issuer().closed(load_run("emoji"))

    def found(key: str, **_: object) -> SimpleNamespace:
        kept = {0: ValueWithExpiration("an earlier one", math.inf), 2: ValueWithExpiration(5, math.inf)}
        kept |= {1: ValueWithExpiration("signed", stored[-1])} if stored else {}
        return SimpleNamespace(done=lambda: True, result=lambda: ValueWithExpiration(kept, 0.0))

    def store(key: str, *, expiration_time: float, **_: object) -> None:
        stored.append(expiration_time)

    notices = ControlNotices(run, SimpleNamespace(membership=hears, get=found, store=store), clock)  # type: ignore[arg-type]
    for _ in range(int(2 * LIFE_SECONDS / EVERY_SECONDS)):
        notices.look()
        clock.now += EVERY_SECONDS + 1.0
    assert 3 <= len(stored) <= 5 and all(later - before > LIFE_SECONDS / 2 for before, later in pairwise(stored))
