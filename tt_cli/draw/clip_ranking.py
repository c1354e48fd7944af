"""CLIP (Radford et al. 2021) says how well a picture shows its prompt; the best candidates are kept.

Notable:
- transformers brings the model and the tokenizer and is loaded only when candidates are ranked;
- weights are read by `read_published`, which runs nothing that is in them, whatever form they have;
- pictures are resized and normalised here: the same numbers as the model's own image processor, without torchvision.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tt_cli.checkpoint.published_weights import read_published
from tt_cli.draw.drawing import Drawing
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import download, repository_files

# ViT-B/32 as OpenAI published it. With the commit, for then scores stay comparable and weights cannot change.
DEFAULT = "openai/clip-vit-base-patch32@3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
BATCH = 32
# Of each channel, over OpenAI's training pictures; models that others trained keep them.
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class Clip:
    """A CLIP model with its tokenizer. name: where it came from, with the commit or as a folder."""

    def __init__(self, name: str, model: Any, tokenizer: Any):
        self.name, self._model, self._tokenizer = name, model, tokenizer

    @torch.inference_mode()
    def similarity(self, prompt: str, pictures: np.ndarray) -> np.ndarray:
        """Cosines (b,) float32 of pictures (b, H, W, 3) uint8 and the prompt; what is too long of it is cut off."""
        config, device = self._model.config, self._model.device
        text = self._tokenizer(
            prompt, truncation=True, max_length=config.text_config.max_position_embeddings, return_tensors="pt"
        )
        pixels = prepare(pictures, config.vision_config.image_size)
        text = {name: text[name].to(device) for name in ("input_ids", "attention_mask")}
        output = self._model(**text, pixel_values=pixels.to(device))
        cosines = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds, dim=-1)
        return cosines.float().cpu().numpy()


def prepare(pictures: np.ndarray, side: int) -> torch.Tensor:
    """Square pictures (b, H, H, 3) uint8 → (b, 3, side, side) float32, resized (bicubic) and normalised."""
    resized = [Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC) for picture in pictures]
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in resized])).float() / 255
    return ((pixels - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(0, 3, 1, 2).contiguous()


def keep_best(clip: Clip, drawings: Sequence[Drawing], keep: int | None = None, *, batch: int = BATCH) -> list[Drawing]:
    """Select of each prompt the `keep` drawings (None: all) that CLIP finds most like it, best first.

    Prompts keep their order; drawings of one follow one another, as `draw` returns them.
    """
    kept: list[Drawing] = []
    for prompt, group in groupby(drawings, key=lambda drawing: drawing.prompt):
        ranked: list[tuple[float, Drawing]] = []
        together = list(group)
        for start in range(0, len(together), batch):
            chunk = together[start : start + batch]
            cosines = clip.similarity(prompt, np.stack([drawing.picture for drawing in chunk]))
            ranked += zip(cosines.tolist(), chunk, strict=True)
        best = sorted(ranked, key=lambda candidate: -candidate[0])[:keep]
        kept += [replace(drawing, similarity=cosine) for cosine, drawing in best]
    return kept


def load_clip(place: str = DEFAULT, device: torch.device | str = "cpu") -> Clip:
    """The CLIP model in a folder, or on the Hub: OWNER/NAME, with @REVISION for another than the newest.

    Raises UsageError where transformers is missing or the place is wrong, TTError for a model that cannot be used.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("ranking candidates needs CLIP's code: pip install 'tt-cli[clip]'")
    folder, name = Path(os.path.expanduser(place)), place
    if folder.is_dir():
        names = [file for file in (*WEIGHTS, "config.json") if (folder / file).is_file()]
        fetch = folder.joinpath
    else:
        repository, _, revision = place.partition("@")
        if repository.startswith((".", "/", "~")) or repository.count("/") != 1:
            raise UsageError(
                f"--clip {place}: no such folder; else name one on the Hub as OWNER/NAME or OWNER/NAME@REVISION"
            )
        commit, names = repository_files(repository, revision or None)
        fetch, name = partial(download, repository, revision=commit), f"{repository}@{commit}"
    file = next((file for file in WEIGHTS if file in names), None)
    if file is None or "config.json" not in names:
        raise UsageError(f"--clip {place}: it is no CLIP model: it needs config.json and {' or '.join(WEIGHTS)}")
    for other in ("config.json", *(other for other in TOKENIZER if other in names)):
        fetch(other)
    weights = fetch(file)
    try:
        return Clip(name, *_load(weights.parent, weights, place, device))
    except ImportError as error:  # another version of what it builds on
        raise TTError(f"transformers cannot be loaded ({error}): pip install 'tt-cli[clip]'") from error


def _load(folder: Path, weights: Path, place: str, device: torch.device | str) -> tuple[Any, Any]:
    from transformers.utils import logging

    logging.set_verbosity_error()  # its warnings and bars are for developers
    logging.disable_progress_bar()
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    try:
        fields, _ = CLIPConfig.get_config_dict(folder, local_files_only=True)
        if fields.get("model_type") != "clip":
            raise UsageError(f"--clip {place}: config.json is that of a {fields.get('model_type')} model, not clip")
        model, report = CLIPModel.from_pretrained(
            None,
            config=CLIPConfig.from_dict(fields),
            state_dict=read_published(weights),
            dtype=torch.float32,
            output_loading_info=True,
        )
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except (TTError, ImportError):
        raise
    except Exception as error:  # a model that anyone made: the library raises whatever its files lead it to
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TTError(f"--clip {place}: the model in {folder} cannot be read ({reason})") from error
    if missing := sorted(report["missing_keys"]):
        raise TTError(f"--clip {place}: {weights} lacks {len(missing)} tensors, such as {missing[0]}")
    return model.to(device).eval(), tokenizer
