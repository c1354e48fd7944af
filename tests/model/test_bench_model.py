"""What scripts/bench model and scripts/bench infer measure is the paper's model, and they need next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.benchmarks import harness, infer, model
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import load_run

BLOCKED = (
    *("bitsandbytes", "datasets", "hivemind", "huggingface_hub", "PIL", "pyarrow", "pydantic", "rich", "tokenizers"),
)


def test_both_measure_the_papers_model() -> None:
    paper = DalleConfig.from_run(load_run("dalle"))
    assert model.config(model.FULL_DEPTH) == paper == infer.PAPER
    # What the bench counts for an example is what the structure needs, give or take a few percent.
    assert paper.flops_per_sample() == pytest.approx(model.FLOPS, rel=0.04)


@pytest.mark.parametrize("name", ["model", "infer"])
def test_they_run_where_only_torch_and_numpy_are(name: str) -> None:
    blocked = f"import sys, runpy; sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    run = f"sys.argv = ['bench', {name!r}, '--help']; runpy.run_module('scripts.benchmarks', run_name='__main__')"
    command = [sys.executable, "-c", f"{blocked}; {run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=harness.ROOT)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout and "--json" in done.stdout
