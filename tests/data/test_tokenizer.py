"""Captions to ids and back: the built-in tokenizer, and one that is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tt_cli.data import builtin, tokenizer
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig, load_run


@pytest.fixture(scope="module")
def emoji() -> tokenizer.Tokenizer:
    return load_tokenizer(load_run("emoji"))


def hub_run(monkeypatch: pytest.MonkeyPatch, path: Path) -> RunConfig:
    """The emoji run with its tokenizer from a repository whose tokenizer.json is `path`."""
    monkeypatch.setattr(tokenizer, "download", lambda name, filename, revision: path)
    return load_run("emoji").replaced({"tokenizer.source": "hub"})


@pytest.mark.parametrize(
    "caption", ["red apple", "family: man, woman, girl", "1st place medal", "xylophone qzj", "日本 😀"]
)
def test_round_trip(emoji: tokenizer.Tokenizer, caption: str) -> None:
    assert emoji.decode(emoji.encode([caption])) == [caption]


def test_right_padded_with_pad_id(emoji: tokenizer.Tokenizer) -> None:
    ids = emoji.encode(["red apple", ""])
    assert ids.dtype == torch.int64
    assert ids.shape == (2, 16)
    length = int((ids[0] != 1).sum())
    assert 1 < length < 16
    assert (ids[0, :length] > 1).all()
    assert (ids[0, length:] == 1).all()
    assert (ids[1] == 1).all()


def test_truncated_to_text_length(emoji: tokenizer.Tokenizer) -> None:
    whole, cut = emoji.encode(["red apple, " * 3, "red apple, " * 50])
    assert (whole[:12] == cut[:12]).all()
    assert (cut > 1).all()


def test_case_accents_and_spaces_do_not_count(emoji: tokenizer.Tokenizer) -> None:
    ids = emoji.encode(["piñata and woman’s hat", " Pinata  AND woman's hat\n"])
    assert torch.equal(ids[0], ids[1])


def test_ids_stay_below_vocab_size_and_zero_is_the_models(emoji: tokenizer.Tokenizer) -> None:
    ids = emoji.encode([example.caption for example in builtin.examples("emoji")] + ["<pad> </s>", "\x00\uffff"])
    assert ids.max() < 1024
    assert (ids[:-2] > 0).all()


def test_captions_fit_the_text_length(emoji: tokenizer.Tokenizer) -> None:
    captions = [example.caption for split in builtin.SPLITS for example in builtin.examples("emoji", split)]
    long = [caption for caption in captions if len(emoji.backend.encode(caption).ids) > emoji.text_length]
    assert len(long) <= len(captions) // 100


def test_special_tokens_are_not_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    backend = tokenizers.Tokenizer.from_file(str(builtin.checked_file("emoji", "tokenizer.json")))
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.enable_truncation(2)
    backend.enable_padding(pad_id=0)
    backend.save(str(tmp_path / "tokenizer.json"))
    fetched = load_tokenizer(hub_run(monkeypatch, tmp_path / "tokenizer.json").replaced({"tokenizer.pad_id": 5}))
    ids = fetched.encode(["family: man, woman, girl"])[0]
    assert 1 not in ids.tolist()
    assert ids[-1] == 5
    assert fetched.decode(ids[None]) == ["family: man, woman, girl"]


def test_a_larger_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hub_run(monkeypatch, builtin.checked_file("emoji", "tokenizer.json"))
    with pytest.raises(UsageError, match="vocab_size is 1023, but the tokenizer has ids up to 1023; set it to 1024"):
        load_tokenizer(run.replaced({"tokenizer.vocab_size": 1023}))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 1}'])
def test_a_malformed_file_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TTError, match="cannot be read") as caught:
        load_tokenizer(hub_run(monkeypatch, tmp_path / "tokenizer.json"))
    assert "\n" not in str(caught.value)
