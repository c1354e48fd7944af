"""The hash tree: its root, which chunk differs, and that no other manifest gets through."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tt_cli.checkpoint.hash_tree import CHUNK, StateTree, bytes_of
from tt_cli.checkpoint.training_state import CorruptCheckpoint, TrainingState, received_state
from tt_cli.swarm.shared_memory import StateBuffer

RUN = "run-1a2b3c4d"
WIDE = CHUNK // 4 * 2 + 5  # elements of fp32 in two chunks and a bit


def parameters() -> dict[str, Tensor]:
    return {"b.weight": torch.arange(float(WIDE)), "a.bias": torch.ones(3), "c.scalar": torch.tensor(2.0)}


def optimizer() -> dict[str, Tensor]:
    return {"m.codes/b.weight": torch.full((CHUNK,), 7, dtype=torch.uint8), "v/a.bias": torch.zeros(3)}


SHAPES = {name: tuple(tensor.shape) for name, tensor in parameters().items()}


def tree(step: int = 3, **changed: dict[str, Tensor]) -> StateTree:
    groups = {"parameters": parameters(), "optimizer": optimizer()}
    return StateTree.of(RUN, step, *({**groups[name], **changed.get(name, {})} for name in groups))


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_the_root_is_what_the_protocol_says() -> None:
    def group(listed: list[object], *leaves: bytes) -> str:
        header = json.dumps(listed, separators=(",", ":")).encode()
        return sha(len(header).to_bytes(8, "little") + header + b"".join(leaves)).hex()

    weight = torch.arange(float(WIDE)).numpy().tobytes()
    ones = torch.ones(3).numpy().tobytes()
    chunks = [sha(weight[:CHUNK]), sha(weight[CHUNK : 2 * CHUNK]), sha(weight[2 * CHUNK :])]
    names = [["a.bias", "F32", [3]], ["b.weight", "F32", [WIDE]], ["c.scalar", "F32", []]]
    first = group(names, sha(ones), *chunks, sha(torch.tensor(2.0).numpy().tobytes()))
    second = group([["m.codes/b.weight", "U8", [CHUNK]], ["v/a.bias", "F32", [3]]], sha(b"\7" * CHUNK), sha(bytes(12)))
    root = sha(json.dumps(["tt-2", RUN, 3, first, second], separators=(",", ":")).encode()).hex()
    assert (tree().parameters_digest, tree().digest) == (first, root)
    assert root == "bf2a725474334d5a073fa34a63b13987f135339429e7efb3c9dce8181382cbdc"


def test_chunks_are_named_and_placed() -> None:
    one = tree()
    assert [one.name_of(i) for i in range(len(one))] == [
        "a.bias[0]",
        "b.weight[0]",
        "b.weight[1]",
        "b.weight[2]",
        "c.scalar[0]",
        "m.codes/b.weight[0]",
        "v/a.bias[0]",
    ]
    after = 64 + 2 * CHUNK
    assert [one.place(i) for i in range(len(one))] == [
        (0, 12),
        (64, CHUNK),
        (64 + CHUNK, CHUNK),
        (after, 20),
        (after + 64, 4),
        (after + 128, CHUNK),
        (after + 128 + CHUNK, 12),
    ]
    assert one.nbytes == after + 192 + CHUNK and one.parameter_chunks == range(5)
    for index in (-1, len(one)):
        with pytest.raises(ValueError, match="of 7"):
            one.place(index)


def test_what_differs_is_found_and_nothing_else() -> None:
    one = tree()
    weight = torch.arange(float(WIDE))
    weight[CHUNK // 4] += 1
    other = tree(parameters={"b.weight": weight}, optimizer={"v/a.bias": torch.tensor([0.0, 0.0, 1.0])})
    assert [one.name_of(i) for i in one.differing(other)] == ["b.weight[1]", "v/a.bias[0]"]
    assert one.differing(tree()) == []
    assert tree(step=4).differing(one) == [] and tree(step=4).digest != one.digest
    for other in (torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1)):  # equal bytes
        assert one.differing(tree(optimizer={"v/a.bias": other})) == list(range(7))
    assert one.differing(tree(optimizer={"v/b.bias": torch.zeros(3)})) == list(range(7))


def test_empty_and_strided_tensors_and_every_dtype() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    kinds = {str(dtype): torch.ones(5).to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.float64)}
    state = TrainingState(1, {"t": base.T, "none": torch.empty(0, 4), **kinds}, {}, "", RUN)
    contiguous = replace(state, parameters={**state.parameters, "t": base.T.contiguous()})
    assert state.digest() == contiguous.digest()
    buffer = StateBuffer.new()
    state.write_into(state.tree(), buffer.write)
    again = received_state(state.tree(), buffer.view(state.tree().nbytes), "")
    assert again.digest() == state.digest()
    assert all(torch.equal(again.parameters[name], tensor) for name, tensor in state.parameters.items())


def test_a_received_state_that_is_not_finite_is_refused() -> None:
    state, buffer = TrainingState(1, {"t": torch.tensor([1.0, torch.inf])}, {}, "", RUN), StateBuffer.new()
    state.write_into(state.tree(), buffer.write)
    with pytest.raises(CorruptCheckpoint, match="the received state is unusable: 't' holds NaN or infinity"):
        received_state(state.tree(), buffer.view(state.tree().nbytes), "")


def test_a_wrong_chunk_is_named() -> None:
    one, data = tree(), bytearray(bytes_of(parameters()["b.weight"]))
    data[CHUNK + 1] ^= 1
    chunks = {i + 1: memoryview(data)[i * CHUNK : (i + 1) * CHUNK] for i in range(3)}
    one.check([1, 3], chunks)
    with pytest.raises(ValueError, match=r"b\.weight\[1\] is not what its hash says"):
        one.check([1, 2, 3], chunks)
    assert not one.holds(1, bytes(CHUNK - 1)) and one.holds(1, chunks[1])
    longer = StateTree(RUN, 3, one.parameters, one.optimizer, sha(bytes(13)) + one.leaves[32:])
    assert not longer.holds(0, bytes(13)), "the next tensor lies there"


MANIFEST = tree().manifest()


def test_a_manifest_is_read_as_it_was_written() -> None:
    again = StateTree.parse(MANIFEST, RUN, SHAPES)
    assert (again.digest, again.step, again.layout) == (tree().digest, 3, tree().layout)
    assert again.manifest() == MANIFEST


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(MANIFEST) - 1), st.integers(1, 255))
def test_a_changed_manifest_is_refused_or_has_another_root(position: int, change: int) -> None:
    changed = bytearray(MANIFEST)
    changed[position] ^= change
    try:
        assert StateTree.parse(bytes(changed), RUN, SHAPES).digest != tree().digest
    except ValueError as error:
        assert str(error).isprintable()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(MANIFEST) - 1), st.binary(max_size=40))
def test_a_torn_or_longer_manifest_is_refused(length: int, more: bytes) -> None:
    for data in (MANIFEST[:length], MANIFEST + b"x" + more, more):
        with pytest.raises(ValueError):
            StateTree.parse(data, RUN, SHAPES)


def header(**fields: object) -> bytes:
    end = 4 + int.from_bytes(MANIFEST[:4], "little")
    text = json.dumps({**json.loads(MANIFEST[4:end]), **fields}, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text + MANIFEST[end:]


LISTED = json.loads(MANIFEST[4 : 4 + int.from_bytes(MANIFEST[:4], "little")])
HUGE = [f"m/{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "tt-1"}, "format 'tt-1', not tt-2"),
        ({"identity": "other"}, "a state of run 'other'"),
        ({"step": -1}, "at 'step'"),
        ({"step": True}, "at 'step'"),
        ({"step": 10**15}, "at 'step'"),
        ({"more": 1}, "at 'more'"),
        ({"parameters": LISTED["parameters"][:2]}, "other tensors than this model's"),
        ({"parameters": [["a.bias", "F16", [3]], *LISTED["parameters"][1:]]}, "other tensors than this model's"),
        ({"optimizer": [["z", "F32", [1]], ["a", "F32", [1]]]}, "order of their names"),
        ({"optimizer": [["a", "F32", [1]], ["a", "F32", [1]]]}, "order of their names"),
        ({"optimizer": [["a", "F32", [2**39, 2**39]]]}, "more bytes of the optimizer"),
        ({"optimizer": [[name, "F32", [1]] for name in HUGE]}, "more tensors"),
        ({"optimizer": [["a", "object", [1]]]}, "malformed header, at 'optimizer.0"),
        ({"optimizer": [["a", "F32", [-1]]]}, "malformed header, at 'optimizer.0"),
        ({"optimizer": [["a", "F32", [1.0]]]}, "malformed header, at 'optimizer.0"),
        ({"optimizer": [["a", "F32", [1] * 9]]}, "malformed header, at 'optimizer.0"),
        ({"optimizer": [["a" * 201, "F32", [1]]]}, "malformed header, at 'optimizer.0"),
        ({"optimizer": [7]}, "malformed header, at 'optimizer.0"),
        ({"optimizer": {}}, "at 'optimizer'"),
        ({"optimizer": []}, "leaves for 5 chunks"),
    ],
    ids=str,
)
def test_a_manifest_of_another_state_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StateTree.parse(header(**fields), RUN, SHAPES)


def test_only_one_writing_of_a_header_is_accepted() -> None:
    end = 4 + int.from_bytes(MANIFEST[:4], "little")
    text = json.dumps(LISTED).encode()  # with spaces
    with pytest.raises(ValueError, match="written in another way"):
        StateTree.parse(len(text).to_bytes(4, "little") + text + MANIFEST[end:], RUN, SHAPES)
