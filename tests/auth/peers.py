"""Peers that ask an authority by hand, and authorities to be asked: in this process with a clock of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key

from tt_cli.auth.authority import authority_server
from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority.issuer import Authority, Challenge, IssuedPass
from tt_cli.auth.authority_requests import Purpose, RenewRequest, signed_message
from tt_cli.identity import peer_key
from tt_cli.identity.passes import encode
from tt_cli.run import RunConfig, load_run

START = 1_800_000_000.0


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = START):
        self.now = now

    def __call__(self) -> float:
        return self.now


def closed_run(**changes: Any) -> RunConfig:
    """A run of the organisation acme; its authority is not named yet."""
    part = {"kind": "organisation", "organisation": "acme", **changes}
    return load_run("emoji").replaced({f"membership.{name}": value for name, value in part.items()})


def pointed(run: RunConfig, url: str, key: str, **changes: Any) -> RunConfig:
    """The run file that volunteers get."""
    part = {"authority": url, "authority_key": key, **changes}
    return run.replaced({f"membership.{name}": value for name, value in part.items()})


def made_authority(clock: Clock, database: str = "", run: RunConfig | None = None) -> Authority:
    """A new one, in this machine's folder."""
    run = run or closed_run()
    authority_server.found(run, database)
    folder = AuthorityFolder(run)
    return Authority(run, folder, authority_server.open_store(folder), clock=clock)


@cache
def _key(number: int) -> RSAPrivateKey:
    return generate_private_key(public_exponent=65537, key_size=2048)


class Peer:
    """A peer's key, and the requests that it signs. Peers of the same number have the same key."""

    def __init__(self, number: int = 0):
        self.key = _key(number)
        self.public = peer_key.public_der(self.key.public_key())
        self.peer_id = peer_key.peer_id(self.public)

    def signature(self, purpose: Purpose, authority_key: str, run: str, nonce: str, said: dict[str, Any]) -> bytes:
        return peer_key.sign(self.key, signed_message(purpose, authority_key, run, nonce, self.peer_id, said))

    def renewal(self, authority: Authority, held: str) -> str:
        """The whole of it."""
        return self.introduced(authority, held).text

    def introduced(self, authority: Authority, held: str, *addresses: str) -> IssuedPass:
        """A renewal of one that is at these addresses, as far as it says."""
        said = {"addresses": list(addresses)} if addresses else {}
        request = self.renew_request(authority.challenge(self.peer_id, "renew"), authority.run, held, **said)
        return authority.renew(request)

    def renew_request(self, challenge: Challenge, run: RunConfig, held: str, **said: Any) -> RenewRequest:
        """As it is sent."""
        return RenewRequest(**self.body("renew", vars(challenge), run.identity, {"pass": held, **said}))

    def body(self, purpose: Purpose, challenge: dict[str, Any], run: str, said: dict[str, Any]) -> dict[str, Any]:
        """A request's JSON."""
        signature = self.signature(purpose, challenge["key"], run, challenge["nonce"], said)
        return {"key": encode(self.public), "nonce": challenge["nonce"], "signature": encode(signature), **said}


class Served:
    """A real `tt authority serve` process on loopback."""

    def __init__(self, file: Path, environment: dict[str, str], *flags: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tt_cli.cli.main", "authority", "serve", str(file)]
            + ["--host", "127.0.0.1", "--port", "0", "--most-peers", "64", *flags],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.readline()
        found = re.search(r"listens on port (\d+); its key: (ed25519:.*)", self.output)
        assert found is not None, self.output + self.process.communicate()[0]
        self.port, self.key = int(found[1]), found[2]
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self) -> str:
        """Stop it; all that it printed."""
        self.process.terminate()
        self.output += self.process.communicate(timeout=240)[0]
        return self.output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


class Member:
    """A real process of a volunteer's supervisor, less its screen: `member.py`."""

    def __init__(self, file: Path, environment: dict[str, str], *flags: str):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("member.py")), str(file), *flags],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []

    def until(self, *kinds: str) -> dict[str, Any]:
        """Its next line of one of these kinds: "said", "admitted", "refused", "failed"."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                found = {"kind": "printed", "words": line}
            self.lines.append(found)
            if found["kind"] in kinds:
                return found
        raise AssertionError(self.lines)

    def end(self) -> int:
        """Have it leave. Its exit code."""
        output, _ = self.process.communicate(timeout=240)
        self.lines += [{"kind": "printed", "words": line} for line in output.splitlines()]
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
