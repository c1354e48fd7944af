"""`tt infer` of a language model's run, through the command line's entry."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from testbed.tiny_words import tiny_words

from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.cli.main import main
from tt_cli.data.text.token_reader import TextTokenizer
from tt_cli.draw.weights_source import find_checkpoint
from tt_cli.draw.writing import Writer, _Pieces
from tt_cli.errors import UsageError
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.run import folders
from tt_cli.task import task_of

RUN = tiny_words()
PROMPT = "It is a truth"


@pytest.fixture(autouse=True)
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny run as a file, with a checkpoint in its folder."""
    monkeypatch.setenv("TT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    parameters = {name: tensor.detach() for name, tensor in task_of(RUN).new_model().named_parameters()}
    save(folders.checkpoints(RUN), TrainingState(7, parameters, {}, RUN.to_toml(), RUN.identity), keep=10)
    Path("words.toml").write_text(RUN.to_toml())
    return "words.toml"


def writer() -> Writer:
    return Writer.of(find_checkpoint(RUN, None), "cpu")


def test_text_comes_in_pieces_and_a_seed_repeats_it() -> None:
    own, pieces = writer(), list[str]()
    text, tokens = own.write(PROMPT, Sampling(), 3, None, pieces.append)
    assert "".join(pieces) == text and len(pieces) > 5
    assert tokens <= RUN.model.length - len(own.task.tokenizer.document(PROMPT)) + 1
    before = torch.random.get_rng_state()
    assert own.write(PROMPT, Sampling(), 3, None, lambda piece: None) == (text, tokens)
    assert torch.equal(before, torch.random.get_rng_state())
    assert own.write(PROMPT, Sampling(), 4, None, lambda piece: None)[0] != text
    assert own.write(PROMPT, Sampling(), 3, 5, lambda piece: None)[1] <= 5
    assert own.write(PROMPT, Sampling(), 3 + 2**64, None, lambda piece: None) == (text, tokens)


def test_half_a_letter_waits_for_its_other_half() -> None:
    pieces, tokenizer = list[str](), task_of(RUN).tokenizer
    taker = _Pieces(tokenizer, pieces.append)
    for ids in (tokenizer.document("d")[:-1], *tokenizer.document("éj")[:-1, None]):
        taker.put(torch.from_numpy(ids))
    assert pieces == ["é", "j"]


def test_words_of_a_tokenizer_whose_decoder_drops_the_first_space_are_apart_from_the_prompt() -> None:
    """SentencePiece's vocabularies, as Llama 2 has one: every word begins with its space."""
    words = {"</s>": 0, **{f"▁w{number}": number for number in range(1, 512)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    own, pieces = writer(), list[str]()
    vars(own.task)["tokenizer"] = TextTokenizer(RUN.tokenizer, backend)
    text, tokens = own.write("w7 w8", Sampling(), 3, 4, pieces.append)
    assert "".join(pieces) == text and text.count(" w") == tokens == 4, text


def test_a_tokenizer_without_a_template_holds_no_conversation(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "--run", run_file, "--chat", "Hi"]) == 2
    assert "--chat: the tokenizer austen has no template for conversations" in capsys.readouterr().err
    assert main(["infer", "--run", run_file, "--chat", "Hi", "--samples", "2"]) == 2
    assert "--samples 2: a conversation has one answer to each line" in capsys.readouterr().err


def test_where_lines_are_typed_the_question_is_no_part_of_the_json(
    run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = pty.openpty()
    os.write(master, b"\x04")  # Ctrl-D: nothing is said
    with os.fdopen(slave) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        assert main(["infer", "--run", run_file, "--chat", "--json"]) == 0
    os.close(master)
    output, errors = capsys.readouterr()
    assert json.loads(output)["texts"] == [] and errors.endswith("\n> ")


def test_cached_keys_and_values_change_nothing() -> None:
    """With top-k 1, text is the likeliest token after all before it, each time computed anew."""
    own = writer()
    tokenizer = own.task.tokenizer
    text, count = own.write(PROMPT, Sampling(top_k=1), 0, 12, lambda piece: None)
    ids = tokenizer.document(PROMPT)[:-1].tolist()
    for _ in range(count):
        ids.append(int(own.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert tokenizer.backend.decode(ids[-count:]) == text


def test_it_ends_where_a_document_does() -> None:
    own = writer()
    with torch.no_grad():  # a model that always ends
        embeddings = own.model.get_input_embeddings().weight  # tied with the head
        embeddings.zero_()
        embeddings[own.task.tokenizer.end] = 50.0
        for name, parameter in own.model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
    prompt = "</s>"
    assert own.write(prompt, Sampling(top_k=1), 0, None, lambda piece: None)[1] <= 1


def test_a_prompt_that_leaves_no_place_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^a prompt of \d+ tokens: the model has places for 32; shorten it$"):
        writer().write("never " * 60, Sampling(), 0, None, print)


def test_perplexity_is_measured_beside_a_trigrams() -> None:
    score = writer().held_out()
    assert 400 < score.perplexity < 700  # of 512 ids, by a model that knows nothing
    assert 10 < score.trigram < 20 and score.tokens > 80_000
    assert all(text and text == text.strip() for text in score.beginnings) and len(score.beginnings) == 3


def test_the_command_streams_text_and_says_what_it_did(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", PROMPT, "Emma", "--run", run_file, "--samples", "2", "--seed", "3", "--tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"Checkpoint: step 7 of run {RUN.identity} (the newest of this run in ")
    assert printed.count(f"\n{PROMPT}") == printed.count("\nEmma") == 2
    assert printed.splitlines()[-1].startswith("Wrote ") and printed.endswith("Again: --seed 3\n")
    assert not any(ord(letter) < 32 and letter != "\n" for letter in printed), "what could steer a terminal"


def test_json_is_one_object_with_every_text(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["infer", PROMPT, "--run", run_file, "--samples", "2", "--seed", "3", "--top-p", "0.5", "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["run"], first["step"], first["temperature"], first["top_p"]) == (RUN.identity, 7, 0.8, 0.5)
    assert [(text["prompt"], text["index"]) for text in first["texts"]] == [(PROMPT, 0), (PROMPT, 1)]
    assert first["tokens"] > 0 and len({text["text"] for text in first["texts"]}) == 2
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == first["texts"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--keep", "1"], "--keep: has no meaning for text, and tiny-words is a language model's run"),
        (["--out", "here"], "--out: has no meaning for text"),
        (["--memory", "1GB"], "--memory: has no meaning for text"),
        (["--temperature", "0"], "temperature is 0.0; it must be above 0"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_what_has_no_meaning_for_text_is_one_line(
    run_file: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", PROMPT, "--run", run_file, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tt: ") and error.count("\n") == 1 and words in error


def test_tokens_have_no_meaning_for_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "owl", "--tokens", "5"]) == 2
    assert "--tokens: has no meaning for pictures, and emoji draws" in capsys.readouterr().err
