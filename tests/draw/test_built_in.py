"""The weights that come with tt: their file, when they are drawn with, and training that goes on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draw.tiny import Tiny

from tt_cli.checkpoint.checkpoint_files import load, save
from tt_cli.checkpoint.training_state import TrainingState, file_pieces
from tt_cli.cli.main import main
from tt_cli.data.stream.subset import subset_examples
from tt_cli.draw.drawing import DrawingSettings, draw
from tt_cli.draw.weights_source import find_checkpoint, load_models
from tt_cli.errors import TTError, UsageError
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import folders, load_run
from tt_cli.run.checkpoint_names import BUILT_IN
from tt_cli.task import task_of
from tt_cli.task.built_in_weights import built_in, pack, start_from_built_in, unpack

EMOJI = load_run("emoji")


def test_a_file_of_weights_holds_them_to_eight_bits(tmp_path: Path) -> None:
    tiny = Tiny.new()
    state = load(tiny.save(tmp_path, 12))
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"".join(pack(state)))
    assert file.stat().st_size < sum(tensor.numel() for tensor in state.parameters.values()) * 1.1 + 20_000
    read = unpack(file, tiny.run)
    assert read is not None and (read.step, read.identity, read.optimizer) == (12, tiny.run.identity, {})
    task_of(tiny.run).check_fit(read.parameters, "the file")
    for name, tensor in state.parameters.items():
        error, largest = (read.parameters[name] - tensor).abs().max(), tensor.abs().max()
        assert error <= largest / 250 if tensor.numel() >= 4096 else error == 0, name


@pytest.mark.parametrize(
    "changes, fit",
    [
        ({"run.name": "mine", "schedule.total_steps": 9, "swarm.target_batch_size": 7}, True),
        ({"model.ff_mult": 2}, False),
        ({"data.subset": 256}, False),
        ({"data.source": "files", "data.location": "/nowhere"}, False),
    ],
)
def test_built_in_weights_are_for_runs_of_the_same_model_and_data(changes: dict[str, object], fit: bool) -> None:
    state = built_in(EMOJI.replaced(changes))
    assert (state is not None) is fit
    assert state is None or state.identity == EMOJI.replaced(changes).identity


def test_what_comes_with_tt_was_trained_to_the_end_and_draws_what_it_was_asked_for() -> None:
    source = find_checkpoint(EMOJI, None)
    assert source.step == EMOJI.schedule.total_steps
    assert source.reason.startswith("built in; a checkpoint of your own takes its place: `tt join emoji --new-swarm`")
    examples = subset_examples(EMOJI)[::141]
    settings = DrawingSettings(samples=1, sampling=Sampling(top_k=1))
    drawings = draw(load_models(source, "cpu"), [example.caption for example in examples], settings)
    drawn = zip(drawings, examples, strict=True)
    known = [bool((drawing.codes == example.codes).all()) for drawing, example in drawn]  # to the last code
    assert len(known) == 25 and sum(known) > 0.9 * len(known)


def test_a_checkpoint_of_ones_own_takes_the_place_of_the_built_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    state = built_in(EMOJI)
    assert state is not None
    save(folders.checkpoints(EMOJI), TrainingState(3, state.parameters, {}, EMOJI.to_toml(), EMOJI.identity))
    assert find_checkpoint(EMOJI, None).step == 3
    assert find_checkpoint(EMOJI, BUILT_IN).step == state.step
    assert main(["infer", "red apple", "--checkpoint", BUILT_IN, "--run", "dalle"]) == 2
    assert "--checkpoint built-in: no weights come with tt for run dalle" in capsys.readouterr().err


def test_a_damaged_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "emoji"
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(b"".join(file_pieces({}, {})))
    (folder / "manifest.json").write_text('{"files": {"weights.safetensors": {"sha256": "0"}}}')
    monkeypatch.setattr("tt_cli.data.builtin.folder", lambda: tmp_path)
    with pytest.raises(TTError, match="is damaged: its SHA-256 is not that of the manifest; install tt again"):
        built_in(EMOJI)


def test_training_goes_on_from_them_with_equal_bytes_and_new_moments() -> None:
    states = [start_from_built_in(EMOJI) for _ in range(2)]
    assert states[0].digest() == states[1].digest()
    assert 0 < states[0].step < EMOJI.schedule.total_steps
    model = task_of(EMOJI).new_model()
    shared = TrainedState(EMOJI, model, states[0])
    assert (shared.epoch, shared.digest) == (states[0].step, states[0].digest())
    shared.step({name: torch.full(shape, 1e-3) for name, shape in shared.shapes().items()})
    assert shared.epoch == states[0].step + 1 and shared.digest != states[1].digest()
    with pytest.raises(UsageError, match="no weights are built in for run dalle: start it from its seed"):
        start_from_built_in(load_run("dalle"))
