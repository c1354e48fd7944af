"""Drawing: repeatable, independent of other prompts, and right when the model knows its pictures."""

from __future__ import annotations

import numpy as np
import pytest
from draw.tiny import Tiny

from tt_cli.data import decode_pictures
from tt_cli.draw import Drawing, cut_prompts, draw, recall
from tt_cli.errors import UsageError


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.new()


def draw_with(tiny: Tiny, prompts: list[str], **options: object) -> list[Drawing]:
    return draw(tiny.run, tiny.model, tiny.vqgan, tiny.tokenizer, prompts, **options)  # type: ignore[arg-type]


def codes(drawings: list[Drawing]) -> list[list[int]]:
    return [drawing.codes.tolist() for drawing in drawings]


def test_gives_every_sample_of_every_prompt_in_order(tiny: Tiny) -> None:
    drawings = draw_with(tiny, ["red apple", "sailboat"], samples=3, batch=2)
    assert [(d.prompt, d.index) for d in drawings] == [(p, i) for p in ("red apple", "sailboat") for i in range(3)]
    side = tiny.run.vqgan.pixels
    for drawing in drawings:
        assert drawing.codes.shape == (tiny.run.vqgan.grid**2,) and drawing.codes.dtype == np.int64
        assert drawing.codes.min() >= 0 and drawing.codes.max() < tiny.run.vqgan.codebook_size
        assert drawing.picture.shape == (side, side, 3) and drawing.picture.dtype == np.uint8
    again = decode_pictures(tiny.vqgan, np.stack([d.codes for d in drawings]))
    assert np.abs(again.astype(int) - np.stack([d.picture for d in drawings])).max() <= 1
    assert len({tuple(d.codes.tolist()) for d in drawings}) == 6


def test_a_seed_makes_it_repeatable(tiny: Tiny) -> None:
    first = draw_with(tiny, ["red apple"], samples=2, seed=7)
    again = draw_with(tiny, ["red apple"], samples=2, seed=7)
    assert codes(first) == codes(again)
    assert np.array_equal(first[1].picture, again[1].picture)
    assert codes(first) != codes(draw_with(tiny, ["red apple"], samples=2, seed=8))


def test_other_prompts_do_not_matter_unless_they_are_mixed(tiny: Tiny) -> None:
    alone = codes(draw_with(tiny, ["sailboat"], samples=2))
    assert codes(draw_with(tiny, ["red apple", "sailboat"], samples=2))[2:] == alone
    assert codes(draw_with(tiny, ["red apple", "sailboat"], samples=2, mix_prompts=True))[2:] != alone


def test_the_likeliest_codes_need_no_luck(tiny: Tiny) -> None:
    drawings = draw_with(tiny, ["red apple"], samples=3, top_k=1)
    assert codes(drawings)[0] == codes(drawings)[1] == codes(drawings)[2]


@pytest.mark.parametrize("mix_prompts", [False, True])
def test_progress_goes_from_the_first_code_to_the_last(tiny: Tiny, mix_prompts: bool) -> None:
    seen: list[tuple[int, int]] = []
    draw_with(
        tiny, ["a b", "c d", "e f"], samples=1, batch=2, mix_prompts=mix_prompts,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = 3 * tiny.run.vqgan.grid**2
    done = [step for step, _ in seen]
    assert {of for _, of in seen} == {total}
    assert done == sorted(set(done)) and done[-1] == total
    assert len(done) == (2 if mix_prompts else 3) * tiny.run.vqgan.grid**2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 1.5}, "top-p"),
    ],
)
def test_refuses_settings_out_of_range(tiny: Tiny, options: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        draw_with(tiny, ["red apple"], **options)


def test_refuses_an_empty_prompt(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        draw_with(tiny, ["red apple", "  "])


def test_says_which_prompts_are_cut(tiny: Tiny) -> None:
    long = "one two three four five six seven eight nine ten " * 4
    cut = cut_prompts(tiny.tokenizer, ["red apple", long])
    assert list(cut) == [long]
    assert 0 < len(cut[long]) < len(long) and long.startswith(cut[long].strip())


def test_a_model_that_learned_its_pictures_by_heart_draws_them() -> None:
    tiny = Tiny.new()
    before, _ = recall(tiny.run, tiny.model, tiny.vqgan, tiny.tokenizer)
    tiny.train(40)
    after, drawings = recall(tiny.run, tiny.model, tiny.vqgan, tiny.tokenizer, seed=1)
    assert (before.total, after.total) == (4, 4)
    assert before.right <= 2
    assert after.right == 4
    assert len({drawing.prompt for drawing in drawings}) == 4
    few, _ = recall(tiny.run, tiny.model, tiny.vqgan, tiny.tokenizer, captions=2)
    assert few.total == 2
