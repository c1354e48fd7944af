"""One of the known architectures as the subject of a question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tt_cli.memory.architectures import Architecture, architecture
from tt_cli.memory.calculator import (
    Answer,
    CalculatorOptions,
    flops_per_example,
    network_bytes,
    reckon,
    smallest_change,
)
from tt_cli.memory.question import EXAMPLES, CalculatorQuestion, Subject


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
        model, kind = architecture(question.model), question.kind
        reasons: dict[str, str] = {}
        precision, attention, bits = question.precision, question.attention, question.bits
        if precision is None:
            precision = "mixed" if kind == "cuda" else "fp32"
            reasons["precision"] = "mixed: usual on a GPU" if kind == "cuda" else "fp32: usual on a CPU"
        if attention is None:
            attention = "eager" if model.family == "t5" else "fused"
            why = "T5's learned bias needs the scores" if model.family == "t5" else "what torch does where it can"
            reasons["attention"] = f"{attention}: {why}"
        if question.sequence is None:
            reasons["sequence"] = f"{model.sequence}: as published"
        if question.optimizer is None:
            reasons["optimizer"] = "adam: the usual one"
        if bits is None:
            bits = 16 if precision == "pure16" and not question.offload else 32
            reasons["state"] = f"{bits} bits: " + ("torch keeps it as the weights" if bits == 16 else "the usual one")
        compression = None if question.alone else question.compression or "linear8"
        if not question.alone and question.compression is None:
            reasons["compression"] = "linear8: what runs of tt start with"
        options = CalculatorOptions(
            kind=kind,
            precision=precision,
            attention=attention,
            layers=question.layers or "kept",
            sequence=question.sequence or 0,
            groups=question.share or 0,
            tied=False if question.untied else None,
            optimizer=question.optimizer or "adam",
            bits=bits,
            offload=question.offload,
            compression=compression,
        )
        options.check(model)
        return cls(model, options, reasons, question.examples)

    @property
    def title(self) -> str:
        """The name for people."""
        return self.model.title

    def answer(self, micro_batch: int) -> Answer:
        """See Subject."""
        return reckon(self.model, replace(self.options, micro_batch=micro_batch))

    def change(self, micro_batch: int, room: int) -> list[str] | None:
        """See Subject."""
        change = smallest_change(self.model, replace(self.options, micro_batch=micro_batch), room)
        return None if change is None else change[0]

    def compared(self) -> list[tuple[str, Subject]]:
        """One technique at a time, then those that cost no precision together."""
        plain = replace(self.options, bits=32, layers="kept", offload=False, groups=0, optimizer="adam")
        eager = () if self.model.family == "t5" else (("eager attention", {"attention": "eager"}),)
        offload = {} if plain.kind == "cpu" else {"offload": True}
        techniques: tuple[tuple[str, dict[str, Any]], ...] = (
            ("32-bit Adam", {}),
            *eager,
            ("8-bit Adam", {"bits": 8}),
            ("Adafactor", {"optimizer": "adafactor"}),
            ("gradient checkpointing", {"layers": "checkpointed"}),
            ("reversible layers", {"layers": "reversible"}),
            ("layers shared in 4 groups", {"groups": min(4, self.model.layers)}),
            *((("offloaded optimizer", offload),) if offload else ()),
            (
                "8-bit, checkpointing" + (", offload" if offload else ""),
                {"bits": 8, "layers": "checkpointed", **offload},
            ),
        )
        rows: list[tuple[str, Subject]] = [("as asked", self)]
        rows += [(name, replace(self, options=replace(plain, **change))) for name, change in techniques]
        return rows

    def network(self, peers: int) -> int:
        """See Subject."""
        return network_bytes(self.model, self.options, peers)

    def flops(self) -> int:
        """See Subject."""
        return flops_per_example(self.model, self.options)

    def examples(self) -> tuple[int, str]:
        """See Subject."""
        return (self.target, "as asked") if self.target else (EXAMPLES, f"{EXAMPLES}: --examples was not given")

    def described(self) -> dict[str, Any]:
        """See Subject."""
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
