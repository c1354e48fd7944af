"""Auxiliary peers as organisers run them: parts that are killed come back, and one of two is enough."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from end_to_end.conftest import last_step, local_swarm, tiny_run, wait_for_step
from hub_standin import HubStandin
from testbed.aux_command import AuxCommand, free_port

from tt_cli.history.reader import HistoryReader

PARTS = {
    "tt_cli.auxiliary.web_process": "the web page is at",
    "tt_cli.auxiliary.evaluator_process": "measures checkpoints every",
    "tt_cli.auxiliary.publisher": "checkpoints go to acme/run",
    "tt_cli.peer.assistant": "assists from step",
}
COORDINATOR = "tt_cli.auxiliary.coordinator"


@pytest.fixture
def writer(hub: HubStandin) -> HubStandin:
    hub.add_user("hf_write", "ada", {"acme": "write"}, role="write")
    return hub


@pytest.mark.promise(
    "Every part of `tt aux-peer` that is killed is restarted, at the same address",
    also="tests/supervisor/test_supervise.py",
)
def test_every_part_that_is_killed_is_started_again(writer: HubStandin, tmp_path: Path) -> None:
    run = tiny_run(checkpoints={"repository": "acme/run"})
    port = free_port()
    flags = ("--assist", "--samples", "--samples-every", "1000", "--publish", "--port", str(free_port()))
    environment = {**writer.environment(tmp_path), "HF_TOKEN": "hf_write"}
    with (
        AuxCommand(run, tmp_path / "aux", *flags, "--assist-port", "0", "--web-port", str(port), **environment) as aux,
        local_swarm(run, tmp_path / "trainers") as swarm,
    ):
        swarm.addresses = aux.addresses
        anna = swarm.start_trainer("anna", batch_size=8, seed=0)
        wait_for_step(swarm, 2, "anna")
        for words in PARTS.values():
            aux.need(lambda words=words: bool(aux.said(words)), words)
        said, pids = {words: len(aux.said(words)) for words in PARTS.values()}, [aux.part(module) for module in PARTS]
        assert all(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for (module, words), pid in zip(PARTS.items(), pids, strict=True):
            aux.need(lambda words=words: len(aux.said(words)) > said[words], f"{words} once more")
            assert aux.part(module) not in (0, pid)
        pid = aux.part(COORDINATOR)
        os.kill(pid, signal.SIGKILL)
        aux.need(lambda: len(aux.of("listening")) == 2, "the coordinator to listen once more")
        assert aux.of("listening")[0]["addresses"] == aux.of("listening")[1]["addresses"]

        # Together they do what they did before: the trainer goes on, and what it does is recorded and shown.
        step = last_step(anna)
        wait_for_step(swarm, step + 3, "anna")
        aux.need(lambda: aux.page(port, "api/snapshot").get("epoch", 0) > step, "a new step on the page")
        assert aux.page(port, "health")["status"] == "ok"


def recorded(home: Path) -> list[int]:
    """The steps in the history of an auxiliary peer, oldest first; none before there is one."""
    return [
        row[0]
        for history in home.glob("runs/*/history.db")
        for row in HistoryReader(f"sqlite:///{history}").steps_after(0, 100)
    ]


@pytest.mark.promise(
    "Of two aux peers one leads and publishes; the other one fails over, and both record the run",
    also="tests/auxiliary/test_lease.py",
)
def test_two_do_one_job_and_one_of_them_is_enough(writer: HubStandin, tmp_path: Path) -> None:
    """The leader publishes; when it is killed, the other one does so soon, and has recorded the run as well."""
    last = 20
    run = tiny_run(checkpoints={"repository": "acme/run"}, schedule={"total_steps": last})
    flags = ("--no-web", "--publish", "--port", "0")

    def environment(name: str) -> dict[str, str]:
        writer.add_user(f"hf_{name}", name, {"acme": "write"}, role="write")
        return {**writer.environment(tmp_path / name), "HF_TOKEN": f"hf_{name}"}

    with AuxCommand(run, tmp_path / "one", *flags, **environment("one")) as one:
        joined = [flag for address in one.addresses for flag in ("--peer", address)]
        with (
            AuxCommand(run, tmp_path / "two", *flags, *joined, **environment("two")) as two,
            local_swarm(run, tmp_path / "trainers") as swarm,
        ):
            swarm.addresses = [*one.addresses, *two.addresses]
            one.need(lambda: bool(one.said("leads: it publishes")), "a leader")
            two.need(lambda: bool(two.said("leads: it publishes")), "a leader")
            assert [bool(each.said("this auxiliary peer leads")) for each in (one, two)].count(True) == 1
            leader, other = (one, two) if one.said("this auxiliary peer leads") else (two, one)
            swarm.start_trainer("anna", batch_size=8, seed=0, pace=1.0)  # the run must not end before the leader does
            leader.need(lambda: bool(leader.said("is published in acme/run")), "a checkpoint on the Hub")
            assert not other.said("is published in acme/run")
            other.need(lambda: bool(recorded(tmp_path / other.name)), "a step in the other one's history")
            before = recorded(tmp_path / other.name)
            leader.kill()
            swarm.leave("anna")
            swarm.start_trainer("anna", batch_size=8, seed=0)
            other.need(lambda: bool(other.said("this auxiliary peer leads")), "another leader")
            other.need(lambda: bool(other.said(f"step {last} (")), "the last step on the Hub")
            # Both recorded all along; of a lone trainer that makes several steps a second, not each one.
            other.need(lambda: recorded(tmp_path / other.name)[-1] == last, "the last step in its history")
            assert recorded(tmp_path / other.name)[: len(before)] == before
