"""Client of a run's web page: the swarm now, and its past, over HTTP. Nothing that it answers is believed unchecked.

A page is an aux peer's, or one that was exported to files (`api/run.json` for `api/run`). Answers are bounded in bytes
and in rows, numbers are finite and texts short; texts lose their control characters where they are drawn.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from tt_cli import __version__
from tt_cli.errors import TTError, UsageError, first_line
from tt_cli.hub.hub_files import PLAIN, TooLong, http_client, plain_body
from tt_cli.monitor.scene import DAY, EVER, Active
from tt_cli.run import folders
from tt_cli.swarm.records.snapshot import SwarmNow, SwarmSnapshot
from tt_cli.web.schemas import Activity, Leader, Leaderboard, Rounds, Snapshot, Steps

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

TIMEOUT = 10.0  # seconds
MAX_ANSWER = 16 << 20  # bytes; a snapshot of 10,000 peers has 6 MB

POINTS = 1000
"""Steps asked for: over the whole run, and of the newest ones."""

Form = TypeVar("Form", bound=BaseModel)


class PageUnreachable(TTError):
    """The page does not answer now, or not as one does."""


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
        headers = {"User-Agent": f"tt/{__version__}", **PLAIN}
        self._http = http_client(timeout=TIMEOUT, headers=headers, follow_redirects=True, max_redirects=3)
        self.close = self._http.close

    def snapshot(self) -> SwarmSnapshot:
        """The swarm as the page's aux peer last saw it. Raises PageUnreachable, UsageError for another run's page."""
        answer = self._ask(Snapshot, "snapshot")
        if answer.identity != self._identity:
            seen = answer.identity[:60]
            raise UsageError(f"{self.url} shows another run, {ascii(seen)}; this one is {self._identity}")
        fields = {name: value for name, value in answer if name in SwarmNow.model_fields}
        fields["time"] = time.time() - answer.age_s  # the page's clock may be another than this machine's
        return SwarmSnapshot(**fields, history=[])

    def past(self) -> Past:
        """Losses, activity and contributions. Raises PageUnreachable."""
        whole = self._ask(Steps, "history", points=POINTS)
        losses = dict(zip(whole.step, whole.loss, strict=True))
        if whole.last_step > POINTS:  # the newest ones unthinned, for the view of the last steps
            newest = self._ask(Steps, "history", points=POINTS, first=whole.last_step - POINTS + 1)
            losses |= dict(zip(newest.step, newest.loss, strict=True))
        activity = self._ask(Activity, "activity", points=POINTS)
        return Past(
            losses,
            list(map(Active, activity.time, activity.trainers, activity.samples_per_second)),
            {window: self._ask(Leaderboard, "leaderboard", window=window).rows for window in (DAY, EVER)},
        )

    def rounds(self) -> list[tuple[float, str]]:
        """(Unix time, words) of the newest rounds, oldest first. Raises PageUnreachable."""
        return sorted((row.time, row.words) for row in self._ask(Rounds, "rounds").rows)

    def _ask(self, form: type[Form], what: str, **query: object) -> Form:
        try:
            return form.model_validate_json(self._get(what, **query), extra="ignore")  # what a later version adds
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))[:60]
            reason = f"in another form: {ascii(place or what)}: {first['msg'][:100]}"
            if not place and first["type"] in ("json_invalid", "model_type"):
                reason = f"with no {'JSON' if first['type'] == 'json_invalid' else 'object'}: is it a run's page?"
            raise PageUnreachable(f"{self.url} answered api/{what} {reason}") from error

    def _get(self, what: str, **query: object) -> bytes:
        try:
            with self._http.stream("GET", f"{self.url}/api/{what}", params=query or None) as answer:
                if answer.status_code != 200:
                    raise PageUnreachable(f"{self.url} answered {answer.status_code} to api/{what}")
                return plain_body(answer, MAX_ANSWER)
        except TooLong:
            raise PageUnreachable(f"{self.url} answers api/{what} without end") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise PageUnreachable(f"{self.url} does not answer ({first_line(error)})") from error


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
