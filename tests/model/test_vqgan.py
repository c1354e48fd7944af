"""The VQGAN: the published names and shapes, and the same function as the specification read tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scripts.benchmarks.baselines.vqgan import plain_decoder
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


def small_vqgan(config: VqganConfig = SMALL, seed: int = 0) -> Vqgan:
    """With biases and norms that are not their neutral initial values."""
    torch.manual_seed(seed)
    vqgan = Vqgan(config).eval()
    for parameter in vqgan.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return vqgan


class Reference:
    """The specification in the order it is written, over a state dict; nothing is shared with the model's code."""

    def __init__(self, vqgan: Vqgan) -> None:
        self.weights = dict(vqgan.named_parameters())
        self.config = vqgan.config
        self.levels = len(vqgan.config.channel_multipliers)

    def conv(self, name: str, x: Tensor, **options: int) -> Tensor:
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **options)

    def norm(self, name: str, x: Tensor) -> Tensor:
        grouped = x.reshape(len(x), self.config.norm_groups, -1)
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

    def blocks(self, name: str, level: int, count: int, x: Tensor) -> Tensor:
        for j in range(count):
            x = self.resnet(f"{name}.{level}.block.{j}", x)
            if self.config.resolution // 2**level in self.config.attn_resolutions:
                x = self.attention(f"{name}.{level}.attn.{j}", x)
        return x

    def mid(self, name: str, x: Tensor) -> Tensor:
        x = self.attention(f"{name}.attn_1", self.resnet(f"{name}.block_1", x))
        return self.resnet(f"{name}.block_2", x)

    def end(self, name: str, x: Tensor) -> Tensor:
        return self.conv(f"{name}.conv_out", self.act(self.norm(f"{name}.norm_out", x)), padding=1)

    def logits(self, pictures: Tensor) -> Tensor:
        x = self.conv("encoder.conv_in", 2 * pictures - 1, padding=1)
        for level in range(self.levels):
            x = self.blocks("encoder.down", level, self.config.num_res_blocks, x)
            if level < self.levels - 1:
                padded = torch.zeros(*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1)
                padded[:, :, :-1, :-1] = x
                x = self.conv(f"encoder.down.{level}.downsample.conv", padded, stride=2)
        x = self.conv("quant_conv", self.end("encoder", self.mid("encoder.mid", x)))
        return self.conv("quantize.proj", x)

    def encode(self, pictures: Tensor) -> Tensor:
        return self.logits(pictures).argmax(1).flatten(1)

    def raw(self, codes: Tensor) -> Tensor:
        side = round(codes.shape[1] ** 0.5)
        z = self.weights["quantize.embed.weight"][codes].transpose(1, 2).reshape(len(codes), -1, side, side)
        x = self.conv("decoder.conv_in", self.conv("post_quant_conv", z), padding=1)
        x = self.mid("decoder.mid", x)
        for level in reversed(range(self.levels)):
            x = self.blocks("decoder.up", level, self.config.num_res_blocks + 1, x)
            if level > 0:
                x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = self.conv(f"decoder.up.{level}.upsample.conv", x, padding=1)
        return self.end("decoder", x)

    def decode(self, codes: Tensor) -> Tensor:
        return (self.raw(codes).clamp(-1, 1) + 1) / 2


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
    assert torch.equal(codes, Reference(vqgan).encode(pictures))
    assert torch.equal(codes, vqgan.encode(pictures)), "no noise"


configs = st.builds(
    lambda channels, groups, multipliers, blocks, grid, attention, width: VqganConfig(
        resolution=grid << (len(multipliers) - 1),
        channels=channels * groups,
        channel_multipliers=tuple(multipliers),
        num_res_blocks=blocks,
        attn_resolutions=tuple(grid << level for level in attention),
        z_channels=width,
        embed_dim=width,
        codebook_size=11,
        norm_groups=groups,
    ),
    channels=st.integers(2, 4),
    groups=st.integers(1, 3),
    multipliers=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    blocks=st.integers(1, 2),
    grid=st.integers(1, 5),
    attention=st.sets(st.integers(0, 2)),
    width=st.integers(1, 5),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(configs, st.integers(1, 3), st.integers(0, 99))
def test_any_size_is_as_specified(config: VqganConfig, batch: int, seed: int) -> None:
    vqgan = small_vqgan(config, seed)
    reference = Reference(vqgan)
    with torch.no_grad():
        codes = torch.randint(11, (batch, config.grid**2))
        torch.testing.assert_close(vqgan.decode(codes), reference.decode(codes), atol=1e-4, rtol=0)
        pictures = torch.rand(batch, 3, config.resolution, config.resolution)
        logits = reference.logits(pictures).flatten(2)
        chosen = logits.gather(1, vqgan.encode(pictures)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= 1e-4 * logits.abs().max(), "the largest, up to rounding"


def test_the_published_decoder_is_the_plain_one() -> None:
    """All channels and blocks of the published model, on a picture of 4x4 codes."""
    vqgan = Vqgan(PUBLISHED).eval()
    codes = torch.randint(8192, (1, 16), generator=torch.Generator().manual_seed(0))
    expected = plain_decoder(vqgan.state_dict())(codes)
    assert expected.std() > 0.01
    torch.testing.assert_close(vqgan.decode(codes), expected, atol=1e-5, rtol=0)


def test_gradients_are_as_specified() -> None:
    """What saves memory in drawing must not spoil training."""
    vqgan = small_vqgan()
    pictures = torch.rand(2, 3, 32, 32)
    codes = torch.randint(50, (2, 16))

    def gradients(logits: Tensor, raw: Tensor) -> dict[str, Tensor]:
        vqgan.zero_grad()
        (logits.square().mean() + raw.square().mean()).backward()
        return {name: parameter.grad.clone() for name, parameter in vqgan.named_parameters()}

    embedded = vqgan.quantize.embed(codes).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    mine = gradients(vqgan.quantize.proj(vqgan.latents(pictures)), vqgan.raw(embedded))
    reference = Reference(vqgan)
    theirs = gradients(reference.logits(pictures), reference.raw(codes))
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-4, rtol=1e-3, msg=name)


def test_half_precision_pictures_are_close() -> None:
    """As on a GPU: activations in bfloat16 over weights in float32."""
    vqgan = small_vqgan()
    embedded = vqgan.quantize.embed(torch.randint(50, (2, 16))).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    with torch.no_grad():
        half, whole = vqgan.raw(embedded.bfloat16()), vqgan.raw(embedded)
    assert half.dtype == torch.bfloat16
    assert 0 < (half - whole).abs().max() < 0.05 * whole.abs().max()


def test_pictures_are_taken_in_turns() -> None:
    """65,536 pixels at a time on a CPU, whatever the batch; the pictures are those of one at a time."""
    vqgan = small_vqgan()
    seen: list[int] = []
    for part in (vqgan.encoder, vqgan.decoder):
        part.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    codes = torch.randint(50, (65, 16))
    pictures = vqgan.decode(codes)
    assert vqgan.encode(pictures).shape == codes.shape
    assert seen == [64, 1, 64, 1]
    torch.testing.assert_close(pictures[64:], vqgan.decode(codes[64:]), atol=1e-6, rtol=0)
    assert vqgan.decode(codes[:0]).shape == (0, 3, 32, 32)


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
        (lambda state: state["decoder.up.2.block.0.norm1.bias"].fill_(torch.inf), "2.block.0.norm1.bias holds values"),
        (lambda state: state["quantize.embed.weight"][3].fill_(torch.nan), "quantize.embed.weight holds values"),
        (lambda state: state.update({"quant_conv.bias": torch.zeros(12).int()}), "quant_conv.bias is torch.int32"),
    ],
)
def test_other_weights_are_refused(change, message) -> None:
    state = small_vqgan().state_dict()
    change(state)
    vqgan = Vqgan(SMALL)
    before = {name: tensor.clone() for name, tensor in vqgan.state_dict().items()}
    with pytest.raises(TTError, match=message):
        vqgan.load_published(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vqgan.state_dict().items())


@pytest.mark.parametrize("field", [{"embed_dim": 16}, {"resolution": 20}, {"norm_groups": 3}])
def test_impossible_sizes_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        VqganConfig(**{**SMALL.__dict__, **field})


def test_codes_that_are_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="15 codes"):
        small_vqgan().decode(torch.zeros(1, 15, dtype=torch.long))
