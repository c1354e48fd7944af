"""All answers that a web page offers for one model, made beforehand: it chooses among them and reckons nothing itself.

Micro-batches are powers of two. What a page adds is the sum of an answer's components, as for `tt calc`, and the
largest micro-batch whose sum a GPU has room for.
"""

from __future__ import annotations

import shlex
from itertools import product
from typing import Any

from tt_cli.errors import UsageError
from tt_cli.memory.architectures import ARCHITECTURES
from tt_cli.memory.byte_sizes import GIB, parse_size
from tt_cli.memory.gpus import GPUS, USABLE, UTILISATION
from tt_cli.memory.known_subject import Known
from tt_cli.memory.question import CalculatorQuestion
from tt_cli.memory.report import Subject
from tt_cli.memory.run_subject import OfRun
from tt_cli.memory.trainer_account import AccountOf, DalleAccount
from tt_cli.run import RunConfig

RUN = "run"  # the name under which a page asks about its own run
SIZES = tuple(2**power for power in range(8))  # micro-batches
MEMORIES = (4, 6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 80)  # GB of GPUs

# What is chosen, in this order: its key in a question, its title, and (value, words, flag of `tt calc`) of its options.
# The first option is what `tt calc` takes by itself.
Choice = tuple[str, str, tuple[tuple[Any, str, str], ...]]
PRECISIONS = (("mixed", "mixed 16 and 32 bits", ""), ("fp32", "32 bits", "--precision fp32"))
OPTIMIZERS = (
    (("adam", None), "Adam", ""),
    (("adam", 8), "8-bit Adam", "--8bit"),
    (("lamb", 8), "8-bit LAMB", "--optimizer lamb --8bit"),
    (("adafactor", None), "Adafactor", "--optimizer adafactor"),
)
LAYERS = (
    (None, "kept", ""),
    ("checkpointed", "checkpointed", "--checkpointing"),
    ("reversible", "reversible", "--reversible"),
)
OF_RUNS: tuple[Choice, ...] = (("precision", "Numbers", PRECISIONS),)
OF_ARCHITECTURES: tuple[Choice, ...] = (
    ("precision", "Numbers", (*PRECISIONS, ("pure16", "16 bits", "--precision pure16"))),
    ("optimizer", "Optimizer", OPTIMIZERS),
    ("layers", "Activations", LAYERS),
    ("offload", "Optimizer’s place", ((False, "on the GPU", ""), (True, "in the host’s memory", "--offload"))),
)


class Tables:
    """Those of one run's page. name: how people name the run to `tt`; account: of its peers. Holds no state."""

    def __init__(self, run: RunConfig, name: str, account: AccountOf = DalleAccount):
        self._run, self._name, self._account = run, name, account
        self.names = (RUN, *ARCHITECTURES)

    def table(self, name: str) -> dict[str, Any]:
        """The table of one of `names`; takes up to some seconds. Raises UsageError for any other name."""
        if name not in self.names:
            raise UsageError(f"no model is called {name!r} here")
        choices = OF_RUNS if name == RUN else OF_ARCHITECTURES
        subjects: dict[str, Subject] = {}  # by the numbers of the options chosen, such as "0 1 0 0"
        for numbers in product(*(range(len(options)) for _, _, options in choices)):
            asked = {key: options[number][0] for number, (key, _, options) in zip(numbers, choices, strict=True)}
            subjects[" ".join(map(str, numbers))] = self._subject(name, asked)
        any_subject = next(iter(subjects.values()))
        whats: dict[tuple[str, str, bool], int] = {}
        answers = {key: _answers(subject, whats) for key, subject in subjects.items()}
        return {
            "name": name,
            "title": any_subject.title,
            "command": f"tt calc {shlex.quote(self._name) if name == RUN else name}",
            "parameters": any_subject.answer(1).parameters,
            "sequence": any_subject.described()["sequence"],
            "models": [
                {"name": RUN, "title": f"{self._run.run.name}: this run"},
                *({"name": model.name, "title": model.title} for model in ARCHITECTURES.values()),
            ],
            "choices": [
                {"name": key, "title": title, "options": [{"words": words, "flag": flag} for _, words, flag in options]}
                for key, title, options in choices
            ],
            "micro_batches": SIZES,
            "components": [{"what": what, "place": place, "assumed": assumed} for what, place, assumed in whats],
            "answers": answers,
            "flops": {key: subject.flops() for key, subject in subjects.items()},
            "examples": any_subject.examples()[0],
            "gradient_bytes": any_subject.gradient_bytes(CalculatorQuestion.peers),
            "usable": USABLE,
            "gpus": _gpus(),
            "utilisation": UTILISATION,
        }

    def _subject(self, name: str, asked: dict[str, Any]) -> Subject:
        if name == RUN:
            return OfRun.of(self._run, CalculatorQuestion(self._name, **asked), self._account)
        optimizer, bits = asked.pop("optimizer")
        return Known.asked(CalculatorQuestion(name, optimizer=optimizer, bits=bits, **asked))


def _gpus() -> list[dict[str, Any]]:
    """All GPUs to choose from: flag of `tt calc`, words, bytes, TFLOP/s of 16 and of 32 bits (null: of any)."""
    rows = [(f"{size}GB", f"{size} GB", parse_size(f"{size}GB"), None, None) for size in MEMORIES]
    named = (
        (name, f"{gpu.title}, {gpu.memory} GB", gpu.memory * GIB, gpu.half, gpu.full) for name, gpu in GPUS.items()
    )
    return [dict(zip(("flag", "title", "bytes", "half", "full"), row, strict=True)) for row in (*rows, *named)]


def _answers(subject: Subject, whats: dict[tuple[str, str, bool], int]) -> list[list[tuple[int, int]]]:
    """The part that is the same for all micro-batches, then each one's own: [component's number, bytes], …"""
    answers = [
        {
            whats.setdefault((part.what, part.place, part.assumed), len(whats)): part.bytes
            for part in subject.answer(size).components
        }
        for size in SIZES
    ]
    same = set.intersection(*(set(answer.items()) for answer in answers))
    own = [[item for item in answer.items() if item not in same] for answer in answers]
    return [[item for item in answers[0].items() if item in same], *own]
