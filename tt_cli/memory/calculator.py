"""The memory calculator: what training one of the known architectures takes, component by component.

A step has two worst moments: somewhere in a micro-batch's passes (`forward_backward`) and in the optimizer's update,
when activations are gone. The larger one counts. Gradients are those of several micro-batches summed, so they exist all
the while. With the optimizer offloaded, float32 weights, the gradients' copy and the state are in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

from tt_cli.memory.architectures import Architecture, Tensor, layer_tensors, tensors
from tt_cli.memory.forward_backward import play
from tt_cli.memory.question import CalculatorOptions, Optimizer
from tt_cli.memory.trainer_account import (
    BITSANDBYTES,
    CUDA,
    HELD_BY_ALLOCATOR,
    LIBRARIES,
    PROCESSES,
    MemoryComponent,
    Place,
    encoded_bytes,
    moment_bytes,
    place_of,
    round_items,
)

# Not measured: no GPU was at hand. What torch's caching allocator commonly holds of a GPU beyond what is in use.
HELD_ON_GPU = 0.05


@dataclass(frozen=True)
class Answer:
    """The account of one configuration at its worst moment. tensors: bytes of tensors alone, where training runs."""

    parameters: int
    components: tuple[MemoryComponent, ...]
    moment: str
    tensors: int
    place: Place  # where training runs

    @property
    def taken(self) -> int:
        """Bytes where training runs."""
        return self.total(self.place)

    def total(self, place: Place) -> int:
        """Bytes."""
        return sum(component.bytes for component in self.components if component.place == place)


def reckon(model: Architecture, options: CalculatorOptions) -> Answer:
    """Answer for one configuration. Raises UsageError for one that does not exist."""
    options.check(model)
    parameters = tensors(model, groups=options.groups, tied=options.tied)
    sizes = [tensor.count for tensor in parameters]
    count, gpu = sum(sizes), options.kind == "cuda"
    item = 2 if options.precision == "pure16" else 4
    peak, at_peak = _passes(model, replace(options, optimizer="adam", bits=32, offload=False, compression=None))
    state = state_bytes(parameters, options.optimizer, options.bits)
    work = 0 if options.offload else _update_bytes(sizes, options, item)
    name = "master weights" if options.precision == "mixed" and not options.offload else "parameters"
    own = [(name, item * count), ("gradients", item * count)]
    host = []
    if options.offload:
        host += [("master weights (offloaded)", 4 * count), ("gradients (offloaded)", item * count)]
        host += [("optimizer state", state), ("workspace", _update_bytes(sizes, replace(options, kind="cpu"), 4))]
    else:
        own.append(("optimizer state", state))
    own += at_peak if peak >= work else [("workspace", work)]
    if options.compression is None:
        host.append(("process and libraries", PROCESSES["trainer"] + LIBRARIES))
    else:
        averaging = round_items(sizes, 2 * encoded_bytes(sizes, options.compression))
        host += [(f"swarm: {what}", size) for what, size in averaging]
        host.append(("swarm: copy of the state for a backup", 4 * count + state))
        host.append(("processes and libraries", sum(PROCESSES.values()) + LIBRARIES))
    place, slack = place_of(options.kind), int((HELD_ON_GPU if gpu else HELD_BY_ALLOCATOR) * max(peak, work))
    components = (
        *(MemoryComponent(what, size, place) for what, size in own),
        MemoryComponent("allocator's slack", slack, place, assumed=gpu),
        *(CUDA if gpu else ()),
        *(MemoryComponent(what, size, "host") for what, size in host),
    )
    moment = "forward and backward pass" if peak >= work else "optimizer's update"
    return Answer(count, components, moment, sum(size for _, size in own), place)


@lru_cache(maxsize=1024)
def _passes(model: Architecture, options: CalculatorOptions) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Bytes of the passes' worst moment, and of what; many questions differ in the optimizer alone."""
    tape = play(model, options)
    return tape.peak, tuple((what, size) for what, size in tape.at_peak.items() if size)


def state_bytes(parameters: Iterable[Tensor], optimizer: Optimizer, bits: int) -> int:
    """Bytes of the optimizer's state: two moments an element, for Adafactor rows and columns (Shazeer and Stern 2018).

    8 bits: a byte for each element and a float32 for each block of 256; tensors under 4096 elements stay in 32 bits.
    """
    if optimizer == "adafactor":
        return sum((tensor.rows + tensor.columns) * bits // 8 for tensor in parameters)
    sizes = [tensor.count for tensor in parameters]
    return moment_bytes(sizes, *BITSANDBYTES) if bits == 8 else 2 * sum(sizes) * bits // 8


def _update_bytes(sizes: list[int], options: CalculatorOptions, item: int) -> int:
    """Bytes that an update takes for a while. On a GPU torch updates all tensors of Adam and LAMB at once (foreach)."""
    if options.optimizer == "adafactor":
        return item * max(a + b for a, b in pairwise(sizes))  # the last tensor's update lives until the next one's
    if options.bits == 8:
        return 0 if options.kind == "cuda" else 5 * 4 * max(sizes)  # there bitsandbytes decodes a tensor's moments
    more = 1 if options.optimizer == "lamb" else 0  # the update, whose norm is needed
    return item * (sum(sizes) * (1 + more) if options.kind == "cuda" else (2 + more) * max(sizes))


def smallest_change(model: Architecture, options: CalculatorOptions, room: int) -> tuple[list[str], Answer] | None:
    """The fewest changes, of as many the cheapest, that make it fit into `room` bytes; None: none does.

    The cheapest come first: none of the first costs time, the last cost time or precision.
    """
    gpu, changes = options.kind == "cuda", list[tuple[str, dict[str, Any]]]()
    for words, change, possible in (
        ("--micro-batch 1", {"micro_batch": 1}, options.micro_batch > 1),
        ("--attention fused", {"attention": "fused"}, options.attention == "eager" and model.family != "t5"),
        ("--precision mixed", {"precision": "mixed"}, options.precision == "fp32" and gpu),
        ("--8bit", {"bits": 8}, options.optimizer != "adafactor" and options.bits > 8 and not options.offload),
        ("--checkpointing", {"layers": "checkpointed"}, options.layers == "kept"),
        ("--offload", {"offload": True}, not options.offload and gpu),
        ("--precision pure16", {"precision": "pure16"}, options.precision != "pure16"),
    ):
        if possible:
            changes.append((words, change))

    def answer(chosen: Sequence[tuple[str, dict[str, Any]]]) -> Answer:
        merged = {key: value for _, change in chosen for key, value in change.items()}
        return reckon(model, replace(options, **merged))

    shared = [] if options.groups else [("--share 4", {"groups": min(4, model.layers)})]  # another model: tried last
    for few in (changes, changes + shared):
        if answer(few).taken > room:
            continue
        for number in range(1, len(few) + 1):
            for chosen in combinations(few, number):
                if (result := answer(chosen)).taken <= room:
                    return [words for words, _ in chosen], result
    return None


def gradient_bytes(model: Architecture, options: CalculatorOptions) -> int:
    """One encoded gradient; 0 without a swarm."""
    if options.compression is None:
        return 0
    sizes = [tensor.count for tensor in tensors(model, groups=options.groups, tied=options.tied)]
    return encoded_bytes(sizes, options.compression)


def flops_per_example(model: Architecture, options: CalculatorOptions) -> int:
    """Count the forward and backward pass: multiply and add are two, the backward pass needs twice the forward's.

    Layers that keep no activations run forward once more. Attention is over all pairs, as in eager and fused kernels
    without causal skipping; elementwise work is left out.
    """
    n = options.sequence or model.sequence
    m = model.targets(options.sequence)

    def matrices(parameters: Iterable[Tensor]) -> int:
        return sum(tensor.count for tensor in parameters if tensor.columns and tensor.product)

    layer = matrices(layer_tensors(model)) * n + 2 * n * (min(n, model.keys) if model.keys else n) * model.inner
    layers = model.layers * layer
    if model.family == "t5":
        own = matrices(layer_tensors(model, decoder=True)) - 2 * model.inner * model.dim
        cross = 2 * model.inner * model.dim * n
        layers += model.decoder_layers * (own * m + cross + 2 * (m * m + m * n) * model.inner)
    head = model.vocab * model.dim * (m if model.family == "t5" else n)
    if model.family == "bert":
        head += model.dim**2 * n
    return 2 * (layers * (3 if options.layers == "kept" else 4) + 3 * head)
