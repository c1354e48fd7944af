"""Count what one training step (forward and backward pass) asks of a GPU, on fake tensors; no GPU is needed.

- The paper's run (configs/dalle.toml) at micro-batch 8 in bfloat16, with 10 GB for activations (a 24 GB card), on the
  stand-in GPU of tests/testbed/gpu.py, whose docstring says how kernels are counted. A compiled function counts as the
  kernels that Inductor's scheduler makes of it for a GPU; a call of fused attention as one forward and two or three
  backward, as the kernel is.
- `launches`, `gigabytes`, `teraflops`: kernels, bytes read and written in the GPU's memory, FLOPs of all products.
- `mfu_bound_4090`, `mfu_bound_h100`: the model's FLOPs (attention over allowed pairs only, nothing computed again)
  over the card's peak, divided by a roofline's time: each kernel takes its bytes over the bandwidth or its FLOPs over
  the peak, whichever is longer. RTX 4090: 1008 GB/s, 165 TFLOP/s dense bfloat16; H100 SXM: 3350 GB/s, 989 TFLOP/s. No
  kernel reaches the roofline and launches cost nothing in it: it is a bound, not a forecast.
- `waits`, `copies`: the host's waits for the GPU and copies between both, in a second step (tables are there by then).
- `peer_waits`, `peer_copies`: the host's waits, copies to the GPU, of a trainer's second micro-batch until gradients
  are summed up and losses read: emoji-demo's, on the stand-in that computes (tests/testbed/computing_gpu.py).
- `account_error`: the worst relative difference between `tt_cli.memory.DalleAccount` and the peak of storages, over
  some runs, precisions and micro-batches, uncompiled.

Needs g++ and a CPU build of torch.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.harness import printed_by

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

QUICK_DEPTH = 8
QUICK = f"{QUICK_DEPTH} layers, no memory account"
CARDS = {"4090": (1008e9, 165e12), "h100": (3350e9, 989e12)}  # bytes/s, FLOP/s
# run, changes, micro-batch, precision, bytes of activations to keep
ACCOUNTS: tuple[tuple[str, dict[str, object], int, str, float], ...] = (
    ("dalle", {"model.depth": 16}, 1, "fp32", 0),
    ("dalle", {"model.depth": 16}, 4, "fp16", 2e9),
    ("dalle", {"model.depth": 16}, 8, "bf16", 2e9),
    ("dalle", {"model.depth": 16}, 16, "bf16", 0),
    ("emoji", {}, 32, "bf16", 2e9),
    ("emoji-demo", {}, 64, "fp16", 1e9),
    ("emoji-demo", {}, 256, "bf16", 8e9),
)


def count(depth: int, batch: int, budget: float, *, eager: bool, accounts: bool) -> dict[str, Any]:
    """All figures; in a process without torch so far."""
    from testbed import gpu

    from tt_cli.model.dalle_config import DalleConfig
    from tt_cli.model.layers.fused import fusion
    from tt_cli.run import load_run

    if not eager:
        fusion.devices.add("cuda")
    run = load_run("dalle").replaced({"model.depth": depth})
    first, step = (gpu.training_step(run, batch, "bf16", budget, times=times) for times in (1, 2))
    flops = DalleConfig.from_run(run).flops_per_sample() * batch
    found = {
        **{"depth": depth, "micro_batch": batch, "budget_gb": budget / 1e9, "launches": step.launches},
        **{"gigabytes": round(step.bytes / 1e9, 1), "teraflops": round(step.flops / 1e12, 2)},
        **{f"mfu_bound_{name}": round(flops / card[1] / step.seconds(*card), 3) for name, card in CARDS.items()},
        **{"waits": sum(step.waits.values()), "copies": sum(step.copies.values())},
        **{"first_copies": sum(first.copies.values()), "peak_gib": round(step.peak / 2**30, 2)},
        "kernels": [{"kernel": name, **row} for name, row in step.table().items()],
    }
    if accounts:
        fusion.devices.clear()
        rows: list[dict[str, Any]] = []
        for name, changes, size, precision, kept in ACCOUNTS:
            run = load_run(name).replaced(changes)
            told = step_bytes(run, size, precision, kept)
            peak = gpu.training_step(run, size, precision, kept).peak
            words = f"{name} {precision} {size} examples, {kept / 1e9:g} GB kept"
            rows.append({"run": words, "mib": round(peak / 2**20), "ratio": round(told / peak, 3)})
        found |= {"account_error": max(round(abs(row["ratio"] - 1), 3) for row in rows), "accounts": rows}
    return found


def step_bytes(run: RunConfig, size: int, precision: str, kept: float) -> int:
    """What the memory account says that one step takes of a GPU: neither accumulated gradients nor CUDA itself."""
    from tt_cli.memory import DalleAccount

    itemsize = 4 if precision == "fp32" else 2
    need = DalleAccount(run).need("cuda", itemsize=itemsize, micro_batch=size, budget=int(kept))
    elsewhere = ("accumulated gradients", "CUDA")
    return sum(item.bytes for item in need.items if item.place == "device" and item.what not in elsewhere)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--depth", type=int, help="layers (default: the paper's)")
    parser.add_argument("--batch", type=int, default=8, help="examples at a time")
    parser.add_argument("--budget", type=float, default=10, metavar="GB", help="bytes for activations, in 1e9")
    parser.add_argument("--eager", action="store_true", help="without compiled functions")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One process, for the stand-in must be there before torch."""
    depth = args.depth or (QUICK_DEPTH if args.quick else 64)
    given = [depth, args.batch, 1e9 * args.budget, *(["--eager"] if args.eager else [])]
    counted = printed_by(__spec__.name, *given, *([] if args.quick else ["--accounts"]))
    return {**printed_by(__spec__.name, 0, 0, 0, "--peer"), **counted}


def count_of_peer() -> dict[str, int]:
    """Waits and copies of a trainer's micro-batch; in a process without torch so far."""
    from testbed import computing_gpu

    from tt_cli.run import load_run

    found = computing_gpu.micro_batch(load_run("emoji-demo"))
    return {"peer_waits": found["waits"], "peer_copies": found["copies"]["to the device"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind in (("depth", int), ("batch", int), ("budget", float)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--accounts", action="store_true")
    parser.add_argument("--peer", action="store_true")
    given = vars(parser.parse_args())
    told = count_of_peer() if given.pop("peer") else count(**given)
    from testbed import gpu

    gpu.print_and_leave(told)
