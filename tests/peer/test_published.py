"""The checkpoint that a run publishes, through the Hub's real client in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_standin import HubStandin
from peer.states import small_run, trained
from testbed.spawned import Call, spawned

from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import received_state, serialised
from tt_cli.errors import TTError
from tt_cli.hub.hub_files import download
from tt_cli.identity.passes import RollBack
from tt_cli.peer.published_states import newest_published, ways_back
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import folders

pytestmark = pytest.mark.slow

Found = list[object] | str


@pytest.fixture(scope="module")
def client(_hub_process: HubStandin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    with spawned(_hub_process.environment(tmp_path_factory.mktemp("home"))) as call:
        yield call


def take(repository: str) -> Found:
    """In the client's process: step, digest and place of the newest checkpoint, or an error."""
    try:
        run = small_run(**{"checkpoints.repository": repository})
        tree, buffer, place = newest_published(run, trained().read_tree)
        found = received_state(tree, buffer.view(tree.nbytes), "")
    except TTError as error:
        return str(error)
    return [found.step, found.digest(), place]


def kept(repository: str, by_hand: str) -> list[str]:
    """In the client's process: the files that are there after a checkpoint was taken, beside one taken by hand."""
    download(repository, by_hand)
    assert isinstance(take(repository), list)
    places = folders.run_folder(small_run()), Path(os.environ["HF_HOME"])
    return [path.name for place in places for path in sorted(place.rglob("snapshots/*/*"))]


def back(home: Path, step: int, digest: str, source: str) -> list[Found]:
    """In the client's process: the same of all ways back to a checkpoint."""
    os.environ["TT_HOME"] = str(home)
    found: list[Found] = []
    for way in ways_back(small_run(), trained().read_tree, RollBack(step, digest, source, order=1)):
        try:
            tree, _, place = way()
            found.append([tree.step, tree.digest, place])
        except TTError as error:
            found.append(str(error))
    return found


def file_of(state: TrainedState) -> bytes:
    return b"".join(serialised(state.snapshot()))


def test_the_newest_checkpoint_comes_from_the_hub_bit_for_bit(hub: HubStandin, client: Call) -> None:
    older, newer = trained(steps=2), trained(steps=3)
    assert small_run(**{"checkpoints.repository": "acme/run"}).identity == small_run().identity
    hub.put("model", "acme/run", {"README.md": "what it is"})
    empty = client(take, "acme/run").result()
    assert empty == "acme/run on the Hub holds no checkpoint (step-*.safetensors) yet"
    files = {"step-00000002.safetensors": file_of(older), "step-00000003.safetensors": file_of(newer)}
    hub.put("model", "acme/run", files)
    step, digest, place = client(take, "acme/run").result()
    assert (step, digest) == (3, newer.digest) and place.startswith("acme/run/step-00000003.safetensors at ")


def test_the_disk_keeps_only_the_newest_of_those_that_were_taken(hub: HubStandin, tmp_path: Path) -> None:
    """And what the user took."""
    names = [f"step-0000000{step}.safetensors" for step in (2, 3)]
    older, newer = (file_of(trained(steps=step)) for step in (2, 3))
    with spawned(hub.environment(tmp_path)) as call:
        hub.put("model", "acme/run", {names[0]: older})
        assert call(kept, "acme/run", names[0]).result() == [names[0], names[0]]
        hub.put("model", "acme/run", {names[0]: older, names[1]: newer})
        assert call(kept, "acme/run", names[0]).result() == [names[1], names[0], names[0]]


def test_what_is_no_checkpoint_of_this_run_is_refused_in_one_line(hub: HubStandin, client: Call) -> None:
    assert "no such repository" in client(take, "acme/none").result()
    torn = bytearray(file_of(trained(steps=1)))
    torn[-1] ^= 1
    hub.put("model", "acme/torn", {"step-00000001.safetensors": bytes(torn)})
    assert "its digest does not match its content" in client(take, "acme/torn").result()


def test_the_checkpoint_of_an_order_is_found_where_it_lies(hub: HubStandin, client: Call, tmp_path: Path) -> None:
    then = trained(steps=2)

    def found(step: int, source: str) -> list[Found]:
        ways: list[Found] = client(back, tmp_path, step, then.digest, source).result()
        return ways

    hub.put("model", "acme/order", {"step-00000002.safetensors": file_of(then)})
    assert found(2, "acme/order") == [[2, then.digest, "acme/order/step-00000002.safetensors at main"]]
    (words,) = found(3, "acme/order")
    assert "step-00000003.safetensors" in words
    assert found(2, "the cupboard") == []
    file = tmp_path / "kept.safetensors"
    file.write_bytes(file_of(then))
    assert found(2, str(file)) == [[2, then.digest, str(file)]]
    own = save(tmp_path / "runs" / small_run().identity / "checkpoints", then.snapshot())
    assert found(2, "acme/order") == [[2, then.digest, str(own)]]
