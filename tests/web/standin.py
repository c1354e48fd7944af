"""The page's real server over a history that was made up: a run of many steps, and names that would do harm."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from monitor.made import snapshot, trainer
from PIL import Image

from tests.web.recorded import RUN, TABLES
from tt_cli.run import RunConfig
from tt_cli.supervisor.http_server import HttpOptions, HttpServer
from tt_cli.web.queries import Answers
from tt_cli.web.web_app import make_app

HOSTILE = (
    '<img src=x onerror="window.hacked=1">',
    "</title><script>window.hacked=1</script>",
    "\u202eevil\u202c name \u200f\u2066",
    "n" * 500,
    "\x1b[31mred\x00",
)
USERS = ("ada", "grace-h", "li.wei", "marie", "kofi_a", "noether", "yuki", "ramanujan", "sofia", "tomek", "zainab")
DEVICES = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA GTX 1080 Ti", "Tesla T4", "AMD Ryzen 7 5800X")
PROMPTS = ("red apple", "sailboat", "grinning face with smiling eyes", "snow-capped mountain", "blue heart", "owl")
SECONDS = 14.0  # of a step
CHECKPOINTS = 12


class MadeHistory:
    """What a HistoryReader tells, of `steps` recorded steps and `peers` peers, one of them auxiliary. Deterministic.

    figures: that each trainer tells beside its loss. prompts: for which samples were made, of this suffix.
    """

    def __init__(
        self,
        steps: int = 0,
        peers: int = 0,
        figures: Mapping[str, float] = MappingProxyType({}),
        prompts: Sequence[str] = PROMPTS,
        suffix: str = "png",
    ):
        self._prompts, self._suffix, self._era, self._trainers = prompts, suffix, "", max(0, peers - 1)
        self.now: dict[str, Any] = {}  # of the snapshot, what is otherwise than usual
        random, at = np.random.default_rng(1), np.arange(1, steps + 1)
        done = at / max(1, steps)
        self._told_at = time.time()  # a snapshot of another time is news
        self._began = self._told_at - steps * SECONDS
        loss = 3.9 + 3.1 * np.exp(-9 * done) - 0.7 * done + random.normal(0, 0.05, steps)
        crowd = np.maximum(1, np.round(12 + 14 * done + 6 * np.sin(40 * done) + random.normal(0, 1.2, steps)))
        columns = (at, self._began + SECONDS * at, loss, crowd, 13.1 * crowd)
        self._steps = list(zip(*(column.tolist() for column in columns), strict=True))
        users = (*HOSTILE, *USERS)
        self._peers = [
            {
                **trainer(lag=2 * (index == 7), client_mode=index % 3 == 0).model_dump(mode="json"),
                **{"peer_id": f"12D3KooW{index:038d}", "user": users[index % len(users)], "share": 1 / peers},
                **{"device": DEVICES[index % len(DEVICES)], "samples_per_second": 95.0 * 0.86**index + 0.3},
                **{
                    "inner_steps": index,
                    "sent_per_hour": 222_000_000 * (index > 2),
                    "received_per_hour": 1_400_000_000,
                    "figures": dict(figures),
                },
                **({"role": "aux", "samples_per_second": 0.0} if index == min(5, peers - 1) else {}),
            }
            for index in range(peers)
        ]

    def make_step(self) -> int:
        """The run's next step."""
        self._told_at = time.time()
        self._steps.append((self.step + 1, self._told_at, 3.123, 29, 777.0))
        return self.step

    def go_back(self, steps: int) -> int:
        """The organiser's order to go back by so many steps; the last one that is left."""
        del self._steps[-steps:]
        self._told_at = time.time()
        self._era = str(self.step)
        return self.step

    @property
    def step(self) -> int:
        return int(self._steps[-1][0]) if self._steps else 0

    def newest(self, key: str) -> tuple[str, float] | None:
        if key == "snapshot":
            total: dict[str, Any] = {} if self._trainers else {"eta_s": None}
            total |= {"epoch": self.step, "total_steps": 5 * max(3, self.step) // 3, "trainers": self._trainers}
            total |= {"inner_steps": 210, "inner_steps_due": 600, **self.now}
            now = snapshot(time=self._told_at, peers=[], **total).to_json()
            del now["history"]
            return json.dumps({**now, "peers": self._peers}), time.time()
        told: dict[str, Any] = {"model": {"parameters": 125_900_000, "effective": 1_100_000_000}}
        told["addresses"] = ["/ip4/203.0.113.7/tcp/31337/p2p/QmSY4bsZ"]
        told["calculator"] = TABLES.table("run")  # of no kind but DALL-E it would be
        return json.dumps(told[key]), time.time()

    def era(self) -> str:
        return self._era

    def steps_after(self, step: int, most: int) -> list[Any]:
        return self._steps[step : step + most]

    def activity(self) -> list[tuple[float, int, float]]:
        return [(at, peers, speed) for _, at, _, peers, speed in self._steps[::100]]

    def leaderboard(self, since: float | None) -> list[dict[str, Any]]:
        scale, users = 90 if since is None else 1, [*HOSTILE, *USERS, *(f"user-{number}" for number in range(12))]
        return [
            {
                **{
                    "user": user,
                    "samples": round(scale * 400_000 * 0.8**index),
                    "seconds": scale * 70_000 * 0.9**index,
                },
                **{"peers": 1 + index % 3, "share": 0.2 * 0.8**index, "last_seen": time.time() - 40 * index**2},
            }
            for index, user in enumerate(users if self._trainers else ())
        ]

    def peers(self) -> list[dict[str, Any]]:
        return [
            {name: peer[name] for name in ("peer_id", "user", "role", "device")}
            | {"first_seen": self._began, "last_seen": time.time(), "samples": 100, "seconds": 60.0}
            for peer in self._peers
        ]

    def totals(self) -> dict[str, Any]:
        return {"peers": 60, "devices": len(DEVICES), "samples": 1_000_000, "seconds": 1e6}

    def rounds(self) -> list[dict[str, Any]]:
        words = "28 peers averaged in 5.1 s; all of it arrived"
        return [{"step": step, "time": at, "words": words} for step, at, *_ in self._steps[-40:]]

    def checkpoints(self) -> list[dict[str, Any]]:
        return [
            {
                **{"step": self.step * (index + 1) // CHECKPOINTS, "time": self._began, "digest": f"{index:064x}"},
                **{"bytes": 503_700_000, "url": f"checkpoints/{index}" if index % 2 else None},
                "heldout_loss": round(6.8 - 0.3 * index, 3),
                "pictures": [
                    {"prompt": prompt, "file": f"{index}-{n}.{self._suffix}"} for n, prompt in enumerate(self._prompts)
                ],
            }
            for index in range(CHECKPOINTS if self._steps else 0)
        ]


def draw_pictures(folder: Path) -> None:
    """Those of the checkpoints."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(file, "PNG")
    for index in range(CHECKPOINTS):
        for number in range(len(PROMPTS)):
            (folder / f"{index}-{number}.png").write_bytes(file.getvalue())


class Served:
    """The page's server on a port of this machine; `gone()` and `back()` are an aux peer that ends and returns."""

    def __init__(self, history: MadeHistory, pictures: Path, run: RunConfig = RUN):
        self.history, self._pictures = history, pictures
        self.answers = Answers(history, run, run.run.name, tables=TABLES)  # type: ignore[arg-type]
        self._port, self.listens = 0, False
        self.back()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def gone(self) -> None:
        """Close the port and all connections."""
        self._server.stop()
        self._thread.join()
        self.listens = False

    def back(self) -> None:
        """Listen (again, on the same port)."""
        where = HttpOptions("127.0.0.1", self._port, "", grace_seconds=0)
        self._server = HttpServer(make_app(self.answers, self._pictures), where)
        self._port, self.listens = self._server.port, True
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
