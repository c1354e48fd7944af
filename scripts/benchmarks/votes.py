"""Measure what it costs that members sign what they vote for: a share of a round's bytes, and of its CPU time.

A round of so many members that accept connections, at the size of the paper's model. In settling each tells each other
one its signed vote twice, as it asks and as it answers, then its precommit, which is as long, and checks all that it is
told. Measured are the bytes of a vote, and the time to sign and to check one, with keys of the size that peers have,
and to write all votes down, as every member does before it precommits. Beside them, on one thread, the least that a
round takes of a member: to encode its gradient, to hash it, to add up the parts that it reduces, and to hash and decode
the average. Clipping, libp2p and the kernel come on top of that, so the share of a real round is smaller. And in the
simulator, where each message takes 50 ms, the seconds from a member's last average to its commit, the longest of all.

JSON keys: vote_bytes; sign_ms, check_ms and keep_ms; votes_of_bytes, what a member sends of votes over all that it
sends; votes_of_cpu, what its votes take over what it takes for the least of the rest; elements and members. Votes are
votes and precommits here. commit_s: at 100 ms round trips.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hivemind.utils.crypto import RSAPrivateKey
from simulation.network import Line
from simulation.rounds import rounds_over
from simulation.virtual import in_virtual_time

from tt_cli.run import load_run
from tt_cli.swarm.allreduce.average_buffer import part_hash
from tt_cli.swarm.allreduce.commit import LastVote
from tt_cli.swarm.allreduce.messages import RoundName, SignedVote, Signer, average_hash, open_envelope
from tt_cli.swarm.ballot import Ballot
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import PART_ELEMENTS, GradientBuffer, Partition
from tt_cli.task import task_of

MEMBERS = 16
QUICK = "fewer repetitions"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--members", type=int, default=MEMBERS, metavar="N", help=f"of the round ({MEMBERS})")


def seconds(work: Callable[[], object], times: int) -> float:
    """The smallest of so many times."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def commit_seconds(members: int) -> float:
    """From a member's last average to its commit, where each message takes 50 ms: the longest in a round."""
    logging.disable(logging.CRITICAL)
    gradients = {"weight": torch.randn(256, 64)}
    (made,) = in_virtual_time(rounds_over([100.0] * members, gradients, 1, Line(delay=0.05, steady=True)))
    assert not made.problems, made.problems
    return made.commit


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """See the module."""
    torch.set_num_threads(1)
    run, times, others = load_run("dalle"), 5 if args.quick else 50, args.members - 1
    shapes, codec = task_of(run).shapes(), codec_of(run)
    layout = Partition(shapes, run.swarm.large_tensor, codec.block)
    elements, gradient = sum(shape.numel() for shape in shapes.values()), GradientBuffer(layout, codec).nbytes
    signer, name = Signer(RSAPrivateKey()), RoundName(run.identity, f"5_{'ab' * 32}", bytes(32))
    cut = (1,) * args.members
    whole = average_hash(cut, [bytes(16)] * (elements // PART_ELEMENTS + args.members))
    vote = SignedVote(name, signer.peer_id, 1, cut, (whole,))
    envelope = vote.sign(signer)
    sign = seconds(lambda: vote.sign(signer), times)
    check = seconds(lambda: SignedVote.read(envelope, open_envelope), times)

    parts = tuple(number.to_bytes(16, "big") for number in range(elements // PART_ELEMENTS + args.members))
    with TemporaryDirectory() as folder:
        shown = (envelope,) * args.members
        kept = (LastVote(name.state_key, n, cut, parts, shown=shown) for n in itertools.count(1))
        ballot = Ballot(Path(folder, "trainer.vote"))
        keep = seconds(lambda: ballot.keep(next(kept)), times)

    part, total = torch.randn(PART_ELEMENTS) * 1e-3, torch.zeros(PART_ELEMENTS)
    large = codec.of(True)
    encoded = bytes(large.encode(part))
    least = (
        seconds(lambda: large.encode(part), times)
        + 2 * seconds(lambda: part_hash(encoded), times)
        + seconds(lambda: large.add_decoded(encoded, total, 1.0), times)  # of each member the share that one reduces
        + seconds(lambda: large.decode_into(encoded, total), times)
    ) * (elements / PART_ELEMENTS)
    sent = 2 * gradient * others / args.members  # its gradient to the reducers, its averages to the members
    votes = 2 * 2 * others * len(envelope)
    return {
        "vote_bytes": len(envelope),
        "sign_ms": 1e3 * sign,
        "check_ms": 1e3 * check,
        "keep_ms": 1e3 * keep,
        "votes_of_bytes": votes / (sent + votes),
        "votes_of_cpu": 2 * (sign + 2 * others * check) / least,
        "commit_s": commit_seconds(args.members),
        "elements": elements,
        "members": args.members,
    }
