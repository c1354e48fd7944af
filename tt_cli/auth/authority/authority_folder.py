"""An authority's own folder: its signing keys and where its database is, in one file for its owner alone.

Changing the key takes two steps in time. `rotate` makes the next key; run files that name both keys are handed out;
shortly before the day on which peers stop taking the old key, the authority begins to sign with the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, PlainSerializer, ValidationError

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import TTError, UsageError, os_errors
from tt_cli.identity.passes import authority_keys, begin_of, public_text
from tt_cli.run import RunConfig, folders

FILE = "authority.json"
SHORTEST_CHANGE = 2 * 3600.0  # seconds from `rotate` to the old key's end: passes live an hour
BACK = "set TT_HOME to the folder `home` that `tt init` made, or put a backup in place with `tt authority restore`"
EARLY = 86400.0  # the new key signs so long before the old one ends, or half the time where that is less


PrivateKey = Annotated[
    InstanceOf[Ed25519PrivateKey],
    BeforeValidator(lambda it: Ed25519PrivateKey.from_private_bytes(bytes.fromhex(it)) if isinstance(it, str) else it),
    PlainSerializer(lambda key: key.private_bytes_raw().hex()),
]
"""In a file: 64 hex digits."""


class SigningKey(BaseModel):
    """One of the authority's keys. begins: Unix time from which it signs."""

    model_config = ConfigDict(frozen=True)

    private: PrivateKey = Field(default_factory=Ed25519PrivateKey.generate)
    begins: float = 0.0

    @property
    def text(self) -> str:
        """Its public half, as in a run file."""
        return public_text(self.private)

    def secret(self, purpose: str) -> bytes:
        """32 bytes for another use, from which the key cannot be told (HKDF, RFC 5869)."""
        info = f"tt authority {purpose}".encode()
        return HKDF(hashes.SHA256(), 32, salt=None, info=info).derive(self.private.private_bytes_raw())


class AuthoritySettings(BaseModel):
    """The folder's file. keys: oldest first; until: the day on which the old one ends, while the key changes."""

    model_config = ConfigDict(frozen=True)

    format: Literal["tt-authority-1"] = "tt-authority-1"
    database: str  # SQLAlchemy's URL; "" for the SQLite file in the folder
    keys: tuple[SigningKey, ...] = Field(min_length=1)
    until: str = ""

    def signing(self, now: float) -> SigningKey:
        """The key that signs at that time."""
        return [key for key in self.keys if key.begins <= now][-1]

    def line(self) -> str:
        """The run file's `authority_key`."""
        texts = [key.text for key in reversed(self.keys)]
        return f"{texts[0]} {texts[1]} until {self.until}" if len(texts) == 2 else texts[0]


class AuthorityFolder:
    """The folder `authority` in a run's folder, mode 0700."""

    def __init__(self, run: RunConfig):
        self.path = folders.run_folder(run) / "authority"
        self.file = self.path / FILE
        self._line = run.membership.authority_key

    @property
    def exists(self) -> bool:
        """Tell whether there is an authority here."""
        return self.file.exists()

    def settings(self) -> AuthoritySettings:
        """The file's content now; another process may change it. Raises TTError."""
        try:
            return AuthoritySettings.model_validate_json(self.file.read_bytes())
        except FileNotFoundError:
            raise self.missing() from None
        except (OSError, ValueError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise TTError(f"{self.file} cannot be read ({reason}): give `tt authority restore` --force") from None

    def checked(self) -> AuthoritySettings:
        """The same of the authority that the run file names. Raises UsageError where it names another one, TTError."""
        settings = self.settings()
        if self._line is not None and not self.named:
            raise UsageError(f"the authority in {self.path} has another key than the run file: {BACK}")
        return settings

    @property
    def named(self) -> bool:
        """Tell whether the run file names one of the keys that are here."""
        named = {public_text(key) for key, _ in authority_keys(self._line)} if self._line else set()
        return any(key.text in named for key in self.settings().keys)

    def missing(self) -> UsageError:
        """The error where there is no authority. A second one is no help to a run that names its own."""
        if self._line is None:
            return UsageError(f"there is no authority in {self.path}: make one with `tt authority init`")
        return UsageError(f"there is no authority in {self.path}, and the run file names one: {BACK}")

    def write(self, settings: AuthoritySettings) -> None:
        """Replace the file. Raises TTError."""
        self._write(self.file, settings.model_dump_json())

    def proof_against(self, guilty: str) -> Path:
        """The file of what a peer was convicted by."""
        return self.path / "proofs" / f"{guilty}.accusation"

    def keep_proof(self, guilty: str, proof: bytes) -> None:
        """Write it down, for whoever asks. Raises TTError."""
        self._write(self.proof_against(guilty), proof)

    @staticmethod
    def _write(file: Path, content: bytes | str) -> None:
        with os_errors(f"cannot write {file}", "free space"):
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.parent.chmod(0o700)
            atomic_write(file, content, mode=PRIVATE)

    def database_url(self, settings: AuthoritySettings | None = None) -> str:
        """SQLAlchemy's URL of the database. settings: others than the folder's."""
        return (settings or self.settings()).database or f"sqlite:///{self.path / 'authority.db'}"

    def rotate(self, now: float, until: str | None) -> AuthoritySettings:
        """Make the next key, and keep the old one until that day; None: it has leaked, so it ends at once.

        Raises UsageError for a day that is too near, or while a change is under way.
        """
        settings = self.settings()
        if until is None:
            settings = AuthoritySettings(database=settings.database, keys=(SigningKey(),))
        else:
            try:
                left = begin_of(until) - now
            except ValueError:
                raise UsageError(f"--until {until}: write a day as in 2026-12-01") from None
            if left < SHORTEST_CHANGE:
                raise UsageError(f"--until {until}: that day begins (UTC) in less than two hours; name a later one")
            if settings.until and now < begin_of(settings.until):
                raise UsageError(f"the key changes already, until {settings.until}; wait for that day")
            begins = now + left - min(EARLY, left / 2)
            keys = (settings.keys[-1], SigningKey(begins=begins))
            settings = settings.model_copy(update={"keys": keys, "until": until})
        self.write(settings)
        return settings
