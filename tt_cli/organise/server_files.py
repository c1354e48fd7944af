"""The files that keep a run's aux peer running on a server: compose, Prometheus, systemd, nginx, Caddy.

One source, templates/, for what `tt init` writes and for the examples in configs/deploy/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tt_cli.organise.questions import multiaddr_host
from tt_cli.run import RunConfig

TEMPLATES = Path(__file__).parent / "templates"
NOT_KNOWN = "tt.example.org"
# Says in .env who owns home/ on this machine, where the folder may have been copied to.
OWNER = 'sed -i "s/^TT_UID=.*/TT_UID=$(stat -c %u home)/; s/^TT_GID=.*/TT_GID=$(stat -c %g home)/" .env'
_PLACE = re.compile(r"@\{(\w+)\}")


@dataclass(frozen=True)
class ServerFacts:
    """Facts that differ from run to run. address: IP or host name of the server. authority: its URL. Both may be "".

    package: what pip installs for the run, in a clone of tt's source.
    """

    name: str
    port: int = 31337
    address: str = ""
    authority: str = ""
    package: str = RunConfig.package

    @classmethod
    def of(cls, run: RunConfig, address: str) -> ServerFacts:
        """The facts in a run file."""
        return cls(run.run.name, run.peers.coordinator_port, address, run.membership.authority or "", run.package)

    @property
    def hosts(self) -> list[str]:
        """Names under which a browser or a peer reaches the server by https; certificates are for names."""
        authority = urlsplit(self.authority).hostname or ""
        named = [host for host in (self.address, authority) if multiaddr_host(host).startswith("/dns4/")]
        return list(dict.fromkeys(named)) or [NOT_KNOWN]

    def flags(self, proxy: str) -> list[str]:
        """Flags of `tt aux-peer`, behind the run file. proxy: the address from which the TLS proxy asks."""
        flags = ["--plain", "--port", str(self.port)]
        if host := multiaddr_host(self.address):
            flags += ["--announce", f"{host}/tcp/{self.port}"]
        if self.authority:
            flags.append("--authority")
        return [*flags, "--trusted-proxy", proxy]


def rendered(facts: ServerFacts) -> dict[str, str]:
    """File name to text."""
    inside = ["/run/tt/run.toml", *facts.flags("172.30.84.1")]
    values = {
        "name": facts.name,
        "owner": OWNER,
        "package": facts.package,
        "port": str(facts.port),
        "assistant_port": str(facts.port + 1),
        "host": facts.hosts[0],
        "hosts": " ".join(facts.hosts),
        "domains": " ".join(f"-d {host}" for host in facts.hosts),
        "caddy_hosts": ", ".join(facts.hosts),
        "compose_flags": ", ".join(f'"{flag}"' for flag in inside),
        "service_flags": " ".join(["run.toml", *facts.flags("127.0.0.1")]),
    }
    names = {"tt.service": f"tt-{facts.name}.service"}
    return {
        names.get(path.name, path.name): _PLACE.sub(lambda match: values[match[1]], path.read_text(encoding="utf-8"))
        for path in sorted(TEMPLATES.iterdir())
    }
