"""Checks that need torch, in a process of their own that may hang or be killed: see checks.py.

`python -m tt_cli.doctor.torch_probe [DEVICE]` with a run file (or nothing) on standard input prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from tt_cli.errors import TTError, first_line
from tt_cli.run import RunConfig


def main(wanted: str | None, run_file: str) -> dict[str, Any]:
    """gpus: names. gpu_error: why a GPU that is there cannot be used. Of a run: needs, refusal, state_bytes."""
    import torch

    from tt_cli.swarm.compression.codec import codec_of, self_test

    found: dict[str, Any] = {
        "gpus": [],
        "gpu_error": "",
        "built_for_gpu": bool(torch.version.cuda or torch.version.hip),
    }
    try:
        for number in range(torch.cuda.device_count()):
            torch.ones(8, device=f"cuda:{number}").sum().item()
            free, total = torch.cuda.mem_get_info(number)
            found["gpus"].append({"name": torch.cuda.get_device_name(number), "free": free, "total": total})
    except RuntimeError as error:
        found["gpu_error"] = first_line(error)
    if not run_file:
        return found
    from tt_cli.memory import shown, trainer_need
    from tt_cli.peer.device import choose_device
    from tt_cli.peer.memory_budget import check_host, check_room

    run = RunConfig.from_toml(run_file, "the run file")
    self_test(codec_of(run))
    found["state_bytes"] = sum(item.bytes for item in trainer_need(run, "cpu").items if item.what == "shared state")
    try:
        check_host(run, wanted, None)
        device = choose_device(wanted, run.model, lambda event: None)
        room = check_room(run, device, None, None)
        need = trainer_need(run, device.kind, itemsize=device.itemsize)
        takes = f"{shown(need.host)} of RAM" + (f" and {shown(need.device)} of GPU memory" if need.device else "")
        found["needs"] = f"it takes {takes} with one example at a time, and {room.in_words()}"
    except TTError as error:
        found["refusal"] = str(error)
    return found


if __name__ == "__main__":
    try:
        answer = main(sys.argv[1] if len(sys.argv) > 1 else None, sys.stdin.read())
    except Exception as error:  # also a broken installation: any library may raise anything when it is loaded
        last_line = "".join(str(error).strip().splitlines()[-1:])
        answer = {"error": f"{type(error).__name__}: {last_line}"}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer))
