"""Examples of tokens: cut from documents in a row, in an order of each peer's own, from files and built in."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from data.rows import bomb
from testbed.tiny_words import tiny_words

from tt_cli.data.examples import RowCounts
from tt_cli.data.stream.prefetch import PREFETCH_BLOCKS
from tt_cli.data.text import token_reader
from tt_cli.data.text.token_reader import POOL, SENT, TextTokenizer, cut, shuffled, token_ids
from tt_cli.data.text.token_stream import TokenStream, held_out
from tt_cli.data.text.trigram import trigram_perplexity
from tt_cli.errors import TTError, UsageError
from tt_cli.run import CausalLmRun
from tt_cli.supervisor.processes import alive

RUN = tiny_words()
TOKENIZER = TextTokenizer(RUN.tokenizer)
DOCUMENTS = [f"Document {number} says that it is a truth universally acknowledged. " * 3 for number in range(20)]


def on_files(place: Path, **changes: Any) -> CausalLmRun:
    return RUN.replaced({"data": {"source": "files", "name": "mine", "location": str(place), **changes}})


def documents(*sizes: int) -> list[np.ndarray]:
    """Ids that are numbered through."""
    ends = np.cumsum((0, *sizes))
    return [np.arange(first, last) for first, last in zip(ends, ends[1:], strict=False)]


def test_examples_go_on_over_documents_and_share_their_borders() -> None:
    examples = list(cut(iter(documents(3, 9, 1, 4)), 4))
    assert [example.tolist() for example in examples] == [[*range(first, first + 5)] for first in (0, 4, 8, 12)]


def test_a_later_epoch_is_cut_elsewhere() -> None:
    class Sevenths:
        def integers(self, below: int) -> int:
            return 7

    (first, *_) = cut(iter(documents(3, 2, 20)), 8, Sevenths())  # type: ignore[arg-type]
    assert first.tolist() == [*range(7, 16)]


def test_neighbours_are_shuffled_apart_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_reader, "POOL", 16)
    examples = [np.array([number]) for number in range(100)]
    order = [int(example[0]) for example in shuffled(iter(examples), np.random.default_rng(0))]
    assert sorted(order) == list(range(100)) and order != list(range(100))


def test_the_tokenizer_gives_text_back_and_ends_documents() -> None:
    text = 'It is a "truth" — naïve?\nYes.\n'
    ids = TOKENIZER.document(text)
    assert ids[-1] == TOKENIZER.end and TOKENIZER.backend.decode(ids[:-1].tolist()) == text
    assert TOKENIZER.document("half \ud800 of one")[-1] == TOKENIZER.end
    assert list(TOKENIZER.document("One</s>two")).count(TOKENIZER.end) == 2, "a special token's name, as in templates"
    with pytest.raises(UsageError, match=r"document_end = '<stop>': austen has no such token"):
        TextTokenizer(RUN.replaced({"tokenizer.document_end": "<stop>"}).tokenizer)


class Noting:
    """The tokenizer, with the length of the longest text that it was given at once."""

    longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER.backend, name)

    def encode_batch_fast(self, texts: list[str], **how: Any) -> list[Any]:
        self.longest = max(self.longest, *map(len, texts))
        return TOKENIZER.backend.encode_batch_fast(texts, **how)


@pytest.mark.parametrize("text", ["A truth is universally\n\nacknowledged. " * 12_000, "é" * 300_000 + " end"])
def test_a_huge_document_is_tokenised_in_pieces(text: str) -> None:
    """For the tokenizer of one of 10 MB took more memory than the process that reads ahead may have."""
    backend: Any = Noting()
    ids = TextTokenizer(RUN.tokenizer, backend).document(text)
    assert ids[-1] == TOKENIZER.end and TOKENIZER.backend.decode(ids[:-1].tolist()) == text
    assert backend.longest <= 1 << 18 < len(text)
    if "\n" in text:  # and not in the middle of a word
        assert ids[:-1].tolist() == TOKENIZER.backend.encode(text, add_special_tokens=False).ids


def test_equal_seeds_give_equal_batches_and_peers_have_orders_of_their_own() -> None:
    def few(seed: int, peer: str) -> torch.Tensor:
        return torch.cat(
            [batch.tensors["ids"] for batch in islice(TokenStream(RUN, TOKENIZER, seed, peer=peer).batches(8), 3)]
        )

    one = few(0, "anna")
    assert one.shape == (24, RUN.model.length + 1) and one.dtype == torch.int64
    assert torch.equal(one, few(0, "anna"))
    assert not torch.equal(one, few(0, "ben")) and not torch.equal(one, few(1, "anna"))


def test_held_out_text_is_the_same_each_time_and_nobodys_training() -> None:
    batches = held_out(RUN, TOKENIZER, 40, 16)
    assert [len(batch) for batch in batches] == [16, 16, 8]
    assert torch.equal(batches[0].tensors["ids"], held_out(RUN, TOKENIZER, 16, 16)[0].tensors["ids"])
    trained = {ids[: RUN.model.length].tobytes() for ids in token_reader._in_memory(RUN.data, RUN.tokenizer)}
    assert batches[0].tensors["ids"][0, :-1].numpy().tobytes() not in trained
    assert batches[0].captions[0] == TOKENIZER.backend.decode(batches[0].tensors["ids"][0, :24].tolist())


def write(folder: Path, kind: str, texts: list[Any], split: str = "train") -> None:
    folder.mkdir(exist_ok=True)
    if kind == "txt":
        for number, text in enumerate(texts):
            (folder / f"{split}-{number:02}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / f"{split}.parquet")


def endless(folder: Path, peer: str = "") -> Iterator[np.ndarray]:
    """The documents of a peer's stream, which a process of its own reads, in this one."""
    plan = TokenStream(on_files(folder), TOKENIZER, 0, peer=peer)._plan
    return token_reader._endless(plan, TOKENIZER, plan.seed, RowCounts())


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_files_are_documents_each_epoch_in_another_order(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, DOCUMENTS)
    expected = Counter(TOKENIZER.document(text).tobytes() for text in DOCUMENTS)
    ends = endless(tmp_path)
    epochs = [[ids.tobytes() for ids in islice(ends, len(DOCUMENTS))] for _ in range(2)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == expected
    assert epochs[0] != epochs[1]
    others = [ids.tobytes() for ids in islice(endless(tmp_path, "ben"), len(DOCUMENTS))]
    assert Counter(others) == expected and others != epochs[0]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "parquet of bytes"])
def test_a_byte_that_is_no_utf8_ends_no_training_and_a_byte_order_mark_is_no_text(tmp_path: Path, kind: str) -> None:
    one, two, blank = b"One caf\xe9\r\nand a half", b"Two", "\u3000\n\xa0".encode()
    if kind == "txt":
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + one)
        (tmp_path / "b.txt").write_bytes(two)
        (tmp_path / "c.txt").write_bytes(blank)
    elif kind == "jsonl":
        lines = (b'{"text": "%s"}\n' % text.replace(b"\r", b"").replace(b"\n", rb"\n") for text in (one, two, blank))
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    else:
        column = pyarrow.array([text.replace(b"\r", b"") for text in (one, two, blank)])
        column = column if kind == "parquet of bytes" else column.view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"text": column, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    counts = RowCounts()
    ids = token_ids(on_files(tmp_path).data, TOKENIZER, "train", counts=counts)
    assert [TOKENIZER.backend.decode(one[:-1].tolist()) for one in ids] == ["One caf\ufffd\nand a half", "Two"]
    assert counts == {"no_text": 1}


def test_another_process_reads_files_and_what_ends_it_changes_their_order(tmp_path: Path) -> None:
    """It loads no torch, begins no order twice, and ends with the stream."""
    write(tmp_path, "jsonl", DOCUMENTS)
    seen, told = [], list[str]()
    for kills in (0, 1):
        stream = TokenStream(on_files(tmp_path), TOKENIZER, 3, peer="anna", tell=lambda *words: told.append(words[0]))
        batches = stream.batches(SENT)
        batch = next(batches)
        assert stream._prefetch is not None and alive(pid := stream._prefetch.pid)
        assert batch.captions[0] == TOKENIZER.words(batch.tensors["ids"][0].numpy())
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "libarrow" in mapped and "libtorch" not in mapped and "hivemind" not in mapped
        if kills:
            os.kill(pid, signal.SIGKILL)
        more = [next(batches).tensors["ids"] for _ in range(PREFETCH_BLOCKS + POOL // SENT)]  # all that was sent
        seen.append([batch.tensors["ids"], *more])
        stream.close()
        assert not alive(stream._prefetch.pid)
    assert told == ["the process that reads the data was ended by signal 9"]
    assert torch.equal(seen[0][0], seen[1][0])
    assert not any(torch.equal(seen[0][0], later) for later in seen[1][1:])


def test_a_page_of_kilobytes_does_not_become_gigabytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("page", "document")]
    for folder in folders:
        folder.mkdir()
    bomb(folders[0] / "train.parquet")
    (folders[1] / "train.txt").touch()
    os.truncate(folders[1] / "train.txt", 1 << 33)
    for folder, column in zip(folders, ("caption", "text"), strict=True):
        with (
            closing(TokenStream(on_files(folder, column=column), TOKENIZER, 0)) as stream,
            pytest.raises(TTError, match=r"the data set mine: a file of it cannot be read \(it takes over a gigabyte"),
        ):
            next(stream.batches(1))


def test_a_held_out_file_is_found_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", DOCUMENTS)
    run = on_files(tmp_path)
    assert held_out(run, TOKENIZER, 8, 8) == []
    write(tmp_path, "jsonl", DOCUMENTS[:3], "validation")
    (batch,) = held_out(run, TOKENIZER, 2, 8)
    assert batch.tensors["ids"][0].tolist() == TOKENIZER.document(DOCUMENTS[0])[: RUN.model.length + 1].tolist()
    assert len(list(token_ids(run.data, TOKENIZER, "train"))) == len(DOCUMENTS)


def test_what_is_no_text_is_counted_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", ["", None, *DOCUMENTS, "  "])
    with closing(TokenStream(on_files(tmp_path), TOKENIZER, 0)) as stream:
        next(stream.batches(1))
    epochs, rest = divmod(stream.counts["kept"], len(DOCUMENTS))
    assert 3 * epochs <= stream.counts["no_text"] <= 3 * (epochs + (rest > 0))
    assert "no text" in stream.counts.in_words()
    write(tmp_path, "jsonl", ["", "\n"])
    with pytest.raises(TTError, match=r"the data set mine has no text \(2 rows: no text 2\)"):
        next(endless(tmp_path))


def test_data_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    def error(run: CausalLmRun) -> str:
        with pytest.raises(TTError) as caught:
            next(token_ids(run.data, TOKENIZER, "train"))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for none in (tmp_path / "none", Path("~no-such-user/none")):
        assert "there is no such file or folder; check data.location" in error(on_files(none))
    assert "it has no file that ends in .parquet, .jsonl, .txt" in error(on_files(tmp_path))
    write(tmp_path, "jsonl", DOCUMENTS)
    assert "the data set mine has no column body; it has n, text" in error(on_files(tmp_path, column="body"))
    write(tmp_path, "txt", DOCUMENTS)
    assert "it has .jsonl and .txt files; put files of one kind there" in error(on_files(tmp_path))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "train.parquet").write_bytes(b"PAR1 nothing")
    assert error(on_files(tmp_path / "damaged")).startswith("cannot read the data set mine: ")
    assert error(RUN.replaced({"data.column": "body"})) == "the data set austen has no column body; it has text, title"
    assert "the data set emoji has no column text; it has NSFW, caption" in error(RUN.replaced({"data.name": "emoji"}))
    assert "no built-in data set is called 'bible'" in error(RUN.replaced({"data.name": "bible"}))


# ---------------------------------------------------------------- the baseline


def by_hand(train: list[int], heldout: list[int], vocabulary: int) -> float:
    """Interpolated Kneser-Ney from its definition."""
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(3)]
    counts[2].update(zip(train, train[1:], train[2:], strict=False))
    counts[1].update(gram[1:] for gram in counts[2])
    counts[0].update(gram[1:] for gram in counts[1])

    def probability(gram: tuple[int, ...]) -> float:
        shorter = probability(gram[1:]) if len(gram) > 1 else 1 / vocabulary
        order = counts[len(gram) - 1]
        times = Counter(order.values())
        discount = times[1] / (times[1] + 2 * times[2]) if times[1] else 0.5
        same = {other: number for other, number in order.items() if other[:-1] == gram[:-1]}
        if not (total := sum(same.values())):
            return shorter
        return (max(order[gram] - discount, 0) + discount * len(same) * shorter) / total

    logs = [np.log(probability(gram)) for gram in zip(heldout, heldout[1:], heldout[2:], strict=False)]
    return float(np.exp(-np.mean(logs)))


def test_the_trigram_baseline_is_kneser_ney_to_the_letter() -> None:
    random = np.random.default_rng(0)
    train, heldout = (random.integers(0, 6, size).cumsum() % 7 for size in (300, 60))
    expected = by_hand(train.tolist(), heldout.tolist(), 7)
    assert trigram_perplexity(train, heldout, 7) == pytest.approx(expected)


def test_it_is_sure_of_what_always_follows_and_finite_for_what_never_did() -> None:
    train = np.tile(np.arange(5), 200)
    assert trigram_perplexity(train, np.tile(np.arange(5), 4), 5) < 1.01
    assert trigram_perplexity(train, np.array([0, 0, 9, 9]), 10) == pytest.approx(10)
