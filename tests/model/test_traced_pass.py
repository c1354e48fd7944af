"""A pass on tensors without content takes what a real one takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from testbed.memory_step import allocated
from testbed.tiny_words import tiny_words

from tt_cli.data.examples import Batch
from tt_cli.model.causal_lm import adapted, causal_lm
from tt_cli.model.traced_pass import traced_flops
from tt_cli.run import CausalLmRun
from tt_cli.task import task_of
from tt_cli.task.task import Task, narrow, trained

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 512, "n_positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2"},
    "wide, tied embeddings": {"hidden_size": 384, "vocab_size": 1024, "num_hidden_layers": 1},
    "gpt2": GPT2 | {f"{place}_pdrop": 0.0 for place in ("resid", "embd", "attn")},
}


KEPT = 2**40  # bytes: all activations


def longer(**changes: Any) -> CausalLmRun:
    return tiny_words(**changes).replaced({"model.length": 64})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("itemsize", "size", "budget"), [(4, 1, KEPT), (2, 1, KEPT), (2, 4, KEPT), (4, 4, 0), (2, 8, 0)]
)  # a layer that is computed again holds 5 kB more, the state of random numbers
def test_the_account_is_what_torch_allocates(name: str, itemsize: int, size: int, budget: int) -> None:
    task = task_of(longer(**MODELS[name]))
    check_account(task, task.new_model(), itemsize, size, budget)


@pytest.mark.parametrize(("itemsize", "size", "budget"), [(4, 1, KEPT), (2, 4, KEPT), (2, 4, 0)])
def test_so_it_is_with_adapters_beside_weights_that_stay(itemsize: int, size: int, budget: int) -> None:
    parts = {"pretrained": {"name": "acme/base", "digest": "0" * 64}, "lora": {"rank": 8}}
    run = longer(**MODELS["wide, tied embeddings"]).replaced(parts)
    assert run.lora is not None and run.pretrained is not None
    task, base = task_of(run), causal_lm(run.model.config, 0)
    numbers = sum(parameter.numel() for parameter in base.parameters())
    model = adapted(base, run.lora, run.pretrained, 0)
    check_account(task, model, itemsize, size, budget)
    need = {item.what: item.bytes for item in task.need("cpu").items}
    assert need["weights that stay"] == 4 * numbers > 4 * need["gradients"]
    narrowed = {item.what: item.bytes for item in task.need("cpu", itemsize=2).items}["weights that stay"]
    assert sum(parameter.nbytes for parameter in model.parameters()) == 4 * task.sizes()["parameters"] + (
        narrowed if itemsize == 2 else 4 * numbers
    )
    assert 2 * numbers < narrowed < 4 * numbers  # most of this one's are embeddings
    assert need["gradients"] == 4 * task.sizes()["parameters"] == 4 * sum(p.numel() for p in trained(model).values())


def check_account(task: Task[Any], model: torch.nn.Module, itemsize: int, size: int, budget: int) -> None:
    """Compare what a pass of so many examples allocates with what the task says that it does.

    oneDNN takes room of its own where a CPU has no 16-bit products.
    """
    batch = Batch({"ids": torch.randint(512, (size, 65))})
    task.keep(model, budget)
    narrow(model, torch.bfloat16 if itemsize == 2 else None)

    def passes() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=itemsize == 2):
            loss = task.losses(model, batch)[0]
        loss.backward()

    def seen(onednn: bool) -> int:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.backends.mkldnn.flags(enabled=onednn):
            return allocated(passes)

    passes()
    need = task.need("cpu", itemsize=itemsize, micro_batch=size, budget=budget)
    ours = sum(item.bytes for item in need.items if item.what in ("gradients", "activations kept"))
    assert ours == pytest.approx(min(seen(onednn=True), seen(onednn=False)), rel=0.05)


def test_with_many_examples_memory_grows_evenly() -> None:
    task = task_of(longer())

    def kept(size: int) -> int:
        need = task.need("cpu", micro_batch=size, budget=KEPT)
        return next(item.bytes for item in need.items if item.what == "activations kept")

    three, four, seventy = (kept(size) for size in (3, 4, 70))
    assert seventy - four == 66 * (four - three)


def test_products_are_counted_twice_for_what_they_multiply() -> None:
    task = task_of(run := longer(num_key_value_heads=2))
    config, n = json.loads(run.model.config), run.model.length
    dim, hidden, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    weights = layers * (4 * dim * dim + 3 * dim * hidden) + config["vocab_size"] * dim
    attention = layers * 2 * n * n * dim
    least = 3 * 2 * (n * weights + attention)
    assert least <= task.flops() <= 1.02 * least


def test_the_trace_leaves_nothing_behind() -> None:
    before = torch.random.get_rng_state()
    assert (
        traced_flops(lambda: torch.nn.Linear(4, 8), lambda model: model(torch.zeros(2, 4)).sum()) == 2 * 2 * 2 * 4 * 8
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert type(torch.zeros(1)) is torch.Tensor
