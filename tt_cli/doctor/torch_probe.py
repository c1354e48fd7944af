"""Checks that need torch, in a process of their own that may hang or be killed: see checks.py.

`python -m tt_cli.doctor.torch_probe [DEVICE]` with a run file (or nothing) on standard input prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from tt_cli.errors import TTError, first_line
from tt_cli.run import RunConfig

if TYPE_CHECKING:
    from tt_cli.peer.device import Hardware


def main(wanted: str | None, run_file: str, hardware: Hardware | None = None) -> dict[str, Any]:
    """gpus: each with its fault, "" where it works. hidden: why none is seen. refusal: of the device that is wanted, or
    of the run. Of a run: needs, state_bytes."""
    import torch

    from tt_cli.peer.device import Hardware, choose_device, named_device
    from tt_cli.swarm.compression.codec import codec_of, self_test

    hardware = hardware or Hardware()
    found: dict[str, Any] = {"gpus": [], "gpu_error": "", "hidden": "", "driver": ""}
    try:
        for card in hardware.gpus():
            gpu = {"name": hardware.name(card), "free": 0, "total": 0}
            gpu["fault"] = hardware.fault(card, hardware.precision(card)[0] or torch.float32)
            if not gpu["fault"]:
                gpu["free"], gpu["total"] = hardware.cuda.mem_get_info(card)
            found["gpus"].append(gpu)
        found["hidden"] = "" if found["gpus"] else hardware.hidden()
        found["driver"] = "" if hardware.hip_version else hardware.driver()
    except RuntimeError as error:
        found["gpu_error"] = first_line(error)
    try:
        if wanted:
            named_device(wanted, hardware)
    except TTError as error:
        found["refusal"] = str(error)
    if not run_file or "refusal" in found:
        return found
    from tt_cli.memory import shown
    from tt_cli.peer.memory_budget import check_host, check_room
    from tt_cli.task import task_of

    run = RunConfig.from_toml(run_file, "the run file")
    task = task_of(run)
    self_test(codec_of(run))
    found["state_bytes"] = sum(item.bytes for item in task.need("cpu").items if item.what == "shared state")
    try:
        check_host(task, wanted, None)
        device = choose_device(wanted, task, lambda event: None, hardware)
        room = check_room(task, device, None, None)
        need = task.need(device.kind, itemsize=device.itemsize)
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
