"""A run file that a person goes on editing: every field is there, in words of the trade, with what it means."""

from __future__ import annotations

from tt_cli.run import RunConfig
from tt_cli.run.toml import toml_value

_TABLES = {
    "run": "Name, seed and every field below that is not marked with * are the run's identity: peers whose identities\n"
    "differ never meet, so change them before the first peer joins.",
    "model": "The decoder, as in Ramesh et al. 2021. `tt check` says what a change takes in memory.",
    "tokenizer": "Captions to ids. From the Hub: a repository with a tokenizer.json.",
    "vqgan": "The VQGAN whose codes are learned; its weights are needed for drawing alone.",
    "data": 'source = "hub" takes a data set on the Hub, or a folder of shards that every peer has; "files" takes\n'
    "what lies at location, a folder or an http(s) address.\n"
    "Columns: caption (text) and code (grid * grid little-endian int16), or code13 (the same, packed).",
    "optimizer": "LAMB with 8-bit moments (You et al. 2020; Dettmers et al. 2022), on the CPU.",
    "schedule": "Linear warm-up to peak_lr, then linear decay to 0 at total_steps.",
    "swarm": "How peers average. Times are in seconds.",
    "membership": "* Who may join. `tt authority` issues passes, bans and orders.",
    "checkpoints": "* Where checkpoints are published, for those who come when no peer is there.",
    "peers": "* Where the swarm is found: the aux peers' addresses. The id at the end is that of an aux peer's key.",
}
_FIELDS = {
    "run.description": "* for people",
    "run.seed": "of the first weights",
    "model.depth": "layers; a GPU's time grows with it",
    "model.text_length": "tokens of a caption; longer ones are cut",
    "model.reversible": "activations are computed again on the way back instead of kept",
    "model.shared_layer_groups": "so many sets of weights, cycled over the layers",
    "model.loss_image_weight": "of the picture's codes against the caption's tokens",
    "vqgan.grid": "grid * grid codes a picture",
    "data.code_column": "* that `tt data encode` writes; both are read",
    "data.cache_mb": "* 10^6 bytes of downloaded shards that a peer keeps on its disk",
    "data.subset": "0: all; else the first so many, shuffled by the seed",
    "data.shuffle_buffer": "examples",
    "data.min_caption_length": "characters",
    "optimizer.delayed": "the step runs beside the next accumulation",
    "schedule.total_steps": "global steps of all peers together",
    "schedule.warmup_fraction": "of total_steps",
    "swarm.target_batch_size": "examples of all peers for one step",
    "swarm.compression": "linear8, or blockwise8 as in the paper",
    "swarm.aggregation": "centered_clip: a minority cannot move it far; or mean",
    "swarm.large_tensor": "elements from which gradients travel in 8 bits",
    "swarm.matchmaking_time": "* longer for peers far apart",
    "swarm.averaging_timeout": "*",
    "swarm.next_chunk_timeout": "* not shorter than matchmaking_time by much",
    "swarm.statistics_expiration": "* of a peer's published record",
    "membership.kind": "open, or organisation",
    "peers.coordinator_port": "of an aux peer of this run",
}
_UNSET = {
    "tokenizer.revision": '"main"',
    "vqgan.revision": '"main"',
    "vqgan.filename": '"model.safetensors"',
    "data.revision": '"main"',
    "data.location": '"https://data.example.org/codes" # * a copy nearby: a folder or an address',
    "membership.organisation": '"your-organisation"',
    "membership.authority": '"https://passes.example.org"',
    "membership.authority_key": '"ed25519:…" # `tt authority init` prints both',
    "membership.oauth_client_id": '"…" # of your OAuth app on the Hub, for logins without a token',
    "checkpoints.repository": '"your-organisation/your-run"',
}


def commented(run: RunConfig, notes: str) -> str:
    """TOML that reads back as `run`. notes: lines for the top."""
    lines = [f"# {line}".rstrip() for line in notes.splitlines()]
    for table in type(run).model_fields:
        lines += ["", *(f"# {line}" for line in _TABLES.get(table, "").splitlines()), f"[{table}]"]
        part = getattr(run, table)
        for field in type(part).model_fields:
            key, value = f"{table}.{field}", getattr(part, field)
            if value is None:
                lines.append(f"# {field} = {_UNSET.get(key, '…')}")
                continue
            meaning = f" # {_FIELDS[key]}" if key in _FIELDS else ""
            lines.append(f"{field} = {toml_value(value)}{meaning}")
    return "\n".join(lines) + "\n"
