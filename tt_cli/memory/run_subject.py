"""A run as the subject of a question: the account of its training peer, tt_cli.memory.trainer_account."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tt_cli.errors import UsageError
from tt_cli.memory.calculator import Answer
from tt_cli.memory.question import CalculatorQuestion
from tt_cli.memory.trainer_account import AccountOf, DalleAccount, Kind, place_of, round_bytes
from tt_cli.run import DalleRun, RunConfig


@dataclass
class OfRun:
    """A run, where it is trained and how wide its products are (bytes); asked as `Known` is."""

    run: RunConfig
    account: AccountOf
    kind: Kind
    itemsize: int
    reasons: dict[str, str]
    target: int | None

    @classmethod
    def of(cls, run: RunConfig, question: CalculatorQuestion, account: AccountOf = DalleAccount) -> OfRun:
        """Choose what the question leaves open. Raises UsageError for what a run's peers do not do."""
        local = run.optimizer if run.optimizer.name == "local" else None
        if local and (question.optimizer or question.bits):
            raise UsageError(f"{run.run.name} is trained with local steps: leave the optimizer out")
        if question.optimizer not in (None, "lamb") or question.bits not in (None, 8):
            raise UsageError(f"{run.run.name} is trained with 8-bit LAMB, as its file says: leave the optimizer out")
        for flag, given in (
            ("--checkpointing", question.layers == "checkpointed" and isinstance(run, DalleRun)),
            ("--share", question.share is not None and not isinstance(run, DalleRun)),
            ("--untied", question.untied and not isinstance(run, DalleRun)),
            ("--reversible", question.layers == "reversible" and not isinstance(run, DalleRun)),
            ("--attention", question.attention is not None),
            ("--sequence", question.sequence is not None),
            ("--precision pure16", question.precision == "pure16"),
            ("--alone", question.alone),
            (f"--compression {question.compression}", question.compression in ("fp16", "fp32")),
        ):
            if given:
                raise UsageError(f"{flag}: no peer of a run does this; its file says how {run.run.name} is trained")
        changes = {
            "model.shared_layer_groups": question.share,
            "model.reversible": True if question.layers == "reversible" else None,
            "model.tied_embeddings": False if question.untied else None,
            "swarm.compression": question.compression,
        }
        run = run.replaced({key: value for key, value in changes.items() if value is not None})
        wide = question.precision == "fp32" or (question.precision is None and question.kind == "cpu")
        reasons = {
            "optimizer": f"local steps of {local.inner} on the device, parameters alone shared: as the run's file says"
            if local
            else "8-bit LAMB in the host's memory: what every peer of a run does",
            "activations": "none kept beyond the least: a peer keeps more where there is room"
            if account(run).recomputes
            else "all kept: the model is not reversible",
        }
        if local:
            each = (question.examples or run.swarm.target_batch_size) / (local.inner_batch * question.peers)
            words = f"{each:.3g} of {local.inner_batch} examples by each of {question.peers} peers"
            reasons["inner steps"] = f"{words} for a global step: as the run's file says"
        if question.precision is None:
            reasons["precision"] = "fp32: usual on a CPU" if wide else "mixed: what a peer with a GPU does"
        return cls(run, account, question.kind, 4 if wide else 2, reasons, question.examples)

    @property
    def title(self) -> str:
        return f"run {self.run.run.name}"

    def answer(self, micro_batch: int) -> Answer:
        account = self.account(self.run)
        need = account.need(self.kind, itemsize=self.itemsize, micro_batch=micro_batch)
        components = tuple(component for component in need.items if component.bytes)
        place = place_of(self.kind)
        tensors = sum(part.bytes for part in components if part.place == place and not part.assumed)
        return Answer(account.sizes()["parameters"], components, "forward and backward pass", tensors, place)

    def change(self, micro_batch: int, room: int) -> list[str] | None:
        for words, size, itemsize in (
            ("--micro-batch 1", 1, self.itemsize),
            ("--precision mixed", micro_batch, 2),
            ("--micro-batch 1 --precision mixed", 1, 2),
        ):
            if replace(self, itemsize=itemsize).answer(size).taken <= room:
                return [words]
        return None

    def compared(self) -> list[tuple[str, OfRun]]:
        """The run as it is, and without each of its techniques."""
        model, other = self.run.model_dump().get("model", {}), 2 if self.itemsize == 4 else 4
        shared = model.get("shared_layer_groups", math.inf) < model.get("depth", 0) - 1
        rows: list[tuple[str, OfRun]] = [("as the run is", self)]
        for name, key, value, differs in (
            ("no shared layers", "shared_layer_groups", model.get("depth"), shared),
            ("not reversible (an estimate)", "reversible", False, model.get("reversible")),
            ("embeddings not tied", "tied_embeddings", False, model.get("tied_embeddings")),
        ):
            if differs:
                rows.append((name, replace(self, run=self.run.replaced({f"model.{key}": value}))))
        rows.append((f"products in {'float32' if other == 4 else '16 bits'}", replace(self, itemsize=other)))
        return rows

    def gradient_bytes(self, peers: int) -> int:
        """The mean of what a member sends and of the average of so many, as they travel."""
        return sum(round_bytes(self.run, self.account(self.run).tensor_sizes(), peers)) // 2

    def flops(self) -> int:
        """Without what a reversible trunk computes again, which depends on how much memory there is."""
        return self.account(self.run).flops()

    def examples(self) -> tuple[int, str]:
        size = self.run.swarm.target_batch_size
        return (self.target, "as asked") if self.target else (size, f"{size}: the run's target batch size")

    def described(self) -> dict[str, Any]:
        model, local = self.run.model_dump().get("model", {}), self.run.optimizer.name == "local"
        account = self.account(self.run)
        return {
            "precision": "fp32" if self.itemsize == 4 else "mixed",
            "optimizer": f"{self.run.optimizer.inner}, local steps" if self.run.optimizer.name == "local" else "lamb",
            "state_bits": 32 if local and self.kind == "cpu" else 8,
            "offload": not local,
            "layers": "reversible" if account.reversible else "checkpointed" if account.recomputes else "kept",
            "shared_groups": model.get("shared_layer_groups"),
            "tied_embeddings": model.get("tied_embeddings"),
            "attention": "structured" if isinstance(self.run, DalleRun) else "fused",
            "sequence": sum(self.run.measures().get(f"{what}_tokens", 0) for what in ("text", "image")),
            "compression": f"{self.run.sparse} of 4,096" if self.run.sparse else self.run.swarm.compression,
        }
