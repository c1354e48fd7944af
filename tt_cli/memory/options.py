"""A way to train a model: what the calculator's answer depends on beside the architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tt_cli.errors import UsageError
from tt_cli.memory.architectures import Architecture
from tt_cli.memory.trainer_account import Kind

Precision = Literal["fp32", "mixed", "pure16"]
Attention = Literal["eager", "fused"]
Layers = Literal["kept", "checkpointed", "reversible"]
Optimizer = Literal["adam", "lamb", "adafactor"]
Compression = Literal["linear8", "blockwise8", "fp16", "fp32"]


@dataclass(frozen=True)
class CalculatorOptions:
    """The options. sequence: 0 for the published one. groups: distinct layers, 0 for all. bits: of the optimizer's
    state. compression: of averaged gradients; None: alone, without a swarm."""

    kind: Kind = "cuda"
    precision: Precision = "mixed"
    attention: Attention = "fused"
    layers: Layers = "kept"
    micro_batch: int = 1
    sequence: int = 0
    groups: int = 0
    tied: bool | None = None
    optimizer: Optimizer = "adam"
    bits: int = 32
    offload: bool = False
    compression: Compression | None = "linear8"

    def check(self, model: Architecture) -> None:
        """Raises UsageError for what does not exist."""
        if self.optimizer == "adafactor" and self.bits == 8:
            raise UsageError("Adafactor has no 8-bit state: it keeps rows and columns already; leave --8bit out")
        if model.family == "t5" and self.attention == "fused":
            raise UsageError("T5 adds a learned bias to its scores, which fused attention has not: --attention eager")
        if self.offload and self.kind == "cpu":
            raise UsageError("--offload moves the optimizer from a GPU to the host; with --cpu all of it is there")
        if model.positions and self.sequence > model.positions and not model.keys:
            raise UsageError(f"{model.title} has {model.positions} positions: --sequence {self.sequence} is too long")
        if self.sequence and model.keys:
            raise UsageError(f"{model.title}'s sequence is its caption and its picture: leave --sequence out")
        if self.groups > model.layers:
            raise UsageError(f"{model.title} has {model.layers} layers: --share must be 1 to {model.layers}")
