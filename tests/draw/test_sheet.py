"""Contact sheets: nothing is cut off, nothing overlaps, every picture can be found again."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageFont

from tt_cli.draw.contact_sheet import FONT_SIZE, GAP, MOST_PICTURES, PAPER, _wrap, contact_sheet
from tt_cli.draw.drawing import Drawing

FONT = ImageFont.load_default(FONT_SIZE)


def drawings(samples: dict[str, int], side: int = 64) -> list[Drawing]:
    """Pictures of one colour each."""
    made = []
    for prompt, count in samples.items():
        for index in range(count):
            colour = np.array([10 + len(made), 200 - len(made), 40], np.uint8)
            picture = np.broadcast_to(colour, (side, side, 3)).copy()
            made.append(Drawing(prompt, index, np.zeros(4, np.int64), picture))
    return made


@pytest.mark.parametrize(
    ("samples", "columns"),
    [({"a": 1}, 4), ({"a": 4, "b": 4}, 4), ({"a": 6}, 4), (dict.fromkeys("abcdefgh", 1), 4), ({"a": 2, "b": 2}, 4)]
    + [({"a": 3, "b": 1}, 1)],
)
@pytest.mark.parametrize(("side", "shown"), [(64, 256), (100, 200), (300, 300)])
def test_every_picture_is_shown_whole(samples: dict[str, int], columns: int, side: int, shown: int) -> None:
    made = drawings(samples, side)
    sheet = np.asarray(contact_sheet(made, columns))
    for drawing in made:
        ys, xs = np.nonzero((sheet == drawing.picture[0, 0]).all(axis=2))
        assert len(ys) == shown * shown
        assert np.ptp(ys) == np.ptp(xs) == shown - 1
        assert min(ys.min(), xs.min()) >= GAP and xs.max() < sheet.shape[1] - GAP // 2
    across = min(columns, max(samples.values()))
    strips = min(columns // across, len(samples))
    assert sheet.shape[1] == GAP + across * strips * (shown + GAP)


def test_the_caption_is_written_under_its_picture() -> None:
    sheet = np.asarray(contact_sheet(drawings({"wide": 1, "mmmm mmmm": 1}))).astype(int)
    below = sheet[GAP + 256 + 2 :]
    ink = (below < 200).all(axis=2).any(axis=0)
    left, right = np.nonzero(ink[: GAP + 256])[0], np.nonzero(ink[2 * GAP + 256 :])[0]
    assert 0 < np.ptp(left) < np.ptp(right) < 256
    assert (sheet[-4:] == PAPER).all()


@pytest.mark.parametrize(
    "text", ["a red apple", "word " * 5, "x" * 300, "ab " + "y" * 90, "日本語のりんご", "é" * 70, ""]
)
def test_captions_fit_their_width(text: str) -> None:
    lines = _wrap(text, FONT, 256)
    assert 1 <= len(lines) <= 3
    assert all(FONT.getlength(line) <= 256 for line in lines)
    joined = "".join(lines).replace("…", "").replace(" ", "")
    assert text.replace(" ", "").startswith(joined)
    assert lines[-1].endswith("…") == (joined != text.replace(" ", ""))


class CountingFont(ImageFont.ImageFont):
    """Counts the letters that it measures."""

    letters = 0

    def getlength(self, text: str | bytes | bytearray, *_: object, **__: object) -> float:
        self.letters += len(text)
        return 10 * len(text)


def test_a_long_word_is_measured_a_few_times() -> None:
    """Languages without spaces write whole captions as one."""
    font = CountingFont()
    assert _wrap("x" * 5000, font, 250) == ["x" * 25, "x" * 25, "x" * 24 + "…"]
    assert font.letters < 100 * 5000


def test_a_sheet_of_many_prompts_has_an_end() -> None:
    """Pictures are saved each by itself: of a file of prompts the sheet would take gigabytes."""
    made = drawings(dict.fromkeys(map(str, range(50)), 1), 4)
    few, many = contact_sheet(made * (MOST_PICTURES // 50)), contact_sheet(made * (MOST_PICTURES // 50 + 20))
    assert few.height < many.height < 1.03 * few.height + 100


def test_a_sheet_needs_a_drawing() -> None:
    with pytest.raises(ValueError, match="needs a drawing"):
        contact_sheet([])
