"""Codes to pictures: the built-in VQGAN shows an emoji that one knows, and foreign weights are read with care."""

from __future__ import annotations

import dataclasses
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tt_cli.data import builtin
from tt_cli.errors import TTError, UsageError
from tt_cli.model.vqgan import PUBLISHED, Vqgan
from tt_cli.run import RunConfig, load_run
from tt_cli.task import picture_codec
from tt_cli.task.picture_codec import decode_pictures, load_vqgan

RENDERED = Path(__file__).parent / "files" / "red-apple.png"  # by scripts/build_emoji.py, from Noto Color Emoji (OFL)
TINY = dataclasses.replace(
    PUBLISHED,
    resolution=32,
    channels=4,
    num_res_blocks=1,
    attn_resolutions=(4,),
    z_channels=4,
    embed_dim=4,
    codebook_size=12,
    norm_groups=2,
)


@pytest.fixture(scope="module")
def emoji() -> Vqgan:
    return load_vqgan(load_run("emoji"))


def psnr(left: np.ndarray, right: np.ndarray) -> float:
    return float(-10 * np.log10(np.square((left.astype(float) - right) / 255).mean()))


def test_the_red_apple_is_one(emoji: Vqgan) -> None:
    apple = np.asarray(Image.open(RENDERED).convert("RGB"))
    codes = {example.caption: example.codes for example in builtin.examples("emoji")}
    (decoded,) = decode_pictures(emoji, codes["red apple"][None])
    assert decoded.shape == (64, 64, 3)
    assert decoded.dtype == np.uint8
    assert psnr(decoded, apple) > 22
    (pear,) = decode_pictures(emoji, codes["pear"][None])
    assert psnr(pear, apple) < 15, "another picture is far away"


def test_the_built_in_encoder_gives_the_shipped_codes(emoji: Vqgan) -> None:
    """Up to a few near ties: the last bits of a convolution depend on the processor."""
    apple = torch.from_numpy(np.array(Image.open(RENDERED).convert("RGB"))).permute(2, 0, 1)[None] / 255
    codes = {example.caption: example.codes for example in builtin.examples("emoji")}["red apple"]
    assert (emoji.encode(apple)[0].numpy() == codes).sum() >= 60


def test_decoding_sixteen_pictures_takes_well_under_a_second(emoji: Vqgan) -> None:
    codes = np.stack([example.codes for example in builtin.examples("emoji")[:16]])
    started = time.thread_time()
    assert decode_pictures(emoji, codes).shape == (16, 64, 64, 3)
    assert time.thread_time() - started < 1


def test_batches_of_any_size_give_the_same_pictures(emoji: Vqgan) -> None:
    codes = np.stack([example.codes for example in builtin.examples("emoji")[:5]])
    one, many = decode_pictures(emoji, codes, batch=2), decode_pictures(emoji, torch.from_numpy(codes).long())
    assert np.abs(one.astype(int) - many).max() <= 1
    assert decode_pictures(emoji, codes[:0]).shape == (0, 64, 64, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vqgan.codebook_size": 512}, "vqgan.codebook_size is 512 in the run file, but the VQGAN emoji has 1024"),
        ({"vqgan.grid": 16, "vqgan.pixels": 128}, "vqgan.grid is 16 in the run file, but the VQGAN emoji has 8"),
        ({"vqgan.pixels": 32}, "vqgan.pixels is 32 in the run file, but the VQGAN emoji has 64"),
        ({"vqgan.name": "emojo"}, "no built-in data set is called 'emojo'"),
    ],
)
def test_a_run_file_of_other_sizes_is_refused(changes, message) -> None:
    with pytest.raises(UsageError, match=message):
        load_vqgan(load_run("emoji").replaced(changes))


def hub_run(monkeypatch: pytest.MonkeyPatch, path: Path) -> RunConfig:
    """A run with a VQGAN from the Hub: the published architecture, but tiny, with weights at `path`."""
    monkeypatch.setattr(picture_codec, "PUBLISHED", TINY)
    monkeypatch.setattr(picture_codec, "download", lambda name, filename, revision: path)
    sizes = {"vqgan.codebook_size": 12, "vqgan.grid": 4, "vqgan.pixels": 32}
    return load_run("emoji").replaced({"vqgan.source": "hub", "vqgan.filename": path.name, **sizes})


@pytest.mark.parametrize("filename", ["model.safetensors", "last.ckpt"])
def test_published_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, filename: str) -> None:
    theirs = Vqgan(TINY).eval()
    state = {**theirs.state_dict(), "loss.discriminator.main.0.weight": torch.zeros(2)}
    if filename.endswith(".safetensors"):
        safetensors.torch.save_file(state, tmp_path / filename)
    else:
        torch.save({"state_dict": state, "epoch": 1, "global_step": 2}, tmp_path / filename)
    mine = load_vqgan(hub_run(monkeypatch, tmp_path / filename))
    codes = torch.randint(12, (2, 16))
    assert torch.equal(mine.decode(codes), theirs.decode(codes))
    assert not any(parameter.requires_grad for parameter in mine.parameters())


def test_weights_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = Vqgan(TINY).state_dict()
    state["decoder.mid.attn_1.q.bias"][2] = torch.nan
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(TTError, match="decoder.mid.attn_1.q.bias holds values that are not finite"):
        load_vqgan(hub_run(monkeypatch, tmp_path / "model.safetensors"))


class Payload:
    """What a malicious file would run when it is opened."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return Path.touch, (self.witness,)


def test_a_checkpoint_with_code_in_it_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": Payload(tmp_path / "witness")}, tmp_path / "last.ckpt")
    with pytest.raises(TTError, match="holds more than tensors .* and is not opened"):
        load_vqgan(hub_run(monkeypatch, tmp_path / "last.ckpt"))
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize(
    ("filename", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("last.ckpt", b""),
        ("last.ckpt", b"PK\x03\x04" + b"\0" * 100),
        ("last.ckpt", pickle.dumps([1, 2, 3], protocol=2)),
    ],
)
def test_a_broken_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, filename: str, content: bytes
) -> None:
    (tmp_path / filename).write_bytes(content)
    with pytest.raises(TTError, match="the VQGAN weights") as caught:
        load_vqgan(hub_run(monkeypatch, tmp_path / filename))
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    safetensors.torch.save_file({"encoder.conv_in.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(TTError, match="not the weights of this VQGAN"):
        load_vqgan(hub_run(monkeypatch, tmp_path / "model.safetensors"))
