"""`tt calc MODEL`: how much memory training takes, component by component, without importing torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tt_cli.memory.question import MemoryReport

EXAMPLES = """\
tt calc gpt2-large --gpu 8GB --8bit --offload    does it fit, with how many examples at a time
tt calc gpt2-large --gpu t4 --compare            techniques side by side
tt calc t5-3b --gpu rtx3090 --checkpointing --optimizer adafactor
tt calc dalle --gpu 8GB                          a run: built-in name, TOML file, ORGANISATION/REPOSITORY
tt calc emoji --cpu 4GB
tt calc gpt2-xl --peers 32 --line 50 --examples 1024 --json
tt calc --list

Memory is that of the worst moment of a step. What is left out is chosen, and the choice says why.
--json prints one object: "components" [{"what", "bytes", "place": "device" | "host", "assumed"}, …], "gpu_bytes",
"host_bytes", "fits", "largest_micro_batch", "smallest_change", "network", "compute", "settings", "reasons".
Exit code: 0, also where it does not fit; 2 for a wrong name, flag or value. What is counted: docs/calculator.md."""
BAR = 24
COUNTED = {"sequence": "{} tokens", "state_bits": "{}-bit state", "shared_groups": "{} shared groups"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt calc` takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="an architecture (--list names them), or a run")
    parser.add_argument("--list", action="store_true", help="name the architectures")
    where = parser.add_argument_group("where")
    where.add_argument("--gpu", metavar="SIZE", help="its memory (8GB) or its name (t4, rtx3090, a100, …)")
    where.add_argument("--cpu", metavar="SIZE", nargs="?", const="", help="train on a CPU, with so much RAM")
    how = parser.add_argument_group("how")
    how.add_argument("--precision", choices=("fp32", "mixed", "pure16"), help="mixed: 16-bit products, float32 weights")
    how.add_argument("--optimizer", choices=("adam", "lamb", "adafactor"))
    bits = how.add_mutually_exclusive_group()
    bits.add_argument("--bits", type=int, choices=(32, 16, 8), help="of the optimizer's state")
    bits.add_argument("--8bit", dest="bits", action="store_const", const=8, help="the same as --bits 8")
    how.add_argument("--offload", action="store_true", help="optimizer and its weights in the host's memory")
    layers = how.add_mutually_exclusive_group()
    layers.add_argument("--checkpointing", dest="layers", action="store_const", const="checkpointed",
                        help="keep each layer's input alone")  # fmt: skip
    layers.add_argument("--reversible", dest="layers", action="store_const", const="reversible",
                        help="keep not even that: rebuild it")  # fmt: skip
    how.add_argument("--share", metavar="N", type=int, help="layers share N sets of weights")
    how.add_argument("--untied", action="store_true", help="embeddings and logits have a matrix each")
    how.add_argument("--attention", choices=("eager", "fused"), help="fused: no matrix of scores (flash, sdpa)")
    how.add_argument("--sequence", metavar="N", type=int, help="tokens of an example")
    how.add_argument("--micro-batch", metavar="N", type=int, help="examples at a time (default: what fits)")
    swarm = parser.add_argument_group("in a swarm")
    swarm.add_argument("--compression", choices=("linear8", "blockwise8", "fp16", "fp32"), help="of averaged gradients")
    swarm.add_argument("--alone", action="store_true", help="no swarm: no buffers for averaging")
    swarm.add_argument("--peers", metavar="N", type=int, default=16, help="that average (default 16)")
    swarm.add_argument("--line", metavar="MBIT", type=float, default=100.0, help="Mbit/s each way (default 100)")
    swarm.add_argument("--examples", metavar="N", type=int, help="of a global step, of all peers")
    parser.add_argument("--compare", action="store_true", help="techniques side by side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    from tt_cli.errors import UsageError

    if args.list:
        return _list(args.json)
    if args.model is None:
        raise UsageError("which model? Give its name, such as gpt2-large, or a run; `tt calc --list` names them")
    from tt_cli.memory.question import CalculatorQuestion, report

    asked = {field.name: getattr(args, field.name) for field in fields(CalculatorQuestion) if field.name != "mbits"}
    found = report(CalculatorQuestion(**asked, mbits=args.line), compare=args.compare)
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    _show_memory(console, found)
    _show_answers(console, found)
    if args.compare:
        _show_compared(console, found)
    return 0


def _list(as_json: bool) -> int:
    from tt_cli.memory.architectures import ARCHITECTURES, tensors

    counts = {model.name: sum(tensor.count for tensor in tensors(model)) for model in ARCHITECTURES.values()}
    if as_json:
        print(json.dumps(counts, indent=1))
        return 0
    for name, count in counts.items():
        print(f"{name:<12} {ARCHITECTURES[name].title:<14} {count:>15,} parameters")
    return 0


def _show_memory(console: Console, found: MemoryReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from tt_cli.memory import shown

    settings = ", ".join(_setting(key, value) for key, value in found.settings.items() if value not in (None, False))
    console.print(Text(f"{found.title}: {found.answer.parameters:,} parameters", style="bold"))
    console.print(Text(f"micro-batch {found.micro_batch}, {settings}", style="dim"))
    console.print(Text(f"worst moment: {found.answer.moment}", style="dim"))
    for place, title in (("device", "GPU"), ("host", "host's RAM")):
        rows = [component for component in found.answer.components if component.place == place]
        if not rows:
            continue
        total = found.answer.total("device" if place == "device" else "host")
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=35)
        table.add_column(justify="right", min_width=9)
        table.add_column(width=BAR)
        for component in sorted(rows, key=lambda component: -component.bytes):
            bar = "█" * round(BAR * component.bytes / max(rows, key=lambda row: row.bytes).bytes)
            name = component.what + (" (assumed)" if component.assumed else "")
            table.add_row(name, shown(component.bytes), Text(bar, style="cyan"))
        table.add_row(Text(f"{title}, in all", style="bold"), Text(shown(total), style="bold"))
        console.print()
        console.print(table)


def _setting(key: str, value: Any) -> str:
    words = key.replace("_", " ")
    if value is True:
        return words
    if key in COUNTED:
        return COUNTED[key].format(value)
    return str(value) if key in ("precision", "optimizer") else f"{words} {value}"


def _show_answers(console: Console, found: MemoryReport) -> None:
    from rich.text import Text

    from tt_cli.memory import shown

    lines: list[tuple[str, str]] = []
    if found.room is not None:
        verdict = "✓ it fits" if found.fits else "✗ it does not fit"
        lines.append((f"{verdict}: {shown(found.taken)} of {shown(found.room)}", "green" if found.fits else "bold red"))
        most = f"largest micro-batch that fits: {found.largest}" if found.largest else "not even one example fits"
        lines.append((most, ""))
        if not found.fits:
            fix = f"smallest change: add {' '.join(found.change)}" if found.change else "nothing of this makes it fit"
            lines.append((f"→ {fix}", ""))
    network, compute = found.network, found.compute
    if network["bytes_each_way"]:
        size, line = shown(network["bytes_each_way"]), f"{network['mbits']:g} Mbit/s"
        words = f"a global step on the network: {size} out and in, {network['seconds']:.1f} s at {line}"
        lines.append((f"{words} among {network['peers']} peers", ""))
    words = f"a global step of {compute['examples']} examples computes {compute['flops']:.3g} FLOP"
    lines.append((words + (f": {compute['seconds']:,.1f} s on one {compute['gpu']}" if compute["gpu"] else ""), ""))
    console.print()
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)
    console.print()
    for name, reason in found.reasons.items():
        console.print(Text(f"{name}: {reason}", style="dim"), soft_wrap=True)


def _show_compared(console: Console, found: MemoryReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from tt_cli.memory import shown

    gpu = found.kind == "cuda"
    table = Table(box=None, pad_edge=False)
    for name in ("technique", *(("GPU",) if gpu else ()), "RAM", "largest", ""):
        table.add_column(name, justify="left" if name in ("technique", "") else "right")
    most = max(row["gpu_bytes" if gpu else "host_bytes"] for row in found.compared)
    for row in found.compared:
        bar = "█" * round(16 * row["gpu_bytes" if gpu else "host_bytes"] / most)
        largest = "" if row["largest_micro_batch"] is None else str(row["largest_micro_batch"] or "none")
        sizes = [shown(row["gpu_bytes"])] if gpu else []
        table.add_row(row["technique"], *sizes, shown(row["host_bytes"]), largest, Text(bar, style="cyan"))
    console.print()
    console.print(table)
    console.print(Text(f"micro-batch {found.micro_batch}; largest: micro-batch that fits", style="dim"))
