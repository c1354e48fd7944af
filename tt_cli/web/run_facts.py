"""A run in words and numbers for its page, from its run file and what the coordinator tells of its model. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tt_cli import __version__
from tt_cli.memory.trainer_account import round_bytes
from tt_cli.run import DalleRun, RunConfig
from tt_cli.terminal.log_lines import join_line
from tt_cli.web.notebooks import NAMES

Figure = tuple[str, Any, str]
LABELS = ("label", "value", "unit")  # of a Figure; see tt_cli.web.schemas
STORY = (
    "Large models are trained in data centres that few people have. This one is trained by volunteers: each lends a "
    "computer for as long as they like, and together they make every step.",
    "Each computer works on examples of its own. When the swarm has seen enough of them, the peers average what they "
    "learned, each from all the others, and go on with exactly the same model. Who comes later takes the model over "
    "from those who are there; who leaves is not missed for long.",
)
LARGE = 2**24  # elements of a large tensor
HUB = "https://huggingface.co"


def run_facts(run: RunConfig, name: str, model: Mapping[str, Any], addresses: Sequence[str]) -> dict[str, Any]:
    """The answer of /api/run. name: how people join it, such as "emoji"; model: "parameters", "effective" if known."""
    title, *story = run.run.description.strip().splitlines() or [run.run.name]
    paragraphs = [" ".join(line.split()) for line in story if line.strip()]
    joins = None if run.peers.initial else join_line(name, list(addresses))  # else the run file names peers
    repository, draws = run.checkpoints.repository, isinstance(run, DalleRun)
    return {
        "name": run.run.name,
        "identity": run.identity,
        "title": title.strip(),
        "story": paragraphs or list(STORY),
        "version": __version__,
        "total_steps": run.schedule.total_steps,
        "target_batch_size": run.swarm.target_batch_size,
        "model": {
            "parameters": model.get("parameters"),
            "effective": model.get("effective"),
            **dict.fromkeys(("layers", "dim", "heads", "image_tokens", "text_tokens", "vocabulary")),
            **run.measures(),
        },
        "data": {**run.data.model_dump(), **({"pixels": run.vqgan.pixels} if isinstance(run, DalleRun) else {})},
        "membership": run.membership.model_dump(include={"kind", "organisation", "authority"}),
        "join": {
            "commands": [joins or f"tt join {shlex.quote(name)}"],
            "peers": list(addresses),
            "notebooks": [f"notebooks/{name}" for name in NAMES[: None if draws else 1]],
        },
        "run_file": run.to_toml(),
        "checkpoints_at": f"{HUB}/{repository}" if repository else None,
        **({} if draws else {"described": run.described()}),
    }


def figures(
    run: RunConfig, model: Mapping[str, Any], snapshot: Mapping[str, Any], totals: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The run's own numbers for the five challenges: the answer of /api/figures."""
    of_each = round_bytes(run, [LARGE], 1)[0] / LARGE
    challenges: dict[str, list[Figure]] = {
        "communication": [
            ("examples that make one step together", run.swarm.target_batch_size, "samples"),
            ("bytes for each number of a large gradient, instead of 4", round(of_each, 2), "bytes"),
        ],
        "devices": [
            ("computers that have taken part", totals["peers"], "peers"),
            ("kinds of device among them", totals["devices"], "kinds"),
            ("compute time given so far", round(totals["seconds"] / 3600, 1), "hours"),
        ],
        "memory": [("bytes of optimizer state for each parameter, instead of 8", 2, "bytes")],
        "streaming": [("data set", run.data.name, ""), ("examples computed so far", totals["samples"], "samples")],
        "security": [
            ("who may join", "anyone" if run.membership.kind == "open" else run.membership.organisation, ""),
            ("how gradients are averaged", run.swarm.aggregation.replace("_", " "), ""),
        ],
    }
    if layers := run.measures().get("layers"):
        challenges["memory"].append(("layers", layers, ""))
    if isinstance(run, DalleRun):
        kept = "recomputed" if run.model.reversible else "all"
        challenges["memory"].append(("activations kept for the backward pass", kept, ""))
        code_bytes = run.vqgan.grid**2 * (run.vqgan.codebook_size - 1).bit_length() / 8
        challenges["streaming"][1:1] = [
            ("one picture as codes", round(code_bytes), "bytes"),
            ("the same picture as pixels", 3 * run.vqgan.pixels**2, "bytes"),
        ]
    if local := run.optimizer.name == "local":
        of_one = ("of them in one inner step of a peer", run.optimizer.inner_batch, "samples")
        challenges["communication"].insert(1, of_one)
        challenges["memory"][0] = ("bytes of optimizer state that peers share", 0, "bytes")
    if parameters := model.get("parameters"):
        sent = of_each * parameters
        challenges["communication"][:0] = [
            (f"one {'pseudo-' if local else ''}gradient, as it travels", round(sent / 1e6, 1), "MB"),
            ("the same in 32 bits", round(4 * parameters / 1e6, 1), "MB"),
        ]
        challenges["memory"][:0] = [
            ("distinct parameters", parameters, "parameters"),
            ("parameters, counted with sharing", model.get("effective"), "parameters"),
        ]
    if snapshot:
        trainers = [peer for peer in snapshot["peers"] if peer["role"] == "trainer"]
        speeds = [peer["samples_per_second"] for peer in trainers if peer["samples_per_second"] > 0]
        challenges["communication"].append(
            ("speed of the swarm", round(snapshot["samples_per_second"], 1), "samples/s")
        )
        if len(speeds) > 1:
            challenges["devices"].append(("fastest peer over slowest", round(max(speeds) / min(speeds), 1), "times"))
        behind = sum(peer["client_mode"] for peer in trainers)
        challenges["devices"].append(("peers now that nobody can dial", behind, "peers"))
        agreeing = f"{snapshot['agreeing']} of {snapshot['holders']}"
        challenges["security"] += [
            ("peers that hold the same state to the last bit", agreeing, "peers"),
            ("peers whose gradients are clipped now", sum(peer["clipped_by"] > 0 for peer in trainers), "peers"),
            ("peers with a proof against them", sum(peer["accused_by"] > 0 for peer in trainers), "peers"),
        ]
    return {name: [dict(zip(LABELS, row, strict=True)) for row in rows] for name, rows in challenges.items()}
