"""A member that reduced wrongly loses its pass: the proof goes to the authority, which computes the sum again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import BytesIO
from pathlib import Path

import httpx2
import pytest
import torch
from auth.peers import Peer, closed_run, pointed
from auth.running import Running, begun
from hivemind.utils.crypto import RSAPrivateKey
from told import MOST, Told

from tt_cli.auth import pass_renewer as room
from tt_cli.auth.authority import http_api, issuer, proof_judge
from tt_cli.auth.authority.http_api import MOST_PROOFS
from tt_cli.auth.authority.issuer import CONVICTED, MOST_WRONG
from tt_cli.auth.authority.organiser import Organiser
from tt_cli.auth.authority.proof_judge import MOST_PROOF, NoProof, judged
from tt_cli.auth.authority.request_limits import MAX_BODY
from tt_cli.auth.authority_client import JUDGED_SECONDS, AuthorityClient
from tt_cli.auth.authority_requests import Rejected
from tt_cli.errors import TTError
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.organise.server_files import ServerFacts, rendered
from tt_cli.run import RunConfig, folders
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, part_hash
from tt_cli.swarm.allreduce.clipping.centered_clip import ReceivedPart, average_part
from tt_cli.swarm.allreduce.messages import (
    Accusation,
    Commitment,
    Inputs,
    Opening,
    RoundName,
    RoundRules,
    Signer,
    input_hash,
)

pytestmark = pytest.mark.slow


@cache
def signer(number: int) -> Signer:
    return Signer(RSAPrivateKey())


def proof(run: RunConfig, reducer: Signer, *, honest: bool = False) -> bytes:
    """Of one part of a round in which `reducer` reduced what one other member sent."""
    with torch.device("meta"):
        model = Dalle(DalleConfig.from_run(run))
    rules = RoundRules.of(run, {name: parameter.shape for name, parameter in model.named_parameters()})
    parts, sender = rules.layout.parts((1,)), signer(0)
    name, weight, spread = RoundName(run.identity, "5_abc", b"group"), 8.0, 0.01
    first = parts[0]
    sent = rules.codec.of(first.large).encode(torch.full((first.elements,), 0.01))
    hashes = (input_hash(sent), *(bytes(32) for _ in parts[1:]))
    opening = Opening(name, sender.peer_id, reducer.peer_id, weight, spread, hashes).sign(sender)
    inputs = Inputs((opening,), (1,)).pack()
    contribution = ReceivedPart(sender.peer_id, sent, weight, spread)
    right = average_part(rules.codec, rules.aggregation, [contribution], first.elements, first.large)
    outputs = (part_hash(right.encoded) if honest else bytes(HASH_BYTES), *(bytes(HASH_BYTES) for _ in parts[1:]))
    digest = hashlib.sha256(inputs).digest()
    commitment = Commitment(name, reducer.peer_id, (1,), 0, 0, digest, outputs).sign(reducer)
    return Accusation(commitment, inputs, 0, (sent,)).pack()


def judged_here(run: RunConfig, packed: bytes) -> str:
    told = heard(run, packed)
    if "reason" in told:
        raise NoProof(told["reason"])
    return told["guilty"]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(room, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(issuer, "judged", judged_here)
    with Running(life=3600.0) as one:
        yield one


def banned(running: Running) -> dict[str, str]:
    return {ban["name"]: ban["reason"] for ban in running.authority.store.bans()}


def heard(run: RunConfig, packed: bytes) -> dict[str, str]:
    """What the judge's process prints, in this one, which has loaded torch."""
    return proof_judge.main(BytesIO(json.dumps(run.to_toml()).encode() + b"\n" + packed))


def test_the_judge_computes_the_sum_again() -> None:
    run, guilty = closed_run(), {"guilty": signer(1).peer_id}
    assert heard(run, proof(run, signer(1))) == guilty
    assert heard(run, proof(run, signer(1), honest=True)) == {"reason": "the average is right"}
    for nothing in (b"", b"\xff" * 1000):
        assert heard(run, nothing) == {"reason": "no accusation"}
    other = run.replaced({"run.name": "other"})
    assert heard(other, proof(run, signer(1))) == {"reason": "an accusation of another run"}


def test_the_judge_is_told_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one program that it starts sees its environment: a shell that writes it down and goes on with Python."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nenv > {tmp_path}/environment\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for name in ("HF_TOKEN", "TT_DATABASE", "PGPASSWORD", "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "secret")
    run = closed_run()
    assert judged(run, proof(run, signer(1))) == signer(1).peer_id
    environment = (tmp_path / "environment").read_text()
    assert "OMP_NUM_THREADS=1" in environment and "secret" not in environment and "TT_" not in environment


def test_a_judge_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing about the proof, nor about who handed it in."""
    monkeypatch.setattr(proof_judge, "JUDGE_SECONDS", 0.01)
    with pytest.raises(TTError, match="no proof can be judged here within 0 s"):
        judged(closed_run(), b"")


def test_who_is_proven_guilty_is_banned(running: Running) -> None:
    """By the file that a peer's process keeps, without anybody's help; the second peer of a user bans the user."""
    told = Told()
    folder = folders.accusations(running.run)
    folder.mkdir()
    for number in (1, 2):
        guilty = signer(number).peer_id
        running.authority.issue_here(guilty, "Mallory")
        (folder / f"{guilty}.accusation").write_bytes(proof(running.run, signer(number)))
        if number == 1:
            with begun(running, told):
                told.wait(f"peer {guilty} made a wrong average; the authority has the proof and banned it")
            assert banned(running) == {guilty: CONVICTED}
            assert guilty in running.notice().banned_peers
    with begun(running, told):
        told.wait(f"peer {signer(2).peer_id} made a wrong average")
    assert banned(running).keys() == {signer(1).peer_id, signer(2).peer_id, "mallory"}
    kept = running.authority.folder.path / "proofs" / f"{signer(1).peer_id}.accusation"
    assert kept.read_bytes() == proof_of(folder, 1) and kept.stat().st_mode & 0o777 == 0o600
    with Organiser.at_work(running.run) as organiser:
        proved = [entry["peer_id"] for entry in organiser.store.trail(10) if entry["what"] == "proved"]
        assert proved == [signer(1).peer_id, signer(2).peer_id, signer(2).peer_id]  # the last is for the user
        assert organiser.unban("user", "mallory"), "with another key"
        assert not organiser.unban("peer", signer(1).peer_id), "whoever has the proof keeps it out, and hands it in"


def proof_of(folder: Path, number: int) -> bytes:
    return (folder / f"{signer(number).peer_id}.accusation").read_bytes()


def test_what_proves_nothing_bans_nobody(running: Running, tmp_path: Path) -> None:
    client = AuthorityClient(running.run, tmp_path / "trainer.key", lambda line, level: None)
    held = running.authority.issue_here(client.peer_id, "ada")
    running.authority.issue_here(signer(1).peer_id, "bob")
    with pytest.raises(Rejected, match="that proves nothing: the average is right"):
        client.accuse(proof(running.run, signer(1), honest=True), held)
    with pytest.raises(Rejected, match="never had a pass"):  # a key of the accuser's own making
        client.accuse(proof(running.run, signer(3)), held)
    assert not banned(running)
    assert [entry["who"] for entry in running.authority.store.trail(9) if entry["what"] == "accused wrongly"] == ["ada"]
    running.authority._wrong["ada"] = MOST_WRONG
    with pytest.raises(Rejected, match="ada has handed in 3 proofs that prove nothing"):
        client.accuse(proof(running.run, signer(1)), held)
    ticket = running.authority._seal("proof", 60.0, proof="", peer=client.peer_id, user="ada")
    with pytest.raises(Rejected, match="ada has handed in 3"):  # with a ticket from before
        running.authority.expects(ticket)
    client.close()


def test_only_members_hand_in_proofs_and_only_what_they_announced(running: Running) -> None:
    peer, run = Peer(), running.run.identity
    packed = b"x" * 100
    said = {"pass": "none.at.all", "proof": hashlib.sha256(packed).hexdigest()}
    with httpx2.Client(base_url=running.url, trust_env=False, timeout=240) as http:

        def announced() -> httpx2.Response:
            made = http.post("/v1/challenge", json={"peer_id": peer.peer_id, "purpose": "accuse"}).json()
            return http.post("/v1/accuse", json=peer.body("accuse", made, run, said))

        assert announced().status_code == 401
        said["pass"] = running.authority.issue_here(Peer(1).peer_id, "ada")  # another's: passes are no secret
        assert announced().status_code == 401
        said["pass"] = running.authority.issue_here(peer.peer_id, "ada")
        ticket = {"TT-Ticket": announced().json()["ticket"]}
        for body, code in ((b"y" * 100, 401), (b"x" * 101, 401), (bytes(MOST_PROOF + 1), 413), (packed, 403)):
            assert http.post("/v1/proofs", content=body, headers=ticket).status_code == code
        assert http.post("/v1/proofs", content=packed, headers={"TT-Ticket": "A" * 40}).status_code == 401
        running.authority.store.ban("peer", peer.peer_id, "", 0.0)
        assert announced().status_code == 403


def test_a_member_whose_proof_comes_slowly_keeps_no_other_member_out(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, here, go_on = b"x" * 100, threading.Semaphore(0), threading.Event()
    expects, digest = running.authority.expects, hashlib.sha256(packed).hexdigest()

    def noticed(ticket: str) -> str:
        here.release()  # it has its place when anything else is looked at
        return expects(ticket)

    monkeypatch.setattr(running.authority, "expects", noticed)

    def slow() -> Iterator[bytes]:
        yield packed[:1]
        go_on.wait(60)
        yield packed[1:]

    with httpx2.Client(base_url=running.url, trust_env=False, timeout=240) as http, ThreadPoolExecutor() as beside:

        def hand_in(user: str, content: bytes | Iterator[bytes] = packed) -> int:
            ticket = running.authority._seal("proof", 60.0, proof=digest, peer=signer(0).peer_id, user=user)
            answer = http.post("/v1/proofs", content=content, headers={"TT-Ticket": ticket})
            assert (answer.headers.get("Retry-After") == "10") == (answer.status_code == 429)
            return answer.status_code

        under_way = []
        for number in range(MOST_PROOFS):
            assert hand_in(f"bob {number}") == 403 and here.acquire(timeout=60), "it is judged, and proves nothing"
            under_way.append(beside.submit(hand_in, f"user {number}", slow()))
            assert here.acquire(timeout=60)
            assert hand_in("user 0") == 429 and here.acquire(timeout=60), "one of a user"
        assert hand_in("bob") == 429, "and so many in memory"
        go_on.set()
        assert [one.result() for one in under_way] == [403] * MOST_PROOFS
        assert hand_in("bob") == 403


@contextlib.contextmanager
def behind(program: str, running: Running, folder: Path, most: str = "32m") -> Iterator[RunConfig]:
    """The run whose authority is reached through a real proxy with the file that `tt init` writes, but for TLS."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name = {"nginx": "nginx.conf", "caddy": "Caddyfile"}[program]
    text = rendered(ServerFacts("mine"))[name].replace("127.0.0.1:8470", f"127.0.0.1:{running.port}")
    if program == "nginx":
        text = text[text.rindex("server {") :].replace("client_max_body_size 32m", f"client_max_body_size {most}")
        text = re.sub(r"listen .*?443 ssl;|ssl_.*?;", "", text).replace("server {", f"server {{ listen {port};", 1)
        places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy"))
        text = f"user root; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {places} {text} }}"
        command = ["/usr/sbin/nginx", "-e", "stderr", "-g", "daemon off;", "-c"]
    else:
        text = "{\nadmin off\n}\n" + text.replace("tt.example.org", f"http://:{port}")
        command = ["caddy", "run", "--adapter", "caddyfile", "--config"]
    (folder / name).write_text(text)
    environment = {"PATH": "/usr/bin", "HOME": str(folder)}
    with subprocess.Popen([*command, str(folder / name)], env=environment, stderr=subprocess.PIPE) as proxy:
        deadline = time.monotonic() + MOST
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            assert proxy.poll() is None and time.monotonic() < deadline, proxy.stderr and proxy.stderr.read()
        yield pointed(running.run, f"http://127.0.0.1:{port}", running.key)
        proxy.terminate()


@pytest.mark.debian
@pytest.mark.parametrize("program", ["nginx", "caddy"])
def test_the_largest_proof_comes_through_the_shipped_proxies(program: str, running: Running, tmp_path: Path) -> None:
    with behind(program, running, tmp_path) as run:
        client = AuthorityClient(run, tmp_path / "trainer.key", lambda line, level: None)
        held = running.authority.issue_here(client.peer_id, "ada")
        with pytest.raises(Rejected, match="that proves nothing: no accusation"):
            client.accuse(bytes(MOST_PROOF), held)
        answer = httpx2.post(f"{run.membership.authority}/v1/join", content=bytes(MAX_BODY + 1), trust_env=False)
        assert answer.status_code == 413, "no other request may be as large"
        client.close()


def test_the_proxy_waits_for_as_long_as_the_client() -> None:
    (block,) = re.findall(r"location = /v1/proofs {(.*?)}", rendered(ServerFacts("mine"))["nginx.conf"], re.DOTALL)
    assert f"client_max_body_size {MOST_PROOF >> 20}m;" in block
    assert f"proxy_read_timeout {JUDGED_SECONDS:.0f}s;" in block


def test_nor_is_one_that_takes_too_long_sent_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "PROOF_SECONDS", 0.0)
    told = Told()
    folder = folders.accusations(running.run)
    folder.mkdir()
    for number in (1, 2):
        (folder / f"{signer(number).peer_id}.accusation").write_bytes(bytes(MOST_PROOF))
    with begun(running, told):
        for number in (1, 2):
            told.wait(f"the proof against peer {signer(number).peer_id} is not taken: the line to the authority")
        third = signer(3).peer_id
        (folder / f"{third}.accusation").write_bytes(b"")
        told.wait(f"the proof against peer {third} is not taken")
    assert len(told.found("is not taken")) == 3


@pytest.mark.debian
def test_a_proof_that_a_proxy_finds_too_large_is_told_once_and_not_sent_again(running: Running, tmp_path: Path) -> None:
    told = Told()
    folder = folders.accusations(running.run)
    folder.mkdir()
    guilty = signer(1).peer_id
    (folder / f"{guilty}.accusation").write_bytes(bytes(MOST_PROOF))
    with behind("nginx", running, tmp_path, most="64k") as run, begun(running, told, run=run):
        told.wait(
            f"the proof against peer {guilty} is not taken: the authority of run {run.run.name}, or the proxy before"
        )
        small = signer(2).peer_id  # another's is still handed in, so the first was passed over meanwhile
        (folder / f"{small}.accusation").write_bytes(b"x" * 100)
        told.wait(f"the proof against peer {small} is not taken: ")
    assert sum(guilty in line for line in told.lines) == 1


def test_the_organisers_own_peer_hands_in_without_the_network(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer, "judged", judged)  # in a process of its own
    here = room.OnThisHost(running.run, tmp_path / "aux.key", "organiser")
    running.authority.issue_here(signer(1).peer_id, "bob")
    assert here.accuse(proof(running.run, signer(1)), "") == signer(1).peer_id
    assert banned(running) == {signer(1).peer_id: CONVICTED}
    here.close()
