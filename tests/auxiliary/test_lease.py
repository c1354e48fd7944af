"""Who leads of several auxiliary peers: one, and another one soon after that ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tt_cli.auxiliary.lease import LEASE_SECONDS, STALE_SECONDS, Lease, LeaseFile


class Peers:
    """Auxiliary peers that look at each other's records once a second, `delay` seconds old."""

    def __init__(self, names: str, delay: int, named: str = ""):
        self.leases = {name: Lease(name, named) for name in names}
        self.told: dict[str, list[tuple[float, float | None]]] = {name: [] for name in names}
        self.delay, self.now = delay, 1000.0

    def run(self, seconds: int, apart: str = "") -> None:
        """apart: those who see only each other meanwhile."""
        for _ in range(seconds):
            self.now += 1.0
            for name, lease in self.leases.items():
                lease.look(self.seen_by(name, apart), self.now)
                self.told[name].append((self.now, lease.since if lease.candidate else None))

    def seen_by(self, name: str, apart: str) -> dict[str, float | None]:
        seen = {}
        for other, told in self.told.items():
            at, since = next((one for one in reversed(told) if one[0] <= self.now - self.delay), (0.0, None))
            if (name in apart) == (other in apart) and at > self.now - LEASE_SECONDS:
                seen[other] = since
        return seen

    @property
    def leaders(self) -> list[str]:
        return [name for name, lease in self.leases.items() if lease.since]


@given(st.permutations("abcd"), st.integers(0, 3), st.integers(0, 20))
def test_one_leads_and_another_one_soon_after_its_end(names: list[str], delay: int, later: int) -> None:
    peers = Peers("".join(names[:2]), delay)
    peers.run(later)
    for name in names[2:]:
        peers.leases[name], peers.told[name] = Lease(name, ""), []
    peers.run(40)
    assert len(peers.leaders) == 1
    first = peers.leaders[0]
    assert {lease.holder for lease in peers.leases.values()} == {first}
    peers.run(100)
    assert peers.leaders == [first], "it stays with whom it is, whoever comes"

    del peers.leases[first]
    peers.run(int(LEASE_SECONDS) + 5)
    assert len(peers.leaders) == 1, "within a minute"
    assert {lease.holder for lease in peers.leases.values()} == set(peers.leaders)


@given(st.sampled_from(["a", "b", "ab", "c", "bc"]))
def test_apart_both_sides_have_a_leader_and_together_again_the_older_one_stays(apart: str) -> None:
    peers = Peers("abc", 1)
    peers.run(30)
    assert peers.leaders == ["a"]
    peers.run(60, apart=apart)
    assert len(peers.leaders) == 2, "the work is done on both sides"
    peers.run(5)
    assert peers.leaders == ["a"]


def test_only_those_whom_the_run_file_names_can_lead() -> None:
    peers = Peers("abc", 0, named="bc")
    peers.run(30)
    assert peers.leaders == ["b"]
    lease = Lease("b", "bc")
    for now in (1000.0, 1060.0):
        lease.look({"a": 1.0, "c": None}, now)
    assert lease.holder == "b", "what others claim does not count"


def test_the_other_parts_read_it_from_a_file_that_soon_says_nothing(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path)
    assert file.other() == ""
    file.write("Qm1", mine=False)
    assert file.other() == "Qm1"
    os.utime(file.path, (time.time() - STALE_SECONDS - 1,) * 2)
    assert file.other() == "", "its writer has ended"
    file.write("Qm2", mine=True)
    assert file.other() == ""
    for nonsense in ("", "{", "[]", json.dumps({"holder": 1})):
        file.path.write_text(nonsense)
        assert file.other() == ""
    file.path.unlink()
    assert not file.path.exists()
