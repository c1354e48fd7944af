"""What is said of shards is what is in them; bad rows and damaged shards are counted, not fatal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from data.rows import bomb, code, run_on
from PIL import Image

from tt_cli.cli.main import main
from tt_cli.data import builtin
from tt_cli.data.build.inspection import as_page, as_text, inspect, shard_files
from tt_cli.data.build.journal import SETTINGS, SHARDS
from tt_cli.data.codes import to_column
from tt_cli.data.shard_format import CONTAINERS, write_shard
from tt_cli.errors import UsageError
from tt_cli.run import load_run


def plain(number: int, codes: bytes) -> dict[str, object]:
    return {"caption": f"row {number}", "code": codes}


@pytest.mark.parametrize("container", CONTAINERS)
def test_counts_sizes_and_codes(tmp_path: Path, container: str) -> None:
    (tmp_path / "data").mkdir()
    rows = [plain(i, code(0, 1, 2, i % 4)) for i in range(40)]
    bad = [{"caption": "", "code": code(1, 1, 1, 1)}, plain(90, code(1)), plain(91, code(1, 2, 3, 10))]
    one = write_shard(tmp_path / f"data/a{container}", rows)
    two = write_shard(tmp_path / f"data/b{container}", [*bad, plain(99, code(9, 9, 9, 9))])
    found = inspect(shard_files(tmp_path), run_on("any"), samples=5, seed=0)
    assert (found.shards, found.rows, found.bytes) == (2, 44, one.bytes + two.bytes)
    assert found.problems == {"no_caption": 1, "code_width": 1, "code_range": 1}
    assert found.used.tolist() == [50, 50, 50, 10, 0, 0, 0, 0, 0, 4]
    share = np.array([50, 50, 50, 10, 4]) / 164
    assert math.isclose(found.entropy, -(share * np.log2(share)).sum())
    assert sum(found.histogram()) == 164
    assert len(found.samples) == 5
    assert "44 rows in 2 shards" in as_text(found)


def test_samples_are_any_rows_and_the_seed_says_which(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", [plain(i, code(1, 2, 3, 4)) for i in range(1500)])
    drawn = [inspect(shard_files(tmp_path), run_on("any"), 300, seed).samples for seed in (0, 0, 1)]
    names = [[caption for caption, _ in samples] for samples in drawn]
    assert names[0] == names[1] != names[2]
    numbers = sorted(int(name.removeprefix("row ")) for name in names[0])
    assert len(set(numbers)) == 300
    assert numbers[20] < 300 and numbers[-20] > 1200


def test_a_shard_of_kilobytes_does_not_become_gigabytes(tmp_path: Path) -> None:
    bomb(tmp_path / "a.parquet")
    write_shard(tmp_path / "b.parquet", [plain(1, code(1, 2, 3, 4))])
    found = inspect(shard_files(tmp_path), run_on("any"), 3, 0)
    assert found.rows == 1
    assert "a.parquet cannot be read to its end (" in "".join(found.damaged)


def test_damage_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", [plain(1, code(1, 2, 3, 4))])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "c.parquet").symlink_to(tmp_path / "nothing")
    found = inspect(shard_files(tmp_path), run_on("any"), 3, 0)
    assert found.rows == 1 and found.damaged[1:] == [f"cannot read {tmp_path / 'c.parquet'}: No such file or directory"]
    assert "b.parquet cannot be read to its end" in found.damaged[0]


def test_the_page_needs_nothing_else_and_believes_no_caption(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [{"caption": "<script>alert(1)</script>", "code": code(1, 2, 3, 4)}])
    found = inspect(shard_files(tmp_path), run_on("any"), 3, 0)
    page = as_page(found, np.zeros((1, 16, 16, 3), np.uint8), "a <b>")
    assert "<script" not in page and "&lt;script&gt;" in page and "<h1>a &lt;b&gt;</h1>" in page
    assert "data:image/png;base64," in page
    assert not any(word in page for word in ('src="http', "<link", "url("))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = builtin.examples("emoji")[:30]
    strings = to_column("code13", np.stack([example.codes for example in examples]), 1024)
    rows = [{"caption": one.caption, "code13": string} for one, string in zip(examples, strings, strict=True)]
    write_shard(tmp_path / "a.jsonl.br", rows)
    arguments = ["data", "inspect", str(tmp_path), "--run", "emoji", "--samples", "4", "--json"]
    assert main([*arguments, "--page", str(tmp_path / "a.html"), "--sheet", str(tmp_path / "a.png")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["column"], facts["damaged"]) == (30, "code13", [])
    assert len(facts["samples"]) == 4 and set(facts["samples"]) <= {one.caption for one in examples}
    assert (tmp_path / "a.html").read_text().count("data:image/png") == 4
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.width > 1000
    assert main([*arguments, "--sheet", str(tmp_path / "a.nothing")]) == 2
    assert "tt: cannot write" in capsys.readouterr().err


def test_an_encoded_folder_knows_its_vqgan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --run: the shards of a 16 x 16 grid are no broken ones of the default run."""
    emoji = load_run("emoji")
    examples = builtin.examples("emoji")[:30]
    strings = to_column("code13", np.stack([example.codes for example in examples]), emoji.vqgan.codebook_size)
    (tmp_path / SHARDS).mkdir()
    rows = [{"caption": one.caption, "code13": string} for one, string in zip(examples, strings, strict=True)]
    write_shard(tmp_path / SHARDS / "a.jsonl.br", rows)
    (tmp_path / SETTINGS).write_text(json.dumps({"vqgan": emoji.vqgan.model_dump(exclude_none=True)}))
    for path in (tmp_path, tmp_path / SHARDS, tmp_path / SHARDS / "a.jsonl.br"):
        assert main(["data", "inspect", str(path)]) == 0
        said = capsys.readouterr().out
        assert said.startswith("30 rows in 1 shard of ") and "not to be trained on" not in said
    assert main(["data", "inspect", str(tmp_path), "--run", "dalle"]) == 0
    assert "code width: 30" in capsys.readouterr().out
    for broken in ("[]", "{", '{"vqgan": {"grid": -1}}'):
        (tmp_path / SETTINGS).write_text(broken)
        assert main(["data", "inspect", str(tmp_path)]) == 2
        assert f"cannot read {tmp_path / SETTINGS}" in capsys.readouterr().err


def test_where_there_is_nothing_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no shards in"):
        shard_files(tmp_path)
    write_shard(tmp_path / "a.tar", [{"caption": "alone"}])
    with pytest.raises(UsageError, match="the shards have no column code or code13"):
        inspect(shard_files(tmp_path), run_on("any"), 1, 0)
