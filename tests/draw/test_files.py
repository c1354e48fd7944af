"""PNG files: names, metadata, and that nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tt_cli.draw.drawing import Drawing
from tt_cli.draw.picture_files import output_folder, save_drawings, save_sheet, slug
from tt_cli.errors import TTError


def drawing(prompt: str, index: int = 0, level: int = 0) -> Drawing:
    return Drawing(prompt, index, np.zeros(4, np.int64), np.full((16, 16, 3), level, np.uint8))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a red apple", "a-red-apple"),
        ("  Crème brûlée!! ", "creme-brulee"),
        ("../../etc/passwd", "etc-passwd"),
        ("-rf *", "rf"),
        ("日本", "prompt"),
        ("\0\n", "prompt"),
        ("a" * 200, "a" * 60),
        ("b" * 59 + " c", "b" * 59),
    ],
)
def test_slugs_are_safe_names(text: str, expected: str) -> None:
    assert slug(text) == expected


def test_files_carry_the_picture_and_what_made_it(tmp_path: Path) -> None:
    facts = {"run": "emoji-12345678", "step": "120", "seed": "7"}
    drawings = [drawing("日本 apple", 0, 3), drawing("日本 apple", 1, 4)]
    paths = save_drawings(drawings, tmp_path / "a" / "b", facts)
    sheet = save_sheet(drawings, tmp_path / "a" / "b", facts)
    assert [path.name for path in paths] == ["apple-1.png", "apple-2.png"]
    with Image.open(paths[1]) as picture:
        assert np.asarray(picture).tolist() == np.full((16, 16, 3), 4).tolist()
        assert picture.text == {"prompt": "日本 apple", "index": "1", **facts}
    with Image.open(sheet) as picture:
        assert picture.text == {"prompts": "日本 apple", **facts}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    alike = [drawing("a b", level=1)], [drawing("A, b", level=2), drawing("a-b", level=3)]  # of one slug
    first, second = (save_drawings(some, tmp_path, {}) for some in alike)
    first_sheet, second_sheet = (save_sheet(some, tmp_path, {}) for some in alike)
    assert len({*first, *second, first_sheet, second_sheet}) == 5 == len(list(tmp_path.iterdir()))
    levels = [int(np.asarray(Image.open(path))[0, 0, 0]) for path in [*first, *second]]
    assert levels == [1, 2, 3]


def test_new_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawings" / "emoji-002").mkdir(parents=True)
    for number in ("001", "003", "004"):
        with output_folder(None, "emoji") as folder:
            assert folder == Path("drawings") / f"emoji-{number}"
            save_drawings([drawing("a")], folder, {})


def test_a_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "a" / "b", "emoji") as folder:
        assert folder.is_dir()
        raise KeyboardInterrupt
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path, "emoji") as folder:
        raise KeyboardInterrupt
    assert folder.is_dir(), "it was there before"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        found_first = pytest.raises(TTError, match=r"cannot write pictures to .*--out")
        with found_first as error, output_folder(place, "emoji"):
            pytest.fail("it was not found before the work")
        assert "\n" not in str(error.value)


def test_a_full_disk_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(self: Image.Image, file: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fill_up)
    for write in (save_drawings, save_sheet):
        with pytest.raises(TTError, match="No space left on device"):
            write([drawing("a")], tmp_path, {})
    assert list(tmp_path.iterdir()) == []
