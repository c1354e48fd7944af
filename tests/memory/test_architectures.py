"""Published counts of parameters, and how models are named."""

from __future__ import annotations

import pytest

from tt_cli.errors import UsageError
from tt_cli.memory.architectures import ARCHITECTURES, architecture, tensors

# Exact: what transformers' BertForMaskedLM, T5ForConditionalGeneration, GPT2LMHeadModel, GPTJForCausalLM count.
EXACT = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
}
# As their papers round them.
ROUNDED = {
    "bert-base": 110e6,
    "bert-large": 336e6,
    "gpt3-125m": 125e6,
    "gpt3-350m": 356e6,  # table 2.1 says 350M, its shape gives this
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.32e9,
    "gpt3-2.7b": 2.65e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 12.9e9,
    "gpt3-175b": 174.6e9,
    "gpt-j-6b": 6.05e9,
    "dalle-12b": 12.3e9,
}


def count(name: str, **given: int | bool) -> int:
    return sum(tensor.count for tensor in tensors(ARCHITECTURES[name], **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXACT)
def test_published_models_have_their_parameters(name: str) -> None:
    assert count(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_papers_round_to_the_same(name: str) -> None:
    assert count(name) == pytest.approx(ROUNDED[name], rel=0.012)


def test_every_architecture_is_counted_somewhere() -> None:
    assert set(ARCHITECTURES) == {*EXACT, *ROUNDED}


def test_shared_layers_and_a_second_matrix() -> None:
    one, two = count("gpt2", groups=1), count("gpt2", groups=2)
    assert count("gpt2") - two == 10 * (two - one)
    assert count("gpt2", tied=False) - count("gpt2") == 50257 * 768
    assert count("gpt-j-6b") - count("gpt-j-6b", tied=True) == 50400 * 4096


def test_usual_names_are_found() -> None:
    assert architecture("GPT2_Large").name == "gpt2-large"
    assert architecture("gpt2-s").name == "gpt2"


@pytest.mark.parametrize(
    ("typed", "meant"), [("gpt2-lrage", "gpt2-large"), ("brt-base", "bert-base"), ("emojy", "emoji")]
)
def test_mistyped_names_get_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        architecture(typed)


def test_other_names_get_all() -> None:
    with pytest.raises(UsageError, match=r"there are bert-base, .* dalle-12b"):
        architecture("zzz")
