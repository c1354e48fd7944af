"""Exporting this machine's identities and importing them again."""

from __future__ import annotations

import fcntl
import stat
from pathlib import Path

import pytest

from tt_cli.auth.identities import export_identities, identities, import_identities
from tt_cli.errors import TTError, UsageError
from tt_cli.identity import peer_key
from tt_cli.run import RunConfig, folders, load_run


@pytest.fixture
def run() -> RunConfig:
    return load_run("emoji")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("a", "b"):
        peer_key.make_key_file(folder / f"{name}.key")
    return [(folder / f"{name}.key").read_bytes() for name in ("a", "b")]


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "trainer.key"
    path.with_name(".trainer.key.tmp").write_bytes(b"half a key")
    peer_key.make_key_file(path)
    assert [one.name for one in tmp_path.iterdir()] == ["trainer.key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_they_come_back_as_they_were(run: RunConfig, keys: list[bytes], tmp_path: Path) -> None:
    folder = folders.run_folder(run)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert identities(run) == {}
    for name, data in zip(("aux", "trainer-2"), keys, strict=True):
        (folder / f"{name}.key").write_bytes(data)
    file = tmp_path / "mine.json"
    exported = export_identities(run, file)
    assert list(exported) == ["aux", "trainer-2"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="mine.json exists: choose another name, or --force"):
        export_identities(run, file)
    assert export_identities(run, file, force=True) == exported

    for path in folder.glob("*.key"):
        path.unlink()
    assert import_identities(run, file) == exported == identities(run)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert import_identities(run, file) == exported  # the same again is no loss


def test_another_identity_is_not_lost_by_accident(run: RunConfig, keys: list[bytes], tmp_path: Path) -> None:
    path, file = folders.run_folder(run) / "trainer.key", tmp_path / "mine.json"
    path.write_bytes(keys[0])
    first = export_identities(run, file)
    path.write_bytes(keys[1])
    with pytest.raises(UsageError, match="another identity: it would be lost; say --force"):
        import_identities(run, file)
    assert path.read_bytes() == keys[1]
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="a peer on this machine uses"):
            import_identities(run, file, force=True)
    assert import_identities(run, file, force=True) == first
    assert path.read_bytes() == keys[0]


def test_what_is_no_export_is_one_line(run: RunConfig, keys: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    with pytest.raises(UsageError, match="there is no identity of run emoji here yet"):
        export_identities(run, file)
    with pytest.raises(UsageError, match="cannot read .*mine.json: No such file"):
        import_identities(run, file)
    for text in ("", "[]", "{}", '{"format": "tt-identity-1", "run": "x", "keys": 3}'):
        file.write_text(text)
        with pytest.raises(UsageError, match="is no exported identity") as caught:
            import_identities(run, file)
        assert "\n" not in str(caught.value)
    file.write_text('{"format": "tt-identity-1", "run": "other-1", "keys": {}}')
    with pytest.raises(UsageError, match="holds identities of run other-1"):
        import_identities(run, file)
    for name, key in (("../trainer", "AAAA"), ("trainer", "AAAA")):
        file.write_text(f'{{"format": "tt-identity-1", "run": "{run.identity}", "keys": {{"{name}": "{key}"}}}}')
        with pytest.raises(TTError, match="is no"):
            import_identities(run, file)
    assert identities(run) == {}
