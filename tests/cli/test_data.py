"""`tt data` as a person types it: real processes, the built-in VQGAN, errors of one line."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Tt
from data.rows import rows_in
from PIL import Image, ImageDraw
from testbed.process_watch import ProcessWatch

from tt_cli.cli.data import _teller
from tt_cli.data.build.encoder import EncodingProgress
from tt_cli.run import load_run
from tt_cli.supervisor.processes import family_of
from tt_cli.task.picture_codec import decode_pictures, load_vqgan

pytestmark = pytest.mark.slow


def draw_pictures(folder: Path, count: int) -> None:
    """Pictures of discs on coloured ground, each with its caption."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for number in range(count):
        width, height = rng.randint(80, 140), rng.randint(80, 140)
        picture = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
        pen = ImageDraw.Draw(picture)
        for _ in range(5):
            x, y, size = rng.randrange(width), rng.randrange(height), rng.randrange(5, 60)
            pen.ellipse((x, y, x + size, y + size), fill=tuple(rng.randrange(256) for _ in range(3)))
        picture.save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(f"discs number {number}")


@pytest.mark.parametrize(
    ("terminal", "line"), [("xterm", "\r\x1b[K2 seen, 1 kept, 3.0/s"), ("dumb", "2 seen, 1 kept, 3.0/s\n")]
)
def test_a_line_is_renewed_where_the_terminal_can(terminal: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    progress = EncodingProgress({"seen": 2, "kept": 1}, 0, 0, 1, 3, None)
    _teller(False, "how", "pictures are encoded")("progress", progress)
    assert stderr.getvalue() == f"how\n{line}"


def test_encode_a_folder(tmp_path: Path, here: Tt) -> None:
    draw_pictures(tmp_path / "pictures", 12)
    (tmp_path / "pictures/0003.png").write_bytes(b"no picture")
    (tmp_path / "pictures/0005.txt").write_text("ox")
    done = here("data", "encode", "pictures", "codes", "--run", "emoji", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["event"] == "done"
    assert (facts["seen"], facts["kept"], facts["shards"]) == (12, 10, 1)
    assert facts["left_out"] == {"short_caption": 1, "broken": 1}
    rows = rows_in(tmp_path / "codes")
    assert [row["caption"] for row in rows] == [f"discs number {i}" for i in range(12) if i not in (3, 5)]
    with Image.open(tmp_path / "pictures/0000.png") as picture:
        assert (rows[0]["original_width"], rows[0]["original_height"]) == picture.size
    codes = np.stack([np.frombuffer(row["code"], "<i2") for row in rows])
    assert codes.shape == (10, 64)
    assert decode_pictures(load_vqgan(load_run("emoji")), codes).shape == (10, 64, 64, 3)
    sums = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "codes", capture_output=True, text=True, check=False
    )
    assert sums.returncode == 0 and sums.stdout == "data/train-000-00000.parquet: OK\n"
    again = here("data", "encode", "pictures", "codes", "--run", "emoji")
    assert "10 of 12 pictures are encoded, in 1 shard of" in again.stdout
    assert "left out, picture broken: 1" in again.stdout


def test_killed_and_gone_on_with(tmp_path: Path, here: Tt) -> None:
    """kill -9 as soon as something is recorded: every picture is there, once, in its order; no process stays."""
    draw_pictures(tmp_path / "pictures", 12)
    flags = ["data", "encode", "pictures", "codes", "--run", "emoji", "--json", "--batch", "1"]
    command = [sys.executable, "-m", "tt_cli.cli.main", *flags]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())["seen"]
        workers = ProcessWatch(family_of(process.pid) - {process.pid})
        process.kill()
    assert workers.left_after(60) == set()
    going_on, *_, last = map(json.loads, here(*flags).stdout.splitlines())
    assert 0 < first < going_on["seen"] and last["kept"] == 12
    assert [row["caption"] for row in rows_in(tmp_path / "codes")] == [f"discs number {i}" for i in range(12)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "out"], "tt: cannot encode nothing: there is no such folder or file"),
        (["empty", "out"], "tt: there is nothing to encode in empty: no tars"),
        (["one", "out", "--shard", "3/2"], "tt: --shard: 3/2 is no share such as 2/8"),
        (["one", "out", "--batch", "0"], "tt: --batch: 0: should be greater than or equal to 1"),
        (["one", "file/out", "--run", "emoji"], "tt: cannot write to file/out: Not a directory"),
        (["one", "out", "--run", "emojo"], "tt: no run is called 'emojo'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, here: Tt, arguments: list[str], words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    draw_pictures(tmp_path / "one", 1)
    done = here("data", "encode", *arguments)
    assert done.returncode in (1, 2)
    assert done.stderr.strip().splitlines()[-1].startswith(words)
    assert "Traceback" not in done.stderr
