"""One training step of a real model, in a process of its own: the most memory that its tensors take.

Models are transformers' own classes made from small configurations, and the project's decoder. On a CPU torch's
profiler sees every allocation; to that come the tensors that exist before the step (weights, gradients, optimizer
state, batch). On a GPU torch.cuda.max_memory_allocated tells the same. Reads a JSON object from standard input,
prints one.
Used by scripts/bench memory_model and scripts/finetune_gpt2.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tt_cli.memory.architectures import ARCHITECTURES, Architecture


def built(model: Architecture, attention: str) -> nn.Module:
    """transformers' class of this structure, with drawn weights."""
    import transformers as hf

    given: dict[str, Any] = {
        "vocab_size": model.vocab,
        "attn_implementation": "sdpa" if attention == "fused" else "eager",
    }
    if model.family == "bert":
        return hf.BertForMaskedLM(
            hf.BertConfig(
                hidden_size=model.dim, num_hidden_layers=model.layers, num_attention_heads=model.heads,
                intermediate_size=model.hidden, max_position_embeddings=model.positions,
                hidden_dropout_prob=model.dropout, attention_probs_dropout_prob=model.dropout, **given,
            )
        )  # fmt: skip
    if model.family == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=model.dim, num_layers=model.layers, num_decoder_layers=model.decoder_layers,
                num_heads=model.heads, d_kv=model.dim_head, d_ff=model.hidden, dropout_rate=model.dropout,
                decoder_start_token_id=0, **given,
            )
        )  # fmt: skip
    if model.family == "gptj":
        return hf.GPTJForCausalLM(
            hf.GPTJConfig(
                n_embd=model.dim, n_layer=model.layers, n_head=model.heads, n_inner=model.hidden,
                n_positions=model.sequence, rotary_dim=model.dim_head // 4, bos_token_id=0, eos_token_id=0, **given,
            )
        )  # fmt: skip
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=model.dim, n_layer=model.layers, n_head=model.heads, n_inner=model.hidden,
            n_positions=model.positions, bos_token_id=0, eos_token_id=0, resid_pdrop=model.dropout,
            embd_pdrop=model.dropout, attn_pdrop=model.dropout, **given,
        )
    )  # fmt: skip


def optimizer_of(
    name: str, bits: int, parameters: Iterable[nn.Parameter], *, rate: float = 1e-4
) -> torch.optim.Optimizer:
    """Adam's 16-bit state is what torch gives 16-bit weights. rate: Adam's learning rate."""
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=1e-3)
    if name == "adam" and bits == 8:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=rate)  # type: ignore[attr-defined]
    return torch.optim.AdamW(parameters, lr=rate)


def tensors_of(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor]) -> int:
    """Bytes of the storages that exist between steps."""
    seen: dict[int, int] = {}
    state = [value for group in optimizer.state.values() for value in group.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for tensor in [*module.parameters(), *module.buffers(), *gradients, *state, *batch]:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def allocated(step: Callable[[], None]) -> int:
    """Bytes at the worst moment of a step on a CPU, beside those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = worst = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        worst = max(worst, now)
    return worst


def peaks_of(parts: Iterable[Callable[[], None]], between: int, device: torch.device) -> list[int]:
    """The most bytes in each part of a step. between: those of before it."""
    peaks = []
    for part in parts:
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            part()
            torch.cuda.synchronize()
            peaks.append(between + torch.cuda.max_memory_allocated() - before)
        else:
            gc.collect()  # what others left behind must not go amid the part
            peaks.append(between + allocated(part))
    return peaks


def of_architecture(case: dict[str, Any]) -> dict[str, int]:
    """A model of transformers with its optimizer."""
    device, dtype = torch.device(case["device"]), torch.bfloat16
    model = replace(ARCHITECTURES[case["model"]], **case["shape"])
    module = built(model, case["attention"]).to(device).train()
    if case["precision"] == "pure16":
        module = module.to(dtype)
    if case["checkpointing"]:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    b = case["micro_batch"]
    text = torch.randint(0, model.vocab, (b, model.sequence), device=device)
    labels = text if model.family != "t5" else torch.randint(0, model.vocab, (b, model.target), device=device)
    cached = {} if model.family == "bert" else {"use_cache": False}
    optimizer = optimizer_of(case["optimizer"], case["bits"], module.parameters())

    def passes() -> None:
        with torch.autocast(device.type, dtype=dtype) if case["precision"] == "mixed" else contextlib.nullcontext():
            loss = module(input_ids=text, labels=labels, **cached).loss
        loss.backward()

    def update() -> None:
        optimizer.step()

    passes()
    update()
    optimizer.zero_grad(set_to_none=False)
    between = tensors_of(module, optimizer, (text, labels))
    peaks = peaks_of((passes, update), between, device)
    count = sum(parameter.numel() for parameter in module.parameters())
    return {"parameters": count, "between": between, "passes": peaks[0], "update": peaks[1]}


def of_run(case: dict[str, Any]) -> dict[str, int]:
    """The model of a run: its weights, their gradients and a micro-batch's passes, without an optimizer."""
    from tt_cli.data.examples import Batch
    from tt_cli.run import CausalLmRun, RunConfig
    from tt_cli.task import task_of

    device, task = torch.device(case["device"]), task_of(run := RunConfig.from_toml(case["run"], "the case"))
    module = task.new_model().to(device)
    task.keep(module, case["budget"])
    if isinstance(run, CausalLmRun):
        shapes = {"ids": run.model.length + 1}
    else:
        shapes = {"text": module.config.text_length, "image": module.config.image_positions}
    whole = {name: torch.ones(case["micro_batch"], n, dtype=torch.long, device=device) for name, n in shapes.items()}
    batch = Batch(whole)

    def passes() -> None:
        dtype = torch.bfloat16
        with torch.autocast(device.type, dtype=dtype) if case["precision"] == "mixed" else contextlib.nullcontext():
            loss = task.losses(module, batch)[0]
        loss.backward()

    passes()
    for parameter in module.parameters():  # a peer moves them into its sums after each micro-batch
        parameter.grad = None
    count = sum(parameter.numel() for parameter in module.parameters())
    peaks = peaks_of((passes,), sum(parameter.nbytes for parameter in module.parameters()), device)
    return {"parameters": count, "passes": peaks[0], "update": 0}


def main() -> None:
    """parameters: their count; passes and update: bytes at the worst moments of both parts of a step."""
    case = json.load(sys.stdin)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps(of_run(case) if "run" in case else of_architecture(case)))


if __name__ == "__main__":
    main()
