"""A state's digest by chunks: which bytes two peers do not share, and which chunk is not what it should be.

Notable:
- a hash tree (Merkle, 1987) of three levels. Leaves: SHA-256 of each chunk, 1 MiB of one tensor's bytes (a tensor's
  last chunk is shorter). A group, the parameters or the optimizer's tensors: SHA-256 over names, dtypes and shapes
  in the order of names, and the leaves. The root, which peers sign: SHA-256 over format, run identity, step and groups;
- a manifest is the root's whole content without the tensors' bytes: whoever trusts the root trusts each leaf, and
  so each chunk, whoever sends it;
- leaves are hashed by two threads that read the tensors' own memory: hashlib releases the interpreter's lock.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, NamedTuple

import torch
from pydantic import ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from torch import Tensor

from tt_cli.run.checkpoint_names import FORMAT

CHUNK = 1 << 20  # bytes; a multiple of every dtype's size
LEAF = 32
HASH_THREADS = 2
ALIGNMENT = 64  # of a tensor in a buffer: what any processor's vectors want

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_Size = Annotated[int, Field(ge=0, lt=2**40)]


class Spec(NamedTuple):
    """A tensor without its bytes. dtype: as safetensors names it, "F32"."""

    name: Annotated[str, Field(max_length=200)]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(_TORCH)})$")]
    shape: Annotated[tuple[_Size, ...], Field(max_length=8)]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same for torch."""
        return _TORCH[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def chunks(self) -> int:
        """Chunks of the tensor; none of an empty one."""
        return -(-self.nbytes // CHUNK)

    def view(self, data: memoryview, offset: int) -> Tensor:
        """The tensor whose bytes begin at `offset` of `data`, in that memory."""
        count, dtype = math.prod(self.shape), self.torch_dtype
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(self.shape)


@dataclass
class _ManifestHeader:
    __pydantic_config__ = ConfigDict(extra="forbid")

    format: str
    identity: str
    step: Annotated[int, Field(ge=0, lt=10**15)]
    parameters: Annotated[list[Spec], FailFast()]
    optimizer: Annotated[list[Spec], FailFast()]


_HEADER = TypeAdapter(_ManifestHeader)


class StateTree:
    """The hash tree of one state. Chunks are numbered through: parameters by name, then the optimizer's tensors.

    parameters, optimizer: specs in the order of names; layout: both. leaves: the chunks' digests, 32 bytes each.
    """

    def __init__(
        self, identity: str, step: int, parameters: Sequence[Spec], optimizer: Sequence[Spec], leaves: bytes
    ) -> None:
        self.identity, self.step, self.leaves = identity, step, leaves
        self.parameters, self.optimizer = tuple(parameters), tuple(optimizer)
        self.layout = (*self.parameters, *self.optimizer)
        self._first = [0, *accumulate(spec.chunks for spec in self.layout)]
        self._parameters_end = self._first[len(self.parameters)]
        self._offset = [0, *accumulate(-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in self.layout)]
        if len(leaves) != LEAF * self._first[-1]:
            raise ValueError(f"{len(leaves) / LEAF:g} leaves for {self._first[-1]} chunks")

    @classmethod
    def of(
        cls, identity: str, step: int, parameters: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> StateTree:
        """The tree of these tensors, whose strides and order do not matter. GPU tensors are copied one by one."""
        specs = _specs_of(parameters), _specs_of(optimizer)
        tensors = [*(parameters[spec.name] for spec in specs[0]), *(optimizer[spec.name] for spec in specs[1])]
        return cls(identity, step, *specs, _leaves(tensors))

    @classmethod
    def parse(cls, manifest: bytes, identity: str, shapes: Mapping[str, Sequence[int]]) -> StateTree:
        """The tree in `manifest`, which anyone may have sent: believe it when its digest is one that peers signed.

        identity: the run's. shapes: of the model's parameters by name; the manifest has exactly these, as fp32, and
        for the optimizer at most four tensors and 8 bytes an element for each. Raises ValueError.
        """
        end = 4 + int.from_bytes(manifest[:4], "little")
        try:
            header = _HEADER.validate_json(manifest[4:end], strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ascii(".".join(map(str, first["loc"])))[:80]
            raise ValueError(f"a manifest with a malformed header, at {place}: {first['msg']}") from None
        if header.format != FORMAT:
            raise ValueError(f"a state of format {ascii(header.format)[:20]}, not {FORMAT}")
        if header.identity != identity:
            raise ValueError(f"a state of run {ascii(header.identity)[:80]}")
        own = [Spec(name, "F32", tuple(shapes[name])) for name in sorted(shapes)]
        if header.parameters != own:
            unlike = [ascii(spec.name[:80]) for spec in sorted({*own} ^ {*header.parameters})]
            raise ValueError(f"a state with other tensors than this model's ({', '.join(unlike[:3])})")
        names = [spec.name for spec in header.optimizer]
        if len(names) > 4 * len(own):
            raise ValueError("more tensors than this run's state can have")
        if names != sorted(set(names)):
            raise ValueError("tensors that are not in the order of their names")
        if sum(spec.nbytes for spec in header.optimizer) > 2 * sum(spec.nbytes for spec in own) + 2**22:
            raise ValueError("more bytes of the optimizer than a state of this run can have")
        tree = cls(identity, header.step, own, header.optimizer, manifest[end:])
        if tree.manifest() != manifest:
            raise ValueError("a manifest that is written in another way than it should be")
        return tree

    def manifest(self) -> bytes:
        """The tree as bytes: length of the header (4, little-endian), header (JSON), leaves."""
        groups = {"parameters": self.parameters, "optimizer": self.optimizer}
        header = _json({"format": FORMAT, "identity": self.identity, "step": self.step, **groups})
        return len(header).to_bytes(4, "little") + header + self.leaves

    @functools.cached_property
    def digest(self) -> str:
        """The root, 64 hex digits: equal roots mean equal bytes."""
        optimizer = _group_digest(self.optimizer, self.leaves[LEAF * self._parameters_end :])
        return hashlib.sha256(_json([FORMAT, self.identity, self.step, self.parameters_digest, optimizer])).hexdigest()

    @functools.cached_property
    def parameters_digest(self) -> str:
        """The digest of the parameters alone, 64 hex digits."""
        return _group_digest(self.parameters, self.leaves[: LEAF * self._parameters_end])

    @property
    def parameter_chunks(self) -> range:
        """The chunks of the parameters: all there is to take for one who only draws."""
        return range(self._parameters_end)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds all chunks at their places."""
        return self._offset[-1]

    def __len__(self) -> int:
        return self._first[-1]

    def differing(self, other: StateTree) -> list[int]:
        """The chunks that `other` does not hold alike: all of them when its tensors are others than this tree's."""
        if self.layout != other.layout:
            return list(range(len(self)))
        return [index for index in range(len(self)) if self._leaf(index) != other._leaf(index)]

    def holds(self, index: int, data: bytes | memoryview) -> bool:
        """True when `data` is the chunk `index`."""
        return len(data) == self.place(index)[1] and _sha256(data) == self._leaf(index)

    def _leaf(self, index: int) -> bytes:
        return self.leaves[LEAF * index : LEAF * (index + 1)]

    def check(self, indexes: Sequence[int], chunks: Mapping[int, memoryview]) -> None:
        """Raise ValueError, naming the first, when one of these chunks is not what its leaf says."""
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            held = pool.map(lambda index: self.holds(index, chunks[index]), indexes)
            wrong = [index for index, good in zip(indexes, held, strict=True) if not good]
        if wrong:
            raise ValueError(f"chunk {self.name_of(wrong[0])} is not what its hash says")

    def find(self, index: int) -> tuple[int, int]:
        """The tensor that a chunk belongs to, by its place in `layout`, and which of its chunks it is."""
        if not 0 <= index < len(self):
            raise ValueError(f"chunk {index} of {len(self)}")
        tensor = bisect_right(self._first, index) - 1
        return tensor, index - self._first[tensor]

    def name_of(self, index: int) -> str:
        """Tensor and number of a chunk: "transformer.layers.0.ff.weight[3]"."""
        tensor, number = self.find(index)
        return f"{self.layout[tensor].name}[{number}]"

    def place(self, index: int) -> tuple[int, int]:
        """The place of a chunk in a buffer for the whole state: (offset, bytes). Tensors begin at multiples of 64."""
        tensor, number = self.find(index)
        return self._offset[tensor] + number * CHUNK, min(CHUNK, self.layout[tensor].nbytes - number * CHUNK)

    def places(self) -> Iterator[tuple[str, Spec, int]]:
        """("parameters" or "optimizer", spec, offset in a buffer) of each tensor."""
        for tensor, spec in enumerate(self.layout):
            yield "parameters" if tensor < len(self.parameters) else "optimizer", spec, self._offset[tensor]


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of one group of tensors, as in the tree."""
    specs = _specs_of(tensors)
    return _group_digest(specs, _leaves(tensors[spec.name] for spec in specs))


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, as a view when it is contiguous on the CPU. (numpy knows no bfloat16.)"""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _leaves(tensors: Iterable[Tensor]) -> bytes:
    digests: list[bytes] = []
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # made for each tree: threads do not survive a fork
        for tensor in tensors:
            data = bytes_of(tensor)
            chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
            digests += pool.map(_sha256, chunks) if len(chunks) > 1 else map(_sha256, chunks)
    return b"".join(digests)


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _group_digest(specs: Sequence[Spec], leaves: bytes) -> str:
    header = _json(specs)
    return hashlib.sha256(len(header).to_bytes(8, "little") + header + leaves).hexdigest()


def _specs_of(tensors: Mapping[str, Tensor]) -> list[Spec]:
    return [Spec(name, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in sorted(tensors)]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
