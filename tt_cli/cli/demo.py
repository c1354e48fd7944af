"""`tt demo`: a swarm of real peers on this machine learns to draw emoji, or to write, from nothing."""

from __future__ import annotations

import json as codec
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tt_cli.cli.main import app
from tt_cli.cli.options import TEXT_TEMPERATURE, TEXT_TOP_P, Plain, argument, exclusive, option, output_switch
from tt_cli.errors import UsageError, os_errors

if TYPE_CHECKING:
    from tt_cli.draw.weights_source import WeightsSource
    from tt_cli.supervisor.demo_swarm import DemoResult

EXAMPLES = """\
tt demo                       draws emoji
tt demo words                 writes in the manner of Jane Austen
tt demo --out /tmp/first-try
tt demo --prompt "a pizza" --prompt "owl" --seed 3"""
RUN = "emoji"
PROMPTS = 8
SCORED = 64


@app.command(epilog=EXAMPLES)
def demo(
    run: Annotated[
        str, argument("RUN", f"the run to train from its start; of {RUN} (default) and words, smaller ones for a demo")
    ] = RUN,
    out: Annotated[
        Path | None, option("DIR", "where logs, checkpoints and pictures go (default: a new folder in ./tt-demo)")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        option(
            "TEXT",
            f"draw this, or write on from it (may be given several times; default: {PROMPTS} captions of the training "
            "pictures, or beginnings of text that was held out)",
        ),
    ] = None,
    seed: Annotated[int, option("SEED", "of the drawings (default 0)", min=0)] = 0,
    plain: Plain = False,
    json: Annotated[bool, output_switch("--json", "no screen; one JSON object at the end")] = False,
) -> None:
    """Train, score, draw or write, and name what was saved."""
    from tt_cli.draw.weights_source import find_checkpoint
    from tt_cli.run import load_run
    from tt_cli.run.run_source import builtin_runs
    from tt_cli.supervisor.demo_swarm import run_demo
    from tt_cli.supervisor.supervise import signals_raised
    from tt_cli.terminal.demo_screen import DemoScreen

    exclusive(json=json, plain=plain)
    if any(not (text.strip() and text.isprintable()) for text in prompt or []):
        raise UsageError('--prompt: must be one line of text, such as --prompt "a red apple"')
    config = load_run(smaller if (smaller := f"{run}-demo") in builtin_runs() else run)
    folder = _new_folder(out)

    def say(line: str) -> None:
        if not json:
            print(line, flush=True)

    say(f"A swarm of real peers on this machine learns run {config.identity}; everything goes to {folder}")
    screen = DemoScreen(f"tt demo {run}", config.identity, config.schedule.total_steps, plain=plain, json=json)
    with signals_raised(), screen:
        result = run_demo(config, folder, screen.show, screen.say)
    _tell_training(result, say)

    started = time.monotonic()
    show = _show_text if config.kind == "causal_lm" else _show_pictures
    facts = show(find_checkpoint(config, result.checkpoint), folder, prompt or [], seed, say)
    seconds = result.seconds + time.monotonic() - started
    report: dict[str, Any] = {
        "run": config.identity,
        "step": result.steps,
        "seed": seed,
        "steps": result.steps,
        "loss": result.loss,
        "seconds": round(seconds, 1),
        "received_fraction_min": result.received_min,
        "peers_agree": result.digests == 1,
        "checkpoint": str(result.checkpoint),
        **facts,
    }
    if json:
        print(codec.dumps(report))
    say(f"Done in {seconds / 60:.1f} minutes.")


def _show_pictures(
    source: WeightsSource, folder: Path, prompts: list[str], seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Score and draw. Returns facts about both."""
    from tt_cli.draw.drawing import DrawingSettings, draw
    from tt_cli.draw.picture_files import save_drawings, save_sheet
    from tt_cli.draw.recall import recall
    from tt_cli.draw.weights_source import load_models
    from tt_cli.model.sampling.code_choice import Sampling
    from tt_cli.run import DalleRun
    from tt_cli.terminal.progress import progress

    models = load_models(source, "cpu")
    with progress("Drawing", "tokens") as on_progress:
        score, known = recall(models, captions=SCORED, seed=seed, on_progress=on_progress)
        prompts = prompts or [drawing.prompt for drawing in known[:PROMPTS]]
        settings = DrawingSettings(1, Sampling(top_p=0.9), seed)
        drawings = draw(models, prompts, settings, on_progress=on_progress)
    about = {"run": source.run.identity, "step": str(source.step), "seed": str(seed)}
    paths = save_drawings(drawings, folder / "pictures", about)
    sheet = save_sheet(drawings, folder / "pictures", about)
    subset = DalleRun.of(source.run).data.subset
    say(
        f"Recognised: {score.right} of {score.total} drawings have their own emoji as nearest neighbour among "
        f"all {subset or 'the'} training pictures (pixel L2), that is {score.fraction:.0%}."
    )
    for path in paths:
        say(str(path))
    say(f"All {len(drawings)} pictures on one sheet: {sheet}")
    say(f"Draw more: {shlex.join(['tt', 'infer', prompts[0], '--checkpoint', source.origin])}")
    return {
        "recognised": score.right,
        "recognised_of": score.total,
        "contact_sheet": str(sheet),
        "pictures": [str(path) for path in paths],
    }


def _show_text(
    source: WeightsSource, folder: Path, prompts: list[str], seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare with a trigram model and write. Returns facts about both."""
    from tt_cli.draw.writing import Writer
    from tt_cli.model.sampling.code_choice import Sampling
    from tt_cli.terminal.format import clean, printable

    writer = Writer.of(source, "cpu")
    score = writer.held_out()
    beaten = "below" if score.perplexity < score.trigram else "NOT below"
    say(
        f"Perplexity on {score.tokens:,} tokens of held-out text: {score.perplexity:.2f}, {beaten} the "
        f"{score.trigram:.2f} of a trigram model (Kneser-Ney) of the same text."
    )
    prompts, texts = prompts or list(score.beginnings), []
    for prompt in prompts:
        text, _ = writer.write(prompt, Sampling(TEXT_TEMPERATURE, top_p=TEXT_TOP_P), seed, None, lambda piece: None)
        texts.append({"prompt": prompt, "text": text})
        say(f"\n{printable(f'{prompt}{text}')}")  # a model may write what steers a terminal
    say(f"\nWrite more: {shlex.join(['tt', 'infer', clean(prompts[0]), '--checkpoint', source.origin])}")
    return {"perplexity": score.perplexity, "trigram_perplexity": score.trigram, "texts": texts}


def _tell_training(result: DemoResult, say: Callable[[str], None]) -> None:
    agreed = "all peers hold the same parameters, to the last bit" if result.digests == 1 else "the peers DIFFER"
    loss = "unknown" if result.loss is None else f"{result.loss:.3f}"
    say(f"Trained {result.steps} steps in {result.seconds / 60:.1f} minutes to loss {loss}; {agreed}.")
    say(f"Of every averaged gradient at least {result.received_min:.0%} arrived.")
    if result.late_joined_at is not None:
        say(f"The third peer joined at step {result.late_joined_at} and took the state over from the others.")


def _new_folder(named: Path | None) -> Path:
    """Make the folder for this demo. Raises UsageError for one that is in use, TTError when it cannot be made."""
    folder = (named or Path("tt-demo") / time.strftime("%Y-%m-%d-%H%M%S")).absolute()
    with os_errors(f"cannot make the folder {folder}", "name another with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: is not empty; name a new folder")
    return folder
