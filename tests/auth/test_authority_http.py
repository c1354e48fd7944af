"""The authority over HTTP: as its own description says, with distinct answers, within limits, and secrets kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from auth.peers import START, Clock, Peer, closed_run, made_authority
from auth.running import Running
from fastapi import FastAPI
from hub_standin import HubStandin
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from told import MOST

from tt_cli.auth.authority import authority_server, hub_client, request_limits
from tt_cli.auth.authority import http_api as room
from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority.authority_server import MOST_OF_ADDRESS
from tt_cli.auth.authority.http_api import Limits, make_app
from tt_cli.auth.authority.issuer import Authority
from tt_cli.auth.authority.member_store import metadata
from tt_cli.auth.authority_requests import MOST_ADDRESSES
from tt_cli.errors import TTError
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.identity.passes import encode, read_pass
from tt_cli.identity.rate_limit import RateLimit, address_key
from tt_cli.supervisor.http_server import HttpOptions, HttpServer

UNLIMITED = RateLimit(burst=10**9, per_second=1e9)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    """One for the module; its Hub is out of reach, so what would need it is a 503."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TT_HOME", str(tmp_path_factory.mktemp("authority")))
        with closing((one := made_authority(Clock())).store):
            yield one


def asked(
    authority: Authority,
    limits: Limits,
    *requests: tuple[str, str, Any],
    client: str = "192.0.2.7",
    headers: dict[str, str] | None = None,
) -> list[Any]:
    """The answers of the service to requests one after the other (method, path, JSON)."""

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(make_app(authority, limits), client=(client, 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            return [await http.request(method, path, json=body, headers=headers) for method, path, body in requests]

    return asyncio.run(ask())


def unlimited() -> Limits:
    return Limits(asking=UNLIMITED, proving=UNLIMITED)


OPERATIONS = [
    ("/v1/facts", "GET"),
    ("/v1/notice", "GET"),
    ("/v1/challenge", "POST"),
    ("/v1/join", "POST"),
    ("/v1/renew", "POST"),
    ("/v1/accuse", "POST"),
    ("/v1/proofs", "POST"),
    ("/v1/login", "POST"),
    ("/v1/login/poll", "POST"),
]


def test_all_that_it_does_is_tested(authority: Authority) -> None:
    described = make_app(authority).openapi()["paths"]
    assert [(path, method.upper()) for path in described for method in described[path]] == OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (path, method, mode)
        for path, method in OPERATIONS
        for mode in GenerationMode
        if (path, mode) != ("/v1/facts", GenerationMode.NEGATIVE)  # it takes nothing that could be wrong
    ],
)
def test_it_does_what_its_description_says(authority: Authority, path: str, method: str, mode: GenerationMode) -> None:
    """Whatever is sent: no crash, no answer that the description does not know, none of another form."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(authority, unlimited()))
    refusals = schema.config.checks.negative_data_rejection
    refusals.expected_statuses = [*refusals.expected_statuses, "413"]  # too long is a refusal too

    @settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def try_it(case: schemathesis.Case) -> None:
        case.call_and_validate()

    try_it()


def challenge(authority: Authority, peer: Peer, purpose: str = "join") -> dict[str, Any]:
    body = {"peer_id": peer.peer_id, "purpose": purpose}
    answer = asked(authority, unlimited(), ("POST", "/v1/challenge", body))[0]
    assert answer.status_code == 200
    content: dict[str, Any] = answer.json()
    return content


def test_a_pass_is_renewed_over_http(authority: Authority) -> None:
    peer, run = Peer(), authority.run.identity
    held = authority.issue_here(peer.peer_id, "ada")
    body = peer.body("renew", challenge(authority, peer, "renew"), run, {"pass": held})
    first, again = asked(authority, unlimited(), ("POST", "/v1/renew", body), ("POST", "/v1/renew", body))
    assert read_pass(first.json()["pass"], authority.folder.settings().line(), run, START).user == "ada"
    assert (again.status_code, again.json()) == (401, {"detail": "the nonce has been used already"})


def test_who_renews_says_where_it_is_and_the_next_one_is_told(authority: Authority) -> None:
    one, other, run = Peer(), Peer(1), authority.run.identity
    place = f"/ip4/203.0.113.7/tcp/31337/p2p/{one.peer_id}"

    def renewed(peer: Peer, **said: Any) -> Any:
        held = {"pass": authority.issue_here(peer.peer_id, peer.peer_id), **said}
        body = peer.body("renew", challenge(authority, peer, "renew"), run, held)
        return asked(authority, unlimited(), ("POST", "/v1/renew", body))[0]

    assert renewed(one, addresses=[place]).json()["members"] == []
    assert renewed(other).json()["members"] == [place]
    for wrong in (["nonsense"], [place] * (MOST_ADDRESSES + 1), "nonsense", [place + "a" * 200], [place + "/\n"]):
        assert renewed(one, addresses=wrong).status_code == 422


def test_the_facts_and_the_notice(authority: Authority) -> None:
    facts, notice = asked(authority, unlimited(), ("GET", "/v1/facts", None), ("GET", "/v1/notice", None))
    assert facts.json() == {
        "run": authority.run.identity,
        "organisation": "acme",
        "authority_key": authority.folder.settings().line(),
        "ways": ["hub", "token"],
        "pass_seconds": 3600.0,
        "time": START,
    }
    assert notice.text == authority.notice()[1]
    assert notice.headers["ETag"] == f'"{authority.notice()[0]}"'
    assert notice.headers["content-type"].startswith("text/plain")


def test_answers_are_distinct_and_in_words(authority: Authority) -> None:
    peer, run = Peer(3), authority.run.identity
    proof = {"proof": {"way": "hub", "user": "ada"}}
    no_hub = peer.body("join", challenge(authority, peer), run, proof)
    unsigned = {**no_hub, "signature": encode(b"x" * 256)}
    banned = peer.body(
        "renew", challenge(authority, peer, "renew"), run, {"pass": authority.issue_here(peer.peer_id, "eve")}
    )
    authority.store.ban("user", "eve", "", START)
    long = {**no_hub, "nonce": "n" * 20_000}
    wrong = {**no_hub, "proof": {"way": "token", "token": ["hf_secret"]}}
    answers = asked(
        authority,
        unlimited(),
        ("POST", "/v1/join", no_hub),
        ("POST", "/v1/join", no_hub),
        ("POST", "/v1/join", unsigned),
        ("POST", "/v1/renew", banned),
        ("POST", "/v1/join", long),
        ("POST", "/v1/join", wrong),
        ("POST", "/v1/login", {"key": encode(peer.public)}),
        ("POST", "/v1/login/poll", {"handle": "A" * 40}),
        ("POST", "/v1/login", {"key": encode(b"no key of a peer")}),
        ("GET", "/v1/nothing", None),
    )
    authority.store.unban("user", "eve", START)
    assert [answer.status_code for answer in answers] == [503, 503, 401, 403, 413, 422, 403, 401, 401, 404]
    details = [answer.json()["detail"] for answer in answers]
    assert details[0].startswith("the Hugging Face Hub cannot be reached")
    assert details[2] == "the signature is not that of the peer's key"
    assert details[3] == "user eve is banned from this run: ask the run's organiser"
    assert details[4] == "the body is longer than 16384 bytes"
    assert details[5].startswith("proof.token.token: ") and "hf_secret" not in details[5]
    assert answers[0].headers["Retry-After"] == "5"


def test_who_asks_too_often_waits(authority: Authority) -> None:
    clock = Clock()
    limits = Limits(asking=UNLIMITED, proving=RateLimit(burst=3, per_second=0.5, clock=clock))
    peer = Peer()
    one = ("POST", "/v1/challenge", {"peer_id": peer.peer_id})
    answers = asked(authority, limits, one, one, one, one)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert (answers[3].json(), answers[3].headers["Retry-After"]) == ({"detail": "asked too often: wait 2 s"}, "2")
    assert asked(authority, limits, one, client="192.0.2.8")[0].status_code == 200
    clock.now += 2
    assert asked(authority, limits, one)[0].status_code == 200


def test_only_who_is_proven_to_be_a_user_uses_up_what_that_user_may_ask() -> None:
    """Strangers that name her, with their own keys or with signatures that are none, cost ada nothing."""
    run = closed_run()
    authority_server.found(run)
    folder = AuthorityFolder(run)
    with closing(authority_server.open_store(folder)) as store:
        authority = Authority(run, folder, store, most_peers=1, clock=Clock())
        ada, other = Peer(), Peer(1)
        held = authority.issue_here(ada.peer_id, "ada")
        named = other.body("join", challenge(authority, other), run.identity, {"proof": {"way": "hub", "user": "ada"}})
        forged = {**ada.body("renew", challenge(authority, ada, "renew"), run.identity, {"pass": held})}
        forged["signature"] = encode(b"x" * 256)
        tries = [("POST", "/v1/join", named), ("POST", "/v1/renew", forged)] * 5
        assert [answer.status_code for answer in asked(authority, unlimited(), *tries)] == [503, 401] * 5
        codes = []
        for _ in range(3):
            body = ada.body("renew", challenge(authority, ada, "renew"), run.identity, {"pass": held})
            codes.append(asked(authority, unlimited(), ("POST", "/v1/renew", body))[0].status_code)
        assert codes == [200, 200, 429]


def test_who_sends_proofs_again_and_again_leaves_the_places_to_others() -> None:
    with closing((authority := made_authority(Clock())).store):
        limits = Limits(asking=UNLIMITED, proving=UNLIMITED, sending=RateLimit(burst=1.0, per_second=1e-6))

        def handed_in(user: str) -> int:
            ticket = authority._seal("proof", 60.0, proof="0" * 64, peer=Peer().peer_id, user=user)
            headers = {"TT-Ticket": ticket}
            return asked(authority, limits, ("POST", "/v1/proofs", None), headers=headers)[0].status_code

        assert [handed_in(user) for user in ("ada", "ada", "bob", "bob")] == [401, 429, 401, 429]


def hung_up(connection: socket.socket) -> bool:
    connection.settimeout(MOST)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def connected(running: Running, address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), source_address=(address, 0))


def test_silent_connections_of_one_address_keep_nobody_else_out() -> None:
    with Running() as running, contextlib.ExitStack() as open_here:
        silent = [open_here.enter_context(connected(running, "127.0.0.1")) for _ in range(505)]
        assert all(hung_up(one) for one in silent[MOST_OF_ADDRESS:])
        with connected(running, "127.0.0.2") as other:
            other.sendall(b"GET /v1/facts HTTP/1.1\r\nHost: x\r\n\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 200 ")
        silent[0].close()
        while True:  # once the server has seen that, there is a place again
            with connected(running, "127.0.0.1") as again, contextlib.suppress(ConnectionResetError, BrokenPipeError):
                again.sendall(b"GET /v1/facts HTTP/1.1\r\nHost: x\r\n\r\n")
                if again.recv(100).startswith(b"HTTP/1.1 200 "):
                    break


def test_while_the_hub_hangs_there_are_threads_for_notices_and_renewals(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, codes = Peer(), list[int]()
    body = peer.body(
        "join", challenge(authority, peer), authority.run.identity, {"proof": {"way": "token", "token": "x"}}
    )

    async def ask() -> None:
        transport = httpx2.ASGITransport(make_app(authority, unlimited()), client=("192.0.2.7", 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=None) as http:
            joins = [asyncio.create_task(http.post("/v1/join", json=body)) for _ in range(60)]
            for refused in islice(asyncio.as_completed(joins), len(joins) - hub_client.MOST_AT_ONCE):
                await refused
            codes.append((await asyncio.wait_for(http.get("/v1/notice"), MOST)).status_code)
            hub.close()
            codes.extend([(await join).status_code for join in joins])

    with socket.create_server(("127.0.0.1", 0), backlog=60) as hub:
        monkeypatch.setattr(hub_client, "TIMEOUT", 4 * MOST)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        asyncio.run(asyncio.wait_for(ask(), MOST))
    assert codes == [200] + [503] * 60


def test_a_login_that_was_granted_asks_whose_it_is_at_once(hub: HubStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is spent: where many ask, its user would have to type another one."""
    monkeypatch.setattr(hub_client, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub.add_user("hf_ada", "Ada", role="oauth")
    client = hub_client.HubClient()
    login = client.begin_login("app-1")
    hub.decide(login.user_code, "approve:hf_ada")
    monkeypatch.setattr(client._slots, "release", lambda: None)  # others take what gets free
    account = client.login_granted("app-1", login.device_code)
    assert account is not None and account.name == "Ada"
    with pytest.raises(HubUnreachable, match="too many questions"):
        client.user_of_token("hf_ada")


def test_who_asks_nothing_or_never_to_the_end_is_hung_up_on(authority: Authority) -> None:
    server = HttpServer(make_app(authority), HttpOptions("127.0.0.1", 0, "--port", silence=0.3))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for sent in (b"", b"GET /v1/facts HT", b"GET /v1/facts HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/facts HT"):
            with socket.create_connection(("127.0.0.1", server.port)) as slow:
                slow.sendall(sent)
                slow.settimeout(MOST)
                answer = b"".join(iter(lambda slow=slow: slow.recv(1 << 16), b""))
                assert answer.count(b"HTTP/1.1 200 ") == sent.count(b"\r\n\r\n")
        with socket.create_connection(("127.0.0.1", server.port)) as at_work:
            at_work.sendall(b"POST /v1/challenge HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            with socket.create_connection(("127.0.0.1", server.port)) as later:
                assert hung_up(later)
            at_work.sendall(b"}")
            assert at_work.recv(100).startswith(b"HTTP/1.1 422 "), "a request that is under way is let be"
    finally:
        server.stop()
        thread.join()


def test_what_a_stranger_sends_is_no_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    app = FastAPI()

    @app.get("/bug")
    def bug() -> None:
        raise ZeroDivisionError

    server = HttpServer(app, HttpOptions("127.0.0.1", 0, "--port", connections=2))
    thread = threading.Thread(target=server.run)
    thread.start()

    def until_answered(status: bytes, asked: bytes) -> None:
        while True:  # the connection before may count still
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(asked)
                if connection.recv(12) == b"HTTP/1.1 " + status:
                    return

    request = b"GET /%s HTTP/1.1\r\nHost: x\r\nConnection: close%s\r\n\r\n"
    try:
        until_answered(b"400", b"nonsense\r\n\r\n")
        until_answered(b"404", request % (b"", b", upgrade\r\nUpgrade: websocket"))
        with socket.create_connection(("127.0.0.1", server.port)):
            until_answered(b"503", request % (b"", b""))
        assert capfd.readouterr().err == ""
        until_answered(b"500", request % (b"bug", b""))
    finally:
        server.stop()
        thread.join()
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_limits_own_memory_is_limited() -> None:
    clock = Clock(0.0)
    limit = RateLimit(burst=1, per_second=1.0, most=10, clock=clock)
    for number in range(1000):
        assert limit.wait(str(number)) == 0.0
    assert len(limit._left) == 10
    assert limit.wait("999") == 1.0
    clock.now = 0.25
    assert limit.wait("999") == 0.75
    clock.now = -5.0  # a clock that goes back
    assert limit.wait("999") >= 0.75


def test_an_address_of_ipv6_counts_with_its_neighbours() -> None:
    assert address_key("2001:db8:1:2::1") == address_key("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert address_key("2001:db8:1:3::1") != address_key("2001:db8:1:2::1")
    assert address_key("::ffff:192.0.2.7") == address_key("192.0.2.7") == "192.0.2.7"
    assert address_key(None) == address_key("nonsense") == "unknown"


@pytest.mark.parametrize("trusted", ["", "127.0.0.1"])
def test_a_forwarded_address_counts_only_from_the_trusted_proxy(trusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "Limits", lambda: Limits(proving=RateLimit(burst=1, per_second=0.001)))
    with Running(trusted_proxy=trusted) as running, httpx2.Client(base_url=running.url, trust_env=False) as http:
        forwarded = [{"X-Forwarded-For": f"203.0.113.{number}"} for number in range(3)]
        asked = {"json": {"peer_id": Peer().peer_id}}
        codes = [http.post("/v1/challenge", headers=each, **asked).status_code for each in forwarded]
    assert codes == ([200, 200, 200] if trusted else [200, 429, 429])


def test_a_body_that_does_not_end_or_come_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "BODY_SECONDS", 0.3)
    with Running() as running:
        with socket.create_connection(("127.0.0.1", running.port)) as slow:
            slow.sendall(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", running.port)) as endless:
            endless.sendall(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            endless.sendall(b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(5)))
            assert endless.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_database_that_breaks_is_a_503_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """And one line of the log for the organiser: with PostgreSQL it names hosts and users."""
    with Running() as running:
        with running.authority.store._database.engine.begin() as connection:
            metadata.drop_all(connection)
        answers = [httpx2.get(f"{running.url}/v1/notice", trust_env=False) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {503}
    words = "the authority cannot do this now; its organiser finds the reason in its log"
    assert [answer.json()["detail"] for answer in answers] == 3 * [words]
    (line,) = caplog.messages
    assert line.startswith("the authority's database does not answer (no such table")


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = authority_server.ServeOptions(closed_run().to_toml(), "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(TTError, match="cannot listen on 127.0.0.1 port .*: Address already in use"):
            authority_server.AuthorityServer(options)


def test_the_description_names_every_answer(authority: Authority) -> None:
    described: dict[str, Any] = make_app(authority).openapi()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert {"200", "429", "503"} <= set(operation["responses"]), (path, method)
    assert "hf_" not in json.dumps(described)
    assert not list(Path(authority.folder.path).glob(".*.tmp"))
