"""Checkpoints are measured and drawn from along training: once each, comparably, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from draw.tiny import Tiny, tiny_run
from PIL import Image
from task.test_digits import RUN as DIGITS
from testbed.sums_task import SumsRun
from testbed.tiny_words import tiny_words
from told import Told

from tt_cli.auxiliary import evaluator as room
from tt_cli.auxiliary.evaluator import Evaluator, spread
from tt_cli.auxiliary.evaluator_process import EMOJI_PROMPTS, SamplesOptions, checked_prompts, daily
from tt_cli.auxiliary.parts import EVALUATOR
from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.checkpoint.checkpoint_files import save as write_checkpoint
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.data import builtin
from tt_cli.data.examples import Example
from tt_cli.data.shard_format import write_shard
from tt_cli.errors import TTError, UsageError
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter, database_url
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Event, Log
from tt_cli.task import task_of

pytestmark = pytest.mark.slow

RUN = tiny_run()
PROMPTS = ["sailboat", "red apple"]
WITHOUT_WEIGHTS = RUN.replaced({"vqgan.source": "hub", "vqgan.name": "org/x", "vqgan.filename": "x.safetensors"})


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few examples, on one thread, as in its process: small models draw many times slower where two wait for a core."""
    monkeypatch.setattr(room, "MOST_EXAMPLES", 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder() -> Path:
    return folders.run_folder(RUN)


@pytest.fixture
def tiny() -> Tiny:
    return Tiny.new(RUN)


Open = Callable[..., Evaluator]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Evaluators of a run in its folder; at the end their databases are closed."""
    closing: list[HistoryWriter | HistoryReader] = []

    def open_one(
        run: RunConfig = RUN, told: list[str] | None = None, every: int = 10, prompts: Sequence[str] = PROMPTS
    ) -> Evaluator:
        folder = folders.run_folder(run)
        store, reader = (
            HistoryWriter(database_url(folder), run.identity, mends=False),
            HistoryReader(database_url(folder)),
        )
        closing.extend((store, reader))
        lines = [] if told is None else told

        def tell(line: str, level: str) -> None:
            lines.append(line)

        return Evaluator(run, store, reader, every, list(prompts), tell, heartbeat=lambda activity: None)

    yield open_one
    for one in closing:
        one.close()


def rows(run: RunConfig = RUN) -> list[dict[str, object]]:
    reader = HistoryReader(database_url(folders.run_folder(run)))
    found = reader.checkpoints()
    reader.close()
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "pictures").iterdir())}


def save(tiny: Tiny, step: int) -> Path:
    return tiny.save(folders.checkpoints(tiny.run), step)


def test_two_checkpoints_are_measured_and_drawn_from(tiny: Tiny, folder: Path, opened: Open) -> None:
    told: list[str] = []
    evaluator = opened(told=told)
    assert not evaluator.look() and evaluator.activity == "waits for the first checkpoint"
    save(tiny, 3)
    assert evaluator.look() and not evaluator.look()
    tiny.train(2)
    path = save(tiny, 13)
    assert evaluator.look()
    first, second = rows()
    assert (first["step"], second["step"], second["bytes"]) == (3, 13, path.stat().st_size)
    assert second["digest"] == load(path).digest()
    examples = builtin.examples("emoji", "heldout")[:20]
    text = tiny.tokenizer.encode([example.caption for example in examples])
    image = torch.stack([torch.from_numpy(example.codes.astype("int64")) for example in examples])
    with torch.no_grad():
        expected = tiny.decoder.loss(text, image).total.item()
    assert second["heldout_loss"] == pytest.approx(expected, rel=1e-6) != first["heldout_loss"]
    mark = str(second["digest"])[:8]
    named = [("red apple", f"00000013-{mark}-1.png"), ("sailboat", f"00000013-{mark}-0.png")]
    assert second["pictures"] == [{"prompt": prompt, "file": file} for prompt, file in named]
    assert len(files(folder)) == 4
    for prompt, file in named:
        with Image.open(folder / "pictures" / file) as picture:
            assert (picture.format, picture.size, picture.mode) == ("PNG", (64, 64), "RGB")
            assert {"prompt": prompt, "step": "13", "seed": "0"}.items() <= picture.info.items()
    assert told[-1] == evaluator.activity == f"step 13: held-out loss {expected:.4f}, 2 pictures"


def test_one_that_leads_and_does_not_evaluate_is_waited_for_half_an_hour(
    tiny: Tiny, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    evaluator = opened(prompts=[])
    assert evaluator.stands_by(), "no checkpoint is there"
    save(tiny, 3)
    assert evaluator.stands_by()
    now += room.LEADER_SECONDS
    assert not evaluator.stands_by() and evaluator.look()
    assert evaluator.stands_by()
    save(tiny, 13)
    assert evaluator.stands_by()
    assert opened(prompts=[]).look(), "the one that leads"
    now += room.LEADER_SECONDS
    save(tiny, 22)
    assert evaluator.stands_by()


def test_nothing_is_done_twice_and_what_was_cut_short_comes_out_the_same(
    tiny: Tiny, folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny, 3)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(HistoryWriter, "add_checkpoint", killed)
        opened().look()
    (folder / "pictures" / ".00000003-0a0a0a0a-0.png.tmp").write_bytes(b"half")
    assert rows() == []
    half = files(folder)
    assert opened().look()
    (row,) = rows()
    assert {**files(folder), ".00000003-0a0a0a0a-0.png.tmp": b"half"} == half, "the same names and bytes"
    assert not opened().look()
    assert rows() == [row]


def test_it_waits_for_steps_takes_the_newest_and_the_last(tiny: Tiny, opened: Open) -> None:
    evaluator = opened(prompts=[])
    for step, due in ((5, True), (14, False), (15, True)):
        save(tiny, step)
        assert evaluator.look() is due
    for step in (25, 35, 36):
        save(tiny, step)
    assert evaluator.look()
    last = RUN.schedule.total_steps
    save(tiny, last - 1)
    assert evaluator.look()
    save(tiny, last)
    assert evaluator.look()
    assert [row["step"] for row in rows()] == [5, 15, 36, last - 1, last]


def test_what_is_damaged_or_of_another_run_is_passed_over(tiny: Tiny, opened: Open) -> None:
    told: list[str] = []
    evaluator = opened(told=told)
    path = save(tiny, 3)
    path.write_bytes(path.read_bytes()[:-9])
    assert not evaluator.look() and not evaluator.look()
    assert len(told) == 1 and "damaged" in told[0] and told[0].endswith("; passed over")
    assert path.exists(), "whose it is sets it aside"
    save(Tiny.new(tiny_run(5)), 4).rename(path.with_name("step-00000004.safetensors"))
    assert not evaluator.look() and "is of step 4 of the run tiny-" in told[-1]
    save(tiny, 5)
    assert evaluator.look() and [row["step"] for row in rows()] == [5]


def test_what_is_gone_or_taken_back_meanwhile_leaves_no_row(
    tiny: Tiny, folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    evaluator = opened(told=told)
    path = save(tiny, 3)
    read = room.load

    def gone(named: Path) -> object:
        named.unlink()
        return read(named)

    def taken_back(named: Path) -> object:
        state = read(named)
        named.rename(named.with_name(f"{named.name}.before-order-1"))
        return state

    monkeypatch.setattr(room, "load", gone)
    assert not evaluator.look() and told[-1].startswith(f"cannot read the checkpoint {path}: ")
    save(tiny, 4)
    monkeypatch.setattr(room, "load", taken_back)
    assert not evaluator.look() and rows() == []
    assert not (folder / "pictures").exists()


def test_without_the_vqgans_weights_the_loss_is_measured_alone(opened: Open) -> None:
    run, told = WITHOUT_WEIGHTS, list[str]()
    plain = Tiny.new(RUN)
    Tiny(run, plain.decoder, plain.vqgan, plain.tokenizer).save(folders.checkpoints(run), 3)
    assert opened(run, told).look()
    (row,) = rows(run)
    assert row["heldout_loss"] is not None and row["pictures"] == []
    assert len(told) == 2 and told[0].startswith("no samples are made: ") and "\n" not in told[0]
    assert not opened(run).look()


def test_a_trouble_that_lasts_or_comes_back_is_told_once_a_day() -> None:
    told, now = list[Event](), [5e8]
    tell = daily(told.append, lambda: now[0])
    for _ in range(100):
        now[0] += 3600.0
        tell("the database does not answer", "error")
    assert 4 <= len(told) <= 6
    tell("another line", "info")
    assert isinstance(told[-1], Log) and (told[-1].message, told[-1].level) == ("another line", "info")


def test_with_nothing_to_tell_it_waits_all_the_same(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_EXAMPLES", 0)
    run, plain = WITHOUT_WEIGHTS, Tiny.new(RUN)
    tiny, evaluator = Tiny(run, plain.decoder, plain.vqgan, plain.tokenizer), opened(WITHOUT_WEIGHTS)
    for step, due in ((3, True), (4, False), (13, True), (8, True)):  # the last after an order to go back
        for old in folders.checkpoints(run).iterdir():
            old.unlink()
        save(tiny, step)
        assert evaluator.look() is due
    assert evaluator.activity == "step 8: nothing to measure and to draw with"
    assert {(row["heldout_loss"], len(row["pictures"])) for row in rows(run)} == {(None, 0)}


def test_a_language_model_writes_on_from_the_prompts(opened: Open) -> None:
    run, told = tiny_words(), list[str]()
    parameters = {name: parameter.detach() for name, parameter in task_of(run).new_model().named_parameters()}
    for step in (3, 13):
        state = TrainingState(step, parameters, {}, run.to_toml(), run.identity)
        write_checkpoint(folders.checkpoints(run), state, keep=10)
        assert opened(run, told).look()
    assert not opened(run).look()
    assert told[0].startswith("step 3: held-out loss 6.2") and told[0].endswith("), 2 texts")
    first, second = rows(run)
    written = files(folders.run_folder(run))
    for row in (first, second):
        assert [picture["prompt"] for picture in row["pictures"]] == sorted(PROMPTS)  # type: ignore[attr-defined]
        for picture in row["pictures"]:  # type: ignore[attr-defined]
            text = written.pop(picture["file"]).decode()
            assert picture["file"].endswith(".txt") and text.startswith(picture["prompt"]) and len(text) > 20
    assert not written


def test_of_another_kind_nothing_is_drawn_and_what_cannot_be_measured_is_done_once(opened: Open) -> None:
    model, told = task_of(DIGITS).new_model(), list[str]()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def save_digits(step: int) -> None:
        write_checkpoint(
            folders.checkpoints(DIGITS), TrainingState(step, parameters, {}, DIGITS.to_toml(), DIGITS.identity), keep=10
        )

    save_digits(3)
    assert opened(DIGITS, told).look()
    splits = "the data set digits has no split heldout, validation or test"
    assert told == [f"{splits}: nothing is measured", "step 3: nothing to measure with"]
    assert not opened(DIGITS).look(), "nor after a restart"
    save_digits(13)
    assert opened(DIGITS).look()
    seen = [(row["step"], row["heldout_loss"], row["pictures"]) for row in rows(DIGITS)]
    assert seen == [(3, None, []), (13, None, [])]


def test_a_task_of_any_kind_answers_the_prompts(opened: Open) -> None:
    run, told = SumsRun.model_validate(DIGITS.model_dump()), list[str]()
    parameters = {name: parameter.detach() for name, parameter in task_of(run).new_model().named_parameters()}
    state = TrainingState(3, parameters, {}, run.to_toml(), run.identity)
    write_checkpoint(folders.checkpoints(run), state, keep=10)
    assert opened(run, told, prompts=run.prompts).look()
    assert told[-1] == "step 3: 2 texts"
    written = files(folders.run_folder(run))
    for picture in rows(run)[0]["pictures"]:  # type: ignore[attr-defined]
        assert written[picture["file"]].decode().startswith(f"{picture['prompt']} = ")


def test_of_data_elsewhere_the_split_that_nobody_trains_on_is_measured(opened: Open, tmp_path: Path) -> None:
    def write(split: str, examples: Sequence[Example]) -> None:
        rows = [{"caption": one.caption, "code": one.codes.astype("<i2").tobytes()} for one in examples]
        write_shard(tmp_path / f"{split}-00000.parquet", rows)

    run, told = RUN.replaced({"data.source": "files", "data.location": str(tmp_path)}), list[str]()
    tiny, heldout = Tiny.new(RUN), builtin.examples("emoji", "heldout")[:20]
    tiny = Tiny(run, tiny.decoder, tiny.vqgan, tiny.tokenizer)
    write("train", builtin.examples("emoji")[:20])
    tiny.save(folders.checkpoints(run), 3)
    assert opened(run, told).look()
    assert rows(run)[0]["heldout_loss"] is None
    assert told[0].endswith("has no split heldout, validation or test: samples only")

    write("validation", heldout)
    tiny.save(folders.checkpoints(run), 13)
    assert opened(run).look()
    text = tiny.tokenizer.encode([example.caption for example in heldout])
    with torch.no_grad():
        image = torch.stack([torch.from_numpy(example.codes.astype("int64")) for example in heldout])
        expected = tiny.decoder.loss(text, image).total.item()
    assert rows(run)[1]["heldout_loss"] == pytest.approx(expected, rel=1e-5)


def test_only_so_many_steps_keep_their_pictures(
    tiny: Tiny, folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "KEPT_STEPS", 3)
    evaluator = opened(every=1, prompts=["owl"])
    (folder / "pictures").mkdir()
    (folder / "pictures" / "of-somebody-else.png").write_bytes(b"")
    for step in range(1, 7):
        save(tiny, step)
        assert evaluator.look()
    shown = [row["step"] for row in rows() if row["pictures"]]
    assert shown == [1, 3, 6] and all(row["heldout_loss"] for row in rows()) and len(rows()) == 6
    left = {name.partition("-")[0] for name in files(folder)}
    assert left == {"00000001", "00000003", "00000006", "of"}


def test_thinned_steps_are_spread_evenly() -> None:
    kept: list[int] = []
    for step in range(100, 100_001, 100):
        kept = spread([*kept, step], 200)
    gaps = [after - before for before, after in zip(kept, kept[1:], strict=False)]
    assert len(kept) == 200 and (kept[0], kept[-1]) == (100, 100_000)
    assert max(gaps) <= 3 * min(gaps)
    assert spread([3, 1, 2], 3) == [1, 2, 3]


def test_a_disk_without_room_is_one_line_and_tried_again(tiny: Tiny, folder: Path, opened: Open) -> None:
    evaluator = opened()
    (folder / "pictures").write_text("a file in the folder's place")
    save(tiny, 3)
    with pytest.raises(TTError, match="^cannot write samples to "):
        evaluator.look()
    (folder / "pictures").unlink()
    assert evaluator.look()


def test_prompts_suit_the_data_and_are_checked() -> None:
    captions = {example.caption for example in builtin.examples("emoji")}
    assert checked_prompts(RUN, []) == list(EMOJI_PROMPTS) and captions.issuperset(EMOJI_PROMPTS)
    other = RUN.replaced({"data.source": "hub", "data.name": "org/pictures"})
    assert checked_prompts(other, []) == list(RUN.prompts)
    assert checked_prompts(RUN, ["owl", "sun", "owl"]) == ["owl", "sun"]
    for bad in ([" "], ["a\nb"], ["\x1b[31m"], ["x" * 301], [f"prompt {number}" for number in range(25)]):
        with pytest.raises(UsageError, match="^--prompt: "):
            checked_prompts(RUN, bad)
    assert "Once upon a time" in checked_prompts(tiny_words(), []) and checked_prompts(tiny_words(), ["x"]) == ["x"]
    assert checked_prompts(DIGITS, []) == []
    with pytest.raises(UsageError, match="^--prompt: run digits is of kind digits, from which nothing is drawn$"):
        checked_prompts(DIGITS, ["owl"])


def test_its_process_does_so_while_its_peer_lives(tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    """Killed, it is started again as the page is (web/test_server_process.py)."""
    save(tiny, 3)
    told, options = Told(), SamplesOptions(RUN.to_toml(), 10, ["owl"])
    with EVALUATOR.watched(vars(options), tmp_path / "evaluator.log", told) as part:
        told.wait("step 3: held-out loss")
        worker = part._worker
    assert worker is not None and worker.wait(240) is not None
    assert [row["step"] for row in rows()] == [3] and len(files(folder)) == 1
