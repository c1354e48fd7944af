"""An authority's signatures without its service: passes and bans laid where a peer's supervisor would put them."""

from __future__ import annotations

import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tt_cli.identity.passes import Notice, Pass, public_text, sign
from tt_cli.identity.peer_key import make_key_file, peer_id, private_key, public_der
from tt_cli.run import RunConfig

HOUR = 3600.0


class Issuer:
    """Signs for one run. Another issuer's passes are forged ones."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._number = 0

    def closed(self, run: RunConfig) -> RunConfig:
        """The run, for members with a pass of this issuer only."""
        return run.replaced(
            {
                "membership.kind": "organisation",
                "membership.organisation": "lab",
                "membership.authority": "http://127.0.0.1:9",  # nobody asks it: the passes are there
                "membership.authority_key": public_text(self._key),
            }
        )

    def admit(self, home: Path, run: RunConfig, role: str, user: str, *, lasts: float = HOUR) -> str:
        """Give the peer whose TT_HOME this is a key, if it has none, and a pass; returns its peer id.

        lasts: seconds from now; below zero, it expired so long ago.
        """
        key = key_file(home, run, role)
        if not key.exists():
            key.parent.mkdir(parents=True, exist_ok=True)
            make_key_file(key)
        owner = peer_id(public_der(private_key(key.read_bytes()).public_key()))
        expires = time.time() + lasts
        issued = Pass(user, owner, run.identity, min(time.time(), expires) - HOUR, expires)
        key.with_suffix(".pass").write_text(sign(issued, self._key), encoding="ascii")
        return owner

    def ban(self, homes: list[Path], run: RunConfig, users: list[str]) -> str:
        """Tell these peers that nobody of these users may take part; returns the notice."""
        self._number += 1
        notice = Notice(run.identity, self._number, time.time(), frozenset(users), frozenset(), "", None)
        text = sign(notice, self._key)
        for home in homes:
            folder = home / "runs" / run.identity
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "notice").write_text(text, encoding="ascii")
        return text


def key_file(home: Path, run: RunConfig, role: str) -> Path:
    """Of the first peer of this role below a TT_HOME."""
    return home / "runs" / run.identity / f"{role}.key"
