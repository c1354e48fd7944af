"""The architectures of the calculator: their published shapes, and every tensor of parameters that they have.

Sources: BERT (Devlin et al. 2019), T5 (Raffel et al. 2020), GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020,
table 2.1), GPT-J (Wang and Komatsuzaki 2021), DALL-E (Ramesh et al. 2021, appendix B). Counts are those of
transformers' classes. Where GPT-3's table contradicts itself (1.3B, 13B), heads times their width is the model's width
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tt_cli.errors import UsageError, nearest
from tt_cli.run.run_source import builtin_runs

Family = Literal["gpt", "gptj", "bert", "t5"]


@dataclass(frozen=True)
class Architecture:
    """One model. hidden: of the feed-forward part. sequence: tokens of a training example; 0 learned positions: none.

    keys: what one query attends to at most, where attention is sparse. decoder_layers, target: T5's second stack and
    its tokens. dropout: as published, in training.
    """

    name: str
    title: str
    family: Family
    layers: int
    dim: int
    heads: int
    dim_head: int
    hidden: int
    vocab: int
    positions: int
    sequence: int
    dropout: float = 0.1
    tied: bool = True
    decoder_layers: int = 0
    target: int = 0
    keys: int = 0

    @property
    def inner(self) -> int:
        """Width of queries, keys and values over all heads."""
        return self.heads * self.dim_head

    def targets(self, sequence: int) -> int:
        """T5's second stack's tokens for a first of `sequence` (0: as published)."""
        return max(1, sequence * self.target // self.sequence) if sequence else self.target


@dataclass(frozen=True)
class Tensor:
    """One tensor of parameters: rows x columns, or a vector where columns is 0. product: it is a factor of products."""

    rows: int
    columns: int = 0
    product: bool = True

    @property
    def count(self) -> int:
        """Elements."""
        return self.rows * (self.columns or 1)


def _gpt2(name: str, title: str, layers: int, dim: int, heads: int) -> Architecture:
    return Architecture(name, title, "gpt", layers, dim, heads, dim // heads, 4 * dim, 50257, 1024, 1024)


def _gpt3(name: str, layers: int, dim: int, heads: int) -> Architecture:
    title = f"GPT-3 {name.removeprefix('gpt3-').upper()}"
    return Architecture(name, title, "gpt", layers, dim, heads, dim // heads, 4 * dim, 50257, 2048, 2048, dropout=0.0)


def _bert(name: str, title: str, layers: int, dim: int, heads: int) -> Architecture:
    return Architecture(name, title, "bert", layers, dim, heads, dim // heads, 4 * dim, 30522, 512, 512)


def _t5(name: str, title: str, layers: int, dim: int, heads: int, dim_head: int, hidden: int) -> Architecture:
    shape = (layers, dim, heads, dim_head, hidden)
    return Architecture(name, title, "t5", *shape, 32128, 0, 512, decoder_layers=layers, target=128)


_ALL = (
    _bert("bert-base", "BERT base", 12, 768, 12),
    _bert("bert-large", "BERT large", 24, 1024, 16),
    _t5("t5-small", "T5 small", 6, 512, 8, 64, 2048),
    _t5("t5-base", "T5 base", 12, 768, 12, 64, 3072),
    _t5("t5-large", "T5 large", 24, 1024, 16, 64, 4096),
    _t5("t5-3b", "T5 3B", 24, 1024, 32, 128, 16384),
    _t5("t5-11b", "T5 11B", 24, 1024, 128, 128, 65536),
    _gpt2("gpt2", "GPT-2 small", 12, 768, 12),
    _gpt2("gpt2-medium", "GPT-2 medium", 24, 1024, 16),
    _gpt2("gpt2-large", "GPT-2 large", 36, 1280, 20),
    _gpt2("gpt2-xl", "GPT-2 XL", 48, 1600, 25),
    _gpt3("gpt3-125m", 12, 768, 12),
    _gpt3("gpt3-350m", 24, 1024, 16),
    _gpt3("gpt3-760m", 24, 1536, 16),
    _gpt3("gpt3-1.3b", 24, 2048, 16),
    _gpt3("gpt3-2.7b", 32, 2560, 32),
    _gpt3("gpt3-6.7b", 32, 4096, 32),
    _gpt3("gpt3-13b", 40, 5120, 40),
    _gpt3("gpt3-175b", 96, 12288, 96),
    Architecture("gpt-j-6b", "GPT-J 6B", "gptj", 28, 4096, 16, 256, 16384, 50400, 0, 2048, dropout=0.0, tied=False),
    # Text ids with one padding id a position, then image codes; positions: of the text, rows and columns. A code
    # attends to the text and to 32 codes; the last layer's window of 11 x 11 is counted as one of these.
    Architecture(
        "dalle-12b", "DALL-E 12B", "gpt", 64, 3968, 62, 64, 4 * 3968, 16384 + 256 + 8192, 256 + 32 + 32, 1280,
        dropout=0.0, tied=False, keys=256 + 32,
    ),
)  # fmt: skip
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}
_ALIASES = {
    "gpt2-small": "gpt2",
    "gpt2-s": "gpt2",
    "gpt2-m": "gpt2-medium",
    "gpt2-l": "gpt2-large",
    "gpt-j": "gpt-j-6b",
}


def known(name: str) -> Architecture | None:
    """The one of this name or of another usual one."""
    plain = name.lower().replace("_", "-")
    return ARCHITECTURES.get(_ALIASES.get(plain, plain))


def architecture(name: str) -> Architecture:
    """The one of this name. Raises UsageError with the nearest name, also among the built-in runs."""
    if (model := known(name)) is not None:
        return model
    names = [*ARCHITECTURES, *builtin_runs()]
    hint = nearest(name.lower(), [*names, *_ALIASES], f"there are {', '.join(names)};")
    raise UsageError(f"no model is called '{name}'; {hint} else give a run: a .toml file, or ORGANISATION/REPOSITORY")


def layer_tensors(model: Architecture, *, decoder: bool = False) -> list[Tensor]:
    """The tensors of one layer. decoder: T5's second stack, which attends to the first."""
    d, inner, hidden = model.dim, model.inner, model.hidden
    norm = [Tensor(d, product=False)] * 2
    if model.family == "t5":
        attention = [Tensor(inner, d)] * 3 + [Tensor(d, inner), norm[0]]
        feed_forward = [Tensor(hidden, d), Tensor(d, hidden), norm[0]]
        return attention * (2 if decoder else 1) + feed_forward
    feed_forward = [Tensor(hidden, d), Tensor(hidden), Tensor(d, hidden), Tensor(d)]
    if model.family == "gptj":
        return [*norm, *[Tensor(inner, d)] * 3, Tensor(d, inner), *feed_forward]
    if model.family == "bert":
        attention = [Tensor(inner, d), Tensor(inner)] * 3
    else:
        attention = [Tensor(3 * inner, d), Tensor(3 * inner)]
    attention += [Tensor(d, inner), Tensor(d)]
    return [*norm, *attention, *norm, *feed_forward]


def tensors(model: Architecture, *, groups: int = 0, tied: bool | None = None) -> list[Tensor]:
    """All tensors of a model. groups: distinct layers, used in turn (0: each layer has its own); T5: of each stack."""
    d, vocab, norm = model.dim, model.vocab, Tensor(model.dim, product=False)
    is_tied = model.tied if tied is None else tied
    parameters = [Tensor(vocab, d, product=is_tied)]
    if not is_tied:
        parameters.append(Tensor(vocab, d))
    for layers, decoder in ((model.layers, False), (model.decoder_layers, True)):
        parameters += layer_tensors(model, decoder=decoder) * min(layers, groups or layers)
    if model.positions:
        parameters.append(Tensor(model.positions, d, product=False))
    if model.family == "bert":  # segments; the norm of embeddings; masked tokens' head: dense, norm, bias
        parameters += [Tensor(2, d, product=False), norm, norm]
        parameters += [Tensor(d, d), Tensor(d), norm, norm, Tensor(vocab)]
    elif model.family == "t5":
        parameters += [norm, norm, *[Tensor(32, model.heads, product=False)] * 2]
    else:
        parameters += [norm, norm]
        if model.family == "gptj":
            parameters.append(Tensor(vocab))
    return parameters
