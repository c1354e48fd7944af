"""The search for a micro-batch, what is remembered of it, and what happens when memory runs out. Time is made up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import gpu_probe
from tt_cli.data.examples import Batch
from tt_cli.errors import TTError, is_out_of_memory
from tt_cli.peer.device import Device
from tt_cli.peer.micro_batch import (
    BatchSettings,
    MicroBatches,
    MicroBatchSearch,
    Remembered,
    SizeChoice,
    choose_micro_batch,
    repeated,
    undisturbed_seconds,
    waiting_seconds,
)
from tt_cli.supervisor.events import Choice, Event, Log

GIB = 2**30
SETTINGS = BatchSettings("a CPU", "fp32", 2, None, 512)


def cuda_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def cpu_out_of_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


class Machine:
    """Computes a micro-batch in `cost(size)` seconds of its own clock; each example takes `need` bytes of `limit`."""

    def __init__(self, cost: Callable[[int], float], need: int = 0, limit: int = 16 * GIB, fits: int = 10**6):
        self.cost, self.need, self.limit, self.fits = cost, need, limit, fits
        self.really = 1.0  # times as much memory as predicted
        self.now = 0.0
        self.sizes: list[int] = []
        self.released = 0

    def clock(self) -> float:
        return self.now

    def compute(self, size: int) -> None:
        self.sizes.append(size)
        if size > self.fits:
            cuda_out_of_memory()
        self.now += self.cost(size)

    def predicted(self, size: int) -> int:
        return self.need * size

    def measured(self) -> int:
        return int(self.really * self.need * max(self.sizes))

    def release(self) -> None:
        self.released += 1

    def search(self, target: int = 4096, patient: bool = False) -> SizeChoice:
        return MicroBatchSearch(self.compute, self, target, patient=patient, clock=self.clock, wall=self.clock).run()


def test_the_fastest_size_is_found_between_powers_of_two_too() -> None:
    """Fixed costs are shared by more examples; from about 24 on each takes longer."""
    machine = Machine(lambda size: 0.02 + 0.001 * size + 0.00003 * size * size)
    found = machine.search()
    assert found.size == 24
    assert max(machine.sizes) == 128
    assert "24" in found.reason and found.reason.endswith("larger ones are no faster")
    assert found.rate == pytest.approx(24 / machine.cost(24))


@pytest.mark.parametrize("fixed", [0.0, 0.001, 0.01, 0.1, 0.2])
@pytest.mark.parametrize("square", [0.0, 1e-5, 1e-4, 1e-2])
def test_the_choice_is_within_a_few_percent_of_the_best_of_all_sizes(fixed: float, square: float) -> None:
    machine = Machine(lambda size: fixed + 0.002 * size + square * size * size)
    found = machine.search()
    best = max(size / machine.cost(size) for size in range(1, 257) if machine.cost(size) <= 4.0)
    slow = 2 * machine.cost(max(machine.sizes)) > 6.0
    assert slow or found.size / machine.cost(found.size) >= 0.95 * best


@pytest.mark.parametrize("name", gpu_probe.GPUS)
@pytest.mark.parametrize("compiler", gpu_probe.COMPILERS)
def test_the_compiler_s_time_is_not_the_gpu_s(name: str, compiler: str) -> None:
    assert gpu_probe.ratio(gpu_probe.GPUS[name], gpu_probe.COMPILERS[compiler]) >= 0.95


def test_a_compiler_that_begins_anew_for_each_size_is_not_waited_for_without_end() -> None:
    machine = Machine(lambda size: 0.01)
    machine.cost = lambda size: 0.01 + (100.0 if machine.sizes.count(size) == 1 else 0.0)
    found = machine.search(patient=True)
    assert max(machine.sizes) == found.size == 8 and found.rate == pytest.approx(800.0)
    assert found.reason.endswith("compiling for more sizes takes too long: 300 s so far")


def test_on_a_gpu_one_example_is_tried_only_where_two_do_not_fit() -> None:
    """Kernels are compiled for it alone, which takes a minute."""
    machine = Machine(lambda size: 0.2 + 0.01 * size)
    machine.search(patient=True)
    assert machine.sizes[0] == 2 and 1 not in machine.sizes
    small = Machine(lambda size: 0.2, fits=1)
    found = small.search(patient=True)
    assert found.size == 1 and found.reason == "fastest of 1 at 5.0 samples/s; 2 does not fit"
    with pytest.raises(TTError, match="not one example fits"):
        Machine(lambda size: 0.2, fits=0).search(patient=True)
    tight = Machine(lambda size: 0.2, need=GIB, limit=GIB)
    assert tight.search(patient=True).size == 1 and set(tight.sizes) == {1}, "two would not fit by the memory model"


def test_on_a_gpu_the_clock_goes_on_while_others_have_the_processor() -> None:
    """The GPU computes meanwhile: subtracted, the wait would make it look faster than it is."""
    machine = Machine(lambda size: 0.3)
    search = MicroBatchSearch(machine.compute, machine, 8, patient=True, wall=machine.clock)
    assert search.run().rate == pytest.approx(2 / 0.3)


def test_a_little_faster_is_not_worth_a_larger_size() -> None:
    assert Machine(lambda size: 0.01 * size + 0.0001).search().size == 1


def test_a_burst_of_other_work_does_not_decide() -> None:
    """All tries of one size are slow because of something else; compared again in turns, they are not."""
    machine = Machine(lambda size: 0.1 + 0.01 * size)
    quiet = machine.cost
    machine.cost = lambda size: quiet(size) * (1.1 if size == 64 and machine.sizes.count(64) <= 3 else 1.0)
    assert machine.search(target=256).size in (64, 48)


def test_the_first_slow_try_does_not_count() -> None:
    machine = Machine(lambda size: 0.01)
    machine.cost = lambda size: 0.01 + (0.3 if machine.sizes.count(size) == 1 else 0.0)
    found = machine.search(target=32)
    assert found.size == 8 and found.rate == pytest.approx(800.0)


@pytest.mark.parametrize(("target", "largest"), [(1, 1), (3, 1), (8, 2), (100, 24), (256, 64), (10**6, 256)])
def test_a_quarter_of_the_target_batch_is_the_limit(target: int, largest: int) -> None:
    found = Machine(lambda size: 0.001).search(target=target)
    assert found.size == largest
    assert found.reason.endswith(f"the largest tried, for a target batch of {target}")


def test_a_size_that_does_not_fit_ends_the_search() -> None:
    machine = Machine(lambda size: 0.01, fits=8)
    found = machine.search()
    assert found.size == 8 and found.reason.endswith("; 12 does not fit")
    assert machine.released == 3  # and once at the end


def test_not_even_one_example_fits() -> None:
    with pytest.raises(TTError, match="^not one example fits in the 512 MiB that this peer may take: close programs"):
        Machine(lambda size: 0.01, fits=0, limit=GIB // 2).search()


def test_what_is_predicted_not_to_fit_is_not_tried() -> None:
    machine = Machine(lambda size: 0.01, need=GIB)
    found = machine.search()
    assert found.size == max(machine.sizes) == 16
    assert found.reason.endswith("; 24 would take 24.0 GiB of the 16.0 GiB it may use")


def test_a_prediction_that_proves_too_low_is_corrected() -> None:
    machine = Machine(lambda size: 0.01, need=GIB)
    machine.really = 2.5
    found = machine.search()
    assert max(machine.sizes) == 6 and found.size == 6


def test_a_cpu_answers_between_micro_batches_of_a_few_seconds() -> None:
    machine = Machine(lambda size: 0.9 + 0.1 * size)
    assert machine.search().size <= 16
    assert max(machine.cost(size) for size in machine.sizes) <= 4.0


def test_the_search_ends_in_time() -> None:
    """Micro-batches of a minute each, as at the paper's size on a CPU: one is tried."""
    slow = Machine(lambda size: 60.0 * size)
    assert (slow.search().size, slow.sizes) == (1, [1])
    quick = Machine(lambda size: 0.2 + 0.01 * size)
    quick.search()
    assert quick.now < 10.5


def test_beside_busy_programs_the_search_takes_longer_but_ends_too() -> None:
    machine = Machine(lambda size: 0.01 + 0.01 * size)
    slowed = MicroBatchSearch(
        machine.compute, machine, 4096, patient=False, clock=machine.clock, wall=lambda: 10 * machine.now
    ).run()
    assert slowed.size > 2 and 10 * machine.now < 40


def test_other_errors_are_errors() -> None:
    def broken(size: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        MicroBatchSearch(broken, Machine(lambda size: 0.01), 512, patient=False).run()


@pytest.mark.parametrize("run_out", [cuda_out_of_memory, cpu_out_of_memory])
def test_running_out_of_memory_is_known_on_every_device(run_out: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError) as caught:
        run_out()
    assert is_out_of_memory(caught.value)
    for words in (
        *("CUDA out of memory. Tried", "HIP out of memory.", "MPS backend out of memory (MPS", "XPU out of memory."),
        *(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "hipErrorOutOfMemory",
        ),
        *("HIPBLAS_STATUS_ALLOC_FAILED", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "std::bad_alloc"),
    ):
        assert is_out_of_memory(RuntimeError(words)), words
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("CUDA error: illegal address"))


# ------------------------------------------------------------------ what is remembered


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.peer.micro_batch.waiting_seconds", lambda: 0.0)


def remembered(path: Path, told: list[Event]) -> Remembered:
    return Remembered(path / "micro-batch.json", told.append)


def test_a_choice_is_remembered_with_its_day_and_reason(tmp_path: Path) -> None:
    told: list[Event] = []
    machine = Machine(lambda size: 0.01, need=GIB // 16)
    first = choose_micro_batch(None, SETTINGS, machine, machine.search, remembered(tmp_path, told), told.append)
    tries = len(machine.sizes)
    again = choose_micro_batch(None, SETTINGS, machine, machine.search, remembered(tmp_path, told), told.append)
    assert first == again and len(machine.sizes) == tries
    before, after = (event.reason for event in told if isinstance(event, Choice))
    assert after.startswith("tried out on 20") and after.endswith(before)


def test_a_choice_made_beside_busy_programs_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    waits = iter([0.0, 1e9])
    monkeypatch.setattr("tt_cli.peer.micro_batch.waiting_seconds", lambda: next(waits))
    machine = Machine(lambda size: 0.01)
    choose_micro_batch(None, SETTINGS, machine, machine.search, remembered(tmp_path, told), told.append)
    assert isinstance(told[0], Choice) and told[0].reason.endswith("other programs are busy: tried out again next time")
    assert remembered(tmp_path, told).find(SETTINGS) is None


def test_the_clock_stands_while_others_have_the_processor() -> None:
    before, started = waiting_seconds(), undisturbed_seconds()
    time.sleep(0.01)
    assert undisturbed_seconds() > started and waiting_seconds() >= before


@pytest.mark.parametrize(
    "other",
    [
        BatchSettings("a GPU", "fp32", 2, None, 512),
        BatchSettings("a CPU", "bf16", 2, None, 512),
        BatchSettings("a CPU", "fp32", 4, None, 512),
        BatchSettings("a CPU", "fp32", 2, GIB, 512),
        BatchSettings("a CPU", "fp32", 2, None, 512, kernels="compiled"),
        BatchSettings("a CPU", "fp32", 2, None, 512, version="0.0"),
    ],
)
def test_another_device_setting_or_version_is_tried_out_anew(other: BatchSettings, tmp_path: Path) -> None:
    told: list[Event] = []
    memory = remembered(tmp_path, told)
    memory.keep(SETTINGS, SizeChoice(8, 10.0, "fastest"))
    assert memory.find(other) is None
    memory.keep(other, SizeChoice(16, 10.0, "fastest"))
    assert (memory.find(SETTINGS), memory.find(other)) != (None, None)
    assert not told


def test_a_remembered_size_that_no_longer_fits_is_tried_out_anew(tmp_path: Path) -> None:
    told: list[Event] = []
    remembered(tmp_path, told).keep(SETTINGS, SizeChoice(64, 10.0, "fastest"))
    machine = Machine(lambda size: 0.01, need=GIB)
    assert choose_micro_batch(None, SETTINGS, machine, machine.search, remembered(tmp_path, told), told.append) == 16
    (log,) = (event for event in told if isinstance(event, Log))
    assert log.message.startswith("64 examples at a time were best once, but it would take 64.0 GiB of the 16.0 GiB")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"x"',
        b"null",
        json.dumps({SETTINGS.key(): 5}).encode(),
        json.dumps({SETTINGS.key(): {"size": "16", "rate": 1.0, "reason": "", "day": ""}}).encode(),
        json.dumps({SETTINGS.key(): {"size": 0, "rate": 1.0, "reason": "", "day": ""}}).encode(),
        json.dumps({SETTINGS.key(): {"size": 10**9, "rate": 1.0, "reason": "", "day": ""}}).encode(),
        json.dumps({SETTINGS.key(): {"size": 4, "rate": float("nan"), "reason": "", "day": ""}}).encode(),
    ],
)
def test_a_damaged_file_is_said_and_written_anew(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "micro-batch.json").write_bytes(content)
    told: list[Event] = []
    machine = Machine(lambda size: 0.01)
    assert choose_micro_batch(None, SETTINGS, machine, machine.search, remembered(tmp_path, told), told.append) > 1
    assert isinstance(told[0], Log) and "is damaged" in told[0].message
    assert remembered(tmp_path, told).find(SETTINGS) is not None


def test_old_choices_make_room_for_new_ones(tmp_path: Path) -> None:
    told: list[Event] = []
    memory = remembered(tmp_path, told)
    for threads in range(1, 30):
        memory.keep(BatchSettings("a CPU", "fp32", threads, None, 512), SizeChoice(threads, 1.0, "fastest"))
    assert memory.find(BatchSettings("a CPU", "fp32", 1, None, 512)) is None
    assert memory.find(BatchSettings("a CPU", "fp32", 29, None, 512)) is not None
    assert len(json.loads((tmp_path / "micro-batch.json").read_text())) == 16


def test_what_the_user_wants_is_not_tried(tmp_path: Path) -> None:
    told: list[Event] = []
    machine = Machine(lambda size: 1.0)
    assert choose_micro_batch(48, SETTINGS, machine, machine.search, remembered(tmp_path, told), told.append) == 48
    assert machine.sizes == [] and told[0] == Choice("micro-batch", "48", "--batch-size", at=told[0].at)


def test_a_few_examples_are_repeated() -> None:
    few = Batch({"text": torch.arange(6).view(3, 2), "image": torch.arange(3).view(3, 1)})
    eight = repeated(few, 8).tensors
    assert eight["text"].shape == (8, 2) and eight["image"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


# ------------------------------------------------------------------ when memory runs out


class Trainee:
    """Counts examples in; more than `fits` at a time do not fit. It is its own clock."""

    device = Device(torch.device("cpu"), "a GPU", None)

    def __init__(self, fits: int, run_out: Callable[[], None] = cuda_out_of_memory):
        self.fits, self.run_out = fits, run_out
        self.seen: list[int] = []
        self.sizes: list[int] = []
        self.told: list[int] = []
        self.events: list[Event] = []
        self.released, self.now = 0, 0.0

    def __call__(self, batch: Batch) -> None:
        if len(batch) > self.fits:
            self.run_out()
        assert len(batch) == len(batch.tensors["image"]) == len(batch.captions)
        self.seen += batch.tensors["text"].flatten().tolist()
        self.sizes.append(len(batch))

    def release(self) -> None:
        self.released += 1

    def changed(self, size: int) -> None:
        self.told.append(size)

    def batches(self, size: int) -> MicroBatches:
        return MicroBatches(self, size, self.events.append, clock=lambda: self.now)


def batch_of(*examples: int) -> Batch:
    tensor = torch.tensor(examples).view(-1, 1)
    return Batch({"text": tensor, "image": tensor}, [str(x) for x in examples])


@pytest.mark.parametrize("run_out", [cuda_out_of_memory, cpu_out_of_memory])
def test_no_example_is_lost_or_counted_twice(run_out: Callable[[], None]) -> None:
    trainee = Trainee(fits=3, run_out=run_out)
    batches = trainee.batches(10)
    batches(batch_of(*range(10)))
    batches(batch_of(*range(10, 20)))
    assert trainee.seen == list(range(20))
    assert trainee.sizes == [2] * 10
    assert (batches.now, trainee.told, trainee.released) == (2, [5, 2], 2)
    logs = [event.message for event in trainee.events if isinstance(event, Log)]
    assert logs[0].startswith("memory ran out on a GPU with 10; up to 10 again after an hour of calm: going on with 5")
    assert [event.value for event in trainee.events if isinstance(event, Choice)] == ["5", "2"]


def test_memory_that_runs_out_amid_a_batch_loses_nothing_of_it() -> None:
    trainee = Trainee(fits=4)
    batches = trainee.batches(8)
    batches(batch_of(*range(8)))
    trainee.fits = 2
    batches(batch_of(*range(8, 16)))
    assert trainee.seen == list(range(16))
    assert trainee.sizes == [4, 4, 2, 2, 2, 2]


def test_it_grows_back_after_calm_hours() -> None:
    trainee = Trainee(fits=2)
    batches = trainee.batches(8)
    batches(batch_of(*range(8)))
    trainee.fits, trainee.now = 8, 3599.0
    batches(batch_of(*range(8)))
    assert batches.now == 2
    for hour, expected in ((1, 4), (2, 8), (3, 8)):
        trainee.now = 3601.0 * hour + hour
        batches(batch_of(*range(8)))
        assert batches.now == expected
    assert trainee.told == [4, 2, 4, 8]


def test_not_even_one_example_fits_any_more() -> None:
    trainee = Trainee(fits=0)
    with pytest.raises(
        TTError, match="^not one example fits any more: memory ran out on a GPU with 1: close"
    ) as caught:
        trainee.batches(4)(batch_of(*range(4)))
    assert "\n" not in str(caught.value) and trainee.seen == []


def test_a_bug_is_not_taken_for_too_little_memory() -> None:
    def broken() -> None:
        raise RuntimeError("element 0 of tensors does not require grad")

    with pytest.raises(RuntimeError, match="does not require grad"):
        Trainee(fits=0, run_out=broken).batches(4)(batch_of(*range(4)))
