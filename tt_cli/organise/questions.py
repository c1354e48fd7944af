"""The questions of `tt init`: each has a flag, a default that may depend on the answers before, and a check.

An answer is text, as it is typed or stands after its flag; `RunAnswers` holds them all, checked.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tt_cli.errors import UsageError
from tt_cli.organise import averaging
from tt_cli.organise.model_sizes import DIM_HEAD, SIZES, Size, nearest, sized, takes
from tt_cli.organise.text_run import NEW, text_run
from tt_cli.run import RunConfig
from tt_cli.run.sections import HUB_NAME, CheckpointsPart, MembershipPart, RunPart, fitting

TASKS = {"dalle": "a transformer that draws", "causal-lm": "a language model that writes"}
BUILTIN_DATA = {"dalle": "emoji", "causal-lm": "austen"}
SUFFIXES = {"dalle": (".parquet",), "causal-lm": (".parquet", ".jsonl", ".txt")}  # of files with data
CODES = {
    "f8": "32 x 32 codes of pictures of 256 x 256, by the published vqgan_gumbel_f8",
    "emoji": "8 x 8 codes of pictures of 64 x 64, by the VQGAN that comes with tt",
}
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)(?![\d.]+$){_LABEL}(?:\.{_LABEL})+")

Check = Callable[..., Any]
"""Text to value. Raises ValueError that says what is allowed."""


@dataclass(frozen=True)
class RunAnswers:
    """The organiser's wishes, checked. Empty text: none.

    plain: the run of that task, model or size, and data, before all else is said. vqgan: OWNER/NAME:FILE. address: IP
    or host name. repository: on the Hub, where run file, card and checkpoints shall lie.
    """

    name: str
    task: str
    plain: RunConfig
    data: str
    codes: str
    vqgan: str
    organisation: str
    authority: str
    address: str
    port: int
    repository: str
    line: float
    peers: int
    inner_steps: int
    steps: int
    batch: int


@dataclass(frozen=True)
class RunQuestion:
    """key: the field of RunAnswers; its flag is --KEY. words: what is asked. default: may follow from answers before.

    asked: whether the answers before leave it open at all. choices: lines about some answers, or the default.
    """

    key: str
    words: str
    check: Check
    default: str | Callable[[Mapping[str, Any]], str] = ""
    asked: Callable[[Mapping[str, Any]], bool] = lambda before: True
    choices: Callable[..., list[str]] = lambda before: []

    def answer(self, text: str) -> Any:
        """The value of an answer. Raises UsageError."""
        return _checked(self.check, text, f"--{self.key}")


def _checked(check: Check, text: str, origin: str) -> Any:
    try:
        return check(text)
    except ValueError as error:
        raise UsageError(f"{origin} {text}: {error}") from None


def _size(text: str) -> Size:
    """A named size, or DIMxLAYERS."""
    if text in SIZES:
        return SIZES[text]
    measures = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if measures is None:
        raise ValueError(f"give {', '.join(SIZES)}, or DIMxLAYERS such as 768x24")
    dim, layers = int(measures[1]), int(measures[2])
    if not (DIM_HEAD <= dim <= 16384 and dim % DIM_HEAD == 0 and 1 <= layers <= 1024):
        raise ValueError(f"the width must be a multiple of {DIM_HEAD} up to 16384, and there are 1 to 1024 layers")
    return replace(nearest(dim, layers), dim=dim, layers=layers)


def _data(task: str, text: str) -> str:
    if text == BUILTIN_DATA[task]:
        return text
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        if not any(file.suffix in SUFFIXES[task] for file in path.rglob("*")):
            raise ValueError(f"the folder holds no {' or '.join(SUFFIXES[task])} file")
        return str(path.absolute())
    name, _, _ = text.partition(":")  # a column
    if not text.startswith((".", "/", "~")) and HUB_NAME.fullmatch(name if task == "causal-lm" else text):
        return text
    raise ValueError(f"give {BUILTIN_DATA[task]}, OWNER/NAME of a data set on the Hub, or a folder that is here")


def _vqgan(text: str) -> str:
    repository, _, file = text.partition(":")
    if not HUB_NAME.fullmatch(repository) or text.endswith(":"):
        raise ValueError("give OWNER/NAME or OWNER/NAME:FILE of its weights on the Hub")
    return f"{repository}:{file or 'model.safetensors'}"


def multiaddr_host(text: str) -> str:
    """ "/ip4/203.0.113.7" or "/dns4/tt.example.org"; "" for what is no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return f"/dns4/{text}" if _HOST.fullmatch(text) else ""
    return f"/ip{address.version}/{address}"


def _number(low: int, high: int) -> Check:
    def check(text: str) -> int:
        if not re.fullmatch(r"[0-9_,]{1,12}", text) or not low <= (value := int(re.sub("[_,]", "", text) or 0)) <= high:
            raise ValueError(f"must be a whole number from {low:,} to {high:,}")
        return value

    return check


def _mbits(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text) or float(text) < 0.1:
        raise ValueError("must be a number of Mbit/s from 0.1, such as 20")
    return float(text)


def _as_field(part: type[BaseModel], field: str) -> Check:
    """Check as the run file's field is checked."""
    info = part.model_fields[field]

    def check(text: str) -> str:
        kind: Any = Annotated[info.annotation, info]
        try:
            return str(TypeAdapter(kind).validate_python(text, strict=True))
        except ValidationError as error:
            raise ValueError(error.errors()[0]["ctx"]["error"]) from None

    return check


def _or_none(check: Check) -> Check:
    return lambda text: text and check(text)


def _one_of(choices: Collection[str]) -> Check:
    return fitting(choices.__contains__, f"give {' or '.join(choices)}")


def _listed(choices: Mapping[str, str]) -> Callable[..., list[str]]:
    return lambda before: [f"{name:<9} {words}" for name, words in choices.items()]


def _sizes_in_words(_before: object) -> list[str]:
    """The memory that each named size takes: with emoji's pictures up to small, with the paper's from there on."""
    brief = {name: takes(sized(size, "emoji" if size.dim < 512 else "f8")).in_brief() for name, size in SIZES.items()}
    return [f"{name:<6} {f'{SIZES[name].dim}x{SIZES[name].layers}':<8} {words}" for name, words in brief.items()]


def _plain(before: Mapping[str, Any]) -> RunConfig:
    if before["task"] == "dalle":
        return sized(before["size"], before["codes"])
    run = text_run(before["model"], before["lora"] == "yes", before["data"])
    return run.replaced({"optimizer.inner_batch": max(1, run.swarm.target_batch_size // before["peers"])})


def _chosen(before: Mapping[str, Any]) -> averaging.Way:
    return averaging.chosen(_plain(before), (before["peers"], before["line"]))


def _why_so_many(before: Mapping[str, Any]) -> list[str]:
    way, members = _chosen(before), (before["peers"], before["line"])
    run = averaging.suited(averaging.spread(_plain(before), way.inner_steps), way, members)
    return [averaging.reason(run, members)]


def _spread(before: Mapping[str, Any]) -> RunConfig:
    return averaging.spread(_plain(before), before["inner-steps"])


_MODEL = re.compile(rf"{NEW}|{HUB_NAME.pattern}(@.+)?")
_ORGANISATION = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")
QUESTIONS = (
    RunQuestion("task", "What is trained?", _one_of(TASKS), "dalle", choices=_listed(TASKS)),
    RunQuestion("model", f"From which language model does it go on? OWNER/NAME on the Hub; {NEW}: a small new one",
                fitting(_MODEL.fullmatch, f"give OWNER/NAME or OWNER/NAME@REVISION of one on the Hub, or {NEW}"),
                NEW, lambda before: before["task"] == "causal-lm"),
    RunQuestion("lora", "Train adapters of it alone (LoRA), which makes small messages? yes or no",
                _one_of(("yes", "no")), "no", lambda before: "/" in before["model"]),
    RunQuestion("size", "How large is the model? A name, or DIMxLAYERS",
                _size, "small", lambda before: before["task"] == "dalle", _sizes_in_words),
    RunQuestion("data", "What is it trained on? OWNER/NAME on the Hub, or a folder",
                _data, lambda before: BUILTIN_DATA[before["task"]]),
    RunQuestion("codes", "Which codes does that data hold?", _one_of(CODES), "f8",
                lambda before: before["task"] == "dalle" and before["data"] != "emoji", _listed(CODES)),
    RunQuestion("organisation", "Which organisation on the Hub may take part? Empty: anybody",
                _or_none(fitting(_ORGANISATION.fullmatch, "give the name of an organisation on the Hub"))),
    RunQuestion("vqgan", "Where on the Hub are the VQGAN's weights, for drawing? OWNER/NAME or OWNER/NAME:FILE",
                _vqgan, lambda before: f"{before['organisation'] or 'your-organisation'}/vqgan_gumbel_f8",
                lambda before: before["codes"] == "f8"),
    RunQuestion("authority", "At which https address will your authority give out passes, bans and orders? Empty: none",
                _or_none(_as_field(MembershipPart, "authority"))),
    RunQuestion("address", "IP or host name of the server with the aux peer? Empty: not known yet",
                _or_none(fitting(multiaddr_host, "give an IP address or a host name that volunteers can reach, "
                                                 "such as 203.0.113.7"))),
    RunQuestion("port", "Its TCP port for peers?", _number(1, 65534), "31337"),  # the assistant takes the next one
    RunQuestion("repository", "Repository on the Hub for run file and checkpoints, OWNER/NAME? Empty: none",
                _or_none(_as_field(CheckpointsPart, "repository")),
                lambda before: f"{before['organisation']}/{before['name']}" if before["organisation"] else ""),
    RunQuestion("line", "How many Mbit/s does a member's line send? Homes: 5 to 20", _mbits, f"{averaging.LINE:g}"),
    RunQuestion("peers", "How many members will compute at a time?", _number(1, 10**4), str(averaging.PEERS)),
    RunQuestion("inner-steps", "How many steps does a member make by itself between two averages? 0: gradients are "
                "averaged", _number(0, 10**4), lambda before: str(_chosen(before).inner_steps), choices=_why_so_many),
    RunQuestion("steps", "How many global steps?",
                _number(1, 10**9), lambda before: str(_spread(before).schedule.total_steps)),
    RunQuestion("batch", "How many examples of all peers make one step?",
                _number(1, 10**7), lambda before: str(_spread(before).swarm.target_batch_size)),
)  # fmt: skip
# What holds where a question does not arise.
NOT_ASKED = {"model": "", "lora": "no", "size": SIZES["small"], "codes": "emoji", "vqgan": ""}


def checked_name(text: str) -> str:
    """The run's name. Raises UsageError."""
    return str(_checked(_as_field(RunPart, "name"), text, "NAME"))


def answered(name: str, given: Mapping[str, str | None], ask: Callable[[RunQuestion, str], str]) -> RunAnswers:
    """All answers: from `given` (key to text), else from `ask(question, default)`. Raises UsageError."""
    answers: dict[str, Any] = {"name": checked_name(name)}
    for each in QUESTIONS:
        check = partial(each.check, answers["task"]) if each.key == "data" else each.check
        question = replace(each, check=check, choices=partial(each.choices, answers))
        text = given.get(question.key)
        if not question.asked(answers):
            if text is not None:
                known = " ".join(f"--{key} {answers[key]}" for key in ("task", "model", "data") if answers.get(key))
                raise UsageError(f"--{question.key}: has no meaning with {known}")
            answers[question.key] = NOT_ASKED[question.key]
            continue
        if text is None:
            default = question.default if isinstance(question.default, str) else question.default(answers)
            text = ask(question, default)
        answers[question.key] = question.answer(text.strip())
    fields = {key.replace("-", "_"): value for key, value in answers.items() if key not in ("model", "lora", "size")}
    return RunAnswers(plain=_plain(answers), **fields)
