"""TrainingState as bytes: bit-exact there and back, and nothing damaged or forged gets through."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save as library_save
from torch import Tensor

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.checkpoint.training_state import CheckpointError, CorruptCheckpoint, TrainingState, serialised
from tt_cli.run.checkpoint_names import metadata_digest

GENERATOR = torch.Generator().manual_seed(0)


def state_of(parameters: dict[str, Tensor], optimizer: dict[str, Tensor] | None = None) -> TrainingState:
    return TrainingState(7, parameters, optimizer or {}, run_toml="[run]\nname = 'é'\n", identity="run-0")


def all_kinds() -> TrainingState:
    """A state with every dtype and shape that occurs."""
    floats = torch.randn(3, 5, generator=GENERATOR)
    parameters = {
        "weight": floats,
        "half": floats.half(),
        "brain": floats.bfloat16(),
        "double": floats.double(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "subnormal": torch.tensor([1e-45, -0.0, 3.4e38]),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "slice": torch.arange(20.0)[3:9:2],
    }
    optimizer = {
        "weight.moment1": torch.randint(0, 256, (15,), dtype=torch.uint8, generator=GENERATOR),
        "weight.sign": torch.tensor([True, False]),
        "step": torch.tensor(7, dtype=torch.int64),
        "small": torch.tensor([-3, 3], dtype=torch.int8),
    }
    return state_of(parameters, optimizer)


def pack(state: TrainingState) -> bytes:
    return b"".join(serialised(state))


def unpack(data: bytes) -> TrainingState:
    """The state in a file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        path.write_bytes(data)
        return load(path)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: TrainingState, other: TrainingState) -> None:
    assert (one.step, one.run_toml, one.identity) == (other.step, other.run_toml, other.identity)
    for mine, theirs in ((one.parameters, other.parameters), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
            assert bits(tensor) == bits(theirs[name]), name
    assert one.digest() == other.digest()


def test_there_and_back_every_bit_is_the_same() -> None:
    state = all_kinds()
    again = unpack(pack(state))
    assert_same(state, again)
    again.parameters["weight"].add_(1)  # what comes back is the receiver's own, to train on
    assert pack(again) != pack(state)


def test_the_bytes_are_a_safetensors_file(tmp_path: Path) -> None:
    state = all_kinds()
    path = tmp_path / "state.safetensors"
    path.write_bytes(pack(state))
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["step"] == "7"
        assert file.metadata()["run"] == state.run_toml
        assert set(file.keys()) == {f"parameters.{name}" for name in state.parameters} | {
            f"optimizer.{name}" for name in state.optimizer
        }
        assert bits(file.get_tensor("parameters.brain")) == bits(state.parameters["brain"])


def test_the_bytes_do_not_depend_on_the_order_of_names() -> None:
    state = all_kinds()
    turned = state_of(dict(reversed(state.parameters.items())), dict(reversed(state.optimizer.items())))
    assert pack(turned) == pack(state)


def test_the_digest_covers_everything_and_only_content() -> None:
    tensor = torch.arange(6.0)
    base = state_of({"a": tensor}).digest()
    assert state_of({"a": torch.arange(12.0)[::2] / 2}).digest() == base  # other strides
    others = [
        state_of({"b": tensor}),
        state_of({"a": tensor.reshape(2, 3)}),
        state_of({"a": tensor.view(torch.int32)}),
        state_of({}, {"a": tensor}),
        state_of({"a": tensor, "b": torch.empty(0)}),
        TrainingState(8, {"a": tensor}, {}, "", "run-0"),
        TrainingState(7, {"a": tensor}, {}, "", "run-1"),
    ]
    flipped = tensor.clone()
    flipped.view(torch.int32)[5] ^= 1
    others.append(state_of({"a": flipped}))
    digests = {other.digest() for other in others}
    assert base not in digests
    assert len(digests) == len(others)
    assert TrainingState(7, {"a": tensor}, {}, "another run file", "run-0").digest() == base


def test_the_digest_is_the_same_on_every_machine() -> None:
    state = state_of({"a": torch.tensor([1.0, 2.0])}, {"m": torch.tensor([1, 2], dtype=torch.uint8)})
    assert state.digest() == "0084470a3652a108136bd2f2630871e0251b627d124c46eccf7caf11a0560717"


WHOLE = all_kinds()
PACKED = pack(WHOLE)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(PACKED) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, change: int) -> None:
    damaged = bytearray(PACKED)
    damaged[position] ^= change
    try:
        state = unpack(bytes(damaged))
    except CorruptCheckpoint:
        return
    assert_same(state, WHOLE)  # what is not 0 is True: a boolean's other bits mean nothing


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(PACKED) - 1))
def test_any_cut_is_noticed(length: int) -> None:
    with pytest.raises(CorruptCheckpoint):
        unpack(PACKED[:length])


@given(st.binary(max_size=200))
def test_noise_is_no_state(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        unpack(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", ["parameters", "optimizer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_state_that_is_not_finite_is_refused(value: float, group: str, dtype: torch.dtype) -> None:
    state = all_kinds()
    getattr(state, group)["bad"] = torch.tensor([0.0, value, 1.0], dtype=dtype)
    with pytest.raises(CorruptCheckpoint, match=r"'\w+\.bad' holds NaN or infinity"):
        unpack(pack(state))


def test_other_safetensors_files_are_no_checkpoints() -> None:
    for metadata in (None, {"format": "pt"}, {"format": "tt-2"}, {"format": "tt-2", "step": "1"}):
        with pytest.raises(CorruptCheckpoint, match=r"is no checkpoint of tt"):
            unpack(library_save({"parameters.a": torch.ones(2)}, metadata))


@pytest.mark.parametrize(
    ("found", "advice"), [("tt-3", "update tt"), ("tt-1", "it was written by an earlier version, use that one")]
)
def test_another_format_is_not_called_damaged(found: str, advice: str) -> None:
    data = library_save({"parameters.a": torch.ones(2)}, {"format": found})
    with pytest.raises(CheckpointError, match=f"has format {found}; this version of tt reads tt-2: {advice}") as error:
        unpack(data)
    assert not isinstance(error.value, CorruptCheckpoint)


def test_unexpected_tensors_and_steps_are_refused() -> None:
    header_size = int.from_bytes(PACKED[:8], "little")
    metadata = json.loads(PACKED[8 : 8 + header_size])["__metadata__"]
    state = all_kinds()
    tensors = {f"parameters.{name}": tensor.contiguous() for name, tensor in state.parameters.items()}
    with pytest.raises(CorruptCheckpoint, match="unexpected tensor 'else.x'"):
        unpack(library_save({**tensors, "else.x": torch.ones(1)}, metadata))
    with pytest.raises(CorruptCheckpoint, match="unexpected tensor 'parameters.x'"):
        unpack(library_save({**tensors, "parameters.x": torch.ones(1, dtype=torch.complex64)}, metadata))
    for step in ("-1", "7.5", "1" * 16):
        forged = {**metadata, "step": step}
        with pytest.raises(CorruptCheckpoint, match=f"step '{step}' is no number"):
            unpack(library_save(tensors, {**forged, "metadata_digest": metadata_digest(forged)}))


def peak_growth_while(action: object) -> int:
    """Bytes by which the process's peak memory exceeds its memory before `action`."""

    def status(key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present
    before = status("VmRSS")
    assert callable(action)
    action()
    return status("VmHWM") - before


def test_writing_takes_one_copy() -> None:
    size = 64 << 20
    state = state_of({"big": torch.zeros(size // 8)}, {"moment": torch.zeros(size // 2, dtype=torch.uint8)})
    assert peak_growth_while(lambda: pack(state)) < 1.5 * size
    assert peak_growth_while(state.digest) < 0.5 * size
