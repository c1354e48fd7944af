"""Whether others can connect: what is announced, who dials whom, and what a person is told to do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hivemind.p2p import P2P
from testbed.launched import Launched
from testbed.namespaces import Network

from tt_cli.swarm import wire
from tt_cli.swarm.network import addresses as room
from tt_cli.swarm.network import reachability
from tt_cli.swarm.network.addresses import announceable, listen_and_announce, moved, steps_to_be_reached, tcp_addresses
from tt_cli.swarm.network.reachability import Astray, DialBack, Reachability, astray, reached_at, seen_at

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WAIT = 120.0


def test_bridges_loopback_and_link_local_addresses_are_not_announced() -> None:
    here = {
        "lo": "127.0.0.1",
        "eth0": "192.168.1.7",
        "docker0": "172.17.0.1",
        "br-12ab": "172.18.0.1",
        "virbr0": "192.168.122.1",
        "wlan0": "169.254.7.7",
        "tailscale0": "100.64.0.7",
        "ppp0": "203.0.113.7",
    }
    assert announceable(here, inside="") == ["192.168.1.7", "100.64.0.7", "203.0.113.7"]
    assert announceable({"lo": "127.0.0.1", "eth0": "172.17.0.2"}, inside="container") == []
    assert announceable({"lo": "127.0.0.1", "eth0": "172.17.0.2"}, inside="") == ["172.17.0.2"]


def test_what_is_listened_on_is_what_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "announceable", lambda: ["192.168.1.7", "203.0.113.7"])
    listen, announce = listen_and_announce("0.0.0.0", 0)
    ports = {port for _, port in tcp_addresses(listen)}
    assert [ip for ip, _ in tcp_addresses(listen)] == ["192.168.1.7", "203.0.113.7"] and announce == []
    assert len(ports) == 1 and ports != {0}, "one real port for all"
    there = [f"/{host}/tcp/4123" for host in ("ip4/127.0.0.1", "ip4/198.51.100.7", "dns4/example.org", "ip4/127.0.0.2")]
    listen, announce = listen_and_announce("0.0.0.0", 4123, there)
    expected = ["192.168.1.7", "203.0.113.7", "127.0.0.1", "127.0.0.2"]  # which is not the first of its interface
    assert [ip for ip, _ in tcp_addresses(listen)] == expected and announce == []
    assert tcp_addresses(["/ip4/127.0.0.1/tcp/65536", "/ip4/127.0.0.1/tcp/0"]) == []
    monkeypatch.setattr(room, "announceable", lambda: [])
    listen, announce = listen_and_announce("0.0.0.0", 4123)
    assert (listen, announce) == (["/ip4/0.0.0.0/tcp/4123"], ["/ip4/127.0.0.1/tcp/4123"])
    assert listen_and_announce("127.0.0.1", 0) == (["/ip4/127.0.0.1/tcp/0"], [])


def test_a_machine_that_moved_to_another_network_is_noticed() -> None:
    listening = ["/ip4/192.168.1.7/tcp/4123", "/ip4/10.0.0.7/tcp/4123"]
    assert not moved(listening, {"lo": "127.0.0.1", "wlan0": "192.168.1.7"})
    assert moved(listening, {"lo": "127.0.0.1", "wlan0": "192.168.2.9"})
    assert not moved(listening, {"lo": "127.0.0.1"}), "no network for now"
    assert not moved(["/ip4/0.0.0.0/tcp/4123"], {"wlan0": "192.168.2.9"})


def test_the_steps_have_the_persons_own_addresses_in_them() -> None:
    home = steps_to_be_reached(41234, "192.168.1.7", "203.0.113.7", inside="")
    again = "then start with --port 41234 --announce /ip4/203.0.113.7/tcp/41234"
    assert home == [f"forward TCP port 41234 of your router to 192.168.1.7, {again}"]
    docker = steps_to_be_reached(41234, "172.17.0.2", "203.0.113.7", inside="container")
    assert "-p 41234:41234" in docker[0] and again in docker[0]
    windows = steps_to_be_reached(41234, "172.29.5.5", "203.0.113.7", inside="WSL")
    assert "listenport=41234 connectaddress=172.29.5.5 connectport=41234" in windows[0] and "mirrored" in windows[0]
    server = steps_to_be_reached(41234, "203.0.113.7", "203.0.113.7", inside="")
    assert server == [f"let TCP port 41234 through this machine's firewall, {again}"]


def test_a_peer_is_dialled_where_it_is_seen_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_at(["/ip4/203.0.113.7/tcp/50123"]) == "203.0.113.7"
    relayed = "/ip4/198.51.100.1/tcp/31337/p2p/12D3KooWExamp1e/p2p-circuit"
    assert seen_at([relayed, "/ip4/203.0.113.7/tcp/50123"]) == "203.0.113.7"
    for addresses in ([], [relayed]):
        with pytest.raises(ValueError, match="through a relay"):
            seen_at(addresses)
    monkeypatch.setattr(reachability, "default_gateway", lambda: "172.17.0.1")
    with pytest.raises(ValueError, match="its own router"):
        seen_at(["/ip4/172.17.0.1/tcp/50123"])


@pytest.mark.parametrize("request_", [[], [0], [70000], [1, 2, 3, 4], ["22"], {"ports": [1]}, [[1]], 7])
def test_any_other_request_is_refused(request_: Any) -> None:
    with pytest.raises(ValueError, match="no request to be dialled"):
        wire.DIAL_REQUEST.read(msgpack.packb(request_))
    assert wire.DIAL_REQUEST.read(wire.DIAL_REQUEST.pack((1, 65535))) == (1, 65535)


def test_most_of_those_who_dialled_decide() -> None:
    yes, no = ("203.0.113.7", (41234,), ""), ("203.0.113.7", (), "")
    assert Reachability.of([]).reachable is None
    here = ("127.0.0.1", (), "")  # an aux peer on this machine, too busy to dial in time
    assert Reachability.of([here]).reachable is None and Reachability.of([here, yes]).reachable is True
    assert Reachability.of([("", (), "busy"), ("not an address", (), "")]).reachable is None
    assert Reachability.of([yes]).reachable and Reachability.of([yes, yes, no]).reachable
    twice = ("203.0.113.7", (41234, 41234), "")
    assert Reachability.of([yes, no]).reachable is Reachability.of([twice, no]).reachable is False
    assert Reachability.of([no]).seen == "203.0.113.7"
    assert Reachability.of([yes, yes, no]).place == ("203.0.113.7", 41234)


def test_a_peer_whose_router_has_another_address_now_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, there = "/ip4/203.0.113.7/tcp/4123", "/ip4/203.0.113.99/tcp/4123"
    yes, no, elsewhere = ("203.0.113.7", (4123,), ""), ("203.0.113.7", (), ""), ("203.0.113.99", (4123,), "")
    asked = list[Any]()
    monkeypatch.setattr(reachability, "addresses_of", lambda dht: [own])
    monkeypatch.setattr(reachability, "dialled_back", lambda run, dht, ports, records: Reachability.of(asked))

    def heard(*answers: Any, announce: Sequence[str] = ()) -> Astray | None:
        asked[:] = answers
        return astray(*[None] * 2, announce, ())  # type: ignore[arg-type]

    assert heard() is None is heard(elsewhere), "one may lie"
    assert heard(yes, yes, yes) is None is heard(elsewhere, elsewhere, yes), "some find it"
    moved_on = f"2 members can dial this peer at {there}, and others are told {own}"
    assert heard(elsewhere, no, elsewhere) == Astray(moved_on)
    advice = f"start it again with --announce {there}, or without --announce"
    assert heard(elsewhere, elsewhere, announce=[own]) == Astray(moved_on, advice)
    lost = Astray(f"2 members cannot dial this peer, which they see at {own}, and others are told {own}")
    assert heard(no, no) == lost == heard(no, no, announce=[own]), "it goes on in client mode"


def test_a_fresh_node_finds_this_very_peer_and_nobody_else_at_its_port() -> None:
    async def run() -> tuple[list[int], list[int]]:
        nodes = [await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"]) for _ in range(2)]
        try:
            ports = [tcp_addresses(map(str, await node.get_visible_maddrs()))[0][1] for node in nodes]
            free = room.free_port("127.0.0.1")
            return ports, await reached_at(nodes[0].peer_id, "127.0.0.1", [free, *reversed(ports)])
        finally:
            for node in nodes:
                await node.shutdown()

    ports, reached = asyncio.run(run())
    assert reached == ports[:1]


def test_nobody_is_dialled_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[object, ...]] = []

    async def reached(*where: object) -> list[int]:
        dialled.append(where)
        return [41234]

    async def list_peers() -> list[Any]:
        return [SimpleNamespace(peer_id=name, addrs=[f"/ip4/203.0.113.{name}/tcp/5"]) for name in (1, 2)]

    monkeypatch.setattr(reachability, "reached_at", reached)
    service = DialBack()
    service._p2p = SimpleNamespace(list_peers=list_peers)  # type: ignore[assignment]
    request = wire.DIAL_REQUEST.message((41234,))

    async def ask(peer: int) -> Any:
        answer = await service.rpc_dial_back(request, SimpleNamespace(remote_id=peer))  # type: ignore[arg-type]
        return wire.DIAL_ANSWER.read(answer)

    async def run() -> list[Any]:
        return [await ask(1), await ask(1), await ask(2)]

    first, again, other = asyncio.run(run())
    assert first == ("203.0.113.1", (41234,), "") and other[0] == "203.0.113.2"
    assert again == ("", (), "it dials others now") and len(dialled) == 2


JOIN = """
import json, sys
from pathlib import Path
from testbed.launched import tell_line
from tt_cli.run import load_run
from tt_cli.supervisor.reporter import die_with_parent
from tt_cli.swarm.network.dht_node import addresses_of, stop_dht
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.reachability import ListenOptions, start_reachable_dht

die_with_parent()
run, home, host, known = load_run("emoji"), Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
home.mkdir(parents=True, exist_ok=True)
dht, client_mode = start_reachable_dht(
    run, claim_identity(home, "trainer"), lambda event: tell_line(event.to_json()), initial_peers=known,
    listen=ListenOptions(host, 0, [], False), wait=lambda seconds: None,
)
addresses = [] if client_mode else addresses_of(dht)
tell_line(json.dumps({"kind": "joined", "client_mode": client_mode, "addresses": addresses}))
stop_dht(dht)
"""


@pytest.mark.netns
def test_members_dial_back_and_who_is_not_reached_goes_on_in_client_mode(tmp_path: Path) -> None:
    """One peer listens where it is seen; the other one elsewhere, as behind a router that forwards nothing."""
    inside = "10.79.0.103"
    with Network(hosts=3) as network:
        member, open_host, closed_host = network.hosts
        closed_host.run(["ip", "address", "add", f"{inside}/24", "dev", "eth0"])
        home = tmp_path / "member"
        home.mkdir()
        work = ["--work", "donor", "--home", home, "--host", member.address, "--size", 10_000_000]
        with member.entered():
            donor = Launched("member", "scripts.benchmarks.download", work, tmp_path / "member.log")
        with donor:
            donor.wait_for(lambda: donor.of("holding"), WAIT, "its record")
            known = donor.of("listening")[0]["addresses"]
            joining = [
                host.start(
                    [sys.executable, "-c", JOIN, str(tmp_path / host.address), where, *known],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for host, where in ((open_host, "0.0.0.0"), (closed_host, inside))
            ]
            told = [[json.loads(line) for line in one.communicate(timeout=WAIT)[0].splitlines()] for one in joining]
    (choice, joined), (refused, *steps, in_client_mode) = told
    assert (choice["what"], choice["value"], joined["client_mode"]) == ("reachable", "yes", False)
    (address,) = joined["addresses"]
    ((ip, port),) = tcp_addresses([address])
    assert ip == open_host.address and choice["reason"] == f"1 of 1 members could dial /ip4/{ip}/tcp/{port}"

    assert (refused["what"], refused["value"], in_client_mode["client_mode"]) == ("reachable", "no", True)
    assert f"none of 1 members could dial /ip4/{closed_host.address}/tcp/" in refused["reason"]
    words = " ".join(step["message"] for step in steps)
    assert "to be reached by others: " in words and f"--announce /ip4/{closed_host.address}/tcp/" in words
