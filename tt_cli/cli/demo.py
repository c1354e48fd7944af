"""`tt demo`: a swarm of real peers on this machine learns to draw emoji, from nothing to pictures."""

from __future__ import annotations

import json as codec
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tt_cli.cli.main import app
from tt_cli.cli.options import Plain, exclusive, option, output_switch
from tt_cli.errors import UsageError, os_errors

if TYPE_CHECKING:
    from tt_cli.supervisor.demo_swarm import DemoResult

EXAMPLES = """\
tt demo
tt demo --out /tmp/first-try
tt demo --prompt "a pizza" --prompt "owl" --seed 3"""
RUN = "emoji-demo"
PROMPTS = 8
SCORED = 64


@app.command(epilog=EXAMPLES)
def demo(
    run: Annotated[str, option("RUN", f"the run to train from its start (default {RUN})")] = RUN,
    out: Annotated[
        Path | None, option("DIR", "where logs, checkpoints and pictures go (default: a new folder in ./tt-demo)")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        option(
            "TEXT",
            f"draw this at the end (may be given several times; default: {PROMPTS} captions of the training pictures)",
        ),
    ] = None,
    seed: Annotated[int, option("SEED", "of the drawings (default 0)")] = 0,
    plain: Plain = False,
    json: Annotated[bool, output_switch("--json", "no screen; one JSON object at the end")] = False,
) -> None:
    """Train, score, draw, and name what was saved."""
    from tt_cli.draw.drawing import DrawingSettings, draw
    from tt_cli.draw.picture_files import save_drawings
    from tt_cli.draw.recall import recall
    from tt_cli.draw.weights_source import find_checkpoint, load_models
    from tt_cli.model.sampling.code_choice import Sampling
    from tt_cli.run import load_run
    from tt_cli.supervisor.demo_swarm import run_demo
    from tt_cli.terminal.demo_screen import DemoScreen
    from tt_cli.terminal.progress import progress

    exclusive(json=json, plain=plain)
    if any(not text.strip() for text in prompt or []):
        raise UsageError('--prompt: it is empty; say what to draw, such as --prompt "a red apple"')
    config = load_run(run)
    folder = _new_folder(out)

    def say(line: str) -> None:
        if not json:
            print(line, flush=True)

    say(f"A swarm of real peers on this machine learns run {config.identity}; everything goes to {folder}")
    if json:
        result = run_demo(config, folder, lambda name, event: None, say)
    else:
        with DemoScreen(f"tt demo {run}", config.identity, config.schedule.total_steps, plain=plain) as screen:
            result = run_demo(config, folder, screen.show, screen.say)
    _tell_training(result, say)

    started = time.monotonic()
    source = find_checkpoint(config, result.checkpoint)
    models = load_models(source, "cpu")
    with progress("Drawing", "tokens") as on_progress:
        score, known = recall(models, captions=SCORED, seed=seed, on_progress=on_progress)
        prompts = prompt or [drawing.prompt for drawing in known[:PROMPTS]]
        settings = DrawingSettings(1, Sampling(top_p=0.9), seed)
        drawings = draw(models, prompts, settings, on_progress=on_progress)
    facts = {"run": config.identity, "step": source.step, "seed": seed}
    paths, sheet = save_drawings(drawings, folder / "pictures", {name: str(value) for name, value in facts.items()})
    seconds = result.seconds + time.monotonic() - started
    if json:
        report: dict[str, Any] = {
            **facts,
            "steps": result.steps,
            "loss": result.loss,
            "seconds": round(seconds, 1),
            "received_fraction_min": result.received_min,
            "peers_agree": result.digests == 1,
            "recognised": score.right,
            "recognised_of": score.total,
            "checkpoint": source.origin,
            "contact_sheet": str(sheet),
            "pictures": [str(path) for path in paths],
        }
        print(codec.dumps(report))
        return
    print(
        f"Recognised: {score.right} of {score.total} drawings have their own emoji as nearest neighbour among "
        f"all {config.data.subset or 'the'} training pictures (pixel L2), that is {score.fraction:.0%}.",
        *paths,
        sheet,
        f"Done in {seconds / 60:.1f} minutes. All {len(drawings)} pictures on one sheet: {sheet}",
        f'Draw more: tt infer "{prompts[0]}" --checkpoint {source.origin}',
        sep="\n",
    )


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
