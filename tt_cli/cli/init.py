"""`tt init NAME`: set up a new run, by questions or flags."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.organise.questions import RunQuestion
    from tt_cli.organise.recipe import Recipe

EXAMPLES = """\
tt init my-run                                    asks, and writes the folder my-run
tt init my-run --address 203.0.113.7 --yes        the defaults for all that is not said
tt init art --size medium --data acme/art-codes --organisation acme \\
    --authority https://passes.example.org --address tt.example.org --publish
tt init art --publish                             publishes the folder that is there

It makes a run file, the keys of the aux peer and of the authority, a card for the Hub, and files for compose,
systemd, nginx, Caddy and Prometheus. Nothing that exists is overwritten. `tt check my-run/run.toml` looks it over.
--json prints {"folder", "published", "next": […], "identity", "peer_id", "address", "takes": {…}, "files": […]}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt init` takes: a flag for each question of tt_cli.organise.questions."""
    parser.add_argument("name", metavar="NAME", help="the run's name: a-z, 0-9 and '-'")
    parser.add_argument("--size", help="tiny, small, medium, large, paper, or DIMxLAYERS (default small)")
    parser.add_argument("--data", help="emoji, OWNER/NAME of a data set on the Hub, or a folder (default emoji)")
    parser.add_argument("--codes", help="which codes that data holds: f8 or emoji (default f8)")
    parser.add_argument("--vqgan", metavar="OWNER/NAME[:FILE]", help="weights of the VQGAN for f8 codes")
    parser.add_argument("--organisation", metavar="NAME", help="members of it alone may take part (default anybody)")
    parser.add_argument("--authority", metavar="URL", help="where yours will answer; its keys are made (default none)")
    parser.add_argument("--address", metavar="HOST", help="IP or host name of the server with the aux peer")
    parser.add_argument("--port", metavar="N", help="its TCP port for peers (default 31337)")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="on the Hub, for run file, card and checkpoints")
    parser.add_argument("--steps", metavar="N", help="global steps (default: by size)")
    parser.add_argument("--batch", metavar="N", help="examples of all peers for one step (default: by size)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to make (default ./NAME)")
    parser.add_argument("--publish", action="store_true", help="put run file and card on the Hub, in one commit")
    parser.add_argument("--yes", action="store_true", help="ask nothing: defaults for what is not said")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Ask, make, publish, say what comes next."""
    from tt_cli.organise.questions import QUESTIONS, answered, checked_name
    from tt_cli.organise.recipe import check_free, finished, make, next_steps
    from tt_cli.organise.run_publishing import check_may_publish, publish

    folder = args.out or Path(checked_name(args.name))
    user = check_may_publish() if args.publish else ""
    given = {question.key: getattr(args, question.key) for question in QUESTIONS}
    recipe = None
    if args.publish and (there := finished(folder, args.name)) is not None:
        repository = args.repository or there.checkpoints.repository or f"{user}/{args.name}"
    else:
        if user and given["repository"] is None:
            given["repository"] = f"{given['organisation'] or user}/{args.name}"
        check_free(folder)
        answers = answered(args.name, given, _asker(args))
        recipe = make(answers, folder)
        repository = answers.repository
        if not args.json:
            _tell(recipe)
    published = publish(folder, repository) if args.publish else None
    steps = next_steps(folder.absolute(), repository if published else "")
    if args.json:
        print(json.dumps(_facts(recipe, folder, published, steps), indent=1))
        return 0
    if published:
        print(f"Published: {published}. Volunteers type: tt join {repository}")
    print("\nNext:")
    for step in steps:
        print(f"  {step}")
    return 0


def _asker(args: argparse.Namespace) -> Any:
    """What asks a person, takes defaults, or says which flag is missing."""
    from tt_cli.errors import UsageError

    def default(question: RunQuestion, default: str) -> str:
        return default

    def refuse(question: RunQuestion, default: str) -> str:
        shown = default or '""'
        raise UsageError(
            f"there is no terminal to ask on: give {question.flag} (default {shown}), or --yes for all defaults"
        )

    if args.yes:
        return default
    return _ask if sys.stdin.isatty() and sys.stdout.isatty() and not args.json else refuse


def _ask(question: RunQuestion, default: str) -> str:
    """Until the answer is a good one. Raises KeyboardInterrupt at the end of input."""
    from tt_cli.errors import UsageError

    print(f"\n{question.words}")
    for line in question.choices():
        print(f"  {line}")
    while True:
        try:
            text = input(f"[{default}] " if default else "> ").strip() or default
            question.check(text)
            return text
        except UsageError as error:
            print(f"  {error}")
        except EOFError:
            raise KeyboardInterrupt from None


def _tell(recipe: Recipe) -> None:
    print(f"\nMade {recipe.folder}: the run {recipe.run.identity}")
    print(f"  Each peer: {recipe.takes.in_words()}")
    for file in recipe.files:
        print(f"  {file}")
    if recipe.address:
        print(f"The aux peer will be {recipe.address}; the run file says so already.")
    else:
        print("No --address was given: put the aux peer's multiaddr into [peers] initial once it is known.")
    if recipe.run.membership.kind == "organisation" and not recipe.run.membership.closed:
        print("No --authority was given: `tt join` asks who is a member, and nothing keeps others out.")


def _facts(recipe: Recipe | None, folder: Path, published: str | None, steps: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"folder": str(folder.absolute()), "published": published, "next": steps}
    if recipe is not None:
        facts |= {
            "identity": recipe.run.identity,
            "peer_id": recipe.peer_id,
            "address": recipe.address or None,
            "takes": recipe.takes.to_json(),
            "files": list(recipe.files),
        }
    return facts
