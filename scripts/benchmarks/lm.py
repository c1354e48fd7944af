"""A language model's training step beside a plain loop of transformers: the same model, weights, batches and precision.

Ours is what a peer computes of a micro-batch, peer/trainer.py's `MicroStep` up to its gradients, on a GPU with compiled
layers as there, on examples that the run's own stream cuts and shuffles; the plain loop calls the model with labels and
goes backward. They take turns, a few micro-batches each. `lm_step_ratio` is the ratio of medians of tokens a second,
`logits_worst_difference` that of a plain model that was saved and loaded again with our weights. `again_step_ratio` is
the speed where layers are computed again for the backward pass, over ours where all is kept, and `again_bytes_ratio`
what is kept then, by the account.
`gpt2` has the same of a GPT-2 of about that size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scripts.benchmarks.harness import in_turns
from scripts.benchmarks.process_figures import seconds_on
from tt_cli.data.examples import Batch
from tt_cli.model.layers.fused import fusion
from tt_cli.peer.device import choose_device
from tt_cli.peer.trainer import MicroStep
from tt_cli.run import CausalLmRun, load_run
from tt_cli.task import task_of

QUICK = "the demo's model, few turns"
SIZE = 8  # examples
ALL = 2**60  # bytes of activations to keep


class Alone(MicroStep):
    """A micro-batch's gradients, which go nowhere."""

    def compute(self, batch: Batch) -> None:
        """Forward and backward."""
        self._backward(batch)


def plain(model: Any, batch: Batch, autocast: Callable[[], Any]) -> None:
    """A plain loop's forward and backward of the same."""
    ids = batch.tensors["ids"][:, :-1]  # as many positions as ours computes
    model.zero_grad(set_to_none=True)
    with autocast():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()


def loaded_again(model: nn.Module) -> Any:
    """A plain model of transformers with these weights, through a folder."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        saved: Any = model
        saved.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def gpt2_like(run: CausalLmRun) -> CausalLmRun:
    """The run with a GPT-2 of as many layers and heads, as wide."""
    config = json.loads(run.model.config)
    sizes = {"n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"]}
    places = {"n_embd": config["hidden_size"], "n_positions": run.model.length, "vocab_size": config["vocab_size"]}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": None, "eos_token_id": 0}
    return run.replaced({"model.config": json.dumps({"model_type": "gpt2", **sizes, **places, **without, **ends})})


def figures_of(run: CausalLmRun, where: str, turns: int, few: int) -> dict[str, Any]:
    """The figures of a run's model on a device. few: micro-batches in a turn."""
    task = task_of(run)
    device = choose_device(where, task, lambda event: None)
    ours = task.new_model()
    theirs = loaded_again(ours).train().to(device.torch_device)
    ours.to(device.torch_device)
    fusion.devices = {device.torch_device.type} - {"cpu"}
    stream = task.examples(0)
    batches = stream.batches(SIZE)
    step = Alone(task, ours, device, None, None)  # type: ignore[arg-type]
    autocast = device.precision if device.dtype_name != "fp32" else contextlib.nullcontext

    def timed(compute: Callable[[Batch], None]) -> Callable[[], float]:
        def some() -> None:
            for _ in range(few):
                compute(next(batches))

        def turn() -> float:
            return few * SIZE * run.model.length / seconds_on(device.torch_device, some)

        return turn

    def computes(budget: int) -> Callable[[], float]:
        turn = timed(step.compute)

        def side() -> float:
            task.keep(ours, budget)
            return turn()

        return side

    def kept(budget: int) -> int:
        need = task.need(device.kind, itemsize=device.itemsize, micro_batch=SIZE, budget=budget)
        return next(item.bytes for item in need.items if item.what == "activations kept")

    def plainly(batch: Batch) -> None:
        plain(theirs, batch.to(device.torch_device), autocast)

    sides = {"ours": computes(ALL), "plain": timed(plainly), "again": computes(0)}
    speeds = {name: statistics.median(found) for name, found in in_turns(sides, turns).items()}
    ids = next(batches).tensors["ids"][:2, :-1].to(device.torch_device)
    fusion.devices = set()
    with torch.no_grad():
        own: Any = ours.eval()
        difference = (own(input_ids=ids).logits - theirs.eval()(input_ids=ids).logits).abs().max()
    return {
        "lm_step_ratio": round(speeds["ours"] / speeds["plain"], 3),
        "again_step_ratio": round(speeds["again"] / speeds["ours"], 3),
        "again_bytes_ratio": round(kept(0) / kept(ALL), 3),
        "lm_tokens_per_s": round(speeds["ours"]),
        "plain_tokens_per_s": round(speeds["plain"]),
        "logits_worst_difference": float(difference),
        "precision": device.dtype_name,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    run = CausalLmRun.of(load_run("words-demo" if args.quick else "words"))
    turns, few = (5, 4) if args.quick else (15, 6)
    shown = {"model": run.run.name, "threads": torch.get_num_threads()}
    gpt2 = figures_of(gpt2_like(run), args.device, turns, few)
    return {**figures_of(run, args.device, turns, few), **shown, "gpt2": gpt2}
