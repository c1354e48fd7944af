"""The files that ship: complete, as the manifest says, small; and damage is noticed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest
from data.rows import write

from tt_cli.data import builtin
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.errors import TTError
from tt_cli.run import load_run
from tt_cli.task.picture_codec import load_vqgan

EMOJI = builtin.folder() / "emoji"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the built-in data set that a test may damage, in the place of the real one."""
    shutil.copytree(EMOJI, tmp_path / "emoji")
    monkeypatch.setattr(builtin, "folder", lambda: tmp_path)
    builtin.examples.cache_clear()
    yield tmp_path / "emoji"
    builtin.examples.cache_clear()


def test_the_manifest_lists_every_file_and_its_hash() -> None:
    listed = json.loads((EMOJI / builtin.MANIFEST).read_text())["files"]
    present = {path.name: path for path in EMOJI.iterdir() if path.name != builtin.MANIFEST}
    assert listed.keys() == present.keys()
    for name, path in present.items():
        assert listed[name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest(), name


def test_at_most_eight_megabytes_and_six_of_what_was_learned() -> None:
    learned = (EMOJI / "weights.safetensors").stat().st_size
    assert learned <= 6_000_000
    assert sum(path.stat().st_size for path in EMOJI.iterdir()) - learned <= 8_000_000


def test_both_licences_are_there() -> None:
    assert "SIL OPEN FONT LICENSE" in (EMOJI / "LICENSE-noto-emoji.txt").read_text().upper()
    assert "UNICODE" in (EMOJI / "LICENSE-unicode-cldr.txt").read_text().upper()
    assert "Noto Color Emoji" in (EMOJI / "NOTICE.txt").read_text()


def test_the_columns_and_their_compression() -> None:
    for split in builtin.SPLITS:
        file = pyarrow.parquet.ParquetFile(EMOJI / f"{split}.parquet")
        names = ["caption", "keywords", "codepoints", "NSFW", "original_width", "original_height", "code"]
        assert file.schema_arrow.names == names
        assert file.metadata.row_group(0).column(6).compression == "BROTLI"


def test_examples_are_many_and_their_captions_unique() -> None:
    train, heldout = (builtin.examples("emoji", split) for split in builtin.SPLITS)
    captions = [example.caption for example in train + heldout]
    assert len(captions) == len(set(captions)) > 3400
    assert 0.03 < len(heldout) / len(captions) < 0.08
    assert {"red apple", "sailboat", "grinning face with smiling eyes"} <= set(captions)


def test_all_variants_of_one_emoji_are_in_one_split() -> None:
    def families(split: str) -> set[str]:
        points = pyarrow.parquet.read_table(EMOJI / f"{split}.parquet").column("codepoints").to_pylist()
        tones = {f"{code:04X}" for code in range(0x1F3FB, 0x1F400)}
        return {" ".join(point for point in row.split() if point not in tones) or row for row in points}

    assert not families("train") & families("heldout")


def test_codes_are_in_the_codebook_and_use_most_of_it() -> None:
    run = load_run("emoji")
    used: set[int] = set()
    for split in builtin.SPLITS:
        for example in builtin.examples("emoji", split):
            assert example.codes.shape == (64,)
            assert example.codes.min() >= 0
            assert example.codes.max() < run.vqgan.codebook_size
            used.update(example.codes.tolist())
    assert len(used) > 0.9 * run.vqgan.codebook_size


READERS = {
    "train.parquet": lambda: builtin.examples("emoji"),
    "tokenizer.json": lambda: load_tokenizer(load_run("emoji")),
    "vqgan.safetensors": lambda: load_vqgan(load_run("emoji")),
    "vqgan.json": lambda: load_vqgan(load_run("emoji")),
}


@pytest.mark.parametrize("filename", READERS)
def test_a_damaged_file_is_noticed_before_it_is_used(copy: Path, filename: str) -> None:
    content = bytearray((copy / filename).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / filename).write_bytes(content)
    with pytest.raises(TTError, match=f"{filename} is damaged: .*install tt again"):
        READERS[filename]()


@pytest.mark.parametrize("filename", READERS)
def test_a_missing_file_is_one_line(copy: Path, filename: str) -> None:
    (copy / filename).unlink()
    with pytest.raises(TTError, match="cannot be read .*install tt again"):
        READERS[filename]()


@pytest.mark.parametrize("content", ["", "{}", '{"files": []}', "[]"])
def test_a_broken_manifest_is_one_line(copy: Path, content: str) -> None:
    (copy / builtin.MANIFEST).write_text(content)
    with pytest.raises(TTError, match="cannot be read .*install tt again"):
        builtin.examples("emoji")


def test_another_table_under_a_right_hash_is_one_line(copy: Path) -> None:
    write(copy / "train.parquet", [{"text": "red apple"}])
    manifest = json.loads((copy / builtin.MANIFEST).read_text())
    manifest["files"]["train.parquet"]["sha256"] = hashlib.sha256((copy / "train.parquet").read_bytes()).hexdigest()
    (copy / builtin.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(TTError, match="cannot be read"):
        builtin.examples("emoji")
