"""Drawing: repeatable whatever else is drawn, within memory, and right when the model knows its pictures."""

from __future__ import annotations

import re
import resource
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draw.tiny import Tiny, tiny_run
from testbed.spawned import spawned

from tt_cli.draw.draw_batches import PromptSlice, free_memory, memory_limit, next_batch
from tt_cli.draw.drawing import Drawing, DrawingSettings, candidate_noise, cut_prompts, draw, draw_in_turn
from tt_cli.draw.recall import recall
from tt_cli.errors import TTError, UsageError
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.model.sampling.drawing_memory import drawing_bytes
from tt_cli.model.sampling.generation import StepDecoder
from tt_cli.task.picture_codec import decode_pictures

# What candidate_noise(7, "red apple", 3, …) begins with.
FIRST_NUMBERS = [0.07833967242391493, 0.3978473314267471]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.new()


def draw_with(tiny: Tiny, prompts: list[str], **options: Any) -> list[Drawing]:
    sampling = Sampling(**{name: options.pop(name) for name in vars(Sampling()) if name in options})
    told = {name: options.pop(name) for name in ("on_progress", "on_message") if name in options}
    return draw(tiny, prompts, DrawingSettings(sampling=sampling, **options), **told)


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


def test_neither_other_prompts_nor_the_batch_matter(tiny: Tiny) -> None:
    def drawn(prompts: list[str], samples: int = 3, batch: int | None = None) -> list[list[int]]:
        return codes(draw_with(tiny, prompts, samples=samples, batch=batch, top_k=16))

    together = drawn(["red apple", "sailboat"])
    assert drawn(["sailboat"]) == together[3:]
    for batch in (1, 2, 6):
        assert drawn(["red apple", "sailboat"], batch=batch) == together
    assert drawn(["red apple", "sailboat"], samples=2) == together[:2] + together[3:5]


def test_memory_bounds_the_batch(tiny: Tiny) -> None:
    """As many rows as the bytes allow, said with the reason; the pictures are the same."""
    said: list[str] = []
    drawn = draw_with(tiny, ["red apple"], samples=12, top_k=16, on_message=said.append)
    assert len(said) == 1
    assert re.match(
        r"batch 12: [\d.]+ [KM]iB of [\d.]+ [MG]iB \(50% of the [\d.]+ [MG]iB free in memory\); float32: ", said[0]
    )
    said.clear()
    enough_for_five = drawing_bytes(tiny.decoder, 1, 5, torch.float32)
    bounded = draw_with(tiny, ["red apple"], samples=12, top_k=16, memory=enough_for_five, on_message=said.append)
    assert [line.split(":")[0] for line in said] == ["batch 4"]  # three even batches, not 5, 5 and 2
    assert "iB (as asked)" in said[0]
    assert codes(bounded) == codes(drawn)
    with pytest.raises(UsageError, match="drawing one picture takes .* more than the .* it may take; allow more"):
        draw_with(tiny, ["red apple"], memory=drawing_bytes(tiny.decoder, 1, 1, torch.float32) - 1)


def test_parts_are_whole_prompts_or_even_pieces_of_one() -> None:
    def batches(prompts: int, samples: int, most: int) -> list[list[tuple[int, int, int]]]:
        waiting = deque(PromptSlice(place, 0, samples) for place in range(prompts))
        taken = []
        while waiting:
            parts = next_batch(waiting, lambda prompts, samples: prompts * samples <= most)
            taken.append([(part.place, part.first, part.count) for part in parts])
        return taken

    assert batches(3, 2, 4) == [[(0, 0, 2), (1, 0, 2)], [(2, 0, 2)]]
    assert batches(2, 3, 2) == [[(0, 0, 2)], [(0, 2, 1)], [(1, 0, 2)], [(1, 2, 1)]]
    assert batches(1, 128, 100) == [[(0, 0, 64)], [(0, 64, 64)]]
    assert batches(2, 2, 0) == [[(0, 0, 1)], [(0, 1, 1)], [(1, 0, 1)], [(1, 1, 1)]]
    assert batches(1, 7, 7) == [[(0, 0, 7)]]


def test_out_of_memory_halves_the_batch_and_keeps_what_was_drawn(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's allocator refuses in the middle of the second batch."""
    expected = codes(draw_with(tiny, ["red apple", "sailboat"], samples=4, top_k=16))
    step, sizes = StepDecoder.step, []

    def refuse(self: StepDecoder, code: torch.Tensor, position: int) -> torch.Tensor:
        if position == 0:
            sizes.append(len(code))
        if len(sizes) == 2 and position == 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self, code, position)

    monkeypatch.setattr(StepDecoder, "step", refuse)
    said: list[str] = []
    drawn = draw_with(tiny, ["red apple", "sailboat"], samples=4, batch=4, top_k=16, on_message=said.append)
    assert sizes == [4, 4, 2, 2]
    assert codes(drawn) == expected
    assert said[1] == "out of memory with 4 pictures side by side; going on with 2"
    assert [line.split(":")[0] for line in said] == ["batch 4", said[1], "batch 2"]


def test_no_memory_for_a_single_picture(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StepDecoder, code: torch.Tensor, position: int) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(StepDecoder, "step", refuse)
    with pytest.raises(TTError, match="not enough memory to draw even one picture at a time: .*can't allocate"):
        draw_with(tiny, ["red apple"], samples=3)

    def broken(self: StepDecoder, code: torch.Tensor, position: int) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(StepDecoder, "step", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        draw_with(tiny, ["red apple"])


def drawn_in_little_memory() -> tuple[int, int, list[str]]:
    """Pictures, unlike ones, and what was said."""
    torch.set_num_threads(1)
    # The column layer's cache is one tensor of 4 MiB for each picture: 64 of them are refused at once.
    wide = {"model.heads": 64, "model.dim_head": 128, "model.attention_types": ["axial_col"]}
    tiny = Tiny.new(tiny_run().replaced({**wide, "model.last_attention": "axial_row"}))
    draw_with(tiny, ["red apple"], samples=1)  # all code is loaded now
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (250 << 20), resource.RLIM_INFINITY))
    said: list[str] = []
    drawings = draw_with(tiny, ["red apple"], samples=64, memory=1 << 40, on_message=said.append)
    return len(drawings), len({drawing.codes.tobytes() for drawing in drawings}), said


def test_a_computer_that_runs_out_of_memory() -> None:
    """In a process that may take only so much more, the system's allocator refuses 64 pictures at once."""
    with spawned({}) as call:
        pictures, different, said = call(drawn_in_little_memory).result()
    assert said[0] == "out of memory with 64 pictures side by side; going on with 32"
    assert said[1].startswith("batch 32: ")
    assert pictures == different == 64


def test_free_memory_is_there() -> None:
    free = free_memory(torch.device("cpu"))
    assert 1 << 20 < free < 1 << 50
    limit = memory_limit(torch.device("cpu"), None)
    assert 0 < limit.nbytes < free * 0.6
    assert memory_limit(torch.device("cpu"), 123).nbytes == 123


def test_chance_is_the_same_on_every_machine() -> None:
    assert candidate_noise(7, "red apple", 3, 2).tolist() == pytest.approx(FIRST_NUMBERS, abs=0)
    assert candidate_noise(7, "red apple", 4, 2).tolist() != pytest.approx(FIRST_NUMBERS, abs=0)
    # Pythons know of unlike letters: 3.11 writes the first of these as \U0001fae8, later ones as it is.
    assert candidate_noise(7, "\U0001fae8 caf\xe9", 3, 1).tolist() == pytest.approx([0.7965466946256938], abs=0)


def test_the_likeliest_codes_need_no_luck(tiny: Tiny) -> None:
    drawings = draw_with(tiny, ["red apple"], samples=3, top_k=1)
    assert codes(drawings)[0] == codes(drawings)[1] == codes(drawings)[2]


@pytest.mark.parametrize("batch", [1, 2, None])
def test_progress_goes_from_the_first_code_to_the_last(tiny: Tiny, batch: int | None) -> None:
    seen: list[tuple[int, int]] = []
    draw_with(
        tiny, ["a b", "c d", "e f"], samples=1, batch=batch,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = 3 * tiny.run.vqgan.grid**2
    done = [step for step, _ in seen]
    assert {of for _, of in seen} == {total}
    assert done == sorted(set(done)) and done[-1] == total
    assert len(done) == {1: 3, 2: 2, None: 1}[batch] * tiny.run.vqgan.grid**2


def test_what_is_done_comes_at_once(tiny: Tiny) -> None:
    """Not after the last: whoever saves it has it whatever happens then. One line says how large the batches are."""
    said: list[str] = []
    settings, seen = DrawingSettings(samples=3, batch=2), list[int]()
    prompts = ["red apple", "sailboat", "owl"]
    blocks = draw_in_turn(
        tiny, prompts, settings, on_progress=lambda done, total: seen.append(done), on_message=said.append
    )
    for number, block in enumerate(blocks, start=1):
        assert [(one.prompt, one.index) for one in block] == [(prompts[number - 1], index) for index in range(3)]
        assert seen[-1] == number * 3 * tiny.run.vqgan.grid**2
    assert codes(draw(tiny, prompts[2:], settings)) == codes(block)
    together = list(draw_in_turn(tiny, prompts, DrawingSettings(samples=3, batch=6), on_message=said.append))
    assert [len(block) for block in together] == [6, 3]


def test_refuses_an_empty_prompt_and_no_samples(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        draw_with(tiny, ["red apple", "  "])
    with pytest.raises(UsageError, match="samples is 0"):
        draw_with(tiny, ["red apple"], samples=0)


def test_says_which_prompts_are_cut(tiny: Tiny) -> None:
    long = "one two three four five six seven eight nine ten " * 4
    cut = cut_prompts(tiny.tokenizer, ["red apple", long])
    assert list(cut) == [long]
    assert 0 < len(cut[long]) < len(long) and long.startswith(cut[long].strip())


def test_a_model_that_learned_its_pictures_by_heart_draws_them() -> None:
    tiny = Tiny.new()
    before, _ = recall(tiny)
    tiny.train(40)
    after, drawings = recall(tiny, seed=1)
    assert (before.total, after.total) == (4, 4)
    assert before.right <= 2
    assert after.right == 4
    assert len({drawing.prompt for drawing in drawings}) == 4
    few, _ = recall(tiny, captions=2)
    assert few.total == 2
