"""Memory that processes share after a fork, and the end of one with another."""

from __future__ import annotations

import subprocess
import sys

import pytest

COPIED = """
import gc, os, sys
from pathlib import Path
from tt_cli.supervisor.processes import keep_objects_shared

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

gc.disable()
objects = [{"name": [number]} for number in range(400_000)]  # some 100 MB
if sys.argv[1] == "shared":
    keep_objects_shared()
reader, writer = os.pipe()
if not (child := os.fork()):
    before = private()
    gc.collect()
    os.write(writer, str((private() - before) // 1024).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(reader, 100).decode(), "MiB")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "copied"), [("shared", False), ("as it is", True)])
def test_a_collection_of_garbage_in_a_child_copies_no_objects(how: str, copied: bool) -> None:
    done = subprocess.run([sys.executable, "-c", COPIED, how], capture_output=True, text=True, check=True)
    assert (int(done.stdout.split()[0]) > 20) == copied, done.stdout


def test_one_that_begins_after_the_end_of_whom_it_ends_with_ends() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    program = "import sys; from tt_cli.supervisor.processes import end_with; end_with(int(sys.argv[1]))"
    assert subprocess.run([sys.executable, "-c", program, str(ended.pid)], check=False).returncode == 1
