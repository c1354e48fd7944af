"""Locations of a data set's shards: a folder, an http(s) address with an index, or the Hugging Face Hub.

Each kind lists the shards of a split and brings one of them. A shard's name is its path inside the data set, the same
in every copy. Failures are words for a person: `ShardProblem` for what may pass, UsageError for what will not.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from tt_cli.data.folder_walk import files_below
from tt_cli.data.shard_format import container_of
from tt_cli.data.stream.transfer import PATIENCE, Request, ShardProblem, fetch, seconds_to_wait
from tt_cli.errors import UsageError
from tt_cli.hub.hub_files import NO_DATA_SET, TIMEOUT, HubUnreachable, http_client, hub_errors

SUMS = "SHA256SUMS"
INDEXES = ("index.json", SUMS)
MOST_INDEX = 1 << 25  # bytes
# Words in the path of a shard that name its split.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
SAME = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "test"}


@dataclass(frozen=True)
class Shard:
    """A shard: its path in the data set; bytes and SHA-256 (hex) where the list tells them."""

    name: str
    bytes: int | None = None
    sha256: str | None = None


def location_of(kind: str, place: str, revision: str | None = None, patience: float = PATIENCE) -> Location:
    """kind: "hub" for the data set `place` there; "files" for a folder or an http(s) address."""
    if kind == "hub":
        return HubRepository(place, revision, patience)
    return Address(place, patience) if "://" in place else Folder(place)


class NoSplit(UsageError):
    """The data set has no split of this name."""


def of_split(names: Iterable[str], split: str, where: str) -> list[str]:
    """The names that belong to a split, sorted: those that say so or, for "train" where none does, that name no split.

    Raises UsageError without any.
    """
    names = sorted(set(names))
    if not names:
        raise UsageError(f"cannot read the data set {where}: it has no shards (.parquet, .tar or .jsonl.br files)")
    named: dict[str, list[str]] = {}
    for name in names:
        each = [[word for word in re.split(r"[^a-z]+", part) if word in SPLITS] for part in name.lower().split("/")]
        # a folder such as train-test-split names none where what lies in it does
        told = [words for words in each[:-1] if not {"train"} < {*words}] + each[-1:]
        words = sum(told, []) or sum(each, []) or [""]
        word = next((word for word in words if word != "train"), "train")  # of both it is held out
        named.setdefault(SAME.get(word, word), []).append(name)
    if rest := named.pop("", []):
        named.setdefault("train", rest)
    if (split := SAME.get(split, split)) not in named:
        raise NoSplit(f"the data set {where} has no split '{split}'; it has {' and '.join(named)}")
    return named[split]


class Folder:
    """A folder, or one file, on this machine."""

    def __init__(self, place: str) -> None:
        self.place, self.resolved = Path(os.path.expanduser(place)), ""
        self.key = str(self.place.absolute())  # tells the content of this place from that of others

    def shards(self, split: str) -> list[Shard]:
        """The shards of a split, by name. Raises UsageError without any."""
        where = f"cannot read the data set {self.place}"
        if self.place.is_file():
            return [Shard(name) for name in of_split([self.place.name], split, str(self.place))]
        if not self.place.is_dir():
            raise UsageError(f"{where}: there is no such folder; check data.name and data.location")

        def fail(error: OSError) -> None:
            raise UsageError(f"{where}: {error.filename or self.place}: {error.strerror or error}") from error

        files = files_below(self.place, fail)
        names = [file.relative_to(self.place).as_posix() for file in files if container_of(file.name)]
        return [Shard(name) for name in of_split(names, split, str(self.place))]

    def open(self, shard: Shard) -> BinaryIO:
        """A shard. Raises ShardProblem."""
        try:
            return (self.place if self.place.is_file() else self.place / shard.name).open("rb")
        except OSError as error:
            raise ShardProblem(error.strerror or str(error), lasting=True) from error


class Address:
    """An http(s) address: that of an index, or of a folder with one; a web server's own list of files will do.

    An index is SHA256SUMS as `sha256sum` writes it, a text with one name a line, or JSON: a list, or {"shards": list},
    of names, or of objects with "name" and what is known of "bytes" and "sha256". Names are relative to it.
    """

    def __init__(self, place: str, patience: float = PATIENCE) -> None:
        self.place, self._patience, self._client = place, patience, http_client(follow_redirects=True)
        self.key, self.resolved = place, place  # resolved: the index

    def shards(self, split: str) -> list[Shard]:
        """The shards of a split, by name. Raises UsageError without any, ShardProblem where that may pass."""
        parts = urlsplit(self.place)
        if parts.path.endswith((".json", ".txt", ".html", SUMS)):
            tries = [self.place]
        else:
            folder = urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/"))
            query = f"?{parts.query}" if parts.query else ""
            tries = [*(urljoin(folder, name) + query for name in INDEXES), folder]
        for address in tries:
            content = io.BytesIO()
            try:
                fetch(replace(self._request(address), most=MOST_INDEX), content)
                listed = {shard.name: shard for shard in _listed(content.getvalue().decode("utf-8", "replace"))}
            except ShardProblem as error:
                if not error.lasting:
                    raise
                problem = error
            else:
                self.resolved = address
                return [listed[name] for name in of_split(listed, split, self.place)]
        raise UsageError(
            f"cannot read the data set {self.place}: it has no {' or '.join(INDEXES)}: {problem}; check data.location"
        )

    def request(self, shard: Shard) -> Request:
        """The request for a shard."""
        query = urlsplit(self.place).query
        url = urljoin(self.resolved, quote(shard.name)) + (f"?{query}" if query else "")
        return replace(self._request(url), bytes=shard.bytes, sha256=shard.sha256)

    def _request(self, url: str) -> Request:
        return Request(self._client, url, patience=self._patience)


class HubRepository:
    """A data set on the Hugging Face Hub, at one revision, through its own client."""

    def __init__(self, place: str, revision: str | None = None, patience: float = PATIENCE) -> None:
        self.place, self.revision, self._patience = place, revision, patience
        self.resolved = revision or "main"  # the commit, once it is known

    @property
    def key(self) -> str:
        """As a folder's."""
        return f"hub:{self.place}@{self.resolved}"

    def shards(self, split: str) -> list[Shard]:
        """See `Address`. Shards come from the commit that was listed."""
        from huggingface_hub import HfApi

        action = f"cannot read the data set {self.place}"
        try:
            with hub_errors(action, NO_DATA_SET):
                info = HfApi().dataset_info(self.place, revision=self.revision, timeout=TIMEOUT)
        except HubUnreachable as error:
            answer = getattr(error.__cause__, "response", None)
            wait = None if answer is None else seconds_to_wait(answer.headers.get("Retry-After"))
            raise ShardProblem(str(error).removeprefix(f"{action}: "), wait=wait) from error
        self.resolved = info.sha or self.resolved
        names = [file.rfilename for file in info.siblings or [] if container_of(file.rfilename)]
        return [Shard(name) for name in of_split(names, split, self.place)]

    def request(self, shard: Shard) -> Request:
        """The request for a shard."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.place, shard.name, repo_type="dataset", revision=self.resolved)
        return Request(get_session(), url, build_hf_headers(library_name="tt"), self._patience)


Location = Folder | Address | HubRepository


def _listed(text: str) -> list[Shard]:
    """The shards of an index of any kind. What is no name of a shard inside the data set is left out."""
    try:
        index = json.loads(text)
    except (ValueError, RecursionError):
        if links := re.findall(r"""href\s*=\s*["']([^"'?#]+)""", text, re.IGNORECASE):
            shards = [Shard(unquote(link).removeprefix("./")) for link in links]
        else:
            lines = [re.fullmatch(r"(?:([0-9a-f]{64}) [ *])?(.*)", line.strip()) for line in text.splitlines()]
            shards = [Shard(line[2].removeprefix("./"), sha256=line[1]) for line in lines if line is not None]
    else:
        entries = index.get("shards", []) if isinstance(index, dict) else index
        shards = [_shard(entry) for entry in entries] if isinstance(entries, list) else []
    inside = [shard for shard in shards if not shard.name.startswith("/") and ".." not in shard.name.split("/")]
    return [shard for shard in inside if container_of(shard.name) and "://" not in shard.name]


def _shard(entry: Any) -> Shard:
    """An entry of a JSON index; what is none has no name."""
    known = {"name": entry} if isinstance(entry, str) else entry if isinstance(entry, dict) else {}
    name, size, digest = (known.get(key) for key in ("name", "bytes", "sha256"))
    return Shard(
        name if isinstance(name, str) and not re.search(r"[\ud800-\udfff]", name) else "",  # halves of letters
        size if type(size) is int and size >= 0 else None,
        digest if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest) else None,
    )
