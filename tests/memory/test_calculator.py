"""The calculator: against torch's own state and passes at tiny sizes, and what must hold for all options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.memory_step import of_architecture
from testbed.spawned import Call, spawned

from tt_cli.errors import UsageError
from tt_cli.memory.architectures import ARCHITECTURES, Architecture, tensors
from tt_cli.memory.calculator import flops_per_example, gradient_bytes, reckon, smallest_change, state_bytes
from tt_cli.memory.gpus import GPUS, device_room
from tt_cli.memory.question import CalculatorOptions, CalculatorQuestion, largest_that_fits
from tt_cli.memory.report import report

GPT2 = ARCHITECTURES["gpt2-large"]
TINY: dict[str, Any] = {"layers": 3, "dim": 64, "heads": 2, "dim_head": 32, "hidden": 256, "vocab": 500}
SOME = st.sampled_from(["bert-base", "t5-small", "gpt2", "gpt2-large", "gpt3-1.3b", "gpt-j-6b", "dalle-12b"])


def device(options: CalculatorOptions, model: Architecture = GPT2) -> int:
    return reckon(model, options).total("device")


@st.composite
def options(draw: st.DrawFn) -> tuple[Architecture, CalculatorOptions]:
    model = ARCHITECTURES[draw(SOME)]
    optimizer = draw(st.sampled_from(["adam", "lamb", "adafactor"]))
    attention = "eager" if model.family == "t5" else draw(st.sampled_from(["eager", "fused"]))
    made = CalculatorOptions(
        precision=draw(st.sampled_from(["fp32", "mixed", "pure16"])),
        attention=attention,  # type: ignore[arg-type]
        layers=draw(st.sampled_from(["kept", "checkpointed", "reversible"])),
        micro_batch=draw(st.integers(1, 8)),
        groups=draw(st.sampled_from([0, 2])),
        optimizer=optimizer,  # type: ignore[arg-type]
        bits=draw(st.sampled_from([32, 16] if optimizer == "adafactor" else [32, 16, 8])),
        offload=draw(st.booleans()),
        compression=draw(st.sampled_from([None, "linear8", "fp16"])),
    )
    return model, made


@settings(max_examples=40, deadline=None)
@given(options())
def test_more_takes_more(case: tuple[Architecture, CalculatorOptions]) -> None:
    model, asked = case
    sizes = [device(replace(asked, micro_batch=b), model) for b in (1, 2, 3, 8, 64)]
    assert sizes == sorted(sizes)
    if not model.keys:
        lengths = [device(replace(asked, sequence=n), model) for n in (64, 128, 256)]
        assert lengths == sorted(lengths)


@settings(max_examples=40, deadline=None)
@given(options())
def test_techniques_take_no_more(case: tuple[Architecture, CalculatorOptions]) -> None:
    model, asked = case
    plain = replace(asked, layers="kept", offload=False, groups=0)
    assert device(replace(plain, layers="checkpointed"), model) <= device(plain, model)
    assert device(replace(plain, offload=True), model) <= device(plain, model)
    assert device(replace(plain, groups=2), model) <= device(plain, model)
    assert device(replace(plain, precision="pure16"), model) <= device(replace(plain, precision="fp32"), model)
    if asked.optimizer != "adafactor":
        by_bits = [device(replace(plain, bits=bits), model) for bits in (8, 16, 32)]
        assert by_bits == sorted(by_bits)


@settings(max_examples=30, deadline=None)
@given(options())
def test_components_are_whole_and_of_one_worst_moment(case: tuple[Architecture, CalculatorOptions]) -> None:
    model, asked = case
    answer = reckon(model, asked)
    assert all(component.bytes >= 0 for component in answer.components)
    assert answer.tensors <= answer.total("device")
    gpu = {component.what for component in answer.components if component.place == "device"}
    assert {"gradients", "CUDA", "allocator's slack"} <= gpu
    assert ("optimizer state" in gpu) != asked.offload


@settings(max_examples=15, deadline=None)
@given(options(), st.integers(4, 80))
def test_the_largest_micro_batch_fits_and_one_more_does_not(
    case: tuple[Architecture, CalculatorOptions], gib: int
) -> None:
    model, asked = case
    room = gib << 30

    def taken(size: int) -> int:
        return device(replace(asked, micro_batch=size), model)

    most = largest_that_fits(taken, room)
    assert most == 0 or taken(most) <= room
    assert taken(most + 1) > room


@settings(max_examples=15, deadline=None)
@given(options(), st.integers(2, 40))
def test_the_smallest_change_makes_it_fit(case: tuple[Architecture, CalculatorOptions], gib: int) -> None:
    model, asked = case
    found = smallest_change(model, asked, gib << 30)
    assert found is None or found[1].total("device") <= gib << 30


def test_state_is_what_the_optimizers_keep() -> None:
    model = replace(ARCHITECTURES["gpt2"], **TINY, positions=32, sequence=32)
    found = tensors(model)
    shapes = [(tensor.rows, tensor.columns) if tensor.columns else (tensor.rows,) for tensor in found]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for name, optimizer in (("adam", torch.optim.AdamW(parameters)), ("adafactor", torch.optim.Adafactor(parameters))):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if getattr(value, "ndim", 0)
        )
        said = state_bytes(found, name, 32)  # type: ignore[arg-type]
        assert said == pytest.approx(held, rel=0.01)


@pytest.fixture(scope="module")
def fresh() -> Iterator[Call]:
    """A process of its own: where compiling has failed once, arguments of calls live longer, those of the tape too."""
    with spawned({"OMP_NUM_THREADS": "1"}) as call:
        yield call


@pytest.mark.parametrize(
    ("name", "precision", "layers"),
    [
        ("gpt2", "fp32", "checkpointed"),
        ("gpt2", "mixed", "kept"),
        ("bert-base", "pure16", "kept"),
        ("t5-small", "mixed", "kept"),
    ],
)
def test_passes_take_what_torch_allocates(fresh: Call, name: str, precision: str, layers: str) -> None:
    model = ARCHITECTURES[name]
    shape = TINY | {"sequence": 96} | ({"positions": 96} if model.positions else {})
    shape |= {"decoder_layers": 3, "target": 32} if model.family == "t5" else {}
    case = {"model": name, "shape": shape, "device": "cpu", "precision": precision, "attention": "eager"}
    case |= {"optimizer": "adam", "bits": 16 if precision == "pure16" else 32}
    seen = fresh(of_architecture, case | {"checkpointing": layers == "checkpointed", "micro_batch": 4}).result(120)
    asked = CalculatorOptions(
        kind="cpu", precision=precision, attention="eager", layers=layers, micro_batch=4, bits=case["bits"]  # type: ignore[arg-type]
    )  # fmt: skip
    said = fresh(reckon, replace(model, **shape), asked).result(120)
    assert said.tensors == pytest.approx(max(seen["passes"], seen["update"]), rel=0.05)


def test_network_and_compute() -> None:
    asked = CalculatorOptions()
    count = sum(tensor.count for tensor in tensors(GPT2))
    assert gradient_bytes(GPT2, asked) == pytest.approx(count, rel=0.01)
    assert gradient_bytes(GPT2, replace(asked, compression="fp16")) == 2 * count
    assert gradient_bytes(GPT2, replace(asked, compression=None)) == 0
    sent = [report(CalculatorQuestion("gpt2-large", peers=n)).network["bytes_each_way"] for n in (1, 2, 16)]
    assert sent == [0, gradient_bytes(GPT2, asked), 2 * gradient_bytes(GPT2, asked) * 15 // 16]
    flops = flops_per_example(GPT2, asked)
    # 6 per parameter and token (Kaplan et al. 2020), and 12 L n^2 d for attention
    assert flops == pytest.approx(6 * count * 1024 + 12 * 36 * 1024**2 * 1280, rel=0.01)
    assert 1.2 < flops_per_example(GPT2, replace(asked, layers="checkpointed")) / flops < 4 / 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adafactor", "bits": 8}, "no 8-bit state"),
        ({"kind": "cpu", "offload": True}, "--offload"),
        ({"sequence": 4096}, "1024 positions"),
        ({"groups": 40}, "36 layers"),
    ],
)
def test_what_does_not_exist_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reckon(GPT2, replace(CalculatorOptions(), **changes))


def test_gpus_by_name_and_by_size() -> None:
    assert device_room("RTX 3090") == (24 << 30, GPUS["rtx3090"])
    assert device_room("8GB") == (8 * 10**9, None)
    with pytest.raises(UsageError, match="did you mean 'rtx4090'"):
        device_room("rtx4091")


def test_every_choice_has_its_reason() -> None:
    found = report(CalculatorQuestion("t5-small", gpu="t4"))
    assert {"precision", "attention", "sequence", "optimizer", "state", "compression", "micro-batch", "usable"} <= set(
        found.reasons
    )
    assert found.fits and found.largest == found.micro_batch
    asked = report(
        CalculatorQuestion(
            "gpt2", precision="fp32", attention="eager", sequence=64, optimizer="adam", bits=32, alone=True
        )
    )
    assert set(asked.reasons) == {"micro-batch", "examples", "compute"}


def test_a_run_is_answered_by_its_account() -> None:
    from tt_cli.memory import DalleAccount
    from tt_cli.run import load_run

    found = report(CalculatorQuestion("dalle", gpu="8GB", micro_batch=4), compare=True)
    need = DalleAccount(load_run("dalle")).need("cuda", itemsize=2, micro_batch=4)
    assert (found.answer.total("device"), found.answer.total("host")) == (need.device, need.host)
    assert found.answer.parameters == 125_894_244
    names = [row["technique"] for row in found.compared]
    assert names[0] == "as the run is" and "no shared layers" in names
    with pytest.raises(UsageError, match="8-bit LAMB"):
        report(CalculatorQuestion("emoji", bits=32))


def test_a_language_models_run_is_answered_by_its_account() -> None:
    from tt_cli.run import load_run
    from tt_cli.task import task_of

    task = task_of(load_run("words"))
    found, need = (
        report(CalculatorQuestion("words", gpu="8GB"), compare=True, of=task_of),
        task.need("cuda", itemsize=2),
    )
    assert found.largest and found.largest > 64 and found.fits
    one = report(CalculatorQuestion("words", micro_batch=1), of=task_of)
    assert (one.answer.total("device"), one.answer.total("host")) == (need.device, need.host)
    assert one.answer.parameters == 2_755_008 and one.settings["sequence"] == 256
    assert one.compute["flops"] == 128 * task.flops()
    assert [row["technique"] for row in found.compared] == ["as the run is", "products in float32"]
    for changes, flags in (
        ({"share": 2}, "--share"),
        ({"layers": "reversible"}, "--reversible"),
    ):
        with pytest.raises(UsageError, match=f"^{flags}: no peer of a run does this"):
            report(CalculatorQuestion("words", **changes), of=task_of)
