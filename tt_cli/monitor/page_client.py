"""What a run's web page knows, asked over HTTP: the swarm now, and its past. Nothing it answers is believed unchecked.

A page is an aux peer's, or one that was exported to files (`api/run.json` for `api/run`). Answers are bounded in bytes
and in rows; numbers are finite; texts are shortened here and lose their control characters where they are drawn.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from tt_cli import __version__
from tt_cli.errors import TTError, UsageError
from tt_cli.monitor.scene import Active, Leader
from tt_cli.monitor.snapshot import SwarmSnapshot
from tt_cli.run import folders

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

TIMEOUT = 10.0  # seconds
MAX_ANSWER = 16 << 20  # bytes; a snapshot of 10,000 peers has 6 MB
MAX_ROWS = 20_000
MAX_TEXT = 300  # characters

POINTS = 1000
"""Steps asked for: over the whole run, and of the newest ones."""

Rows = Field(max_length=MAX_ROWS)
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Words = Annotated[str, BeforeValidator(lambda text: text[:MAX_TEXT] if isinstance(text, str) else text)]
Answer = TypeVar("Answer", bound=BaseModel)


class PageUnreachable(TTError):
    """The page does not answer now, or not as one does."""


class _Columns(BaseModel):
    """Lists of equal length; what a later version adds is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="after")
    def _equal(self) -> Self:
        lengths = {len(column) for column in vars(self).values() if isinstance(column, list)}
        if len(lengths) > 1:
            raise ValueError("its columns have unlike lengths")
        return self


class _History(_Columns):
    step: Annotated[list[Count], Rows]
    loss: Annotated[list[Number | None], Rows]
    last_step: Count = 0


class _Activity(_Columns):
    time: Annotated[list[Number], Rows]
    trainers: Annotated[list[Annotated[Number, Field(ge=0)]], Rows]  # means of stretches
    samples_per_second: Annotated[list[Number], Rows]


class _Leader(BaseModel):
    user: Words
    samples: Count
    seconds: Annotated[Number, Field(ge=0)]
    peers: Count = 0
    share: Number = 0.0
    last_seen: Number | None = None


class _Leaderboard(BaseModel):
    rows: Annotated[list[_Leader], Rows]


class _Round(BaseModel):
    time: Number
    words: Words


class _Rounds(BaseModel):
    rows: Annotated[list[_Round], Rows]


_SNAPSHOT = TypeAdapter(SwarmSnapshot)


@dataclass(frozen=True)
class Past:
    """losses: step → loss. leaders: by window, "day" and "ever"."""

    losses: dict[int, float]
    activity: list[Active]
    leaders: dict[str, list[Leader]]


class Page:
    """A run's page at `url`. identity: of the run that it must show. Raises UsageError for what is no address."""

    def __init__(self, url: str, identity: str) -> None:
        self.url, self._identity = _checked(url), identity
        self._http = httpx2.Client(
            timeout=TIMEOUT, headers={"User-Agent": f"tt/{__version__}"}, follow_redirects=True, max_redirects=3
        )

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def snapshot(self) -> SwarmSnapshot:
        """The swarm as the page's aux peer last saw it. Raises PageUnreachable, UsageError for another run's page."""
        fields = {**self._get("snapshot"), "history": []}
        try:
            found = _SNAPSHOT.validate_python(fields)
        except ValidationError as error:
            raise self._wrong("snapshot", error) from error
        if not _all_finite(fields) or len(found.peers) > MAX_ROWS:
            raise PageUnreachable(f"{self.url} answered a snapshot with impossible numbers")
        age = fields.get("age_s")
        if isinstance(age, int | float):  # the page's clock may be another than this machine's
            found = replace(found, time=time.time() - max(0.0, age))
        if found.identity != self._identity:
            seen = found.identity[:60]
            raise UsageError(f"{self.url} shows another run, {ascii(seen)}; this one is {self._identity}")
        return found

    def past(self) -> Past:
        """Losses, activity and contributions. Raises PageUnreachable."""
        whole = self._ask(_History, "history", points=POINTS)
        losses = dict(zip(whole.step, whole.loss, strict=True))
        if whole.last_step > POINTS:  # the newest ones unthinned, for the view of the last steps
            newest = self._ask(_History, "history", points=POINTS, first=whole.last_step - POINTS + 1)
            losses |= dict(zip(newest.step, newest.loss, strict=True))
        activity = self._ask(_Activity, "activity", points=POINTS)
        leaders = {window: self._ask(_Leaderboard, "leaderboard", window=window) for window in ("day", "ever")}
        return Past(
            {step: loss for step, loss in losses.items() if loss is not None},
            list(map(Active, activity.time, activity.trainers, activity.samples_per_second)),
            {window: [Leader(**vars(row)) for row in board.rows] for window, board in leaders.items()},
        )

    def rounds(self) -> list[tuple[float, str]]:
        """(Unix time, words) of the newest rounds, oldest first. Raises PageUnreachable."""
        return sorted((row.time, row.words) for row in self._ask(_Rounds, "rounds").rows)

    def _ask(self, form: type[Answer], what: str, **query: object) -> Answer:
        try:
            return form.model_validate(self._get(what, **query))
        except ValidationError as error:
            raise self._wrong(what, error) from error

    def _get(self, what: str, **query: object) -> dict[str, Any]:
        data = b""
        try:
            with self._http.stream("GET", f"{self.url}/api/{what}", params=query or None) as answer:  # type: ignore[arg-type]
                if answer.status_code != 200:
                    raise PageUnreachable(f"{self.url} answered {answer.status_code} to api/{what}")
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER:
                        raise PageUnreachable(f"{self.url} answers api/{what} without end")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PageUnreachable(f"{self.url} does not answer ({reason})") from error
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PageUnreachable(f"{self.url} answered api/{what} with no JSON: is it a run's page?") from error
        if not isinstance(content, dict):
            raise PageUnreachable(f"{self.url} answered api/{what} with no object: is it a run's page?")
        return content

    def _wrong(self, what: str, error: ValidationError) -> PageUnreachable:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:60] or what
        return PageUnreachable(f"{self.url} answered api/{what} in another form: {ascii(place)}: {first['msg'][:100]}")


def page_here(run: RunConfig) -> str:
    """The address of the page that an aux peer of this run serves on this machine, "" where there is none."""
    try:
        return _checked((folders.run_folder(run) / "page").read_text(encoding="utf-8").strip())
    except (OSError, ValueError, UsageError):  # of a full disk or a killed process; the DHT knows the recent past
        return ""


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # an impossible port or IPv6 address
        known = False
    if not known or parts.query or parts.fragment:
        raise UsageError(f'--from {url}: must be the address of a run\'s page, such as "http://127.0.0.1:8471"')
    return url.rstrip("/")


def _all_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_all_finite, value.values()))
    if isinstance(value, list):
        return all(map(_all_finite, value))
    if isinstance(value, float):
        return math.isfinite(value) and abs(value) < 1e40
    return not isinstance(value, int) or abs(value) < 10**16
