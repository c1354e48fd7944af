"""The checkpoint that a run publishes, through the Hub's real client in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_standin import HubStandin
from peer.states import small_run, trained

from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import serialised
from tt_cli.peer.trained_state import TrainedState

pytestmark = pytest.mark.slow

TAKE = """
import json, sys
from peer.states import small_run, trained
from tt_cli.checkpoint.training_state import received_state
from tt_cli.errors import TTError
from tt_cli.peer.published_states import newest_published
run = small_run(**{"checkpoints.repository": "acme/run"})
try:
    tree, buffer, place = newest_published(run, trained().read_tree)
    found = received_state(tree, buffer.view(tree.nbytes), "")
    print(json.dumps([found.step, found.digest(), place]))
except TTError as error:
    print(json.dumps(str(error)))
"""


def take(hub: HubStandin, home: Path) -> object:
    environment = {**os.environ, **hub.environment(home)}
    done = subprocess.run([sys.executable, "-c", TAKE], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def file_of(state: TrainedState) -> bytes:
    return b"".join(serialised(state.snapshot()))


def test_the_newest_checkpoint_comes_from_the_hub_bit_for_bit(hub: HubStandin, tmp_path: Path) -> None:
    older, newer = trained(steps=2), trained(steps=3)
    assert small_run(**{"checkpoints.repository": "acme/run"}).identity == small_run().identity
    hub.put("model", "acme/run", {"README.md": "what it is"})
    assert take(hub, tmp_path) == "acme/run on the Hub holds no checkpoint (step-*.safetensors) yet"
    files = {"step-00000002.safetensors": file_of(older), "step-00000003.safetensors": file_of(newer)}
    hub.put("model", "acme/run", files)
    step, digest, place = take(hub, tmp_path)  # type: ignore[misc]
    assert (step, digest) == (3, newer.digest) and place.startswith("acme/run/step-00000003.safetensors at ")


def test_what_is_no_checkpoint_of_this_run_is_refused_in_one_line(hub: HubStandin, tmp_path: Path) -> None:
    assert "no such repository" in str(take(hub, tmp_path))
    torn = bytearray(file_of(trained(steps=1)))
    torn[-1] ^= 1
    hub.put("model", "acme/run", {"step-00000001.safetensors": bytes(torn)})
    assert "its digest does not match its content" in str(take(hub, tmp_path))


BACK = """
import json, sys
from peer.states import small_run, trained
from tt_cli.errors import TTError
from tt_cli.peer.published_states import ways_back
from tt_cli.identity.passes import RollBack
found = []
for way in ways_back(small_run(), trained().read_tree, RollBack(**json.loads(sys.argv[1]))):
    try:
        tree, buffer, place = way()
        found.append([tree.step, tree.digest, place])
    except TTError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def back(hub: HubStandin, home: Path, step: int, digest: str, source: str) -> list[object]:
    environment = {**os.environ, **hub.environment(home), "TT_HOME": str(home / "tt")}
    order = json.dumps({"step": step, "digest": digest, "source": source, "order": 1})
    command = [sys.executable, "-c", BACK, order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


def test_the_checkpoint_of_an_order_is_found_where_it_lies(hub: HubStandin, tmp_path: Path) -> None:
    then = trained(steps=2)
    hub.put("model", "acme/run", {"step-00000002.safetensors": file_of(then)})
    ((step, digest, place),) = back(hub, tmp_path, 2, then.digest, "acme/run")  # type: ignore[misc]
    assert (step, digest, place) == (2, then.digest, "acme/run/step-00000002.safetensors at main")
    (words,) = back(hub, tmp_path, 3, then.digest, "acme/run")
    assert "step-00000003.safetensors" in str(words)
    assert back(hub, tmp_path, 2, then.digest, "the cupboard") == []
    file = tmp_path / "kept.safetensors"
    file.write_bytes(file_of(then))
    assert back(hub, tmp_path, 2, then.digest, str(file)) == [[2, then.digest, str(file)]]
    own = save(tmp_path / "tt" / "runs" / small_run().identity / "checkpoints", then.snapshot())
    assert back(hub, tmp_path, 2, then.digest, "acme/run") == [[2, then.digest, str(own)]]
