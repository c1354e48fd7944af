"""A real training peer whose examples are random, for runs whose data are not at hand. Options: the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tt_cli.data.examples import Batch
from tt_cli.peer import trainer
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders


class RandomExamples:
    """In place of the `ExampleStream`."""

    def __init__(self, run: RunConfig, tokenizer: Any, seed: int, **rest: Any):
        self.run = run

    def close(self) -> None:
        """There is nothing to end."""

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of the run's shapes without end."""
        run = self.run
        while True:
            text = torch.randint(1, run.tokenizer.vocab_size, (batch_size, run.model.text_length))
            image = torch.randint(0, run.vqgan.codebook_size, (batch_size, run.vqgan.grid**2))
            yield Batch(text, image, [""] * batch_size)


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As the trainer's."""
    trainer.load_tokenizer = lambda run: None  # type: ignore[assignment, return-value, attr-defined]
    trainer.ExampleStream = RandomExamples  # type: ignore[assignment, misc, attr-defined]
    trainer.main(options, emit, orders)
