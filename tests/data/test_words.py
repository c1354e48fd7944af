"""Captions word by word have the ids that the tokenizer gives them as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.benchmarks.data import of_t5s_kind
from tt_cli.data import builtin
from tt_cli.data.word_cache import Words, cuts_at_spaces

NAMES = [example.caption for example in builtin.examples("emoji")]


BACKENDS = {
    "built-in": tokenizers.Tokenizer.from_file(str(builtin.checked_file("emoji", "tokenizer.json"))),
    "T5's kind": of_t5s_kind(NAMES, 600),
}
words = st.one_of(
    st.sampled_from(
        ["a", "Cat", "red-hot", "it's", "hand:", "(big)", "100%", "<pad>", "</s>", "x" * 50, "", "_", "-", "..."]
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=6),
)
captions = st.one_of(st.lists(words, max_size=8).map(" ".join), st.text(max_size=30), st.sampled_from(NAMES))


@pytest.mark.parametrize("kind", BACKENDS)
def test_all_captions_have_the_ids_of_the_whole(kind: str) -> None:
    backend = BACKENDS[kind]
    apart = Words(backend)
    assert apart.apart
    for _ in range(2):  # the second time from memory
        for caption in NAMES:
            assert apart.ids(caption) == backend.encode(caption, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", BACKENDS)
@given(texts=st.lists(captions, min_size=1, max_size=6))
@settings(deadline=None)
def test_any_text_has_the_ids_of_the_whole(kind: str, texts: list[str]) -> None:
    backend = BACKENDS[kind]
    apart = Words(backend)
    for text in texts:
        assert apart.ids(text) == backend.encode(text, add_special_tokens=False).ids


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tt_cli.data import word_cache as room

    monkeypatch.setattr(room, "MOST_WORDS", 10)
    backend = BACKENDS["built-in"]
    apart = Words(backend)
    for number in range(100):
        caption = f"cat{number} {'y' * 40}{number}"
        assert apart.ids(caption) == backend.encode(caption, add_special_tokens=False).ids
        assert apart._remembered.cache_info().currsize <= 10


def parts(**changes: Any) -> dict[str, Any]:
    """Of a tokenizer.json like that of T5 on the Hub."""
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    t5s = {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "model": {"type": "Unigram"},
    }
    return {**t5s, **changes}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "b c"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
WHOLE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


def test_t5s_tokenizer_is_known_to_cut_at_spaces() -> None:
    assert cuts_at_spaces(parts())


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": FIRST},
        {"pre_tokenizer": WHOLE},
        {"pre_tokenizer": BYTES},
        {"pre_tokenizer": None},
        {"normalizer": REPLACE},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, REPLACE]}},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"normalizer": {"type": "Unheard of"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
)
def test_what_is_not_known_goes_as_a_whole(changes: dict[str, Any]) -> None:
    assert not cuts_at_spaces(parts(**changes))


def test_a_first_word_that_is_treated_unlike_the_others_is_noticed() -> None:
    plain = json.loads(BACKENDS["built-in"].to_str())
    assert cuts_at_spaces(plain)
    plain["normalizer"]["normalizers"].pop()  # the space before the first word
    assert not cuts_at_spaces(plain)
