"""Stand-in GPU that computes: tensors that say "cuda", "mps" or "xpu" and hold their numbers on the CPU.

Import it before torch, in a process of its own, as `testbed.gpu`, whose answers of `torch.cuda` it uses; the variable
TT_STAND_IN_GPU names the device where it is not "cuda". Inside a `ComputingGpu` tensors are made there, or moved there,
by the code that a peer runs. It refuses operators on mixed devices, and float64 on MPS, counts copies and waits, and
can run out of memory at any operator.
"""

from __future__ import annotations

import math
import os
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from testbed import gpu  # before torch

# isort: split
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tt_cli.peer.device import choose_device
from tt_cli.peer.memory_budget import check_room, choose_activation_budget
from tt_cli.peer.trained_state import TrainedState
from tt_cli.peer.trainer import MicroStep
from tt_cli.run import RunConfig
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.shared_state import LockedState
from tt_cli.task import task_of

KIND = os.environ.get("TT_STAND_IN_GPU", "cuda")
HOST = torch.device("cpu")
MIXES = frozenset(["index", "index_put_", "_index_put_impl_"])  # they take the host's indices


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `values` has its numbers, and shares memory as the device's tensors would."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> DeviceTensor:
        place = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device, **place)
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says so of its own, wrongly
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse it: the device's tensors are for use inside a `ComputingGpu`."""
        gpu = ComputingGpu.active
        if gpu is None:
            raise RuntimeError(f"{func} on a stand-in GPU that is gone")
        return gpu.run(func, args, kwargs or {})


class ComputingGpu(TorchDispatchMode):
    """The device while it is entered. waits: of the host for it, by operator. copies: by direction. operators: so far.

    fail_at: the number of the operator at which memory runs out, once. live: the device's tensors that are there.
    """

    active: ComputingGpu | None = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.operators, self.fail_at = 0, 0
        self.live: weakref.WeakSet[DeviceTensor] = weakref.WeakSet()

    def __enter__(self) -> ComputingGpu:
        ComputingGpu.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        ComputingGpu.active = None

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it on the device or on the host."""
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator's result: on the device where its tensors, or the device that it names, are."""
        name, given = func._schema.name.partition("::")[2], [x for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
        there = {id(x.values): x for x in given if isinstance(x, DeviceTensor)}
        wanted = kwargs.get("device")
        target = None if wanted is None else torch.device(wanted)
        if not there and not _is_device(target):
            return func(*args, **kwargs)
        if name not in gpu.VIEWS:
            self.operators += 1
            if self.operators == self.fail_at:
                raise torch.OutOfMemoryError(f"{KIND.upper()} out of memory. Tried to allocate 2.00 MiB")
        if name in gpu.SYNCHRONISING:
            self.waits[name] += 1
        crossing = self._crosses(name, args, target)
        device = next(iter(there.values())).device if there else target
        if crossing:
            self.copies[crossing] += 1
            if crossing == "to the host":
                self.waits[name] += 1
        else:
            _refuse_mixed(func, given)
        plain = {key: _values(value) for key, value in kwargs.items() if key != "device"}
        if "device" in kwargs:
            plain["device"] = HOST
        out = KERNELS.get(str(func), func)(*tree_map(_values, args), **plain)
        if name == "_to_copy":
            device = target or device
            out = out.clone() if any(out is x.values for x in there.values()) else out
        if crossing == "to the host" or not _is_device(device):
            return args[0] if name == "copy_" else out
        return tree_map(lambda x: self._placed(x, there, device), out)

    def counted(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Do a piece of work: its result (`out`), its waits and its copies."""
        self.waits.clear()
        self.copies.clear()
        out = work()
        return {"out": out, "waits": sum(self.waits.values()), "copies": dict(self.copies)}

    def _crosses(self, name: str, args: Any, target: torch.device | None) -> str:
        """Tell in which direction a copy goes between device and host."""
        if name == "_to_copy":
            now = isinstance(args[0], DeviceTensor)
            then = now if target is None else _is_device(target)
        elif name == "copy_":
            now, then = isinstance(args[1], DeviceTensor), isinstance(args[0], DeviceTensor)
        else:
            return ""
        return "" if now == then else "to the host" if now else "to the device"

    def _placed(self, x: Any, there: dict[int, DeviceTensor], device: Any) -> Any:
        if not _is_tensor(x) or isinstance(x, DeviceTensor):
            return x
        if id(x) in there:
            return there[id(x)]
        if KIND == "mps" and x.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype: MPS has none")
        placed = DeviceTensor(x, device if device.index is not None else torch.device(device.type, 0))
        self.live.add(placed)
        return placed


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_device(device: torch.device | None) -> bool:
    return device is not None and device.type == KIND


def _values(x: Any) -> Any:
    return x.values if isinstance(x, DeviceTensor) else x


def _refuse_mixed(func: Any, given: list[Tensor]) -> None:
    devices = {x.device for x in given if x.dim() or isinstance(x, DeviceTensor)}
    if len(devices) > 1 and not (func._schema.name.partition("::")[2] in MIXES and len(devices - {HOST}) == 1):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} in {func}")


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The memory-efficient kernel: result, log-sum-exp, seed and offset."""
    scores = _scores(q, k, causal, scale) + (0 if bias is None else bias.float())
    nothing = torch.zeros((), dtype=torch.int64)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1), nothing, nothing


def _attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, norm: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k and v, from the result and log-sum-exp given (Dao et al. 2022, algorithm 4)."""
    chances = (_scores(q, k, causal, scale) + (0 if bias is None else bias.float()) - norm[..., None]).exp()
    wide, factor = grad.float(), scale or 1 / math.sqrt(q.shape[-1])
    rows = (wide * out.float()).sum(-1, keepdim=True)
    into = chances * (wide @ v.float().transpose(-1, -2) - rows) * factor
    found = into @ k.float(), into.transpose(-1, -2) @ q.float(), chances.transpose(-1, -2) @ wide
    return *(x.to(q.dtype) for x in found), None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """FlashAttention: the same, with more beside it."""
    out, norm, seed, offset = _attention(q, k, v, None, True, dropout, causal, scale=scale)
    return out, norm, seed, seed, q.shape[2], k.shape[2], seed, offset, torch.empty(0)


def _flash_gradient(*given: Any, scale: float | None = None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v from the same."""
    *first, _, _, _, _, dropout, causal, seed, offset = given
    grad, q, k, v, out, norm = first
    return _attention_gradient(grad, q, k, v, None, out, norm, seed, offset, dropout, [], causal, scale=scale)[:3]


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype) @ b.to(dtype)


def _wide_sum(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(total + _wide_product(a, b, dtype))


KERNELS: dict[str, Callable[..., Any]] = {  # of CUDA alone, on the CPU; and what a wrapped tensor cannot put off
    "aten._conj.default": torch.conj_physical,
    "aten._scaled_dot_product_efficient_attention.default": _attention,
    "aten._scaled_dot_product_efficient_attention_backward.default": _attention_gradient,
    "aten._scaled_dot_product_flash_attention.default": _flash,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_gradient,
    "aten.mm.dtype": _wide_product,
    "aten.addmm.dtype_out": _wide_sum,
}


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, **ways: Any) -> Tensor:
    """Attention; by products on MPS and XPU, for whose kernels a CPU build of torch cannot be asked."""
    if q.device.type in ("mps", "xpu"):
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, **ways)[0]
    return torch._C._nn.scaled_dot_product_attention(q, k, v, **ways)


class GpuPeer:
    """A trainer's way of one micro-batch on the device, up to the accumulator; it is in no swarm.

    Make it inside a `ComputingGpu`. step, sums, shared: as a trainer has them. batch: four examples of the run.
    """

    def __init__(self, run: RunConfig, device: str):
        task = task_of(run)
        self.model = task.new_model()
        self.shared = TrainedState(run, self.model, None)
        self.state, self.sums = LockedState(self.shared), Accumulator(list(self.shared.shapes()))
        self.about, self.epoch = types.SimpleNamespace(micro_batch=0), 0
        self.device = choose_device(device, task, lambda event: None)
        self.room = check_room(task, self.device, None, None)
        self.model.to(self.device.torch_device)
        self.model.activation_budget = choose_activation_budget(task, self.device, self.room, lambda event: None)
        collaboration: Any = self
        self.micro_step = MicroStep(task, self.model, self.device, collaboration, self.shared)
        self.batch = next(task.examples(0).batches(4))

    def step(self, *counted: Any) -> bool:
        """Count in, as `Collaboration.step` does."""
        return self.sums.add(*counted)


def micro_batch(run: RunConfig) -> dict[str, Any]:
    """Count the host's waits and copies of a trainer's second micro-batch."""
    with ComputingGpu() as gpu:
        peer = GpuPeer(run, KIND)
        peer.micro_step(peer.batch)
        return gpu.counted(lambda: peer.micro_step(peer.batch))


def _answer_of_memory() -> None:
    """`torch.cuda`'s answers on memory: 11 of 12 GiB are free, and a bound is taken."""
    answers: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda device=None: (11 << 30, 12 << 30),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1 << 30,
        "set_per_process_memory_fraction": lambda share, device=None: None,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda._lazy_init = torch.xpu._lazy_init = lambda: None
    torch.nn.functional.scaled_dot_product_attention = _plain_attention
    torch.__future__.set_overwrite_module_params_on_conversion(True)


_answer_of_memory()
