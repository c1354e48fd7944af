"""What a peer makes of the organiser's notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peer.states import trained
from swarm.made import record
from swarm.test_takeover import publisher, take_over

from tt_cli.identity.passes import Notice, RollBack, era_of
from tt_cli.supervisor.events import Event, Log, Synchronised
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
