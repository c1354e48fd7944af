"""Device and precision, each with its reason."""

from __future__ import annotations

import pytest
import torch

from tt_cli.errors import UsageError
from tt_cli.peer import device as room
from tt_cli.peer.device import choose_device
from tt_cli.run import load_run
from tt_cli.supervisor.events import Choice, Event

MODEL = load_run("emoji-demo").model


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


@pytest.mark.parametrize("wanted", [None, "", "cpu"])
def test_without_a_gpu_the_cpu_trains_in_full_precision(wanted: str | None, no_gpu: None) -> None:
    told: list[Event] = []
    device = choose_device(wanted, MODEL, told.append)
    assert (device.torch_device, device.autocast) == (torch.device("cpu"), None)
    choices = {event.what: event for event in told if isinstance(event, Choice)}
    assert choices["device"].value == "cpu" and choices["precision"].value == "fp32"
    assert ("--device cpu" if wanted else "no GPU that torch can use") in choices["device"].reason
    with device.precision():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(("wanted", "index"), [(None, 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_trains_in_bf16_where_it_can(wanted: str | None, index: int, two_gpus: None) -> None:
    told: list[Event] = []
    device = choose_device(wanted, MODEL, told.append)
    assert (device.torch_device, device.name) == (torch.device("cuda", index), f"GPU {index}")
    assert device.autocast == torch.bfloat16
    assert [(event.what, event.value) for event in told if isinstance(event, Choice)] == [
        ("device", f"cuda:{index}"),
        ("precision", "bf16"),
    ]


@pytest.mark.parametrize(("reversible", "precision"), [(True, "fp16"), (False, "fp32")])
def test_a_gpu_without_bf16(reversible: bool, precision: str, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 only where gradients are scaled to its range: by the reversible trunk."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    told: list[Event] = []
    device = choose_device(None, MODEL.model_copy(update={"reversible": reversible}), told.append)
    assert device.autocast == (torch.float16 if reversible else None)
    assert isinstance(told[1], Choice) and told[1].value == precision and "GPU 0 has no bf16" in told[1].reason


@pytest.mark.parametrize(("dim", "faster", "precision"), [(1024, 2.1, "bf16"), (1024, 0.1, "fp32"), (128, 9.0, "fp32")])
def test_a_cpu_trains_in_bf16_where_it_multiplies_faster_in_it(
    dim: int, faster: float, precision: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_product_rate", lambda dim, dtype: faster if dtype == torch.bfloat16 else 1.0)
    told: list[Event] = []
    device = choose_device(None, MODEL.model_copy(update={"dim": dim}), told.append)
    assert device.autocast == (torch.bfloat16 if precision == "bf16" else None)
    assert isinstance(told[1], Choice) and told[1].value == precision
    assert ("width 128" if dim == 128 else f"{faster} times as fast in bf16") in told[1].reason


def test_products_are_timed_for_real() -> None:
    assert room._product_rate(16, torch.float32) > 0


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused(wanted: str, no_gpu: None) -> None:
    with pytest.raises(UsageError, match=f"^--device {wanted}: torch sees 0 GPUs here: give --device cpu"):
        choose_device(wanted, MODEL, lambda event: None)


def test_a_gpu_beyond_those_there_is_refused(two_gpus: None) -> None:
    with pytest.raises(UsageError, match="^--device cuda:2: torch sees 2 GPUs here"):
        choose_device("cuda:2", MODEL, lambda event: None)


@pytest.mark.parametrize("wanted", ["gpu", "cuda:x", "cuda:-1", "cpu:", "mps", "meta", "tpu:0", "cuda 1", "ß"])
def test_nonsense_is_refused_with_what_is_allowed(wanted: str) -> None:
    with pytest.raises(UsageError, match="give cpu, cuda or cuda:N") as caught:
        choose_device(wanted, MODEL, lambda event: None)
    assert "\n" not in str(caught.value)
