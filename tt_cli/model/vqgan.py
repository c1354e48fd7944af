"""The VQGAN that turns pictures into codes and codes into pictures (taming-transformers' "GumbelVQ").

Notable:
- any size: the published f8/8192 model (`PUBLISHED`) and the small one of the built-in run are the same code;
- parameter names are those of the published checkpoint, so its state dict loads as it is;
- a code is the argmax of `quantize.proj`; the reference adds Gumbel noise even at inference, which makes its
  codes random. The argmax is the mode of that distribution;
- built without its encoder, the model decodes only (a peer that draws needs no more);
- on a CPU activations are channels-last, in which convolutions are up to twice as fast; on a GPU that has
  bfloat16 pictures are drawn in it, while codes are always computed in float32 (a near tie would give another);
- doubling the resolution and the convolution after it are four small convolutions of what is there: 4/9 of
  the work and no enlarged copy;
- any number of pictures needs the memory of a few: `encode` and `decode` take them in turns.

Source: Esser et al. 2021, "Taming Transformers for High-Resolution Image Synthesis", and its code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tt_cli.errors import TTError
from tt_cli.model.layers.projection import drawing_dtype
from tt_cli.model.published_names import all_finite


@dataclass(frozen=True)
class VqganConfig:
    """Sizes of a VQGAN; `PUBLISHED` is the model that the paper's run uses.

    `channel_multipliers` has one entry per resolution, from the picture's down to the code grid's, so the picture
    is `2 ** (len - 1)` times as wide as the grid. Attention follows each block of the levels whose resolution is
    in `attn_resolutions`. `norm_groups` must divide every level's number of channels.
    """

    resolution: int
    channels: int
    channel_multipliers: tuple[int, ...]
    num_res_blocks: int
    attn_resolutions: tuple[int, ...]
    z_channels: int
    embed_dim: int
    codebook_size: int
    norm_groups: int = 32

    def __post_init__(self) -> None:
        if self.z_channels != self.embed_dim:
            raise ValueError(f"z_channels ({self.z_channels}) and embed_dim ({self.embed_dim}) must be equal")
        if self.resolution % self.factor:
            raise ValueError(f"resolution {self.resolution} is not a multiple of {self.factor}")
        if any(width % self.norm_groups for width in self.level_channels):
            raise ValueError(f"norm_groups {self.norm_groups} does not divide the widths {self.level_channels}")

    @property
    def factor(self) -> int:
        """Pixels of the picture's side per code of the grid's side (8 for f8)."""
        return 1 << (len(self.channel_multipliers) - 1)

    @property
    def grid(self) -> int:
        """Side of the code grid; a picture has `grid ** 2` codes."""
        return self.resolution // self.factor

    @property
    def level_channels(self) -> tuple[int, ...]:
        return tuple(self.channels * multiplier for multiplier in self.channel_multipliers)

    def has_attention(self, level: int) -> bool:
        """Decide by the nominal resolution, not by that of the picture at hand (as in the reference)."""
        return self.resolution >> level in self.attn_resolutions


PUBLISHED = VqganConfig(
    resolution=256,
    channels=128,
    channel_multipliers=(1, 1, 2, 4),
    num_res_blocks=2,
    attn_resolutions=(32,),
    z_channels=256,
    embed_dim=256,
    codebook_size=8192,
)


class Norm(nn.GroupNorm):
    """Group normalisation in its input's dtype, with statistics in float32."""

    def __init__(self, config: VqganConfig, channels: int) -> None:
        super().__init__(config.norm_groups, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)

    def activated(self, x: Tensor) -> Tensor:
        """The norm and then x * sigmoid(x), which needs no memory of its own unless there will be a backward pass."""
        return F.silu(self(x), inplace=not torch.is_grad_enabled())


class Conv(nn.Conv2d):
    """A convolution in its input's dtype; its weights may be of another."""

    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), self.stride, self.padding)

    def over_channels(self, x: Tensor) -> Tensor:
        """A 1x1 convolution of (b, n, c_in) → (b, n, c_out)."""
        return F.linear(x, self.weight.flatten(1).to(x.dtype), self.bias.to(x.dtype))


def _conv3(channels_in: int, channels_out: int) -> Conv:
    return Conv(channels_in, channels_out, 3, padding=1)


class ResnetBlock(nn.Module):
    """(b, c_in, h, w) → (b, c_out, h, w)."""

    def __init__(self, config: VqganConfig, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = Norm(config, channels_in)
        self.conv1 = _conv3(channels_in, channels_out)
        self.norm2 = Norm(config, channels_out)
        self.conv2 = _conv3(channels_out, channels_out)
        if channels_in != channels_out:
            self.nin_shortcut = Conv(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.norm1.activated(x))
        h = self.conv2(self.norm2.activated(h))
        return h.add_(self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """One-headed self-attention over all positions, with a residual: (b, c, h, w) → the same."""

    def __init__(self, config: VqganConfig, channels: int) -> None:
        super().__init__()
        self.norm = Norm(config, channels)
        self.q = Conv(channels, channels, 1)
        self.k = Conv(channels, channels, 1)
        self.v = Conv(channels, channels, 1)
        self.proj_out = Conv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).permute(0, 2, 3, 1).flatten(1, 2)  # (b, hw, c): a view if channels-last
        q, k, v = (conv.over_channels(y)[:, None] for conv in (self.q, self.k, self.v))  # one head
        out = F.scaled_dot_product_attention(q, k, v)[:, 0]  # scales by c ** -0.5
        return x + self.proj_out.over_channels(out).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)


class Downsample(nn.Module):
    """Halves the resolution; pads right and bottom only, as the reference does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


# Of a doubled line, an even position and its two neighbours are the line's positions i - 1, i, i; an odd one and
# its neighbours are i, i, i + 1. So taps that meet the same position add up: [even or odd][tap of two][tap of three].
_TAPS = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))


@lru_cache(maxsize=4)
def _taps(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_TAPS, dtype=dtype, device="cpu").to(device)


class Upsample(nn.Module):
    """Doubles the resolution: nearest neighbour, then a 3x3 convolution.

    Computed without the doubled picture: its even and odd rows and columns are 2x2 convolutions of the input.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _conv3(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        taps = _taps(self.conv.weight.dtype, x.device)
        weights = torch.einsum("yar,xbs,oirs->yxoiab", taps, taps, self.conv.weight).to(x.dtype)
        bias = self.conv.bias.to(x.dtype)
        b, c, h, w = x.shape
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        out = torch.empty((b, c, 2 * h, 2 * w), dtype=x.dtype, device=x.device, memory_format=layout)
        for row in range(2):
            for column in range(2):
                phase = F.conv2d(x, weights[row, column], bias, padding=1)  # (b, c, h + 1, w + 1)
                out[:, :, row::2, column::2] = phase[:, :, row : row + h, column : column + w]
        return out


class Mid(nn.Module):
    """The blocks at the lowest resolution."""

    def __init__(self, config: VqganConfig, channels: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(config, channels, channels)
        self.attn_1 = AttnBlock(config, channels)
        self.block_2 = ResnetBlock(config, channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """The blocks of one resolution, each followed by attention where the config asks for it.

    The encoder and the decoder add the step to the next resolution: the published names put it into the level.
    """

    downsample: Downsample
    upsample: Upsample

    def __init__(self, config: VqganConfig, level: int, channels_in: int, blocks: int) -> None:
        super().__init__()
        width = config.level_channels[level]
        self.block = nn.ModuleList(ResnetBlock(config, channels_in if i == 0 else width, width) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(config, width) for _ in range(blocks if config.has_attention(level) else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        if hasattr(self, "downsample"):
            x = self.downsample(x)
        if hasattr(self, "upsample"):
            x = self.upsample(x)
        return x


class Encoder(nn.Module):
    """(b, 3, H, W) in [-1, 1] → (b, z_channels, H / factor, W / factor)."""

    def __init__(self, config: VqganConfig) -> None:
        super().__init__()
        widths = config.level_channels
        self.conv_in = _conv3(3, config.channels)
        self.down = nn.ModuleList()
        for level, before in enumerate((config.channels, *widths[:-1])):
            part = Level(config, level, before, config.num_res_blocks)
            if level < len(widths) - 1:
                part.downsample = Downsample(widths[level])
            self.down.append(part)
        self.mid = Mid(config, widths[-1])
        self.norm_out = Norm(config, widths[-1])
        self.conv_out = _conv3(widths[-1], config.z_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for part in self.down:
            x = part(x)
        return self.conv_out(self.norm_out.activated(self.mid(x)))


class Decoder(nn.Module):
    """(b, z_channels, h, w) → (b, 3, h * factor, w * factor), about [-1, 1] but unbounded."""

    def __init__(self, config: VqganConfig) -> None:
        super().__init__()
        widths = config.level_channels
        self.conv_in = _conv3(config.z_channels, widths[-1])
        self.mid = Mid(config, widths[-1])
        parts: list[Level] = []
        for level, before in reversed([*enumerate((*widths[1:], widths[-1]))]):
            part = Level(config, level, before, config.num_res_blocks + 1)
            if level > 0:
                part.upsample = Upsample(widths[level])
            parts.insert(0, part)  # named by level; run from the last to the first
        self.up = nn.ModuleList(parts)
        self.norm_out = Norm(config, widths[0])
        self.conv_out = _conv3(widths[0], 3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for part in reversed(self.up):
            x = part(x)
        return self.conv_out(self.norm_out.activated(x))


class Quantizer(nn.Module):
    """Logits over the codebook, and the codebook. It is *not* a nearest-neighbour search (see `Vqgan.encode`)."""

    def __init__(self, config: VqganConfig) -> None:
        super().__init__()
        self.proj = Conv(config.embed_dim, config.codebook_size, 1)
        self.embed = nn.Embedding(config.codebook_size, config.embed_dim)


class Vqgan(nn.Module):
    """Pictures to codes and back; codes are numbered row by row from the top left."""

    def __init__(self, config: VqganConfig, *, with_encoder: bool = True) -> None:
        super().__init__()
        self.config = config
        self.quantize = Quantizer(config)
        self.post_quant_conv = Conv(config.embed_dim, config.z_channels, 1)
        self.decoder = Decoder(config)
        if with_encoder:
            self.encoder = Encoder(config)
            self.quant_conv = Conv(config.z_channels, config.embed_dim, 1)

    @property
    def has_encoder(self) -> bool:
        return hasattr(self, "encoder")

    def latents(self, pictures: Tensor) -> Tensor:
        """Pictures (b, 3, H, W) in [0, 1] → what the quantizer sees, (b, embed_dim, h, w)."""
        return self.quant_conv(self.encoder(2 * pictures - 1))

    def raw(self, embedded: Tensor) -> Tensor:
        """Codebook vectors (b, embed_dim, h, w) → pictures (b, 3, H, W), about [-1, 1] but unbounded."""
        return self.decoder(self.post_quant_conv(embedded))

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Pictures (b, 3, H, W), floating point in [0, 1] → codes (b, h * w) int64.

        Raises TTError if this model was built without its encoder.
        """
        if not self.has_encoder:
            raise TTError("these VQGAN weights hold the decoder only: pictures cannot be encoded with them")
        parts = pictures.split(_at_once(pictures.device, pictures.shape[2] * pictures.shape[3]))
        with _exact_convolutions(pictures.device):
            return torch.cat([self.quantize.proj(self.latents(_laid_out(x))).argmax(dim=1).flatten(1) for x in parts])

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes (b, n) of a square grid, any integer type → pictures (b, 3, H, W) in [0, 1]."""
        side = math.isqrt(codes.shape[1])
        if side * side != codes.shape[1]:
            raise ValueError(f"{codes.shape[1]} codes are no square grid")
        parts = codes.long().split(_at_once(codes.device, codes.shape[1] * self.config.factor**2))
        return torch.cat([self._decoded(part.unflatten(1, (side, side))) for part in parts])

    def _decoded(self, codes: Tensor) -> Tensor:
        """Codes (b, h, w) → pictures (b, 3, H, W) of the weights' dtype."""
        embedded = self.quantize.embed(codes).permute(0, 3, 1, 2)
        # With the built-in weights bfloat16 moves a channel by 0.2 of its 255 steps on average and by 5 at most.
        dtype = embedded.dtype if drawing_dtype(embedded.device)[0] == torch.float32 else torch.bfloat16
        raw = self.raw(_laid_out(embedded.to(dtype))).to(embedded.dtype)
        return raw.clamp_(-1, 1).add_(1).div_(2).contiguous()

    def load_published(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads the published weights; none if anything is wrong. Reads and refuses what `checked` does."""
        self.load_state_dict(self.checked(state_dict))

    def checked(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this model in a published state dict (a Lightning file's `state_dict` entry).

        `loss.*` (the training's LPIPS and discriminator) is left out, and so are the encoder's weights if this model
        has no encoder. The model lends its names and shapes only and may be on the meta device. Raises TTError naming
        the first tensor that is missing, unknown, of another shape or type, or not finite.
        """
        mine = self.state_dict()
        left_out = ("loss.",) if self.has_encoder else ("loss.", "encoder.", "quant_conv.")
        theirs = {name: tensor for name, tensor in state_dict.items() if not name.startswith(left_out)}
        for name in [*mine, *theirs]:
            if problem := _problem(mine.get(name), theirs.get(name)):
                raise TTError(f"these are not the weights of this VQGAN: {name} {problem}")
        return theirs


def _problem(mine: Tensor | None, theirs: Tensor | None) -> str | None:
    """The fault of a given tensor, in a few words."""
    if theirs is None:
        return "is missing"
    if mine is None:
        return "is unknown"
    if theirs.shape != mine.shape:
        return f"has shape {tuple(theirs.shape)}, not {tuple(mine.shape)}"
    if not theirs.is_floating_point():
        return f"is {theirs.dtype}, not floating point"
    if not all_finite(theirs):
        return "holds values that are not finite"
    return None


def _at_once(device: torch.device, pixels: int) -> int:
    """The number of pictures of so many pixels to hold in memory: at the published size 1 on a CPU, 16 on a GPU.

    A picture of 256x256 takes 0.17 GB in float32; a CPU is no faster with more, and slower once they leave its cache.
    """
    return max(1, (2**16 if device.type == "cpu" else 2**20) // max(1, pixels))


def _exact_convolutions(device: torch.device) -> AbstractContextManager[None]:
    """Keeps a GPU's convolutions from rounding their inputs to TF32, which is torch's default for them."""
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False)


def _laid_out(x: Tensor) -> Tensor:
    """The same in the memory format that convolutions are fast in; a GPU's library chooses by itself."""
    return x.contiguous(memory_format=torch.channels_last if x.device.type == "cpu" else torch.contiguous_format)
