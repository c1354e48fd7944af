"""One key for libp2p and for signatures, kept for its owner alone and used by one process at a time."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2

from tt_cli.errors import TTError
from tt_cli.identity import peer_key
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity, peer_id_of


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Identity]:
    """A folder and the trainer's identity in it, which this process holds."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, claim_identity(folder, "trainer")


def place_key(folder: Path, kept: tuple[Path, Identity], name: str) -> Path:
    """Make a key without the work of finding primes."""
    path = folder / name
    path.write_bytes(kept[1].path.read_bytes())
    path.chmod(0o600)
    return path


def release(identity: Identity) -> None:
    identity.lock.close()


def test_it_is_made_once_and_readable_by_its_owner_alone(kept: tuple[Path, Identity]) -> None:
    folder, identity = kept
    assert identity.path == folder / "trainer.key"
    assert sorted(path.name for path in folder.iterdir()) == ["trainer.key", "trainer.lock"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_it_is_the_same_after_a_restart(tmp_path: Path, kept: tuple[Path, Identity]) -> None:
    path = place_key(tmp_path, kept, "trainer.key")
    before = path.read_bytes()
    for _ in range(2):
        again = claim_identity(tmp_path, "trainer")
        assert again.peer_id == kept[1].peer_id
        release(again)
    assert path.read_bytes() == before


def test_a_second_trainer_gets_another_while_the_first_lives(tmp_path: Path, kept: tuple[Path, Identity]) -> None:
    place_key(tmp_path, kept, "trainer.key")
    first, second = claim_identity(tmp_path, "trainer"), claim_identity(tmp_path, "trainer")
    assert (first.path.name, second.path.name) == ("trainer.key", "trainer-2.key")
    assert first.peer_id != second.peer_id
    release(first)
    again = claim_identity(tmp_path, "trainer")
    assert (again.path, again.peer_id) == (first.path, first.peer_id)
    release(again)
    release(second)


def test_there_is_a_limit(tmp_path: Path, kept: tuple[Path, Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.supervisor.slot.MOST", 1)
    place_key(tmp_path, kept, "trainer.key")
    first = claim_identity(tmp_path, "trainer")
    with pytest.raises(TTError, match="^1 peers of this run already work on this machine: stop one first$"):
        claim_identity(tmp_path, "trainer")
    release(first)


def test_a_second_auxiliary_peer_is_refused(tmp_path: Path, kept: tuple[Path, Identity]) -> None:
    path = place_key(tmp_path, kept, "aux.key")
    first = claim_identity(tmp_path, "aux")
    with pytest.raises(TTError, match="already works on this machine") as caught:
        claim_identity(tmp_path, "aux")
    assert str(path.with_suffix(".lock")) in str(caught.value)
    release(first)
    release(claim_identity(tmp_path, "aux"))


def ec_key() -> bytes:
    der = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return crypto_pb2.PrivateKey(key_type=crypto_pb2.ECDSA, data=der).SerializeToString()


@pytest.mark.parametrize("content", [b"", b"not a key\n", bytes(1000), ec_key()], ids=["empty", "text", "zeros", "ec"])
def test_a_file_that_is_no_rsa_key_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trainer.key"
    path.write_bytes(content)
    with pytest.raises(TTError) as caught:
        claim_identity(tmp_path, "trainer")
    words = str(caught.value)
    assert words.startswith(f"{path} is no identity file") and "move it away" in words
    assert "\n" not in words
    assert path.read_bytes() == content


def test_a_torn_key_is_one_line(tmp_path: Path, kept: tuple[Path, Identity]) -> None:
    path = place_key(tmp_path, kept, "trainer.key")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TTError, match="is no identity file") as caught:
        claim_identity(tmp_path, "trainer")
    assert "\n" not in str(caught.value)


def test_a_kill_while_the_key_was_made_leaves_no_trap(tmp_path: Path) -> None:
    unfinished = tmp_path / ".trainer.key.tmp"
    unfinished.write_bytes(b"half a key")
    unfinished.chmod(0o400)
    identity = claim_identity(tmp_path, "trainer")
    assert not unfinished.exists()
    assert identity.peer_id == str(PeerID.from_identity((tmp_path / "trainer.key").read_bytes()))
    release(identity)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TTError, match="cannot write .* No such file or directory: .*TT_HOME"):
        claim_identity(tmp_path / "missing", "trainer")


def test_a_supervisor_may_name_it(tmp_path: Path, kept: tuple[Path, Identity]) -> None:
    place_key(tmp_path, kept, "trainer-2.key")
    named = claim_identity(tmp_path, "trainer", "trainer-2")
    assert (named.path.name, named.peer_id) == ("trainer-2.key", kept[1].peer_id)
    with pytest.raises(TTError, match="another peer of this machine uses .*trainer-2.key: stop it first"):
        claim_identity(tmp_path, "trainer", "trainer-2")
    release(named)


def test_the_key_file_is_libp2ps_own_form(tmp_path: Path, kept: tuple[Path, Identity]) -> None:
    P2P.generate_identity(str(tmp_path / "theirs.key"))
    theirs, ours = (tmp_path / "theirs.key").read_bytes(), kept[1].path.read_bytes()
    for data in (theirs, ours):
        der = crypto_pb2.PrivateKey.FromString(data).data
        assert crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString() == data
        key = peer_key.private_key(data)
        assert key.key_size == 2048
        public = peer_key.public_der(key.public_key())
        assert peer_key.peer_id(public) == str(PeerID.from_identity(data))
        assert peer_key.public_key(public) == key.public_key()
    signature = peer_key.sign(peer_key.private_key(ours), b"words")
    assert kept[1].key.get_public_key().verify(b"words", base64.b64encode(signature))
    theirs_signed = base64.b64decode(kept[1].key.sign(b"words"))
    assert peer_key.signed(peer_key.private_key(ours).public_key(), theirs_signed, b"words")
    assert not peer_key.signed(peer_key.private_key(ours).public_key(), theirs_signed, b"other words")


def test_a_disk_without_room_for_the_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(peer_key, "make_key_file", full)
    with pytest.raises(TTError, match="cannot keep this peer's identity in .*trainer.key: No space left on device"):
        claim_identity(tmp_path, "trainer")
    assert not (tmp_path / "trainer.key").exists()


@pytest.mark.parametrize(
    "text", [b"", b"ssh-rsa", b"ssh-rsa AAAA", b"ssh-unheard-of AAAA", b"\xff\xfe", b"ssh-rsa !!!! x"]
)
def test_what_is_no_public_key_has_no_peer_id(text: bytes) -> None:
    with pytest.raises(ValueError):
        peer_id_of(text)


def test_other_kinds_of_keys_have_no_peer_id_here() -> None:
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with pytest.raises(ValueError, match="not an RSA key"):
        peer_id_of(text)
