"""GPUs by name: memory as sold, and the makers' peak figures for dense matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from tt_cli.errors import UsageError, nearest
from tt_cli.memory.byte_sizes import GIB, parse_size

USABLE = 0.9  # of a device's memory: the rest is the desktop's and the driver's
UTILISATION = 0.35  # of the peak that training commonly reaches: an assumption, not a measurement


@dataclass(frozen=True)
class Gpu:
    """memory: GiB. half, full: TFLOP/s of 16-bit products with float32 sums, and of float32 ones."""

    title: str
    memory: int
    half: float
    full: float


# NVIDIA's data sheets and architecture white papers (Turing, Ampere, Ada, Hopper), without sparsity.
GPUS = {
    "gtx1080ti": Gpu("GTX 1080 Ti", 11, 11.3, 11.3),  # its 16-bit arithmetic is slower: float32 counts
    "rtx2080ti": Gpu("RTX 2080 Ti", 11, 53.8, 13.4),
    "rtx3060": Gpu("RTX 3060", 12, 25.5, 12.7),
    "rtx3070": Gpu("RTX 3070", 8, 40.6, 20.3),
    "rtx3090": Gpu("RTX 3090", 24, 71.0, 35.6),
    "rtx4090": Gpu("RTX 4090", 24, 165.2, 82.6),
    "a6000": Gpu("RTX A6000", 48, 154.8, 38.7),
    "t4": Gpu("T4", 16, 65.0, 8.1),
    "p100": Gpu("P100", 16, 18.7, 9.3),
    "v100": Gpu("V100", 16, 125.0, 15.7),
    "a100": Gpu("A100", 80, 312.0, 19.5),
    "h100": Gpu("H100", 80, 989.0, 67.0),
}
TYPICAL = "t4"  # what Colab and Kaggle lend


def device_room(text: str) -> tuple[int, Gpu | None]:
    """Bytes of "8GB", or of a GPU by its name with that GPU. Raises UsageError."""
    plain = "".join(character for character in text.lower() if character.isalnum())
    if plain in GPUS:
        return GPUS[plain].memory * GIB, GPUS[plain]
    if text[:1].isdigit() or text[:1] in ".-":
        return parse_size(text), None
    hint = nearest(plain, GPUS, f"there are {', '.join(GPUS)},")
    raise UsageError(f"no GPU is called '{text}'; {hint} or give its memory, such as 8GB")
