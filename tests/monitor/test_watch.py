"""Looking beside the screen: what is remembered, and what trouble does."""

from __future__ import annotations

from pathlib import Path

from monitor.made import snapshot, trainer, watch_of

from tt_cli.errors import TTError
from tt_cli.run.folders import home
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.supervisor.slot import claim_slot
from tt_cli.swarm.records.snapshot import SwarmSnapshot


class Looks:
    """Answers one after the other; the last one again and again."""

    def __init__(self, *answers: SwarmSnapshot | Exception) -> None:
        self._answers = list(answers)

    def __call__(self) -> SwarmSnapshot:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_curve_is_what_is_remembered_and_what_went_by(tmp_path: Path) -> None:
    looks = Looks(
        snapshot(epoch=1, loss=6.0, history=[]),
        snapshot(epoch=3, loss=4.0, history=[]),
        snapshot(epoch=3, loss=4.5, history=[(2, 5.0, 0.0), (3, 4.25, 0.0)]),
        snapshot(epoch=2, loss=5.0, history=[]),
    )
    watch = watch_of(looks, tmp_path)
    curves = []
    for _ in range(4):
        watch.look()
        curves.append(list(watch.scene().curve))
    assert curves[2] == [(1, 6.0), (2, 5.0), (3, 4.25)]
    assert curves[3] == [(1, 6.0), (2, 5.0)]  # the run was taken back: later steps are no part of it any more


def test_a_swarm_that_goes_and_comes_back_stays_on_the_screen(tmp_path: Path) -> None:
    looks = Looks(snapshot(time=10.0), snapshot(time=12.0, peers=[]), TTError("the daemon died"), snapshot(time=52.0))
    watch = watch_of(looks, tmp_path)
    seen = []
    for _ in range(4):
        watch.look()
        seen.append(watch.scene())
    assert [one.answered for one in seen] == [10.0, 10.0, 10.0, 52.0]
    assert [one.empty for one in seen] == [False, True, True, False]
    assert [one.trouble for one in seen] == ["", "", "the daemon died", ""]
    assert all(one.snapshot is not None and one.snapshot.peers for one in seen)
    said = [words for _, words in seen[-1].log]
    assert said == [
        "watching 1 trainer at step 7, loss 3.214",
        "no peer answers any more",
        "1 peer answer again after 42 s",
    ]


def test_what_breaks_inside_is_told_in_a_line(tmp_path: Path) -> None:
    watch = watch_of(Looks(BrokenPipeError("\x1b[2Jpipe\nbroke")), tmp_path)
    watch.look()
    assert watch.scene().trouble == "BrokenPipeError: ?[2Jpipe broke"


def test_the_swarms_size_over_time(tmp_path: Path) -> None:
    looks = Looks(*(snapshot(time=float(at), trainers=at, samples_per_second=2.0 * at) for at in (1, 3, 2)))
    watch = watch_of(looks, tmp_path)
    for _ in range(3):
        watch.look()
    rising = [(1.0, 1, 2.0), (2.0, 2, 4.0), (3.0, 3, 6.0)]  # also where a clock was set back
    assert [tuple(one) for one in watch.scene().activity] == rising


def test_the_peers_of_this_machine(tmp_path: Path) -> None:
    folder = home() / "runs" / "emoji-1a2b3c4d"
    folder.mkdir(parents=True)
    slot = claim_slot(folder, "peer")
    PeerState(run="emoji", identity="emoji-1a2b3c4d", total_steps=100, version="1").write(slot.status)
    (home() / "runs" / "other").mkdir()
    PeerState(run="other", identity="other", total_steps=100, version="1").write(
        home() / "runs" / "other" / "peer.json"
    )
    watch = watch_of(lambda: snapshot(peers=[trainer()]), folder)
    watch.look_here()
    assert [seen.status.run for seen in watch.scene().mine] == ["emoji"]
