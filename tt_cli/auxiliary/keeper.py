"""Keeps the swarm's latest state: fetches it from a trainer, checks it, writes it, hands it out."""

from __future__ import annotations

import threading
import time

import torch

from tt_cli.checkpoint import TrainingState, newest, pack, save, unpack
from tt_cli.errors import TTError
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Log, Saved, Synchronised
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.board import Board, View

MIN_FETCH_SECONDS = 3.0
SHARE_OF_TIME = 0.1  # of the auxiliary peer's time goes into fetching at most
DOWNLOAD_SECONDS = 600.0
KEPT = 5
LOOKS = 3


class Keeper:
    """The state of one run, in memory as bytes and on the disk as checkpoints.

    hand_over is called from the averager's thread; everything else from the coordinator's loop.
    """

    def __init__(self, run: RunConfig, emit: Emit):
        self._run, self._emit = run, emit
        self._folder = folders.checkpoints(run)
        self._lock = threading.Lock()
        self._blob: torch.Tensor | None = None
        self.epoch, self.digest = 0, ""
        self._fetch_again_at = 0.0
        found = newest(self._folder, run.identity, lambda words: emit(Log(words, "warning")), to_train=True)
        if found is not None:
            path, state = found
            self._hold(state, pack(state))
            emit(Log(f"holding step {self.epoch} from {path}"))

    def hand_over(self) -> tuple[dict[str, object], torch.Tensor]:
        """For a peer that asks for the state. Raises LookupError while there is none."""
        with self._lock:
            if self._blob is None:
                raise LookupError("no state yet")
            return {"epoch": self.epoch, "digest": self.digest}, self._blob

    def wants(self, view: View) -> bool:
        """True when trainers hold a state this peer should fetch now."""
        new = (view.epoch, view.digest) != (self.epoch, self.digest) and view.epoch >= self.epoch
        last = view.epoch >= self._run.schedule.total_steps
        return bool(view.digest) and new and (last or time.monotonic() >= self._fetch_again_at)

    def fetch(self, board: Board, averager: Averager) -> None:
        """Fetch the state that most of the foremost hold; on failure say why and keep the one before."""
        started = time.monotonic()
        found = averager.download(board.view.donors(), DOWNLOAD_SECONDS)
        if found is not None:
            donor, _, blob = found
            self._take(donor, blob, board, started)
        seconds = time.monotonic() - started
        self._fetch_again_at = time.monotonic() + max(MIN_FETCH_SECONDS, seconds / SHARE_OF_TIME)

    def _take(self, donor: str, blob: torch.Tensor, board: Board, started: float) -> None:
        data = blob.numpy().tobytes()
        try:
            state = unpack(data)
            self._check(state, board)
        except (TTError, ValueError) as error:
            self._emit(Log(f"{donor} sent a state that is not kept: {error}", "warning"))
            return
        self._hold(state, data)
        self._emit(Synchronised(self.epoch, donor, self.digest, time.monotonic() - started, len(data)))
        try:
            self._emit(Saved(state.step, str(save(self._folder, state, keep=KEPT))))
        except TTError as error:
            self._emit(Log(f"the state is kept in memory only: {error}", "error"))

    def _check(self, state: TrainingState, board: Board) -> None:
        inside = RunConfig.from_toml(state.run_toml, "the run file inside").identity
        if {state.identity, inside} != {self._run.identity}:
            raise ValueError(f"it belongs to run {state.identity}, with the run file of {inside}")
        wanted = (state.step, state.digest())
        for _ in range(LOOKS):  # the donor may have stepped just before it answered: its record follows
            if any((r.epoch, r.digest) == wanted for r in board.fresh_view().records if r.role == "trainer"):
                return
        raise ValueError(f"no member signed this state of step {state.step}")

    def _hold(self, state: TrainingState, data: bytes) -> None:
        blob = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._lock:
            self._blob, self.epoch, self.digest = blob, state.step, state.digest()
