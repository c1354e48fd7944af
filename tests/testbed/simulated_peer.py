#!/usr/bin/env python
"""One peer of ours with a simulated device: the real `Collaboration` and 8-bit LAMB, gradients from a seed.

It makes what `tt_cli.peer.trainer` makes, in the same order, because what exists when a process forks decides about its
memory: parameters of the model, shared state, DHT, collaboration, then gradients. Gradients stay until the next
micro-batch overwrites them, as a trainer's do. The arguments are those of baselines/hivemind_optimizer.py where
both have them, and so are the lines it prints: "listening", "started", "step", "loop", "done". All events of the
collaboration are printed too, under their own kinds.

Examples:
  python -m testbed.simulated_peer --part 0.01 --steps 3 --micro-batch 16 --target-batch-size 64 --home /tmp/anna
  python -m testbed.simulated_peer --initial-peer /ip4/…/p2p/… --micro-batch-seconds 2 --seed 1 --home /tmp/ben
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from testbed.launched import Commands, peer_arguments, tell, tell_line
from testbed.shapes import Device, Gradients, count, first_parameters, model_shapes
from tt_cli.model.allocator import keep_freed_memory
from tt_cli.optim.kernels import warm_up
from tt_cli.peer.local_steps import LocalSteps
from tt_cli.peer.trained_state import TrainedState, move_into_mapping
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import Event
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.supervisor.reporter import die_with_parent, raise_file_limit
from tt_cli.swarm.collaboration import About, Collaboration, NetworkAccess
from tt_cli.swarm.compression.codec import codec_of, self_test
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.network.dht_node import addresses_of, start_dht, stop_dht

REPORT_SECONDS, HELD_SECONDS = 1.0, 0.1


class Shapes(nn.Module):
    """Named parameters of given shapes, and nothing that computes."""

    def __init__(self, shapes: dict[str, torch.Size]):
        super().__init__()
        self._named = {name: nn.Parameter(tensor) for name, tensor in first_parameters(shapes)}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The names have dots, which torch's own modules do not take."""
        return iter(self._named.items())


def configured(args: argparse.Namespace) -> RunConfig:
    """The run with this experiment's batch and time-outs."""
    changes: dict[str, Any] = {
        "swarm.target_batch_size": args.target_batch_size,
        "swarm.matchmaking_time": args.matchmaking_time,
        "swarm.averaging_timeout": args.averaging_timeout,
        "swarm.next_chunk_timeout": args.next_chunk_timeout,
        "swarm.statistics_expiration": args.statistics_expiration,
        "swarm.compression": args.codec,
        "optimizer.delayed": not args.wait_for_gradients,
    }
    if args.local:
        del changes["optimizer.delayed"]
        changes["optimizer"] = {"name": "local", "inner_batch": args.micro_batch, "sparse": args.sparse}
        changes["optimizer"] |= {"delayed": args.delayed}
    return load_run(args.run).replaced(changes)


def print_event(event: Event, /) -> None:
    """An event of ours as a line; its JSON has "kind" and "at" already."""
    tell_line(event.to_json())


def train(
    args: argparse.Namespace,
    commands: Commands,
    collaboration: Collaboration,
    shared: TrainedState,
    model: Shapes,
    local: LocalSteps | None,
) -> None:
    """Micro-batches until told to leave; with local steps each of them makes an inner one."""
    ended = commands.ended
    shapes = shared.shapes()
    device = Device(Gradients(shapes, args.seed), args.micro_batch_seconds, ended)
    gradients = {name: torch.zeros(shape) for name, shape in shapes.items()}
    if args.wait_for_go:
        tell("ready")
        commands.go.wait()
    collaboration.synchronise()
    tell("started", parameters=count(shapes), epoch=collaboration.epoch)
    began, reported, done = time.monotonic(), 0.0, False
    in_step = in_step_cpu = copying = 0.0
    loss = torch.ones(())
    while not ended.is_set():
        if local is not None:
            if not collaboration.ready:
                collaboration.stand_by()
                ended.wait(HELD_SECONDS)
                continue
            local.renew(collaboration.state)
        elif collaboration.state.fresh:
            before = time.monotonic()
            with collaboration.state.use():
                shared.copy_into(model)
                collaboration.state.fresh = False
            copying += time.monotonic() - before
        device.compute(list(gradients.values()), add=False)
        before, used = time.monotonic(), time.thread_time()
        collaboration.step(gradients, args.micro_batch, loss, {"text_loss": loss, "image_loss": loss})
        in_step += time.monotonic() - before
        in_step_cpu += time.thread_time() - used
        if time.monotonic() > reported + REPORT_SECONDS:
            reported = time.monotonic()
            collaboration.report()
        tell(
            "loop",
            epoch=collaboration.epoch,
            seconds=time.monotonic() - began,
            busy_seconds=device.busy_seconds,
            step_seconds=in_step,
            step_cpu_seconds=in_step_cpu,
            copy_seconds=copying,
            micro_batches=device.micro_batches,
        )
        if args.steps and collaboration.epoch >= args.steps and not done:
            done = True
            write_parameters(collaboration, args.parameters)
            tell("done", epoch=collaboration.epoch)


def write_parameters(collaboration: Collaboration, path: str) -> None:
    """All parameters as one fp32 vector in numpy's form."""
    if path:
        with collaboration.state.use() as shared:
            assert isinstance(shared, TrainedState)
            vector = torch.cat([tensor.view(-1) for tensor in shared.state().parameters.values()])
        np.save(path, vector.numpy())


def main() -> None:
    """Run one peer."""
    parser = peer_arguments(__doc__)
    parser.add_argument("--home", type=Path, required=True, help="folder for this peer's identity")
    parser.add_argument("--max-upload", type=float, help="Mbit/s; no cap without it")
    parser.add_argument("--max-download", type=float, help="Mbit/s; no cap without it")
    parser.add_argument("--codec", choices=("linear8", "blockwise8"), default="linear8")
    parser.add_argument("--local", action="store_true", help="local steps, each of one micro-batch")
    parser.add_argument("--sparse", type=int, default=0, help="elements of each 4,096 in their messages; 0: all")
    parser.add_argument("--delayed", action="store_true", help="local steps that go on beside a round")
    parser.add_argument("--wait-for-gradients", action="store_true", help="without delayed updates")
    parser.add_argument("--statistics-expiration", type=float, default=60.0)
    args = parser.parse_args()

    die_with_parent()
    raise_file_limit()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    commands = Commands()
    run = configured(args)
    warm_up()
    self_test(codec_of(run))
    model = Shapes(model_shapes(run, args.part))
    with torch.no_grad():
        move_into_mapping(dict(model.named_parameters()))
    shared = TrainedState(run, model, None)
    release_freed_memory()
    args.home.mkdir(parents=True, exist_ok=True)
    identity = claim_identity(args.home, "trainer")
    dht = start_dht(run, identity, initial_peers=args.initial_peer, host=args.host, client_mode=args.client_mode)
    tell("listening", peer_id=identity.peer_id, addresses=[] if args.client_mode else addresses_of(dht))
    about = About(user="simulated", device="simulated", micro_batch=args.micro_batch)
    line = BandwidthLimiter(*(cap and cap * 1e6 for cap in (args.max_upload, args.max_download)))
    orders = OrganiserOrders(membership_at(dht), identity.path.with_suffix(".era"))
    local = LocalSteps(run, model, shared, print_event) if args.local else None
    access = NetworkAccess(dht, identity, line)
    collaboration = Collaboration(run, access, shared, about, print_event, orders, accumulator=local)
    keep_freed_memory()
    code = 0
    try:
        train(args, commands, collaboration, shared, model, local)
        collaboration.close()
        stop_dht(dht)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)  # hivemind's threads may block a normal exit


if __name__ == "__main__":
    main()
