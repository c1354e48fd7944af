"""Codec, optimizer and whole rounds on this processor and as if on others: vector widths, threads, flushed denormals
and the implementation change no byte.

A change that is meant to alter the arithmetic (codec, order of sums, optimizer) writes the history anew:
`cd tests && python -m swarm.golden_history > swarm/golden_history.txt`. Peers of before and after it must
not meet, so that the run's identity has to change too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from optim.settings import Settings, normal
from swarm.golden_history import history
from testbed.spawned import spawned

from tt_cli.kernel_choice import Implementation
from tt_cli.optim.kernels import PortableLamb
from tt_cli.optim.lamb import Lamb8bit
from tt_cli.optim.lamb_numba import NumbaLamb
from tt_cli.swarm.compression import linear8
from tt_cli.swarm.compression.linear8 import PortableLinear8, add_decoded, decode_into, encode
from tt_cli.swarm.compression.linear8_numba import NumbaLinear8

pytestmark = pytest.mark.slow

PROCESSORS = {"default": "generic", "avx2": "haswell"}  # torch's word for one → LLVM's


@contextmanager
def running(threads: int, flush: bool) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


def encoded(kernels: PortableLinear8) -> str:
    """A hash of what is encoded, decoded and summed, of numbers of all scales, and of what is refused."""
    random, digest = np.random.default_rng(5), hashlib.sha256()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear8, "implementation", lambda: Implementation(kernels, "", ""))
        for elements in (100_003, 300_001):
            values = random.standard_t(2, elements) * 10.0 ** random.uniform(-44, 30, elements).round()
            values[: elements // 2] = random.standard_normal(elements // 2)
            values[1000:2000] *= 1e-41
            values[::5000] = np.arange(len(values[::5000])) - 7.5
            buffer = encode(torch.from_numpy(values.astype(np.float32)))
            total, decoded = torch.ones(elements), torch.empty(elements)
            for weight in (1.0, 0.3):
                add_decoded(buffer, total, weight)
            decode_into(buffer, decoded)
            digest.update(buffer + decoded.numpy().tobytes() + total.numpy().tobytes())
            for spoiled in (float("nan"), float("inf")):
                values[-1 - elements // 3] = spoiled
                with pytest.raises(ValueError):
                    encode(torch.from_numpy(values.astype(np.float32)))
    return digest.hexdigest()


def optimised(kernels: PortableLamb) -> str:
    """A hash of parameters, moments and reports after four steps."""
    shapes = {"a.weight": (700, 500), "b.weight": (333, 3), "b.bias": (333,)}
    parameters = {name: normal(index, *shape, scale=0.02) for index, (name, shape) in enumerate(shapes.items())}
    optimizer, digest = Lamb8bit(parameters, Settings(), kernels), hashlib.sha256()
    for step in range(4):
        gradients = {name: normal(step + 2, *shape, scale=0.02) for name, shape in shapes.items()}
        digest.update(repr(optimizer.step(gradients, 0.01 / (step + 1))).encode())
    for name, tensor in sorted({**parameters, **optimizer.state_dict()}.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def computed_here() -> tuple[str, set[str], set[str], list[str]]:
    """torch's word for this processor; hashes of codec, optimizer in all their ways, and a tiny run's steps."""
    codec, optimizer = set(), set()
    for threads, flush in ((1, False), (2, False), (1, True)):
        with running(threads, flush):
            codec |= {encoded(PortableLinear8()), encoded(NumbaLinear8())}
    for threads in (1, 2):
        with running(threads, False):
            optimizer |= {optimised(PortableLamb()), optimised(NumbaLamb())}
    return torch.backends.cpu.get_cpu_capability(), codec, optimizer, history()


def test_every_processor_computes_the_same_bytes_as_yesterday() -> None:
    with ExitStack() as stack:
        answers = []
        for width, target in PROCESSORS.items():
            environment = {"ATEN_CPU_CAPABILITY": width, "NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": ""}
            environment["OMP_NUM_THREADS"] = "1"
            answers.append(stack.enter_context(spawned(environment))(computed_here))
        _, codec, optimizer, steps = computed_here()
        assert len(codec) == len(optimizer) == 1
        assert steps == (Path(__file__).parent / "golden_history.txt").read_text().split()
        for width, answer in zip(PROCESSORS, answers, strict=True):
            assert answer.result(200) == (width.upper(), codec, optimizer, steps)
