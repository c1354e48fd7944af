"""Token ids of captions word by word: each word is given to the tokenizer once, for captions use the same ones.

That is right where a tokenizer cuts text at spaces and treats a word alike wherever it stands, as T5's and the built-in
one do. Whether it does is read from its parts; where any of them is not known to, and for captions with anything but
single spaces and printable ASCII, all goes to the tokenizer as it is.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

MOST_WORDS = 200_000  # remembered
MOST_LETTERS = 32  # of a word that is remembered
MOST_MARKS = 4
# Normalizers that change no ASCII spaces.
LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Precompiled"}
SPACES = {r"\s+", " {2,}"}  # patterns that find nothing in single spaces but themselves
WORDS = r" ?[\w-]+| ?[^\w\s-]+"  # cuts at every space, which goes with what follows it


class Words:
    """The ids of captions by a tokenizer, without special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._remembered = functools.lru_cache(MOST_WORDS)(self._whole)
        parts = json.loads(backend.to_str())
        added = [token["content"] for token in parts.get("added_tokens") or []]
        self._marks = sorted({content[0] for content in added if content})  # a caption without them has none of these
        self.apart = cuts_at_spaces(parts) and len(self._marks) <= MOST_MARKS

    def ids(self, caption: str) -> list[int]:
        """As the tokenizer's own for the whole caption."""
        words = caption.split(" ")
        plain = self.apart and caption.isascii() and caption.isprintable() and all(words)
        if not plain or any(mark in caption for mark in self._marks):
            return self._whole(caption)
        ids: list[int] = []
        for word in words:
            ids += self._remembered(word) if len(word) <= MOST_LETTERS else self._whole(word)
        return ids

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def cuts_at_spaces(parts: dict[str, Any]) -> bool:
    """True if a word of printable ASCII has the same ids between single spaces as alone. parts: of tokenizer.json."""
    changes = _sequence(parts.get("normalizer"), "normalizers")
    cuts = _sequence(parts.get("pre_tokenizer"), "pretokenizers")
    prepends = [change for change in changes if change["type"] == "Prepend"]
    if parts["model"].get("dropout") or not all(_is_local(change) for change in changes if change not in prepends):
        return False
    kinds = [cut["type"] for cut in cuts]
    if kinds in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return not prepends and cuts[-1].get("prepend_scheme") == "always" and cuts[-1].get("split") is True
    if kinds == ["Split", "ByteLevel"]:
        first, then = cuts
        isolated = first["pattern"] == {"Regex": WORDS} and first["behavior"] == "Isolated" and not first["invert"]
        plain = not then["add_prefix_space"] and not then["use_regex"]
        return isolated and plain and changes[-1:] == prepends and prepends[0]["prepend"] == " "
    return False


def _sequence(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for member in part[inner] for step in _sequence(member, inner)]


def _is_local(change: dict[str, Any]) -> bool:
    if change["type"] != "Replace":
        return change["type"] in LOCAL
    pattern = change["pattern"]
    if "String" in pattern:
        return bool(pattern["String"]) and not pattern["String"].isascii()
    return pattern.get("Regex") in SPACES and change["content"] == " "
