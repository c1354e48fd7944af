"""Checkpoints onto the Hub: the newest of a run's folder, with run file and card, in one commit each.

Notable:
- the repository says what has been published, and in a file which order to go back it has followed: a publisher that
  was killed goes on from there, another one that takes over too, and two beside each other do not publish twice;
- what is being sent is held by a hard link, for the folder may have dropped it by then; tried again it is the same
  file, and what the Hub has of it is not sent again;
- of several auxiliary peers the leader publishes (lease.py); the others do when it does not;
- the run file on the Hub, and what its organiser wrote on the card, stay as they are; other files are not touched.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tt_cli.auth.account import token as token_in_use
from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.auxiliary.parts import Heartbeat, run_of
from tt_cli.errors import TTError, UsageError, os_errors
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.hub.repository import CARD, Repository, RepositoryChanged, commit, read_text
from tt_cli.run import RunConfig, folders
from tt_cli.run.checkpoint_names import Head, name_of, outdated, read_head, step_in
from tt_cli.run.model_card import card, with_lists
from tt_cli.run.run_source import RUN_FILE, run_repository
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.reporter import Orders

ORDER = "published.order"  # in the repository: the number of the newest order to go back that it has followed
KEPT = 5  # the newest checkpoints; older ones too, ever fewer the older they are
ANSWER_SECONDS = 120.0  # for one of the Hub's answers: it looks at a large file before it gives one
LONGEST_WAIT = 1800.0
REFUSED_SECONDS = 3600.0  # after which what the Hub refused is asked for again with the same token
TRIES = 3  # while others change the repository
LEADER_LATE = 1.5  # times as long as it may take between two commits: then another one publishes

T = TypeVar("T")


@dataclass(frozen=True)
class PublisherOptions:
    """Options of the process, beside the run (TOML text).

    every: seconds between two commits; the first and the run's last step do not wait. again: seconds until a failure is
    tried again, twice as long after each. look: seconds between two looks. The Hub's token stays where Hugging Face's
    tools keep it; the database's URL is in the environment.
    """

    run: str
    every: float = 1800.0
    again: float = 30.0
    look: float = 5.0


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """The worker process: look until it is asked to leave, also while it sends: a commit is whole or not there."""
    opts, (run, database) = PublisherOptions(**options), run_of(options)
    os.nice(10)  # hashing and sending wait for the rest
    orders.leave_at_once()
    publisher = Publisher(run, database, opts, emit)
    emit(Log(f"checkpoints go to {run.checkpoints.repository} on the Hub"))
    while not orders.leave.is_set():
        publisher.look()
        orders.leave.wait(opts.look)


class Publisher:
    """Publishes the checkpoints of one run. `look` is called again and again, and is the only one to call."""

    def __init__(self, run: RunConfig, database: str, opts: PublisherOptions, emit: Emit):
        assert run.checkpoints.repository is not None
        self._run, self._database, self._opts, self._emit = run, database, opts, emit
        self._name = run.checkpoints.repository
        self._action = f"cannot publish in {self._name}"
        self._folder = folders.checkpoints(run)
        self._sending = folders.run_folder(run) / "publishing"
        self._followed = 0  # the newest order that the repository was seen to have followed
        with suppress(OSError, ValueError):  # written by tt 0.1.0
            self._followed = int((folders.run_folder(run) / ORDER).read_text(encoding="ascii")[:20])
        self._lease = LeaseFile(folders.run_folder(run))
        self._reader = HistoryReader(database)
        self._history_error = ""
        self._heartbeat = Heartbeat(lambda state: self._history(lambda store: store.tell_part("publisher", state)))
        self._watched: tuple[int, float] | None = None  # the newest step there, and when it is looked at next
        self._there: frozenset[int] | None = None  # the steps in the repository, None before it was looked into
        self._due_at = self._retry_at = self._ask_at = -float("inf")
        self._failures, self._told = 0, ""
        self._asked_with: tuple[str | None] | None = None  # the token, where another one is worth a new try
        self._unusable: set[str] = set()

    def look(self) -> None:
        """Publish what is due. What can go wrong is told once, and tried again later."""
        try:
            if self._waits():
                return
            self._look()
            self._failures, self._asked_with, self._retry_at, self._told = 0, None, -float("inf"), ""
        except TTError as error:
            now = time.monotonic()
            reason, again = str(error).removesuffix("; try again later"), ""
            if isinstance(error, UsageError):
                self._retry_at, self._ask_at = now + REFUSED_SECONDS, now + self._opts.again
                reason = _with_fix(error)
            else:
                wait = min(LONGEST_WAIT, self._opts.again * 2 ** min(self._failures, 20))
                self._failures, self._asked_with, self._retry_at = self._failures + 1, None, now + wait
                again = f"; trying again in {wait:.0f} s"
            self._heartbeat(reason + again)
            if reason != self._told:
                self._told = reason
                self._emit(Log(reason + again, "error"))

    def _waits(self) -> bool:
        """True while it is not yet time to try again; another token than the one that was refused makes it so."""
        now = time.monotonic()
        if now >= self._retry_at:
            return False
        if self._asked_with is None or now < self._ask_at:
            return True
        self._ask_at = now + self._opts.again  # to ask may renew a login, over the network
        return self._asked_with[0] == token_in_use()

    def _look(self) -> None:
        if self._stands_by():
            return
        if not (self._local() if self._there is None else self._plan(self._there)):
            self._heartbeat(self._state())
            return
        token = token_in_use()
        self._asked_with = (token,)
        if token is None:
            raise UsageError(f"{self._action}: nobody is logged in here")
        for _ in range(TRIES):
            repository = self._look_into()
            plan = self._plan(_steps(repository.files))
            if plan is None:
                return
            try:
                return self._carry_out(plan, repository)
            except RepositoryChanged:
                continue
        raise HubUnreachable(f"{self._action}: others change it all the time")

    def _stands_by(self) -> bool:
        """True where another auxiliary peer leads, and publishes: what is there now was not there a while ago."""
        leader, now = self._lease.other(), time.monotonic()
        if not leader:
            self._watched = None
            return False
        late = False
        if self._watched is None or now >= self._watched[1]:
            newest = max(_steps(self._look_into().files), default=-1)
            late = self._watched is not None and max(self._local(), default=-1) > newest <= self._watched[0]
            self._watched = newest, now + LEADER_LATE * self._opts.every
        if not late:
            self._heartbeat(f"…{leader[-6:]} leads, and publishes")
        return not late

    # ---------------------------------------------------------------- what there is to do

    def _plan(self, there: frozenset[int]) -> PublishingPlan | None:
        """The commit that is due, None where none is."""
        order = self._history(lambda _: self._reader.taken_back(self._followed))
        first = order[1] if order is not None else math.inf
        gone = frozenset(step for step in there if step >= first)
        newest, local = max(there - gone, default=-1), max(self._local(), default=-1)
        due = not there or local >= self._run.schedule.total_steps or time.monotonic() >= self._due_at
        checkpoint = self._candidate(newest) if local > newest and due else None
        return PublishingPlan(checkpoint, gone, order) if checkpoint is not None or gone else None

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
                self._emit(Log(f"not published: {error}", "warning"))
            return None
        return head

    def _local(self) -> frozenset[int]:
        with os_errors(f"cannot read the folder {self._folder}"):
            return _steps(os.listdir(self._folder))

    # ---------------------------------------------------------------- the repository

    def _look_into(self) -> Repository:
        """As it is now. It may have been changed by somebody else, or by a commit whose answer was lost."""
        membership = self._run.membership
        # Members read what belongs to their organisation; in anybody else's account, private would lock them out.
        inside = membership.kind == "organisation" and self._name.partition("/")[0] == membership.organisation
        repository = run_repository(self._name, self._run, self._action, private=inside or None)
        if ORDER in repository.files:
            with suppress(ValueError):
                self._followed = max(self._followed, int(read_text(repository, ORDER, self._action)[:20]))
        steps = _steps(repository.files)
        if steps and steps != self._there and repository.changed is not None:
            age = min(max(0.0, time.time() - repository.changed), self._opts.every)
            self._due_at = time.monotonic() + self._opts.every - age
        self._there = steps
        for held in sorted(self._sending.glob("*.safetensors")):
            if step_in(held.name) in steps and (head := self._head(held)):
                self._published(held, head, repository.commit or "main")
        return repository

    def _carry_out(self, plan: PublishingPlan, repository: Repository) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        there = _steps(repository.files)
        kept = set(there - plan.gone)
        back_at = plan.order[1] - 1 if plan.order else 0
        title = f"Back to step {back_at}"
        added: dict[str, bytes | str] = {}  # name → content, or the file that holds it
        if plan.checkpoint is not None:
            path, head = plan.checkpoint
            held, title = self._held(path), f"Step {head.step}"
            added[path.name] = str(held)
            kept.add(head.step)
            self._heartbeat(f"sending step {head.step} to {self._name}")
        kept -= outdated(sorted(kept, reverse=True), KEPT, spread=True)
        followed = max(self._followed, plan.order[0] if plan.order else 0)
        if followed:
            added[ORDER] = f"{followed}\n".encode()
        if RUN_FILE not in repository.files:
            added[RUN_FILE] = self._run.to_toml().encode()
        if (text := self._card(repository, kept)) is not None:
            added[CARD] = text.encode()
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in added.items()),
            *(CommitOperationDelete(path_in_repo=name_of(step)) for step in there - kept),
        ]
        action = f"cannot publish {title[0].lower()}{title[1:]} in {self._name}"
        made = commit(repository, operations, title, action, ANSWER_SECONDS)
        self._there, self._due_at = frozenset(kept), time.monotonic() + self._opts.every
        self._followed = followed
        if plan.gone:
            self._emit(Log(f"in {self._name} too, the run is back at step {back_at}"))
        if plan.checkpoint is not None:
            self._published(held, head, made.oid)

    def _held(self, path: Path) -> Path:
        """A hard link to it, which stays while it is sent."""
        held = self._sending / path.name
        remedy = "free some space, or set TT_HOME to a folder where there can be hard links"
        with os_errors(f"cannot hold {path} while it is sent", remedy):
            self._sending.mkdir(mode=0o700, exist_ok=True)
            if not held.exists():
                os.link(path, held)
        return held

    def _card(self, repository: Repository, steps: set[int]) -> str | None:
        """The new text of the card, None where it stays."""
        losses = {step: self._loss(step) for step in steps}
        rows = self._history(lambda _: self._reader.leaderboard())
        by = None if rows is None else [(row["user"], row["samples"]) for row in rows if row["samples"]]
        if CARD not in repository.files:
            return card(self._run, losses, by or ())
        there = read_text(repository, CARD, self._action)
        text = with_lists(there, self._run, losses, by)
        return text if text != there else None

    def _published(self, held: Path, head: Head, revision: str) -> None:
        from huggingface_hub.constants import ENDPOINT

        file = held.stat()
        url = f"{ENDPOINT}/{self._name}/blob/{revision}/{held.name}"
        self._history(lambda store: store.add_checkpoint(head.step, file.st_mtime, head.digest, file.st_size, url))
        self._told = ""
        self._heartbeat(self._state())
        held.unlink(missing_ok=True)
        self._emit(Log(f"step {head.step} ({file.st_size / 1e6:,.1f} MB) is published in {self._name}"))

    def _state(self) -> str:
        newest = max(self._there or (), default=None)
        return f"nothing is in {self._name} yet" if newest is None else f"step {newest} is in {self._name}"

    # ---------------------------------------------------------------- the run's history

    @cached_property
    def _store(self) -> HistoryWriter:
        return HistoryWriter(self._database, self._run.identity, mends=False)

    def _history(self, action: Callable[[HistoryWriter], T]) -> T | None:
        """What the history answers; None, and it goes on, where the database does not."""
        try:
            answer = action(self._store)  # made before anything is read: it makes the tables
        except TTError as error:
            if str(error) != self._history_error:
                self._history_error = str(error)
                self._emit(Log(f"publishing goes on without the run's history: {error}", "warning"))
            return None
        self._history_error = ""
        return answer

    def _loss(self, step: int) -> float | None:
        """The loss of a step, None where it is not known."""
        rows = self._history(lambda _: self._reader.steps_after(step - 1, 1)) or []
        return rows[0][2] if rows and rows[0][0] == step else None


class PublishingPlan(NamedTuple):
    """One commit. checkpoint: what is to be added. gone: steps to be taken back.

    order: the newest to go back, (number, first step taken back).
    """

    checkpoint: tuple[Path, Head] | None
    gone: frozenset[int]
    order: tuple[int, int] | None


def _steps(names: Iterable[str]) -> frozenset[int]:
    return frozenset(step for name in names if (step := step_in(name)) is not None)


def _with_fix(error: UsageError) -> str:
    """Name what was refused, and what helps where it is about the token."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error.__cause__, (HfHubHTTPError, PermissionError)) and "logged in" not in str(error):
        return str(error)
    fix = "a `tt login` with a token that may write there is noticed, a new HF_TOKEN needs a new start"
    return f"{str(error).removesuffix('; run `tt login`')}; {fix}; --no-publish leaves the Hub alone"
