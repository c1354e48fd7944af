"""The process that reads ahead: it gives every row once, holds few bytes, and lives and dies with its parent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgpack
import pytest
from data.rows import bomb, numbered, run_on, write
from testbed.process_watch import ProcessWatch

from tt_cli.data.stream.plan import ReadPlan, plan_of
from tt_cli.data.stream.prefetch import Prefetch
from tt_cli.data.stream.prefetch_process import Messages
from tt_cli.data.stream.row_reader import Block
from tt_cli.data.stream.subset import heldout_examples
from tt_cli.errors import TTError, UsageError
from tt_cli.supervisor.processes import alive

pytestmark = pytest.mark.slow


@pytest.fixture
def plan(tmp_path: Path) -> ReadPlan:
    for shard in range(3):
        write(tmp_path / f"train-{shard}.parquet", numbered(900)[shard * 300 : shard * 300 + 300])
    return plan_of(run_on(tmp_path, shuffle_buffer=100), "train", 5)


def silent(words: str, remedy: str) -> None:
    raise AssertionError(words)


def captions_of(blocks: Iterator[Block], count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        block = next(blocks)
        assert block.codes.shape == (len(block.captions), 4)
        found += block.captions
    return found[:count]


def blocks_of(prefetch: Prefetch) -> Iterator[Block]:
    while True:
        yield prefetch.next()


def test_it_loads_neither_torch_nor_hivemind(plan: ReadPlan) -> None:
    with closing(Prefetch(plan, silent)) as prefetch:
        prefetch.next()
        mapped = Path(f"/proc/{prefetch.pid}/maps").read_text()
    assert "libarrow" in mapped
    assert "libtorch" not in mapped and "hivemind" not in mapped


def test_when_it_is_killed_another_one_goes_on_there(plan: ReadPlan) -> None:
    told: list[tuple[str, str]] = []
    with closing(Prefetch(plan, lambda words, remedy: told.append((words, remedy)), bound=1)) as prefetch:
        found: list[str] = []
        for _ in range(3):
            found += prefetch.next().captions
            os.kill(prefetch.pid, signal.SIGKILL)
        while not told or len(found) < 1500:  # what it had sent by then is in the pipe
            found += prefetch.next().captions
    with closing(Prefetch(plan, silent)) as prefetch:
        assert captions_of(blocks_of(prefetch), len(found)) == found
    assert told == [
        ("the process that reads the data was ended by signal 9", "starts another one, which goes on")
    ] * len(told)


PARENT = """
import pickle, sys, time
from tt_cli.data.stream.prefetch import Prefetch

prefetch = Prefetch(pickle.load(sys.stdin.buffer), print)
prefetch.next()
print(prefetch.pid, flush=True)
time.sleep(600)
"""


def test_it_dies_with_its_parent(plan: ReadPlan) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None and parent.stdout is not None
    pickle.dump(plan, parent.stdin)
    parent.stdin.close()
    reader = int(parent.stdout.readline())
    watch = ProcessWatch({reader})
    assert alive(reader)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert watch.left_after(30) == set()


def test_ctrl_c_is_for_its_parent(plan: ReadPlan) -> None:
    with closing(Prefetch(plan, silent, bound=1)) as prefetch:
        prefetch.next()
        os.kill(prefetch.pid, signal.SIGINT)
        captions_of(blocks_of(prefetch), 900)


def test_a_fork_that_drops_it_ends_nothing(plan: ReadPlan) -> None:
    """As hivemind's processes are made, which inherit every object."""
    with closing(Prefetch(plan, silent, bound=1)) as prefetch:
        prefetch.next()
        child = os.fork()
        if child == 0:
            prefetch.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(captions_of(blocks_of(prefetch), 900)) == 900


def test_closed_it_is_gone(plan: ReadPlan) -> None:
    prefetch = Prefetch(plan, silent)
    prefetch.close()
    prefetch.close()
    assert not alive(prefetch.pid)
    with pytest.raises(TTError, match="was closed"):
        prefetch.next()


def test_errors_come_as_they_are(tmp_path: Path) -> None:
    with (
        closing(Prefetch(plan_of(run_on(tmp_path / "none"), "train", 0), silent)) as prefetch,
        pytest.raises(UsageError) as caught,
    ):
        prefetch.next()
    assert "there is no such folder" in str(caught.value)


def test_troubles_come_in_words(plan: ReadPlan, tmp_path: Path) -> None:
    (tmp_path / "train-1.parquet").write_bytes(b"PAR1 and nothing else")
    told: list[str] = []
    with closing(Prefetch(plan, lambda words, remedy: told.append(f"{words}; {remedy}"))) as prefetch:
        assert len(set(captions_of(blocks_of(prefetch), 600))) == 600
    assert told and all("train-1.parquet" in words and "left out" in words for words in told)


def test_a_page_of_kilobytes_does_not_become_gigabytes(plan: ReadPlan, tmp_path: Path) -> None:
    bomb(tmp_path / "train-1.parquet")
    told: list[str] = []
    with closing(Prefetch(plan, lambda words, remedy: told.append(words))) as prefetch:
        pid = prefetch.pid
        assert len(set(captions_of(blocks_of(prefetch), 1200))) == 600
        assert prefetch.pid == pid, "it goes on"
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert int(peak) << 10 < plan.memory
    why = (
        "train-1.parquet cannot be read to its end (it takes over a gigabyte of memory at once; make its parts smaller)"
    )
    assert told and all(why in words for words in told)


def test_nor_where_examples_are_held_in_memory(tmp_path: Path) -> None:
    bomb(tmp_path / "heldout.parquet")
    with pytest.raises(TTError, match="heldout.parquet cannot be read to its end"):
        heldout_examples(run_on(tmp_path), 10)


def test_no_more_messages_wait_than_may() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    messages = Messages(sender, 5)
    done = threading.Thread(target=lambda: [messages.add(str(n), bytes(9_000)) for n in range(60)], daemon=True)
    done.start()
    with receiver:
        for number in range(60):
            assert msgpack.unpackb(receiver.recv_bytes()) == [str(number), bytes(9_000)]
            assert messages.qsize() <= 5
        done.join()
        messages.join()
        assert not receiver.poll()


def test_an_urgent_message_overtakes_the_others() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    messages = Messages(sender, 3)
    messages.add("block", bytes(1 << 20))  # more than a pipe holds: its sender waits
    assert receiver.poll(30)
    messages.add("block", None)
    messages.add("trouble", None, urgent=True)
    assert [msgpack.unpackb(receiver.recv_bytes())[0] for _ in range(3)] == ["block", "trouble", "block"]
