"""A run as the subject of a question: the account of its training peer, tt_cli.memory.trainer_account."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tt_cli.errors import UsageError
from tt_cli.memory.calculator import Answer
from tt_cli.memory.operations import Kind
from tt_cli.memory.question import CalculatorQuestion, Subject
from tt_cli.memory.trainer_account import Place, encoded_bytes, trainer_need
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import RunConfig, load_run


@dataclass
class OfRun:
    """A run, where it is trained and how wide its products are (bytes)."""

    run: RunConfig
    kind: Kind
    itemsize: int
    reasons: dict[str, str]
    target: int | None

    @classmethod
    def asked(cls, question: CalculatorQuestion) -> OfRun:
        """Raises UsageError for a run that is not there, and for what a run's peers do not do."""
        return cls.of(load_run(question.model), question)

    @classmethod
    def of(cls, run: RunConfig, question: CalculatorQuestion) -> OfRun:
        """A run that is at hand. Raises UsageError for what its peers do not do."""
        if question.optimizer not in (None, "lamb") or question.bits not in (None, 8):
            raise UsageError(f"{run.run.name} is trained with 8-bit LAMB, as all runs of tt: leave the optimizer out")
        for flag, given in (
            ("--checkpointing", question.layers == "checkpointed"),
            ("--attention", question.attention is not None),
            ("--sequence", question.sequence is not None),
            ("--precision pure16", question.precision == "pure16"),
            ("--alone", question.alone),
            (f"--compression {question.compression}", question.compression in ("fp16", "fp32")),
        ):
            if given:
                raise UsageError(f"{flag}: no peer of a run does this; its file says how {run.run.name} is trained")
        changes: dict[str, object] = {}
        if question.share is not None:
            changes["model.shared_layer_groups"] = question.share
        if question.layers == "reversible":
            changes["model.reversible"] = True
        if question.untied:
            changes["model.tied_embeddings"] = False
        if question.compression is not None:
            changes["swarm.compression"] = question.compression
        run = run.replaced(changes) if changes else run
        wide = question.precision == "fp32" or (question.precision is None and question.kind == "cpu")
        reasons = {
            "optimizer": "8-bit LAMB in the host's memory: what every peer of a run does",
            "activations": "none kept beyond the least: a peer keeps more where there is room",
        }
        if question.precision is None:
            reasons["precision"] = "fp32: usual on a CPU" if wide else "mixed: what a peer with a GPU does"
        return cls(run, question.kind, 4 if wide else 2, reasons, question.examples)

    @property
    def _decoder(self) -> DalleConfig:
        return DalleConfig.from_run(self.run)

    @property
    def title(self) -> str:
        """The name for people."""
        return f"run {self.run.run.name}"

    def answer(self, micro_batch: int) -> Answer:
        """See Subject."""
        need = trainer_need(self.run, self.kind, itemsize=self.itemsize, micro_batch=micro_batch)
        components = tuple(component for component in need.items if component.bytes)
        place: Place = "host" if self.kind == "cpu" else "device"
        tensors = sum(part.bytes for part in components if part.place == place and not part.assumed)
        return Answer(sum(self._decoder.tensor_sizes), components, "forward and backward pass", tensors)

    def change(self, micro_batch: int, room: int) -> list[str] | None:
        """See Subject."""
        place: Place = "host" if self.kind == "cpu" else "device"
        options = [("--micro-batch 1", 1, self.itemsize), ("--precision mixed", micro_batch, 2)]
        options.append(("--micro-batch 1 --precision mixed", 1, 2))
        for words, size, itemsize in options:
            if replace(self, itemsize=itemsize).answer(size).total(place) <= room:
                return [words]
        return None

    def compared(self) -> list[tuple[str, Subject]]:
        """The run as it is, and without each of its techniques."""
        rows: list[tuple[str, Subject]] = [("as the run is", self)]
        if self.run.model.shared_layer_groups < self.run.model.depth - 1:
            rows.append(("no shared layers", self._with("model.shared_layer_groups", self.run.model.depth)))
        if self.run.model.reversible:
            rows.append(("not reversible (an estimate)", self._with("model.reversible", False)))
        if self.run.model.tied_embeddings:
            rows.append(("embeddings not tied", self._with("model.tied_embeddings", False)))
        other = 2 if self.itemsize == 4 else 4
        rows.append((f"products in {'float32' if other == 4 else '16 bits'}", replace(self, itemsize=other)))
        return rows

    def _with(self, key: str, value: object) -> OfRun:
        return replace(self, run=self.run.replaced({key: value}))

    def network(self, peers: int) -> int:
        """See Subject."""
        sizes, swarm = self._decoder.tensor_sizes, self.run.swarm
        return 2 * encoded_bytes(sizes, swarm.compression, swarm.large_tensor) * (peers - 1) // peers

    def flops(self) -> int:
        """Without what a reversible trunk computes again, which depends on how much memory there is."""
        return self._decoder.flops_per_sample()

    def examples(self) -> tuple[int, str]:
        """See Subject."""
        size = self.run.swarm.target_batch_size
        return (self.target, "as asked") if self.target else (size, f"{size}: the run's target batch size")

    def described(self) -> dict[str, Any]:
        """See Subject."""
        model = self.run.model
        return {
            "precision": "fp32" if self.itemsize == 4 else "mixed",
            "optimizer": "lamb",
            "state_bits": 8,
            "offload": True,
            "layers": "reversible" if model.reversible else "kept",
            "shared_groups": model.shared_layer_groups,
            "tied_embeddings": model.tied_embeddings,
            "attention": "structured",
            "sequence": self._decoder.sequence_length,
            "compression": self.run.swarm.compression,
        }
