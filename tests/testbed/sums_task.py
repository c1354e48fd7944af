"""The task of scripts/examples with samples: it adds the digits of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scripts.examples.digits_task import Adder, DigitsRun, DigitsTask


class SumsRun(DigitsRun):
    """The same run for another task."""

    task_class = f"{__name__}:SumsTask"
    prompts = ("2 + 3", "4 + 5")


class SumsTask(DigitsTask):
    """What a `SumsRun` trains."""

    def samples(self, model: Adder, prompts: Sequence[str], *_: Any) -> dict[str, bytes]:
        digits = torch.tensor([[int(digit) for digit in prompt.split(" + ")] for prompt in prompts])
        sums = model(digits).argmax(dim=1).tolist()
        return {prompt: f"{prompt} = {found}".encode() for prompt, found in zip(prompts, sums, strict=True)}
