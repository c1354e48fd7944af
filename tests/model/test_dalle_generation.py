"""Drawing: the cache changes nothing, seeds repeat, prompts do not mix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model.slow_drawing import WholeDecoder, generate, whole_logits
from model.test_dalle_reference import configs, example, randomised

from tt_cli.errors import UsageError
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers.products import has_onednn_linear
from tt_cli.model.layers.projection import Projection
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.model.sampling.drawing_memory import drawing_bytes
from tt_cli.model.sampling.generation import StepDecoder, draw_codes
from tt_cli.model.sampling.kv_cache import Caches

SMALL = DalleConfig(32, 6, 2, 16, 20, 6, 4, 24)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def chance(config: DalleConfig, rows: int, seed: int = 0) -> torch.Tensor:
    """A number for each code."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((rows, config.image_positions), generator=generator, dtype=torch.float64)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(), samples=st.integers(1, 3), seed=st.integers(0, 999))
@torch.no_grad()
def test_cached_steps_equal_the_whole_trunk(config: DalleConfig, samples: int, seed: int) -> None:
    """Every position's logits, after a prefill of the text."""
    dalle = randomised(config, seed)
    text, _ = example(config, seed)
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, config.image_vocab, (2 * samples, config.image_positions), generator=generator)
    whole = whole_logits(dalle, text.repeat_interleave(samples, dim=0), image)[:, :, config.text_ids :]
    decoder = StepDecoder(dalle, 2, samples)
    logits = [decoder.prefill(text), *(decoder.step(image[:, p], p) for p in range(config.image_positions - 1))]
    torch.testing.assert_close(torch.stack(logits, dim=1), whole[:, config.text_length :])


@torch.no_grad()
def test_a_prompts_pictures_share_its_text() -> None:
    """One text for three pictures gives what three texts give, and is kept once."""
    dalle = randomised(SMALL, 8)
    text, _ = example(SMALL, 8)
    image = torch.randint(0, SMALL.image_vocab, (3, SMALL.image_positions), generator=torch.Generator().manual_seed(8))
    shared, apart = StepDecoder(dalle, 1, 3), StepDecoder(dalle, 3)
    torch.testing.assert_close(shared.prefill(text[:1]), apart.prefill(text[:1].expand(3, -1)))
    for position in range(SMALL.image_positions - 1):
        torch.testing.assert_close(*(one.step(image[:, position], position) for one in (shared, apart)))
    together, separate = (one.caches.attention[0].text for one in (shared, apart))
    assert separate.nbytes == 3 * together.nbytes


def test_samples_lie_next_to_each_other() -> None:
    dalle = randomised(SMALL, 9)
    text, _ = example(SMALL, 9)
    greedy = generate(dalle, text, Sampling(top_k=1), samples=2)
    assert torch.equal(greedy, generate(dalle, text, Sampling(top_k=1)).repeat_interleave(2, dim=0))
    drawn = [
        generate(dalle, text, samples=2, cache=cache, generator=torch.Generator().manual_seed(1))
        for cache in (True, False)
    ]
    assert torch.equal(*drawn)
    free = generate(dalle, text, samples=2, generator=torch.Generator().manual_seed(1))
    assert len({tuple(row) for row in free.tolist()}) == 4


def test_a_picture_does_not_depend_on_its_neighbours() -> None:
    """Its noise decides, in any batch."""
    dalle = randomised(SMALL, 10)
    text, _ = example(SMALL, 10)
    noise = chance(SMALL, 5)
    sampling = Sampling(top_k=8)
    together = draw_codes(StepDecoder(dalle, 1, 5), text[:1], noise, sampling)
    split = [draw_codes(StepDecoder(dalle, 1, len(part)), text[:1], part, sampling) for part in noise.split(2)]
    assert torch.equal(together, torch.cat(split))


def test_a_decoder_draws_again() -> None:
    """What the last picture left in the caches is not seen."""
    dalle = randomised(SMALL, 11)
    text, _ = example(SMALL, 11)
    decoder, sampling = StepDecoder(dalle, 1), Sampling()
    first = draw_codes(decoder, text[:1], chance(SMALL, 1), sampling)
    draw_codes(decoder, text[1:], chance(SMALL, 1, 1), sampling)
    assert torch.equal(draw_codes(decoder, text[:1], chance(SMALL, 1), sampling), first)


def test_many_prompts_run_through_the_trunk_in_turns() -> None:
    dalle = randomised(SMALL, 12)
    text = torch.randint(1, SMALL.text_vocab, (9, SMALL.text_length), generator=torch.Generator().manual_seed(0))
    together = generate(dalle, text, Sampling(top_k=1))
    assert torch.equal(together, torch.cat([generate(dalle, row[None], Sampling(top_k=1)) for row in text]))


@pytest.mark.parametrize("device", DEVICES)
def test_float32_draws_as_the_slow_way_does(device: str) -> None:
    """With the layouts that the device likes best, for one row and for many."""
    dalle = randomised(SMALL, 13).float().to(device)
    text, _ = example(SMALL, 13)
    text = text.to(device)
    for samples in (1, 8):
        noise = chance(SMALL, 2 * samples).to(device)
        fast, slow = StepDecoder(dalle, 2, samples), WholeDecoder(dalle, samples)
        assert ("graph" in fast.mode.split(" (")[0]) == (device == "cuda")
        drawn = [draw_codes(decoder, text, noise, Sampling(top_k=8, top_p=0.9)) for decoder in (fast, slow)]
        assert torch.equal(*drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_asks_the_device_for_nothing(dtype: torch.dtype) -> None:
    """Tensors without data go through it: no value is waited for, as a CUDA graph and a GPU's queue demand."""
    with torch.device("meta"):
        decoder = StepDecoder(Dalle(SMALL), 2, 3, dtype)
        code, noise = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.float64)
        logits = decoder.step(code, 5)
        assert Sampling(top_k=8, top_p=0.9).choose(logits, noise).shape == (6,)
    assert logits.shape == (6, SMALL.image_vocab) and logits.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 5])
def test_projections(dtype: torch.dtype, rows: int) -> None:
    """Whatever layout was chosen, also for another number of rows than it was chosen for."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 16, generator=generator), torch.randn(24, generator=generator)
    x = torch.randn(rows + 2, 16, generator=generator).to(dtype)
    for with_bias in (bias, None):
        found = Projection(weight, with_bias, dtype, rows)(x)
        expected = torch.nn.functional.linear(x, weight.to(dtype), None if with_bias is None else bias.to(dtype))
        torch.testing.assert_close(found, expected)


def test_autocast_draws_with_and_without_cache() -> None:
    dalle = randomised(SMALL, 2).float()
    text, _ = example(SMALL, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert StepDecoder(dalle, 1).caches.attention[0].image.dtype == torch.bfloat16
        for cache in (True, False):
            codes = generate(dalle, text, cache=cache)
            assert 0 <= codes.min() <= codes.max() < SMALL.image_vocab


@torch.no_grad()
def test_bfloat16_stays_near_float32() -> None:
    """Its steps' logits, as near as bfloat16's eight bits allow after six layers."""
    dalle = Dalle(SMALL)
    text, image = example(SMALL, 14)
    exact, rounded = StepDecoder(dalle, 2, dtype=torch.float32), StepDecoder(dalle, 2, dtype=torch.bfloat16)
    for decoder in (exact, rounded):
        decoder.prefill(text)
    for position in range(SMALL.image_positions - 1):
        near, far = (one.step(image[:, position], position).float() for one in (exact, rounded))
        assert (near - far).abs().max() < 0.03 * near.abs().max()


def test_drawing_keeps_no_graph() -> None:
    dalle = Dalle(SMALL)
    text, _ = example(SMALL, 6)
    assert not generate(dalle, text).requires_grad
    dalle.loss(*example(SMALL, 6)).total.backward()  # the tables that drawing made serve training too


def test_caches_follow_the_attention_type() -> None:
    """Beyond the text a row layer holds one row, a conv_like one its window's rows, a column one all."""
    config = DalleConfig(32, 6, 2, 16, 20, 6, 8, 24)
    row, column, *_, window = StepDecoder(Dalle(config), 1).caches.attention
    assert [layer.image.shape[4] for layer in (row, column, window)] == [8, 64, 3 * 8]


def test_memory_is_known_before() -> None:
    """The caches' bytes to the last one, counted without taking them, and copies of the weights where there are any."""
    dalle = Dalle(SMALL)
    for prompts, samples, dtype in ((1, 1, torch.float32), (2, 3, torch.float32), (1, 4, torch.bfloat16)):
        decoder = StepDecoder(dalle, prompts, samples, dtype)
        tensors = [t for layer in decoder.caches.attention for t in (layer.text, layer.image)]
        tensors += [*decoder.caches.attention_shifts, *decoder.caches.feed_forward_shifts]
        held = sum(tensor.nbytes for tensor in tensors)
        assert decoder.caches.nbytes == held
        assert Caches(SMALL, prompts, samples, torch.device("meta"), dtype).nbytes == held
        assert drawing_bytes(dalle, prompts, samples, dtype) > held
    one, two = (drawing_bytes(dalle, 1, samples, torch.bfloat16) for samples in (2, 3))
    picture = Caches(SMALL, 1, 3, torch.device("meta"), torch.bfloat16).nbytes
    picture -= Caches(SMALL, 1, 2, torch.device("meta"), torch.bfloat16).nbytes
    assert two - one >= picture
    if has_onednn_linear(torch.float32):
        matrices = sum(p.numel() for name, p in dalle.named_parameters() if p.dim() == 2 and "logits" not in name)
        copied = drawing_bytes(dalle, 1, 2, torch.float32) - drawing_bytes(dalle, 1, 1, torch.float32)
        assert copied > 4 * matrices


def test_bad_requests() -> None:
    for wrong, words in (
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"temperature": 1e-38}, "temperature is 1e-38; it must be above 0.000001"),
        ({"temperature": 1e39}, "temperature is 1e[+]39; it must be above 0.000001 and below 1e38"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top-k is -1; it must be 0"),
        ({"top_p": 0.0}, "top-p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
    ):
        with pytest.raises(UsageError, match=words):
            Sampling(**wrong)
