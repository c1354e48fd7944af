"""scripts/build_emoji.py --quick writes a data set of the same form, and an interrupted one goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_emoji.py"


@pytest.mark.debian
def test_build_emoji_quick(tmp_path: Path) -> None:
    def build() -> dict:
        subprocess.run(
            [sys.executable, SCRIPT, "--quick", "--threads", "1", "--out", "out", "--work", "work", "--grid", "g.png"],
            cwd=tmp_path,
            env=os.environ,
            check=True,
            timeout=250,
        )
        return json.loads((tmp_path / "out" / "manifest.json").read_text())

    manifest = build()
    files = {
        *("train.parquet", "heldout.parquet", "vqgan.safetensors", "vqgan.json", "tokenizer.json"),
        *("NOTICE.txt", "LICENSE-noto-emoji.txt", "LICENSE-unicode-cldr.txt"),
    }
    assert manifest["files"].keys() == files
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"manifest.json"}
    assert manifest["psnr_db"]["train"] > 8
    train = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert len(train) == manifest["examples"]["train"] > 60
    assert all(row["caption"] and len(row["code"]) == 128 for row in train)
    assert Image.open(tmp_path / "g.png").width > 1000
    assert build() == manifest, "from the finished training's state"
