"""A repository on the Hub: looked into, made where it is missing, changed by one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import HubUnreachable, hub_errors, quiet_and_bounded

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete

CARD = "README.md"
MOST_BYTES = 1 << 20


class RepositoryChanged(TTError):
    """Somebody else's commit came first."""


@dataclass(frozen=True)
class Repository:
    """As it stands at `commit`. changed: Unix time of that commit, where the Hub says it."""

    name: str
    commit: str | None
    files: frozenset[str]
    changed: float | None


def open_repository(name: str, action: str, *, private: bool | None = None) -> Repository:
    """A model repository, made where it is missing. private: then; None as its owner's settings have it.

    Raises UsageError, beginning with `action`, where the Hub refuses, HubUnreachable.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    with quiet_and_bounded(), hub_errors(action):
        try:
            found = api.model_info(name)
        except RepositoryNotFoundError:
            api.create_repo(name, private=private, exist_ok=True)
            found = api.model_info(name)
    files = frozenset(file.rfilename for file in found.siblings or [])
    changed = found.last_modified.timestamp() if found.last_modified else None
    return Repository(name, found.sha, files, changed)


def read_text(repository: Repository, file: str, action: str) -> str:
    """A small file, past the cache, where each commit's would stay. Raises UsageError for what is no such text."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    with quiet_and_bounded(), hub_errors(action):
        url = hf_hub_url(repository.name, file, revision=repository.commit)
        answer = get_session().get(url, headers=build_hf_headers())
        hf_raise_for_status(answer)
    if len(answer.content) > MOST_BYTES:
        raise UsageError(f"{action}: {file} there is over 1 MiB; it is to be a short text")
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

    Large files that the Hub has already are not sent again. Raises Moved, UsageError for what the Hub refuses,
    HubUnreachable; after that one it may have been done all the same.
    """
    from huggingface_hub import HfApi

    with sending(action, timeout):
        return HfApi().create_commit(repository.name, operations, commit_message=words, parent_commit=repository.commit)


@contextmanager
def sending(action: str, timeout: float | None = None) -> Iterator[None]:
    """Turns what the Hub's client raises when it sends into Moved, UsageError or HubUnreachable, each of one line."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # see tt_cli.hub.hub_files

    with quiet_and_bounded(timeout), hub_errors(action):
        try:
            yield
        except HfHubHTTPError as error:
            if error.response.status_code == 412:
                raise RepositoryChanged(f"{action}: somebody else changed it meanwhile; try again") from error
            raise
        except PermissionError as error:
            if error.filename is None:  # not of a file here: the store for large files
                raise UsageError(f"{action}: the Hub refuses access; run `tt login`") from error
            raise
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # what the Hub says of the card
            raise UsageError(f"{action}: {str(error).strip().splitlines()[-1]}") from error
        except RuntimeError as error:  # a large file could not be sent
            if isinstance(error.__cause__, (httpx.HTTPError, OSError)):
                raise error.__cause__ from error
            raise HubUnreachable(f"{action}: {(str(error).strip().splitlines() or ['nothing said'])[0]}") from error
