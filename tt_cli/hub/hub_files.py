"""Files from the Hugging Face Hub, and what can go wrong there as one line.

The client's own errors are many, and its HTTP stack's are neither OSError nor the well-known httpx's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Any

from tt_cli.errors import TTError, UsageError, first_line

TIMEOUT = 10  # seconds to wait for the Hub's first answer
SMALL = 1_000_000  # bytes, of which nobody needs to hear
PLAIN = {"Accept-Encoding": "identity"}  # for `plain_body`
NO_REPOSITORY = "the Hub has no such repository, or it is private; check the name"
NO_DATA_SET = "the Hub has no such data set, or it is private; check data.name and data.revision,"

on_bytes: ContextVar[Callable[[int, int, float | None], None] | None] = ContextVar("on_bytes", default=None)
"""Hears in place of a terminal, once a second, how much of a file has come, of how many bytes, and the seconds left."""


class TooLong(Exception):
    """An answer of more bytes than it may have."""


def http_client(**settings: Any) -> Any:
    """A client of httpx2. Raises UsageError where this machine's settings name a proxy that it cannot use."""
    import httpx2

    try:
        return httpx2.Client(**settings)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:  # SOCKS needs another package
        raise UsageError(f"cannot connect: {first_line(error)}; check ALL_PROXY and HTTPS_PROXY") from error


def plain_body(answer: Any, most: int) -> bytes:
    """The body of a streamed answer of httpx2, of up to `most` bytes, whatever length it names. Raises TooLong.

    It is not unpacked, for a few kilobytes can stand for gigabytes: ask with the headers PLAIN.
    """
    body = b""
    for piece in answer.iter_raw():
        body += piece
        if len(body) > most:
            raise TooLong
    return body


class HubUnreachable(TTError):
    """The Hugging Face Hub does not answer, or answers that it cannot."""


def download(repository: str, filename: str, revision: str | None = None, cache: Path | None = None) -> Path:
    """Return the local path of a file of a model repository, fetched unless it is in the cache (None: the client's).

    A copy in the cache serves when the Hub does not answer. Raises UsageError when the file is not there or
    not to be read, HubUnreachable when the Hub does not answer and there is no copy.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    action, fetch = f"cannot fetch {filename} of {repository}", partial(hf_hub_download, cache_dir=cache)
    try:
        with hub_errors(action):
            # Asked first, for this call fails at once where a download would try for 24 s.
            HfApi().model_info(repository, revision=revision, timeout=TIMEOUT)
    except HubUnreachable as error:
        try:
            return Path(fetch(repository, filename, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from error.__cause__
    bar = None if (tell := on_bytes.get()) is None else _bar(tell)
    with hub_errors(action):
        return Path(fetch(repository, filename, revision=revision, etag_timeout=TIMEOUT, tqdm_class=bar))


def _bar(tell: Callable[[int, int, float | None], None]) -> type[Any]:
    """A progress bar for the client that tells and draws nothing."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Told(tqdm):
        monitor_interval = 0  # no thread: peers fork
        # Else the client makes a second bar, of what came over the line, which is packed.
        update_transfer = set_transfer_postfix_str = lambda *_, **__: None

        def __init__(self, **how: Any) -> None:
            super().__init__(**how, file=StringIO(), mininterval=1.0)

        def display(self, *_: Any, **__: Any) -> None:
            total, rate = int(self.total or self.n), self.format_dict["rate"]
            if total > SMALL:
                tell(int(self.n), total, (total - self.n) / rate if rate else None)

    Told.set_lock(RLock())  # its own is of multiprocessing, and starts a process
    return Told


def repository_files(repository: str, revision: str | None = None) -> tuple[str, list[str]]:
    """The commit that `revision` (default: the newest) of a model repository stands for, and the files in it.

    What is in the cache serves when the Hub does not answer. Raises UsageError when there is no such repository or
    revision, or it is not to be read, HubUnreachable when the Hub does not answer and nothing is in the cache.
    """
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        with hub_errors(f"cannot look into {repository}{f' at {revision}' if revision else ''}"):
            info = HfApi().model_info(repository, revision=revision, timeout=TIMEOUT)
    except HubUnreachable as error:
        try:
            repositories = scan_cache_dir().repos
        except CacheNotFound:
            repositories = frozenset()
        cached = [repo for repo in repositories if (repo.repo_type, repo.repo_id) == ("model", repository)]
        kept = [commit for repo in cached for commit in repo.revisions]
        kept = [commit for commit in kept if revision in (None, commit.commit_hash, *commit.refs)]
        if not kept:
            raise error from error.__cause__
        files = {c: {str(file.file_path.relative_to(c.snapshot_path)) for file in c.files} for c in kept}
        whole = [c for c in kept if not any(files[c] < more for more in files.values())]  # as far as that can be told
        newest = max(whole, key=lambda commit: commit.last_modified)
        return newest.commit_hash, list(files[newest])
    return info.sha or revision or "main", [file.rfilename for file in info.siblings or []]


@contextmanager
def hub_errors(action: str, missing: str = NO_REPOSITORY) -> Iterator[None]:
    """Raise what the Hub's client raises in the block as one line that starts with `action`.

    UsageError for what the Hub refuses or the client cannot do, HubUnreachable for no answer or a failing one. missing:
    words for a repository that is not there.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # the client's stack, by any name

    no_hub = "the answer is not the Hub's (a proxy, a network that wants a login?); check the network and try again"
    known = (  # the first that matches counts
        (errors.HFValidationError, UsageError, "that is no name of a Hub repository; write OWNER/NAME"),
        (errors.GatedRepoError, UsageError, "ask for access on its page on the Hub, then run `tt login`"),
        (errors.RepositoryNotFoundError, UsageError, f"{missing} or run `tt login`"),
        (errors.RevisionNotFoundError, UsageError, "the repository has no such revision"),
        (errors.LocalEntryNotFoundError, HubUnreachable, "the Hugging Face Hub went away meanwhile; try again"),
        (errors.EntryNotFoundError, UsageError, "the repository has no such file; check the name"),
        (json.JSONDecodeError, HubUnreachable, no_hub),
        (UnicodeEncodeError, UsageError, "the token (HF_TOKEN, or of `tt login`) or a name has letters that none has"),
    )
    try:
        yield
    except tuple(kind for kind, _, _ in known) as error:
        told, words = next((told, words) for kind, told, words in known if isinstance(error, kind))
        raise told(f"{action}: {words}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UsageError(f"{action}: the Hub refuses access ({status}); run `tt login`") from error
        raise HubUnreachable(f"{action}: the Hub answered {status}; try again later") from error
    except (httpx.HTTPError, ConnectionError, TimeoutError) as error:
        raise HubUnreachable(
            f"{action}: the Hugging Face Hub cannot be reached ({first_line(error)}); check the network and try again"
        ) from error
    except RuntimeError as error:  # of the store of large files, which knows no others
        raise HubUnreachable(f"{action}: {first_line(error)}; try again later") from error
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # a proxy that it cannot use, an unknown split
        raise UsageError(f"{action}: {first_line(error)}") from error
    except OSError as error:  # a file of the cache or the stored login
        if isinstance(error, PermissionError) and error.errno is None:  # of the store of large files
            raise UsageError(f"{action}: the Hub refuses access; run `tt login`") from error
        if error.errno is None:  # of a library: a file that came in part, or has another content
            raise HubUnreachable(f"{action}: {first_line(error)}; check the network and the name") from error
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise TTError(f"{action}: {reason}; free space or set HF_HOME to a folder that you can write to") from error


@contextmanager
def quiet_and_bounded(timeout: float | None = None) -> Iterator[None]:
    """Silence the client's own remarks, which are worded here, and give each answer `timeout` (TIMEOUT) seconds."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import logging

    session, verbosity = get_session(), logging.get_verbosity()
    before, session.timeout = session.timeout, TIMEOUT if timeout is None else timeout
    logging.set_verbosity_error()
    try:
        yield
    finally:
        session.timeout = before
        logging.set_verbosity(verbosity)
