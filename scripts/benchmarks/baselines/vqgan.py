"""The plain VQGAN decoder: the published architecture in the order its description is read, in torch's own modules.

Notable:
- nothing of tt_cli in the decoder: one module for each published name, attention as two einsums, no memory format,
  no step in place, as the code that came with the weights runs it;
- `plain_decoder(state_dict)` is that decoder over published names, for tests and benchmarks;
- `compare(threads, quick)` times it beside tt_cli's in one process, in turns, on random weights of the published
  size, checks that the pictures agree, and returns {"vqgan_decode_ratio": …, …} as scripts/bench infer prints it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.benchmarks.process_figures import seconds_on
from tt_cli.model.vqgan import PUBLISHED, Vqgan

TOLERANCE = 1e-4  # of pictures in [0, 1]: a fortieth of one of 255 steps; float32 in another order gives 1e-6
GROUPS = 32


class Resnet(nn.Module):
    """(b, c_in, h, w) → (b, c_out, h, w)."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, c_in, eps=1e-6)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, c_out, eps=1e-6)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        h = self.conv1(h * torch.sigmoid(h))
        h = self.norm2(h)
        h = self.conv2(h * torch.sigmoid(h))
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(x)
        return x + h


class Attention(nn.Module):
    """One head over all positions: (b, c, h, w) → the same."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, c, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x)
        q, k, v = (conv(y).reshape(b, c, h * w) for conv in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("bcq,bck->bqk", q, k) * c**-0.5, dim=2)
        return x + self.proj_out(torch.einsum("bqk,bck->bcq", weights, v).reshape(b, c, h, w))


class Upsample(nn.Module):
    """(b, c, h, w) → (b, c, 2h, 2w)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Decoder(nn.Module):
    """The published decoder: 512 channels at 32x32, 256 at 64x64, 128 at 128x128 and at 256x256."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(256, 512, 3, padding=1)
        self.mid = nn.ModuleDict({"block_1": Resnet(512, 512), "attn_1": Attention(512), "block_2": Resnet(512, 512)})
        widths = (128, 128, 256, 512)
        levels = []
        for level, (c_in, c_out) in enumerate(zip((128, 256, 512, 512), widths, strict=True)):
            parts: dict[str, nn.Module] = {
                "block": nn.ModuleList([Resnet(c_in, c_out), Resnet(c_out, c_out), Resnet(c_out, c_out)]),
                "attn": nn.ModuleList(Attention(c_out) for _ in range(3 if level == 3 else 0)),
            }
            if level > 0:
                parts["upsample"] = Upsample(c_out)
            levels.append(nn.ModuleDict(parts))
        self.up = nn.ModuleList(levels)
        self.norm_out = nn.GroupNorm(GROUPS, 128, eps=1e-6)
        self.conv_out = nn.Conv2d(128, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for name in ("block_1", "attn_1", "block_2"):
            x = self.mid[name](x)
        for level in (3, 2, 1, 0):
            parts: Any = self.up[level]
            for index in range(3):
                x = parts["block"][index](x)
                if level == 3:
                    x = parts["attn"][index](x)
            if level > 0:
                x = parts["upsample"](x)
        x = self.norm_out(x)
        return self.conv_out(x * torch.sigmoid(x))


class PlainVqgan(nn.Module):
    """Codes (b, n * n) int64 → pictures (b, 3, 8n, 8n) in [0, 1]; n is 32 in the paper's run."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = nn.ModuleDict({"embed": nn.Embedding(8192, 256)})
        self.post_quant_conv = nn.Conv2d(256, 256, 1)
        self.decoder = Decoder()

    def forward(self, codes: Tensor) -> Tensor:
        side = math.isqrt(codes.shape[1])
        z = self.quantize["embed"](codes).reshape(len(codes), side, side, 256).permute(0, 3, 1, 2).contiguous()
        raw = self.decoder(self.post_quant_conv(z))
        return (raw.clamp(-1, 1) + 1) / 2


def plain_decoder(state_dict: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The plain decoder over published weights; it takes what it needs of them and keeps their device and dtype."""
    with torch.device("meta"):
        model = PlainVqgan()
    model.load_state_dict({name: state_dict[name] for name in model.state_dict()}, assign=True)
    model.eval().requires_grad_(False)

    @torch.no_grad()
    def decode(codes: Tensor) -> Tensor:
        return model(codes)

    return decode


def compare(threads: int, quick: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Pictures per second of both decoders at batch 1 and 8, the best of alternating rounds, and their ratio.

    `quick` is two rounds of batch 1. `vqgan_decode_ratio` is the smaller of the batches' ratios. Raises AssertionError
    if the pictures differ. On a GPU both are timed in their best dtype: tt_cli's chooses by itself, the plain one gets
    bfloat16.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    fast = Vqgan(PUBLISHED, with_encoder=False).to(device).eval()
    plain = plain_decoder(fast.state_dict())
    codes = torch.randint(PUBLISHED.codebook_size, (8, PUBLISHED.grid**2), device=device)
    gpu = device != "cpu"
    difference = float((fast.decode(codes[:1]) - plain(codes[:1])).abs().max())
    assert difference < (0.05 if gpu else TOLERANCE), f"the pictures differ by {difference}"
    if gpu:
        plain = plain_decoder({name: tensor.bfloat16() for name, tensor in fast.state_dict().items()})
    facts: dict[str, Any] = {"vqgan_decode_difference": difference}
    batches = (1,) if quick else (1, 8)
    for batch in batches:
        rounds = 2 if quick else 5 if batch == 1 else 3
        mine: list[float] = []
        theirs: list[float] = []
        for part in [codes[:batch]] * rounds:
            for decode, times in ((plain, theirs), (fast.decode, mine)):
                if gpu:
                    decode(part)  # a GPU's first call chooses its algorithms
                times.append(seconds_on(part.device, partial(decode, part)))
        facts[f"vqgan_decode_b{batch}_per_second"] = round(batch / min(mine), 3)
        facts[f"vqgan_plain_b{batch}_per_second"] = round(batch / min(theirs), 3)
        facts[f"vqgan_decode_b{batch}_ratio"] = round(min(theirs) / min(mine), 3)
    facts["vqgan_decode_ratio"] = min(facts[f"vqgan_decode_b{batch}_ratio"] for batch in batches)
    return facts
