"""What can go wrong with the Hub, as one line, and how far a download has come."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_standin import HubStandin
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from testbed.spawned import spawned

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import HubUnreachable, _bar, download, http_client, hub_errors, on_bytes, repository_files
from tt_cli.hub.repository import open_repository


def test_an_answer_of_somebody_else_is_one_line() -> None:
    with pytest.raises(HubUnreachable, match="cannot look: the answer is not the Hub's"), hub_errors("cannot look"):
        json.loads("<html>Log in to this network</html>")


def heard() -> list[tuple[int, int]]:
    """In the client's process: what is told of a download, and of the same file once more."""
    told: list[tuple[int, int]] = []
    on_bytes.set(lambda received, total, left: told.append((received, total)))
    download("acme/base", "tokenizer.json")  # too small to tell of
    for _ in range(2):
        assert download("acme/base", "model.safetensors").stat().st_size == 2_000_000
    return told


def test_a_download_tells_how_far_it_has_come(hub: HubStandin, tmp_path: Path) -> None:
    hub.put("model", "acme/base", {"model.safetensors": bytes(2_000_000), "tokenizer.json": b"{}"})
    with spawned(hub.environment(tmp_path)) as call:
        told = call(heard).result()
    assert told[0] == (0, 2_000_000) and told[-1] == (2_000_000, 2_000_000) and told == sorted(told)


def test_a_download_tells_one_number_where_the_client_counts_two() -> None:
    told: list[tuple[int, int]] = []
    bar = _bar(lambda received, total, left: told.append((received, total)))
    counts = {"total_bytes_completed": 2_000_000, "total_transfer_bytes_completed": 1_200_000, "total_bytes": 2_000_000}
    rates = dict.fromkeys(("total_bytes_completion_rate", "total_transfer_bytes_completion_rate"), 1.0)
    words: dict[str, Any] = {"reconstruction_desc": "", "log_level": 30}
    with XetDownloadProgressReporter(**words, total=2_000_000, tqdm_class=bar) as reporter:
        reporter.update_progress(SimpleNamespace(**counts, **rates))
    assert set(told) == {(0, 2_000_000), (2_000_000, 2_000_000)}


def refusal() -> str:
    """In the client's process: what is said of a large file that cannot be fetched."""
    with pytest.raises(HubUnreachable) as failure:
        download("acme/base", "model.safetensors")
    return str(failure.value)


def test_a_store_of_large_files_that_fails_is_one_line(hub: HubStandin, tmp_path: Path) -> None:
    """The Hub gives them out elsewhere, by a client with errors of its own."""
    hub.put("model", "acme/base", {"model.safetensors": bytes(2_000_000)}, access="broken store")
    with spawned(hub.environment(tmp_path) | {"HF_HUB_DISABLE_XET": "0"}) as call:
        words = call(refusal).result()
    assert words.startswith("cannot fetch model.safetensors of acme/base: ") and words.endswith("; try again later")
    assert "404" in words and "\n" not in words


def test_a_store_of_large_files_may_refuse() -> None:
    with (
        pytest.raises(UsageError, match="cannot look: the Hub refuses access; run `tt login`"),
        hub_errors("cannot look"),
    ):
        raise PermissionError("expired")


def by_proxy() -> list[str]:
    """In the client's process: what is said of all that would connect."""
    said = []
    for connect in (
        lambda: download("acme/base", "model.safetensors"),
        lambda: open_repository("acme/base", "cannot look"),
        http_client,
    ):
        with pytest.raises(UsageError) as failure:
            connect()
        said.append(str(failure.value))
    return said


@pytest.mark.parametrize(("proxy", "words"), [("socks5", "socksio"), ("socks", "Unknown scheme for proxy URL")])
def test_a_proxy_that_is_not_to_be_used_is_one_line(tmp_path: Path, hub: HubStandin, proxy: str, words: str) -> None:
    """SOCKS without its package, and the word that desktops write."""
    with spawned(hub.environment(tmp_path) | {"ALL_PROXY": f"{proxy}://127.0.0.1:1"}) as call:
        said = call(by_proxy).result()
    begins = ("cannot fetch model.safetensors of acme/base: ", "cannot look: ", "cannot connect: ")
    for line, begin in zip(said, begins, strict=True):
        assert line.startswith(begin) and words in line and "\n" not in line


def test_only_a_full_disk_is_one() -> None:
    """Libraries raise OSErrors of their own."""
    for error, kind, words in (
        (OSError("Consistency check failed: 5 bytes\nsee there"), HubUnreachable, "failed: 5 bytes; check the network"),
        (OSError(28, "No space left on device", "model"), TTError, "model: No space left on device; free space or set"),
    ):
        with pytest.raises(kind, match=words), hub_errors("cannot look"):
            raise error


def files_of(taken: list[str]) -> set[str]:
    """In the client's process: the names that are told of a repository, after these of its files were taken."""
    for file in taken:
        download("acme/base", file)
    return set(repository_files("acme/base")[1])


def test_without_the_hub_what_is_whole_serves_before_what_came_in_part(tmp_path: Path, hub: HubStandin) -> None:
    names = ["config.json", "model.safetensors"]
    with spawned(hub.environment(tmp_path)) as call:
        for version, taken in (("older", names), ("newer", names[:1])):
            hub.put("model", "acme/base", dict.fromkeys(names, version))
            assert call(files_of, taken).result() == set(names)
        hub.fault("/api/models", times=1000)
        assert call(files_of, []).result() == set(names)
