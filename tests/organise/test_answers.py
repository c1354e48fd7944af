"""The questions of `tt init`: what is taken, what is refused in one line, what follows from the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tt_cli.errors import UsageError
from tt_cli.organise.model_sizes import SIZES, takes
from tt_cli.organise.questions import RunAnswers, RunQuestion, answered, multiaddr_host
from tt_cli.organise.recipe import run_of
from tt_cli.organise.run_file import commented
from tt_cli.run import CausalLmRun, RunConfig
from tt_cli.run.run_source import builtin_runs, load_run

ABOUT_MEMBERS = ["line", "peers", "inner-steps", "steps", "batch"]


def defaults(question: RunQuestion, default: str) -> str:
    return default


def answers(**given: str) -> RunAnswers:
    return answered("mine", given, defaults)


def test_defaults_give_the_built_in_run_by_another_name() -> None:
    made, emoji = run_of(answers()), load_run("emoji")
    assert made.replaced({"run.name": "emoji"}).identity == emoji.identity
    assert made.membership == emoji.membership and made.checkpoints.repository is None


def test_a_new_language_model_is_the_built_in_one_with_a_name_and_text_of_its_own(tmp_path: Path) -> None:
    made, words = run_of(answers(task="causal-lm", **{"inner-steps": "1"})), load_run("words")
    assert answers(task="causal-lm").inner_steps == 22, "which leaves 22 global steps: rounds take matchmaking at least"
    assert made.replaced({"run.name": "words"}).identity == words.identity
    (tmp_path / "train.txt").write_text("One text.")
    asked: list[str] = []

    def ask(question: RunQuestion, default: str) -> str:
        asked.append(question.key)
        return default

    slow = {"task": "causal-lm", "data": str(tmp_path), "line": "0.5"}
    run = run_of(chosen := answered("mine", slow, ask))
    assert asked[:2] == ["model", "organisation"] and "size" not in asked
    assert (run.data.source, CausalLmRun.of(run).data.location) == ("files", str(tmp_path))
    assert chosen.inner_steps > 1 and run.schedule.peak_lr == words.schedule.peak_lr
    assert run.schedule.total_steps * run.swarm.target_batch_size >= 500 * 128
    hub = CausalLmRun.of(run_of(answers(task="causal-lm", data="acme/tales:story")))
    assert (hub.data.source, hub.data.name, hub.data.column) == ("hub", "acme/tales", "story")
    with pytest.raises(UsageError, match="--inner-steps 0: members of a language model's run make at least one step"):
        run_of(answers(task="causal-lm", **{"inner-steps": "0"}))


def test_only_what_is_open_is_asked() -> None:
    asked: list[str] = []

    def ask(question: RunQuestion, default: str) -> str:
        asked.append(question.key)
        return default

    answered("mine", {"size": "tiny"}, ask)
    assert asked == ["task", "data", "organisation", "authority", "address", "port", "repository", *ABOUT_MEMBERS]
    asked.clear()
    made = answered("mine", {"data": "acme/codes", "organisation": "acme"}, ask)
    assert {"codes", "vqgan"} <= set(asked)
    assert (made.vqgan, made.repository) == ("acme/vqgan_gumbel_f8:model.safetensors", "acme/mine")


def test_the_hubs_data_come_with_the_papers_vqgan_and_tokenizer() -> None:
    run = run_of(answers(data="acme/codes", size="paper", vqgan="acme/vqgan:f8.ckpt", organisation="acme"))
    assert (run.data.source, run.data.name, run.tokenizer.name) == ("hub", "acme/codes", "t5-small")
    assert (run.vqgan.name, run.vqgan.filename, run.vqgan.grid) == ("acme/vqgan", "f8.ckpt", 32)
    assert (run.membership.kind, run.membership.organisation) == ("organisation", "acme")
    assert run.schedule == load_run("dalle").schedule and run.model == load_run("dalle").model


def test_a_folder_is_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no .parquet file"):
        answers(data=str(tmp_path))
    (tmp_path / "train.parquet").touch()
    run = run_of(answers(data=str(tmp_path), codes="emoji", size="128x3"))
    assert (run.data.source, run.data.name, run.vqgan.source) == ("hub", str(tmp_path), "builtin")
    assert (run.model.dim, run.model.depth, run.model.heads) == (128, 3, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": "huge"}, "--size huge: give tiny, small, medium, large, paper, or DIMxLAYERS such as 768x24"),
        ({"size": "100x4"}, "the width must be a multiple of 64"),
        ({"size": "64x0"}, "there are 1 to 1024 layers"),
        ({"data": "nowhere"}, "--data nowhere: give emoji, OWNER/NAME of a data set on the Hub, or a folder"),
        ({"data": "./none/here"}, "--data ./none/here: give emoji"),
        ({"data": "~nobody-here"}, "--data ~nobody-here: give emoji"),
        ({"data": "a" * 300}, ": give emoji"),
        ({"codes": "f8"}, "--codes: has no meaning with --task dalle --data emoji"),
        ({"data": "a/b", "codes": "f16"}, "--codes f16: give f8 or emoji"),
        ({"data": "a/b", "vqgan": "here"}, "--vqgan here: give OWNER/NAME or OWNER/NAME:FILE"),
        ({"organisation": "a b"}, "--organisation a b: give the name"),
        ({"authority": "passes.example.org"}, "--authority passes.example.org: must be an address such as"),
        ({"address": "my server"}, "--address my server: give an IP address or a host name"),
        ({"address": "1.2.3"}, "--address 1.2.3: give an IP"),
        ({"port": "0"}, "--port 0: must be a whole number from 1 to 65,534"),
        ({"port": "x"}, "--port x: must be a whole number"),
        ({"repository": "mine"}, "--repository mine: must be OWNER/NAME"),
        ({"steps": "-4"}, "--steps -4: must be a whole number from 1"),
        ({"batch": "1.5"}, "--batch 1.5: must be a whole number"),
        ({"line": "0"}, "--line 0: must be a number of Mbit/s from 0.1, such as 20"),
        ({"line": "fast"}, "--line fast: must be a number of Mbit/s"),
        ({"peers": "0"}, "--peers 0: must be a whole number from 1"),
        ({"task": "vit"}, "--task vit: give dalle or causal-lm"),
        ({"model": "acme/base"}, "--model: has no meaning with --task dalle"),
        ({"task": "causal-lm", "model": "base"}, "--model base: give OWNER/NAME or OWNER/NAME@REVISION of one"),
        ({"task": "causal-lm", "lora": "yes"}, "--lora: has no meaning with --task causal-lm --model words"),
        ({"task": "causal-lm", "size": "tiny"}, "--size: has no meaning with --task causal-lm --model words"),
        ({"task": "causal-lm", "data": "emoji"}, "--data emoji: give austen, OWNER/NAME of a data set on the Hub"),
        ({"data": "austen"}, "--data austen: give emoji"),
        ({"data": "acme/tales:story"}, "--data acme/tales:story: give emoji"),
        ({"inner-steps": "-1"}, "--inner-steps -1: must be a whole number from 0"),
    ],
)
def test_what_is_wrong_is_one_line(given: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        answers(**given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Mine", "-x", "", "a" * 50, "../x"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="NAME .*must be 1 to 41 of a-z"):
        answered(name, {}, defaults)


def test_addresses_as_peers_dial_them() -> None:
    assert multiaddr_host("203.0.113.7") == "/ip4/203.0.113.7"
    assert multiaddr_host("2001:db8::7") == "/ip6/2001:db8::7"
    assert multiaddr_host("tt.example.org") == "/dns4/tt.example.org"
    assert [multiaddr_host(wrong) for wrong in ("", "host", "a..b", "-a.b", "a/b.c", "1.2.3.4.5")] == [""] * 6


@pytest.mark.parametrize("name", list(builtin_runs()))
def test_a_commented_run_file_reads_back(name: str) -> None:
    run = load_run(name)
    text = commented(run, "one\ntwo")
    assert RunConfig.from_toml(text, "it") == run
    assert text.startswith("# one\n# two\n") and all(
        len(line) <= 140 or line.startswith("config = ") for line in text.splitlines()
    )


def test_every_size_can_be_built_and_grows() -> None:
    runs = [run_of(answers(size=name, line="1000")) for name in SIZES]
    needs = [takes(run) for run in runs]
    assert [one.effective for one in needs] == sorted(one.effective for one in needs)
    assert [one.cpu_ram for one in needs] == sorted(one.cpu_ram for one in needs)
    paper = takes(load_run("dalle"))
    assert round(paper.parameters / 1e5) == 1259 and paper.effective > 800e6
    assert "125.9M parameters" in paper.in_words() and "a GPU with 4 GB" in paper.in_words()
