"""Stand-in GPU: CUDA paths on a CPU build of torch, on fake tensors (devices, dtypes, memory, operators; no values).

Import it before torch, in a process of its own: it loads `cuda_stub.cpp` (built with g++ once for each installed
torch) and lets `torch.cuda` and `torch.compile` answer like an RTX 4090's. Then, inside `fake_gpu()`, a model on "cuda"
runs its real code in seconds, and an `OperatorCounter` tells what the GPU would have been asked to do.

How launches are counted:
- an operator is one kernel; views and allocations are none; `LAUNCHES` names operators that are more;
- a compiled function is what Inductor's scheduler makes of it for a GPU, with the bytes that each kernel accesses;
- bytes are each input read and each output written once; what an expanded tensor repeats is read once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SOURCE = Path(__file__).with_name("cuda_stub.cpp")


def built_stub() -> Path:
    """The stub as a library, from the cache or built now."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder = Path(spec.origin).parent
    if (torch_folder / "lib/libtorch_cuda.so").exists():
        raise RuntimeError("the stand-in GPU needs a CPU build of torch, this one has CUDA of its own")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tt-testbed"
    built_from = SOURCE.read_bytes() + bytes(torch_folder)  # which the library names, to find torch's
    name = f"cuda_stub-{metadata.version('torch')}-{hashlib.sha256(built_from).hexdigest()[:16]}.so"
    if not (cache / name).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            include = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
            libraries = [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
            made = str(Path(folder) / name)
            command = ["g++", "-std=c++20", "-shared", "-fPIC", *include, str(SOURCE), "-o", made, *libraries]
            subprocess.run(command, check=True)
            os.replace(made, cache / name)
    return cache / name


if "torch" in sys.modules:
    raise RuntimeError("the stand-in GPU must be imported before torch")
ctypes.CDLL(str(built_stub()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
from torch._inductor import scheduler as inductor_scheduler  # noqa: E402
from torch._inductor.debug import DebugContext  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from tt_cli.model.dalle import Dalle  # noqa: E402
from tt_cli.model.dalle_config import DalleConfig  # noqa: E402
from tt_cli.model.sampling.code_choice import Sampling  # noqa: E402
from tt_cli.model.sampling.generation import StepDecoder  # noqa: E402
from tt_cli.model.vqgan import PUBLISHED, Vqgan  # noqa: E402
from tt_cli.run import RunConfig  # noqa: E402

VIEWS = frozenset(
    ["view", "_unsafe_view", "as_strided", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"]
    + ["select", "split", "split_with_sizes", "detach", "alias", "unbind", "view_as_complex", "view_as_real", "unfold"]
    + ["unflatten", "chunk", "reshape", "_reshape_alias", "lift_fresh", "empty", "empty_like", "new_empty", "resize_"]
    + ["empty_strided", "new_empty_strided", "empty_permuted", "set_", "_conj", "is_pinned", "device", "sym_size"]
)
FILLS = frozenset(
    [
        "zeros",
        "zeros_like",
        "new_zeros",
        "zero_",
        "fill_",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "new_full",
        "arange",
    ]
)
SYNCHRONISING = frozenset(["_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim"])
LAUNCHES = {  # kernels of one operator, where they are more than one (torch 2.13's CUDA sources)
    "native_layer_norm_backward": 2,  # the input's gradient; the weight's and the bias's
    "_scaled_dot_product_flash_attention_backward": 3,  # rows of dO * O; dQ in float32, dK, dV; dQ in half precision
    "_scaled_dot_product_efficient_attention_backward": 2,  # rows of dO * O; dQ, dK, dV
}
_BLOCK = 512  # bytes that the allocator rounds up to


class Kernel(NamedTuple):
    """What one operator, or one kernel of a compiled function, asks of the GPU."""

    name: str
    launches: int
    bytes: int
    flops: int


class OperatorCounter(TorchDispatchMode):
    """Kernels, waits of the host for the GPU, copies between both and memory of what runs inside.

    Enter it inside `fake_gpu()`. live, peak: bytes of CUDA storages, `track`ed ones included; kernels of compiled
    functions allocate only their results.
    """

    active: OperatorCounter | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.live = self.peak = 0
        self.paused = False
        self._seen: set[int] = set()

    def __enter__(self) -> OperatorCounter:
        OperatorCounter.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        OperatorCounter.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator."""
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in SYNCHRONISING and not self.paused:
            self.waits[name] += 1
        out = func(*args, **kwargs)
        if self.paused:
            return out
        ins, outs = list({id(tensor): tensor for tensor in tensors((args, kwargs))}.values()), tensors(out)
        for tensor in outs:
            self.track(tensor)
        devices = {tensor.device.type for tensor in ins + outs if tensor.dim() or tensor.device.type == "cuda"}
        if "cuda" not in devices or name in VIEWS:
            return out
        if name in ("_to_copy", "copy_") and "cpu" in devices:
            self.copies[f"{ins[-1].device.type} to {outs[0].device.type}"] += 1
        if name in ("mm", "addmm", "bmm"):
            flops = 2 * outs[0].numel() * args[name == "addmm"].shape[-1]
        else:
            counted = flop_registry.get(func._overloadpacket)
            flops = counted(*args, **kwargs, out_val=out) if counted else 0
        moved = sum(map(touched, outs if name in FILLS else ins[-2:] if name == "copy_" else ins + outs))
        if name == "native_layer_norm_backward":
            moved += touched(args[0]) + touched(args[1])
        elif name == "_scaled_dot_product_flash_attention_backward":
            moved += touched(args[0]) + touched(args[4]) + 2 * 4 * args[1].numel()
        elif name == "_scaled_dot_product_efficient_attention_backward":
            moved += touched(args[0]) + touched(args[5])
        self.kernels.append(Kernel(name, LAUNCHES.get(name, 1), moved, flops))
        return out

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        if tensor.device.type != "cuda" or key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self._seen.discard(key)
            self.live -= size

        weakref.finalize(storage, freed)

    @property
    def launches(self) -> int:
        """Kernels launched."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes read and written in the GPU's memory."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """Floating-point operations of products of matrices."""
        return sum(kernel.flops for kernel in self.kernels)

    def seconds(self, bandwidth: float, peak: float) -> float:
        """Roofline: each kernel takes its bytes over ``bandwidth`` (B/s) or its FLOPs over ``peak``, the longer one."""
        return sum(max(kernel.bytes / bandwidth, kernel.flops / peak) for kernel in self.kernels)

    def table(self) -> dict[str, dict[str, float]]:
        """Launches, GB and TFLOP by kernel, most bytes first."""
        rows: dict[str, list[int]] = {}
        for kernel in self.kernels:
            row = rows.setdefault(kernel.name, [0, 0, 0])
            row[:] = (old + new for old, new in zip(row, kernel[1:], strict=True))
        ordered = sorted(rows.items(), key=lambda item: -item[1][1])
        return {
            name: {"launches": n, "gb": round(b / 1e9, 2), "tflop": round(f / 1e12, 3)} for name, (n, b, f) in ordered
        }


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def touched(tensor: Tensor) -> int:
    """Bytes of a tensor, each one once where a dimension is expanded."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return functools.reduce(int.__mul__, sizes, 1) * tensor.element_size()


@contextmanager
def lowered(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[GraphLowering]:
    """Inductor's graph of ``function`` for a GPU, while it can be asked for kernels or code."""
    leaves, form = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def flat(*values: Tensor) -> Any:
        remaining = iter(values)
        args, kwargs = tree_unflatten([next(remaining) if isinstance(x, Tensor) else x for x in leaves], form)
        out = tree_leaves(function(*args, **kwargs))
        return [x for x in out if not any(x is value for value in values)]  # what was changed in place is no result

    torch.compiler._is_compiling_flag = True
    try:
        traced = make_fx(torch.func.functionalize(flat, remove="mutations"), select_decomp_table())(*given)
    finally:
        torch.compiler._is_compiling_flag = False
    graph = GraphLowering(traced, example_inputs=given, shape_env=None)
    with V.set_debug_handler(DebugContext()), V.set_graph_handler(graph), V.set_fake_mode(_MODE):
        graph.run(*given)
        yield graph


def scheduled(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Kernel]:
    """The kernels that Inductor would make of ``function`` for a GPU, each with the bytes that it accesses."""
    with lowered(function, args, kwargs) as graph:
        graph._update_scheduler()
        launched = [n for n in graph.scheduler.nodes if not isinstance(n, inductor_scheduler.NopKernelSchedulerNode)]
        return [Kernel(function.__name__, 1, node.get_read_write_buffers_sizes(), 0) for node in launched]


CALLS: dict[str, tuple[Callable[..., Any], Any, Any]] = {}  # compiled functions by name, with their first call


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of the stand-in: run ``function`` as it is, count the kernels that Inductor would launch."""
    kernels: dict[Any, list[Kernel]] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        counter = OperatorCounter.active
        if counter is None or counter.paused:
            return function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        key = str([(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves])
        counter.paused = True
        try:
            if key not in kernels:
                kernels[key] = scheduled(function, args, kwargs)
                CALLS.setdefault(function.__name__, (function, args, kwargs))
            out = function(*args, **kwargs)
        finally:
            counter.paused = False
        counter.kernels += kernels[key]
        for tensor in tensors(out):
            counter.track(tensor)
        return out

    return run


_MODE = FakeTensorMode()  # one for all, for the package keeps tables of masks and angles between calls


def fake_gpu() -> FakeTensorMode:
    """A context: tensors made inside are fake; "cuda" has two devices. A value that the host asks for raises."""
    return _MODE


DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def fake_dalle(run: RunConfig, device: str = "cuda") -> Dalle:
    """The run's decoder of fake weights; call it inside `fake_gpu()`."""
    with torch.device(device):
        return Dalle(DalleConfig.from_run(run), seed=None)


def training_step(
    run: RunConfig, batch: int, precision: str, budget: float = 0, *, device: str = "cuda", times: int = 1
) -> OperatorCounter:
    """Count the forward and backward pass of a run's decoder, the last of ``times``; its gradients must be as torch's.

    batch: examples; budget: bytes of activations to keep. Weights and gradients count as memory.
    """
    dtype = DTYPES[precision]
    with fake_gpu():
        dalle = fake_dalle(run, device)
        dalle.activation_budget = int(budget)
        shapes = (dalle.config.text_length, dalle.config.image_positions)
        text, image = (torch.zeros(batch, size, dtype=torch.int64, device=device) for size in shapes)
        for _ in range(times):
            dalle.zero_grad()
            counter = OperatorCounter()
            for parameter in dalle.parameters():
                counter.track(parameter)
            with counter:
                with torch.autocast("cuda", dtype, enabled=dtype is not None):
                    total = dalle.loss(text, image).total
                total.backward()
        for name, parameter in dalle.named_parameters():
            gradient = parameter.grad
            assert gradient is not None and gradient.is_contiguous(), name
            assert (gradient.device, gradient.dtype) == (parameter.device, torch.float32), name
    return counter


def drawing_step(run: RunConfig, prompts: int, samples: int, precision: str) -> OperatorCounter:
    """Count one code of every picture: the decoder's step and the choice of the next code."""
    with fake_gpu(), torch.no_grad():
        decoder = StepDecoder(fake_dalle(run), prompts, samples, DTYPES[precision] or torch.float32)
        logits = decoder.prefill(
            torch.zeros(prompts, decoder.dalle.config.text_length, dtype=torch.int64, device="cuda")
        )
        noise = torch.zeros(prompts * samples, dtype=torch.float64, device="cuda")
        sampling = Sampling(temperature=0.9, top_k=64, top_p=0.9)
        code = sampling.choose(logits, noise)
        with OperatorCounter() as counter:
            sampling.choose(decoder.step(code, 5), noise)
    return counter


def pictures(count: int) -> OperatorCounter:
    """Count the VQGAN's way from codes to pictures and back to what it quantises."""
    with fake_gpu(), torch.no_grad():
        with torch.device("cuda"):
            vqgan = Vqgan(PUBLISHED)
        codes = torch.zeros(count, 1024, dtype=torch.int64, device="cuda")
        vqgan.decode(codes)
        with OperatorCounter() as counter:
            vqgan.encode(vqgan.decode(codes).float())
    return counter


def known_operators() -> OperatorCounter:
    """Count some whose bytes and FLOPs are known by hand."""
    with fake_gpu(), OperatorCounter() as counter:
        a, b = torch.ones(4, 8, device="cuda"), torch.ones(8, 16, device="cuda")
        (a @ b).t().add_(torch.ones(1, 4, device="cuda").expand(16, 4))
        a.cpu()
    return counter


class _Nowhere:
    def __init__(self, *given: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _answer_like_a_gpu() -> None:
    """`torch.cuda` and Inductor's view of the device: an RTX 4090, compute capability 8.9."""
    properties = types.SimpleNamespace(
        name="stand-in", type="cuda", index=0, major=8, minor=9, total_memory=24 << 30, multi_processor_count=128,
        warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=1536, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=101376, L2_cache_size=72 << 20, gcnArchName="",
        uuid="0",
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 9),
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.device = _Nowhere
    for holder in (CudaInterface, CudaInterface.Worker):
        holder.get_device_properties = staticmethod(answers["get_device_properties"])
        holder.current_device = staticmethod(answers["current_device"])
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 89)
    CudaInterface.is_triton_capable = staticmethod(lambda device=None: True)
    CudaInterface.raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    setattr(inductor_scheduler, "has_triton", lambda *given: True)  # noqa: B010
    torch.compile = compiled


_answer_like_a_gpu()


def print_and_leave(told: Any) -> NoReturn:
    """Print it as JSON and end the process at once, as `tt`'s workers do.

    In Python's own way out a thread of autograd that still lets go of the device's tensors aborts the process.
    """
    print(json.dumps(told), flush=True)
    os._exit(0)
