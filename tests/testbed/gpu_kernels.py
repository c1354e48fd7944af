"""Inductor's kernels for GPUs that are not here: its Triton code, compiled by Triton and ptxas.

Import it after the stand-in GPU of gpu.py, on which it builds. Needs the package `triton`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._inductor.runtime import triton_helpers
from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from testbed import gpu

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''\n(.*?)''', device_str", re.S)


class _Driver:
    """Triton's driver of the stand-in."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 89, 32)

    def get_current_device(self) -> int:
        return 0


driver.set_active(_Driver())
triton_helpers.set_driver_to_gpu = lambda: None


def code_of(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """What Inductor writes for ``function`` of these fake tensors: Python with kernels in Triton's language."""
    with gpu.lowered(function, args, kwargs) as graph:
        code = graph.codegen()[0]
    return str(getattr(code, "value", code))


def cubins(code: str, capabilities: tuple[int, ...], folder: Path) -> dict[tuple[str, int], int]:
    """(kernel, capability) → bytes of machine code, of all kernels in Inductor's code. Raises what Triton raises."""
    sizes = {}
    for kernel_name, source in KERNEL.findall(code):
        path = folder / f"{kernel_name}.py"
        path.write_text(source.replace("\\\\", "\\"))
        spec = importlib.util.spec_from_file_location(kernel_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, kernel_name)
        config = kernel.configs[0]
        fixed, names = {**kernel.triton_meta["constants"], **config.kwargs}, kernel.fn.arg_names
        types = {name: "constexpr" if name in fixed else kernel.triton_meta["signature"][name] for name in names}
        constants = {(names.index(name),): value for name, value in fixed.items()}
        tree = ASTSource(fn=kernel.fn, signature=types, constexprs=constants)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        for capability in capabilities:
            made = compile_for(tree, target=GPUTarget("cuda", capability, 32), options=options)
            sizes[kernel_name, capability] = len(made.asm["cubin"])
    return sizes
