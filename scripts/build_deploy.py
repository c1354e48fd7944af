#!/usr/bin/env python
"""Write the examples in configs/deploy/ anew: what `tt init` writes, for a run my-run at tt.example.org."""

from __future__ import annotations

from pathlib import Path

from tt_cli.organise.server_files import ServerFacts, rendered

FOLDER = Path(__file__).parents[1] / "configs" / "deploy"
EXAMPLE = ServerFacts("my-run", address="tt.example.org", authority="https://tt.example.org")

if __name__ == "__main__":
    for name, text in rendered(EXAMPLE).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
