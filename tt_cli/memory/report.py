"""The report that answers a question to the calculator: what is taken, what fits, what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tt_cli.memory.architectures import known
from tt_cli.memory.byte_sizes import parse_size, shown
from tt_cli.memory.calculator import Answer
from tt_cli.memory.gpus import GPUS, TYPICAL, USABLE, UTILISATION, Gpu, device_room
from tt_cli.memory.known_subject import Known
from tt_cli.memory.operations import Kind
from tt_cli.memory.question import MOST_EXAMPLES, CalculatorQuestion, Subject
from tt_cli.memory.run_subject import OfRun
from tt_cli.memory.trainer_account import Place
from tt_cli.run.run_source import builtin_runs


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
    def taken(self) -> int:
        """Bytes where training runs."""
        return self.answer.total("host" if self.kind == "cpu" else "device")

    @property
    def fits(self) -> bool | None:
        """None where no room was named."""
        return None if self.room is None else self.taken <= self.room

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


def report(question: CalculatorQuestion, *, compare: bool = False) -> MemoryReport:
    """Answer a question. Raises UsageError."""
    question.check()
    subject = _subject(question)
    room, gpu, reasons = _room(question)
    largest = None if room is None else largest_that_fits(_taken(subject, question.kind), room)
    reasons = {**subject.reasons, **reasons}
    micro_batch = question.micro_batch or largest or 1
    if question.micro_batch is None:
        reasons["micro-batch"] = (
            "1: no --gpu or --cpu says how much there is" if largest is None
            else f"{largest}: the largest that fits" if largest else "1, which does not fit either"
        )  # fmt: skip
    answer = subject.answer(micro_batch)
    place: Place = "host" if question.kind == "cpu" else "device"
    change = None
    if room is not None and answer.total(place) > room:
        change = subject.change(micro_batch, room)
    rows = [
        {
            "technique": name,
            "gpu_bytes": (other := subject_of.answer(micro_batch)).total("device"),
            "host_bytes": other.total("host"),
            "largest_micro_batch": None if room is None else largest_that_fits(_taken(subject_of, question.kind), room),
            "flops": subject_of.flops(),
        }
        for name, subject_of in (subject.compared() if compare else [])
    ]
    examples, reasons["examples"] = subject.examples()
    network = _network(subject, question)
    compute = _compute(subject, question.kind, gpu, examples, subject.described()["precision"], reasons)
    return MemoryReport(
        subject.title, question.kind, subject.described(), reasons, answer, micro_batch, largest, room, change,
        network, compute, rows,
    )  # fmt: skip


def _subject(question: CalculatorQuestion) -> Subject:
    if known(question.model) is not None or not _maybe_a_run(question.model):
        return Known.asked(question)
    return OfRun.asked(question)


def _maybe_a_run(name: str) -> bool:
    return name in builtin_runs() or name.endswith(".toml") or "/" in name or name.startswith((".", "~"))


def _room(question: CalculatorQuestion) -> tuple[int | None, Gpu | None, dict[str, str]]:
    given = question.gpu if question.kind == "cuda" else question.cpu
    if not given:
        return None, None, {}
    size, gpu = device_room(given) if question.kind == "cuda" else (parse_size(given), None)
    reason = f"{shown(USABLE * size)}: {USABLE:.0%} of {shown(size)}, the rest is the desktop's and the driver's"
    return int(USABLE * size), gpu, {"usable": reason}


def _taken(subject: Subject, kind: Kind) -> Callable[[int], int]:
    return lambda size: subject.answer(size).total("host" if kind == "cpu" else "device")


def largest_that_fits(taken: Callable[[int], int], room: int) -> int:
    """The most examples at a time within `room` bytes; 0 where one is too many. taken: bytes, growing with them."""
    if taken(1) > room:
        return 0
    low, high = 1, 2
    while high <= MOST_EXAMPLES and taken(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= room else (low, middle)
    return low


def _network(subject: Subject, question: CalculatorQuestion) -> dict[str, Any]:
    if question.alone:
        return {"bytes_each_way": 0, "peers": 1, "seconds": 0.0, "mbits": question.mbits}
    size = subject.network(question.peers)
    seconds = round(8 * size / (question.mbits * 1e6), 3)
    return {"bytes_each_way": size, "peers": question.peers, "seconds": seconds, "mbits": question.mbits}


def _compute(
    subject: Subject, kind: Kind, gpu: Gpu | None, examples: int, precision: str, reasons: dict[str, str]
) -> dict[str, Any]:
    figures: dict[str, Any] = {"examples": examples, "flops": subject.flops() * examples, "gpu": None, "seconds": None}
    if kind == "cuda":
        chosen = gpu or GPUS[TYPICAL]
        peak = chosen.full if precision == "fp32" else chosen.half
        given = "" if gpu else "no GPU was named: "
        reasons["compute"] = f"{given}{chosen.title} at {UTILISATION:.0%} of its {peak:g} TFLOP/s, an assumption"
        seconds = round(figures["flops"] / (UTILISATION * peak * 1e12), 3)
        figures |= {"gpu": chosen.title, "seconds": seconds, "utilisation": UTILISATION}
    return figures
