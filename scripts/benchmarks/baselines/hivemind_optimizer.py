#!/usr/bin/env python
"""One peer of stock `hivemind.Optimizer`, set as for "Training Transformers Together", with a simulated device.

- Settings are those that the paper's code published with it: the optimizer offloaded to the host and stepping in the
  background, gradient buffers reused, parameters averaged after every step, and both travel in 8 bits for tensors above
  2^16 elements and in fp16 below. Time-outs that do not work with short steps are arguments.
- Gradients are averaged in the background too, as the paper's section 3.1 describes it; the published code had that
  switched off (--wait-for-gradients). In client mode it is off: it hangs.
- The optimizer is the paper's 8-bit LAMB in torch and today's bitsandbytes, in chunks and in the gradients' memory.
- Parameters have the shapes of a run's model, gradients come from a seed, and a micro-batch takes a given time in which
  the host's cores are free.

It prints one JSON object a line: "listening" (addresses), "started", "step" (epoch, and the digest of the parameters
with --digests), "loop" after every micro-batch (seconds since the loop began, seconds that the device was busy,
seconds spent in `step`, micro-batches), "message" (what hivemind says of its rounds), "done" when --steps are made.
It ends when standard input says "leave" or ends.

Examples (python -m scripts.benchmarks.baselines.hivemind_optimizer …):
  --part 0.01 --steps 3 --micro-batch 16 --target-batch-size 64
  --initial-peer /ip4/…/p2p/… --micro-batch-seconds 2 --seed 1
  --dht-only
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import torch
from hivemind import DHT, Optimizer
from hivemind.compression import BlockwiseQuantization, CompressionBase, Float16Compression, SizeAdaptiveCompression
from hivemind.optim.grad_averager import GradientAverager
from testbed.launched import Commands, peer_arguments, tell
from testbed.shapes import Device, Gradients, count, first_parameters, model_shapes
from torch import Tensor

from tt_cli.optim.schedule import learning_rate
from tt_cli.run import RunConfig, load_run
from tt_cli.run.sections import OptimizerPart
from tt_cli.supervisor.reporter import die_with_parent, raise_file_limit

RUN_ID = "baseline"
CHUNK = 2**24  # elements whose moments are decoded at once, as in the paper's optimizer


class PaperLamb(torch.optim.Optimizer):
    """The paper's LAMB with 8-bit moments for large tensors. It uses the gradients' memory for the update."""

    def __init__(self, params: Iterable[dict[str, Any]], settings: OptimizerPart, rate: float):
        super().__init__(params, {"lr": rate, "weight_decay": settings.weight_decay})
        self.settings = settings
        self.maps = (bnb.create_dynamic_map(signed=True), bnb.create_dynamic_map(signed=False))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self._fresh(p)

    def _fresh(self, p: Tensor) -> dict[str, Tensor]:
        if p.numel() < self.settings.min_8bit_size:
            return {"moment1": torch.zeros_like(p), "moment2": torch.zeros_like(p)}
        blocks = -(-p.numel() // self.settings.block_size)
        state = {}
        for number, codebook in enumerate(self.maps, 1):
            zero = int((codebook == 0).nonzero()[0])
            state[f"moment{number}"] = torch.full(p.shape, zero, dtype=torch.uint8)
            state[f"absmax{number}"] = torch.zeros(blocks)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but codes stay codes: torch would make them floats like the parameters."""
        wanted = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(wanted):
            for key, tensor in self.state[p].items():
                tensor.copy_(state_dict["state"][index][key])
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        for group in self.param_groups:
            for p in group["params"]:
                update = self._update(p, self.state[p], group["weight_decay"])
                p_norm, u_norm = p.norm().clamp(0, self.settings.trust_clamp), update.norm()
                trust = float(p_norm / u_norm) if p_norm > 0 and u_norm > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * trust)

    def _update(self, p: Tensor, state: dict[str, Tensor], decay: float) -> Tensor:
        s, gradient = self.settings, p.grad
        assert gradient is not None
        flat_p, flat_g = p.view(-1), gradient.view(-1)
        for start in range(0, p.numel(), CHUNK):
            chunk = slice(start, start + CHUNK)
            g = flat_g[chunk]
            m, v = (self._read(state, number, chunk) for number in (1, 2))
            m.mul_(s.beta1).add_(g, alpha=1 - s.beta1)
            v.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
            self._write(state, 1, chunk, m)
            self._write(state, 2, chunk, v)
            torch.div(m, v.sqrt().add_(s.eps), out=g)
            if decay:
                g.add_(flat_p[chunk], alpha=decay)
        return gradient

    def _read(self, state: dict[str, Tensor], number: int, chunk: slice) -> Tensor:
        codes = state[f"moment{number}"].view(-1)[chunk]
        if codes.dtype != torch.uint8:
            return codes
        return bnb.dequantize_blockwise(
            codes,
            absmax=state[f"absmax{number}"][self._blocks(chunk)],
            code=self.maps[number - 1],
            blocksize=self.settings.block_size,
        )

    def _write(self, state: dict[str, Tensor], number: int, chunk: slice, moment: Tensor) -> None:
        codes = state[f"moment{number}"].view(-1)[chunk]
        if codes.dtype == torch.uint8:
            bnb.quantize_blockwise(
                moment,
                code=self.maps[number - 1],
                absmax=state[f"absmax{number}"][self._blocks(chunk)],
                out=codes,
                blocksize=self.settings.block_size,
            )

    def _blocks(self, chunk: slice) -> slice:
        return slice(chunk.start // self.settings.block_size, chunk.stop // self.settings.block_size)


def paper_codec() -> CompressionBase:
    """8 bits for tensors of more than 2^16 elements, fp16 for the others."""
    large = BlockwiseQuantization()
    return SizeAdaptiveCompression(threshold=2**16 + 1, less=Float16Compression(), greater_equal=large)


def grouped(parameters: dict[str, Tensor], settings: OptimizerPart) -> list[dict[str, Any]]:
    """Parameter groups as in the paper: biases do not decay."""
    biases = [name for name in parameters if name.endswith("bias")]
    others = [tensor for name, tensor in parameters.items() if name not in biases]
    plain = {"params": [parameters[name] for name in biases], "weight_decay": 0.0}
    return [{"params": others, "weight_decay": settings.weight_decay}, plain]


def make_optimizer(args: argparse.Namespace, run: RunConfig, dht: DHT, parameters: dict[str, Tensor]) -> Optimizer:
    """hivemind.Optimizer over `parameters` as the paper used it."""
    rate = run.schedule.peak_lr
    request_timeout = 0.8 * args.matchmaking_time  # at 3 s, its default, short matchmaking can deadlock
    return Optimizer(
        dht=dht,
        run_id=RUN_ID,
        params=grouped(parameters, run.optimizer),
        optimizer=lambda params: PaperLamb(params, run.optimizer, rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(run.schedule, step) / rate
        ),
        offload_optimizer=True,
        delay_optimizer_step=True,
        delay_grad_averaging=not args.wait_for_gradients and not args.client_mode,
        reuse_grad_buffers=True,
        batch_size_per_step=args.micro_batch,
        target_batch_size=args.target_batch_size,
        grad_compression=paper_codec(),
        state_averaging_compression=paper_codec(),
        matchmaking_time=args.matchmaking_time,
        averaging_timeout=args.averaging_timeout,
        allreduce_timeout=args.allreduce_timeout,
        next_chunk_timeout=args.next_chunk_timeout,
        grad_averager_factory=partial(GradientAverager, request_timeout=request_timeout),
        averager_opts={"request_timeout": request_timeout},
        client_mode=dht.client_mode,  # None, its default, breaks a client-mode peer
        verbose=True,
    )


class Messages(logging.Handler):
    """What hivemind says of its rounds, as lines of ours: it reports success nowhere else."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one message on."""
        words = record.getMessage()
        if any(
            said in words for said in ("veraged", "received", "local gradients", "failed", "out of sync", "Skipped")
        ):
            tell("message", words=words[:300])


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of all bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def train(args: argparse.Namespace, run: RunConfig, dht: DHT, commands: Commands) -> None:
    """Micro-batches until told to leave."""
    shapes = model_shapes(run, args.part)
    parameters = {name: tensor.requires_grad_() for name, tensor in first_parameters(shapes)}
    for name in ("optim.optimizer", "optim.state_averager", "averaging.averager", "averaging.partition"):
        logging.getLogger(f"hivemind.{name}").addHandler(Messages())  # before the averagers' processes are forked
    optimizer = make_optimizer(args, run, dht, parameters)
    if args.wait_for_go:
        tell("ready")
        commands.go.wait()
    if args.synchronise:
        optimizer.load_state_from_peers()
    ended = commands.ended
    device = Device(Gradients(shapes, args.seed), args.micro_batch_seconds, ended)
    buffers = [tensor.grad for tensor in parameters.values() if tensor.grad is not None]
    assert len(buffers) == len(parameters)
    tell("started", parameters=count(shapes), epoch=optimizer.local_epoch)
    began, epoch, done = time.monotonic(), optimizer.local_epoch, False
    in_step = in_step_cpu = 0.0
    while not ended.is_set():
        device.compute(buffers, add=True)
        before, used = time.monotonic(), time.thread_time()
        optimizer.step(batch_size=args.micro_batch)
        in_step += time.monotonic() - before
        in_step_cpu += time.thread_time() - used
        if optimizer.local_epoch != epoch:
            epoch = optimizer.local_epoch
            found = digest(parameters.values()) if args.digests else ""
            tell("step", epoch=epoch, digest=found)
        tell(
            "loop",
            epoch=epoch,
            seconds=time.monotonic() - began,
            busy_seconds=device.busy_seconds,
            step_seconds=in_step,
            step_cpu_seconds=in_step_cpu,
            micro_batches=device.micro_batches,
        )
        if args.steps and epoch >= args.steps and not done:
            done = True
            write_parameters(optimizer, args.parameters)
            tell("done", epoch=epoch)


def write_parameters(optimizer: Optimizer, path: str) -> None:
    """All parameters after the updates under way, one fp32 vector in numpy's form."""
    optimizer.state_averager.step(wait_for_delayed_updates=True)
    if path:
        vector = torch.cat([p.detach().view(-1) for group in optimizer.param_groups for p in group["params"]])
        np.save(path, vector.numpy())


def main() -> None:
    """Run one peer."""
    parser = peer_arguments(__doc__)
    parser.add_argument("--dht-only", action="store_true", help="a DHT node for others to join through")
    parser.add_argument("--wait-for-gradients", action="store_true", help="delay_grad_averaging=False, as published")
    parser.add_argument("--allreduce-timeout", type=float, default=60.0)
    parser.add_argument("--synchronise", action="store_true", help="take the others' state over before training")
    parser.add_argument("--digests", action="store_true", help="a digest of the parameters with every step")
    args = parser.parse_args()

    die_with_parent()
    raise_file_limit()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    bnb.quantize_blockwise(torch.ones(4096))  # loaded before processes fork, else each first round pays for it
    commands = Commands()
    dht = DHT(
        initial_peers=args.initial_peer or None,
        host_maddrs=[f"/ip4/{args.host}/tcp/0"],
        client_mode=args.client_mode,
        start=True,
    )
    addresses = [] if args.client_mode else [str(address) for address in dht.get_visible_maddrs()]
    tell("listening", peer_id=str(dht.peer_id), addresses=addresses)
    until_the_end(commands.ended.wait if args.dht_only else partial(train, args, load_run(args.run), dht, commands))


def until_the_end(work: Callable[[], object]) -> None:
    """Do it, and end this process: hivemind's shutdown may wait half a minute; what it forked ends with it."""
    code = 0
    try:
        work()
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main()
