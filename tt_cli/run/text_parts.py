"""The parts of a language model's run file that other kinds of run do not have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from tt_cli.run.sections import DataSource, RepositoryName, Section, Text, TokenizerSource, Untrained

MEASURES = {
    **{"num_hidden_layers": "layers", "hidden_size": "dim", "num_attention_heads": "heads", "vocab_size": "vocabulary"},
    **{"n_layer": "layers", "n_embd": "dim", "n_head": "heads"},
}
"""Keys of configurations of transformers: the measure that each is."""


def _configuration(text: str) -> str:
    """A config.json with sorted keys and no spaces: one model is one text."""
    try:
        fields: Any = json.loads(text)
        model, text = fields["model_type"], json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, KeyError, TypeError):
        raise ValueError('must be a config.json as text, such as \'{"model_type": "llama", …}\'') from None
    if not isinstance(model, str):
        raise ValueError("model_type: must be a name, such as llama")
    return text


class CausalLmPart(Section):
    """The kind of this run: a language model that predicts the next token."""

    kind: Literal["causal_lm"]


class LanguageModelPart(Section):
    """The model, of a class of the installed transformers, with first weights that the run's seed decides.

    What its config leaves out is what transformers takes for it, so write out whatever may come to differ.
    """

    config: Annotated[str, AfterValidator(_configuration)] = Field(description="its config.json, as text")
    length: int = Field(ge=2, description="tokens of an example")


class PretrainedPart(Section):
    """The first weights, of a repository of the Hub with safetensors, in place of those that the seed decides."""

    name: RepositoryName
    revision: Text | None = Field(None, examples=["main"])
    digest: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] = Field(
        description="of the weights in float32, which `tt init` writes down; others are refused"
    )


class LoraPart(Section):
    """Adapters on all layers between embeddings and head (Hu et al. 2021), which alone are trained and shared."""

    rank: int = Field(16, ge=1, description="columns of the two matrices that make up a layer's change")
    alpha: float = Field(32.0, gt=0, description="the change is their product times alpha / rank")


class TextTokenizerPart(TokenizerSource):
    """Text to ids. From the Hub: a repository with a tokenizer.json."""

    document_end: Text = Field("</s>", description="the token that ends a document", examples=["</s>"])


class TextDataPart(DataSource):
    """The text. source = "hub" takes a data set on the Hub; "files" what lies at location, a file or a folder of
    .parquet, .jsonl or .txt, which every peer has. Each row, or each .txt, is a document.
    """

    configuration: Text | None = Field(None, description="of a data set on the Hub that has several")
    location: Text | None = Untrained(None, description="a file or a folder on this machine", examples=["/data/text"])
    column: Text = Field("text", description="with the text")
    shuffle_buffer: int = Field(1024, ge=1, description="documents")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.source == "files") != (self.location is not None):
            raise ValueError('location: a file or a folder, with source = "files" and no other')
        return self
