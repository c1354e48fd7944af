"""Orders of the organiser's newest notice to a peer: to pause, and to go back to an earlier state.

Every order to go back begins a new **era** of the run, which has the order's number; before the first it is 0. Peers
publish in which era their state is, and records of other eras do not count: what happened in the swarm after the step
to which it went back is as if it had not been, for those who missed the order too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.identity.passes import RollBack, era_of
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.shared_state import StateLoader


class OrganiserOrders:
    """Follows the notices. file: keeps the era of this peer's state over restarts.

    ways_back: places where the state of an order may be found. leave: called before the new era counts, once more where
    the process ended in between: what was kept of later steps must not count any more.
    """

    def __init__(
        self,
        membership: Admission,
        file: Path,
        ways_back: Callable[[RollBack], Iterable[StateLoader]] = lambda order: (),
        leave: Callable[[RollBack], None] = lambda order: None,
    ):
        self._membership, self._file, self.ways_back, self._leave = membership, file, ways_back, leave
        self.era = 0
        with contextlib.suppress(OSError, ValueError):
            self.era = max(0, int(file.read_text(encoding="ascii")))

    @property
    def paused(self) -> str:
        """Words about why the organiser has paused the run, "" while it goes on."""
        notice = self._membership.notice()
        return f"the organiser paused the run: {notice.paused}" if notice is not None and notice.paused else ""

    @property
    def due(self) -> RollBack | None:
        """The order that this peer has not carried out yet."""
        notice = self._membership.notice()
        return notice.rollback if notice is not None and era_of(notice) > self.era else None

    def begin(self, epoch: int) -> None:
        """This peer begins with a state of this step: one of before the order's, as of an old backup, is of no era."""
        notice = self._membership.notice()
        if notice is not None and (order := notice.rollback) is not None and epoch < order.step:
            self.era = 0

    def done(self, order: RollBack) -> None:
        """This peer's state is of that order's era. Raises OSError, and what `leave` raises."""
        self._leave(order)
        atomic_write(self._file, f"{order.order}\n".encode(), mode=PRIVATE)
        self.era = order.order
