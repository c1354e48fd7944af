"""The optimizer of a run: LAMB with 8-bit moments on the CPU, and the learning-rate schedule."""

from tt_cli.optim.kernels import implementation, warm_up
from tt_cli.optim.lamb import Lamb8bit, NonFiniteGradient, NonFiniteState, StepReport
from tt_cli.optim.schedule import learning_rate

__all__ = [
    "Lamb8bit",
    "NonFiniteGradient",
    "NonFiniteState",
    "StepReport",
    "implementation",
    "learning_rate",
    "warm_up",
]
