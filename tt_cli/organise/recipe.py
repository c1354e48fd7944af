"""A new run's folder, from answers: run file, keys, card for the Hub, and the files that keep an aux peer running.

The folder is made aside and renamed when it is whole, so that a kill leaves nothing half. `home` in it is the TT_HOME
of the run's first aux peer: its key and the authority's lie where `tt aux-peer` looks for them.
"""

from __future__ import annotations

import os
import secrets
import shlex
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.auth.authority.authority_server import found
from tt_cli.errors import UsageError, os_errors
from tt_cli.hub.repository import CARD
from tt_cli.identity import peer_key
from tt_cli.organise import averaging
from tt_cli.organise.model_sizes import Takes, takes
from tt_cli.organise.questions import BUILTIN_DATA, RunAnswers, multiaddr_host
from tt_cli.organise.run_file import commented
from tt_cli.organise.server_files import OWNER, ServerFacts, rendered
from tt_cli.run import RunConfig, folders, load_run
from tt_cli.run.model_card import card
from tt_cli.run.run_source import RUN_FILE

HOME = "home"
SECRETS = ".env"
CONTAINER_USER = 10001  # as in the Dockerfile
OWN_CAPTIONS = 48  # tokens of captions of one's own in the built-in byte-level vocabulary; emoji's names take 16


@dataclass(frozen=True)
class Recipe:
    """A finished folder. address: the multiaddr in the run file, "" where none was given. lines: what is averaged, and
    why, by the members' lines. check: the command that looks it over, with those lines."""

    folder: Path
    run: RunConfig
    peer_id: str
    address: str
    takes: Takes
    lines: str
    files: list[str]
    check: str

    def to_json(self) -> dict[str, Any]:
        """The form of --json."""
        return {
            "identity": self.run.identity,
            "peer_id": self.peer_id,
            "address": self.address or None,
            "takes": {**vars(self.takes), "fits": self.takes.fits},
            "lines": self.lines,
            "files": self.files,
        }


def run_of(answers: RunAnswers) -> RunConfig:
    """The run, still without the addresses that need keys. Raises UsageError for answers that contradict each other."""
    what = "text-to-image transformer" if answers.task == "dalle" else "language model"
    changes: dict[str, object] = {
        "run.name": answers.name,
        "run.description": f"{answers.name}: a {what} that volunteers train together",
        "schedule.total_steps": answers.steps,
        "swarm.target_batch_size": answers.batch,
        "peers.initial": [],
        "peers.coordinator_port": answers.port,
        "checkpoints.repository": answers.repository or None,
    }
    if answers.task == "dalle" and answers.data != BUILTIN_DATA["dalle"]:
        changes |= {"data.source": "hub", "data.name": answers.data}
        if answers.codes == "emoji":
            changes |= {"model.text_length": OWN_CAPTIONS}
    if answers.codes == "f8":
        repository, _, file = answers.vqgan.partition(":")
        changes |= {"vqgan.name": repository, "vqgan.filename": file}
    if answers.organisation:
        changes |= {"membership.kind": "organisation", "membership.organisation": answers.organisation}
    if answers.task != "dalle" and not answers.inner_steps:
        raise UsageError("--inner-steps 0: members of a language model's run make at least one step by themselves")
    members = answers.peers, answers.line
    way = averaging.chosen(answers.plain, members, answers.inner_steps)._replace(inner_steps=answers.inner_steps)
    return averaging.suited(answers.plain.replaced(changes), way, members)


def check_free(folder: Path) -> None:
    """Raises UsageError where there is something already."""
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists, and nothing in it is overwritten: name another folder with --out")


def make(answers: RunAnswers, folder: Path) -> Recipe:
    """Make the folder. Raises UsageError where it exists, TTError where it cannot be made."""
    run = run_of(answers)
    needs = takes(run)
    folder = folder.absolute()
    check_free(folder)
    with os_errors(f"cannot make {folder}", "name another folder with --out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as private:
            aside = Path(private) / folder.name
            aside.mkdir()
            run, peer_id, address = _fill(aside, answers, run)
            aside.chmod(0o755)
            aside.rename(folder)
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    reason, check = averaging.reason(run, (answers.peers, answers.line)), _check(folder.absolute() / RUN_FILE, answers)
    return Recipe(folder, run, peer_id, address, needs, reason, files, check)


def _check(run_file: Path | str, answers: RunAnswers) -> str:
    return f"tt check {shlex.quote(str(run_file))} --line {answers.line:g} --peers {answers.peers}"


def _fill(folder: Path, answers: RunAnswers, run: RunConfig) -> tuple[RunConfig, str, str]:
    """Write everything. Returns the finished run, the aux peer's id and its address."""
    with _tt_home(folder / HOME):
        peer_id = peer_key.id_of(peer_key.made_key(folders.run_folder(run) / "aux.key"))
        if answers.authority:
            line = found(run).settings().line()
            run = run.replaced({"membership.authority": answers.authority, "membership.authority_key": line})
    address = ""
    if host := multiaddr_host(answers.address):
        address = f"{host}/tcp/{answers.port}/p2p/{peer_id}"
        run = run.replaced({"peers.initial": [address]})
    user, group = _give_away(folder / HOME)
    settings = (
        f"# Who owns {HOME}/. On a server where it was copied to, the line in the head of compose.yaml sets both.\n"
        f"TT_UID={user}\nTT_GID={group}\nPOSTGRES_PASSWORD={secrets.token_urlsafe(24)}\n"
    )
    atomic_write(folder / SECRETS, settings, mode=PRIVATE)
    texts = {RUN_FILE: commented(run, _notes(answers, run)), CARD: card(run), ".gitignore": f"{HOME}/\n{SECRETS}\n"}
    for name, text in {**texts, **rendered(ServerFacts.of(run, answers.address))}.items():
        atomic_write(folder / name, text)
    return run, peer_id, address


@contextmanager
def _tt_home(home: Path) -> Iterator[None]:
    """Let what `tt` keeps go there meanwhile, as if TT_HOME were set for it."""
    before = {name: value for name, value in os.environ.items() if name == "TT_HOME"}
    os.environ["TT_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["TT_HOME"]
        os.environ.update(before)


def _give_away(home: Path) -> tuple[int, int]:
    """Give `home` to who makes it, but not to root, as whom no container should run; returns the owner."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        user = group = CONTAINER_USER
        for path in (home, *home.rglob("*")):
            os.chown(path, user, group)
    return user, group


def _notes(answers: RunAnswers, run: RunConfig) -> str:
    lines = [
        f"The run {run.run.name}, made by `tt init`. After every change: `{_check(RUN_FILE, answers)}`.",
        "A change of its identity needs a new folder for its keys: `tt check` says which.",
        *textwrap.wrap(averaging.reason(run, (answers.peers, answers.line)), 118),
    ]
    if answers.inner_steps:
        lines.append("peak_lr is a point to start from: local steps were tried on emoji-demo and words-demo alone.")
    elif answers.codes == "f8":
        lines.append("peak_lr and total_steps are points to start from: only the paper's size was trained to its end.")
    return "\n".join(lines)


def finished(folder: Path, name: str) -> RunConfig | None:
    """The run in a folder that `make` made before; None where there is no such folder. Raises UsageError."""
    if not (folder / RUN_FILE).exists():
        return None
    run = load_run(str(folder / RUN_FILE))
    if run.run.name != name or not (folder / CARD).is_file():
        raise UsageError(f"{folder} holds the run {run.run.name}, or no {CARD}: name the right folder with --out")
    return run


def next_steps(folder: Path, published: str, check: str = "") -> list[str]:
    """The organiser's next steps with the folder. published: the repository on the Hub, or "". check: see `Recipe`."""
    run = load_run(str(folder / RUN_FILE))
    place, file = (shlex.quote(str(path)) for path in (folder, folder / RUN_FILE))
    host = run.peers.initial[0].split("/")[2] if run.peers.initial else ""
    flags = " ".join(ServerFacts.of(run, host).flags("127.0.0.1"))
    steps = [
        check or f"tt check {file}",
        f"copy {place} to the server; keep a copy of {HOME}/ and {SECRETS}: they hold its keys",
        f"TT_HOME={place}/{HOME} tt aux-peer {file} {flags.removeprefix('--plain ')}",
        "  or there, with containers:",
        "    docker build -t tt PATH_OF_TT_SOURCE",
        f"    {OWNER}",
        "    docker compose up -d",
        "  or as a service: tt-*.service (see docs/organise.md)",
    ]
    if run.membership.authority:
        steps.append(f"have {run.membership.authority} lead to port 8470: nginx.conf or Caddyfile")
    if not published:
        steps.append(f"tt init {run.run.name} --publish --out {place} puts it on the Hub; else hand {RUN_FILE} out")
    return [*steps, f"volunteers: tt join {published or RUN_FILE}"]
