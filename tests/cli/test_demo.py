"""The end of `tt demo`: what it says of what was learned, and how to go on."""

from __future__ import annotations

import shlex
from pathlib import Path

from draw.tiny import Tiny

from tt_cli.cli.demo import _show_pictures
from tt_cli.draw.weights_source import find_checkpoint


def test_the_line_that_draws_more_can_be_typed_as_it_stands(tmp_path: Path) -> None:
    tiny, folder, lines = Tiny.new(), tmp_path / "My Drive", list[str]()
    folder.mkdir()
    source = find_checkpoint(tiny.run, tiny.save(folder, 3))
    _show_pictures(source, folder, ['a "red" apple'], 0, lines.append)
    command = lines[-1].removeprefix("Draw more: ")
    assert shlex.split(command) == ["tt", "infer", 'a "red" apple', "--checkpoint", source.origin]
