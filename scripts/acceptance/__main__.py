"""Show that a GPU computes, trains, draws and fails as it should.

parts, each in a process of its own:
  machine    context, libraries, architectures of the wheel, compiler; a product in each precision
  numbers    loss and all gradients beside the CPU's, compiled and not, in fp32, bf16 and fp16
  probe      the micro-batch that a peer chooses beside the best one (scripts/bench peer --only probe)
  memory     the memory account beside the allocator's peak
  speed      the paper's step at micro-batches 1 to 32, compiled and not; MFU beside a large product
  profile    a step's kernels, and the share of time in which the GPU is busy
  drawing    tokens a second as a CUDA graph and op by op; 128 candidates under 4 GiB
  swarm      two real peers on the GPU: equal digests, and only the trainers' own processes have a context
  faults     memory that a neighbour takes, an error of CUDA, a compiler that is not there
  round      gradients held for a round and parameters copied back, beside a micro-batch
  learning   200 steps of emoji-demo in fp32, bf16 and fp16

It installs nothing. Exit code 1 where a part misses a limit, 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks.harness import machine, table

PARTS = ("machine", "numbers", "probe", "memory", "speed", "profile", "drawing", "swarm", "faults", "round", "learning")
SECONDS = 480.0  # of one part
Limit = tuple[float | None, float | None]  # at least, at most
LIMITS: dict[str, dict[str, Limit]] = {
    "machine": {"fp32_error": (None, 1e-3), "bf16_error": (None, 2e-2)},
    "numbers": {
        **{"fp32_loss_error": (None, 1e-4), "fp32_gradient_error": (None, 1e-3), "compiled_error": (None, 1e-3)},
        **{"bf16_loss_error": (None, 5e-3), "bf16_gradient_error": (None, 0.1)},
        **{"fp16_loss_error": (None, 5e-3), "fp16_gradient_error": (None, 0.1), "compile_failures": (None, 0)},
    },
    "probe": {"probe_ratio": (0.95, None)},
    "memory": {"account_error": (None, 0.05)},
    "speed": {"mfu_16": (0.40, None), "compiled_over_eager": (1.0, None), "lines_over_scores": (1.0, None)},
    "profile": {"busy": (0.8, None)},
    "drawing": {"tokens_per_s": (200.0, None), "graph_over_eager": (1.0, None), "candidates_gib": (None, 4.0)},
    "swarm": {"steps": (5, None), "unlike_digests": (None, 0), "contexts_a_peer": (None, 1)},
    "faults": {
        **{"steps_beside_hog": (3, None), "error_backups": (1, None), "eager_after_compiler": (1, None)},
        "eager_loss_error": (None, 1e-4),
    },
    "round": {"hold_over_micro_batch": (None, 1.0), "copy_back_over_micro_batch": (None, 1.0)},
    "learning": {"fp32_fall": (0.3, None), "bf16_over_fp32": (None, 1.1), "fp16_over_fp32": (None, 1.1)},
}
"""Part → figure → what it may be. On a CPU those that it can measure count."""


def missed(part: str, figures: Mapping[str, Any], gpu: bool) -> list[str]:
    """Each limit that the figures of a part do not keep, in words."""
    words = []
    for name, (least, most) in LIMITS[part].items():
        value = figures.get(name)
        if value is None:
            words += [f"{name} was not measured"] if gpu else []
        elif (least is not None and value < least) or (most is not None and value > most):
            words.append(f"{name} is {value:g}, {f'not {least:g}' if least is not None else f'more than {most:g}'}")
    return words


def run_part(part: str, device: str) -> dict[str, Any]:
    """One part's figures; in a process of its own, which ends with its time."""
    began = time.monotonic()
    command = [sys.executable, "-m", "scripts.acceptance", "--figures", part, "--device", device]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        figures, failed = dict[str, Any](), [f"it took more than {SECONDS:.0f} s"]
    else:
        lines = done.stdout.splitlines()
        figures = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
        failed = missed(part, figures, device != "cpu") if figures else [f"it ended with exit code {done.returncode}"]
    seconds = round(time.monotonic() - began, 1)
    return {"part": part, "passed": not failed, "failed": failed, "seconds": seconds, **figures}


def figures_of(part: str, device: str) -> dict[str, Any]:
    """Measure one part here."""
    import torch

    from scripts.acceptance import arithmetic, peers

    module, name = peers if part in ("swarm", "faults") else arithmetic, "averaging_round" if part == "round" else part
    return dict(getattr(module, name)(torch.device(device)))


def main() -> int:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/gpu_acceptance", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N; cpu: small sizes, no speeds")
    parser.add_argument("--json", action="store_true", help="one JSON line for each part")
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.figures:
        print(json.dumps(figures_of(args.figures, args.device)))
        return 0
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    import torch

    if not args.device.startswith(("cpu", "cuda")):
        parser.error(f"--device {args.device}: give cuda, cuda:N or cpu")
    if args.device != "cpu" and not torch.cuda.is_available():
        words = "torch sees no GPU: install a CUDA build of torch and its driver, or try it out with --device cpu"
        print(f"scripts/gpu_acceptance: {words}", file=sys.stderr)
        return 2
    if not args.json:
        print(machine())
    failed = False
    for part in args.parts or PARTS:
        result = run_part(part, args.device)
        failed |= not result["passed"]
        print(json.dumps(result) if args.json else f"\n{table(result)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
