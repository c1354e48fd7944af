"""The memory of a training pass at every moment, played on paper: sizes are allocated and freed, no tensor exists.

It follows torch's rules: an operation's result lives as long as somebody refers to it, its node keeps what the backward
pass will need (Paszke et al. 2019), and a node's gradients are freed when the next nodes took them. So the worst moment
falls out of the order of work instead of a formula for it. `Tape.peak` is that moment, `Tape.at_peak` what is held.

Relies on reference counting: a `Storage` is freed when its last reference goes, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class Storage:
    """Bytes on the tape from now until nobody refers to them any more."""

    __slots__ = ("label", "size", "tape")

    def __init__(self, tape: Tape, size: int, label: str) -> None:
        self.tape, self.size, self.label = tape, size, label
        tape.count(size, label)

    def __del__(self) -> None:
        self.tape.count(-self.size, self.label)


class Value:
    """A tensor of the forward pass: `count` elements of `item` bytes in a storage that other tensors may share."""

    __slots__ = ("count", "item", "key", "storage")

    def __init__(self, storage: Storage, count: int, item: int, key: int) -> None:
        self.storage, self.count, self.item, self.key = storage, count, item, key

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.item


Gradients = Sequence[Storage | None]
# Takes the gradient of a node's result and what the node kept; returns those of its inputs, None where there is none.
Backward = Callable[[Storage, list[Storage]], Gradients]


@dataclass
class TapeNode:
    """One operation as the backward pass will see it. size: of its result, in bytes."""

    out: int
    size: int
    inputs: list[int]
    keep: list[Storage]
    back: Backward


@dataclass
class Tape:
    """One device's memory while a pass is played. Sizes in bytes; at_peak: by label."""

    now: int = 0
    peak: int = 0
    held: dict[str, int] = field(default_factory=dict)
    at_peak: dict[str, int] = field(default_factory=dict)
    recording: bool = True
    _nodes: list[TapeNode] = field(default_factory=list)
    _gradients: dict[int, Storage] = field(default_factory=dict)
    _keys: int = 0

    def count(self, size: int, label: str) -> None:
        """Called by storages alone."""
        self.now += size
        self.held[label] = self.held.get(label, 0) + size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.held)

    def value(self, count: int, item: int, label: str) -> Value:
        """A new tensor."""
        self._keys += 1
        return Value(Storage(self, count * item, label), count, item, self._keys)

    def same(self, value: Value) -> Value:
        """A tensor that shares a storage, and is another one for the backward pass."""
        self._keys += 1
        return Value(value.storage, value.count, value.item, self._keys)

    def work(self, size: int) -> Storage:
        """Bytes that the backward pass takes for a while."""
        return Storage(self, size, WORKSPACE)

    def record(self, out: Value, inputs: Sequence[Value], keep: Sequence[Storage], back: Backward) -> Value:
        """Note how `out` came about. `back` must hold sizes only: a value in its closure would live on."""
        if self.recording:
            self._nodes.append(TapeNode(out.key, out.size, [value.key for value in inputs], list(keep), back))
        return out

    def backward(self) -> None:
        """Play back from the last operation, whose gradient is of its result's size, to the start."""
        if self._nodes:
            self._gradients[self._nodes[-1].out] = self.work(self._nodes[-1].size)
            self._play_back(self._nodes)

    def checkpoint(self, function: Callable[[Value], Value], x: Value) -> Value:
        """Chen et al. 2016: keep x alone, and play `function` again on the way back."""
        return self._again(function, x, [x.storage], 0)

    def reversible(self, function: Callable[[Value], Value], x: Value) -> Value:
        """Gomez et al. 2017: keep not even x. On the way back it is rebuilt, as one stream more beside both."""
        return self._again(function, x, [], 1)

    def _again(self, function: Callable[[Value], Value], x: Value, keep: list[Storage], rebuilt: int) -> Value:
        before, self.recording = self.recording, False
        out = self.same(function(x))
        self.recording = before
        count, item = x.count, x.item

        def back(gradient: Storage, kept: list[Storage]) -> Gradients:
            streams = [self.work(count * item) for _ in range(rebuilt)]
            storage = kept[0] if kept else streams[0]
            self._keys += 1
            start = Value(storage, count, item, self._keys)
            outer, self._nodes, recorded, self.recording = self._nodes, [], self.recording, True
            result = function(start)
            self._gradients[result.key] = gradient
            del result, gradient
            self._play_back(self._nodes)
            self._nodes, self.recording = outer, recorded
            return [self._gradients.pop(start.key)]

        return self.record(out, [x], keep, back)

    def _play_back(self, nodes: list[TapeNode]) -> None:
        while nodes:
            node = nodes.pop()
            gradient = self._gradients.pop(node.out, None)
            if gradient is None:
                continue
            given = list(node.back(gradient, node.keep))
            del gradient
            for key in node.inputs:
                part = given.pop(0)
                if part is not None:
                    self._gradients.setdefault(key, part)  # a second one is added to the first in place
                del part
            del node


WORKSPACE = "workspace"
