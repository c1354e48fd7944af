"""Drawing: the cache changes nothing, seeds repeat, prompts do not mix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model.test_dalle_reference import configs, example, randomised

from tt_cli.errors import UsageError
from tt_cli.model import Dalle, DalleConfig
from tt_cli.model.generation import Decoder

SMALL = DalleConfig(32, 6, 2, 16, 20, 6, 4, 24)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(), cut=st.floats(0, 1), seed=st.integers(0, 999))
@torch.no_grad()
def test_cached_steps_equal_the_whole_trunk(config: DalleConfig, cut: float, seed: int) -> None:
    """Every position's output, after a prefill of the text and any number of codes."""
    dalle = randomised(config, seed)
    text, image = example(config, seed)
    known = round(cut * (config.image_positions - 1))
    whole = dalle.trunk(dalle.embed(dalle.ids(text, image)))
    decoder = Decoder(dalle, 2)
    outputs = [decoder.prefill(dalle.ids(text, image[:, :known]))]
    outputs += [decoder.step(image[:, p], p) for p in range(known, config.image_positions - 1)]
    first = config.text_length + known
    torch.testing.assert_close(torch.stack(outputs, dim=1), whole[:, first:])


@pytest.mark.parametrize("primed", [0, 1, 4, 7, 15, 16])
def test_same_codes_with_and_without_cache(primed: int) -> None:
    dalle = randomised(SMALL, 1)
    text, image = example(SMALL, 1)
    drawn = [
        dalle.generate(
            text,
            temperature=0.9,
            top_k=8,
            top_p=0.9,
            generator=torch.Generator().manual_seed(5),
            cache=cache,
            prime=image[:, :primed],
        )
        for cache in (True, False)
    ]
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0][:, :primed], image[:, :primed])
    assert drawn[0].dtype == torch.int64
    assert drawn[0].shape == (2, SMALL.image_positions)
    assert 0 <= drawn[0].min() <= drawn[0].max() < SMALL.image_vocab


def test_autocast_draws_with_and_without_cache() -> None:
    dalle = randomised(SMALL, 2).float()
    text, _ = example(SMALL, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Decoder(dalle, 1).attention_caches[0].seen.dtype == torch.bfloat16
        for cache in (True, False):
            codes = dalle.generate(text, cache=cache)
            assert 0 <= codes.min() <= codes.max() < SMALL.image_vocab


def test_a_seed_repeats_the_drawing() -> None:
    dalle = randomised(SMALL, 3)
    text, _ = example(SMALL, 3)

    def draw(seed: int) -> torch.Tensor:
        return dalle.generate(text, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_rows_are_different_prompts() -> None:
    dalle = randomised(SMALL, 4)
    text, _ = example(SMALL, 4)
    together = dalle.generate(text, top_k=1)
    assert not torch.equal(together[0], together[1])
    for row in range(2):
        assert torch.equal(dalle.generate(text[row : row + 1], top_k=1)[0], together[row])


def test_on_token_counts_the_codes() -> None:
    dalle = Dalle(SMALL)
    text, image = example(SMALL, 5)
    seen: list[int] = []
    dalle.generate(text, prime=image[:, :3], on_token=seen.append)
    assert seen == list(range(4, SMALL.image_positions + 1))


def test_drawing_keeps_no_graph() -> None:
    dalle = Dalle(SMALL)
    text, _ = example(SMALL, 6)
    assert not dalle.generate(text).requires_grad
    dalle.loss(*example(SMALL, 6)).total.backward()  # the tables that drawing made serve training too


def test_caches_follow_the_attention_type() -> None:
    """Beyond the text a row layer holds one row, a conv_like one its window's rows, a column one all."""
    config = DalleConfig(32, 6, 2, 16, 20, 6, 8, 24)
    decoder = Decoder(Dalle(config), 1)
    row, column, *_, window = decoder.attention_caches
    assert (row.seen.shape[3], row.kept.shape[3]) == (7 + 8, 0)
    assert (column.seen.shape[3], column.kept.shape[3]) == (7 + 8, 8)
    assert (window.seen.shape[3], window.kept.shape[3]) == (7 + 15, 3)


def test_bad_requests() -> None:
    dalle = Dalle(SMALL)
    text, image = example(SMALL, 7)
    for wrong, words in (
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top-k is -1; it must be 0"),
        ({"top_p": 0.0}, "top-p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
    ):
        with pytest.raises(UsageError, match=words):
            dalle.generate(text, **wrong)
    with pytest.raises(ValueError, match=r"prime has shape \(1, 16\), expected \(2, 0..16\)"):
        dalle.generate(text, prime=image[:1])
