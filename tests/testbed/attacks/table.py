"""All attacks by name, in the order of the table."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.attacks.intruder import INTRUDERS
from testbed.attacks.member import MEMBERS
from testbed.attacks.stranger import STRANGERS

MEMBER, INTRUDER, STRANGER = (f"testbed.{module}" for module in ("peer", "attacks.intruder", "attacks.stranger"))
TARGETS = {"sign flip x1": 1.05, "steady bias": 1.05}  # of the honest loss against no attack; others: TARGET
TARGET = 1.02
OVERWRITTEN = "overwritten donor record"


@dataclass(frozen=True)
class Attack:
    """One row. module: the attackers' process. newcomer: an honest peer joins in the middle, who needs a state."""

    name: str
    module: str
    newcomer: bool = False

    @property
    def target(self) -> float:
        """The honest loss may be so many times that without an attack."""
        return TARGETS.get(self.name, TARGET)

    @property
    def by_member(self) -> bool:
        """The attackers are members of the run, at least until they are found out; else the run is closed to them."""
        return self.module == MEMBER


ATTACKS: dict[str, Attack] = {
    name: Attack(name, module, newcomer="donor" in name)
    for module, names in (
        (STRANGER, [name for name in STRANGERS if name != OVERWRITTEN]),
        (INTRUDER, INTRUDERS),
        (MEMBER, MEMBERS),
        (STRANGER, [OVERWRITTEN]),
    )
    for name in names
}
