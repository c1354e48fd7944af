"""Samples along training: what a checkpoint's model draws or writes for prompts, for its task.

Seed and sampling are the same for all checkpoints: a picture changes because the model did.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from PIL import Image
from torch import nn

from tt_cli import __version__
from tt_cli.draw.drawing import DrawingModels, DrawingSettings, cut_prompts, draw
from tt_cli.draw.picture_files import text_chunks
from tt_cli.draw.writing import Writer
from tt_cli.model.dalle import Dalle
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.task.causal_lm_task import CausalLmTask
from tt_cli.task.dalle_task import DalleTask
from tt_cli.task.picture_codec import load_vqgan
from tt_cli.task.task import Beat, Tell

SEED = 0
TEMPERATURE, TOP_P = 0.5, 0.9  # those of `tt infer` for pictures
TOKENS = 64  # of a text


def pictures(
    task: DalleTask, model: Dalle, prompts: Sequence[str], step: int, tell: Tell, heartbeat: Beat
) -> dict[str, bytes]:
    """Prompt → PNG, which says in its text what made it. Raises TTError without the VQGAN's weights, or the memory."""

    def progress(done: int, total: int) -> None:
        heartbeat(f"draws from step {step}, {done / total:.0%} done")

    for prompt, read in cut_prompts(task.tokenizer, prompts).items():
        tell(f'of "{prompt}" the model reads only the first {task.tokenizer.text_length} tokens: "{read}"', "warning")
    models = DrawingModels(task.run, model, load_vqgan(task.run), task.tokenizer)
    settings = DrawingSettings(samples=1, sampling=Sampling(TEMPERATURE, top_p=TOP_P), seed=SEED)
    about = {"run": task.run.identity, "step": step, "seed": SEED, "temperature": TEMPERATURE, "top_p": TOP_P}
    facts = {name: str(value) for name, value in about.items()} | {"software": f"tt {__version__}"}
    pngs = {}
    for drawing in draw(models, prompts, settings, on_progress=progress):
        chunks = text_chunks({"prompt": drawing.prompt, **facts})
        Image.fromarray(drawing.picture).save(file := BytesIO(), format="PNG", pnginfo=chunks)
        pngs[drawing.prompt] = file.getvalue()
    return pngs


def texts(
    task: CausalLmTask, model: nn.Module, prompts: Sequence[str], step: int, tell: Tell, heartbeat: Beat
) -> dict[str, bytes]:
    """Prompt → the prompt and what follows, in UTF-8."""
    writer, sampling = Writer(model, task), Sampling(TEMPERATURE, top_p=TOP_P, temperature_first=True)

    def written(prompt: str) -> bytes:
        text, *_ = writer.write(prompt, sampling, SEED, TOKENS, lambda piece: heartbeat(f"writes with step {step}"))
        return f"{prompt}{text}".encode()

    return {prompt: written(prompt) for prompt in prompts}
