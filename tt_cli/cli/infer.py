"""`tt infer PROMPT`: draw or write with what a run has learned; `tt convert FILE OUT`: published weights, and back."""

from __future__ import annotations

import json as codec
import os
import secrets
import shlex
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tt_cli.cli.main import app
from tt_cli.cli.options import TEXT_TEMPERATURE, TEXT_TOP_P, Json, argument, option, setting, switch
from tt_cli.errors import TTError, UsageError
from tt_cli.terminal.format import printable
from tt_cli.terminal.live_view import output_mode, write_line
from tt_cli.terminal.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tt_cli.draw.weights_source import WeightsSource
    from tt_cli.model.sampling.code_choice import Sampling

INFER_EXAMPLES = """\
tt infer "a red apple"                       four pictures: newest checkpoint of the run emoji, else built-in weights
tt infer sailboat "hot beverage" --candidates 8
tt infer "red heart" --seed 7 --temperature 0.8
tt infer sailboat --checkpoint step-00000200.safetensors --out sailboats
tt infer sailboat --checkpoint ORGANISATION/REPOSITORY --revision v1
tt infer sailboat --run emoji --peer /ip4/203.0.113.7/tcp/31337/p2p/Qm…
tt infer "a cat on a sofa" --run dalle --checkpoint published.pt --candidates 128 --keep 4 --top-k 256 --top-p 0.75
tt infer --run words "It is a truth universally" --seed 7      a language model writes on
tt infer --run tales/run.toml --chat         … or talks, where its tokenizer has a template for that
tt infer --from prompts.txt --json           {"run", "step", "seed", …, "drawings": [{"prompt", "path", …}]}
echo "red apple" | tt infer -"""
CONVERT_EXAMPLES = """\
tt convert dalle.pt weights.safetensors --step 31250           the paper's weights, to draw with --checkpoint
tt convert dalle.pt weights.safetensors --run my-run.toml      of a run of your own
tt convert step-00000200.safetensors dalle.pt --to published   under the names of the paper's checkpoint
tt convert step-00000500.safetensors my-model --to published   of a language model: a folder for from_pretrained
tt convert last.ckpt vqgan.safetensors                         a VQGAN, without the rest of its training
tt convert dalle.pt weights.safetensors --json                 {"kind", "from", "to", "run", "step", …, "bytes"}"""

DEFAULT_RUN = "emoji"
CANDIDATES = 4
# A young model knows the likeliest code long before it is sure of it: at 1.0 a wrong first code spoils the rest.
TEMPERATURE = 0.5
TOP_P = 0.9
TORCH_SUFFIXES = (".pt", ".pth", ".bin")

weights = partial(option, panel="What to draw with")
how = partial(option, panel="How to draw")


@app.command(epilog=INFER_EXAMPLES)
def infer(
    prompt: Annotated[list[str] | None, argument("PROMPT…", "what to draw; - reads prompts from stdin")] = None,
    file: Annotated[str | None, option("FILE", "more prompts, one a line; - reads stdin", flag="--from")] = None,
    run: Annotated[
        str | None, weights("RUN", f"the run: name, TOML file or ORGANISATION/REPOSITORY (default {DEFAULT_RUN})")
    ] = None,
    checkpoint: Annotated[
        str | None,
        weights(
            "PLACE",
            "a file, a folder, built-in, or ORGANISATION/REPOSITORY[/FILE] on the Hub; of several checkpoints the "
            "newest. Default: the newest of the run on this machine, else built-in. Published weights (.pt, "
            ".safetensors) need --run too",
        ),
    ] = None,
    revision: Annotated[str | None, weights("R", "commit, branch or tag of the Hub repository")] = None,
    peer: Annotated[
        list[str] | None,
        weights(
            "MULTIADDR", "take the state from the run's swarm, found through this peer (may be given several times)"
        ),
    ] = None,
    device: Annotated[str, weights("DEVICE", "cpu, cuda or cuda:N; default: a GPU if there is one")] = "auto",
    candidates: Annotated[
        int | None,
        how(
            "N", f"pictures for each prompt (default {CANDIDATES}), or texts (1)", min=1, flag="--candidates --samples"
        ),
    ] = None,
    tokens: Annotated[
        int | None, how("N", "of a text, at most (default: as many as the model has places)", min=1)
    ] = None,
    chat: Annotated[
        bool, switch("--chat", "talk with a language model, a line each in turns", panel="How to draw")
    ] = False,
    keep: Annotated[int | None, how("K", "save only the K that CLIP ranks best, best first", min=1)] = None,
    clip: Annotated[
        str | None,
        how("MODEL", "rank with this CLIP: a folder, or OWNER/NAME[@REVISION] on the Hub (default: OpenAI's ViT-B/32)"),
    ] = None,
    temperature: Annotated[
        float | None, how("T", f"lower: surer, less varied (default {TEMPERATURE}; of text {TEXT_TEMPERATURE})")
    ] = None,
    top_k: Annotated[int, how("K", "choose among the K likeliest codes (default 0: off)")] = 0,
    top_p: Annotated[
        float | None,
        how("P", f"… among the likeliest that have share P (default {TOP_P}; of text {TEXT_TOP_P}; 1: off)"),
    ] = None,
    temperature_first: Annotated[
        bool,
        switch(
            "--temperature-first",
            "apply the temperature before top-k and top-p, as is usual, not after them as the paper's authors do",
            panel="How to draw",
        ),
    ] = False,
    seed: Annotated[int | None, how("N", "the same seed draws the same pictures (default: a new one)")] = None,
    batch: Annotated[int | None, how("N", "pictures drawn side by side (default: what fits)", min=1)] = None,
    memory: Annotated[
        str | None, setting("memory", "SIZE", "use at most this much for drawing, such as 4GB", "How to draw")
    ] = None,
    out: Annotated[Path | None, option("DIR", "where to save (default: a new folder in ./drawings)")] = None,
    preview: Annotated[
        Literal["auto", "never", "blocks", "kitty", "iterm"],
        option(None, "show the pictures in a terminal that can (default auto); never in pipes"),
    ] = "auto",
    json: Json = False,
) -> None:
    """Draw, rank, save, print the paths; of a language model, write."""
    prompts = [] if chat and not prompt and file is None else _prompts(prompt or [], file)
    pictures = candidates or CANDIDATES
    if keep is not None and keep > pictures:
        raise UsageError(f"--keep {keep}: there are only {pictures} candidates; draw more with --candidates")
    if peer and (checkpoint or revision):
        raise UsageError("--peer draws with the swarm's state: leave out --checkpoint and --revision, or --peer")
    seed = secrets.randbelow(2**31) if seed is None else seed
    from tt_cli import __version__
    from tt_cli.draw.contact_sheet import MOST_PICTURES
    from tt_cli.draw.drawing import Drawing, DrawingSettings, cut_prompts, draw_in_turn
    from tt_cli.draw.picture_files import output_folder, save_drawings, save_sheet
    from tt_cli.draw.preview import shown_in_terminal, way_to_show
    from tt_cli.draw.weights_source import load_models
    from tt_cli.memory import parse_size
    from tt_cli.model.sampling.code_choice import Sampling

    def sampling_of(usual_temperature: float, usual_top_p: float) -> Sampling:
        chosen = usual_temperature if temperature is None else temperature
        return Sampling(chosen, top_k, usual_top_p if top_p is None else top_p, temperature_first)

    sampling = sampling_of(TEMPERATURE, TOP_P)

    def say(line: str) -> None:
        if not json:
            write_line(sys.stdout, line)

    def warn(line: str) -> None:
        write_line(sys.stderr, f"tt: {printable(line)}")

    source = _source(run, checkpoint, revision, peer or [], warn)
    step = "unknown step" if source.step is None else f"step {source.step}"
    say(f"Checkpoint: {step} of run {source.run.identity} ({source.reason})\n            {source.origin}")
    writes = source.run.kind == "causal_lm"
    of_pictures = {"keep": keep, "clip": clip, "batch": batch, "memory": memory, "out": out}
    for flag, given in (of_pictures if writes else {"tokens": tokens, "chat": chat or None}).items():
        if given is not None:
            what, does = ("text", "is a language model's run") if writes else ("pictures", "draws")
            raise UsageError(f"--{flag}: has no meaning for {what}, and {source.run.run.name} {does}")
    if writes:
        usual = sampling_of(TEXT_TEMPERATURE, TEXT_TOP_P)
        if chat and (candidates or 1) > 1:
            raise UsageError(f"--samples {candidates}: a conversation has one answer to each line")
        return _write(source, device, prompts or _typed(), usual, (candidates or 1, tokens, seed), json, chat)
    models = load_models(source, device)
    ranker = None
    if keep is not None or clip is not None:  # loaded before anything is drawn in vain
        from tt_cli.draw import clip_ranking

        ranker = clip_ranking.load_clip(clip or clip_ranking.DEFAULT, next(models.decoder.parameters()).device)
    for text, read in cut_prompts(models.tokenizer, prompts).items():
        length = models.tokenizer.text_length
        warn(f'of "{text}" the model reads only the first {length} tokens: "{read}"')
    facts = {"run": source.run.identity, "step": source.step, "seed": seed, "candidates": pictures, **vars(sampling)}
    if ranker is not None:
        facts |= {"keep": keep or pictures, "clip": ranker.name}
    about = {**facts, "checkpoint": source.origin, "software": f"tt {__version__}"}
    chunks = {name: str(value) for name, value in about.items() if value is not None}
    settings = DrawingSettings(pictures, sampling, seed, batch, parse_size(memory) if memory else None)
    saved, drawn, tokens, seconds = list[tuple[Drawing, Path]](), 0, 0, 0.0
    stopped: BaseException | None = None
    with output_folder(out, source.run.run.name) as folder:
        try:
            with progress("Drawing", "tokens") as on_progress:
                started = time.monotonic()
                for block in draw_in_turn(
                    models, prompts, settings, on_progress, lambda line: write_line(sys.stderr, f"Drawing: {line}")
                ):
                    seconds += time.monotonic() - started
                    best = block if ranker is None else clip_ranking.keep_best(ranker, block, keep)
                    paths = save_drawings(best, folder, chunks)
                    if len(saved) >= MOST_PICTURES:  # no other is shown again
                        best = [replace(drawing, picture=drawing.picture[:0].copy()) for drawing in best]
                    saved += zip(best, paths, strict=True)
                    drawn, tokens = drawn + len(block), tokens + sum(len(drawing.codes) for drawing in block)
                    started = time.monotonic()
        except (KeyboardInterrupt, TTError) as error:
            if not saved:
                raise
            stopped, ready = error, len({drawing.prompt for drawing, _ in saved})
            warn(f"stopped after {ready} of {len(prompts)} prompts; their pictures are in {folder}")
        drawings = [drawing for drawing, _ in saved]
        sheet = save_sheet(drawings, folder, chunks)
    rate = tokens / max(seconds, 1e-3)
    if json:
        listed: list[dict[str, Any]] = []
        for drawing, path in saved:
            ranked = {} if drawing.similarity is None else {"clip_similarity": round(drawing.similarity, 4)}
            listed.append({"prompt": drawing.prompt, "index": drawing.index, "path": str(path), **ranked})
        where = {"checkpoint": source.origin, "contact_sheet": str(sheet)}
        cost = {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_s": round(rate, 1)}
        print(codec.dumps({**facts, **where, **cost, "drawings": listed}))
    kept = f", kept the best {len(drawings)}" if len(drawings) < drawn else ""
    say(f"Drew {drawn} pictures in {seconds:.1f} s ({rate:.0f} tokens/s){kept}. Again: --seed {seed}")
    for path in [*(path for _, path in saved), sheet]:
        say(str(path))
    if stopped is not None:
        raise stopped
    if not json and (way := way_to_show(sys.stdout, os.environ, preview)) is not None:
        print(shown_in_terminal(drawings, way, *shutil.get_terminal_size()), end="", flush=True)


def _write(
    source: WeightsSource,
    device: str,
    prompts: Iterable[str],
    sampling: Sampling,
    how: tuple[int, int | None, int],
    json: bool,
    chat: bool,
) -> None:
    """Write on from each prompt, and print it as it comes. how: texts for each, most tokens, the first one's seed.

    chat: prompts are one side of a conversation.
    """
    from tt_cli.draw.writing import Writer

    def show(piece: str) -> None:
        if not json:  # a model may write what steers a terminal
            print(printable(piece), end="", flush=True)

    writer, (each, most, seed) = Writer.of(source, device), how
    texts, written, seconds = list[dict[str, Any]](), 0, 0.0
    said = list[dict[str, str]]()
    for number, prompt in enumerate(prompts):
        said.append({"role": "user", "content": prompt})
        for index in range(each):
            show("" if chat else f"\n{prompt}")
            begin, started = writer.conversation(said) if chat else prompt, time.monotonic()
            text, tokens = writer.write(begin, sampling, seed + index + number * chat, most, show)
            show("\n")
            written, seconds = written + tokens, seconds + time.monotonic() - started
            said.append({"role": "assistant", "content": text})
            texts.append({"prompt": prompt, "index": index, "text": text})
    rate = written / max(seconds, 1e-3)
    if json:
        facts = {"run": source.run.identity, "step": source.step, "seed": seed, "candidates": each, **vars(sampling)}
        cost = {"tokens": written, "seconds": round(seconds, 3), "tokens_per_s": round(rate, 1)}
        print(codec.dumps({**facts, "checkpoint": source.origin, **cost, "texts": texts}))
    else:
        print(f"\nWrote {written} tokens in {seconds:.1f} s ({rate:.0f} tokens/s). Again: --seed {seed}")


def _source(
    run: str | None, checkpoint: str | None, revision: str | None, peers: list[str], warn: Callable[[str], None]
) -> WeightsSource:
    """The weights that the flags name."""
    from tt_cli.auth.peer_admission import observing
    from tt_cli.draw.weights_source import fetch_from_swarm, find_checkpoint
    from tt_cli.run import load_run
    from tt_cli.run.checkpoint_names import BUILT_IN
    from tt_cli.run.initial_peers import checked_peers

    peers = checked_peers(peers)
    config = load_run(run or DEFAULT_RUN) if run or checkpoint in (None, BUILT_IN) else None
    if peers and config is not None:
        if output_mode(sys.stderr) == "live":
            write_line(sys.stderr, f"Asking {len(peers)} peer(s) of {config.identity} …")
        with (
            observing(config, lambda line, level: warn(line)),
            progress(f"Taking the state of {config.identity}", "bytes") as on_bytes,
        ):
            return fetch_from_swarm(config, peers, on_bytes)
    return find_checkpoint(config, checkpoint, revision=revision, on_message=warn)


def _prompts(given: list[str], file: str | None) -> list[str]:
    """The prompts of the command line, of `file` and of stdin where one is "-", each once. Raises UsageError."""
    if any(not prompt.strip() for prompt in given):
        raise UsageError('a prompt is empty; say what to draw, such as tt infer "a red apple"')
    prompts = [line for prompt in given for line in (_lines_of(prompt) if prompt == "-" else [prompt])]
    prompts += [] if file is None else _lines_of(file)
    if not prompts:
        raise UsageError('no prompt; say what to draw, such as tt infer "a red apple"')
    if any(prompt.encode("utf-8", "replace").decode() != prompt for prompt in prompts):
        raise UsageError("a prompt is not UTF-8 text; give it in UTF-8")
    return list(dict.fromkeys(prompts))


def _typed() -> Iterator[str]:
    """Lines as they are typed, until there are no more."""
    while True:
        if sys.stdin.isatty():
            print("\n> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line := line.strip():
            yield line


def _lines_of(place: str) -> list[str]:
    try:
        text = sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--from {place}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--from {place}: not UTF-8 text; give one prompt a line") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


@app.command(epilog=CONVERT_EXAMPLES)
def convert(
    file: Annotated[Path, argument("FILE", ".pt, .pth, .ckpt, .bin or .safetensors to read")],
    out: Annotated[
        Path,
        argument("OUT", "the file to write: .safetensors, or .pt for --to published; of a language model a folder"),
    ],
    run: Annotated[
        str | None, option("RUN", "the run that they are weights of: name or TOML file (default dalle)")
    ] = None,
    step: Annotated[int | None, option("N", "the global step that they are of (default 0)")] = None,
    to: Annotated[
        Literal["checkpoint", "published"],
        option(None, "what to write: a checkpoint of tt (default), or published names from one"),
    ] = "checkpoint",
    force: Annotated[bool, switch("--force", "overwrite OUT")] = False,
    json: Json = False,
) -> None:
    """Read, check, write, say what was written."""
    if step is not None and not 0 <= step < 10**15:
        raise UsageError(f"--step {step}: must be 0 or more and have at most 15 digits")
    pretrained = to == "published" and not out.suffix
    published = ("", ".safetensors", *TORCH_SUFFIXES)
    _check_paths(file, out, published if to == "published" else (".safetensors",), force)
    from tt_cli.task.weights_conversion import to_checkpoint, to_pretrained, to_published_names

    def say(line: str) -> None:
        if not json:
            write_line(sys.stderr, line)

    if to == "published":
        if run is not None or step is not None:
            raise UsageError(f"--to published takes run and step from {file}; leave out --run and --step")
        facts = (to_pretrained if pretrained else to_published_names)(file, out, say)
    else:
        facts = to_checkpoint(file, out, run, step, say)
    written = sum(path.stat().st_size for path in (out.iterdir() if out.is_dir() else [out]))
    facts = {"kind": facts.pop("kind"), "from": str(file), "to": str(out), **facts, "bytes": written}
    if json:
        print(codec.dumps(facts))
        return
    called = {"checkpoint": "a checkpoint", "published": "published weights", "vqgan": "a VQGAN", "model": "a model"}
    what, count = (called | {"adapters": "adapters"})[facts["kind"]], f"{facts['elements']:,} parameters"
    print(f"Wrote {what} of {count}, {facts['bytes'] / 1e6:.1f} MB: {out}")
    if pretrained:
        print(f'Load it: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    if facts["kind"] == "checkpoint":
        print(f'Draw with it: tt infer "a red apple" --checkpoint {shlex.quote(str(out))}')


def _check_paths(file: Path, out: Path, suffixes: tuple[str, ...], force: bool) -> None:
    """Check what can be wrong with the files before the long work. Raises UsageError."""
    if not file.is_file():
        raise UsageError(f"cannot read {file}: " + ("a folder; name a file in it" if file.is_dir() else "no such file"))
    if out.suffix not in suffixes:
        raise UsageError(f"{out}: must end in {' or '.join(filter(None, suffixes))}")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}; make it first")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name a {'file in it' if out.suffix else 'new one'}")
    if out.exists() and out.samefile(file):
        raise UsageError(f"{out} is what is to be read; name another file to write")
    if out.exists() and not force:
        raise UsageError(f"{out} exists; name another file, or overwrite it with --force")
