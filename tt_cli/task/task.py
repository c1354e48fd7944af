"""The interface to what is trained: all that knows more of it than names, shapes and losses is behind it.

A kind of run is a `RunConfig` with tables of its own, and a `Task`; docs/add-a-task.md shows one in a single file.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tt_cli.errors import TTError
from tt_cli.memory.trainer_account import TaskAccount

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tt_cli.data.examples import Batch, RowCounts
    from tt_cli.run import RunConfig

Model = TypeVar("Model", bound="nn.Module")
Losses = tuple["Tensor", dict[str, "Tensor"]]
"""A scalar to train on, differentiable, and up to four others by name, without their graphs."""
Tell = Callable[[str, str], None]
Beat = Callable[[str], None]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of those that are trained, in the model's order: they alone are shared."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_for_muon(name: str, dimensions: int) -> bool:
    """True for a matrix between embedding and logits: those that Muon steps, where the run file asks for it."""
    return dimensions == 2 and not re.search(r"embed|logits|lm_head|\bw[tp]e\b", name)


def narrow(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Hold the matrices that are not trained in the autocast dtype (None: none): the same products, half of the memory.

    Of float32 ones autocast would keep a cast for the backward pass, beside them. Embeddings are no products.
    """
    from torch import nn

    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules() if dtype is not None else ():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and not weight.requires_grad and id(weight) not in embedded:
            module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return model


class Examples(Protocol):
    """Batches without end for one peer. counts: what became of rows so far."""

    counts: RowCounts

    def batches(self, batch_size: int) -> Iterator[Batch]: ...
    def close(self) -> None: ...


class Task(TaskAccount, Protocol[Model]):
    """The training task of `run`.

    Making one loads nothing: sizes, need and flops are asked without torch.
    """

    run: RunConfig
    draws: bool = False  # its samples are pictures
    compiled_from: int = 20_000_000  # parameters, counted in every layer that uses them; an estimate

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of its usual products: a CPU's precision is chosen by them, and rates of local steps."""

    def keep(self, model: Model, budget: int) -> None:
        """Let a model that `recomputes` keep so many bytes of activations for its backward pass."""
        return None

    def prepare(self) -> None:
        """Load what reads examples beside the data, such as a tokenizer. Raises TTError."""
        return None

    @abstractmethod
    def model(self, seed: int | None) -> Model:
        """The model with the first weights of this seed, in equal bytes on all machines; None: with any."""

    @abstractmethod
    def examples(
        self,
        seed: int,
        *,
        peer: str = "",
        folder: Path | None = None,
        name: str = "examples",
        tell: Tell = lambda words, remedy: None,
    ) -> Examples:
        """The examples to train on, in an order that seed and peer decide.

        folder: the run's, for what is kept between starts, under `name`. tell: hears of troubles and their remedies.
        """

    def held_out(self, most: int, size: int) -> list[Batch]:
        """Up to `most` examples on which nobody trains, the same each time, up to `size` at a time. Raises TTError."""
        return []

    def samples(self, model: Model, prompts: Sequence[str], step: int, tell: Tell, heartbeat: Beat) -> dict[str, bytes]:
        """Samples of a checkpoint for the run's `prompts`: texts in UTF-8, or PNGs of a task with `draws`.

        tell: takes a line for a person and its level; heartbeat: what is done at the moment. Raises TTError where none
        can be made.
        """
        return {}

    @abstractmethod
    def losses(self, model: Model, batch: Batch) -> Losses:
        """The losses of a batch on the model's device: means over its samples."""

    def tensor_sizes(self) -> list[int]:
        """Elements of each parameter that is trained."""
        return [shape.numel() for shape in self.shapes().values()]

    def new_model(self) -> Model:
        """The model with the run's first weights, which its seed decides."""
        return self.model(self.run.run.seed)

    def unfilled_model(self, device: str = "cpu") -> Model:
        """The model for weights that come from elsewhere; on "meta", its names and shapes alone."""
        import torch

        with torch.device(device):
            return self.model(None)

    def filled_model(self, parameters: Mapping[str, Tensor], origin: str) -> Model:
        """The model with a checkpoint's parameters. Raises TTError if they do not fit."""
        import torch

        self.check_fit(parameters, origin)
        model = self.unfilled_model()
        with torch.no_grad():
            for name, parameter in trained(model).items():
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
        """Name → shape of the parameters that are trained, in the model's order."""
        return {name: parameter.shape for name, parameter in trained(self.unfilled_model("meta")).items()}
