"""A training step where no C compiler is to be found: what fusion says, and the loss beside the CPU's. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile


def main() -> None:
    """The device's name is the argument."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[name] = empty
        os.environ["CC"] = os.environ["CXX"] = "/nonexistent/compiler"
        import torch

        from scripts.acceptance.arithmetic import batch_of, training_step
        from scripts.benchmarks.model import config
        from tt_cli.model.dalle import Dalle
        from tt_cli.model.layers.fused import fusion

        losses = []
        for device in (torch.device("cpu"), torch.device(sys.argv[1])):
            fusion.devices = {device.type} - {"cpu"}
            model = Dalle(config(5))
            losses.append(float(training_step(model.to(device), *batch_of(model.config, 1, device), "fp32")))
    error = abs(losses[1] / losses[0] - 1)
    print(json.dumps({"eager_after_compiler": int(bool(fusion.failure)), "eager_loss_error": error}))


if __name__ == "__main__":
    main()
