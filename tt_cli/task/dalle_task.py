"""The paper's task: a decoder that learns captions, and then the codes of their pictures."""

from __future__ import annotations

from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from tt_cli.memory.trainer_account import DalleAccount
from tt_cli.task.task import Losses, Task

if TYPE_CHECKING:
    from tt_cli.data.examples import Batch
    from tt_cli.data.stream.example_stream import ExampleStream
    from tt_cli.data.tokenizer import Tokenizer
    from tt_cli.model.dalle import Dalle
    from tt_cli.run import DalleRun


class DalleTask(DalleAccount, Task["Dalle"]):
    """The training task of a DALL-E's run. All that knows of it, beside drawing and the memory account, is here."""

    run: DalleRun
    draws = True

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run file names. Raises TTError."""
        from tt_cli.data.tokenizer import load_tokenizer

        return load_tokenizer(self.run)

    @property
    def width(self) -> int:
        return self.run.model.dim

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

    def samples(self, *of_checkpoint: Any) -> dict[str, bytes]:
        pngs: dict[str, bytes] = resolve_name("tt_cli.draw.samples:pictures")(self, *of_checkpoint)
        return pngs

    def losses(self, model: Dalle, batch: Batch) -> Losses:
        losses = model.loss(**batch.tensors)
        return losses.total, losses.figures()
