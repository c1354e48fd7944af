"""Examples in and out: captions and tokenizers, VQ codes, streaming, the built-in data set.

One example is a caption and the codes of its picture. `datasets`, `pyarrow`, `tokenizers` and `huggingface_hub` are
loaded by the functions that need them; torch with the first of the names below that needs it, for the process that
reads ahead does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.data import builtin
    from tt_cli.data.examples import Batch, Counts, Example
    from tt_cli.data.stream.example_stream import ExampleStream, subset_examples
    from tt_cli.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Counts",
    "Example",
    "ExampleStream",
    "Tokenizer",
    "builtin",
    "load_tokenizer",
    "subset_examples",
]

_FROM = {
    **dict.fromkeys(("Batch", "Counts", "Example"), "examples"),
    **dict.fromkeys(("ExampleStream", "subset_examples"), "stream.example_stream"),
    **dict.fromkeys(("Tokenizer", "load_tokenizer"), "tokenizer"),
}


def __getattr__(name: str) -> Any:
    if name == "builtin":
        return import_module("tt_cli.data.builtin")
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
