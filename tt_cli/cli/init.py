"""`tt init NAME`: set up a new run, by questions or flags; `tt check RUN`: open and try all that a run file names."""

from __future__ import annotations

import json as codec
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tt_cli.cli.doctor import show_checks
from tt_cli.cli.main import app
from tt_cli.cli.options import Device, Json, Run, argument, option, switch
from tt_cli.errors import UsageError

if TYPE_CHECKING:
    from tt_cli.organise.questions import RunQuestion
    from tt_cli.organise.recipe import Recipe

INIT_EXAMPLES = """\
tt init my-run                                    asks, and writes the folder my-run
tt init my-run --address 203.0.113.7 --yes        the defaults for all that is not said
tt init art --size medium --data acme/art-codes --organisation acme \\
    --authority https://passes.example.org --address tt.example.org --publish
tt init art --size large --line 5 --peers 8 --yes  slow lines: has members make local steps, and says why
tt init tales --task causal-lm --model acme/small-lm --lora --data acme/tales  goes on from a model on the Hub
tt init art --publish                             publishes the folder that is there

It makes a run file, the keys of the aux peer and of the authority, a card for the Hub, and files for compose,
systemd, nginx, Caddy and Prometheus. Nothing that exists is overwritten. `tt check my-run/run.toml` looks it over.
--json prints {"folder", "published", "next": […], "identity", "peer_id", "address", "takes": {…}, "lines", "files"}."""
CHECK_EXAMPLES = """\
tt check my-run/run.toml           after `tt init`, and after every change
tt check org/run                   as volunteers will read it
tt check my-run/run.toml --line 5 --peers 8
tt check my-run/run.toml --no-step --json

It looks at every field, keys, tokenizer, data, VQGAN, model, members' lines, peers, authority, and dry-runs one step.
--json prints {"ok": …, "checks": [{"name", "verdict": "pass" | "warning" | "fail", "words", "fix"}, …]}.
Exit code: 0 when nothing fails, 1 else. `tt doctor` looks at the machine."""
CHECK_MARKS = {"pass": "✓ ", "warning": "! ", "fail": "✗ "}

Text = str | None


@app.command(epilog=INIT_EXAMPLES)
def init(
    context: typer.Context,
    name: Annotated[str, argument("NAME", "the run's name: a-z, 0-9 and '-'")],
    task: Annotated[Text, option("TASK", "dalle, which draws, or causal-lm, which writes (default dalle)")] = None,
    model: Annotated[
        Text, option("OWNER/NAME", "a language model to go on from, [@REVISION] (default words, a small new one)")
    ] = None,
    lora: Annotated[bool, switch("--lora", "train adapters of it alone: small messages, and less memory")] = False,
    size: Annotated[Text, option("SIZE", "tiny, small, medium, large, paper, or DIMxLAYERS (default small)")] = None,
    data: Annotated[
        Text, option("DATA", "OWNER/NAME of a data set on the Hub, of text [:COLUMN], or a folder (default built in)")
    ] = None,
    codes: Annotated[Text, option("CODES", "which codes that data holds: f8 or emoji (default f8)")] = None,
    vqgan: Annotated[Text, option("OWNER/NAME[:FILE]", "weights of the VQGAN for f8 codes")] = None,
    organisation: Annotated[Text, option("NAME", "members of it alone may take part (default anybody)")] = None,
    authority: Annotated[Text, option("URL", "where yours will answer; its keys are made (default none)")] = None,
    address: Annotated[Text, option("HOST", "IP or host name of the server with the aux peer")] = None,
    port: Annotated[Text, option("N", "its TCP port for peers (default 31337)")] = None,
    repository: Annotated[Text, option("OWNER/NAME", "on the Hub, for run file, card and checkpoints")] = None,
    line: Annotated[Text, option("MBIT", "Mbit/s that a member's line sends (default 20)")] = None,
    peers: Annotated[Text, option("N", "members that will compute at a time (default 16)")] = None,
    inner_steps: Annotated[
        Text, option("N", "local steps of a member between two averages; 0: none (default: by line and size)")
    ] = None,
    steps: Annotated[Text, option("N", "global steps (default: by size and inner steps)")] = None,
    batch: Annotated[Text, option("N", "examples of all peers for one (default: by size and inner steps)")] = None,
    out: Annotated[Path | None, option("DIR", "the folder to make (default ./NAME)")] = None,
    publish: Annotated[bool, switch("--publish", "put run file and card on the Hub, in one commit")] = False,
    yes: Annotated[bool, switch("--yes", "ask nothing: defaults for what is not said")] = False,
    json: Json = False,
) -> None:
    """Ask, make, publish, say what comes next."""
    from tt_cli.auth.account import whoami
    from tt_cli.organise import run_publishing
    from tt_cli.organise.questions import QUESTIONS, answered, checked_name
    from tt_cli.organise.recipe import check_free, finished, make, next_steps

    folder = out or Path(checked_name(name))
    user = whoami().name if publish else ""
    given = {question.key: context.params[question.key.replace("-", "_")] for question in QUESTIONS}
    given["lora"] = "yes" if lora else None
    recipe = None
    if publish and (there := finished(folder, name)) is not None:
        repository = repository or there.checkpoints.repository or f"{user}/{name}"
    else:
        if user and repository is None:
            given["repository"] = f"{organisation or user}/{name}"
        check_free(folder)
        answers = answered(name, given, _asker(yes, json))
        recipe = make(answers, folder)
        repository = answers.repository
        if not json:
            _tell(recipe)
    published = run_publishing.publish(folder, repository) if publish else None
    next_commands = next_steps(folder.absolute(), repository if published else "", recipe.check if recipe else "")
    if json:
        facts = {"folder": str(folder.absolute()), "published": published, "next": next_commands}
        print(codec.dumps(facts | (recipe.to_json() if recipe is not None else {}), indent=1))
        return
    if published:
        print(f"Published: {published}. Volunteers type: tt join {repository}")
    print("\nNext:", *next_commands, sep="\n  ")


@app.command(epilog=CHECK_EXAMPLES)
def check(
    run: Run,
    peer: Annotated[list[str] | None, option("MULTIADDR", "try this one, not the file's")] = None,
    device: Device = None,
    line: Annotated[float | None, option("MBIT", "Mbit/s that a member's line sends (default 20)", min=0.1)] = None,
    peers: Annotated[int | None, option("N", "members that compute at a time (default 16)", min=1)] = None,
    no_step: Annotated[bool, switch("--no-step", "make no step: for small machines")] = False,
    json: Json = False,
) -> None:
    """Print a line for each check as it is made."""
    from tt_cli.organise.averaging import LINE, PEERS
    from tt_cli.organise.run_check import look_over
    from tt_cli.run.initial_peers import checked_peers

    addresses, members = checked_peers(peer or []), (peers or PEERS, line or LINE)
    checks = look_over(run, peers=addresses, device=device, step=not no_step, members=members)
    show_checks(checks, json, CHECK_MARKS)


def _asker(yes: bool, json: bool) -> Callable[[RunQuestion, str], str]:
    """A function that asks a person, takes defaults, or says which flag is missing."""

    def refuse(question: RunQuestion, default: str) -> str:
        shown = default or '""'
        raise UsageError(
            f"there is no terminal to ask on: give --{question.key} (default {shown}), or --yes for all defaults"
        )

    if yes:
        return lambda question, default: default
    return _ask if sys.stdin.isatty() and sys.stdout.isatty() and not json else refuse


def _ask(question: RunQuestion, default: str) -> str:
    """Until the answer is a good one. Raises KeyboardInterrupt at the end of input."""
    print(f"\n{question.words}", *question.choices(), sep="\n  ")
    while True:
        try:
            text = input(f"[{default}] " if default else "> ").strip() or default
            question.answer(text)
            return text
        except UsageError as error:
            print(f"  {error}")
        except EOFError:
            raise KeyboardInterrupt from None


def _tell(recipe: Recipe) -> None:
    made = f"\nMade {recipe.folder}: the run {recipe.run.identity}"
    print(made, f"Each peer: {recipe.takes.in_words()}", recipe.lines, *recipe.files, sep="\n  ")
    if recipe.address:
        print(f"The aux peer will be {recipe.address}; the run file says so already.")
    else:
        print("No --address was given: put the aux peer's multiaddr into [peers] initial once it is known.")
    if recipe.run.membership.kind == "organisation" and not recipe.run.membership.closed:
        print("No --authority was given: `tt join` asks who is a member, and nothing keeps others out.")
