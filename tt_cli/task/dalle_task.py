"""The paper's task: a decoder that learns captions, and then the codes of their pictures."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from tt_cli.memory import Kind, Need, trainer_need
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import DalleRun, RunConfig
from tt_cli.task.task import Losses, Task

if TYPE_CHECKING:
    from tt_cli.data.examples import Batch
    from tt_cli.data.stream.example_stream import ExampleStream
    from tt_cli.data.tokenizer import Tokenizer
    from tt_cli.model.dalle import Dalle


class DalleTask(Task["Dalle"]):
    """The training task of a DALL-E's run. All that knows of it, beside drawing and the memory account, is here."""

    def __init__(self, run: RunConfig) -> None:
        self.run: DalleRun = DalleRun.of(run)

    @cached_property
    def _config(self) -> DalleConfig:
        return DalleConfig.from_run(self.run)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run file names. Raises TTError."""
        from tt_cli.data.tokenizer import load_tokenizer

        return load_tokenizer(self.run)

    @property
    def width(self) -> int:
        return self.run.model.dim

    @property
    def reversible(self) -> bool:
        return self.run.model.reversible

    def keep(self, model: Dalle, budget: int) -> None:
        model.activation_budget = budget

    def prepare(self) -> None:
        self.tokenizer  # noqa: B018

    def model(self, seed: int | None) -> Dalle:
        from tt_cli.model.dalle import Dalle

        return Dalle(self._config, seed=seed)

    def examples(self, seed: int, **more: Any) -> ExampleStream:
        from tt_cli.data.stream.example_stream import ExampleStream

        return ExampleStream(self.run, self.tokenizer, seed, **more)

    def held_out(self, most: int, size: int) -> list[Batch]:
        from tt_cli.data.stream.example_stream import batch_of
        from tt_cli.data.stream.subset import heldout_examples

        examples = heldout_examples(self.run, most)
        pairs = [(example.caption, example.codes) for example in examples]
        return [batch_of(self.tokenizer, pairs[first : first + size]) for first in range(0, len(pairs), size)]

    def losses(self, model: Dalle, batch: Batch) -> Losses:
        losses = model.loss(**batch.tensors)
        return losses.total, losses.figures()

    def need(self, kind: Kind, *, itemsize: int = 4, micro_batch: int = 1, budget: int = 0) -> Need:
        return trainer_need(self.run, kind, itemsize=itemsize, micro_batch=micro_batch, budget=budget)

    def flops(self) -> int:
        return self._config.flops_per_sample()

    def sizes(self) -> dict[str, int]:
        return {"parameters": sum(self.tensor_sizes()), "effective": self._config.effective_parameters}

    def tensor_sizes(self) -> list[int]:
        return self._config.tensor_sizes
