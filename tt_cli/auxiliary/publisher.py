"""Checkpoints onto the Hub: the newest of a run's folder, with run file and card, in one commit each.

Notable:
- the repository says what has been published: a publisher that was killed goes on from there, and two of them beside
  each other do not publish twice;
- what is being sent is held by a hard link, for the folder may have dropped it by then; tried again it is the same
  file, and what the Hub has of it is not sent again;
- of several auxiliary peers the leader publishes (lease.py); the others do when it does not;
- the run file on the Hub, and what its organiser wrote on the card, stay as they are; other files are not touched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.auxiliary.parts import leave_at_once, run_of
from tt_cli.errors import TTError, UsageError
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter
from tt_cli.hub.hub_files import HubUnreachable, hub_errors
from tt_cli.hub.repository import CARD, Repository, RepositoryChanged, commit, read_text
from tt_cli.run import RunConfig, folders
from tt_cli.run.checkpoint_names import Head, name_of, outdated, read_head, step_in
from tt_cli.run.model_card import card, with_checkpoints
from tt_cli.run.run_source import RUN_FILE, run_repository
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.reporter import Orders, run_worker

KEPT = 5  # the newest checkpoints; older ones too, ever fewer the older they are
ANSWER_SECONDS = 120.0  # for one of the Hub's answers: it looks at a large file before it gives one
LONGEST_WAIT = 1800.0
REFUSED_SECONDS = 3600.0  # after which what the Hub refused is asked for again with the same token
TRIES = 3  # while others change the repository
PART = "publisher"
LEADER_LATE = 1.5  # times as long as it may take between two commits: then another one publishes
TOLD_SECONDS = 30.0

Tell = Callable[[str, str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class PublisherOptions:
    """Options of the process, beside the run (TOML text). Times in seconds, see Publisher.

    The Hub's token stays where Hugging Face's tools keep it; the database's URL is in the environment.
    """

    run: str
    every: float = 1800.0
    again: float = 30.0
    look: float = 5.0


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """The worker process: look until it is asked to leave, also while it sends: a commit is whole or not there."""
    opts, (run, database) = PublisherOptions(**options), run_of(options)
    os.nice(10)  # hashing and sending wait for the rest
    leave_at_once(orders)

    def tell(words: str, level: str) -> None:
        emit(Log(words, level))

    publisher = Publisher(run, PublishingHistory(database, run, tell), tell, opts.every, opts.again)
    emit(Log(f"checkpoints go to {run.checkpoints.repository} on the Hub"))
    while not orders.leave.is_set():
        publisher.look()
        orders.leave.wait(opts.look)


class Publisher:
    """Publishes the checkpoints of one run. `look` is called again and again, and is the only one to call.

    every: seconds between two commits; the first and the run's last step do not wait. again: seconds until a failure is
    tried again, twice as long after each. tell: takes a line for a person and its level.
    """

    def __init__(self, run: RunConfig, history: PublishingHistory, tell: Tell, every: float, again: float):
        assert run.checkpoints.repository is not None
        self._run, self._history, self._tell, self._every, self._again = run, history, tell, every, again
        self._name = run.checkpoints.repository
        self._folder = folders.checkpoints(run)
        self._sending = folders.run_folder(run) / "publishing"
        self._lease = LeaseFile(folders.run_folder(run))
        self._watched: tuple[int, float] | None = None  # the newest step there, and when it is looked at next
        self._order_file = folders.run_folder(run) / "published.order"
        self._there: frozenset[int] | None = None  # the steps in the repository, None before it was looked into
        self._due_at = self._retry_at = self._ask_at = -float("inf")
        self._failures = 0
        self._asked_with: tuple[str | None] | None = None  # the token, where another one is worth a new try
        self._told = ""
        self._unusable: set[str] = set()

    def look(self) -> None:
        """Publish what is due. What can go wrong is told once, and tried again later."""
        try:
            if self._waits():
                return
            self._look()
            self._failures, self._asked_with, self._retry_at, self._told = 0, None, -float("inf"), ""
        except UsageError as error:
            now = time.monotonic()
            self._retry_at, self._ask_at = now + REFUSED_SECONDS, now + self._again
            self._fail(_with_fix(error))
        except TTError as error:
            self._failures, self._asked_with = self._failures + 1, None
            wait = min(LONGEST_WAIT, self._again * 2 ** min(self._failures - 1, 20))
            self._retry_at = time.monotonic() + wait
            self._fail(f"{str(error).removesuffix('; try again later')}; trying again in {wait:.0f} s")

    def _waits(self) -> bool:
        """True while it is not yet time to try again; another token than the one that was refused makes it so."""
        now = time.monotonic()
        if now >= self._retry_at:
            return False
        if self._asked_with is None or now < self._ask_at:
            return True
        self._ask_at = now + self._again  # to ask may renew a login, over the network
        return self._asked_with[0] == _token()

    def _fail(self, words: str) -> None:
        self._history.tell(words)
        reason = words.partition("; trying again in")[0]
        if reason != self._told:
            self._told = reason
            self._tell(words, "error")

    def _look(self) -> None:
        if self._stands_by():
            return
        idle = not self._local() if self._there is None else self._plan(self._there) is None
        if idle:
            self._history.tell(self._state())
            return
        token = _token()
        self._asked_with = (token,)
        if token is None:
            raise UsageError(f"cannot publish in {self._name}: nobody is logged in here")
        for _ in range(TRIES):
            there = self._look_into()
            plan = self._plan(self._steps(there))
            if plan is None:
                return
            try:
                self._carry_out(plan, there)
                return
            except RepositoryChanged:
                continue
        raise HubUnreachable(f"cannot publish in {self._name}: others change it all the time")

    def _stands_by(self) -> bool:
        """True where another auxiliary peer leads, and publishes: what is there now was not there a while ago."""
        leader, now = self._lease.other(), time.monotonic()
        if not leader:
            self._watched = None
            return False
        late = False
        if self._watched is None or now >= self._watched[1]:
            newest = max(self._steps(self._look_into()), default=-1)
            late = self._watched is not None and max(self._local(), default=-1) > newest <= self._watched[0]
            self._watched = newest, now + LEADER_LATE * self._every
        if not late:
            self._history.tell(f"…{leader[-6:]} leads, and publishes")
        return not late

    # ---------------------------------------------------------------- what there is to do

    def _plan(self, there: frozenset[int]) -> PublishingPlan | None:
        order = self._new_order()
        gone = {step for step in there if order is not None and step >= order[1]}
        if order is not None and not gone:
            self._order_done(order[0])
        newest = max(there - gone, default=-1)
        candidate = self._candidate(newest) if self._is_due(there, newest) else None
        if candidate is None and not gone:
            return None
        return PublishingPlan(candidate, frozenset(gone), order)

    def _is_due(self, there: frozenset[int], newest: int) -> bool:
        local = max(self._local(), default=-1)
        last = local >= self._run.schedule.total_steps
        return local > newest and (last or not there or time.monotonic() >= self._due_at)

    def _candidate(self, after: int) -> tuple[Path, Head] | None:
        """The checkpoint to publish, of a step after this one: the one that was being sent, else the newest."""
        for held in sorted(self._sending.glob("*.safetensors")):
            if (step_in(held.name) or 0) > after and self._still_there(held) and (head := self._head(held)):
                return held, head
            held.unlink(missing_ok=True)
        for step in sorted(self._local(), reverse=True):
            if step <= after:
                break
            if head := self._head(self._folder / name_of(step)):
                return self._folder / name_of(step), head
        return None

    def _still_there(self, held: Path) -> bool:
        """False for one that the folder has dropped: a newer one is as good, or it was taken back."""
        try:
            return (self._folder / held.name).samefile(held)
        except OSError:
            return False

    def _head(self, path: Path) -> Head | None:
        """The head of a checkpoint that can be published; what is wrong with another one is told once."""
        try:
            head = read_head(path)
            if head.identity != self._run.identity or head.step != step_in(path.name):
                raise TTError(f"{path} is of step {head.step} of the run {head.identity}")
            if not head.trains:
                raise TTError(f"{path} holds weights to draw with, not the optimizer's state")
        except TTError as error:
            if path.exists() and path.name not in self._unusable:
                self._unusable.add(path.name)
                self._tell(f"not published: {error}", "warning")
            return None
        return head

    def _local(self) -> set[int]:
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            raise TTError(f"cannot read the folder {self._folder}: {error.strerror or error}") from error
        return {step for name in names if (step := step_in(name)) is not None}

    def _new_order(self) -> tuple[int, int] | None:
        """The organiser's order to go back that this repository has not followed: (number, first step taken back)."""
        order = self._history.taken_back()
        try:
            done = int(self._order_file.read_text(encoding="ascii")[:20])
        except (OSError, ValueError):
            done = 0
        return order if order is not None and order[0] > done else None

    def _order_done(self, number: int) -> None:
        try:
            self._order_file.write_text(f"{number}\n", encoding="ascii")
        except OSError as error:
            raise TTError(f"cannot write {self._order_file}: {error.strerror or error}; free some space") from error

    # ---------------------------------------------------------------- the repository

    def _look_into(self) -> Repository:
        """As it is now. It may have been changed by somebody else, or by a commit whose answer was lost."""
        membership = self._run.membership
        # Members read what belongs to their organisation; in anybody else's account, private would lock them out.
        inside = membership.kind == "organisation" and self._name.partition("/")[0] == membership.organisation
        repository = run_repository(self._name, self._run, f"cannot publish in {self._name}", private=inside or None)
        steps = self._steps(repository)
        if steps and steps != self._there and repository.changed is not None:
            age = min(max(0.0, time.time() - repository.changed), self._every)
            self._due_at = time.monotonic() + self._every - age
        self._there = steps
        for held in sorted(self._sending.glob("*.safetensors")):
            if step_in(held.name) in steps and (head := self._head(held)):
                self._published(held, head, repository.commit or "main")
        return repository

    @staticmethod
    def _steps(repository: Repository) -> frozenset[int]:
        return frozenset(step for name in repository.files if (step := step_in(name)) is not None)

    def _carry_out(self, plan: PublishingPlan, repository: Repository) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        kept = set(self._steps(repository)) - plan.gone
        words, sent = f"Back to step {plan.order[1] - 1}" if plan.order else "", None
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        if plan.found is not None:
            path, head = plan.found
            sent = self._held(path)
            kept.add(head.step)
            words = f"Step {head.step}"
            operations.append(CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=str(sent)))
            self._history.tell(f"sending step {head.step} to {self._name}")
        kept -= outdated(sorted(kept, reverse=True), KEPT, spread=True)
        if RUN_FILE not in repository.files:
            operations.append(CommitOperationAdd(path_in_repo=RUN_FILE, path_or_fileobj=self._run.to_toml().encode()))
        if (text := self._card(repository, kept)) is not None:
            operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=text.encode()))
        operations += [CommitOperationDelete(path_in_repo=name_of(step)) for step in self._steps(repository) - kept]
        action = f"cannot publish {words[0].lower()}{words[1:]} in {self._name}"
        made = commit(repository, operations, words, action, ANSWER_SECONDS)
        self._there, self._due_at = frozenset(kept), time.monotonic() + self._every
        if plan.order is not None:
            self._order_done(plan.order[0])
            self._tell(f"in {self._name} too, the run is back at step {plan.order[1] - 1}", "info")
        if plan.found is not None and sent is not None:
            self._published(sent, plan.found[1], made.oid)

    def _held(self, path: Path) -> Path:
        """A hard link to it, which stays while it is sent."""
        held = self._sending / path.name
        try:
            self._sending.mkdir(mode=0o700, exist_ok=True)
            if not held.exists():
                os.link(path, held)
        except OSError as error:
            advice = "free some space, or set TT_HOME to a folder where there can be hard links"
            raise TTError(f"cannot hold {path} while it is sent: {error.strerror or error}; {advice}") from error
        return held

    def _card(self, repository: Repository, steps: set[int]) -> str | None:
        """The new text of the card, None where it stays."""
        losses = {step: self._history.loss(step) for step in steps}
        if CARD not in repository.files:
            return card(self._run, losses)
        there = read_text(repository, CARD, f"cannot publish in {self._name}")
        text = with_checkpoints(there, self._run, losses)
        return text if text != there else None

    def _published(self, held: Path, head: Head, revision: str) -> None:
        from huggingface_hub.constants import ENDPOINT

        file = held.stat()
        url = f"{ENDPOINT}/{self._name}/blob/{revision}/{held.name}"
        self._history.add_checkpoint(head, file.st_mtime, file.st_size, url)
        self._told = ""
        self._history.tell(self._state())
        held.unlink(missing_ok=True)
        self._tell(f"step {head.step} ({file.st_size / 1e6:,.1f} MB) is published in {self._name}", "info")

    def _state(self) -> str:
        newest = max(self._there or (), default=None)
        return f"nothing is in {self._name} yet" if newest is None else f"step {newest} is in {self._name}"


@dataclass(frozen=True)
class PublishingPlan:
    """One commit. found: what is to be added. gone: steps taken back by `order` (number, first step of them)."""

    found: tuple[Path, Head] | None
    gone: frozenset[int]
    order: tuple[int, int] | None


class PublishingHistory:
    """The run's history as far as a publisher needs it, which goes on when the database does not answer."""

    def __init__(self, url: str, run: RunConfig, tell: Tell):
        self._url, self._run, self._tell = url, run, tell
        self._store: HistoryWriter | None = None
        self._reader = HistoryReader(url)
        self._failed = ""
        self._last = "", -float("inf")

    def tell(self, words: str) -> None:
        """Tell /health what the publisher does: what is new at once, what is not now and then."""
        if words != self._last[0] or time.monotonic() > self._last[1] + TOLD_SECONDS:
            self._last = words, time.monotonic()
            self._try(lambda store: store.tell_part(PART, words))

    def add_checkpoint(self, head: Head, at: float, size: int, url: str) -> None:
        """Record one that is published. at: Unix time when it was written."""
        self._try(lambda store: store.add_checkpoint(head.step, at, head.digest, size, url))

    def loss(self, step: int) -> float | None:
        """The loss of a step, None where it is not known."""
        rows = self._try(lambda _: self._reader.steps_after(step - 1, 1)) or []
        return rows[0][2] if rows and rows[0][0] == step else None

    def taken_back(self) -> tuple[int, int] | None:
        """See Reader."""
        return self._try(lambda _: self._reader.taken_back())

    def _try(self, action: Callable[[HistoryWriter], T]) -> T | None:
        try:
            if self._store is None:  # first of all: it makes the tables that are read
                self._store = HistoryWriter(self._url, self._run.identity, mends=False)
            result = action(self._store)
        except TTError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                self._tell(f"publishing goes on without the run's history: {error}", "warning")
            return None
        self._failed = ""
        return result


def _token() -> str | None:
    from huggingface_hub import get_token

    with hub_errors("cannot read the stored login"):
        return get_token()


def _with_fix(error: UsageError) -> str:
    """Name what was refused, and what helps where it is about the token."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error.__cause__, (HfHubHTTPError, PermissionError)) and "logged in" not in str(error):
        return str(error)
    fix = "a `tt login` with a token that may write there is noticed, a new HF_TOKEN needs a new start"
    return f"{str(error).removesuffix('; run `tt login`')}; {fix}; --no-publish leaves the Hub alone"


if __name__ == "__main__":
    sys.exit(run_worker(main))
