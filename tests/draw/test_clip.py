"""Ranking by CLIP, with a real model of random weights."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from draw.small_clip import SIDE, save_clip, small_clip

from tt_cli.draw.clip_ranking import Clip, keep_best, load_clip, prepare
from tt_cli.draw.drawing import Drawing
from tt_cli.errors import TTError, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def clip(folder: Path) -> Clip:
    return load_clip(str(folder))


def pictures(count: int, side: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def drawings(prompt: str, count: int, seed: int = 0) -> list[Drawing]:
    return [Drawing(prompt, n, np.zeros(4, np.int64), picture) for n, picture in enumerate(pictures(count, 64, seed))]


@pytest.mark.parametrize("side", [16, 64, 100])
def test_pictures_are_prepared_as_the_models_own_processor_does(side: int) -> None:
    from transformers import CLIPImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    theirs = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    expected = theirs(list(pictures(3, side)), return_tensors="pt")["pixel_values"]
    assert torch.allclose(prepare(pictures(3, side), SIDE), expected, atol=1e-6)


@torch.no_grad()
def test_similarities_are_the_models_logits_without_their_scale(clip: Clip) -> None:
    model, tokenizer = small_clip()
    shown = pictures(5)
    answer = model(**tokenizer("red apple", return_tensors="pt"), pixel_values=prepare(shown, SIDE))
    expected = (answer.logits_per_image[:, 0] / model.logit_scale.exp()).numpy()
    found = clip.similarity("red apple", shown)
    assert np.allclose(found, expected, atol=1e-5)
    assert found.std() > 1e-3 and not np.allclose(found, clip.similarity("sailboat", shown), atol=1e-3)


def test_a_prompt_that_is_too_long_is_cut_off(clip: Clip) -> None:
    shown = pictures(2)
    assert np.array_equal(clip.similarity("a" * 14 + "b" * 99, shown), clip.similarity("a" * 14 + "c" * 99, shown))


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_the_best_of_each_prompt_are_kept_best_first(clip: Clip, batch: int) -> None:
    candidates = [*drawings("red apple", 7, 1), *drawings("sailboat", 5, 2)]
    ranked = keep_best(clip, candidates, 3, batch=batch)
    assert [one.prompt for one in ranked] == ["red apple"] * 3 + ["sailboat"] * 3
    for prompt, group in (("red apple", candidates[:7]), ("sailboat", candidates[7:])):
        own = {drawing.index: float(clip.similarity(prompt, drawing.picture[None])[0]) for drawing in group}
        best = sorted(own, key=lambda index: -own[index])[:3]
        assert [one.index for one in ranked if one.prompt == prompt] == best
        for one in ranked:
            if one.prompt == prompt:
                assert one.similarity == pytest.approx(own[one.index], abs=1e-5)
    assert len(keep_best(clip, candidates)) == 12


def test_equal_pictures_keep_their_order(clip: Clip) -> None:
    same = pictures(1)[0]
    ranked = keep_best(clip, [Drawing("owl", n, np.zeros(4, np.int64), same) for n in range(4)], 4)
    assert [one.index for one in ranked] == [0, 1, 2, 3]


def torch_form(folder: Path, into: Path, **more: object) -> Path:
    """As it is published: a pickled state dict, with positions that later versions left out."""
    into.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (into / name).write_bytes((folder / name).read_bytes())
    model, _ = small_clip()
    positions = {"text_model.embeddings.position_ids": torch.arange(16)[None]}
    torch.save({**model.state_dict(), **positions, **more}, into / "pytorch_model.bin")
    return into


def test_weights_as_openai_published_them(clip: Clip, folder: Path, tmp_path: Path) -> None:
    other = load_clip(str(torch_form(folder, tmp_path / "torch")))
    assert np.allclose(other.similarity("red apple", pictures(2)), clip.similarity("red apple", pictures(2)), atol=1e-5)


class Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harmed",)


def test_weights_that_hold_code_are_refused_and_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = torch_form(folder, tmp_path / "torch", harm=Harm())
    with pytest.raises(TTError, match="holds more than tensors") as error:
        load_clip(str(place))
    (place / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(), protocol=2))
    with pytest.raises(TTError):
        load_clip(str(place))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harmed").exists()


def test_wrong_places_are_one_line(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    empty, other, torn = tmp_path / "empty", tmp_path / "other", tmp_path / "torn"
    empty.mkdir()
    torch_form(folder, other)
    (other / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    torch_form(folder, torn)
    state = torch.load(torn / "pytorch_model.bin", weights_only=True)
    del state["visual_projection.weight"]
    torch.save(state, torn / "pytorch_model.bin")
    for place, kind, words in (
        (empty, UsageError, "is no CLIP model: it needs config.json and model.safetensors or pytorch_model.bin"),
        (other, UsageError, "config.json is that of a bert model"),
        (torn, TTError, "lacks 1 tensors, such as visual_projection.weight"),
        ("~no-such-user/clip", UsageError, "no such folder"),
        (tmp_path / "nowhere", UsageError, "no such folder; else name one on the Hub as OWNER/NAME"),
    ):
        with pytest.raises(kind, match="--clip") as error:
            load_clip(str(place))
        assert words in str(error.value) and "\n" not in str(error.value)


def test_without_transformers_it_says_how_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'tt-cli\[clip\]'"):
        load_clip(str(folder))
