"""The example of docs/add-a-task.md is a task like any other: read from a run file, trained by a swarm, checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from task.swarm import trained

from scripts.examples.digits_task import DigitsRun
from tt_cli.errors import TTError, UsageError
from tt_cli.organise.run_check import look_over
from tt_cli.run import RunConfig
from tt_cli.run.model_card import card
from tt_cli.task import task_of
from tt_cli.task.picture_codec import load_vqgan

STEPS, MICRO_BATCH, MEMBERS = 30, 64, 2
RUN_FILE = f"""\
[run]
name = "digits"

[task]
kind = "digits"
width = 64

[schedule]
total_steps = {STEPS}
peak_lr = 0.1

[swarm]
target_batch_size = {MEMBERS * MICRO_BATCH}
matchmaking_time = 1.0
next_chunk_timeout = 1.0
averaging_timeout = 8.0
statistics_expiration = 20.0
"""
RUN = RunConfig.from_toml(RUN_FILE, "digits.toml")


def test_a_swarm_learns_to_add() -> None:
    losses, digests = trained(RUN, members=MEMBERS, micro_batch=MICRO_BATCH)
    assert losses[0] > 2.5 and losses[-1] < 1.0 and len(digests) == 1


def test_its_run_file_reads_back_with_its_kind_in_the_identity() -> None:
    assert isinstance(RUN, DigitsRun) and RUN.task.width == 64
    assert RunConfig.from_toml(RUN.to_toml(), "x.toml") == RUN
    assert RUN.to_toml().index("[run]") < RUN.to_toml().index("[task]") < RUN.to_toml().index("[data]")
    wider = RUN.replaced({"task.width": 128})
    assert wider.identity != RUN.identity and RUN.differences(wider) == ["task.width: 64 here, 128 there"]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"digits"\nwidth', '"numbers"\nwidth', r'task\.kind = "numbers": must be dalle or causal_lm or digits'),
        ("width = 64", "width = 0", r"task\.width = 0: must be at least 1"),
        ("width = 64", "with = 64", r"task\.with: no such key"),
        ("[schedule]", "[vqgan]\ngrid = 8\n\n[schedule]", r"vqgan: no such key"),
    ],
)
def test_what_is_wrong_in_it_is_one_line(before: str, after: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"^digits\.toml: {words}"):
        RunConfig.from_toml(RUN_FILE.replace(before, after), "digits.toml")


def test_its_card_promises_no_pictures() -> None:
    words = card(RUN)
    assert "| kind | digits |" in words and "text-to-image" not in words and "tt infer" not in words


def test_what_is_for_dalle_alone_says_so() -> None:
    with pytest.raises(UsageError, match="^run digits is of kind digits, and this is for runs of kind dalle$"):
        load_vqgan(RUN)


def test_its_first_weights_are_decided_by_the_seed_and_its_memory_is_counted() -> None:
    task = task_of(RUN)
    one, other = (dict(task.new_model().named_parameters()) for _ in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    numbers = sum(tensor.numel() for tensor in one.values())
    assert task.sizes() == {"parameters": numbers, "effective": numbers}
    items = {item.what: item.bytes for item in task.need("cpu", micro_batch=8).items}
    assert items["gradients"] == 4 * numbers < items["shared state"]
    with pytest.raises(TTError, match="1 tensors differ, such as sums.bias"):
        task.check_fit({name: tensor for name, tensor in one.items() if name != "sums.bias"}, "x.safetensors")


def test_tt_check_makes_a_step_of_it(tmp_path: Path) -> None:
    file = tmp_path / "digits.toml"
    file.write_text(RUN_FILE)
    checks = list(look_over(str(file), peers=[], device="cpu", step=True, members=(8, 100.0)))
    assert [(check.name, check.verdict) for check in checks] == [
        (name, "pass") for name in ("run file", "data", "model", "lines", "step")
    ], checks
