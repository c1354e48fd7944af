"""dalle-pytorch 1.6.6, the public successor of the code that the paper's model was trained with, as a baseline.

Only what its decoder runs on is imported: the package's other needs (tokenizers, other autoencoders, data loading) are
replaced by empty modules while it loads. `build` gives its exact counterpart of the paper's model: the same 125,894,244
parameters and, but for the window of the last layer, which the package changed in 1.5, the same function.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / ".venv/baseline"
PACKAGES = (
    "dalle-pytorch==1.6.6",
    "einops==0.8.2",
    "rotary-embedding-torch==0.1.2",
    "axial-positional-embedding==0.3.12",
)
# What the package imports and its decoder does not use.
_REPLACED = frozenset(
    {
        *("PIL", "ftfy", "omegaconf", "packaging", "pkg_resources", "regex", "requests", "taming", "tokenizers"),
        *("torchvision", "tqdm", "transformers", "webdataset", "yaml", "youtokentome"),
    }
)


def load(folder: Path | None = None) -> types.ModuleType:
    """The package from `folder`, which is filled from the package index if it is missing.

    Ends the program with one line if the folder neither is there nor can be filled.
    """
    folder = (folder or DEFAULT_FOLDER).resolve()
    if not (folder / "dalle_pytorch").is_dir():
        _fetch(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    if "dalle_pytorch" in sys.modules:
        return sys.modules["dalle_pytorch"]
    with _empty_modules():
        return importlib.import_module("dalle_pytorch")


def build(depth: int = 64, *, reversible: bool = True, optimize_for_inference: bool = False) -> nn.Module:
    """The paper's model as the package builds it; call `load` first.

    `optimize_for_inference` makes its cache work with all layers but the last. The returned module's parameters are the
    decoder's alone: the smallest possible autoencoder stands in where the package asks for one.
    """
    package = importlib.import_module("dalle_pytorch")
    kinds = islice(cycle(("axial_row", "axial_col", "axial_row", "axial_row")), depth - 1)
    sets: list[int | str] = [*islice(cycle(range(4)), depth - 1), "last"]
    model: nn.Module = package.DALLE(
        dim=1024,
        vae=package.DiscreteVAE(image_size=256, num_layers=3, num_tokens=8192, codebook_dim=1, hidden_dim=1),
        num_text_tokens=32100,
        text_seq_len=256,
        depth=depth,
        heads=16,
        dim_head=64,
        reversible=reversible,
        attn_types=[*kinds, "conv_like"],
        shared_attn_ids=sets,
        shared_ff_ids=sets,
        share_input_output_emb=True,
        rotary_emb=True,
        shift_tokens=True,
        optimize_for_inference=optimize_for_inference,
    )
    for parameter in model.vae.parameters():
        parameter.requires_grad_(False)
    return model


class CachedSteps:
    """The package's cached drawing, one code of `b` pictures at a time, from any position of the picture on.

    The cache is passed to the model directly. `generate_images(use_cache=True)` of this version forgets to do so
    unless it guides (cond_scale other than 1), and then runs the whole sequence for every code.
    """

    def __init__(self, model: nn.Module, text: Tensor) -> None:
        """text (1, 256): runs through the model once, its cache serves all pictures; there is one at first."""
        self.model, self.text, self.b = model, text, 1
        self._package: Any = importlib.import_module("dalle_pytorch.dalle_pytorch")
        self._start: dict[Any, Any] = {}
        with torch.no_grad():
            self.model(text, None, cache=self._start)

    def at(self, position: int) -> None:
        """Draw b pictures from raster position `position` on; what came before is made up, it costs the same."""
        self.cache = {
            key: value if key == "offset" else self._grown(value, position) for key, value in self._start.items()
        }
        self.cache["offset"] += position
        self.image = torch.zeros(self.b, position + 1, dtype=torch.int64, device=self.text.device)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Feed every picture's last code and choose the next, with the package's own sampler: (b,)."""
        logits = self.model(self.text.expand(self.b, -1), self.image, cache=self.cache)[:, -1]
        likely = self._package.top_k(logits, thres=0.5)
        code = self._package.gumbel_sample(likely, temperature=1.0, dim=-1) - self.model.num_text_tokens
        self.image = torch.cat([self.image, code[:, None]], dim=1)
        return code

    def _grown(self, value: Any, positions: int) -> Any:
        """A cache entry for b pictures and `positions` more positions."""
        if isinstance(value, deque):  # the last row's shifted channels
            return deque(tuple(part.expand(self.b, -1) for part in entry) for entry in value)
        if isinstance(value, tuple):  # keys and values
            return tuple(self._grown(part, positions) for part in value)
        wide = value.expand(self.b, *value.shape[1:])
        made_up = wide[..., :1, :].expand(*wide.shape[:-2], positions, -1)
        return torch.cat([wide, made_up], dim=-2)


def _fetch(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    print(f"fetching {PACKAGES[0]} into {folder}", file=sys.stderr)
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    if done.returncode:
        sys.exit(
            f"the baseline is not in {folder} and pip could not fetch it; unpack the wheels of "
            f"{', '.join(PACKAGES)} into a folder and name it with --baseline"
        )


class _EmptyModule(types.ModuleType):
    """Any name imported from it is a class without content."""

    def __getattr__(self, name: str) -> Any:
        if name == "get_distribution":
            return lambda package: types.SimpleNamespace(version="")
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _EmptyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _REPLACED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def _empty_modules() -> Iterator[None]:
    """Importing any of _REPLACED gives an empty module; afterwards the real ones, if any, are back."""
    finder = _EmptyFinder()
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _REPLACED}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in _REPLACED]:
            del sys.modules[name]
        sys.modules.update(held)
