"""A peer in whose processes all that would ask CUDA is written down: `python -m testbed.cuda_watch` prints JSON.

Standard input has the run file. The peer joins a swarm of its own, with rounds, and trains until the run is done. Lines
of the record are [process, what, where]; "fork" is what a process does before it forks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch

ASKS = ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_capability", "mem_get_info")


def watched(file: int) -> None:
    """Replace what asks CUDA by what writes it down, in this process and in those that it forks."""

    def note(what: str, where: str = "") -> None:
        os.write(file, (json.dumps([os.getpid(), what, where]) + "\n").encode())

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **more: Any) -> Any:
            frame = traceback.extract_stack(limit=2)[0]
            note(name, f"{frame.filename}:{frame.lineno}")
            return function(*args, **more)

        return asked

    for name in ASKS:
        setattr(torch.cuda, name, recorded(name, getattr(torch.cuda, name)))
    for name in dir(torch._C):
        if name.startswith("_cuda_") and callable(getattr(torch._C, name)):
            setattr(torch._C, name, recorded(name, getattr(torch._C, name)))
    os.register_at_fork(before=lambda: note("fork"))


def main() -> None:
    """Train, and print the record, this process, and whether the run was done."""
    with tempfile.TemporaryFile() as record:
        watched(record.fileno())
        from tt_cli.peer import trainer
        from tt_cli.supervisor.events import Event, Finished
        from tt_cli.supervisor.reporter import Orders, die_with_parent

        die_with_parent()
        ended: list[str] = []

        def emit(event: Event) -> None:
            if isinstance(event, Finished):
                ended.append(event.reason)
            print(event.to_json(), file=sys.stderr)

        trainer.main({"run": sys.stdin.read(), "batch_size": 8, "host": "127.0.0.1", "port": 0}, emit, Orders())
        record.seek(0)
        print(json.dumps({"process": os.getpid(), "ended": ended, "asked": [json.loads(line) for line in record]}))
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
