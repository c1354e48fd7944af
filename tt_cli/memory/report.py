"""The report that answers a question to the calculator: what is taken, what fits, what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tt_cli.memory.architectures import known
from tt_cli.memory.byte_sizes import parse_size, shown
from tt_cli.memory.calculator import Answer
from tt_cli.memory.gpus import GPUS, TYPICAL, USABLE, UTILISATION, Gpu, device_room
from tt_cli.memory.known_subject import Known
from tt_cli.memory.question import CalculatorQuestion, largest_that_fits
from tt_cli.memory.run_subject import OfRun
from tt_cli.memory.trainer_account import AccountOf, DalleAccount, Kind
from tt_cli.run import load_run
from tt_cli.run.run_source import builtin_runs

Subject = Known | OfRun


@dataclass(frozen=True)
class StepPace:
    """A peer's part of one global step. sent: bytes, and as many are received. line, device: seconds of both at work.

    busy: the part of the time in which the device computes what the step asks for. per_hour: bytes sent.
    """

    sent: int
    line: float
    device: float
    busy: float
    per_hour: int


def pace(gradient: int, flops: int, peers: int, mbits: float, *, peak: float, waits: bool) -> StepPace:
    """The pace of `peers` alike, each with a GPU of `peak` TFLOP/s and a line of `mbits` Mbit/s each way.

    gradient: bytes of one, and of an average. flops: of a global step. waits: for the average, before it goes on.
    """
    sent = 2 * gradient * (peers - 1) // peers  # all-reduce
    line, device = 8e-6 * sent / mbits, flops / peers / (UTILISATION * peak * 1e12)
    seconds = line + device if waits else max(line, device)
    return StepPace(sent, line, device, device / seconds, round(3600 * sent / seconds))


@dataclass(frozen=True)
class MemoryReport:
    """The calculator's whole answer. room: bytes that may be used; None: nothing was said of it."""

    title: str
    kind: Kind
    settings: dict[str, Any]
    reasons: dict[str, str]
    answer: Answer
    micro_batch: int
    largest: int | None
    room: int | None
    change: list[str] | None
    network: dict[str, Any]
    compute: dict[str, Any]
    compared: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """None where no room was named."""
        return None if self.room is None else self.answer.taken <= self.room

    def to_json(self) -> dict[str, Any]:
        """The form of --json: bytes, seconds and floating-point operations."""
        return {
            "model": self.title,
            "parameters": self.answer.parameters,
            "device": "gpu" if self.kind == "cuda" else "cpu",
            "settings": {**self.settings, "micro_batch": self.micro_batch},
            "reasons": self.reasons,
            "moment": self.answer.moment,
            "components": [vars(component) for component in self.answer.components],
            "gpu_bytes": self.answer.total("device"),
            "host_bytes": self.answer.total("host"),
            "usable_bytes": self.room,
            "fits": self.fits,
            "largest_micro_batch": self.largest,
            "smallest_change": self.change,
            "network": self.network,
            "compute": self.compute,
            **({"compared": self.compared} if self.compared else {}),
        }


def report(question: CalculatorQuestion, *, compare: bool = False, of: AccountOf = DalleAccount) -> MemoryReport:
    """Answer a question. of: the account of a run that it names. Raises UsageError."""
    question.check()
    subject = _subject(question, of)
    room, gpu, reasons = _room(question)
    largest = _largest(subject, room)
    reasons = {**subject.reasons, **reasons}
    micro_batch = question.micro_batch or largest or 1
    if question.micro_batch is None:
        reasons["micro-batch"] = (
            "1: no --gpu or --cpu says how much there is" if largest is None
            else f"{largest}: the largest that fits" if largest else "1, which does not fit either"
        )  # fmt: skip
    answer, described = subject.answer(micro_batch), subject.described()
    change = subject.change(micro_batch, room) if room is not None and answer.taken > room else None
    rows = [
        {
            "technique": name,
            "gpu_bytes": (its_answer := other.answer(micro_batch)).total("device"),
            "host_bytes": its_answer.total("host"),
            "largest_micro_batch": _largest(other, room),
            "flops": other.flops(),
        }
        for name, other in (subject.compared() if compare else [])
    ]
    examples, reasons["examples"] = subject.examples()
    peers = 1 if question.alone else question.peers
    chosen, waits = gpu or GPUS[TYPICAL], isinstance(subject, OfRun) and not subject.run.optimizer.delayed
    peak, flops = chosen.full if described["precision"] == "fp32" else chosen.half, subject.flops() * examples
    step = pace(subject.gradient_bytes(peers), flops, peers, question.mbits, peak=peak, waits=waits)
    network = {"bytes_each_way": step.sent, "peers": peers, "mbits": question.mbits, "seconds": round(step.line, 3)}
    compute: dict[str, Any] = {"examples": examples, "flops": flops, "gpu": None, "seconds": None}
    if question.kind == "cuda":
        given = "" if gpu else "no GPU was named: "
        reasons["compute"] = f"{given}{chosen.title} at {UTILISATION:.0%} of its {peak:g} TFLOP/s, an assumption"
        compute |= {"gpu": chosen.title, "seconds": round(peers * step.device, 3), "utilisation": UTILISATION}
        network |= {"bytes_per_hour": step.per_hour, "device_busy": round(step.busy, 4)}
    return MemoryReport(
        subject.title, question.kind, described, reasons, answer, micro_batch, largest, room, change,
        network, compute, rows,
    )  # fmt: skip


def _subject(question: CalculatorQuestion, of: AccountOf) -> Subject:
    name = question.model
    may_be_a_run = name in builtin_runs() or name.endswith(".toml") or "/" in name or name.startswith((".", "~"))
    return OfRun.of(load_run(name), question, of) if may_be_a_run and known(name) is None else Known.asked(question)


def _largest(subject: Subject, room: int | None) -> int | None:
    return None if room is None else largest_that_fits(lambda size: subject.answer(size).taken, room)


def _room(question: CalculatorQuestion) -> tuple[int | None, Gpu | None, dict[str, str]]:
    given = question.gpu if question.kind == "cuda" else question.cpu
    if not given:
        return None, None, {}
    size, gpu = device_room(given) if question.kind == "cuda" else (parse_size(given), None)
    reason = f"{shown(USABLE * size)}: {USABLE:.0%} of {shown(size)}, the rest is the desktop's and the driver's"
    return int(USABLE * size), gpu, {"usable": reason}
