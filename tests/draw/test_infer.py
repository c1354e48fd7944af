"""`tt infer`, through the command line's entry."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
from pathlib import Path

import pytest
from draw.small_clip import save_clip
from draw.tiny import Tiny, tiny_run
from PIL import Image
from testbed.spawned import spawned

from tt_cli import __version__
from tt_cli.cli.main import main
from tt_cli.run import folders

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TT_HOME, and a folder of its own to draw into."""
    monkeypatch.setenv("TT_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.new()


@pytest.fixture
def run_file(tiny: Tiny, home: Path) -> str:
    """The tiny run as a file, with checkpoints of steps 7 and 12 in its folder."""
    for step in (7, 12):
        tiny.save(folders.checkpoints(tiny.run), step)
    (home / "tiny.toml").write_text(tiny.run.to_toml())
    return "tiny.toml"


def test_draws_saves_and_prints_where(run_file: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "red apple", "sailboat", "--run", run_file, "--samples", "2", "--seed", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    identity = tiny_run().identity
    assert printed[0].startswith(f"Checkpoint: step 12 of run {identity} (the newest of this run in ")
    assert printed[1].strip().endswith("step-00000012.safetensors")
    assert printed[2].startswith("Drew 4 pictures in ") and printed[2].endswith("Again: --seed 3")
    files = [Path(line) for line in printed[3:]]
    assert [file.name for file in files] == [
        "red-apple-1.png", "red-apple-2.png", "sailboat-1.png", "sailboat-2.png", "contact-sheet.png",
    ]  # fmt: skip
    assert {file.parent for file in files} == {Path("drawings/tiny-001")}
    with Image.open(files[2]) as picture:
        assert picture.size == (64, 64)
        assert picture.text == {
            "prompt": "sailboat", "index": "0", "run": identity, "step": "12", "seed": "3",
            "candidates": "2", "temperature": "0.5", "top_k": "0", "top_p": "0.9", "temperature_first": "False",
            "checkpoint": printed[1].strip(), "software": f"tt {__version__}",
        }  # fmt: skip


def test_json_is_one_object_and_the_seed_in_it_repeats(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["infer", "red apple", "--run", run_file, "--samples", "1", "--json"]
    assert main([*arguments, "--out", "first"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--out", "second", "--seed", str(first["seed"])]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (first["step"], first["tokens"], first["run"]) == (12, 64, tiny_run().identity)
    one, two = first["drawings"][0], second["drawings"][0]
    assert (one["prompt"], one["index"], one["path"]) == ("red apple", 0, "first/red-apple-1.png")
    assert Image.open(one["path"]).tobytes() == Image.open(two["path"]).tobytes()
    assert Path(first["contact_sheet"]).is_file() and Path(first["checkpoint"]).is_file()
    assert main([*arguments, "--out", "third"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] != first["seed"]


def test_prompts_from_a_file_and_from_stdin(
    run_file: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "prompts.txt").write_text("\ufeffred apple\n\n  sailboat \nred apple\n")  # with Windows' mark
    arguments = ["infer", "--run", run_file, "--samples", "1", "--json"]
    assert main([*arguments, "sailboat", "--from", "prompts.txt"]) == 0
    listed = json.loads(capsys.readouterr().out)["drawings"]
    assert [drawing["prompt"] for drawing in listed] == ["sailboat", "red apple"]
    for form, prompts in (
        (["--from", "-"], ["hot beverage"]),
        (["-"], ["hot beverage"]),
        (["owl", "-", "sailboat"], ["owl", "hot beverage", "sailboat"]),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("hot beverage\n"))
        assert main([*arguments, *form]) == 0
        assert [d["prompt"] for d in json.loads(capsys.readouterr().out)["drawings"]] == prompts


def test_the_best_are_kept_best_first(run_file: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_clip(home / "clip")
    arguments = ["infer", "red apple", "sailboat", "--run", run_file, "--candidates", "5", "--seed", "3", "--json"]
    assert main([*arguments, "--out", "all", "--clip", "clip"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert everything["keep"] == 5, "all are ranked where none is left out"
    assert main([*arguments, "--out", "best", "--clip", "clip", "--keep", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["keep"], told["candidates"], told["clip"], told["tokens"]) == (2, 5, "clip", 640)
    assert [Path(one["path"]).name for one in told["drawings"]] == [
        "red-apple-1.png", "red-apple-2.png", "sailboat-1.png", "sailboat-2.png",
    ]  # fmt: skip
    for prompt in ("red apple", "sailboat"):
        ranked = [one for one in everything["drawings"] if one["prompt"] == prompt]
        similarities = [one["clip_similarity"] for one in ranked]
        assert len(ranked) == 5 and similarities == sorted(similarities, reverse=True)
        kept = [one for one in told["drawings"] if one["prompt"] == prompt]
        for one, other in zip(kept, ranked, strict=False):
            assert (one["index"], one["clip_similarity"]) == (other["index"], other["clip_similarity"])
            with Image.open(one["path"]) as picture, Image.open(other["path"]) as same:
                assert picture.tobytes() == same.tobytes()
                assert float(picture.text["clip_similarity"]) == one["clip_similarity"]
                assert (picture.text["keep"], picture.text["clip"]) == ("2", "clip")


def shown_on_a_terminal(arguments: list[str]) -> tuple[int, bytes]:
    """Exit code and output of a command that has a terminal, in a process of its own; errors are in a file."""
    child, master = pty.fork()
    if child == 0:
        os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
        os._exit(main(arguments))
    shown = b""
    with contextlib.suppress(OSError):  # what a pseudo-terminal raises when its other end is closed
        while data := os.read(master, 65536):
            shown += data
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown


def test_a_terminal_shows_the_pictures_and_a_pipe_does_not(
    run_file: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["infer", "owl", "--run", run_file, "--preview", "blocks"]
    with spawned({"TERM": "xterm-256color"}) as call:
        code, shown = call(shown_on_a_terminal, arguments).result()
    assert code == 0 and b"\x1b" not in (home / "errors").read_bytes()
    assert "▀".encode() in shown and b"contact-sheet.png" in shown
    assert main(arguments) == 0
    piped = capfd.readouterr()
    assert "\x1b" not in piped.out + piped.err and "contact-sheet.png" in piped.out


def test_a_checkpoint_by_file_or_folder(run_file: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folders.checkpoints(tiny.run)
    for place, step, why in (
        (folder / "step-00000007.safetensors", 7, "(named by --checkpoint)"),
        (folder, 12, "(the newest in "),
        (folder.parent, 12, "(the newest in "),
    ):
        assert main(["infer", "red apple", "--samples", "1", "--checkpoint", str(place)]) == 0
        line = capsys.readouterr().out.splitlines()[0]
        assert f"step {step} of run {tiny.run.identity} {why}" in line


class PressedAt(io.StringIO):
    """A standard error that hears Ctrl-C when it is told certain words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def write(self, text: str) -> int:
        if self._words in text:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_keeps_what_was_drawn(
    run_file: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two prompts, side by side; the third has a batch of its own."""
    arguments = ["infer", "owl", "sailboat", "red apple", "--run", run_file, "--samples", "2", "--batch", "4"]
    monkeypatch.setattr("sys.stderr", errors := PressedAt("batch 2: "))
    assert main([*arguments, "--out", "one", "--json"]) == 130
    told = json.loads(capsys.readouterr().out)
    names = ("owl-1", "owl-2", "sailboat-1", "sailboat-2")
    assert [one["path"] for one in told["drawings"]] == [f"one/{name}.png" for name in names]
    assert errors.getvalue().splitlines()[-1] == "tt: stopped after 2 of 3 prompts; their pictures are in one"
    with Image.open(told["contact_sheet"]) as sheet:
        assert sheet.text["prompts"] == "owl\nsailboat"
    (home / "two").mkdir()
    monkeypatch.setattr("sys.stderr", PressedAt("batch 4: "))
    assert main([*arguments, "--out", "two"]) == 130
    assert list((home / "two").iterdir()) == []


def test_a_long_prompt_says_what_the_model_reads(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "one two three four five " * 8, "--run", run_file, "--samples", "1"]) == 0
    assert 'the model reads only the first 16 tokens: "one two' in capsys.readouterr().err


def fails(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err, captured.err
    assert len(captured.err.splitlines()) == 1
    assert not list(Path().rglob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt; say what to draw"),
        ([" "], "a prompt is empty; say what to draw"),
        (["caf\udce9"], "a prompt is not UTF-8 text"),  # as Python has the bytes of a Latin-1 terminal
        (["red apple", "--samples", "0"], "--samples: 0: should be greater than or equal to 1"),
        (["red apple", "--candidates", "x"], "--candidates/--samples: x: should be a valid integer"),
        (["red apple", "--keep", "-2"], "--keep"),
        (["red apple", "--keep", "5"], "--keep 5: there are only 4 candidates; draw more with --candidates"),
        (["red apple", "--keep", "9", "--candidates", "8"], "--keep 9: there are only 8 candidates"),
        (["red apple", "--batch", "0"], "--batch: 0: should be greater than or equal to 1"),
        (["red apple", "--memory", "four"], "--memory: \"four\": 'four' is no amount of memory: write it like 8GB"),
        (["red apple", "--memory", "0GB"], "--memory: \"0GB\": '0GB' is no amount of memory"),
        (["red apple", "--preview", "sixel"], "--preview: 'sixel' is not one of 'auto', 'never'"),
        (["red apple", "--peer", "here"], "--peer here: is no multiaddr"),
        (["red apple", "--peer", "x", "--checkpoint", "y"], "leave out --checkpoint and --revision, or --peer"),
        (["red apple", "--revision", "main"], "--revision is one of a Hub repository: name it with --checkpoint"),
        (["red apple", "--revision", "main", "--checkpoint", "."], "but --checkpoint . is on this machine"),
        (["red apple", "--checkpoint", "not/here.safetensors"], "no such file or folder"),
        (["red apple", "--checkpoint", "./not/here"], "no such file or folder"),
        (["red apple", "--checkpoint", "~no-such-user/here"], "no such file or folder"),
        (["red apple", "--temperature", "-1"], "temperature is -1.0"),
        (["red apple", "--top-p", "2"], "top-p is 2.0"),
        (["red apple", "--top-k", "many"], "--top-k: many: should be a valid integer"),
        (["red apple", "--run", "emojis"], "did you mean 'emoji'?"),
        (["red apple", "--checkpoint", "nowhere"], "--checkpoint nowhere: no such file or folder"),
        (["red apple", "--checkpoint", "."], "no usable checkpoint"),
        (["--from", "nothing.txt"], "--from nothing.txt: No such file"),
        (["--from", "."], "--from .: Is a directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(arguments, 2, words, capsys)


def test_no_checkpoint_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = "take it from its swarm with --peer MULTIADDR, name a file, a folder or ORG"
    fails(["red apple", "--run", "emoji-demo"], 1, words, capsys)


def test_the_one_before_a_corrupt_checkpoint_is_used(
    run_file: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folders.checkpoints(tiny.run) / "step-00000012.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["infer", "red apple", "--run", run_file, "--samples", "1"]) == 0
    captured = capsys.readouterr()
    assert "Checkpoint: step 7 of run" in captured.out
    assert "using the one before it" in captured.err


def test_a_checkpoint_of_another_run_is_refused(run_file: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    path = folders.checkpoints(tiny.run) / "step-00000012.safetensors"
    words = "belongs to another run, " + tiny.run.identity + ': run.name: "emoji" here, "tiny" there'
    fails(["red apple", "--run", "emoji", "--checkpoint", str(path)], 2, words, capsys)


def test_parameters_that_do_not_fit_are_refused(home: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    other = Tiny(tiny_run(subset=3).replaced({"model.ff_mult": 2}), tiny.decoder, tiny.vqgan, tiny.tokenizer)
    path = other.save(home / "other", 1)
    fails(["red apple", "--checkpoint", str(path)], 1, "does not fit the run file inside it", capsys)
