"""scripts/build_emoji.py --quick writes a data set of the same form, and an interrupted one goes on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.debian
def test_build_emoji_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module("build_emoji").main

    def build() -> dict[str, Any]:
        arguments = ["--quick", "--threads", "1", "--out", "out", "--work", "work", "--grid", "g.png"]
        monkeypatch.setattr("sys.argv", ["build_emoji", *arguments])
        main()
        manifest: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())
        return manifest

    manifest = build()
    files = {
        *("train.parquet", "heldout.parquet", "vqgan.safetensors", "vqgan.json", "tokenizer.json"),
        *("NOTICE.txt", "LICENSE-noto-emoji.txt", "LICENSE-unicode-cldr.txt"),
    }
    assert manifest["files"].keys() == files
    assert {path.name for path in Path("out").iterdir()} == files | {"manifest.json"}
    assert manifest["psnr_db"]["train"] > 8
    train = pyarrow.parquet.read_table("out/train.parquet").to_pylist()
    assert len(train) == manifest["examples"]["train"] > 60
    assert all(row["caption"] and len(row["code"]) == 128 for row in train)
    assert Image.open("g.png").width > 1000
    assert build() == manifest, "from the finished training's state"
