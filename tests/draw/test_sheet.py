"""Contact sheets: nothing is cut off, nothing overlaps, every picture can be found again."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageFont

from tt_cli.draw.contact_sheet import FONT_SIZE, GAP, PAPER, _wrap, contact_sheet
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


def test_a_sheet_needs_a_drawing() -> None:
    with pytest.raises(ValueError, match="needs a drawing"):
        contact_sheet([])
