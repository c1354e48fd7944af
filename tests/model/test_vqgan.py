"""The VQGAN: the published names and shapes, and the same function as the specification read tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tt_cli.errors import TTError
from tt_cli.model.vqgan import PUBLISHED, Vqgan, VqganConfig

SHAPES = Path(__file__).parent / "data" / "vqgan_published_shapes.json"
SMALL = VqganConfig(
    resolution=32,
    channels=8,
    channel_multipliers=(1, 1, 2, 4),
    num_res_blocks=2,
    attn_resolutions=(4,),
    z_channels=12,
    embed_dim=12,
    codebook_size=50,
    norm_groups=4,
)


def small_vqgan() -> Vqgan:
    """With biases and norms that are not their neutral initial values."""
    torch.manual_seed(0)
    vqgan = Vqgan(SMALL).eval()
    for parameter in vqgan.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return vqgan


class Reference:
    """The specification in the order it is written, over a state dict; nothing is shared with the model's code."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def conv(self, name: str, x: Tensor, **options: int) -> Tensor:
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **options)

    def norm(self, name: str, x: Tensor) -> Tensor:
        grouped = x.reshape(len(x), SMALL.norm_groups, -1)
        mean, variance = grouped.mean(-1, keepdim=True), grouped.var(-1, keepdim=True, correction=0)
        normal = ((grouped - mean) / (variance + 1e-6).sqrt()).reshape(x.shape)
        return normal * self.weights[f"{name}.weight"][:, None, None] + self.weights[f"{name}.bias"][:, None, None]

    def act(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()

    def resnet(self, name: str, x: Tensor) -> Tensor:
        h = self.conv(f"{name}.conv1", self.act(self.norm(f"{name}.norm1", x)), padding=1)
        h = self.conv(f"{name}.conv2", self.act(self.norm(f"{name}.norm2", h)), padding=1)
        return (self.conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in self.weights else x) + h

    def attention(self, name: str, x: Tensor) -> Tensor:
        y = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", y).flatten(2) for part in "qkv")
        weights = torch.einsum("bcq,bck->bqk", q, k).mul(x.shape[1] ** -0.5).softmax(-1)
        return x + self.conv(f"{name}.proj_out", torch.einsum("bqk,bck->bcq", weights, v).reshape(x.shape))

    def mid(self, name: str, x: Tensor) -> Tensor:
        x = self.attention(f"{name}.attn_1", self.resnet(f"{name}.block_1", x))
        return self.resnet(f"{name}.block_2", x)

    def end(self, name: str, x: Tensor) -> Tensor:
        return self.conv(f"{name}.conv_out", self.act(self.norm(f"{name}.norm_out", x)), padding=1)

    def encode(self, pictures: Tensor) -> Tensor:
        x = self.conv("encoder.conv_in", 2 * pictures - 1, padding=1)
        for level in range(4):
            for j in range(2):
                x = self.resnet(f"encoder.down.{level}.block.{j}", x)
                if level == 3:
                    x = self.attention(f"encoder.down.3.attn.{j}", x)
            if level < 3:
                padded = torch.zeros(*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1)
                padded[:, :, :-1, :-1] = x
                x = self.conv(f"encoder.down.{level}.downsample.conv", padded, stride=2)
        x = self.conv("quant_conv", self.end("encoder", self.mid("encoder.mid", x)))
        return self.conv("quantize.proj", x).argmax(1).flatten(1)

    def decode(self, codes: Tensor) -> Tensor:
        z = self.weights["quantize.embed.weight"][codes].transpose(1, 2).reshape(len(codes), -1, 4, 4)
        x = self.conv("decoder.conv_in", self.conv("post_quant_conv", z), padding=1)
        x = self.mid("decoder.mid", x)
        for level in (3, 2, 1, 0):
            for j in range(3):
                x = self.resnet(f"decoder.up.{level}.block.{j}", x)
                if level == 3:
                    x = self.attention(f"decoder.up.3.attn.{j}", x)
            if level > 0:
                x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = self.conv(f"decoder.up.{level}.upsample.conv", x, padding=1)
        return (self.end("decoder", x).clamp(-1, 1) + 1) / 2


def published_shapes() -> dict[str, tuple[int, ...]]:
    def walk(name: str, tree: dict) -> dict[str, tuple[int, ...]]:
        found = {}
        for key, value in tree.items():
            found.update(walk(f"{name}{key}.", value) if isinstance(value, dict) else {name + key: tuple(value)})
        return found

    return walk("", json.loads(SHAPES.read_text()))


def test_published_names_and_shapes() -> None:
    with torch.device("meta"):
        vqgan = Vqgan(PUBLISHED)
    shapes = {name: tuple(tensor.shape) for name, tensor in vqgan.state_dict().items()}
    assert len(shapes) == 301
    assert shapes == published_shapes()
    assert sum(parameter.numel() for parameter in vqgan.parameters()) == 68_995_971


def test_published_sizes() -> None:
    assert (PUBLISHED.factor, PUBLISHED.grid) == (8, 32)
    with torch.device("meta"):
        vqgan = Vqgan(PUBLISHED)
        assert vqgan.decode(torch.zeros(1, 1024, dtype=torch.int16)).shape == (1, 3, 256, 256)
        assert vqgan.encode(torch.zeros(1, 3, 256, 256)).shape == (1, 1024)


def test_encodes_as_specified() -> None:
    vqgan = small_vqgan()
    pictures = torch.rand(3, 3, 32, 32)
    codes = vqgan.encode(pictures)
    assert codes.dtype == torch.int64
    assert torch.equal(codes, Reference(vqgan.state_dict()).encode(pictures))
    assert torch.equal(codes, vqgan.encode(pictures)), "no noise"


def test_decodes_as_specified() -> None:
    vqgan = small_vqgan()
    codes = torch.randint(50, (3, 16))
    pictures = vqgan.decode(codes)
    expected = Reference(vqgan.state_dict()).decode(codes)
    assert ((expected > 0) & (expected < 1)).float().mean() > 0.1, "not all of it clamped"
    torch.testing.assert_close(pictures, expected, atol=1e-5, rtol=0)


def test_codes_are_in_raster_order() -> None:
    vqgan = small_vqgan()
    codes = torch.zeros(2, 16, dtype=torch.long)
    codes[1, 4 * 3 + 1] = 7
    z = []
    handle = vqgan.post_quant_conv.register_forward_pre_hook(lambda _, inputs: z.append(inputs[0]))
    vqgan.decode(codes)
    handle.remove()
    changed = (z[0][0] != z[0][1]).any(0).nonzero().tolist()
    assert changed == [[3, 1]]


def test_published_weights_load_without_their_losses() -> None:
    theirs = small_vqgan()
    state = {**theirs.state_dict(), "loss.perceptual_loss.net.slice1.0.weight": torch.zeros(2)}
    mine = Vqgan(SMALL)
    mine.load_published(state)
    pictures = torch.rand(2, 3, 32, 32)
    assert torch.equal(mine.eval().encode(pictures), theirs.encode(pictures))
    decoder = Vqgan(SMALL, with_encoder=False)
    decoder.load_published(state)
    codes = torch.randint(50, (1, 16))
    assert torch.equal(decoder.eval().decode(codes), theirs.decode(codes))
    with pytest.raises(TTError, match="decoder only"):
        decoder.encode(pictures)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("decoder.conv_in.bias"), "decoder.conv_in.bias is missing"),
        (lambda state: state.update({"decoder.extra": torch.zeros(1)}), "decoder.extra is unknown"),
        (lambda state: state.update({"quant_conv.bias": torch.zeros(3)}), r"quant_conv.bias has shape \(3,\)"),
    ],
)
def test_other_weights_are_refused(change, message) -> None:
    state = small_vqgan().state_dict()
    change(state)
    with pytest.raises(TTError, match=message):
        Vqgan(SMALL).load_published(state)


@pytest.mark.parametrize("field", [{"embed_dim": 16}, {"resolution": 20}, {"norm_groups": 3}])
def test_impossible_sizes_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        VqganConfig(**{**SMALL.__dict__, **field})


def test_codes_that_are_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="15 codes"):
        small_vqgan().decode(torch.zeros(1, 15, dtype=torch.long))
