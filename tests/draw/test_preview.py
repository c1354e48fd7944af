"""Pictures in the terminal: which way, and what exactly is written."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterator
from typing import TextIO

import numpy as np
import pytest
from PIL import Image
from rich.cells import cell_len

from tt_cli.draw.contact_sheet import contact_sheet
from tt_cli.draw.drawing import Drawing
from tt_cli.draw.preview import half_blocks, shown_in_terminal, way_to_show


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """The program's end of a real pseudo-terminal."""
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as stream:
        yield stream
    os.close(master)


PLAIN = {"TERM": "xterm-256color"}
TRUE = {**PLAIN, "COLORTERM": "truecolor"}


@pytest.mark.parametrize(
    ("environ", "wanted", "way"),
    [
        (PLAIN, "auto", None),
        (TRUE, "auto", "blocks"),
        ({**PLAIN, "COLORTERM": "24bit"}, "auto", "blocks"),
        ({"TERM": "xterm-kitty", "COLORTERM": "truecolor"}, "auto", "kitty"),
        ({**TRUE, "KITTY_WINDOW_ID": "1"}, "auto", "kitty"),
        ({**TRUE, "TERM_PROGRAM": "ghostty"}, "auto", "kitty"),
        ({**TRUE, "TERM_PROGRAM": "iTerm.app"}, "auto", "iterm"),
        ({**TRUE, "TERM_PROGRAM": "WezTerm"}, "auto", "iterm"),
        ({**TRUE, "LC_TERMINAL": "iTerm2"}, "auto", "iterm"),
        ({**TRUE, "TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"}, "auto", "blocks"),
        ({**TRUE, "TMUX": "/tmp/tmux-0/default,1,0", "TERM_PROGRAM": "iTerm.app"}, "auto", "blocks"),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, "blocks", None),
        ({}, "kitty", None),
        (TRUE, "never", None),
        (PLAIN, "blocks", "blocks"),
        (PLAIN, "kitty", "kitty"),
        (TRUE, "iterm", "iterm"),
    ],
)
def test_the_way_follows_from_the_environment(
    environ: dict[str, str], wanted: str, way: str | None, terminal: TextIO
) -> None:
    assert way_to_show(terminal, environ, wanted) == way
    assert way_to_show(io.StringIO(), environ, wanted) is None


def drawing(prompt: str, colour: tuple[int, int, int] = (200, 10, 20), index: int = 0) -> Drawing:
    return Drawing(prompt, index, np.zeros(4, np.int64), np.full((64, 64, 3), colour, np.uint8))


def test_half_blocks_are_two_pixels_a_cell() -> None:
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[0] = (1, 2, 3)  # the upper half of the first line of cells
    picture[3, 2:] = (7, 8, 9)
    first, second = half_blocks(picture, 4)
    assert first == "\x1b[38;2;1;2;3;48;2;0;0;0m▀" * 4 + "\x1b[0m"
    black, other = "\x1b[38;2;0;0;0;48;2;0;0;0m▀", "\x1b[38;2;0;0;0;48;2;7;8;9m▀"
    assert second == black * 2 + other * 2 + "\x1b[0m"


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 60), (20, 10), (14, 6), (300, 12)])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_blocks_fit_the_terminal(columns: int, lines: int, count: int) -> None:
    prompts = ["a red apple", "帆船", "hot\x1b[2J beverage\n with a very long name that no picture is wide enough for"]
    text = shown_in_terminal([drawing(prompts[n % 3], index=n) for n in range(count)], "blocks", columns, lines)
    shown = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in text.splitlines()]
    assert max(map(cell_len, shown)) <= columns
    assert len(shown) <= max(6, lines)
    assert "\x1b[2J" not in text
    assert shown[-1].startswith("… and") or shown[-1].strip()


def test_a_prompt_is_written_once_under_its_row() -> None:
    text = shown_in_terminal([drawing("owl", index=0), drawing("owl", index=1), drawing("a pizza")], "blocks", 80, 40)
    assert text.splitlines()[-1].split() == ["owl", "a", "pizza"]
    many = shown_in_terminal([drawing("owl", index=n) for n in range(40)], "blocks", 80, 24)
    assert many.splitlines()[-1] == "… and 32 more"


@pytest.mark.parametrize("count", [1, 9])
def test_kitty_gets_the_contact_sheet_in_chunks(count: int) -> None:
    rng = np.random.default_rng(0)
    shown = [
        Drawing("owl", n, np.zeros(4, np.int64), rng.integers(0, 256, (64, 64, 3), np.uint8)) for n in range(count)
    ]
    text = shown_in_terminal(shown, "kitty", 80, 24)
    commands = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
    assert "".join(f"\x1b_G{keys};{data}\x1b\\" for keys, data in commands) + "\n" == text
    assert re.fullmatch(r"a=T,f=100,q=2,(c=80|r=20),m=1", commands[0][0])
    assert [keys for keys, _ in commands[1:]] == ["m=1"] * (len(commands) - 2) + ["m=0"]
    assert max(len(data) for _, data in commands) <= 4096
    with Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in commands)))) as sheet:
        assert sheet.format == "PNG" and max(sheet.size) <= 1200
        assert sheet.size == contact_sheet(shown).size or max(contact_sheet(shown).size) > 1200


def test_iterm_gets_the_contact_sheet_inline() -> None:
    match = re.fullmatch(r"\x1b\]1337;File=inline=1;preserveAspectRatio=1;(\w+=\d+):([^\x07]*)\x07\n",
                         shown_in_terminal([drawing("owl")], "iterm", 80, 24))  # fmt: skip
    assert match is not None and match[1] == "height=20"
    with Image.open(io.BytesIO(base64.b64decode(match[2]))) as sheet:
        assert sheet.convert("RGB").tobytes() == contact_sheet([drawing("owl")]).tobytes()
