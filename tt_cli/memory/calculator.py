"""The memory calculator: what training one of the known architectures takes, component by component.

A step has two worst moments: somewhere in a micro-batch's passes (`forward_backward`) and in the optimizer's update,
when activations are gone. The larger one counts. Gradients are those of several micro-batches summed, so they exist all
the while. With the optimizer offloaded, float32 weights, the gradients' copy and the state are in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Literal

from tt_cli.errors import UsageError
from tt_cli.memory.architectures import Architecture, Tensor, layer_tensors, tensors
from tt_cli.memory.forward_backward import play
from tt_cli.memory.operations import Setting
from tt_cli.memory.trainer_account import (
    HELD_BY_ALLOCATOR,
    LIBRARIES,
    PROCESSES,
    MemoryComponent,
    Place,
    cuda_components,
    encoded_bytes,
    moment_bytes,
    round_components,
)

Optimizer = Literal["adam", "lamb", "adafactor"]
Compression = Literal["linear8", "blockwise8", "fp16", "fp32"]

# Not measured: no GPU was at hand. What torch's caching allocator commonly holds of a GPU beyond what is in use.
HELD_ON_GPU = 0.05
_BLOCK, _SMALLEST = 256, 4096  # bitsandbytes: elements that share a scale, and from which state is in 8 bits


@dataclass(frozen=True)
class CalculatorOptions(Setting):
    """A way to train a model. bits: of the optimizer's state. sequence: 0 for the published one. compression: of
    averaged gradients; None: alone, without a swarm."""

    optimizer: Optimizer = "adam"
    bits: int = 32
    offload: bool = False
    compression: Compression | None = "linear8"

    def check(self, model: Architecture) -> None:
        """Raises UsageError for what does not exist."""
        if self.optimizer == "adafactor" and self.bits == 8:
            raise UsageError("Adafactor has no 8-bit state: it keeps rows and columns already; leave --8bit out")
        if model.family == "t5" and self.attention == "fused":
            raise UsageError("T5 adds a learned bias to its scores, which fused attention has not: --attention eager")
        if self.offload and self.kind == "cpu":
            raise UsageError("--offload moves the optimizer from a GPU to the host; with --cpu all of it is there")
        if model.positions and self.sequence > model.positions and not model.keys:
            raise UsageError(f"{model.title} has {model.positions} positions: --sequence {self.sequence} is too long")
        if self.sequence and model.keys:
            raise UsageError(f"{model.title}'s sequence is its caption and its picture: leave --sequence out")
        if self.groups > model.layers:
            raise UsageError(f"{model.title} has {model.layers} layers: --share must be 1 to {model.layers}")

    @property
    def setting(self) -> Setting:
        """The part of it that the passes depend on."""
        return Setting(**{part.name: getattr(self, part.name) for part in fields(Setting)})


@dataclass(frozen=True)
class Answer:
    """The account of one configuration at its worst moment. tensors: bytes of tensors alone, where training runs."""

    parameters: int
    components: tuple[MemoryComponent, ...]
    moment: str
    tensors: int

    def total(self, place: Place) -> int:
        """Bytes."""
        return sum(component.bytes for component in self.components if component.place == place)


def reckon(model: Architecture, options: CalculatorOptions) -> Answer:
    """Answer for one configuration. Raises UsageError for one that does not exist."""
    options.check(model)
    parameters = tensors(model, groups=options.groups, tied=options.tied)
    count = sum(tensor.count for tensor in parameters)
    item = 2 if options.precision == "pure16" else 4
    peak, at_peak = _passes(model, options.setting)
    name = "master weights" if options.precision == "mixed" and not options.offload else "parameters"
    state = state_bytes(parameters, options.optimizer, options.bits)
    own = [(name, item * count), ("gradients", item * count)]
    work = 0 if options.offload else _update_bytes(parameters, options, item)
    if not options.offload:
        own.append(("optimizer state", state))
    if peak >= work:
        moment, own = "forward and backward pass", [*own, *at_peak]
    else:
        moment, own = "optimizer's update", [*own, ("workspace", work)]
    place: Place = "host" if options.kind == "cpu" else "device"
    components = [MemoryComponent(what, size, place) for what, size in own]
    activations = max(peak, work)
    if options.kind == "cpu":
        components.append(MemoryComponent("allocator's slack", int(HELD_BY_ALLOCATOR * activations), "host"))
    else:
        components += [
            MemoryComponent("allocator's slack", int(HELD_ON_GPU * activations), "device", assumed=True),
            *cuda_components(),
        ]
    if options.offload:
        step = MemoryComponent("workspace", _update_bytes(parameters, replace(options, kind="cpu"), 4), "host")
        components += [
            MemoryComponent("master weights (offloaded)", 4 * count, "host"),
            MemoryComponent("gradients (offloaded)", item * count, "host"),
        ]
        components += [MemoryComponent("optimizer state", state, "host"), step]
    components += _of_the_swarm(parameters, state, options)
    return Answer(count, tuple(components), moment, sum(size for _, size in own))


@lru_cache(maxsize=1024)
def _passes(model: Architecture, setting: Setting) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Bytes of the passes' worst moment, and of what; many questions differ in the optimizer alone."""
    tape = play(model, setting)
    return tape.peak, tuple((what, size) for what, size in tape.at_peak.items() if size)


def _of_the_swarm(parameters: list[Tensor], state: int, options: CalculatorOptions) -> list[MemoryComponent]:
    """Host memory of a peer's processes, as in tt_cli.memory.trainer_account; alone it is one process."""
    count = sum(tensor.count for tensor in parameters)
    if options.compression is None:
        return [MemoryComponent("process and libraries", PROCESSES["trainer"] + LIBRARIES, "host")]
    sizes = [tensor.count for tensor in parameters]
    return [
        *round_components(sizes, encoded_bytes(sizes, options.compression), "swarm: "),
        MemoryComponent("swarm: copy of the state for a backup", 4 * count + state, "host"),
        MemoryComponent("processes and libraries", sum(PROCESSES.values()) + LIBRARIES, "host"),
    ]


def state_bytes(parameters: Iterable[Tensor], optimizer: Optimizer, bits: int) -> int:
    """Bytes of the optimizer's state: two moments an element, for Adafactor rows and columns (Shazeer and Stern 2018).

    8 bits: a byte for each element and a float32 for each block of 256; tensors under 4096 elements stay in 32 bits.
    """
    if optimizer == "adafactor":
        return sum((tensor.rows + tensor.columns) * bits // 8 for tensor in parameters)
    sizes = [tensor.count for tensor in parameters]
    return moment_bytes(sizes, _SMALLEST, _BLOCK) if bits == 8 else 2 * sum(sizes) * bits // 8


def _update_bytes(parameters: list[Tensor], options: CalculatorOptions, item: int) -> int:
    """Bytes that an update takes for a while. On a GPU torch updates all tensors of Adam and LAMB at once (foreach)."""
    counts = [tensor.count for tensor in parameters]
    if options.optimizer == "adafactor":
        return item * max(a + b for a, b in pairwise(counts))  # the last tensor's update lives until the next one's
    if options.bits == 8:
        return 0 if options.kind == "cuda" else 5 * 4 * max(counts)  # there bitsandbytes decodes a tensor's moments
    more = 1 if options.optimizer == "lamb" else 0  # the update, whose norm is needed
    return item * (sum(counts) * (1 + more) if options.kind == "cuda" else (2 + more) * max(counts))


def changes(model: Architecture, options: CalculatorOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes that take less, the cheapest first: none of the first costs time, the last cost time or precision."""
    if options.micro_batch > 1:
        yield "--micro-batch 1", {"micro_batch": 1}
    if options.attention == "eager" and model.family != "t5":
        yield "--attention fused", {"attention": "fused"}
    if options.precision == "fp32" and options.kind == "cuda":
        yield "--precision mixed", {"precision": "mixed"}
    if options.optimizer != "adafactor" and options.bits > 8 and not options.offload:
        yield "--8bit", {"bits": 8}
    if options.layers == "kept":
        yield "--checkpointing", {"layers": "checkpointed"}
    if not options.offload and options.kind == "cuda":
        yield "--offload", {"offload": True}
    if options.precision != "pure16":
        yield "--precision pure16", {"precision": "pure16"}


def smallest_change(model: Architecture, options: CalculatorOptions, room: int) -> tuple[list[str], Answer] | None:
    """The fewest changes, of as many the cheapest, that make it fit into `room` bytes; None: none does."""
    place: Place = "host" if options.kind == "cpu" else "device"
    possible = list(changes(model, options))
    if not options.groups:  # makes another model of it: tried last
        possible.append(("--share 4", {"groups": min(4, model.layers)}))

    def answer(chosen: Sequence[tuple[str, dict[str, Any]]]) -> Answer:
        merged = {key: value for _, change in chosen for key, value in change.items()}
        return reckon(model, replace(options, **merged))

    for few in (possible[:-1] if not options.groups else possible, possible):
        if answer(few).total(place) > room:
            continue
        for number in range(1, len(few) + 1):
            for chosen in combinations(few, number):
                if (result := answer(chosen)).total(place) <= room:
                    return [words for words, _ in chosen], result
    return None


def network_bytes(model: Architecture, options: CalculatorOptions, peers: int) -> int:
    """Bytes that a peer sends for a global step, and receives: 2 (n - 1) / n encoded gradients (all-reduce)."""
    if options.compression is None or peers < 2:
        return 0
    sizes = [tensor.count for tensor in tensors(model, groups=options.groups, tied=options.tied)]
    return 2 * encoded_bytes(sizes, options.compression) * (peers - 1) // peers


def flops_per_example(model: Architecture, options: CalculatorOptions) -> int:
    """Count the forward and backward pass: multiply and add are two, the backward pass needs twice the forward's.

    Layers that keep no activations run forward once more. Attention is over all pairs, as in eager and fused kernels
    without causal skipping; elementwise work is left out.
    """
    n = options.sequence or model.sequence
    m = model.target if not options.sequence else max(1, options.sequence * model.target // max(1, model.sequence))

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
