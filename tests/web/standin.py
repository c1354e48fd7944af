"""A run that was made up, and a small server that answers for it as the web part does: the page's other half in tests.

`python tests/web/standin.py [PORT]` serves it to look at.
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tt_cli.memory.answer_tables import RUN, Tables
from tt_cli.run import load_run
from tt_cli.web.index_html import STATIC, index_html

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HOSTILE = (
    '<img src=x onerror="window.hacked=1">',
    "</title><script>window.hacked=1</script>",
    "\u202eevil\u202c name \u200f\u2066",
    "n" * 500,
    "\x1b[31mred\x00",
)
TABLES = Tables(load_run("emoji"), "emoji")
DEVICES = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA GTX 1080 Ti", "Tesla T4", "AMD Ryzen 7 5800X")
USERS = ("ada", "grace-h", "li.wei", "marie", "kofi_a", "noether", "yuki", "ramanujan", "sofia", "tomek", "zainab")
PROMPTS = ("red apple", "sailboat", "grinning face with smiling eyes", "snow-capped mountain", "blue heart", "owl")
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmSY4bsZ3h5mP1Yw6x9cQ2nTfVt8uKpLrEaDgHjNkMoPqR"


class MadeRun:
    """Answers of a made run of `steps` recorded steps and `peers` trainers. Deterministic for a seed."""

    def __init__(self, steps: int = 100_000, peers: int = 30, *, hostile: bool = False, pictures: int = 12):
        self._random = random.Random(1)
        self.total = max(1, steps * 5 // 3)
        self.started = time.time() - steps * 14.0
        self.history = self._steps(steps)
        self.users = [*(HOSTILE if hostile else ()), *USERS]
        self.peers = [self._peer(index) for index in range(peers)]
        self.pictures = pictures

    def _steps(self, steps: int) -> dict[str, list[Any]]:
        draw = self._random.gauss
        rows: dict[str, list[Any]] = {"step": [], "time": [], "loss": [], "peers": [], "samples_per_second": []}
        for step in range(1, steps + 1):
            done = step / max(steps, 1)
            peers = max(1, round(12 + 14 * done + 6 * math.sin(step / max(1, steps) * 40) + draw(0, 1.2)))
            rows["step"].append(step)
            rows["time"].append(self.started + step * 14.0)
            rows["loss"].append(round(3.9 + 3.1 * math.exp(-9 * done) - 0.7 * done + draw(0, 0.05), 4))
            rows["peers"].append(peers)
            rows["samples_per_second"].append(round(peers * 13.1 + draw(0, 8), 2))
        return rows

    def _peer(self, index: int) -> dict[str, Any]:
        rate = round(95.0 * 0.86**index * self._random.uniform(0.8, 1.2) + 0.3, 2)
        return {
            "peer_id": f"12D3KooW{index:038d}",
            "user": self.users[index % len(self.users)],
            "role": "aux" if index == 5 else "trainer",
            "device": DEVICES[index % len(DEVICES)],
            "client_mode": index % 3 == 0,
            "epoch": self.step - (2 if index == 7 else 0),
            "lag": 2 if index == 7 else 0,
            "samples_per_second": 0.0 if index == 5 else rate,
            "share": 0.0,
            "samples": 100,
            "total_samples": 2_000_000 // (index + 1),
            "loss": 3.2,
            "round": "averaged with 24 others, received 100 %",
            "digest": "b3:0f",
            "in_agreement": True,
            "resynced_chunks": 0,
            "clipped_by": 0,
            "accused_by": 0,
            "slow_by": 0,
            "age_s": 3.0,
        }

    @property
    def step(self) -> int:
        return self.history["step"][-1] if self.history["step"] else 0

    def make_step(self) -> dict[str, Any]:
        """The next step of the run; the row that /api/events tells."""
        row = {"step": self.step + 1, "time": time.time(), "loss": 3.123, "peers": 29, "samples_per_second": 777.0}
        for key, value in row.items():
            self.history[key].append(value)
        return row

    def answer(self, path: str, query: dict[str, str]) -> Any:
        """What GET /api/<path> answers; KeyError where there is no such answer."""
        makers: dict[str, Callable[[], Any]] = {
            "run": self.run,
            "snapshot": self.snapshot,
            "history": lambda: self.thinned(
                int(query.get("points", 1000)), int(query.get("first", 0)), int(query.get("last", 2**53))
            ),
            "activity": lambda: self._activity(int(query.get("points", 1000))),
            "leaderboard": lambda: self._leaderboard(query.get("window", "ever")),
            "peers": lambda: {"rows": self.peers},
            "checkpoints": self._checkpoints,
            "rounds": lambda: {"rows": [self._round(index) for index in range(40)] if self.peers else []},
            "figures": self._figures,
            "calculator": lambda: TABLES.table(query.get("model", RUN)),
        }
        return makers[path]()

    def run(self) -> dict[str, Any]:
        """The run; see the page's interface Run."""
        return {
            "name": "emoji",
            "identity": "emoji-1f0c9a77",
            "title": "Draws emoji from their names",
            "story": [
                "This run teaches a small decoder to draw emoji from their names. It is meant for everybody who wants "
                "to see a swarm at work: the data are built in, a step takes seconds, and any machine can join.",
                "Your computer takes examples, works out how the model should change, and agrees on that change with "
                "everybody else. After every step all hold the same model, to the last bit.",
            ],
            "version": "0.4.0",
            "total_steps": self.total,
            "target_batch_size": 4096,
            "model": {
                "parameters": 125_900_000,
                "effective": 1_100_000_000,
                "layers": 64,
                "dim": 1024,
                "heads": 16,
                "image_tokens": 1024,
                "text_tokens": 256,
                "vocabulary": 40_548,
            },
            "data": {"source": "hub", "name": "laion/laion_100m_vqgan_f8"},
            "membership": {"kind": "open", "organisation": None, "authority": None},
            "join": {
                "commands": [f"tt join emoji --peer {ADDRESS}"],
                "peers": [ADDRESS],
                "notebooks": ["notebooks/join.ipynb", "notebooks/infer.ipynb"],
            },
            "run_file": '[run]\nname = "emoji"\nseed = 0\n\n[model]\ndim = 192\n',
            "checkpoints_at": None,
        }

    def snapshot(self) -> dict[str, Any]:
        """The newest snapshot; see the page's interface Snapshot."""
        trainers = [peer for peer in self.peers if peer["role"] == "trainer"]
        rate = sum(peer["samples_per_second"] for peer in trainers)
        peers = [
            {**peer, "share": peer["samples_per_second"] / max(rate, 1e-9), "epoch": self.step - peer["lag"]}
            for peer in self.peers
        ]
        return {
            "run": "emoji",
            "identity": "emoji-1f0c9a77",
            "time": time.time(),
            "age_s": 1.0,
            "epoch": self.step,
            "total_steps": self.total,
            "target_batch_size": 4096,
            "samples": 1200,
            "samples_per_second": rate,
            "eta_s": 9.0 if rate else None,
            "loss": self.history["loss"][-1] if self.step else None,
            "digest": "b3:0f",
            "holders": len(peers),
            "agreeing": len(peers),
            "resynced_chunks": 0,
            "trainers": len(trainers),
            "peers": sorted(peers, key=lambda peer: peer["role"] != "trainer"),
        }

    def thinned(self, points: int, first: int, last: int) -> dict[str, Any]:
        """Rows of the steps from first to last, at most `points`: each bucket's lowest and highest loss."""
        within = [index for index, step in enumerate(self.history["step"]) if first <= step <= last]
        loss = self.history["loss"]
        kept = within
        if len(within) > points:
            bucket = math.ceil(2 * len(within) / points)
            buckets = [within[at : at + bucket] for at in range(0, len(within), bucket)]
            kept = sorted(
                {f(rows, key=loss.__getitem__) for rows in buckets for f in (min, max)} | {within[0], within[-1]}
            )
        columns = {key: [column[index] for index in kept] for key, column in self.history.items()}
        return {**columns, "last_step": self.step, "total": len(self.history["step"])}

    def _activity(self, points: int) -> dict[str, Any]:
        rows = self.thinned(points, 0, 2**53)
        return {"time": rows["time"], "trainers": rows["peers"], "samples_per_second": rows["samples_per_second"]}

    def _leaderboard(self, window: str) -> dict[str, Any]:
        scale = 1 if window == "day" else 90
        users = sorted({peer["user"] for peer in self.peers}) + [f"user-{number}" for number in range(12)]
        rows = [
            {
                "user": user,
                "samples": round(scale * 400_000 * 0.8**index),
                "seconds": scale * 70_000 * 0.9**index,
                "peers": 1 + index % 3,
                "share": 0.2 * 0.8**index,
                "last_seen": time.time() - 40 * index**2,
            }
            for index, user in enumerate(users)
        ]
        return {"window": window, "rows": rows if self.peers else []}

    def _checkpoints(self) -> dict[str, Any]:
        if not self.step:
            return {"rows": []}
        rows = [
            {
                "step": self.step * (index + 1) // 12,
                "time": self.started + self.step * 14 * (index + 1) / 12,
                "digest": f"b3:{index:064x}",
                "bytes": 503_700_000,
                "url": f"checkpoints/step-{index}.safetensors" if index % 2 else None,
                "heldout_loss": round(6.8 - 0.3 * index, 3),
                "pictures": [{"prompt": p, "url": f"pictures/{index}-{n}.svg"} for n, p in enumerate(PROMPTS)],
            }
            for index in range(12)
        ]
        for row in rows[self.pictures :]:
            row["pictures"] = []
        return {"rows": rows}

    def _round(self, index: int) -> dict[str, Any]:
        words = f"{28 - index % 4} peers averaged in {5 + index % 3}.{index % 10} s; all of it arrived"
        return {"step": self.step - index, "time": time.time() - 14 * index, "words": words}

    def _figures(self) -> dict[str, Any]:
        def figure(label: str, value: Any, unit: str = "") -> dict[str, Any]:
            return {"label": label, "value": value, "unit": unit}

        return {
            "communication": [figure("sent for one step", 118.2, "MB"), figure("the same in 32 bits", 503.6, "MB")],
            "devices": [figure("fastest over slowest peer", 84, "×"), figure("kinds of device", len(DEVICES))],
            "memory": [figure("weights shared", "8.7", "×"), figure("optimizer state", 2.01, "bytes per weight")],
            "streaming": [figure("one example", 1.71, "kB"), figure("read by all so far", 700, "GB")],
            "security": [figure("parts refused", 3), figure("peers that agree", "29 of 29")],
        }


def picture(name: str) -> str:
    """A made picture; what a checkpoint drew."""
    checkpoint, _, prompt = name.partition("-")
    hue, blur = int(prompt) * 60, max(0.0, 14 - 1.3 * int(checkpoint))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100"><filter id="b">'
        f'<feGaussianBlur stdDeviation="{blur}"/></filter>'
        '<rect width="100" height="100" fill="#fff"/><g filter="url(#b)"><circle cx="50" cy="52" r="34" '
        f'fill="hsl({hue} 70% 55%)"/><circle cx="38" cy="42" r="6" fill="#fff"/></g></svg>'
    )


class Standin:
    """Serves a made run on a port of this machine; `gone()` and `back()` are an aux peer that dies and returns."""

    def __init__(self, run: MadeRun, *, port: int = 0, events: bool = True):
        self.run, self.events, self.port = run, events, port
        self.asked: list[str] = []
        self._told = threading.Condition()
        self._messages: list[str] = []
        self._server: ThreadingHTTPServer | None = None
        self.back()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def tell(self, event: str, data: Any) -> None:
        """Send one event to all that listen."""
        with self._told:
            self._messages.append(f"event: {event}\ndata: {json.dumps(data)}\n\n")
            self._told.notify_all()

    @property
    def listens(self) -> bool:
        return self._server is not None

    def make_step(self) -> int:
        """One more step, told as the web part tells it."""
        row = self.run.make_step()
        self.tell("step", row)
        self.tell("snapshot", self.run.snapshot())
        return int(row["step"])

    def gone(self) -> None:
        """Close the port and all connections."""
        assert self._server is not None
        server, self._server = self._server, None
        with self._told:
            self._told.notify_all()
        server.shutdown()
        server.server_close()

    def back(self) -> None:
        """Listen (again, on the same port)."""
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                standin.serve(self)

        ThreadingHTTPServer.daemon_threads = True
        ThreadingHTTPServer.block_on_close = False
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        parts = urlsplit(request.path)
        path = parts.path.lstrip("/")
        self.asked.append(request.path)
        if self._server is None:
            request.close_connection = True
            return
        if path == "api/events" and self.events:
            self._stream(request)
            return
        try:
            body, kind = self._body(path, {key: values[0] for key, values in parse_qs(parts.query).items()})
            request.send_response(200)
        except (KeyError, OSError):
            body, kind = b"{}", "application/json"
            request.send_response(404)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'; base-uri 'none'")
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(body)
        request.close_connection = True

    def _body(self, path: str, query: dict[str, str]) -> tuple[bytes, str]:
        if path in ("", "index.html"):
            return index_html(self.run.run()).encode(), "text/html; charset=utf-8"
        if path.startswith("api/"):
            return json.dumps(self.run.answer(path.removeprefix("api/"), query)).encode(), "application/json"
        if path.startswith("pictures/"):
            return picture(Path(path).stem).encode(), "image/svg+xml"
        file = STATIC / Path(path).name
        return file.read_bytes(), TYPES[file.suffix]

    def _stream(self, request: BaseHTTPRequestHandler) -> None:
        server = self._server
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        at = len(self._messages)
        try:
            request.wfile.write(b": hello\n\n")
            request.wfile.flush()
            while self._server is server:
                with self._told:
                    if len(self._messages) == at:
                        self._told.wait(5.0)
                    messages, at = self._messages[at:], len(self._messages)
                request.wfile.write("".join([*messages, ": keep-alive\n\n"]).encode())
                request.wfile.flush()
        except OSError:
            pass


if __name__ == "__main__":
    served = Standin(MadeRun(hostile="--hostile" in sys.argv), port=int(sys.argv[1]) if len(sys.argv) > 1 else 8471)
    print(served.url)
    while True:
        time.sleep(3.0)
        served.make_step()
