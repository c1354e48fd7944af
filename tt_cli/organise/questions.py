"""The questions of `tt init`: each has a flag, a default that may depend on the answers before, and a check.

An answer is text, as it is typed or stands after its flag; `Answers` holds them all, checked.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tt_cli.errors import UsageError
from tt_cli.organise.model_sizes import DIM_HEAD, SIZES, Size, nearest, takes
from tt_cli.run import load_run
from tt_cli.run.run_source import HUB_NAME
from tt_cli.run.sections import CheckpointsPart, MembershipPart, RunPart

BUILTIN_DATA = "emoji"
CODES = {
    "f8": "32 x 32 codes of pictures of 256 x 256, by the published vqgan_gumbel_f8",
    "emoji": "8 x 8 codes of pictures of 64 x 64, by the VQGAN that comes with tt",
}
_MEASURES = re.compile(r"(\d{1,6})x(\d{1,6})")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)(?![\d.]+$){_LABEL}(?:\.{_LABEL})+")


@dataclass(frozen=True)
class RunAnswers:
    """The organiser's wishes, checked. Empty text: none.

    size: a name of SIZES or DIMxLAYERS. data: "emoji", OWNER/NAME on the Hub or a folder. vqgan: OWNER/NAME:FILE.
    address: IP or host name. repository: on the Hub, where run file, card and checkpoints shall lie.
    """

    name: str
    size: str
    data: str
    codes: str
    vqgan: str
    organisation: str
    authority: str
    address: str
    port: int
    repository: str
    steps: int
    batch: int

    @property
    def measures(self) -> Size:
        """The model's size, with the schedule that suits it."""
        return size_of(self.size)


@dataclass(frozen=True)
class RunQuestion:
    """key: the field of Answers; its flag is --KEY. words: what is asked. check: text to value, raises UsageError.

    asked: whether the answers before leave it open at all. choices: lines that explain some answers.
    """

    key: str
    words: str
    default: Callable[[Mapping[str, Any]], str]
    check: Callable[[str], Any]
    asked: Callable[[Mapping[str, Any]], bool] = lambda before: True
    choices: Callable[[], list[str]] = lambda: []

    @property
    def flag(self) -> str:
        """The flag as it is typed."""
        return f"--{self.key}"


def size_of(text: str) -> Size:
    """A named size, or DIMxLAYERS. Raises UsageError."""
    if text in SIZES:
        return SIZES[text]
    match = _MEASURES.fullmatch(text)
    if match is None:
        raise UsageError(f"--size {text}: give {', '.join(SIZES)}, or DIMxLAYERS such as 768x24")
    dim, layers = int(match[1]), int(match[2])
    if not (DIM_HEAD <= dim <= 16384 and dim % DIM_HEAD == 0 and 1 <= layers <= 1024):
        raise UsageError(
            f"--size {text}: the width must be a multiple of {DIM_HEAD} up to 16384, and there are 1 to 1024 layers"
        )
    suited = nearest(dim, layers)
    return Size(dim, layers, suited.batch, suited.steps, suited.peak_lr)


def checked_name(text: str) -> str:
    """The run's name. Raises UsageError."""
    return str(_by_field(RunPart, "name", text, "NAME"))


def _size(text: str) -> str:
    size_of(text)
    return text


def _data(text: str) -> str:
    if text == BUILTIN_DATA:
        return text
    path = Path(text).expanduser()
    if path.is_dir():
        if not any(path.rglob("*.parquet")):
            raise UsageError(f"--data {text}: the folder holds no .parquet file")
        return str(path.absolute())
    if not text.startswith((".", "/", "~")) and HUB_NAME.fullmatch(text):
        return text
    raise UsageError(
        f"--data {text}: give {BUILTIN_DATA}, OWNER/NAME of a data set on the Hub, or a folder that is here"
    )


def _codes(text: str) -> str:
    if text not in CODES:
        raise UsageError(f"--codes {text}: give {' or '.join(CODES)}")
    return text


def _vqgan(text: str) -> str:
    repository, _, file = text.partition(":")
    if not HUB_NAME.fullmatch(repository) or text.endswith(":"):
        raise UsageError(f"--vqgan {text}: give OWNER/NAME or OWNER/NAME:FILE of its weights on the Hub")
    return f"{repository}:{file or 'model.safetensors'}"


def _organisation(text: str) -> str:
    if text and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}", text):
        raise UsageError(f"--organisation {text}: give the name of an organisation on the Hub")
    return text


def _authority(text: str) -> str:
    return str(_by_field(MembershipPart, "authority", text, "--authority")) if text else ""


def _address(text: str) -> str:
    if not text or multiaddr_host(text):
        return text
    raise UsageError(
        f"--address {text}: give an IP address or a host name that volunteers can reach, such as 203.0.113.7"
    )


def multiaddr_host(text: str) -> str:
    """ "/ip4/203.0.113.7" or "/dns4/tt.example.org"; "" for what is no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return f"/dns4/{text}" if _HOST.fullmatch(text) else ""
    return f"/ip{address.version}/{address}"


def _repository(text: str) -> str:
    return str(_by_field(CheckpointsPart, "repository", text, "--repository")) if text else ""


def _number(flag: str, low: int, high: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        if not re.fullmatch(r"[0-9_,]{1,12}", text) or not low <= (value := int(re.sub("[_,]", "", text) or 0)) <= high:
            raise UsageError(f"{flag} {text}: must be a whole number from {low:,} to {high:,}")
        return value

    return check


def _by_field(part: type[BaseModel], field: str, value: str, origin: str) -> Any:
    """Check a value as the run file's field is checked."""
    info = part.model_fields[field]
    try:
        kind: Any = Annotated[info.annotation, info]
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise UsageError(f"{origin} {value}: {error.errors()[0]['ctx']['error']}") from None


def _sizes_in_words() -> list[str]:
    """The memory that each named size takes: with emoji's pictures up to small, with the paper's from there on."""
    lines = []
    for name, size in SIZES.items():
        base = load_run("emoji" if size.dim < 512 else "dalle")
        run = base.replaced({"model.dim": size.dim, "model.depth": size.layers, "model.heads": size.dim // DIM_HEAD})
        lines.append(f"{name:<6} {f'{size.dim}x{size.layers}':<8} {takes(run).in_brief()}")
    return lines


QUESTIONS = (
    RunQuestion(
        "size",
        "How large is the model? A name, or DIMxLAYERS",
        lambda before: "small",
        _size,
        choices=_sizes_in_words,
    ),
    RunQuestion(
        "data", "What is it trained on? emoji, OWNER/NAME on the Hub, or a folder", lambda before: BUILTIN_DATA, _data
    ),
    RunQuestion(
        "codes",
        "Which codes does that data hold?",
        lambda before: "f8",
        _codes,
        lambda before: before["data"] != BUILTIN_DATA,
        choices=lambda: [f"{name:<6} {words}" for name, words in CODES.items()],
    ),
    RunQuestion(
        "organisation",
        "Which organisation on the Hub may take part? Empty: anybody",
        lambda before: "",
        _organisation,
    ),
    RunQuestion(
        "vqgan",
        "Where on the Hub are the VQGAN's weights, for drawing? OWNER/NAME or OWNER/NAME:FILE",
        lambda before: f"{before['organisation'] or 'your-organisation'}/vqgan_gumbel_f8",
        _vqgan,
        lambda before: before["codes"] == "f8",
    ),
    RunQuestion(
        "authority",
        "At which https address will your authority give out passes, bans and orders? Empty: none",
        lambda before: "",
        _authority,
    ),
    RunQuestion(
        "address", "IP or host name of the server with the aux peer? Empty: not known yet", lambda b: "", _address
    ),
    # the assistant takes the next one
    RunQuestion("port", "Its TCP port for peers?", lambda before: "31337", _number("--port", 1, 65534)),
    RunQuestion(
        "repository",
        "Repository on the Hub for run file and checkpoints, OWNER/NAME? Empty: none",
        lambda before: f"{before['organisation']}/{before['name']}" if before["organisation"] else "",
        _repository,
    ),
    RunQuestion(
        "steps",
        "How many global steps?",
        lambda before: str(size_of(before["size"]).steps),
        _number("--steps", 1, 10**9),
    ),
    RunQuestion(
        "batch",
        "How many examples of all peers make one step?",
        lambda before: str(size_of(before["size"]).batch),
        _number("--batch", 1, 10**7),
    ),
)
NOT_ASKED = {"codes": "emoji", "vqgan": ""}  # what holds where a question does not arise


def answered(name: str, given: Mapping[str, str | None], ask: Callable[[RunQuestion, str], str]) -> RunAnswers:
    """All answers: from `given` (key to text), else from `ask(question, default)`. Raises UsageError."""
    answers: dict[str, Any] = {"name": checked_name(name)}
    for question in QUESTIONS:
        text = given.get(question.key)
        if not question.asked(answers):
            if text is not None:
                raise UsageError(f"{question.flag}: has no meaning with --data {answers['data']}")
            answers[question.key] = NOT_ASKED[question.key]
            continue
        if text is None:
            text = ask(question, question.default(answers))
        answers[question.key] = question.check(text.strip())
    return RunAnswers(**answers)
