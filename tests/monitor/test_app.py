"""The full screen, driven by keys and the mouse through Textual's pilot, over made snapshots."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from monitor.made import EVIL, snapshot, trainer, watch_of
from rich.cells import cell_len
from textual.pilot import Pilot

from tt_cli.errors import TTError
from tt_cli.monitor.monitor_app import MonitorApp
from tt_cli.monitor.peer_tables import PEER_COLUMNS
from tt_cli.monitor.widgets import PeerTable
from tt_cli.swarm.records.snapshot import PeerView, SwarmSnapshot
from tt_cli.terminal.table import Column

pytestmark = pytest.mark.slow

WAIT = 60.0
CROWD = [
    trainer(user=name, peer_id=f"Qm{name}", samples_per_second=speed, share=speed / 60, lag=lag, age_s=age)
    for name, speed, lag, age in (("carla", 10.0, 0, 3.0), ("ada", 30.0, 2, 2.0), ("bob", 20.0, 1, 1.0))
]
Screen = Pilot[None]


def look() -> SwarmSnapshot:
    return snapshot(time=time.time(), peers=CROWD, trainers=3)


def drive(
    tmp_path: Path,
    steps: Callable[[Screen], Awaitable[None]],
    look: Callable[[], SwarmSnapshot] = look,
    size: tuple[int, int] = (80, 24),
) -> MonitorApp:
    """Run the screen with what `steps` does to it; return the application when it has ended."""

    async def run() -> MonitorApp:
        with watch_of(look, tmp_path) as watch:
            app = MonitorApp(watch, 0.05)
            async with app.run_test(size=size) as pilot:
                await pilot.pause()
                await steps(pilot)
            app.draw(at_once=True)  # as a timer may that ends last
        return app

    return asyncio.run(asyncio.wait_for(run(), WAIT))


def lines(pilot: Screen) -> list[str]:
    return [strip.text for strip in pilot.app.screen._compositor.render_strips()]


async def shows(pilot: Screen, words: str) -> str:
    """Wait until these words are on the screen; return all of it."""
    give_up = time.monotonic() + WAIT / 2
    while words not in (text := "\n".join(lines(pilot))):
        assert time.monotonic() < give_up, f"{words!r} is not on the screen:\n{text}"
        await pilot.pause(0.02)
    return text


def first_cells(pilot: Screen) -> list[str]:
    """The first word of each row of the table of peers."""
    return [line.split()[0] for line in lines(pilot)[3:-4] if line.strip()]


def test_the_keys_go_to_the_views(tmp_path: Path) -> None:
    async def steps(pilot: Screen) -> None:
        await shows(pilot, "next step")
        for key, words in (
            ("2", "samples/s▼"),
            ("3", "compute time"),
            ("4", "No peer of this run has run on this machine"),
            ("5", "watching 3 trainers at step 7"),
            ("tab", "next step"),
            ("tab", "samples/s▼"),
            ("shift+tab", "next step"),
        ):
            await pilot.press(key)
            await shows(pilot, words)

    drive(tmp_path, steps)


def test_the_overview_says_it_all(tmp_path: Path) -> None:
    async def steps(pilot: Screen) -> None:
        for words in (
            "tt monitor emoji",
            "emoji-1a2b3c4d",
            " 1 overview ",
            "7 of 2,000 · 0 % · ends in 8 h 44 min",
            "100 of 256 samples · in 10 s",
            "3 trainers · 16.2 samples/s · 6.48 TFLOP/s · loss 3.214",
            "loss, all steps, 1 to 7",
            "lowest 1.000 · now 3.214",
            "q quit",
            "? help",
            "Tab next view",
        ):
            text = await shows(pilot, words)  # the frame is drawn in parts
        assert sum(0x2800 <= ord(cell) < 0x2900 for cell in text) > 30

    drive(tmp_path, steps)


def test_the_loss_on_a_logarithmic_axis_and_of_the_last_steps(tmp_path: Path) -> None:
    history = [(step, 9.0 - step / 300, 0.0) for step in range(1, 2001)]

    async def steps(pilot: Screen) -> None:
        await shows(pilot, "loss, all steps, 1 to 2,001")
        await pilot.press("l")
        await shows(pilot, "loss, all steps, 1 to 2,001, log scale")
        await pilot.press("n")
        await shows(pilot, "loss, last 1,000 steps, log scale")
        await pilot.press("n", "l")
        text = await shows(pilot, "loss, last 100 steps ")
        assert "1,902" in text and "2,001" in text
        await pilot.press("n")
        await shows(pilot, "loss, all steps")

    drive(tmp_path, steps, lambda: snapshot(epoch=2001, total_steps=9000, loss=2.3, history=history))


def test_peers_are_sorted_by_key_and_by_mouse(tmp_path: Path) -> None:
    async def steps(pilot: Screen) -> None:
        await pilot.press("2")
        await shows(pilot, "samples/s▼")
        assert first_cells(pilot) == ["ada", "bob", "carla"]
        await pilot.press("r")
        await shows(pilot, "samples/s▲")
        assert first_cells(pilot) == ["carla", "bob", "ada"]
        await pilot.press("s", "s")
        await shows(pilot, "lag▼")
        assert first_cells(pilot) == ["ada", "bob", "carla"]
        await pilot.click("#peers", offset=(2, 0))
        await shows(pilot, "peer▲")
        assert first_cells(pilot) == ["ada", "bob", "carla"]
        await pilot.click("#peers", offset=(2, 0))
        await shows(pilot, "peer▼")
        assert first_cells(pilot) == ["carla", "bob", "ada"]

    drive(tmp_path, steps)


def test_the_cursor_stays_on_its_peer_and_tells_of_it(tmp_path: Path) -> None:
    async def steps(pilot: Screen) -> None:
        await pilot.press("2")
        await shows(pilot, "ada Qmada")
        await pilot.press("down")
        await shows(pilot, "1 step behind · version 0.1.0 · step 7 · samples 60")
        await pilot.press("r")
        await shows(pilot, "samples/s▲")
        assert "bob Qmbob" in lines(pilot)[-3]
        await pilot.click("#peers", offset=(2, 3))
        await pilot.pause()
        assert "ada Qmada" in lines(pilot)[-3]
        await pilot.press("home")
        await pilot.pause()
        assert "carla Qmcarla" in lines(pilot)[-3]

    drive(tmp_path, steps)


def test_help_opens_and_closes_and_q_ends_from_there(tmp_path: Path) -> None:
    async def steps(pilot: Screen) -> None:
        await pilot.press("question_mark")
        await shows(pilot, "tt monitor: keys and words")
        await pilot.press("2", "tab")  # keys of the screen below do nothing
        await pilot.press("escape")
        await shows(pilot, "next step")
        await pilot.press("question_mark", "q")

    assert drive(tmp_path, steps).return_code == 0


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_a_slow_swarm_never_keeps_a_key_waiting(tmp_path: Path, key: str) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow() -> SwarmSnapshot:
        asked.set()
        assert answer.wait(WAIT)
        return look()

    async def steps(pilot: Screen) -> None:
        await shows(pilot, "looking for the swarm")
        assert asked.is_set()
        await pilot.press("5")
        await shows(pilot, "Nothing has happened")
        await pilot.press(key)

    app = drive(tmp_path, steps, slow)
    answer.set()
    assert app.return_code == 0 and not app.is_running


@pytest.mark.parametrize("self_given", [True, False])
def test_names_that_nobody_checked_are_marked(tmp_path: Path, self_given: bool) -> None:
    async def steps(pilot: Screen) -> None:
        await pilot.press("2")
        await shows(pilot, "Qmada")
        assert ("(self-given)" in "\n".join(lines(pilot))) is self_given
        await pilot.press("3")
        await shows(pilot, "ever, as the peers")
        assert ("names are self-given; ever, " in "\n".join(lines(pilot))) is self_given

    drive(tmp_path, steps, lambda: look().model_copy(update={"names_checked": not self_given}))


def test_a_lost_swarm_is_told_and_its_last_state_stays(tmp_path: Path) -> None:
    here, broken = threading.Event(), threading.Event()
    here.set()

    def unsteady() -> SwarmSnapshot:
        if broken.is_set():
            raise TTError("the DHT\x1b[2J broke")
        return look() if here.is_set() else snapshot(peers=[])

    async def steps(pilot: Screen) -> None:
        await shows(pilot, "next step")
        here.clear()
        text = await shows(pilot, "no peer answers since")
        assert "last seen: 3 peers at step 7, " in text and "next step" in text
        broken.set()
        await shows(pilot, "broke)")
        broken.clear()
        here.set()
        while "no peer answers" in "\n".join(lines(pilot)):
            await pilot.pause(0.02)

    drive(tmp_path, steps, unsteady)


def test_every_view_fits_every_terminal(tmp_path: Path) -> None:
    """The sizes between are those of test_screen.py."""
    evil = trainer(user=EVIL, device=EVIL, round=EVIL, peer_id=EVIL, lag=10**9)
    peers = [evil, *CROWD, trainer(user="陈" * 40, peer_id="QmChen", total_samples=10**12)]

    async def steps(pilot: Screen) -> None:
        for size in ((200, 60), (20, 8), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            for key in "12345?":
                await pilot.press(key)
                await pilot.pause()
                shown = lines(pilot)
                assert len(shown) == size[1]
                assert all(cell_len(line) == size[0] and line.isprintable() for line in shown), shown
            await pilot.press("escape")
        await pilot.press("1")
        await shows(pilot, "loss, all steps")

    drive(tmp_path, steps, lambda: snapshot(peers=peers, trainers=5, run=EVIL))


def test_a_terminal_without_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")

    async def steps(pilot: Screen) -> None:
        await shows(pilot, "100 of 256 samples - in 10 s")
        for key in "12345?":
            await pilot.press(key)
            await pilot.pause()
            assert all(line.isascii() for line in lines(pilot))

    drive(tmp_path, steps)


def test_without_colours_words_say_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def steps(pilot: Screen) -> None:
        await pilot.press("2")
        text = await shows(pilot, "2 steps behind")
        assert "in step" in text
        strips = pilot.app.screen._compositor.render_strips()
        styles = [segment.style for strip in strips for segment in strip if segment.style is not None]
        colours = [colour for style in styles for colour in (style.color, style.bgcolor) if colour is not None]
        assert colours and all(colour.is_default for colour in colours)

    drive(tmp_path, steps)


def test_of_a_thousand_peers_only_those_that_are_seen_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [trainer(user=f"p{number}", peer_id=f"Qm{number}", total_samples=number) for number in range(1000)]
    written: list[PeerView] = []

    def note(row: Any) -> str:
        written.append(row.peer)
        return "noted"

    noting = (*PEER_COLUMNS, Column("noted", 5, 5, 99, note, lambda row: 0.0))
    monkeypatch.setattr("tt_cli.monitor.monitor_app.PEER_COLUMNS", noting)

    async def steps(pilot: Screen) -> None:
        await pilot.press("2")
        await shows(pilot, "noted")
        table = pilot.app.query_one("#peers", PeerTable)
        await pilot.press("end")
        await pilot.pause()
        assert (table.cursor, len(table.rows)) == (999, 1000)
        written.clear()
        await pilot.press("r")
        await shows(pilot, "samples/s▲")
        assert 10 < len({peer.peer_id for peer in written}) < 60

    drive(tmp_path, steps, lambda: snapshot(peers=peers, trainers=1000))
