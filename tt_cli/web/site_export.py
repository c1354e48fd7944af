"""The run's page as files for any static host: what the server would answer now, written down beside the page.

All addresses in it are relative, so the folder may lie under any path. The history is there twice: thinned for the
whole run, and in blocks of steps for a closer look.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tt_cli.errors import TTError, UsageError, os_errors
from tt_cli.web import notebooks
from tt_cli.web.index_html import STATIC, index_html
from tt_cli.web.queries import Answers, Content, NothingYet

POINTS = 4000  # of the whole run; about 150 kB
BLOCK = 10_000  # steps of one block
MARK = "tt-site.json"  # tells an export, which may be written anew, from a folder of something else


@dataclass(frozen=True)
class Exported:
    """An export: the step it shows, and how many pictures, files and bytes were written."""

    folder: str
    step: int
    pictures: int
    files: int
    bytes: int


def export(answers: Answers, pictures: Path, out: Path) -> Exported:
    """Write the page to the folder `out`, which is seen whole or not at all; an earlier export there is replaced.

    pictures: the folder of those that were drawn. Raises UsageError where `out` is something else, TTError where it
    cannot be written or nothing has been recorded yet.
    """
    if not (STATIC / "index.html").is_file():
        raise TTError("the page has not been built: scripts/build_page builds it")
    replaceable = out.is_dir() and not out.is_symlink() and ((out / MARK).is_file() or not any(out.iterdir()))
    if out.exists() and not replaceable:
        raise UsageError(f"{out} is there and no earlier export: name a new or an empty folder")
    parent = out.absolute().parent
    with os_errors(f"cannot write {out}"):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=parent, ignore_cleanup_errors=True) as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            new.mkdir()
            new.chmod(0o755)  # for the web server, which is another user
            step, pictures_copied = _write(answers, pictures, new)
            if out.exists():
                out.absolute().rename(old)
            try:
                new.rename(out.absolute())
            except OSError:
                if old.exists():
                    old.rename(out.absolute())
                raise
        sizes = [file.stat().st_size for file in out.rglob("*") if file.is_file()]
    return Exported(str(out.absolute()), step, pictures_copied, len(sizes), sum(sizes))


def _write(answers: Answers, pictures: Path, folder: Path) -> tuple[int, int]:
    """All files; returns the newest step and the number of pictures."""
    try:
        snapshot = answers.snapshot()
    except NothingYet:
        raise TTError("nothing is recorded of this run yet: has its `tt aux-peer` seen a trainer?") from None
    history = {**answers.steps(POINTS), "block": BLOCK}
    newest = int(history["last_step"])
    checkpoints = answers.checkpoints(pictures)
    drawn = [Path(picture["url"]).name for row in checkpoints["rows"] for picture in row["pictures"]]
    (folder / "pictures").mkdir()
    for name in drawn:
        shutil.copyfile(pictures / name, folder / "pictures" / name)
    contents: dict[str, Content] = {
        "run": answers.run(),
        "snapshot": snapshot,
        "history": history,
        "activity": answers.activity(POINTS),
        "leaderboard": answers.leaderboard("ever"),
        "leaderboard-day": answers.leaderboard("day"),
        "peers": answers.peers(),
        "checkpoints": checkpoints,
        "rounds": answers.rounds(),
        "figures": answers.figures(),
    }
    for block in range(newest // BLOCK + 1):
        contents[f"history-{block}"] = answers.steps(BLOCK, block * BLOCK, (block + 1) * BLOCK - 1)
    for name in answers.tables.names:
        with suppress(NothingYet):
            contents[f"calculator-{name}"] = answers.calculator(name)
    (folder / "api").mkdir()
    for name, content in contents.items():
        (folder / "api" / f"{name}.json").write_text(json.dumps(content, separators=(",", ":"), allow_nan=False))
    for file in STATIC.iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "notebooks").mkdir()
    for file in map(Path, contents["run"]["join"]["notebooks"]):
        (folder / file).write_bytes(notebooks.notebook(file.name, contents["run"]))
    (folder / "index.html").write_text(index_html(contents["run"], static=True), encoding="utf-8")
    (folder / MARK).write_text(json.dumps({"run": contents["run"]["identity"], "step": newest}) + "\n")
    return newest, len(drawn)
