"""Device, precision and micro-batch, each with its reason; time and memory are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tt_cli.errors import TTError, UsageError
from tt_cli.peer import device as room
from tt_cli.peer.device import GIB, Device, choose_activation_budget, choose_device, choose_micro_batch
from tt_cli.run import load_run
from tt_cli.supervisor.events import Choice, Event

CPU = Device(torch.device("cpu"), "a CPU", None)
MODEL = load_run("emoji-demo").model


class Machine:
    """Computes a micro-batch in `cost(size)` seconds of its own clock, with `need` bytes for each example."""

    def __init__(self, cost: Callable[[int], float], need: int = 0, free: int = 16 * GIB, fits: int = 10**6):
        self.cost, self.need, self.free, self.fits = cost, need, free, fits
        self.now = 0.0
        self.sizes: list[int] = []
        self.told: list[Event] = []

    def compute(self, size: int) -> None:
        self.sizes.append(size)
        if size > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.now += self.cost(size)

    def memory(self, _: torch.device) -> int:
        """Free memory: less after a computation than before."""
        return self.free - (self.need * self.sizes[-1] if self.sizes else 0)

    def choose(self, monkeypatch: pytest.MonkeyPatch, target: int = 4096, wanted: int | None = None) -> int:
        monkeypatch.setattr(room, "free_memory", self.memory)
        return choose_micro_batch(CPU, wanted, target, self.compute, self.told.append, clock=lambda: self.now)

    @property
    def reason(self) -> str:
        (choice,) = self.told
        assert isinstance(choice, Choice) and choice.what == "micro-batch"
        return f"{choice.value}: {choice.reason}"


def test_the_fastest_size_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed costs are shared by more examples up to 16; from there on each takes longer."""
    machine = Machine(lambda size: 0.01 + 0.001 * size + 0.00004 * size * size)
    assert machine.choose(monkeypatch) == 16
    assert max(machine.sizes) == 64
    assert machine.reason == "16: fastest of 1, 2, 4, 8, 16, 32, 64 at 441.5 samples/s; larger ones are no faster"


def test_a_little_faster_is_not_worth_a_larger_size(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 0.01 * size + 0.0001)
    assert machine.choose(monkeypatch) == 1


def test_the_first_slow_try_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's first computation of a size may compile or warm up."""
    machine = Machine(lambda size: 0.01)
    cost = machine.cost
    machine.cost = lambda size: cost(size) + (0.3 if machine.sizes.count(size) == 1 else 0.0)
    assert machine.choose(monkeypatch, target=32) == 8
    assert machine.reason.startswith("8: fastest of 1, 2, 4, 8 at 800.0 samples/s")


def test_what_the_user_wants_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 1.0)
    assert machine.choose(monkeypatch, target=4, wanted=48) == 48
    assert machine.sizes == []
    assert machine.reason == "48: --batch-size"


@pytest.mark.parametrize(("target", "largest"), [(1, 1), (3, 1), (8, 2), (100, 16), (256, 64), (10**6, 256)])
def test_a_quarter_of_the_target_batch_is_the_limit(target: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 0.01)
    assert machine.choose(monkeypatch, target=target) == largest
    assert machine.reason.endswith(f"the largest tried, for a target batch of {target}")


def test_a_size_that_does_not_fit_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 0.01, fits=8)
    assert machine.choose(monkeypatch) == 8
    assert machine.reason.endswith("; 16 does not fit")


def test_not_even_one_example_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 0.01, fits=0, free=GIB // 2)
    with pytest.raises(TTError, match="^not one example fits in the 0.5 GiB free on a CPU: close programs"):
        machine.choose(monkeypatch)
    assert machine.told == []


def test_memory_that_would_run_out_ends_the_search_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 0.01, need=GIB, free=16 * GIB)
    machine.memory = lambda _: machine.free - machine.need * (machine.sizes[-1] if len(machine.sizes) % 3 else 0)
    machine.cost = lambda size: 0.3  # two tries of each size
    machine.choose(monkeypatch)
    assert max(machine.sizes) <= 8
    assert "GiB free" in machine.reason


def test_a_cpu_answers_between_micro_batches_of_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size: 0.9 + 0.1 * size)
    assert machine.choose(monkeypatch) == 16
    assert machine.reason.endswith("; larger ones take over 4 s")


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


def test_a_share_of_the_free_memory_is_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda device: 8 * GIB)
    told: list[Event] = []
    assert choose_activation_budget(CPU, told.append) == 2 * GIB
    assert isinstance(told[0], Choice) and told[0].value == "2.0 GiB" and "25% of the 8.0 GiB free" in told[0].reason


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
