"""Real peers that train a language model, and its user."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, joined_late_and_killed
from testbed.fork_server import fork_server
from testbed.tiny_words import tiny_words

from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import database_url
from tt_cli.memory.answer_tables import RUN
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Progress, Saved
from tt_cli.supervisor.local_swarm import LocalSwarm
from tt_cli.task import task_of
from tt_cli.web.queries import Answers


@pytest.mark.promise(
    "A language model's members hold the same parameters to the last bit, a late joiner too, through a kill; the "
    "auxiliary peer's checkpoint writes text, its page has the run's calculator",
    also="tests/task/test_causal_lm_task.py",
)
def test_a_swarm_trains_a_language_model_that_writes(
    start_swarm: Callable[[RunConfig], LocalSwarm], tt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    fork_server().preload("transformers.models.llama.modeling_llama")  # two seconds of each of five processes
    run = tiny_words().replaced({"optimizer": {"min_8bit_size": 4096}, "swarm.large_tensor": 4096})
    swarm = start_swarm(run.replaced({"swarm.target_batch_size": 48, "schedule.total_steps": 1000}))
    anna = joined_late_and_killed(swarm, batch_size=4)
    aux = swarm.members["aux"]
    assert swarm.wait(lambda: bool(aux.of(Saved)), WAIT)
    assert any(event.figures.get("perplexity", 0) > 100 for event in anna.of(Progress))

    history = HistoryReader(database_url(Path(aux.of(Saved)[-1].path).parents[1]))
    assert swarm.wait(lambda: history.newest("calculator") is not None, WAIT)
    assert Answers(history, run, "words").calculator(RUN)["parameters"] == sum(task_of(run).tensor_sizes())
    history.close()
    checkpoint = str(Path(aux.of(Saved)[-1].path).parent)
    answer = tt("infer", "It is a truth", "--checkpoint", checkpoint, "--json")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["step"] >= 1 and told["texts"][0]["text"] and told["tokens"] > 0
