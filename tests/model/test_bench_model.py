"""What scripts/bench_model.py and bench_infer.py measure is the paper's model, and they need next to nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tt_cli.model import DalleConfig
from tt_cli.run import load_run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BLOCKED = (
    *("bitsandbytes", "datasets", "hivemind", "huggingface_hub", "PIL", "pyarrow", "pydantic", "rich", "tokenizers"),
)


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_measure_the_papers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    paper = DalleConfig.from_run(load_run("dalle"))
    training, drawing = loaded("bench_model"), loaded("bench_infer")
    assert training.config(training.FULL_DEPTH) == paper == drawing.PAPER
    # What the bench counts for an example is what the structure needs, give or take a few percent.
    assert paper.flops_per_sample() == pytest.approx(training.FLOPS, rel=0.04)


@pytest.mark.parametrize("name", ["bench_model", "bench_infer"])
def test_they_run_where_only_torch_and_numpy_are(name: str) -> None:
    blocked = f"import sys, runpy; sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    run = f"sys.argv = ['{name}', '--help']; runpy.run_path({str(SCRIPTS / name)!r} + '.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; {run}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout and "--json" in done.stdout
