#!/usr/bin/env python
"""Fine-tune a GPT-2 on streamed text within the memory that `tt calc` counted; docs/tutorials/memory.md explains it.

- Text comes as it is needed: English C4 from the Hub, or a local file in its format. Texts are packed into sequences of
  one length; a step's sequences go through the model in micro-batches, as large as the calculator says that fit.
- What saves memory: 16-bit products or weights, 8-bit Adam (bitsandbytes: blocks of 256, tensors under 4096 elements
  in float32), gradient checkpointing, the optimizer and float32 weights in the host's memory.
- Every step tells the memory of tensors beside the calculator's figure for this very configuration. On a GPU it is
  measured in every step. On a CPU torch's profiler sees every allocation, which takes time: in the second step alone.
- With --save the same command goes on where it was: on a CPU to the last bit but for dropout; fp16's scale starts anew.

Examples:
  scripts/finetune_gpt2.py --tiny --8bit --checkpointing        a small new model, text of this repository, no GPU
  scripts/finetune_gpt2.py --8bit --checkpointing --precision pure16 --offload --save gpt2-c4
  scripts/finetune_gpt2.py --model openai-community/gpt2 --data part.jsonl.gz --json

--json prints an object a line: "event" is "start" (settings, reason, the calculator's components), "step" (loss,
tokens_per_s, memory_bytes before it, peak_bytes so far, calculator_bytes) and "end" (seconds, first_loss and last_loss,
means of up to five steps, peak_bytes, calculator_bytes, error, saved).
Exit code: 0; 1 where something outside went wrong, such as the network; 2 for what cannot be done as asked.
Needs transformers: pip install 'tt-cli[clip]'.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would talk on the terminal; read by its import

import torch  # noqa: E402
from testbed import gpt2_model, saved_training  # noqa: E402
from testbed.memory_step import optimizer_of, peaks_of, tensors_of  # noqa: E402
from testbed.offloaded import Offloaded  # noqa: E402
from testbed.text_stream import Stream, readable, write_shard  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tt_cli.errors import TTError, UsageError  # noqa: E402
from tt_cli.memory import CUDA_ON_DEVICE, Place, parse_size, shown  # noqa: E402
from tt_cli.memory.architectures import Architecture  # noqa: E402
from tt_cli.memory.calculator import Answer, reckon, smallest_change  # noqa: E402
from tt_cli.memory.gpus import USABLE  # noqa: E402
from tt_cli.memory.question import CalculatorOptions, largest_that_fits  # noqa: E402
from tt_cli.supervisor.host_memory import family_memory, host_memory  # noqa: E402

FULL = {"model": "openai-community/gpt2-large", "sequence": 1024, "batch": 16, "steps": 1000, "learning_rate": 2e-5}
TINY = {"model": gpt2_model.TINY, "sequence": 128, "batch": 8, "steps": 60, "learning_rate": 1e-3}
SAVED = ("model", "data", "precision", "bits", "offload", "sequence", "batch", "seed")  # what goes on as it was


def question(config: Any, args: argparse.Namespace, device: torch.device) -> tuple[Architecture, CalculatorOptions]:
    """What the calculator is asked: this model, as it is trained here, without a swarm. Raises UsageError."""
    model = gpt2_model.architecture(config, args.model, args.sequence)
    options = CalculatorOptions(
        kind="cuda" if device.type == "cuda" else "cpu", precision=args.precision, sequence=args.sequence,
        attention="fused" if config._attn_implementation == "sdpa" else "eager", bits=args.bits,
        layers="checkpointed" if args.checkpointing else "kept", offload=args.offload, compression=None,
    )  # fmt: skip
    options.check(model)
    return model, options


def sized(
    model: Architecture, options: CalculatorOptions, args: argparse.Namespace, device: torch.device
) -> tuple[int, Answer, str]:
    """The micro-batch, what the calculator answers for it, and why so many. Raises UsageError where it does not fit."""
    place: Place = "device" if device.type == "cuda" else "host"
    if place == "device":
        free, total = torch.cuda.mem_get_info(device)
    else:
        free, total = host_memory().free + sum(family_memory(os.getpid())), host_memory().total
    if args.memory:
        memory = parse_size(args.memory)
        if place == "device":  # torch fails rather than take more
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, memory - CUDA_ON_DEVICE) / total), device)
        total = min(total, memory)
    room = min(free, int(USABLE * total))

    def answer(size: int) -> Answer:
        return reckon(model, replace(options, micro_batch=size))

    def taken(size: int) -> int:
        return answer(size).total(place) if size <= args.batch else room + 1

    size = args.micro_batch or largest_that_fits(taken, room) or 1
    words = f"{shown(answer(size).total(place))} of {shown(room)} on {device}"
    if answer(size).total(place) > room:
        found = smallest_change(model, replace(options, micro_batch=size), room)
        fix = "only a smaller model or a shorter --sequence would"
        if found and "--share 4" not in found[0]:  # this script shares no layers
            fix = f"add {' '.join(found[0])}"
        raise UsageError(f"{args.model} does not fit: micro-batch {size} takes {words}; {fix}")
    why = "as asked" if args.micro_batch else "a whole step at once" if size == args.batch else "the largest that fits"
    return size, answer(size), f"{words}, {why}"


@dataclass
class Training:
    """All that a step needs. done: steps so far."""

    args: argparse.Namespace
    device: torch.device
    micro_batch: int
    model: Any
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer
    stream: Stream
    done: int = 0

    def __post_init__(self) -> None:
        """16-bit products are bf16; on a GPU without it fp16, whose small gradients need a scale."""
        kind, mixed = self.device.type, self.args.precision == "mixed"
        fp16 = kind == "cuda" and mixed and not torch.cuda.is_bf16_supported(including_emulation=False)
        self.scaler = torch.amp.GradScaler(kind, enabled=fp16)
        dtype = torch.float16 if fp16 else torch.bfloat16
        self.products: Any = partial(torch.autocast, kind, dtype=dtype) if mixed else contextlib.nullcontext

    def step(self, measure: bool) -> tuple[float, int, int]:
        """The loss; bytes of tensors before it and at its worst moment (0: not measured). Raises TTError."""
        batch = self.stream.batch(self.args.batch).to(self.device)
        losses: list[Tensor] = []

        def passes() -> None:
            for part in batch.split(self.micro_batch):
                with self.products():
                    loss = self.model(input_ids=part, labels=part, use_cache=False).loss * (len(part) / len(batch))
                self.scaler.scale(loss).backward()
                losses.append(loss.detach())

        def update() -> None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

        before, peak = tensors_of(self.model, self.optimizer, [batch]), 0
        if measure:
            peak = max(peaks_of((passes, update), before, self.device))
        else:
            passes()
            update()
        self.optimizer.zero_grad(set_to_none=False)  # they stay, for the next sums
        self.done += 1
        loss = float(torch.stack(losses).sum())
        if not math.isfinite(loss):
            raise TTError(f"the loss of step {self.done} is {loss}: give a smaller --learning-rate")
        return loss, before, peak


def prepared(args: argparse.Namespace, device: torch.device, config: Any, size: int, scratch: Path) -> Training:
    """Model, optimizer and stream: new, or as they were saved. Raises TTError."""
    last = saved_training.last_saved(args.save)
    record = saved_training.record_of(last, settings(args)) if last else {"step": 0}
    torch.manual_seed(args.seed + record["step"])
    dtype = torch.bfloat16 if args.precision == "pure16" else torch.float32
    model, ids = gpt2_model.weights(config, args.model, last, dtype)
    with readable(str(ids)):
        tokenizer = Tokenizer.from_file(str(ids))
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = model.to(device).train()
    made = partial(optimizer_of, "adam", args.bits, rate=args.learning_rate)
    optimizer = Offloaded(model.parameters(), made) if args.offload else made(model.parameters())
    file = Path(args.data).expanduser() if args.data else None
    if args.tiny and not file:
        pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "LICENSE"]
        file = write_shard(pages, scratch / "text-of-this-repository.jsonl.gz")
    stream = Stream(file, lambda text: tokenizer.encode(text).ids, args.sequence, config.eos_token_id)
    if last:
        saved_training.put_back(last, record, model, optimizer, stream)
    return Training(args, device, size, model, optimizer, tokenizer, stream, record["step"])


def train(args: argparse.Namespace, scratch: Path) -> None:
    """What fits, then step after step, then what came of it."""
    device = chosen(args)
    config = gpt2_model.configuration(args.model, device)
    size, answer, why = sized(*question(config, args, device), args, device)
    counted, count = answer.tensors, answer.parameters
    start = {"settings": settings(args), "device": str(device), "parameters": count, "micro_batch": size, "reason": why}
    start |= {"calculator_bytes": counted, "components": [vars(component) for component in answer.components]}
    tell(args, "start", start, f"{args.model}: {count:,} parameters\nmicro-batch {size}: {why}")
    t = prepared(args, device, config, size, scratch)
    first, began, peak, saved = t.done, time.monotonic(), 0, None
    losses: list[float] = []
    while t.done < args.steps:
        at = time.monotonic()
        # on a CPU once, when the optimizer's state is there
        loss, now, seen = t.step(device.type == "cuda" or t.done == min(first + 1, args.steps - 1))
        losses, peak = [*losses, loss], max(peak, seen)
        rate = args.batch * args.sequence / (time.monotonic() - at)
        step = {"step": t.done, "loss": loss, "tokens_per_s": round(rate, 1), "memory_bytes": now}
        words = f"step {t.done:>{len(str(args.steps))}}/{args.steps}  loss {loss:6.3f}  {rate:8,.0f} tokens/s"
        words += f"  memory {shown(now)}{f', at worst {shown(peak)}' if peak else ''}, tt calc {shown(counted)}"
        tell(args, "step", step | {"peak_bytes": peak or None, "calculator_bytes": counted}, words)
        if args.save and (t.done == args.steps or t.done % args.save_every == 0):
            saved = saved_training.save(args.save, t.done, settings(args), t.model, t.optimizer, t.tokenizer, t.stream)
    if not losses:
        raise UsageError(f"{args.save} has {first} steps already: give more --steps to go on")
    means = [sum(part) / len(part) for part in (losses[:5], losses[-5:])]
    seconds, error = time.monotonic() - began, counted / peak - 1
    end = {"seconds": round(seconds, 1), "first_loss": means[0], "last_loss": means[1], "error": round(error, 4)}
    end |= {"peak_bytes": peak, "calculator_bytes": counted}
    words = f"loss {means[0]:.3f} → {means[1]:.3f} in {seconds:.0f} s; worst moment {shown(peak)}, tt calc {error:+.1%}"
    tell(args, "end", end | {"saved": saved and str(saved)}, words + (f"; saved in {saved}" if saved else ""))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a saved training goes on with."""
    return {key: getattr(args, key) for key in SAVED}


def tell(args: argparse.Namespace, event: str, facts: dict[str, Any], words: str) -> None:
    """To programs or to people."""
    print(json.dumps({"event": event, **facts}) if args.json else words, flush=True)


def chosen(args: argparse.Namespace) -> torch.device:
    """The device. Fills in what was left out. Raises UsageError for what cannot be."""
    if args.tiny and args.model:
        raise UsageError("--tiny makes a model of its own: leave --model out")
    for key, value in (TINY if args.tiny else FULL).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    for key in ("sequence", "batch", "steps", "save_every", "micro_batch"):
        if (value := getattr(args, key)) is not None and not 1 <= value <= 10**6:
            raise UsageError(f"--{key.replace('_', '-')} {value}: must be 1 to 1000000")
    if not 0 < args.learning_rate <= 1:
        raise UsageError(f"--learning-rate {args.learning_rate:g}: must be above 0, at most 1")
    gpu = torch.cuda.is_available()
    if not gpu and (args.device == "cuda" or not (args.tiny or args.device)):
        raise UsageError(f"torch sees no GPU: --tiny trains a small model here, --device cpu {args.model}, slowly")
    device = torch.device("cuda:0" if gpu and args.device != "cpu" else "cpu")
    args.precision = args.precision or ("mixed" if device.type == "cuda" else "fp32")
    args.bits = args.bits or (16 if args.precision == "pure16" and not args.offload else 32)
    return device


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a GPT-2 on the Hub, or its folder (default openai-community/gpt2-large)")
    add("--data", metavar="FILE", help='JSON lines with a "text", also .gz (default: C4, streamed)')
    add("--tiny", action="store_true", help="a small new model; without --data, text of this repository")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU")
    add("--memory", metavar="SIZE", help="take no more of the device than this, such as 8GB")
    add("--precision", choices=("fp32", "mixed", "pure16"), help="default: mixed on a GPU, else fp32")
    add("--8bit", dest="bits", action="store_const", const=8, help="8-bit Adam")
    add("--checkpointing", action="store_true", help="keep each layer's input alone")
    add("--offload", action="store_true", help="optimizer and float32 weights in the host's memory")
    add("--sequence", metavar="N", type=int, help="tokens of a sequence (default 1024; tiny: 128)")
    add("--batch", metavar="N", type=int, help="sequences of a step (default 16; tiny: 8)")
    add("--micro-batch", metavar="N", type=int, help="sequences at a time (default: what fits)")
    add("--steps", metavar="N", type=int, help="in all (default 1000; tiny: 60)")
    add("--learning-rate", metavar="X", type=float, help="default 2e-5; tiny: 1e-3")
    add("--seed", metavar="N", type=int, default=0)
    add("--save", metavar="FOLDER", type=Path, help="keep the training there, and go on from it")
    add("--save-every", metavar="N", type=int, default=200, help="steps (default 200), and at the end")
    add("--json", action="store_true", help="an object a line, see above")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that transformers will change
    logging.disable(logging.ERROR)  # the libraries' remarks for developers
    try:
        if importlib.util.find_spec("transformers") is None:
            raise UsageError("transformers is not installed: pip install 'tt-cli[clip]'")
        with tempfile.TemporaryDirectory(prefix="finetune-gpt2-") as scratch:
            train(args, Path(scratch))
    except torch.cuda.OutOfMemoryError:
        sys.exit("finetune_gpt2: the GPU's memory ran out: give a smaller --micro-batch")
    except BrokenPipeError:  # who read this went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except TTError as error:
        print(f"finetune_gpt2: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
