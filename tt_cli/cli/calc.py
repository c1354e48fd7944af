"""`tt calc MODEL`: how much memory training takes, component by component, without importing torch."""

from __future__ import annotations

import json as codec
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tt_cli.cli.main import app
from tt_cli.cli.options import Json, OptionalValues, argument, exclusive, option, switch
from tt_cli.errors import UsageError
from tt_cli.memory import Place, shown
from tt_cli.terminal.format import percent

if TYPE_CHECKING:
    from tt_cli.memory.question import CalculatorQuestion
    from tt_cli.memory.report import MemoryReport

EXAMPLES = """\
tt calc gpt2-large --gpu 8GB --8bit --offload    does it fit, with how many examples at a time
tt calc gpt2-large --gpu t4 --compare            techniques side by side
tt calc t5-3b --gpu rtx3090 --checkpointing --optimizer adafactor
tt calc dalle --gpu 8GB                          a run: built-in name, TOML file, ORGANISATION/REPOSITORY
tt calc words --cpu 4GB
tt calc gpt2-xl --peers 32 --line 50 --examples 1024 --json
tt calc --list

Memory is that of the worst moment of a step. What is left out is chosen, and the choice says why.
--json prints one object: "components" [{"what", "bytes", "place": "device" | "host", "assumed"}, …], "gpu_bytes",
"host_bytes", "fits", "largest_micro_batch", "smallest_change", "network", "compute", "settings", "reasons".
Exit code: 0, also where it does not fit; 2 for a wrong name, flag or value. What is counted: docs/calculator.md."""
BAR = 24
Say = Callable[..., None]
COUNTED = {"sequence": "{} tokens", "state_bits": "{}-bit state", "shared_groups": "{} shared groups"}
COUNTED |= dict.fromkeys(("precision", "optimizer"), "{}")

where = partial(option, panel="Where")
how, how_switch = partial(option, panel="How"), partial(switch, panel="How")
swarm, swarm_switch = partial(option, panel="In a swarm"), partial(switch, panel="In a swarm")


@app.command(epilog=EXAMPLES, cls=OptionalValues)
def calc(
    context: typer.Context,
    model: Annotated[str | None, argument("MODEL", "an architecture (--list names them), or a run")] = None,
    list_all: Annotated[bool, switch("--list", "name the architectures")] = False,
    gpu: Annotated[str | None, where("SIZE", "its memory (8GB) or its name (t4, rtx3090, a100, …)")] = None,
    cpu: Annotated[str | None, where("[SIZE]", "train on a CPU, with so much RAM")] = None,
    precision: Annotated[
        Literal["fp32", "mixed", "pure16"] | None, how(None, "mixed: 16-bit products, float32 weights")
    ] = None,
    optimizer: Annotated[Literal["adam", "lamb", "adafactor"] | None, how(None, "what makes the step")] = None,
    bits: Annotated[Literal[32, 16, 8] | None, how(None, "of the optimizer's state")] = None,
    eight_bit: Annotated[bool, how_switch("--8bit", "the same as --bits 8")] = False,
    offload: Annotated[bool, how_switch("--offload", "optimizer and its weights in the host's memory")] = False,
    checkpointing: Annotated[bool, how_switch("--checkpointing", "keep each layer's input alone")] = False,
    reversible: Annotated[bool, how_switch("--reversible", "keep not even that: rebuild it")] = False,
    share: Annotated[int | None, how("N", "layers share N sets of weights")] = None,
    untied: Annotated[bool, how_switch("--untied", "embeddings and logits have a matrix each")] = False,
    attention: Annotated[
        Literal["eager", "fused"] | None, how(None, "fused: no matrix of scores (flash, sdpa)")
    ] = None,
    sequence: Annotated[int | None, how("N", "tokens of an example")] = None,
    micro_batch: Annotated[int | None, how("N", "examples at a time (default: what fits)")] = None,
    compression: Annotated[
        Literal["linear8", "blockwise8", "fp16", "fp32"] | None,
        swarm("CODEC", "of averaged gradients: linear8, blockwise8, fp16 or fp32"),
    ] = None,
    alone: Annotated[bool, swarm_switch("--alone", "no swarm: no buffers for averaging")] = False,
    peers: Annotated[int, swarm("N", "that average (default 16)")] = 16,
    mbits: Annotated[float, swarm("MBIT", "Mbit/s each way (default 100)", flag="--line")] = 100.0,
    examples: Annotated[int | None, swarm("N", "of a global step, of all peers")] = None,
    compare: Annotated[bool, switch("--compare", "techniques side by side")] = False,
    json: Json = False,
) -> None:
    """Ask, and print the answer."""
    exclusive(**{"bits": bits, "8bit": eight_bit})
    exclusive(checkpointing=checkpointing, reversible=reversible)
    if list_all:
        _list_architectures(json)
        return
    if model is None:
        raise UsageError("which model? Give its name, such as gpt2-large, or a run; `tt calc --list` names them")
    from tt_cli.memory.report import report
    from tt_cli.task import task_of

    memory = report(question(context.params), compare=compare, of=task_of)
    if json:
        print(codec.dumps(memory.to_json(), indent=1))
        return
    say = Console(highlight=False, soft_wrap=True).print
    _show_memory(say, memory)
    _show_answers(say, memory)
    if compare:
        _show_compared(say, memory)


def question(flags: dict[str, Any]) -> CalculatorQuestion:
    """The question that the flags of `tt calc` ask."""
    from tt_cli.memory.question import CalculatorQuestion

    layers = "checkpointed" if flags["checkpointing"] else "reversible" if flags["reversible"] else None
    flags = {**flags, "layers": layers, "bits": 8 if flags["eight_bit"] else flags["bits"]}
    return CalculatorQuestion(**{field.name: flags[field.name] for field in fields(CalculatorQuestion)})


def _list_architectures(json: bool) -> None:
    from tt_cli.memory.architectures import ARCHITECTURES, tensors

    counts = {model.name: sum(tensor.count for tensor in tensors(model)) for model in ARCHITECTURES.values()}
    lines = [f"{name:<12} {ARCHITECTURES[name].title:<14} {count:>15,} parameters" for name, count in counts.items()]
    print(codec.dumps(counts, indent=1) if json else "\n".join(lines))


def _show_memory(say: Say, memory: MemoryReport) -> None:
    settings = ", ".join(_setting(key, value) for key, value in memory.settings.items() if value not in (None, False))
    say(Text(f"{memory.title}: {memory.answer.parameters:,} parameters", style="bold"))
    say(
        Text(f"micro-batch {memory.micro_batch}, {settings}\nworst moment: {memory.answer.moment}", style="dim"),
        soft_wrap=False,
    )
    places: tuple[tuple[Place, str], ...] = (("device", "GPU"), ("host", "host's RAM"))
    for place, title in places:
        components = [component for component in memory.answer.components if component.place == place]
        if not components:
            continue
        components.sort(key=lambda component: -component.bytes)
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=35)
        table.add_column(justify="right", min_width=9)
        table.add_column(width=BAR)
        for component in components:
            name = component.what + (" (assumed)" if component.assumed else "")
            table.add_row(name, shown(component.bytes), _bar(BAR * component.bytes / components[0].bytes))
        table.add_row(f"[bold]{title}, in all", f"[bold]{shown(memory.answer.total(place))}")
        say()
        say(table, soft_wrap=False)


def _bar(cells: float) -> Text:
    return Text("█" * round(cells), style="cyan")


def _setting(key: str, value: Any) -> str:
    words = key.replace("_", " ")
    return words if value is True else COUNTED.get(key, f"{words} {{}}").format(value)


def _show_answers(say: Say, memory: MemoryReport) -> None:
    say()
    if memory.room is not None:
        verdict, style = ("✓ it fits", "green") if memory.fits else ("✗ it does not fit", "bold red")
        say(Text(f"{verdict}: {shown(memory.answer.taken)} of {shown(memory.room)}", style=style))
        say(f"largest micro-batch that fits: {memory.largest}" if memory.largest else "not even one example fits")
        if not memory.fits:
            change = f"smallest change: add {' '.join(memory.change)}" if memory.change else ""
            say(f"→ {change or 'nothing of this makes it fit'}")
    network, compute = memory.network, memory.compute
    if network["bytes_each_way"]:
        size, line = shown(network["bytes_each_way"]), f"{network['mbits']:g} Mbit/s"
        words = f"a global step on the network: {size} out and in, {network['seconds']:.1f} s at {line}"
        if hourly := network.get("bytes_per_hour"):
            pace = f"; {shown(hourly)} an hour, the GPU busy {percent(network['device_busy'])} of the time"
        say(f"{words} among {network['peers']} peers{pace if hourly else ''}")
    words = f"a global step of {compute['examples']} examples computes {compute['flops']:.3g} FLOP"
    say(words + (f": {compute['seconds']:,.1f} s on one {compute['gpu']}" if compute["gpu"] else ""))
    say()
    for name, reason in memory.reasons.items():
        say(Text(f"{name}: {reason}", style="dim"))


def _show_compared(say: Say, memory: MemoryReport) -> None:
    gpu = memory.kind == "cuda"
    key = "gpu_bytes" if gpu else "host_bytes"
    table = Table(box=None, pad_edge=False)
    for name in ("technique", *(("GPU",) if gpu else ()), "RAM", "largest", ""):
        table.add_column(name, justify="left" if name in ("technique", "") else "right")
    most = max(row[key] for row in memory.compared)
    for row in memory.compared:
        largest = "" if row["largest_micro_batch"] is None else str(row["largest_micro_batch"] or "none")
        sizes = [shown(row["gpu_bytes"])] if gpu else []
        table.add_row(row["technique"], *sizes, shown(row["host_bytes"]), largest, _bar(16 * row[key] / most))
    say()
    say(table, soft_wrap=False)
    say(Text(f"micro-batch {memory.micro_batch}; largest: micro-batch that fits", style="dim"))
