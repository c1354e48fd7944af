"""Measure the memory calculator against reality, beside the one of "Training Transformers Together".

- Every configuration is a real model in a process of its own, tests/testbed/memory_step.py: transformers' classes made
  from small configurations of the same structure, and the project's decoder. It makes a step to warm up, then another
  whose worst moment is measured: forward and backward pass with summed gradients, and the optimizer's update.
- On a CPU the measure is the bytes of tensors, every allocation seen by torch's profiler; on a GPU (--device cuda,
  which adds GPT-2 Large as published) torch.cuda.max_memory_allocated.
- `ours` is `tt calc`'s answer without what is not a tensor (CUDA, processes, allocator's slack); `paper's` comes from
  tests/testbed/memory_paper.py. The decoder's rows count weights, gradients and activations: its optimizer runs
  elsewhere.
- Language models' runs are compared likewise, with what `tt join` asks of its memory model (`worst_error_lm`).

Needs 3 GiB of memory and transformers (the `dev` extra).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from testbed.memory_paper import WARNED, paper_bytes

from scripts.benchmarks.harness import printed_by, progress
from tt_cli.memory.architectures import ARCHITECTURES, Architecture
from tt_cli.memory.calculator import reckon
from tt_cli.memory.question import CalculatorOptions
from tt_cli.memory.trainer_account import DalleAccount
from tt_cli.run import DalleRun, RunConfig, load_run
from tt_cli.task import task_of

STEP = "testbed.memory_step"
TOKENS, FEW_IDS, MANY_IDS = 384, 2000, 12000
# model, precision, optimizer, bits of its state, attention, checkpointing
CASES = (
    ("gpt2", "fp32", "adam", 32, "eager", False),
    ("bert-base", "mixed", "adam", 32, "eager", False),
    ("t5-small", "fp32", "adafactor", 32, "eager", True),
    ("gpt2", "pure16", "adam", 16, "fused", False),
    ("gpt2", "fp32", "adam", 32, "eager", True),
    ("gpt2", "mixed", "adam", 32, "fused", False),
    ("gpt2", "mixed", "adam", 8, "fused", True),
    ("gpt2", "fp32", "adafactor", 32, "fused", True),
    ("bert-base", "fp32", "adam", 32, "eager", False),
    ("bert-base", "mixed", "adam", 8, "fused", False),
    ("bert-base", "pure16", "adam", 16, "eager", True),
    ("t5-small", "fp32", "adam", 32, "eager", False),
    ("t5-small", "mixed", "adafactor", 32, "eager", True),
    ("t5-small", "pure16", "adam", 16, "eager", False),
    ("gpt-j-6b", "mixed", "adam", 32, "eager", False),
    ("gpt-j-6b", "fp32", "adam", 8, "eager", True),
)
# changes of the paper's run, precision, bytes of activations to keep, micro-batch
SMALLER: dict[str, object] = {
    **{"model.dim": 256, "model.heads": 4, "model.depth": 9, "tokenizer.vocab_size": 8000, "model.text_length": 64},
    **{"vqgan.grid": 16, "vqgan.pixels": 128, "vqgan.codebook_size": 2048},
}
RUNS = (("fp32", 0, 4), ("fp32", 64 << 20, 4), ("mixed", 0, 4))
# a language model's config, what of it is other, precision, micro-batch
LLAMA: dict[str, object] = {
    **{"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512},
    "tie_word_embeddings": True,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
GPT2: dict[str, object] = {
    **{"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 4096, "n_positions": 512},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
WIDE: dict[str, object] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "vocab_size": 16000}
ALL = 2**60  # bytes of activations to keep; with 0 layers are computed again
LANGUAGE_MODELS: tuple[tuple[dict[str, object], dict[str, object], str, int, int], ...] = (
    (LLAMA, {}, "fp32", 1, ALL),
    (LLAMA, {}, "fp32", 4, ALL),
    (LLAMA, {"vocab_size": 32000, "tie_word_embeddings": False}, "fp32", 2, ALL),
    (LLAMA, {}, "mixed", 4, ALL),
    (LLAMA, WIDE, "mixed", 1, ALL),
    (LLAMA, WIDE, "mixed", 3, ALL),
    (QWEN2, {}, "fp32", 8, ALL),
    (QWEN2, {}, "mixed", 2, ALL),
    (GPT2, {}, "fp32", 4, ALL),
    (GPT2, {"vocab_size": 16000}, "mixed", 2, ALL),
    (LLAMA, {}, "mixed", 12, 0),
    (QWEN2, {}, "fp32", 4, 0),
    (GPT2, {}, "mixed", 2, 0),
)
COUNTED = (
    "parameters in training",
    "gradients",
    "activations kept",
    "activations at work",
    "weights in half precision",
)
FEW, FEW_RUNS, FEW_TEXTS = 4, 1, 2
QUICK = f"{FEW + FEW_RUNS + FEW_TEXTS} configurations"


def shape(name: str, vocab: int) -> dict[str, Any]:
    """A small model of this structure."""
    model = ARCHITECTURES[name]
    found: dict[str, Any] = {"layers": 6, "dim": 384, "heads": 6, "dim_head": 64, "hidden": 1536, "vocab": vocab}
    found["sequence"] = TOKENS
    if model.positions:
        found["positions"] = TOKENS
    if model.family == "t5":
        found |= {"decoder_layers": 6, "target": 96}
    return found


def row_of_model(given: tuple[Any, ...], device: str, *, published: bool = False) -> dict[str, Any]:
    """One architecture: measured, ours and the paper's."""
    name, precision, optimizer, bits, attention, checkpointing = given
    # with few logits a repeated layer is the worst moment, with many it would be the head in any case
    changes = {} if published else shape(name, FEW_IDS if checkpointing else MANY_IDS)
    if attention == "fused" and device == "cpu":
        changes["dropout"] = 0.0  # torch has no fused attention with dropout there
    micro_batch = 1 if published else 3
    case = {
        **{"model": name, "shape": changes, "device": device, "precision": precision, "optimizer": optimizer},
        **{"bits": bits, "attention": attention, "checkpointing": checkpointing, "micro_batch": micro_batch},
    }
    seen = printed_by(STEP, given=json.dumps(case))
    model: Architecture = replace(ARCHITECTURES[name], **changes)
    options = CalculatorOptions(
        kind="cuda" if device == "cuda" else "cpu", precision=precision, attention=attention,
        layers="checkpointed" if checkpointing else "kept", micro_batch=micro_batch, optimizer=optimizer, bits=bits,
    )  # fmt: skip
    answer = reckon(model, options)
    paper = paper_bytes(
        model, micro_batch=micro_batch, precision=precision, optimizer=optimizer, bits=bits, checkpointing=checkpointing
    )
    label = f"{ARCHITECTURES[name].title}{'' if published else ', smaller'}"
    techniques = [precision, f"{optimizer} {bits}", attention, *(["checkpointing"] if checkpointing else [])]
    return row(label, techniques, seen, answer.tensors, paper, answer.parameters)


def row_of_run(precision: str, budget: int, micro_batch: int, device: str) -> dict[str, Any]:
    """The paper's decoder, smaller: weights, gradients, activations."""
    run: RunConfig = load_run("dalle").replaced(SMALLER)
    case = {
        "run": run.to_toml(),
        "precision": precision,
        "budget": budget,
        "micro_batch": micro_batch,
        "device": device,
    }
    seen = printed_by(STEP, given=json.dumps({**case, "model": "dalle"}))
    itemsize = 4 if precision == "fp32" else 2
    need = DalleAccount(run).need(
        "cuda" if device == "cuda" else "cpu", itemsize=itemsize, micro_batch=micro_batch, budget=budget
    )
    ours = sum(item.bytes for item in need.items if item.what in COUNTED)
    run = DalleRun.of(run)
    model = run.model
    vocab = run.tokenizer.vocab_size + model.text_length + run.vqgan.codebook_size
    as_architecture = Architecture(
        "dalle", "", "gpt", model.depth, model.dim, model.heads, model.dim_head, model.ff_mult * model.dim,
        vocab, 0, model.text_length + run.vqgan.grid**2,
    )  # fmt: skip
    paper = paper_bytes(
        as_architecture, micro_batch=micro_batch, precision=precision, optimizer="none", bits=0, checkpointing=True,
        groups=model.shared_layer_groups,
    )  # fmt: skip
    kept = f"{budget >> 20} MiB kept" if budget else "nothing kept"
    return row(
        "the paper's run, smaller", [precision, "reversible, shared", kept], seen, ours, paper, seen["parameters"]
    )


def row_of_language_model(
    config: dict[str, object], other: dict[str, object], precision: str, size: int, budget: int
) -> dict[str, Any]:
    """A language model's run on a CPU: weights, gradients, activations. budget: bytes of these to keep."""
    run = load_run("words").replaced({"model.config": json.dumps(config | other)})
    case = {"run": run.to_toml(), "precision": precision, "budget": budget, "micro_batch": size, "device": "cpu"}
    seen = printed_by(STEP, given=json.dumps(case))
    need = task_of(run).need("cpu", itemsize=4 if precision == "fp32" else 2, micro_batch=size, budget=budget)
    ours = sum(item.bytes for item in need.items if item.what in COUNTED)
    techniques = [precision, f"{size} at a time", *(f"{key} {value}" for key, value in other.items())]
    techniques += [] if budget else ["layers computed again"]
    label, real = str(config["model_type"]), seen["passes"]
    shown = {"model": label, "techniques": techniques, "parameters": seen["parameters"], "measured_bytes": real}
    return {**shown, "ours_bytes": ours, "error": round(ours / real - 1, 4)}


def row(model: str, techniques: list[str], seen: dict[str, Any], ours: int, paper: int, count: int) -> dict[str, Any]:
    """Errors are relative to what was measured."""
    real = max(seen["passes"], seen["update"])
    return {
        "model": model,
        "techniques": techniques,
        "parameters": seen["parameters"],
        "parameters_equal": seen["parameters"] == count,
        "measured_bytes": real,
        "moment": "update" if seen["update"] > seen["passes"] else "passes",
        "ours_bytes": ours,
        "paper_bytes": paper,
        "error": round(ours / real - 1, 4),
        "paper_error": round(paper / real - 1, 4),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the steps run (default cpu)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All configurations."""
    cases, runs = (CASES[:FEW], RUNS[:FEW_RUNS]) if args.quick else (CASES, RUNS)
    rows = []
    for case in cases:
        rows.append(row_of_model(case, args.device))
        progress(rows[-1]["model"], rows[-1]["error"])
    rows += [row_of_run(*run, args.device) for run in runs]
    if args.device == "cuda" and not args.quick:
        rows.append(row_of_model(("gpt2-large", "mixed", "adam", 8, "fused", True), args.device, published=True))
    texts = [row_of_language_model(*case) for case in LANGUAGE_MODELS[: FEW_TEXTS if args.quick else None]]
    return {
        "worst_error_lm": max(abs(row["error"]) for row in texts),
        "rows_lm": texts,
        "worst_error": max(abs(row["error"]) for row in rows),
        "paper_worst_error": max(abs(row["paper_error"]) for row in rows),
        "paper_worst_error_with_warning": max(
            abs((1 + WARNED) * row["paper_bytes"] / row["measured_bytes"] - 1) for row in rows
        ),
        "rows": rows,
    }
