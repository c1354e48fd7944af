"""The built-in run with a decoder so small that a test can train it; and drawings, for processes of their own."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import torch

from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.cli.main import main
from tt_cli.data.stream.subset import subset_examples
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.draw.drawing import DrawingModels
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import RunConfig, load_run
from tt_cli.task.picture_codec import load_vqgan


def tiny_run(subset: int = 4) -> RunConfig:
    return load_run("emoji").replaced(
        {
            "run.name": "tiny",
            "data.subset": subset,
            "model.dim": 48,
            "model.depth": 2,
            "model.heads": 2,
            "model.dim_head": 16,
        }
    )


@dataclass(frozen=True)
class Tiny(DrawingModels):
    """A run and what draws for it, made and trained here."""

    @classmethod
    def new(cls, run: RunConfig | None = None) -> Tiny:
        run = run or tiny_run()
        return cls(run, Dalle(DalleConfig.from_run(run)), load_vqgan(run), load_tokenizer(run))

    def train(self, steps: int) -> None:
        """Learn the run's examples by heart."""
        examples = subset_examples(self.run)
        text = self.tokenizer.encode([example.caption for example in examples])
        image = torch.stack([torch.from_numpy(example.codes.astype("int64")) for example in examples])
        optimizer = torch.optim.Adam(self.decoder.parameters(), lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            self.decoder.loss(text, image).total.backward()
            optimizer.step()

    def save(self, folder: Path, step: int) -> Path:
        parameters = {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}
        state = TrainingState(step, parameters, {}, self.run.to_toml(), self.run.identity)
        return save(folder, state, keep=10)


def inferred(calls: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit codes, standard output and error of several `tt infer "red apple" …`, in a process of their own."""
    answers = []
    for arguments in calls:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["infer", "red apple", "--candidates", "2", "--seed", "3", *arguments])
        answers.append((code, out.getvalue(), err.getvalue()))
    return answers
