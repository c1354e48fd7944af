"""A peer's account, item by item, against the sizes of the real things."""

from __future__ import annotations

import sys

import pytest
import torch

from tt_cli.memory import DalleAccount
from tt_cli.memory.trainer_account import round_bytes
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.peer.local_steps import inner_optimizers
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import load_run
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, Partition

EMOJI = load_run("emoji")


def items(**settings: object) -> dict[str, int]:
    need = DalleAccount(EMOJI).need("cpu", **settings)  # type: ignore[arg-type]
    return {item.what: item.bytes for item in need.items}


@pytest.fixture(scope="module")
def state() -> TrainedState:
    return TrainedState(EMOJI, Dalle(DalleConfig.from_run(EMOJI)), None)


def test_the_state_takes_what_it_says(state: TrainedState) -> None:
    held = state.state()
    assert items()["shared state"] == sum(
        tensor.nbytes for group in (held.parameters, held.optimizer) for tensor in group.values()
    )


@pytest.mark.parametrize(("inner", "tied", "low", "high"), [("adamw", True, 0.25, 0.3), ("muon", False, 0.6, 0.9)])
def test_with_local_steps_parameters_are_shared_and_moments_are_the_devices(
    inner: str, tied: bool, low: float, high: float
) -> None:
    run = EMOJI.replaced({"optimizer": {"name": "local", "inner": inner}, "model.tied_embeddings": tied})
    assert run.optimizer.name == "local"
    model = Dalle(DalleConfig.from_run(run))
    held, optimizers = (
        TrainedState(run, model, None).state(),
        inner_optimizers(run.optimizer, dict(model.named_parameters()))[0],
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    found = {item.what: item for item in DalleAccount(run).need("cpu").items}
    assert found["shared state"].bytes == sum(tensor.nbytes for tensor in held.parameters.values())
    moments = [t.nbytes for one in optimizers for state in one.state.values() for t in state.values() if t.numel() > 1]
    assert found["inner moments"].bytes == sum(moments)
    gpu = {item.what: item for item in DalleAccount(run).need("cuda").items}["inner moments"]
    assert gpu.place == "device" and low <= gpu.bytes / sum(moments) < high


@pytest.mark.parametrize("compression", ["linear8", "blockwise8"])
def test_encoded_gradients_take_what_they_say(state: TrainedState, compression: str) -> None:
    run = EMOJI.replaced({"swarm.compression": compression})
    codec = codec_of(run)
    buffer = GradientBuffer(Partition(state.shapes(), run.swarm.large_tensor, codec.block), codec)
    (encoded,) = (i.bytes for i in DalleAccount(run).need("cpu").items if i.what == "encoded gradient and average")
    assert encoded == pytest.approx(2 * buffer.nbytes, rel=0.005)


def test_sparse_messages_and_their_averages_take_what_they_say(state: TrainedState) -> None:
    run = EMOJI.replaced({"optimizer": {"name": "local", "sparse": 64}})
    codec, sizes = codec_of(run), DalleConfig.from_run(run).tensor_sizes
    layout = Partition(state.shapes(), run.swarm.large_tensor, codec.block)
    local, average = (GradientBuffer(layout, each) for each in (codec, codec.averages))
    found = {item.what: item.bytes for item in DalleAccount(run).need("cpu").items}
    assert found["encoded gradient and average"] == local.nbytes + average.nbytes
    assert found["what messages left out"] == 2 * sum(sizes)
    message, whole = round_bytes(run, sizes, 2)
    assert message == local.nbytes
    values = torch.zeros(layout.boundary).view(-1, codec.block)
    values[:, : 2 * 64] = 1.0
    large = codec.averages.large.encode(values)
    assert whole == len(large) + 2 * (layout.size - layout.boundary)


def test_parameters_gradients_and_their_sums_are_float32() -> None:
    model = Dalle(DalleConfig.from_run(EMOJI))
    found = items()
    assert {found[what] for what in ("parameters in training", "gradients", "accumulated gradients")} == {
        sum(parameter.nbytes for parameter in model.parameters())
    }
    assert found["largest tensor decoded"] == max(parameter.nbytes for parameter in model.parameters())


def test_a_gpu_takes_what_the_host_then_does_not() -> None:
    cpu, gpu = (DalleAccount(EMOJI).need(kind, micro_batch=64, budget=10**9) for kind in ("cpu", "cuda"))
    assert cpu.device == 0 and cpu.host == sum(item.bytes for item in cpu.items)
    assert gpu.device > sum(i.bytes for i in gpu.items if i.what == "activations kept") > 0
    assert not any(item.place == "host" and item.what.startswith("activations") for item in gpu.items)
    assert "processes" in gpu.in_words("host") and "CUDA" in gpu.in_words("device")


def test_the_paper_s_run_is_reckoned_without_being_built() -> None:
    need = DalleAccount(load_run("dalle")).need("cuda", itemsize=2, micro_batch=4, budget=2**31)
    found = {item.what: item.bytes for item in need.items if item.place == "device"}
    assert found["gradients"] == 4 * 125_894_244
    assert 2**30 < found["activations kept"] <= 2**31


def test_the_room_needs_no_hivemind() -> None:
    code = (
        "import sys; sys.modules['hivemind'] = None\n"
        "from tt_cli.memory import parse_size, DalleAccount\n"
        "assert 'torch' not in sys.modules\n"
        "from tt_cli.run import load_run\n"
        "print(DalleAccount(load_run('emoji')).need('cpu').host)"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == DalleAccount(EMOJI).need("cpu").host
