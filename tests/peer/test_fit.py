"""What fits is begun, what does not is refused in one line with its numbers and a way out."""

from __future__ import annotations

import re

import pytest
import torch

from tt_cli.errors import TTError, UsageError
from tt_cli.memory import GIB
from tt_cli.model.allocator import DeviceMemory
from tt_cli.peer import memory_budget
from tt_cli.peer.device import Device
from tt_cli.peer.memory_budget import RoomMemory, check_host, check_room, choose_activation_budget, host_room
from tt_cli.run import load_run
from tt_cli.supervisor.events import Choice, Event
from tt_cli.supervisor.host_memory import HostMemory
from tt_cli.task import task_of

EMOJI, DALLE = task_of(load_run("emoji")), task_of(load_run("dalle"))
CPU = Device(torch.device("cpu"), "a CPU", None)
GPU = Device(torch.device("cuda", 0), "a GPU", torch.bfloat16)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """GiB free of the host's 16 and of the GPU's 8; to be changed by the test. The peer takes nothing yet."""
    found = {"host": 12.0, "gpu": 7.0}
    monkeypatch.setattr(
        memory_budget, "host_memory", lambda: HostMemory(int(found["host"] * GIB), 16 * GIB, "this machine")
    )
    monkeypatch.setattr(memory_budget, "family_memory", lambda pid: (0, 0))
    there = lambda device: DeviceMemory(0, 0, int(found["gpu"] * GIB), 8 * GIB)  # noqa: E731
    monkeypatch.setattr(memory_budget, "device_memory", there)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.update(share=share))
    return found


def refused(*args: object) -> TTError:
    with pytest.raises(TTError) as caught:
        check_room(*args)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_fifth_of_what_is_free_is_left_to_others(free: dict[str, float]) -> None:
    room = check_room(EMOJI, CPU, None, None)
    assert (room.most, room.usual) == (12 * GIB, int(0.8 * 12 * GIB))
    assert room.in_words() == "12.0 GiB of 16.0 GiB are free on this machine"


def test_what_the_peer_has_already_is_part_of_its_room(free: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "family_memory", lambda pid: (GIB, GIB))
    assert host_room(None).most == 14 * GIB


def test_memory_limits_the_room(free: dict[str, float]) -> None:
    assert check_room(EMOJI, CPU, None, 4 * GIB).usual == int(0.9 * 4 * GIB)
    assert check_room(EMOJI, CPU, None, 100 * GIB).usual == int(0.8 * 12 * GIB)


def test_a_gpu_has_a_bound_of_its_own_which_its_allocator_keeps_to(free: dict[str, float]) -> None:
    room = check_room(EMOJI, GPU, None, 12 * GIB, 4 * GIB)
    assert (room.usual, room.in_words()) == (int(0.9 * 4 * GIB), "--gpu-memory allows 4.0 GiB")
    assert 0.4 < free["share"] < 0.5
    unbounded = check_room(EMOJI, GPU, None, 4 * GIB)
    assert unbounded.most > 7 * GIB
    assert free["share"] == pytest.approx(0.9 * 7 / 8)  # a tenth of what is free is left to a desktop
    assert str(refused(EMOJI, GPU, None, None, GIB // 2)).rpartition(": ")[2].startswith("give --gpu-memory ")


def test_too_little_is_refused_with_numbers_and_a_fix(free: dict[str, float]) -> None:
    free["host"] = 0.5
    words = str(refused(EMOJI, CPU, None, None))
    assert re.match(r"emoji needs [0-9.]+ .iB of RAM with 1 example at a time \(processes [0-9.]+ MiB, ", words)
    assert words.endswith("and 512 MiB of 16.0 GiB are free on this machine: close other programs")


def test_a_machine_that_is_too_small_is_told_so(free: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "host_memory", lambda: HostMemory(GIB, 2 * GIB, "this container"))
    words = str(refused(DALLE, CPU, None, None))
    assert "1.0 GiB of 2.0 GiB are free on this container: it takes a machine with" in words


def test_too_small_a_limit_is_refused_with_one_that_does(free: dict[str, float]) -> None:
    error = refused(EMOJI, CPU, None, GIB // 2)
    assert isinstance(error, UsageError)
    limit = str(error).rsplit("give --memory ", 1)[1]
    from tt_cli.memory import parse_size

    check_room(EMOJI, CPU, None, parse_size(limit))


@pytest.mark.parametrize(("batch", "memory"), [(None, 12 * GIB), (8, None)])
def test_what_others_take_just_now_is_nobodys_wrong_request(
    batch: int | None, memory: int | None, free: dict[str, float]
) -> None:
    """A supervisor tries again later, where the flags that worked for weeks are not what is wrong."""
    free["host"] = 0.5
    error = refused(EMOJI, CPU, batch, memory)
    assert "are free on this machine: close other programs" in str(error) and not isinstance(error, UsageError)


def test_too_large_a_batch_is_refused_with_one_that_fits(free: dict[str, float]) -> None:
    free["host"] = 2.0
    assert str(refused(EMOJI, CPU, 1000, None)).endswith("close other programs or give --batch-size 1, or leave it out")
    check_room(EMOJI, CPU, 1, None)


def test_a_gpu_that_is_full_is_refused_and_the_cpu_named(free: dict[str, float]) -> None:
    free["gpu"] = -0.55
    words = str(refused(EMOJI, GPU, None, None))
    assert "of GPU memory" in words and "of 8.0 GiB are free on a GPU" in words
    assert words.endswith("close other programs or give --device cpu")


def test_a_gpu_s_peer_needs_ram_too(free: dict[str, float]) -> None:
    free["host"] = 1.0
    assert "of RAM" in str(refused(EMOJI, GPU, None, None))


def test_what_nothing_here_can_train_is_refused_before_it_is_loaded(free: dict[str, float]) -> None:
    check_host(EMOJI, None, None)
    free["host"] = 0.5
    with pytest.raises(TTError, match="^emoji needs .* of RAM"):
        check_host(EMOJI, None, None)


@pytest.mark.parametrize("device", ["xpu", "mps", "cuda:1"])
def test_what_a_gpu_that_is_named_would_hold_takes_no_ram(free: dict[str, float], device: str) -> None:
    large = task_of(DALLE.run.replaced({"model.shared_layer_groups": 16}))
    free["host"] = 8.0
    check_host(large, device, None)
    with pytest.raises(TTError, match="^dalle needs .* of RAM"):
        check_host(large, "cpu", None)


def test_a_share_of_what_is_left_is_for_activations(free: dict[str, float]) -> None:
    told: list[Event] = []
    budget = choose_activation_budget(EMOJI, CPU, check_room(EMOJI, CPU, None, 4 * GIB), told.append)
    assert budget == int(0.4 * (int(0.9 * 4 * GIB) - EMOJI.need("cpu").host))
    assert isinstance(told[0], Choice) and "left beside the rest of the peer" in told[0].reason


def test_the_search_asks_for_this_run_on_this_device(free: dict[str, float]) -> None:
    room = check_room(EMOJI, CPU, None, 4 * GIB)
    memory = RoomMemory(EMOJI, CPU, room, GIB)
    assert memory.limit == int(0.9 * 4 * GIB)
    assert memory.predicted(8) == EMOJI.need("cpu", micro_batch=8, budget=GIB).host
    gpu = RoomMemory(EMOJI, GPU, check_room(EMOJI, GPU, None, None), GIB)
    assert gpu.predicted(8) == EMOJI.need("cuda", itemsize=2, micro_batch=8, budget=GIB).device
