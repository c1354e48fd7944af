#!/usr/bin/env python3
"""Puts the weights of a checkpoint of the run emoji beside the built-in data, to draw with after an installation.

    scripts/build_emoji_weights.py CHECKPOINT

The file holds the parameters in 8 bits and the run file; the manifest gets its size and SHA-256. `scripts/bench recall`
says how well it draws.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tt_cli.checkpoint.checkpoint_files import load, write
from tt_cli.data import builtin
from tt_cli.run import RunConfig
from tt_cli.task.built_in_weights import FILE, pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="step-….safetensors")
    parser.add_argument("--data", type=Path, default=builtin.folder() / "emoji", help="folder of the built-in data")
    options = parser.parse_args()
    state = load(options.checkpoint)
    write(options.data / FILE, pack(state))
    manifest = json.loads((options.data / builtin.MANIFEST).read_text(encoding="utf-8"))
    content = (options.data / FILE).read_bytes()
    manifest["files"][FILE] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (options.data / builtin.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    run = RunConfig.from_toml(state.run_toml, str(options.checkpoint))
    print(f"step {state.step:,} of {run.identity}: {len(content) / 1e6:.2f} MB in {options.data / FILE}")


if __name__ == "__main__":
    main()
