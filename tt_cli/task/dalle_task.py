"""The paper's task: a decoder that learns captions, and then the codes of their pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tt_cli.data.examples import Batch
from tt_cli.errors import TTError
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.losses import Losses
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

    def filled_model(self, parameters: Mapping[str, Tensor], origin: str) -> Dalle:
        """The model with a checkpoint's parameters. Raises TTError if they do not fit."""
        self.check_fit(parameters, origin)
        model = self.unfilled_model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name])
        return model

    def check_fit(self, parameters: Mapping[str, Tensor], origin: str) -> None:
        """Raises TTError where names or shapes differ from the model's. origin: begins the error."""
        shapes = {name: tensor.shape for name, tensor in parameters.items()}
        if unlike := sorted({name for name, _ in shapes.items() ^ self.shapes().items()}):
            raise TTError(
                f"{origin} does not fit the run file inside it: {len(unlike)} tensors differ, such as "
                f"{unlike[0]}; it was written by another version of tt, or changed"
            )

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
