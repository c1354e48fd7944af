"""A language model is a task like any other: trained by a swarm, checked, accounted for, evaluated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tokenizers
import torch
from task.swarm import trained
from testbed.tiny_words import tiny_words
from torch._inductor import config as inductor

from tt_cli.data.text.token_reader import TextTokenizer
from tt_cli.errors import UsageError
from tt_cli.memory.trainer_account import Need
from tt_cli.model.layers.fused import fusion
from tt_cli.organise.run_check import look_over
from tt_cli.task import task_of

SWARM = {"matchmaking_time": 1.0, "next_chunk_timeout": 1.0, "averaging_timeout": 8.0, "statistics_expiration": 20.0}
RUN = tiny_words().replaced(
    {
        **{f"swarm.{key}": value for key, value in SWARM.items()},
        "optimizer": {},
        "schedule.total_steps": 16,
        "schedule.peak_lr": 5e-2,
        "swarm.target_batch_size": 32,
    }
)


def test_a_swarm_learns_words() -> None:
    losses, digests = trained(RUN, members=2, micro_batch=16)
    assert losses[0] > 6.0 and losses[-1] < losses[0] - 0.2 and len(digests) == 1


@pytest.mark.parametrize("sparse", [0, 256])
def test_with_steps_of_its_own_that_go_on_beside_rounds_it_learns_too(sparse: int) -> None:
    local = {"name": "local", "inner_batch": 8, "warmup_steps": 2, "delayed": True, "sparse": sparse}
    changes = {"optimizer": local, "schedule.peak_lr": 1e-2, "swarm.target_batch_size": 64, "swarm.large_tensor": 1024}
    losses, digests = trained(RUN.replaced(changes | {"schedule.total_steps": 8}), members=2, micro_batch=8)
    assert losses[0] > 5.8 and losses[-1] < losses[0] - 0.4 and len(digests) == 1


def test_perplexity_is_told_beside_the_loss() -> None:
    task = task_of(RUN)
    model, batch = task.new_model(), next(task.examples(0).batches(4))
    loss, figures = task.losses(model, batch)
    assert loss.requires_grad and not figures["perplexity"].requires_grad
    assert float(figures["perplexity"]) == pytest.approx(math.exp(float(loss.detach())), rel=1e-5)
    assert float(loss.detach()) == pytest.approx(math.log(512), abs=0.2)  # of a model that knows nothing


def test_held_out_text_of_a_large_vocabulary_is_measured_a_few_examples_at_a_time() -> None:
    """Logits of 16 examples of GPT-2's 50,257 ids and 512 tokens would take 1.6 GB beside an auxiliary peer."""
    task = task_of(RUN)
    assert [len(batch) for batch in task.held_out(20, 16)] == [16, 4]
    words = {"</s>": 0, **{f"w{number}": number for number in range(1, 2**18)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    vars(task)["tokenizer"] = TextTokenizer(task.run.tokenizer, backend)
    assert RUN.model.length == 32
    assert [len(batch) for batch in task.held_out(20, 16)] == [8, 8, 4]


@pytest.mark.debian
@inductor.patch({"cpp.vec_isa_ok": False})
def test_compiled_layers_compute_the_same_kept_or_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a CPU's compiler, one number at a time, at two micro-batches."""
    monkeypatch.setattr(fusion, "compiled", set())
    task = task_of(RUN)
    model, batch = task.new_model(), next(task.examples(0).batches(4))

    def gradient(size: int, budget: int) -> torch.Tensor:
        model.zero_grad()
        task.keep(model, budget)
        task.losses(model, batch[:size])[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    cases = [(2, 2**60), (4, 2**60), (4, 0)]
    eager = [gradient(*case) for case in cases]
    monkeypatch.setattr(fusion, "devices", {"cpu"})
    for case, expected in zip(cases, eager, strict=True):
        torch.testing.assert_close(gradient(*case), expected, rtol=1e-4, atol=1e-6)
    assert fusion.compiled == {"forward"} and not fusion.failure


def test_need_grows_evenly_and_less_in_half_precision() -> None:
    task = task_of(RUN)

    def kept(micro_batch: int, itemsize: int = 4) -> int:
        need: Need = task.need("cpu", itemsize=itemsize, micro_batch=micro_batch, budget=2**40)
        return next(item.bytes for item in need.items if item.what == "activations kept")

    one, few, more, many = (kept(size) for size in (1, 16, 17, 24))
    assert 0 < one < few and many - more == 7 * (more - few)
    assert kept(8, itemsize=2) < kept(8)
    numbers = task.sizes()["parameters"]
    assert numbers == sum(parameter.numel() for parameter in task.new_model().parameters())
    products = sum(p.numel() for p in task.new_model().parameters() if p.dim() == 2)
    assert task.flops() > 6 * products * RUN.model.length  # and attention's


def test_layers_are_computed_again_where_activations_do_not_fit_and_gradients_are_the_same() -> None:
    task = task_of(RUN)
    model, whole = task.new_model(), task.need("cpu", micro_batch=4, budget=2**40)
    budget = next(item.bytes for item in whole.items if item.what == "activations kept")
    assert task.need("cpu", micro_batch=4, budget=budget) == whole
    assert task.need("cpu", micro_batch=4, budget=budget - 1).host < whole.host
    gradients = []
    batch = next(task.examples(0).batches(4))
    for less, again in ((0, False), (1, True), (0, False)):
        task.keep(model, budget - less)
        task.losses(model, batch)[0].backward()
        assert model.is_activation_checkpointing is again
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    for found in zip(*gradients, strict=True):
        assert all(torch.equal(found[0], other) for other in found[1:])
    task.losses(model, batch[:2])[0].backward()
    assert not model.is_activation_checkpointing, "fewer examples fit"


def test_the_model_must_have_places_and_embeddings_for_its_tokens() -> None:
    for changes, words in (
        ({"vocab_size": 500}, "its vocab_size is 500, and the run needs 512"),
        ({"max_position_embeddings": 16}, "its max_position_embeddings is 16, and the run needs 32"),
    ):
        with pytest.raises(UsageError, match=f"model.config: {words}"):
            task_of(tiny_words(**changes)).prepare()


def test_tt_check_makes_a_step_of_it(tmp_path: Path) -> None:
    file = tmp_path / "words.toml"
    file.write_text(RUN.to_toml())
    checks = list(look_over(str(file), peers=[], device="cpu", step=True, members=(8, 100.0)))
    assert [(check.name, check.verdict) for check in checks] == [
        (name, "pass") for name in ("run file", "data", "model", "lines", "step")
    ], checks
    assert 'austen gave "' in checks[1].words


def test_however_wrong_a_model_is_its_figures_are_finite() -> None:
    """For a batch with one that is not is left out: such a model would never learn."""
    task = task_of(RUN)
    model = task.new_model().requires_grad_(False)
    model.get_parameter("model.embed_tokens.weight").mul_(1e4)
    loss, figures = task.losses(model, next(task.examples(0).batches(2)))
    assert 100 < loss < math.inf and 1e38 < figures["perplexity"] < math.inf


def test_weights_that_training_made_fill_the_model_again() -> None:
    task = task_of(RUN)
    parameters = {name: tensor.detach().clone() for name, tensor in task.new_model().named_parameters()}
    model = task.filled_model(parameters, "x")
    batch = next(task.examples(0).batches(2))
    assert torch.equal(task.losses(model, batch)[0], task.losses(task.new_model(), batch)[0])
    assert model.state_dict().keys() == task.new_model().state_dict().keys()
