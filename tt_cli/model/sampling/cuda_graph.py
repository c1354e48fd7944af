"""One launch instead of thousands: a function of fixed shapes as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tt_cli.errors import first_line, is_out_of_memory

_WARM_UPS = 2


def captured(function: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], Tensor] | None, str]:
    """Capture ``function`` as one launch on a GPU, or None where there is none; and say how a step runs.

    ``function`` reads and writes tensors that stay where they are, takes nothing from the GPU to the host, and may be
    run some times more. What the graph returns is overwritten by its next run. Raises where memory runs out.
    """
    if device.type != "cuda":
        return None, "op by op"
    try:
        with torch.cuda.device(device):
            ahead = torch.cuda.Stream(device)
            ahead.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(ahead):  # libraries choose their kernels and take their workspaces now
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream(device).wait_stream(ahead)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = function()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None, f"op by op, for the step could not be captured as a CUDA graph ({first_line(error)})"

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay, "one CUDA graph for each code"
