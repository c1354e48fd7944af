"""One of the known architectures as the subject of a question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tt_cli.memory.architectures import Architecture, architecture
from tt_cli.memory.calculator import Answer, flops_per_example, gradient_bytes, reckon, smallest_change
from tt_cli.memory.question import EXAMPLES, Attention, CalculatorOptions, CalculatorQuestion


@dataclass
class Known:
    """An architecture with the options that it is asked about."""

    model: Architecture
    options: CalculatorOptions
    reasons: dict[str, str]
    target: int | None

    @classmethod
    def asked(cls, question: CalculatorQuestion) -> Known:
        """Choose what the question leaves open. Raises UsageError."""
        model, gpu = architecture(question.model), question.kind == "cuda"
        precision = question.precision or ("mixed" if gpu else "fp32")
        attention: Attention = "eager" if model.family == "t5" else "fused"
        scores = "T5's learned bias needs the scores" if model.family == "t5" else "what torch does where it can"
        halves = precision == "pure16" and not question.offload
        state = "16 bits: torch keeps it as the weights" if halves else "32 bits: the usual one"
        choices = (
            ("precision", question.precision, f"{precision}: usual on a {'GPU' if gpu else 'CPU'}"),
            ("attention", question.attention, f"{attention}: {scores}"),
            ("sequence", question.sequence, f"{model.sequence}: as published"),
            ("optimizer", question.optimizer, "adam: the usual one"),
            ("state", question.bits, state),
            ("compression", question.compression or question.alone or None, "linear8: what runs of tt start with"),
        )
        options = CalculatorOptions(
            kind=question.kind,
            precision=precision,
            attention=question.attention or attention,
            layers=question.layers or "kept",
            sequence=question.sequence or 0,
            groups=question.share or 0,
            tied=False if question.untied else None,
            optimizer=question.optimizer or "adam",
            bits=question.bits or (16 if halves else 32),
            offload=question.offload,
            compression=None if question.alone else question.compression or "linear8",
        )
        options.check(model)
        reasons = {name: reason for name, given, reason in choices if given is None}
        return cls(model, options, reasons, question.examples)

    @property
    def title(self) -> str:
        """The name for people."""
        return self.model.title

    def answer(self, micro_batch: int) -> Answer:
        """The account with so many examples at a time."""
        return reckon(self.model, replace(self.options, micro_batch=micro_batch))

    def change(self, micro_batch: int, room: int) -> list[str] | None:
        """The smallest change that makes it fit; None where none does."""
        change = smallest_change(self.model, replace(self.options, micro_batch=micro_batch), room)
        return None if change is None else change[0]

    def compared(self) -> list[tuple[str, Known]]:
        """One technique at a time, then those that cost no precision together."""
        plain = replace(self.options, bits=32, layers="kept", offload=False, groups=0, optimizer="adam")
        together: dict[str, Any] = {"bits": 8, "layers": "checkpointed"}
        techniques: dict[str, dict[str, Any]] = {
            "32-bit Adam": {},
            **({} if self.model.family == "t5" else {"eager attention": {"attention": "eager"}}),
            "8-bit Adam": {"bits": 8},
            "Adafactor": {"optimizer": "adafactor"},
            "gradient checkpointing": {"layers": "checkpointed"},
            "reversible layers": {"layers": "reversible"},
            "layers shared in 4 groups": {"groups": min(4, self.model.layers)},
        }
        if plain.kind == "cpu":
            techniques["8-bit, checkpointing"] = together
        else:
            techniques["offloaded optimizer"] = {"offload": True}
            techniques["8-bit, checkpointing, offload"] = together | {"offload": True}
        others = ((name, replace(self, options=replace(plain, **change))) for name, change in techniques.items())
        return [("as asked", self), *others]

    def gradient_bytes(self, peers: int) -> int:
        """One gradient as it travels, as the average of so many; 0 without a swarm."""
        return gradient_bytes(self.model, self.options)

    def flops(self) -> int:
        """Floating-point operations of one example."""
        return flops_per_example(self.model, self.options)

    def examples(self) -> tuple[int, str]:
        """Examples of a global step, and why so many."""
        return (self.target, "as asked") if self.target else (EXAMPLES, f"{EXAMPLES}: --examples was not given")

    def described(self) -> dict[str, Any]:
        """Its settings, for people and for --json."""
        options = self.options
        tied = self.model.tied if options.tied is None else options.tied
        return {
            "precision": options.precision,
            "optimizer": options.optimizer,
            "state_bits": options.bits,
            "offload": options.offload,
            "layers": options.layers,
            "shared_groups": options.groups or None,
            "tied_embeddings": tied,
            "attention": options.attention,
            "sequence": options.sequence or self.model.sequence,
            "compression": options.compression,
        }
