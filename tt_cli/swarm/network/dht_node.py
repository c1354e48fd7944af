"""The DHT node of this machine: start it, say clearly why it cannot start, end it within a bound."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tt_cli.errors import TTError
from tt_cli.run import RunConfig
from tt_cli.supervisor.processes import alive, children_of, keep_objects_shared
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.membership.admission import NoPass, check_own_pass
from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.membership.rsa_identity import Identity
from tt_cli.swarm.network.addresses import listen_and_announce
from tt_cli.swarm.network.failures import classify
from tt_cli.swarm.records import dht_search
from tt_cli.swarm.records.dht_protocol import node_id_of
from tt_cli.swarm.records.publisher import lives_of
from tt_cli.swarm.records.validator import RecordValidator

__all__ = ["DHT"]  # hivemind's, for rooms that do not import hivemind; beside what is defined here

START_SECONDS = 60.0  # its daemon dials those it joins through in turn, for 5 s each, and some have met eight before
END_SECONDS = 3.0  # for the node's process
READY_SECONDS = 90.0  # for the daemon, and after it for the initial peers to answer
ADDRESS_SECONDS, ADDRESS_QUESTIONS = 5.0, 4
MOST_NAMED = 4  # initial peers, in the line that says that none answered
ANSWER_SECONDS = 8.0  # hivemind waits for 3: on a slow line that is full of gradients answers take longer

dht_time = get_dht_time  # seconds since 1970, as all peers of a DHT agree on it; rooms above this one use it from here


class NobodyAnswered(TTError):
    """None of the initial peers can be reached, or answers as it should."""


class WrongAnswers(NobodyAnswered):
    """Of those that answer each says that it cannot call this peer back, or has another time."""


def start_dht(
    run: RunConfig,
    identity: Identity | None,
    *,
    initial_peers: Sequence[str],
    host: str = "0.0.0.0",
    port: int = 0,
    announce: Sequence[str] = (),
    client_mode: bool = False,
    authorizer: type[DHTAuthorizer] = DHTAuthorizer,
) -> DHT:
    """A running DHT node that checks and signs this run's records.

    identity: None for an observer, which publishes nothing. initial_peers: multiaddrs with /p2p/…; empty for the
    first peer of a run. host, port: the address to listen on (port 0: any free one); nothing in client mode.
    Raises TTError when the port is taken or none of the initial peers answers, NoPass where this peer is not admitted.
    """
    key_file, key = (None, None) if identity is None else (identity.path, identity.key)
    membership = authorizer.admission_type(run, key_file)
    records = RecordValidator(run.identity, membership, run.membership.authority_key or "")
    if identity is not None:
        check_own_pass(membership, identity.peer_id, run)
    if not client_mode and port:
        _check_port_free(host, port)
    listen, announced = ([f"/ip4/{host}/tcp/0"], []) if client_mode else listen_and_announce(host, port, announce)
    dht, guard = None, authorizer(membership, lives_of(run))
    hivemind_patches.apply()
    try:
        dht = DHT(
            initial_peers=list(initial_peers) or None,
            start=False,
            node_id=identity and node_id_of(PeerID.from_base58(identity.peer_id)),
            record_validators=[dht_search.Checked([RSASignatureValidator(key), records])],
            authorizer=guard,
            client_mode=client_mode,
            host_maddrs=listen,
            announce_maddrs=list(announce) or announced or None,
            no_listen=client_mode,
            identity_path=key_file and str(key_file),
            check_if_identity_free=False,
            use_relay=False,  # nobody calls a peer in client mode, and strangers shall not send through this line
            nat_port_map=not host.startswith("127."),
            shutdown_timeout=END_SECONDS,
            startup_timeout=START_SECONDS,
            idle_timeout=START_SECONDS,  # of the daemon before it is up
            wait_timeout=ANSWER_SECONDS,
            **dht_search.NO_CACHES,
        )
        keep_objects_shared()
        dht.membership = membership  # which the averager's process gets too, when it forks
        # Bounded, for a node that dies, or fails with what cannot be pickled, never says so.
        dht.run_in_background(timeout=READY_SECONDS)
        hivemind_patches.take_long_messages(dht)
        dht.listening = [] if client_mode else listen
        return dht
    except Exception as error:  # hivemind passes on whatever its node or daemon raised
        if dht is not None:
            # It has just told why it failed, with a lock that all of hivemind's processes share: killed before it let
            # go of that, it would keep every later one from ever being ready.
            dht.join(END_SECONDS)
            if dht.is_alive():
                dht.kill()
        if guard.refusal:
            raise NoPass(f"the peers of run {run.identity} do not admit this one: {guard.refusal}") from error
        raise _explain(error, run, initial_peers, port) from error


def _check_port_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            advice = "end the program that uses it or choose another with --port" if taken else "see --host and --port"
            raise TTError(f"cannot listen on {host}, port {port}: {error.strerror or error}: {advice}") from error


def _explain(error: Exception, run: RunConfig, initial_peers: Sequence[str], port: int) -> TTError:
    words = " ".join(str(error).split()) or type(error).__name__
    places = ", ".join(initial_peers[:MOST_NAMED]) + ", …" * (len(initial_peers) > MOST_NAMED)
    if (failure := classify(words)).what == "clock":
        return WrongAnswers(f"cannot join run {run.identity}: {failure.words}: {failure.remedy}")
    if "access this node" in words:
        where = f"of run {run.identity} at {places}"
        return WrongAnswers(f"no peer {where} could call this one back: try again, or name another with --peer")
    if initial_peers and any(sign in words.lower() for sign in ("bootstrap", "initial peers", "connect")):
        return NobodyAnswered(
            f"no peer of run {run.identity} answered at {places}: check the address, that its "
            "auxiliary peer is running, and that no firewall is between"
        )
    if "address already in use" in words.lower():
        return TTError(f"port {port} is taken: choose another with --port")
    return TTError(f"the p2p daemon did not start: {words[:200]}")


def addresses_of(dht: DHT) -> list[str]:
    """Addresses at which others reach this node: multiaddrs with /p2p/…, loopback last.

    About one in a hundred young daemons never answers the first such question, and does the next one. Raises
    WorkerBroken if none is answered.
    """
    for _ in range(ADDRESS_QUESTIONS):
        answer = dht.run_coroutine(partial(DHT._get_visible_maddrs, latest=True), return_future=True)
        try:
            addresses = [str(address) for address in answer.result(timeout=ADDRESS_SECONDS)]
        except concurrent.futures.TimeoutError:
            continue
        return sorted(addresses, key=lambda address: "/127.0.0.1/" in address)
    raise WorkerBroken("the p2p daemon does not answer")


def addresses_here(dht: DHT) -> list[str]:
    """Addresses at which peers on this machine reach this node: what it listens on, then what others are told.

    A machine may not get through to its own public address, behind a router or a provider's network.
    """
    listening = [address.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/") for address in dht.listening]
    own = [f"{address}/p2p/{dht.peer_id}" for address in listening if not address.endswith("/tcp/0")]
    return list(dict.fromkeys([*own, *addresses_of(dht)]))


def daemon_pid(dht: DHT) -> int | None:
    """The process id of the node's p2p daemon: the child of the DHT process with that name."""
    for child in children_of(dht.pid or 0):
        with contextlib.suppress(OSError):
            if "p2pd" in Path(f"/proc/{child}/comm").read_text():
                return child
    return None


@contextlib.contextmanager
def daemon_watched(dht: DHT) -> Iterator[None]:
    """Whatever breaks in the block because the node's daemon died is told as just that, with WorkerBroken."""
    daemon = daemon_pid(dht)
    try:
        yield
    except Exception as error:
        if daemon is None or alive(daemon):
            raise
        raise WorkerBroken("the p2p daemon of this peer was ended by something else") from error


def stop_dht(dht: DHT) -> None:
    """Shut the node down; end its daemon the hard way when it takes longer than END_SECONDS."""
    daemon = daemon_pid(dht)
    with contextlib.suppress(Exception):  # a node whose daemon died raises here; it is ended below
        dht.shutdown()
    if dht.is_alive():
        dht.kill()
    deadline = time.monotonic() + 1.0
    while daemon is not None and alive(daemon) and time.monotonic() < deadline:
        time.sleep(0.02)
    if daemon is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)
