"""Memory and work of one forward and backward pass, traced through torch itself on tensors without content.

Nothing is computed and nothing of the tensors' size allocated, so that the answer is for any model, in about a second.
The kernels are a CPU's; on a GPU attention may take a little less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module], Tensor]


def traced_bytes(make: Make, loss: Loss, itemsize: int) -> int:
    """The most that a pass holds at one moment beside parameters: activations, and gradients as far as they are there.

    make, loss: of the model, and of a batch made there. itemsize: bytes of the products' dtype.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, tracker = make(), MemTracker()
        tracker.track_external(model)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=itemsize < 4):
                value = loss(model)
            value.backward()
    held = sum(place["Total"] for place in tracker.get_tracker_snapshot("peak").values())
    return int(held) - sum(parameter.nbytes for parameter in model.parameters())


def traced_flops(make: Make, loss: Loss) -> int:
    """The floating-point operations of a pass: those of its products, twice of what is multiplied."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss(make()).backward()
    return int(counter.get_total_flops())
