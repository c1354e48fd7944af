"""Memory and work of one forward and backward pass, traced through torch itself on tensors without content.

Nothing is computed and nothing of the tensors' size allocated, so that the answer is for any model, in about a second.
The kernels are a CPU's; on a GPU attention may take a little less.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module], Tensor]
# One for all: a CUDA build of torch, where no GPU is, crashes once the thread with the first fake tensors has ended.
_ASIDE = ThreadPoolExecutor(1)


def traced_bytes(make: Make, loss: Loss, itemsize: int) -> int:
    """The most that a pass holds at one moment beside parameters: activations, and gradients as far as they are there.

    make, loss: of the model, and of a batch. itemsize: bytes of the products' dtype.
    """

    def trace() -> int:
        with torch.device("meta"):  # which all makers of models know of
            whole = _Pass(make(), loss)
        own = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        with FakeTensorMode():  # as if in memory
            tensors: dict[str, Tensor] = {
                name: nn.Parameter(torch.empty(t.shape, dtype=t.dtype), t.requires_grad) for name, t in own.items()
            }
            with _HeldBytes(tensors) as held:
                functional_call(whole, tensors, (itemsize,))
        return held.most

    return _ASIDE.submit(trace).result()  # who asks may be in autocast, which holds casts until its outermost end


def traced_flops(make: Make, loss: Loss) -> int:
    """The floating-point operations of a pass: those of its products, twice of what is multiplied."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss(make()).backward()
    return int(counter.get_total_flops())


class _Pass(nn.Module):
    """A forward pass in a precision, and the backward pass, in which layers may be computed again."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, itemsize: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=itemsize < 4):
            value = self._loss(self.model)
        value.backward()


class _HeldBytes(TorchDispatchMode):
    """Bytes of the tensors that are made beside a model's own, while they are held: the most at one moment."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in own.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.most = max(self.most, self._now)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        # The sum of two gradients of one tensor, as of tied embeddings. Autograd adds to the first unless it is a view,
        # but makes a third one where somebody watches: counted from the next operation on, when the first is gone.
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or args[0]._is_view():
            self.most = max(self.most, self._now)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._storages:
            self._storages.add(key)
            self._now += storage.nbytes()
            weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._now -= size
