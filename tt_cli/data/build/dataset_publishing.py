"""A folder of `tt data encode` as a data set on the Hub: all of it appears in one commit, or nothing.

Notable:
- every file is compared with the SHA-256 that was written down when it was made, before anything is sent;
- shards are sent in groups; the Hub keeps what it has by its SHA-256, so after a failure or a kill only what it does
  not have is sent. The commit at the end adds them all, with the card and SHA256SUMS;
- a commit whose answer is lost is recognised by SHA256SUMS when the repository is looked into again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.constants import ENDPOINT

from tt_cli.data.build.journal import SETTINGS, SHARDS, SUMS, ShareState, sums_of
from tt_cli.data.shard_format import ShardFacts
from tt_cli.errors import TTError, UsageError, os_errors
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.hub.repository import CARD, RepositoryChanged, commit, open_repository, read_text, sending

GROUP = 20  # shards that are sent together: what a failure can cost
TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before another try
ANSWER_SECONDS = 300.0  # the Hub looks at every file of a commit
MOST_SUMS_BYTES = 64 << 20  # of SHA256SUMS
MOST_IN_CARD = 200  # shards that the card lists one by one

Tell = Callable[[str], None]


@dataclass(frozen=True)
class EncodedFolder:
    """A finished folder. settings: of encode.json. counts: of all shares together."""

    folder: Path
    settings: dict[str, Any]
    counts: Counter[str]
    shards: Sequence[ShardFacts]


def finished_folder(folder: Path) -> EncodedFolder:
    """The content of a folder of `tt data encode`, every shard checked against its SHA-256.

    Raises UsageError where a share is not finished, TTError for a shard that is missing or damaged.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        shares = int(settings["shares"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} is no folder that `tt data encode` made: {SETTINGS} cannot be read ({error})"
        ) from error
    counts: Counter[str] = Counter()
    shards: list[ShardFacts] = []
    for share in range(shares):
        state = ShareState.read(folder, share)
        if not state.done:
            raise UsageError(
                f"share {share + 1} of {shares} of {folder} is not finished; run `tt data encode` "
                f"with --shard {share + 1}/{shares} to its end first"
            )
        counts.update(state.counts)
        shards += state.shards
    if not shards:
        raise UsageError(f"there is not one row in {folder}: all {counts['seen']:,} were left out")
    for facts in shards:
        path = folder / SHARDS / facts.name
        with os_errors(f"cannot read the shard {path}", "copy it here again"), path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != facts.sha256:
            raise TTError(
                f"the shard {path} is damaged: its SHA-256 is not the one that was written down; encode again"
            )
    return EncodedFolder(folder, settings, counts, shards)


def publish(encoded: EncodedFolder, name: str, licence: str, *, private: bool | None = None, tell: Tell = print) -> str:
    """Put the folder on the Hub as the data set `name` (OWNER/NAME), made where it is missing. Returns its address.

    Raises UsageError for what the Hub refuses and for a repository with other data, HubUnreachable after some tries;
    then, another call goes on.
    """
    if get_token() is None:
        raise UsageError(f"cannot publish the data set {name}: nobody is logged in; run `tt login`")
    for number in range(TRIES - 1):
        try:
            _publish(encoded, name, licence, private, tell)
            break
        except (HubUnreachable, RepositoryChanged) as error:
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**number)
            tell(f"{str(error).removesuffix('; try again')}; trying again in {wait:.0f} s")
            time.sleep(wait)
    else:
        _publish(encoded, name, licence, private, tell)
    return f"{ENDPOINT}/datasets/{name}"


def _publish(encoded: EncodedFolder, name: str, licence: str, private: bool | None, tell: Tell) -> None:
    action, sums = f"cannot publish the data set {name}", sums_of(encoded.shards)
    repository = open_repository(name, action, kind="dataset", private=private)
    if SUMS in repository.files and read_text(repository, SUMS, action, MOST_SUMS_BYTES) == sums:
        tell(f"{name} has it already")
        return
    old = {file for file in repository.files if file.startswith(f"{SHARDS}/")}
    if old and SETTINGS not in repository.files:
        raise UsageError(f"{action}: it holds other data; name another one")
    names = {f"{SHARDS}/{facts.name}" for facts in encoded.shards}
    adds = [CommitOperationAdd(path, str(encoded.folder / path)) for path in sorted(names)]
    for start in range(0, len(adds), GROUP):
        with sending(action, ANSWER_SECONDS):
            HfApi().preupload_lfs_files(name, adds[start : start + GROUP], repo_type="dataset")
        tell(f"{min(start + GROUP, len(adds)):,} of {len(adds):,} shards are on the Hub")
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *adds,
        CommitOperationAdd(SUMS, sums.encode()),
        CommitOperationAdd(SETTINGS, (encoded.folder / SETTINGS).read_bytes()),
        CommitOperationAdd(CARD, card(encoded, name, licence).encode()),
        *(CommitOperationDelete(file) for file in sorted(old - names)),
    ]
    what = "documents as tokens" if "tokenizer" in encoded.settings else "pictures as codes"
    commit(repository, operations, f"{encoded.counts['kept']:,} {what}", action, ANSWER_SECONDS)


def card(encoded: EncodedFolder, name: str, licence: str) -> str:
    """Markdown with the Hub's metadata: what it is, how it was made, what was left out, every shard's checksum."""
    counts, made = encoded.counts, encoded.settings
    size = sum(facts.bytes for facts in encoded.shards)
    if vqgan := made.get("vqgan"):
        kind, tag, rows = "text-to-image", "vqgan-codes", "pictures"
        words = (
            f"pictures with captions, each as {vqgan['grid']} x {vqgan['grid']} codes of the VQGAN `{vqgan['name']}` "
            f"({vqgan['codebook_size']:,} codes, {vqgan['pixels']} x {vqgan['pixels']} pixels)."
        )
    else:
        kind, tag, rows = "text-generation", "tokens", "documents"
        tokenizer = made["tokenizer"]["name"]
        words = f"documents, {counts['tokens']:,} tokens of the tokenizer `{tokenizer}`, each with its end."
    lines = ["---", f"license: {json.dumps(licence)}", "task_categories:", f"- {kind}", "tags:", f"- {tag}"]
    lines += ["configs:", "- config_name: default", "  data_files:"]
    for split in dict.fromkeys(facts.name.partition("-")[0] for facts in encoded.shards):
        lines += [f"  - split: {split}", f"    path: {SHARDS}/{split}-*.{made['container']}"]
    lines += ["---", "", f"# {name}", "", f"{counts['kept']:,} {words}"]
    lines += ["", "| column | content |", "|---|---|"]
    lines += [f"| {column} | {_COLUMNS[column]} |" for column in made["columns"]]
    lines += ["", "## What was left out", "", f"Of {counts['seen']:,} {rows}:", "", f"| reason | {rows} |", "|---|---|"]
    left_out = {key: value for key, value in counts.items() if key not in ("seen", "kept", "tokens") and value}
    lines += [f"| {key.replace('_', ' ')} | {value:,} |" for key, value in sorted(left_out.items())]
    if filters := made.get("filters"):
        lines += ["", "The filters:", "", *(f"- {key.replace('_', ' ')}: {value}" for key, value in filters.items())]
    lines += ["", "## Shards", "", f"{len(encoded.shards):,}, of {size / 1e6:,.1f} MB together; `{SUMS}` has them all."]
    if len(encoded.shards) <= MOST_IN_CARD:
        lines += ["", "| shard | rows | bytes | SHA-256 |", "|---|---|---|---|"]
        lines += [f"| {shard.name} | {shard.rows:,} | {shard.bytes:,} | `{shard.sha256}` |" for shard in encoded.shards]
    return "\n".join(lines) + "\n"


_COLUMNS = {
    "caption": "text",
    "NSFW": "the label of the source",
    "original_width": "pixels of the whole picture",
    "original_height": "pixels of the whole picture",
    "code": "the codes row by row, little-endian int16",
    "code13": "the codes row by row, with no more bits each than the codebook needs, the lowest first",
    "ids16": "token ids of a document, little-endian uint16",
    "ids32": "token ids of a document, little-endian uint32",
}
