"""The memory of a training pass at every moment, played on paper: sizes are allocated and freed, no tensor exists.

It follows torch's rules: an operation's result lives as long as somebody refers to it, its node keeps what the backward
pass will need (Paszke et al. 2019), and a node's gradients are freed when the next nodes took them. So the worst moment
falls out of the order of work instead of a formula for it. `Tape.peak` is that moment, `Tape.at_peak` what is held.

Relies on reference counting: a `Storage` is freed when its last reference goes, as in torch. Where arguments of calls
live longer, as in a process in which torch.compile has failed once, answers are too high.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

WORKSPACE = "workspace"


class Storage:
    """Bytes on the tape from now until nobody refers to them any more."""

    __slots__ = ("label", "size", "tape")

    def __init__(self, tape: Tape, size: int, label: str) -> None:
        self.tape, self.size, self.label = tape, size, label
        tape.count(size, label)

    def __del__(self) -> None:
        self.tape.count(-self.size, self.label)


@dataclass(slots=True)
class Value:
    """A tensor of the forward pass: `count` elements of `item` bytes in a storage that other tensors may share."""

    storage: Storage
    count: int
    item: int
    key: int = field(default_factory=itertools.count().__next__, init=False)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.item


# Takes the gradient of a node's result and what the node kept; returns those of its inputs.
Backward = Callable[[Storage, list[Storage]], list[Storage]]


@dataclass
class TapeNode:
    """One operation as the backward pass will see it. out, size: its result's key and bytes. inputs: keys."""

    out: int
    size: int
    inputs: list[int]
    keep: list[Storage]
    gradients: Sequence[int] | Backward


@dataclass
class Tape:
    """One device's memory while a pass is played. Sizes in bytes; at_peak: by label."""

    now: int = 0
    peak: int = 0
    held: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    at_peak: dict[str, int] = field(default_factory=dict)
    recording: bool = True
    _nodes: list[TapeNode] = field(default_factory=list)
    _gradients: dict[int, Storage] = field(default_factory=dict)

    def count(self, size: int, label: str) -> None:
        """Called by storages alone."""
        self.now += size
        self.held[label] += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.held)

    def value(self, count: int, item: int, label: str) -> Value:
        """A new tensor."""
        return Value(Storage(self, count * item, label), count, item)

    def work(self, size: int) -> Storage:
        """Bytes that the backward pass takes for a while."""
        return Storage(self, size, WORKSPACE)

    def record(
        self, out: Value, inputs: Sequence[Value], keep: Sequence[Storage], gradients: Sequence[int] | Backward
    ) -> Value:
        """Note how `out` came about. gradients: bytes of each input's, 0 where it is that of the result.

        Where they take more than themselves: what makes them. A value in its closure would live on: sizes only.
        """
        if self.recording:
            keys = [value.key for value in inputs]
            self._nodes.append(TapeNode(out.key, out.size, keys, list(keep), gradients))
        return out

    def backward(self) -> None:
        """Play back from the last operation, whose gradient is of its result's size, to the start."""
        self._play_back(self.work(self._nodes[-1].size))

    def checkpoint(self, function: Callable[[Value], Value], x: Value, *, reversible: bool = False) -> Value:
        """Chen et al. 2016: keep x alone, and play `function` again on the way back.

        reversible: keep not even x (Gomez et al. 2017). It is rebuilt then, as one stream more beside both.
        """
        before, self.recording = self.recording, False
        out = replace(function(x))
        self.recording = before
        count, item = x.count, x.item

        def back(gradient: Storage, kept: list[Storage]) -> list[Storage]:
            storage = kept[0] if kept else self.work(count * item)
            start = Value(storage, count, item)
            outer, self._nodes, recorded, self.recording = self._nodes, [], self.recording, True
            function(start)
            self._play_back(gradient)
            self._nodes, self.recording = outer, recorded
            return [self._gradients.pop(start.key)]

        return self.record(out, [x], [] if reversible else [x.storage], back)

    def _play_back(self, gradient: Storage) -> None:
        """All nodes from the last one on, whose result has this gradient."""
        self._gradients[self._nodes[-1].out] = gradient
        del gradient
        while self._nodes:
            node = self._nodes.pop()
            if node.out not in self._gradients:
                continue
            gradient = self._gradients.pop(node.out)
            if callable(node.gradients):
                given = node.gradients(gradient, node.keep)
            else:
                given = [self.work(size) if size else gradient for size in node.gradients]
            del gradient
            for key in node.inputs:
                self._gradients.setdefault(key, given.pop(0))  # a second one is added to the first in place
            del node
