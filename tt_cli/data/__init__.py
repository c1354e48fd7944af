"""Examples in and out: captions and tokenizers, VQ codes, streaming, the built-in data set.

One example is a caption and the codes of its picture. `datasets`, `pyarrow`, `tokenizers` and `huggingface_hub` are
loaded by the functions that need them.
"""

from tt_cli.data import builtin
from tt_cli.data.examples import Batch, Counts, Example
from tt_cli.data.pictures import decode_pictures, load_vqgan
from tt_cli.data.stream import ExampleStream, subset_examples
from tt_cli.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Counts",
    "Example",
    "ExampleStream",
    "Tokenizer",
    "builtin",
    "decode_pictures",
    "load_tokenizer",
    "load_vqgan",
    "subset_examples",
]
