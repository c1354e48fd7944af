#!/usr/bin/env python3
"""Builds the built-in data set: emoji pictures with their names, as VQGAN codes.

Needs the Debian packages fonts-noto-color-emoji and unicode-cldr-core. It

1. renders every emoji that Unicode CLDR names and the font can draw, on white, 64 x 64 pixels;
2. trains a small VQGAN on 95 % of them (scripts/emoji_vqgan.py);
3. trains a byte-level BPE tokenizer on the captions and keywords of these 95 %;
4. writes parquet, safetensors, tokenizer, licences and a manifest with hashes, and a picture of reconstructions.

The training is by far the longest part. Its state is written to the work folder every 50 steps, and a build that was
interrupted goes on from there. Every random choice is seeded: the same machine, libraries and thread count give the
same files. docs/emoji.md tells what comes out.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from emoji_vqgan import FULL, PIXELS, QUICK, SEED, Training
from PIL import Image, ImageDraw, ImageFont, features
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from tt_cli.data import builtin
from tt_cli.data.tokenizer import TOKENIZER_FILE
from tt_cli.model.vqgan import Vqgan
from tt_cli.task.picture_codec import BUILTIN_CONFIG, BUILTIN_WEIGHTS, decode_pictures

if TYPE_CHECKING:
    import tokenizers

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
CLDR = Path("/usr/share/unicode/cldr/common")
LICENCES = {
    "LICENSE-noto-emoji.txt": Path("/usr/share/doc/fonts-noto-color-emoji/copyright"),
    "LICENSE-unicode-cldr.txt": Path("/usr/share/doc/unicode-cldr-core/copyright"),
}
NOTICE = """\
The files in this folder are derived from two works:

- the codes in train.parquet and heldout.parquet, and the weights in vqgan.safetensors, from pictures rendered with
  Noto Color Emoji, Copyright Google Inc., SIL Open Font License 1.1: LICENSE-noto-emoji.txt;
- the captions and keywords, and the tokenizer trained on them, from Unicode CLDR, Copyright Unicode, Inc.,
  Unicode licence: LICENSE-unicode-cldr.txt.

They were made by scripts/build_emoji.py. The weights in weights.safetensors were learned from both.
"""
GLYPH_SIZE = 109  # the one bitmap size that the font holds
GLYPH_BOX = (4, 0, 132, 128)  # the square of the 136 x 128 bitmap in which every glyph lies
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}
HELDOUT_SHARE = 0.05
TEXT_VOCAB = 1024
SPECIAL_TOKENS = [
    "<pad>",
    "</s>",
]  # ids 0 (left to the model's own padding ids) and 1 (what captions are padded with)


# --- render ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emoji:
    """One emoji: its characters, CLDR's name and keywords, and its picture (64, 64, 3) uint8."""

    characters: str
    caption: str
    keywords: str
    picture: np.ndarray

    @property
    def codepoints(self) -> str:
        return " ".join(f"{ord(character):04X}" for character in self.characters)

    @property
    def family(self) -> str:
        """The emoji without its skin tones: all variants fall into the same split."""
        return "".join(c for c in self.characters if c not in SKIN_TONES) or self.characters

    @property
    def heldout(self) -> bool:
        digest = hashlib.sha256(f"{SEED}:{self.family}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


def cldr_names() -> Iterator[tuple[str, str, str]]:
    """(characters, name, keywords) of everything that CLDR names in English, in the order of its files."""
    for folder in ("annotations", "annotationsDerived"):
        names: dict[str, str] = {}
        keywords: dict[str, str] = {}
        for element in ElementTree.parse(CLDR / folder / "en.xml").iter("annotation"):
            into = names if element.get("type") == "tts" else keywords
            into[element.get("cp") or ""] = (element.text or "").strip()
        for characters, name in names.items():
            words = [word.strip() for word in keywords.get(characters, "").split("|")]
            yield characters, name, ", ".join(word for word in words if word and word != name)


def render(limit: int | None = None) -> list[Emoji]:
    """Draws what the font can draw as one glyph; leaves out empty pictures and the second of two equal ones.

    With `limit`, only that many, spread over the whole list.
    """
    font = ImageFont.truetype(FONT, GLYPH_SIZE, layout_engine=ImageFont.Layout.RAQM)
    one_glyph = font.getlength("\N{GRINNING FACE}")
    found: list[Emoji] = []
    pictures: set[bytes] = set()
    captions: set[str] = set()
    candidates = list(cldr_names())
    for characters, name, keywords in track(candidates[:: limit and len(candidates) // limit], "render"):
        if font.getlength(characters) > one_glyph + 1:
            continue
        sheet = Image.new("RGBA", (160, 160), (255, 255, 255, 0))
        ImageDraw.Draw(sheet).text((0, 0), characters, font=font, embedded_color=True)
        if sheet.getchannel("A").getbbox() is None:
            continue
        page = Image.new("RGBA", sheet.size, "white")
        page.alpha_composite(sheet)
        small = page.convert("RGB").crop(GLYPH_BOX).resize((PIXELS, PIXELS), Image.Resampling.LANCZOS)
        if small.tobytes() in pictures or name in captions:
            continue
        pictures.add(small.tobytes())
        captions.add(name)
        found.append(Emoji(characters, name, keywords, np.asarray(small)))
    return found


def family_weights(emoji: list[Emoji]) -> np.ndarray:
    """Sampling weight of each: five skin tones of one gesture are not six times as interesting as an apple."""
    sizes: dict[str, int] = {}
    for one in emoji:
        sizes[one.family] = sizes.get(one.family, 0) + 1
    return np.array([sizes[one.family] ** -0.5 for one in emoji])


# --- tokenize -------------------------------------------------------------------------------------------------------


def train_tokenizer(emoji: list[Emoji]) -> tokenizers.Tokenizer:
    """Byte-level BPE. "Medium-dark" is one word, and case and accents do not count: prompts are typed by people."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            normalizers.Prepend(" "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[\w-]+| ?[^\w\s-]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    texts = [one.caption for one in emoji] * 2 + [one.keywords for one in emoji]
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# --- write ----------------------------------------------------------------------------------------------------------


def half_precision(vqgan: Vqgan) -> dict[str, Tensor]:
    """The weights as stored: float16, but for the quantizer, where rounding could change which code is nearest."""
    weights = {name: tensor.detach().contiguous() for name, tensor in vqgan.state_dict().items()}
    return {name: t if name.startswith("quantize.") else t.half() for name, t in weights.items()}


def encode(vqgan: Vqgan, emoji: list[Emoji]) -> np.ndarray:
    """Codes (n, 64) int16."""
    pictures = torch.from_numpy(np.stack([one.picture for one in emoji])).permute(0, 3, 1, 2)
    parts = [vqgan.encode(part.float() / 255) for part in track(pictures.split(64), "encode")]
    return torch.cat(parts).numpy().astype("<i2")


def psnr(emoji: list[Emoji], decoded: np.ndarray) -> float:
    """Of the mean squared error over all pictures, in dB (the mean of the pictures' PSNR would be larger)."""
    originals = np.stack([one.picture for one in emoji]).astype(np.float64)
    return float(-10 * np.log10(np.square((originals - decoded) / 255).mean()))


def write_split(path: Path, emoji: list[Emoji], codes: np.ndarray) -> None:
    """The columns of the paper's data set, and keywords and code points; rows in a random order."""
    order = np.random.default_rng(SEED).permutation(len(emoji))
    columns = {
        "caption": [emoji[i].caption for i in order],
        "keywords": [emoji[i].keywords for i in order],
        "codepoints": [emoji[i].codepoints for i in order],
        "NSFW": ["UNLIKELY"] * len(emoji),
        "original_width": [PIXELS] * len(emoji),
        "original_height": [PIXELS] * len(emoji),
        "code": [codes[i].tobytes() for i in order],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="brotli", compression_level=9)


def write_grid(path: Path, emoji: list[Emoji], decoded: np.ndarray, columns: int = 16, rows: int = 4) -> None:
    """Originals, and what their codes decode to below each, with a little space around."""
    chosen = np.random.default_rng(SEED).permutation(len(emoji))[: columns * rows]
    cell, pair = PIXELS + 8, 2 * PIXELS + 20
    sheet = Image.new("RGB", (columns * cell, -(-len(chosen) // columns) * pair), "white")
    for place, i in enumerate(chosen):
        x, y = place % columns * cell + 4, place // columns * pair + 8
        sheet.paste(Image.fromarray(emoji[i].picture), (x, y))
        sheet.paste(Image.fromarray(decoded[i]), (x, y + PIXELS + 2))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


def write(
    out: Path, work: Path, vqgan: Vqgan, emoji: list[Emoji], seconds: float, grid: Path | None
) -> dict[str, object]:
    """Writes the data set to the work folder; at the end it takes the place of `out`. Returns the manifest."""
    fresh = work / "out"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(half_precision(vqgan), fresh / BUILTIN_WEIGHTS)
    config = json.dumps(dataclasses.asdict(vqgan.config), indent=1)
    (fresh / BUILTIN_CONFIG).write_text(config + "\n", encoding="utf-8")
    vqgan.load_published({name: tensor.float() for name, tensor in half_precision(vqgan).items()})
    splits = {"train": [e for e in emoji if not e.heldout], "heldout": [e for e in emoji if e.heldout]}
    train_tokenizer(splits["train"]).save(str(fresh / TOKENIZER_FILE), pretty=False)
    quality: dict[str, float] = {}
    used: set[int] = set()
    for split, members in splits.items():
        codes = encode(vqgan, members)
        write_split(fresh / f"{split}.parquet", members, codes)
        decoded = decode_pictures(vqgan, codes)
        quality[split] = round(psnr(members, decoded), 2)
        used.update(codes.flatten().tolist())
        if grid and split == "heldout":
            write_grid(grid, members, decoded)
    (fresh / BUILTIN_WEIGHTS).chmod(0o644)  # the library writes for the owner alone
    for name, source in LICENCES.items():
        shutil.copyfile(source, fresh / name)
    (fresh / "NOTICE.txt").write_text(NOTICE, encoding="utf-8")
    content = {path.name: path.read_bytes() for path in sorted(fresh.iterdir())}
    manifest: dict[str, object] = {
        "examples": {split: len(members) for split, members in splits.items()},
        "psnr_db": quality,
        "codes_used": len(used),
        "training_seconds": round(seconds),
        "font_sha256": hashlib.sha256(FONT.read_bytes()).hexdigest(),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in content.items()
        },
    }
    (fresh / builtin.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(fresh, out)
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = builtin.folder() / "emoji"
    parser.add_argument("--out", type=Path, default=default, help=f"folder to write (default: {default})")
    parser.add_argument("--work", type=Path, default=Path("build/emoji"), help="folder of the training's state")
    parser.add_argument("--grid", type=Path, help="PNG to write held-out pictures and their reconstructions to")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a toy in seconds: few pictures, a tiny VQGAN, bad codes")
    options = parser.parse_args()
    missing = [str(path) for path in (FONT, CLDR, *LICENCES.values()) if not path.exists()]
    if missing:
        sys.exit(f"missing {', '.join(missing)}: apt install fonts-noto-color-emoji unicode-cldr-core")
    if not features.check("raqm"):
        sys.exit("this Pillow lacks libraqm, without which sequences (families, flags) fall apart: install a wheel")
    torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else FULL
    emoji = render(effort.emoji)
    train = [one for one in emoji if not one.heldout]
    options.work.mkdir(parents=True, exist_ok=True)
    checkpoint = options.work / ("quick.pt" if options.quick else "training.pt")
    training = Training(effort, np.stack([one.picture for one in train]), family_weights(train), checkpoint)
    manifest = write(options.out, options.work, training.run(), emoji, training.seconds, options.grid)
    print(json.dumps({key: value for key, value in manifest.items() if key != "files"}))


if __name__ == "__main__":
    main()
