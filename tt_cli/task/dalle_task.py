"""The paper's task: a decoder that learns captions, and then the codes of their pictures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tt_cli.data.examples import Batch
from tt_cli.model import Dalle, DalleConfig, Losses
from tt_cli.run import RunConfig


@dataclass(frozen=True)
class DalleTask:
    """The training task of `run`. All that knows of DALL-E, beside drawing and the memory account, is here."""

    run: RunConfig

    def new_model(self) -> Dalle:
        """The model with the run's first weights, which its seed decides."""
        return Dalle(DalleConfig.from_run(self.run), seed=self.run.run.seed)

    def unfilled_model(self, device: str = "cpu") -> Dalle:
        """The model for weights that come from elsewhere; on "meta", its names and shapes alone."""
        with torch.device(device):
            return Dalle(DalleConfig.from_run(self.run), seed=None)

    def shapes(self) -> dict[str, torch.Size]:
        """Parameter name → shape, in the model's order."""
        return {name: parameter.shape for name, parameter in self.unfilled_model("meta").named_parameters()}

    def sizes(self) -> dict[str, int]:
        """{"parameters": distinct ones, "effective": counted in every layer that uses them}."""
        config = DalleConfig.from_run(self.run)
        return {"parameters": sum(config.tensor_sizes), "effective": config.effective_parameters}

    def loss(self, model: Dalle, batch: Batch, device: torch.device) -> Losses:
        """The loss to train on (`total`), differentiable, and the figures that go with it (`figures()`)."""
        return model.loss(batch.text.to(device), batch.image.to(device))
