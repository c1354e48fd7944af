"""The small VQGAN of the built-in data set: its sizes, its quantizer's training, its loss, its loop.

Notable:
- the codebook is learned as in VQ-VAE (nearest neighbour, moving averages, dead codes revived) and then written as the
  `proj` layer whose argmax is that very search: |z - e|^2 is smallest where 2 e.z - |e|^2 is largest;
- Muon for the convolutions: a third less loss than Adam after the same 90 steps;
- for the last third only the decoder learns, on codes that no longer move: each step is cheaper, and the codes are
  what the encoder gives.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from tt_cli.model.vqgan import Vqgan, VqganConfig

PIXELS = 64
SEED = 0

ARCHITECTURE = VqganConfig(
    resolution=PIXELS,
    channels=16,
    channel_multipliers=(1, 2, 4, 8),
    num_res_blocks=1,
    attn_resolutions=(8,),
    z_channels=32,
    embed_dim=32,
    codebook_size=1024,
    norm_groups=8,
)
TINY = dataclasses.replace(ARCHITECTURE, channels=8, channel_multipliers=(1, 1, 2, 2), codebook_size=64)


@dataclass(frozen=True)
class Effort:
    """How long to train; a "seen" is one picture passed forward and backward once."""

    architecture: VqganConfig
    joint_seen: int  # encoder, codebook and decoder
    decoder_seen: int  # decoder alone, codes fixed
    batch: int
    peak_lr: float
    continuous_steps: int  # before the codebook is initialised
    emoji: int | None = None


FULL = Effort(ARCHITECTURE, joint_seen=22_800, decoder_seen=12_000, batch=24, peak_lr=3e-3, continuous_steps=80)
QUICK = Effort(TINY, joint_seen=192, decoder_seen=48, batch=16, peak_lr=3e-3, continuous_steps=5, emoji=96)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices and convolutions (Jordan 2024), with AdamW's step size (Liu 2025)."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"]).flatten(1)
                transposed = x.shape[0] > x.shape[1]
                x = x.T if transposed else x
                x = x / (x.norm() + 1e-7)
                # Newton-Schulz towards the nearest orthogonal matrix. Each iterate is a polynomial of the Gram
                # matrix times x, so only small square matrices are multiplied inside the loop.
                gram = x @ x.T
                product = torch.eye(len(gram))
                for _ in range(5):
                    factor = 3.4445 * torch.eye(len(gram)) - 4.7750 * gram + 2.0315 * gram @ gram
                    product = factor @ product
                    gram = factor @ gram @ factor
                x = product @ x
                scale = 0.2 * math.sqrt(max(x.shape))
                p.add_((x.T if transposed else x).reshape(p.shape), alpha=-group["lr"] * scale)


class MovingCodebook:
    """A codebook learned by moving averages of what falls on each code (van den Oord 2017, appendix A.1)."""

    def __init__(self, size: int, dim: int, generator: torch.Generator) -> None:
        self.vectors = torch.zeros(size, dim)
        self.count = torch.zeros(size)
        self.total = torch.zeros(size, dim)
        self.ready = False
        self.generator = generator

    def assign(self, z: Tensor) -> Tensor:
        return (2 * z @ self.vectors.T - self.vectors.square().sum(1)).argmax(1)

    def initialise(self, z: Tensor) -> None:
        """k-means over latents (n, dim)."""
        size = len(self.vectors)
        self.vectors = z[torch.randperm(len(z), generator=self.generator)[:size]].clone()
        for _ in range(8):
            self.count.zero_()
            self.total.zero_()
            self._gather(z, self.assign(z), decay=1.0)
            self.vectors = self.total / self.count.clamp(min=1)[:, None]
            self._revive(z)
        self.ready = True

    def _gather(self, z: Tensor, codes: Tensor, decay: float) -> None:
        self.count.mul_(decay).index_add_(0, codes, torch.ones(len(codes)))
        self.total.mul_(decay).index_add_(0, codes, z)

    def _revive(self, z: Tensor) -> None:
        """Codes that are hit 30 times less often than the average move onto latents of this batch."""
        average = self.count.mean()
        (dead,) = (self.count < average / 30).nonzero(as_tuple=True)
        if len(dead):
            chosen = z[torch.randint(len(z), (len(dead),), generator=self.generator)]
            self.vectors[dead], self.count[dead] = chosen, average / 4
            self.total[dead] = chosen * average / 4

    def update(self, z: Tensor, codes: Tensor, decay: float = 0.98) -> None:
        self._gather(z, codes, decay)
        self.vectors = self.total / self.count.clamp(min=1e-3)[:, None]
        self._revive(z)

    def state_dict(self) -> dict[str, Tensor]:
        return {"vectors": self.vectors, "count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.vectors, self.count, self.total = state["vectors"], state["count"], state["total"]
        self.ready = True


def reconstruction_loss(raw: Tensor, target: Tensor) -> Tensor:
    """Absolute and squared error, plus the absolute error of the gradients at two scales (edges stay sharp)."""
    error = raw - target
    loss = error.abs().mean() + 2 * error.square().mean()
    for scale in (error, F.avg_pool2d(error, 2)):
        loss = loss + 0.5 * (scale.diff(dim=2).abs().mean() + scale.diff(dim=3).abs().mean())
    return loss


def to_float(pictures: np.ndarray) -> Tensor:
    """(b, 64, 64, 3) uint8 → (b, 3, 64, 64) in [0, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255


class Training:
    """The training of stage 2, with a checkpoint from which it goes on."""

    def __init__(self, effort: Effort, pictures: np.ndarray, weights: np.ndarray, checkpoint: Path) -> None:
        torch.manual_seed(SEED)
        self.effort, self.pictures, self.checkpoint = effort, pictures, checkpoint
        self.weights = weights / weights.sum()
        self.vqgan = Vqgan(effort.architecture).to(memory_format=torch.channels_last)
        config = effort.architecture
        self.codebook = MovingCodebook(config.codebook_size, config.embed_dim, torch.Generator().manual_seed(SEED))
        learned = [(n, p) for n, p in self.vqgan.named_parameters() if not n.startswith("quantize.")]
        edges = ("encoder.conv_in", "decoder.conv_out")
        matrices = [p for n, p in learned if p.ndim == 4 and not n.startswith(edges)]
        rest = [p for n, p in learned if p.ndim != 4 or n.startswith(edges)]
        self.optimizers = [Muon(matrices, lr=0.0), torch.optim.Adam(rest, lr=0.0, betas=(0.9, 0.98))]
        self.joint_steps = effort.joint_seen // effort.batch
        self.total_steps = self.joint_steps + effort.decoder_seen // effort.batch
        self.step = 0
        self.seconds = 0.0
        if checkpoint.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.vqgan.load_state_dict(state["vqgan"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if state["codebook"]:
            self.codebook.load_state_dict(state["codebook"])
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "vqgan": self.vqgan.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "codebook": self.codebook.state_dict() if self.codebook.ready else {},
                "step": self.step,
                "seconds": self.seconds,
            },
            part,
        )
        part.replace(self.checkpoint)

    def _learning_rate(self) -> float:
        warmup = min(1.0, (self.step + 1) / (0.03 * self.total_steps))
        return self.effort.peak_lr * warmup * 0.5 * (1 + math.cos(math.pi * self.step / self.total_steps))

    def _batch(self) -> Tensor:
        chosen = np.random.default_rng((SEED, self.step)).choice(
            len(self.pictures), self.effort.batch, replace=False, p=self.weights
        )
        return to_float(self.pictures[chosen]).contiguous(memory_format=torch.channels_last)

    def _loss(self, pictures: Tensor) -> Tensor:
        target = 2 * pictures - 1
        codes_move = self.step < self.joint_steps
        with torch.set_grad_enabled(codes_move):
            z = self.vqgan.latents(pictures)
        if self.step < self.effort.continuous_steps:
            return reconstruction_loss(self.vqgan.raw(z), target)
        flat = z.permute(0, 2, 3, 1).flatten(0, 2)
        known = flat.detach()
        codes = self.codebook.assign(known)
        quantized = self.codebook.vectors[codes].view(z.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        if not codes_move:
            return reconstruction_loss(self.vqgan.raw(quantized), target)
        self.codebook.update(known, codes)
        loss = reconstruction_loss(self.vqgan.raw(z + (quantized - z).detach()), target)
        return loss + 0.25 * F.mse_loss(z, quantized)

    def run(self, log_every: int = 50) -> Vqgan:
        log = self.checkpoint.with_suffix(".log").open("a", encoding="utf-8")
        with Progress() as progress, log:
            bar = progress.add_task("train", total=self.total_steps, completed=self.step)
            while self.step < self.total_steps:
                started = time.monotonic()
                if self.step == self.effort.continuous_steps and not self.codebook.ready:
                    self.codebook.initialise(self._all_latents())
                loss = self._loss(self._batch())
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.param_groups[0]["lr"] = self._learning_rate()
                    optimizer.step()
                self.step += 1
                self.seconds += time.monotonic() - started
                progress.update(bar, completed=self.step)
                if self.step % log_every == 0 or self.step == self.total_steps:
                    used = int((self.codebook.count > self.codebook.count.mean() / 30).sum())
                    print(
                        f"step {self.step}/{self.total_steps} loss {loss.item():.4f} codes {used} {self.seconds:.0f} s",
                        file=log,
                        flush=True,
                    )
                    self.save()
        return self.finished()

    @torch.no_grad()
    def _all_latents(self) -> Tensor:
        """Latents (n, dim) of up to 600 training pictures, for the initialisation of the codebook."""
        chosen = np.random.default_rng((SEED, self.step)).permutation(len(self.pictures))[:600]
        parts = [self.vqgan.latents(to_float(self.pictures[part])) for part in np.array_split(chosen, 12)]
        return torch.cat([part.permute(0, 2, 3, 1).flatten(0, 2) for part in parts])

    @torch.no_grad()
    def finished(self) -> Vqgan:
        """The model with the learned codebook as `embed`, and as the `proj` whose argmax is the nearest code."""
        vectors = self.codebook.vectors
        quantizer = self.vqgan.quantize
        quantizer.embed.weight.copy_(vectors)
        quantizer.proj.weight.copy_(2 * vectors[:, :, None, None])
        quantizer.proj.bias.copy_(-vectors.square().sum(1))
        return self.vqgan.eval()
