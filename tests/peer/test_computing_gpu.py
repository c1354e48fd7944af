"""A peer's work on the stand-in GPU that computes: right numbers, one wait, nothing lost where memory runs out."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from typing import Any

import pytest
from testbed.spawned import on_stand_in_gpu

pytestmark = pytest.mark.debian  # g++

# attention by lines is for CUDA, and for the paper's run
RUNS = {"cuda": ("emoji-demo", "dalle"), "mps": ("emoji-demo",), "xpu": ("emoji-demo",)}
PRECISIONS = ("fp32", "bf16", "fp16")
TOLERANCES = {"fp32": 1e-5, "bf16": 0.02, "fp16": 0.05}  # of each gradient's norm
SMALL = {"model.dim": 32, "model.depth": 3, "model.heads": 2, "model.dim_head": 16}
EVERY = 50  # operators; at each of these memory runs out once
Figures = dict[str, Any]


def gradients() -> Figures:
    """Differences from the CPU's fp32 by run, kind of trunk and precision: of the loss, of the worst gradient."""
    import torch
    from testbed import computing_gpu, gpu

    from tt_cli.model.dalle import Dalle
    from tt_cli.model.dalle_config import DalleConfig
    from tt_cli.run import RunConfig, load_run

    def computed(run: RunConfig, device: str, dtype: torch.dtype | None) -> tuple[float, dict[str, torch.Tensor]]:
        model, seed = Dalle(DalleConfig.from_run(run), seed=3), torch.Generator().manual_seed(0)
        ids = (run.tokenizer.vocab_size, model.config.text_length), (16, model.config.image_positions)
        text, image = (torch.randint(1, most, (1, length), generator=seed) for most, length in ids)
        model.to(device)
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
            total = model.loss(text.to(device), image.to(device)).total
        total.backward()
        found = {name: p.grad.to("cpu") for name, p in model.named_parameters() if p.grad is not None}
        return float(total.detach()), found

    told = {}
    with computing_gpu.ComputingGpu():
        for name in RUNS[computing_gpu.KIND]:
            for reversible in (True, False):
                run = load_run(name).replaced({**SMALL, "model.reversible": reversible})
                loss, expected = computed(run, "cpu", None)
                for precision in PRECISIONS:
                    here, found = computed(run, computing_gpu.KIND, gpu.DTYPES[precision])
                    worst = max(float((found[n] - g).norm() / (g.norm() + 1e-12)) for n, g in expected.items())
                    way = "reversible" if reversible else "plain"
                    told[f"{name} {way} {precision}"] = (abs(here - loss) / loss, worst, len(found) == len(expected))
    return told


def peer() -> Figures:
    """A peer's micro-batches, round trip to the host, and memory that runs out."""
    import gc
    from types import SimpleNamespace

    import torch
    from testbed import computing_gpu

    from tt_cli.model.allocator import attempt
    from tt_cli.peer.memory_budget import RoomMemory
    from tt_cli.peer.micro_batch import MicroBatches
    from tt_cli.run import load_run
    from tt_cli.swarm.compression.codec import codec_of
    from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition
    from tt_cli.task import task_of

    gc.freeze()  # what is imported: a third of a second each time that a peer gives memory back
    run = load_run("emoji-demo").replaced({**SMALL, "model.depth": 2, "model.reversible": True})
    codec = codec_of(run)
    with computing_gpu.ComputingGpu() as gpu:
        peer = computing_gpu.GpuPeer(run, "cuda:1")
        step, sums, batch = peer.micro_step, peer.sums, peer.batch
        buffer = GradientBuffer(Partition(peer.shared.shapes(), run.swarm.large_tensor, codec.block), codec)

        def on_the_host() -> dict[str, torch.Tensor]:
            return {name: tensor.to("cpu") for name, tensor in sums._sums.items()}

        def away_from(expected: dict[str, torch.Tensor]) -> float:
            return max(float((x - expected[n]).norm() / (expected[n].norm() + 1e-12)) for n, x in on_the_host().items())

        told: Figures = {
            "device": (str(next(peer.model.parameters()).device), peer.device.dtype_name, peer.room.place),
            "predicted": RoomMemory(task_of(run), peer.device, peer.room, 0).predicted(4) > 0,
            "first": gpu.counted(lambda: step(batch)),
            "second": gpu.counted(lambda: step(batch)),
        }
        before = on_the_host()
        sums.hold(buffer)
        told["held"] = sums.held.samples, sums.new.samples
        sums.give_back(buffer)
        told["given back"] = sums.samples, away_from(before)
        sums.hold(buffer)
        peer.state.step(DecodedGradients(buffer))
        told["after a step"] = gpu.counted(lambda: step(batch))
        new = peer.shared.state().parameters
        told["equal"] = all(torch.equal(p.detach().to("cpu"), new[name]) for name, p in peer.model.named_parameters())

        sums.forget()
        began = gpu.operators
        step(batch)
        operators, whole = gpu.operators - began, on_the_host()
        step.release()
        told["short"] = []
        for number in range(EVERY, operators, EVERY):
            sums.forget()
            gc.collect()
            live, gpu.fail_at = len(gpu.live), gpu.operators + number
            batches = MicroBatches(step, 4, lambda event: None)
            batches(batch)
            counted = sums.samples, away_from(whole)
            step.release()
            told["short"].append((number, batches.now, *counted, len(gpu.live) - live))
        compute = step.probe(SimpleNamespace(batches=lambda size: iter([batch])))  # type: ignore[arg-type]
        compute(2)
        step.release()
        live, gpu.fail_at = len(gpu.live), gpu.operators + EVERY
        told["probe"] = bool(attempt(lambda: compute(4))[1]), (step.release(), len(gpu.live) - live)[1]
        try:
            torch.ones(2, device="cuda:1") + torch.ones(2)
        except RuntimeError as error:
            told["mixed"] = str(error)
    return told


def drawing() -> Figures:
    """Codes of three candidates for each of two prompts, beside the CPU's."""
    import torch
    from testbed import computing_gpu

    from tt_cli.model.dalle import Dalle
    from tt_cli.model.dalle_config import DalleConfig
    from tt_cli.model.sampling.code_choice import Sampling
    from tt_cli.model.sampling.generation import StepDecoder, draw_codes
    from tt_cli.run import load_run

    config = DalleConfig.from_run(load_run("emoji-demo").replaced(SMALL))
    with computing_gpu.ComputingGpu() as gpu, torch.no_grad():
        model, seed = Dalle(config, seed=3).eval(), torch.Generator().manual_seed(0)
        text = torch.randint(1, 100, (2, config.text_length), generator=seed)
        noise = torch.rand(6, config.image_positions, generator=seed, dtype=torch.float64)

        def drawn(device: str) -> torch.Tensor:
            decoder = StepDecoder(model.to(device), 2, 3, torch.float32)
            return draw_codes(decoder, text.to(device), noise.to(device), Sampling(0.9, 64, 0.9)).to("cpu")

        expected = drawn("cpu")
        told = gpu.counted(lambda: drawn("cuda:1"))
        same = float((told.pop("out") == expected).float().mean())
        return {**told, "same": same, "codes": expected.numel()}


PARTS = {"gradients": gradients, "peer": peer, "drawing": drawing}


def of_kind(kind: str) -> dict[str, Figures]:
    """By part; in a process of its own, for torch knows of one kind of accelerator in each."""
    os.environ["TT_STAND_IN_GPU"] = kind
    return {name: part() for name, part in PARTS.items() if kind == "cuda" or part is gradients}


@cache
def figures() -> dict[str, dict[str, Figures]]:
    """By kind and part; forks of one process, for the stand-in comes before torch."""
    return dict(on_stand_in_gpu(__file__))


@pytest.mark.parametrize("kind", RUNS)
def test_losses_and_gradients_are_the_cpus(kind: str) -> None:
    """Of both kinds of trunk, in all precisions."""
    told = figures()[kind]["gradients"]
    assert len(told) == len(RUNS[kind]) * 2 * len(PRECISIONS)
    for name, (loss, worst, complete) in told.items():
        assert loss < 1e-3 and worst < TOLERANCES[name.split()[-1]] and complete, name


def test_a_micro_batch_waits_once_and_brings_its_examples_alone() -> None:
    told = figures()["cuda"]["peer"]
    assert told["device"] == ["cuda:1", "bf16", "device"] and told["predicted"]
    assert told["first"]["out"]
    assert told["second"] == {"out": True, "waits": 1, "copies": {"to the device": 2, "to the host": 1}}


def test_gradients_reach_the_host_and_come_back_and_parameters_return() -> None:
    told = figures()["cuda"]["peer"]
    assert told["held"] == [8, 0] and told["given back"][0] == 8
    assert told["given back"][1] < 0.02  # of the norm: what 8 bits keep
    assert told["after a step"]["out"] and told["after a step"]["waits"] == 1 and told["equal"]


def test_where_memory_runs_out_nothing_leaks_and_no_example_is_lost() -> None:
    """At every 50th operator of a micro-batch: it is repeated in halves, and sums up to the same."""
    told = figures()["cuda"]["peer"]
    assert len(told["short"]) > 5
    for number, now, samples, worst, leaked in told["short"]:
        assert (now, samples, leaked) == (2, 4, 0), number
        assert worst < 0.02, number  # bf16 rounds otherwise in halves
    assert told["probe"] == [True, 0]


def test_the_same_codes_are_drawn_and_the_host_waits_for_the_last_alone() -> None:
    told = figures()["cuda"]["drawing"]
    assert told["codes"] > 300 and told["same"] == 1.0
    assert told["waits"] == told["copies"]["to the host"] == 1


def test_the_stand_in_refuses_mixed_devices() -> None:
    assert "Expected all tensors to be on the same device" in figures()["cuda"]["peer"]["mixed"]


if __name__ == "__main__":
    from testbed import gpu  # before torch

    told = {}
    for kind in RUNS:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            told[kind] = pool.apply(of_kind, (kind,))
    gpu.print_and_leave(told)
