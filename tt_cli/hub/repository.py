"""A model or a data set on the Hub as a repository: looked into, made where it is missing, changed by one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import hub_errors, quiet_and_bounded

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete

CARD = "README.md"
MOST_BYTES = 1 << 20


class RepositoryChanged(TTError):
    """Somebody else's commit came first."""


@dataclass(frozen=True)
class Repository:
    """A repository as it stands at `commit`."""

    name: str
    kind: str  # "model" or "dataset"
    commit: str | None
    files: frozenset[str]
    changed: float | None  # Unix time of the commit, where the Hub says it


def open_repository(name: str, action: str, *, kind: str = "model", private: bool | None = None) -> Repository:
    """A repository, made where it is missing. private: then; None as its owner's settings have it.

    Raises UsageError, beginning with `action`, where the Hub refuses, HubUnreachable.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    look = api.dataset_info if kind == "dataset" else api.model_info
    with hub_errors(action), quiet_and_bounded():
        try:
            info = look(name)
        except RepositoryNotFoundError:
            api.create_repo(name, repo_type=kind, private=private, exist_ok=True)
            info = look(name)
    files = frozenset(file.rfilename for file in info.siblings or [])
    changed = info.last_modified.timestamp() if info.last_modified else None
    return Repository(name, kind, info.sha, files, changed)


def read_text(repository: Repository, file: str, action: str, most: int = MOST_BYTES) -> str:
    """A file of up to `most` bytes, past the cache, where each commit's would stay.

    Raises UsageError for what is no such text.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    with hub_errors(action), quiet_and_bounded():
        url = hf_hub_url(repository.name, file, repo_type=repository.kind, revision=repository.commit)
        answer = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
        hf_raise_for_status(answer)
    if len(answer.content) > most:
        raise UsageError(f"{action}: {file} there is over {most >> 20} MiB; it is to be a short text")
    try:
        return answer.content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{action}: {file} there is not UTF-8 text") from None


def commit(
    repository: Repository,
    operations: Sequence[CommitOperationAdd | CommitOperationDelete],
    words: str,
    action: str,
    timeout: float | None = None,
) -> CommitInfo:
    """All of it or nothing, onto what `open_repository` saw. timeout: seconds to wait for each of the Hub's answers.

    Large files that the Hub has already are not sent again. Raises RepositoryChanged, UsageError for what the Hub
    refuses, HubUnreachable; after that one it may have been done all the same.
    """
    from huggingface_hub import HfApi

    with sending(action, timeout):
        return HfApi().create_commit(
            repository.name,
            operations,
            repo_type=repository.kind,
            commit_message=words,
            parent_commit=repository.commit,
        )


@contextmanager
def sending(action: str, timeout: float | None = None) -> Iterator[None]:
    """Raise what the client raises when it sends as RepositoryChanged, UsageError or HubUnreachable, in one line."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # see tt_cli.hub.hub_files

    with hub_errors(action), quiet_and_bounded(timeout):
        try:
            yield
        except HfHubHTTPError as error:
            if error.response.status_code == 412:
                raise RepositoryChanged(f"{action}: somebody else changed it meanwhile; try again") from error
            raise
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # what the Hub says of the card
            raise UsageError(f"{action}: {str(error).strip().splitlines()[-1]}") from error
        except RuntimeError as error:  # a large file could not be sent
            if isinstance(error.__cause__, (httpx.HTTPError, OSError)):
                raise error.__cause__ from error
            raise
