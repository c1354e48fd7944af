"""Device and precision, each with its reason."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tt_cli.errors import TTError, UsageError
from tt_cli.peer import device as room
from tt_cli.peer.device import Hardware, choose_device, try_out
from tt_cli.run import load_run
from tt_cli.supervisor.events import Card, Choice, Event, Log
from tt_cli.task import task_of

RUN = load_run("emoji-demo")
MODEL = task_of(RUN)


@dataclass
class StubCuda:
    """torch.cuda of a machine with GPUs of these compute capabilities."""

    capabilities: list[tuple[int, int]] = field(default_factory=list)
    kernels: tuple[str, ...] = ("sm_75", "sm_80", "sm_120")

    def is_available(self) -> bool:
        return bool(self.capabilities)

    def device_count(self) -> int:
        return len(self.capabilities)

    def get_device_name(self, device: torch.device) -> str:
        return f"GPU {device.index}"

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return self.capabilities[device.index]

    def get_device_properties(self, device: torch.device) -> object:
        return SimpleNamespace(gcnArchName="gfx1010:xnack-", uuid=f"uuid-{device.index}")

    def get_arch_list(self) -> list[str]:
        return list(self.kernels)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True


def no_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """What torch raises at the first kernel."""
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with")


def machine(*capabilities: tuple[int, int], without_kernels: Container[int] = (), **more: Any) -> Hardware:
    """Hardware with CUDA GPUs, some of which torch has no kernels for."""

    def try_out(device: torch.device, dtype: torch.dtype) -> None:
        if device.index in without_kernels:
            no_kernels(device, dtype)

    usual: dict[str, Any] = {"cuda_version": "13.0", "hip_version": None, "driver": lambda: "", "try_out": try_out}
    return Hardware(cuda=StubCuda(list(capabilities)), **(usual | more))


NO_GPU, TWO_GPUS = machine(), machine((8, 0), (8, 0))


def warnings(told: list[Event]) -> list[str]:
    return [event.message for event in told if isinstance(event, Log) and event.level == "warning"]


@pytest.mark.parametrize("wanted", [None, "", "cpu"])
def test_without_a_gpu_the_cpu_trains_in_full_precision(wanted: str | None) -> None:
    told: list[Event] = []
    device = choose_device(wanted, MODEL, told.append, NO_GPU)
    assert (device.torch_device, device.autocast) == (torch.device("cpu"), None)
    choices = {event.what: event for event in told if isinstance(event, Choice)}
    assert choices["device"].value == "cpu" and choices["precision"].value == "fp32"
    assert ("--device cpu" if wanted else "no GPU that torch can use") in choices["device"].reason
    with device.precision():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(("wanted", "index"), [(None, 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_trains_in_bf16_where_it_can(wanted: str | None, index: int) -> None:
    told: list[Event] = []
    device = choose_device(wanted, MODEL, told.append, TWO_GPUS)
    assert (device.torch_device, device.name) == (torch.device("cuda", index), f"GPU {index}")
    assert device.autocast == torch.bfloat16
    assert [(event.what, event.value) for event in told if isinstance(event, Choice)] == [
        ("device", f"cuda:{index}"),
        ("precision", "bf16"),
    ]


def test_a_gpu_without_bf16() -> None:
    told: list[Event] = []
    device = choose_device(None, MODEL, told.append, machine((7, 5), (8, 0)))
    assert device.autocast == torch.float16
    chosen = next(event for event in told if isinstance(event, Choice) and event.what == "precision")
    assert chosen.value == "fp16" and "GPU 0 has no bf16" in chosen.reason


@pytest.mark.parametrize(("dim", "faster", "precision"), [(1024, 2.1, "bf16"), (1024, 0.1, "fp32"), (128, 9.0, "fp32")])
def test_a_cpu_trains_in_bf16_where_it_multiplies_faster_in_it(
    dim: int, faster: float, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_product_rate", lambda dim, dtype: faster if dtype == torch.bfloat16 else 1.0)
    told: list[Event] = []
    device = choose_device(None, task_of(RUN.replaced({"model.dim": dim})), told.append, NO_GPU)
    assert device.autocast == (torch.bfloat16 if precision == "bf16" else None)
    assert isinstance(told[1], Choice) and told[1].value == precision
    assert ("width 128" if dim == 128 else f"{faster} times as fast in bf16") in told[1].reason


def test_products_are_timed_for_real() -> None:
    assert room._product_rate(16, torch.float32) > 0


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused(wanted: str) -> None:
    with pytest.raises(UsageError, match=f"^--device {wanted}: torch sees 0 GPUs here: give --device cpu"):
        choose_device(wanted, MODEL, lambda event: None, NO_GPU)


def test_a_gpu_beyond_those_there_is_refused() -> None:
    with pytest.raises(UsageError, match="^--device cuda:2: torch sees 2 GPUs here"):
        choose_device("cuda:2", MODEL, lambda event: None, TWO_GPUS)


@pytest.mark.parametrize("wanted", ["gpu", "cuda:x", "cuda:-1", "cpu:", "mps:0", "meta", "tpu:0", "cuda 1", "ß"])
def test_nonsense_is_refused_with_what_is_allowed(wanted: str) -> None:
    with pytest.raises(UsageError, match="give cpu, cuda, cuda:N, mps or xpu") as caught:
        choose_device(wanted, MODEL, lambda event: None)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ GPUs that do not work


def test_bf16_is_asked_of_the_chosen_gpu() -> None:
    """Not of GPU 0, which is the current one: torch's own question is about that."""
    assert choose_device("cuda:1", MODEL, lambda event: None, machine((8, 0), (7, 5))).autocast == torch.float16
    assert choose_device("cuda:1", MODEL, lambda event: None, machine((7, 5), (9, 0))).autocast == torch.bfloat16


def test_a_gpu_without_kernels_is_passed_over_for_the_next() -> None:
    told: list[Event] = []
    device = choose_device(None, MODEL, told.append, machine((6, 1), (8, 9), without_kernels={0}))
    assert device.torch_device == torch.device("cuda", 1)
    (words,) = warnings(told)
    assert words.startswith(f"cuda:0 (GPU 0) is left out: torch {torch.__version__} has no kernels for its compute")
    assert "capability 6.1, but for sm_75, sm_80, sm_120: pip install torch --index-url" in words
    (choice,) = (event for event in told if isinstance(event, Choice) and event.what == "device")
    assert choice.reason == "GPU 1: the first of 2 GPUs that works"


def test_a_gpu_newer_than_torch_asks_for_a_newer_torch_and_the_cpu_trains() -> None:
    told: list[Event] = []
    hardware = machine((12, 0), without_kernels={0})
    hardware.cuda.kernels = ("sm_80", "sm_90")
    assert choose_device(None, MODEL, told.append, hardware).kind == "cpu"
    assert warnings(told)[0].endswith("compute capability 12.0, but for sm_80, sm_90: pip install -U torch")
    assert any(isinstance(event, Choice) and event.reason.endswith("no GPU that works") for event in told)


def test_a_gpu_that_the_user_names_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"^--device cuda:1: GPU 1 cannot train: torch .* capability 7.0, but for"):
        choose_device("cuda:1", MODEL, lambda event: None, machine((8, 0), (7, 0), without_kernels={1}))


@pytest.mark.parametrize("wanted", [None, "cuda"])
def test_a_gpu_whose_memory_others_have_is_waited_for(wanted: str | None) -> None:
    """On the CPU the peer would stay when they have ended. A supervisor tries again later."""

    def full(device: torch.device, dtype: torch.dtype) -> None:
        if device.index == 0:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors")

    with pytest.raises(TTError, match="^no memory is free on the GPU: CUDA error: out of memory: look") as caught:
        choose_device(wanted, MODEL, lambda event: None, machine((8, 0), try_out=full))
    assert not isinstance(caught.value, UsageError)
    another = choose_device(None, MODEL, lambda event: None, machine((8, 0), (8, 0), try_out=full))
    assert another.torch_device.index == 1


def test_another_fault_is_told_in_its_first_line() -> None:
    def busy(device: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    fault = machine((8, 0), try_out=busy).fault(torch.device("cuda", 0), torch.float32)
    assert fault == (
        "CUDA error: all CUDA-capable devices are busy or unavailable: look at nvidia-smi, or give --device cpu"
    )


def test_a_driver_too_old_for_torch_is_told_with_both_remedies() -> None:
    told: list[Event] = []
    hardware = machine(driver=lambda: "535.129.03")
    assert choose_device(None, MODEL, told.append, hardware).kind == "cpu"
    (words,) = warnings(told)
    assert "(CUDA 13.0) sees no GPU through NVIDIA's driver 535.129.03: update the driver to 580 or newer" in words
    assert "or install torch for an older CUDA: pip install torch --index-url" in words
    with pytest.raises(UsageError, match="^--device cuda: torch sees 0 GPUs here: torch .* update the driver to 580"):
        choose_device("cuda", MODEL, lambda event: None, hardware)


def test_a_torch_for_cpus_beside_a_driver_is_told() -> None:
    assert "built for CPUs alone" in machine(driver=lambda: "580.1", cuda_version=None).hidden()


def test_gpus_hidden_on_purpose_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine(driver=lambda: "535.1").hidden() == ""


def test_amd_s_gpus_are_not_spoken_of_in_nvidia_s_words() -> None:
    hardware = machine((10, 1), without_kernels={0}, hip_version="6.4", cuda_version=None, driver=lambda: "535.1")
    hardware.cuda.kernels = ("gfx90a", "gfx1100")
    fault = hardware.fault(torch.device("cuda", 0), torch.bfloat16)
    assert fault.endswith("has no kernels for gfx1010, but for gfx90a, gfx1100: install a torch that has")
    assert hardware.has_bf16(torch.device("cuda", 0)) and hardware.hidden() == ""


@pytest.mark.parametrize(("name", "autocast"), [("mps", None), ("xpu", torch.bfloat16), ("xpu:1", torch.bfloat16)])
def test_apple_s_and_intel_s_gpus_train_where_the_user_names_them(name: str, autocast: torch.dtype | None) -> None:
    told: list[Event] = []
    hardware = machine((8, 0), xpu=StubCuda([(0, 0)] * 2), mps=StubCuda([(0, 0)]))
    device = choose_device(name, MODEL, told.append, hardware)
    assert str(device.torch_device) == (name if ":" in name else f"{name}:0")
    assert (device.autocast, device.kind) == (autocast, "cuda")


def test_what_torch_lacks_on_another_device_is_one_line() -> None:
    def lacking(device: torch.device, dtype: torch.dtype) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    with pytest.raises(UsageError, match="^--device mps: Apple GPU cannot train: torch .* lacks something") as caught:
        choose_device("mps", MODEL, lambda event: None, machine(mps=StubCuda([(0, 0)]), try_out=lacking))
    assert str(caught.value).endswith("float64.): give --device cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_is_tried_with_real_work(dtype: torch.dtype) -> None:
    try_out(torch.device("cpu"), dtype)
    with pytest.raises((RuntimeError, AssertionError)):
        try_out(torch.device("xpu", 0), dtype)


def test_the_card_that_trains_is_told_by_its_uuid() -> None:
    """By which nvidia-smi knows it: its numbers are not torch's."""
    told: list[Event] = []
    choose_device(None, MODEL, told.append, machine((8, 0), (8, 0), without_kernels=(0,)))
    assert [event.uuid for event in told if isinstance(event, Card)] == ["GPU-uuid-1"]
    told.clear()
    choose_device("cpu", MODEL, told.append, TWO_GPUS)
    choose_device(None, MODEL, told.append, machine((8, 0), hip_version="6.4"))
    assert not any(isinstance(event, Card) for event in told)
