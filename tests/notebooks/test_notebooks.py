"""The notebooks of docs/, cell by cell, in a kernel of their own: a real swarm, drawing, the memory tutorial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from end_to_end.conftest import local_swarm, tiny_run
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from tt_cli.auth.identities import export_identities, identities
from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.identity.peer_key import made_key
from tt_cli.run import folders
from tt_cli.supervisor.local_swarm import LocalSwarm

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
RUN = tiny_run(swarm={"target_batch_size": 64})  # a trainer alone is no faster than a newcomer can follow


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    """An aux peer on loopback, and a trainer that accepts connections, for those in client mode."""
    with local_swarm(RUN, tmp_path / "swarm") as swarm:
        swarm.start_aux()
        swarm.start_trainer("anna", batch_size=4, seed=0)
        yield swarm


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> NotebookNode:
    """The notebook with its outputs. settings: for its cell of parameters."""
    for key, value in {"TT_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", **settings}.items():
        monkeypatch.setenv(key, value)
    # Where Jupyter looks for kernels and keeps its files: this environment, and nothing of the person's.
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path[:1] + [str(NOTEBOOKS.parents[1])]))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def printed(notebook: NotebookNode) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )


@pytest.mark.promise(
    "The notebook join.ipynb returns with the identity of a lost machine, trains in client mode and leaves"
)
@pytest.mark.promise("The notebook infer.ipynb draws with a checkpoint")
@pytest.mark.timeout(600)
def test_return_join_leave_and_draw(swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.toml").write_text(RUN.to_toml())
    common = {"TT_NOTEBOOK_RUN": str(tmp_path / "tiny.toml"), "TT_NOTEBOOK_PEERS": swarm.addresses[0]}
    settings = {
        **common,
        "TT_NOTEBOOK_STEPS": "2",
        "TT_NOTEBOOK_KEEP": str(tmp_path / "kept"),
        "TT_NOTEBOOK_FLAGS": "--batch-size 8 --threads 1 --device cpu",
    }
    # of a machine that was taken away
    monkeypatch.setenv("TT_HOME", str(tmp_path / "before"))
    made_key(folders.run_folder(RUN) / "trainer.key")
    (tmp_path / "kept").mkdir()
    kept = export_identities(RUN, tmp_path / "kept" / "identity.json")

    text = printed(executed("join.ipynb", tmp_path, monkeypatch, **settings))
    assert "a new one is made" not in text and text.count(": loss ") >= 2
    assert identities(RUN) == kept  # TT_HOME is the new machine's now
    status = json.loads((folders.run_folder(RUN) / "peer.json").read_text())
    assert (status["peer_id"], status["client_mode"], status["reason"]) == (kept["trainer"], True, "left")
    saved = sorted((tmp_path / "home" / "runs" / RUN.identity).rglob("step-*.safetensors"))
    assert load(saved[-1]).step >= 2

    drawn = executed(
        "infer.ipynb",
        tmp_path,
        monkeypatch,
        TT_NOTEBOOK_CHECKPOINT=str(saved[-1]),
        TT_NOTEBOOK_CANDIDATES="1",
        **common,
    )
    assert f"{RUN.identity} at step {load(saved[-1]).step}" in printed(drawn)
    pictures = [
        output for cell in drawn.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2


@pytest.mark.promise("A command that fails stops its notebook")
def test_what_goes_wrong_stops_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CellExecutionError, match="tt infer ended with exit code 2"):
        executed("infer.ipynb", tmp_path, monkeypatch, TT_NOTEBOOK_RUN="no-such-run")


@pytest.mark.promise(
    "The notebook memory.ipynb fine-tunes within the memory it says", also="tests/tutorial/test_finetune.py"
)
def test_fine_tune_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"TT_NOTEBOOK_STEPS": "3", "TT_NOTEBOOK_FLAGS": "--tiny --batch 4", "TT_NOTEBOOK_SAVE": "kept"}
    source = {"TT_NOTEBOOK_SOURCE": str(NOTEBOOKS.parents[1])}
    text = printed(executed("memory.ipynb", tmp_path, monkeypatch, **settings, **source))
    assert "GPT-2 large: 774,030,080 parameters" in text and "✓ it fits" in text
    assert text.count(": loss ") == 3 and "the calculator was off by" in text
    assert (tmp_path / "kept" / "step-000003" / "model.safetensors").is_file()
