"""What the web page costs an auxiliary peer: clients on live updates, and requests for a long history.

The web part runs as under `tt aux-peer`, over a history of 100,000 steps. Beside it this process writes a snapshot of
the swarm every 2 s and a step every 5 s, as a coordinator does, and holds the clients' connections. `sse_cpu_share` is
the web process' CPU time over the wall time, in cores, while all clients are told everything. `live_*` compares live
updates as they are, a snapshot deflated once for all clients, with a Brotli stream for each of them.

Examples:
  scripts/bench web --clients 1000 --peers 1000
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import brotli
from sqlalchemy import create_engine, insert

from scripts.benchmarks.process_figures import cpu_seconds, status_bytes
from tt_cli.auxiliary.web_process import WebOptions
from tt_cli.history.schema import steps
from tt_cli.history.writer import DATABASE, HistoryWriter, MadeStep, database_url
from tt_cli.run import folders, load_run
from tt_cli.supervisor.events import Log
from tt_cli.supervisor.worker_process import Worker

RUN = load_run("emoji")
STEPS = 100_000
SNAPSHOT_SECONDS, STEP_SECONDS = 2.0, 5.0
QUICK = "10 s instead of 60"
REQUESTS = 20
Figures = dict[str, Any]


def fill(url: str) -> None:
    """A history of so many steps."""
    row = {"undone": 0, "era": 0, "trainers": 20, "samples": 512, "samples_per_second": 40.0}
    rows = [{**row, "step": n, "time": 1e9 + 12.0 * n, "loss": 8 / n**0.1 + n % 97 / 500} for n in range(1, STEPS + 1)]
    with create_engine(url).begin() as connection:
        connection.execute(insert(steps), rows)


def snapshot(step: int, peers: int, now: float) -> str:
    """A swarm of so many trainers, as JSON."""
    one = {"role": "trainer", "device": "NVIDIA GeForce RTX 3060", "client_mode": True, "epoch": step, "lag": 0}
    one |= {"samples_per_second": 2.0, "share": 1 / peers, "samples": 20, "total_samples": 10**6, "loss": 2.5}
    one |= {"round": f"step {step} made with 19 others", "digest": "ab" * 32, "in_agreement": True, "age_s": now % 5}
    one |= {"resynced_chunks": 0, "clipped_by": 0, "accused_by": 0, "slow_by": 0}
    rows = [{"peer_id": f"QmPeer{n:040}", "user": f"user{n}", **one} for n in range(peers)]
    content = {"run": "emoji", "identity": RUN.identity, "time": now, "epoch": step, "total_steps": 10**6}
    content |= {"samples": 20, "resynced_chunks": 0}
    content |= {"target_batch_size": 512, "samples_per_second": 40.0, "eta_s": 5.0, "loss": 2.5, "digest": "ab" * 32}
    content |= {
        "holders": peers,
        "agreeing": peers,
        "resynced_chunks": 0,
        "trainers": peers,
        "samples": 20,
        "peers": rows,
    }
    return json.dumps(content)


async def follow(port: int, counts: list[int], index: int) -> None:
    """One client: count the bytes that come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /api/events HTTP/1.1\r\nHost: bench\r\nAccept-Encoding: gzip\r\n\r\n")
    try:
        while data := await reader.read(65536):
            counts[index] += len(data)
    finally:
        writer.close()


async def coordinate(store: HistoryWriter, peers: int) -> None:
    """Write what a coordinator writes."""
    step, stepped = STEPS, time.monotonic()
    while True:
        now = time.time()
        store.put("snapshot", snapshot(step, peers, now), now)
        if time.monotonic() > stepped + STEP_SECONDS:
            step, stepped = step + 1, time.monotonic()
            store.record_step(MadeStep(step, 0, now, 2.5, peers, 40.0, "a round"), [], 512)
        await asyncio.sleep(SNAPSHOT_SECONDS)


async def live(pid: int, port: int, store: HistoryWriter, clients: int, peers: int, seconds: float) -> Figures:
    """CPU of the web process while all clients follow."""
    counts = [0] * clients
    tasks = [asyncio.create_task(coordinate(store, peers))]
    tasks += [asyncio.create_task(follow(port, counts, index)) for index in range(clients)]
    while not all(counts):
        await asyncio.sleep(0.1)
    await asyncio.sleep(2 * SNAPSHOT_SECONDS)
    started, cpu, before = time.monotonic(), cpu_seconds(pid), list(counts)
    await asyncio.sleep(seconds)
    spent, wall = cpu_seconds(pid) - cpu, time.monotonic() - started
    told = [after - first for after, first in zip(counts, before, strict=True)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "sse_cpu_share": round(spent / wall, 3),
        "sse_bytes_per_second": round(statistics.mean(told) / wall),
        "sse_least_told": round(min(told) / max(told), 2),
    }


def requests(port: int, paths: list[str], coding: str = "br") -> tuple[list[float], int]:
    """Milliseconds of each request, over one connection, and the bytes of the last answer."""
    connection, spent = http.client.HTTPConnection("127.0.0.1", port, timeout=60), []
    for path in paths:
        started = time.perf_counter()
        connection.request("GET", path, headers={"Accept-Encoding": coding})
        answer = connection.getresponse()
        content = answer.read()
        spent.append(1e3 * (time.perf_counter() - started))
        assert answer.status == 200 and content, path
    connection.close()
    return spent, len(content)


def codings(peers: int) -> Figures:
    """A snapshot in live updates: deflated once for all clients, against a Brotli stream for each of them."""
    texts = [snapshot(step, peers, time.time()).encode() for step in range(5)]
    started = time.perf_counter()
    for text in texts:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        deflated = deflate.compress(text) + deflate.flush(zlib.Z_FULL_FLUSH)
    spent = time.perf_counter() - started
    figures = {"live_gzip_bytes": len(deflated), "live_gzip_ms": round(1e3 * spent / len(texts), 3)}
    before = status_bytes("VmRSS")
    streams = [brotli.Compressor(quality=4, lgwin=18, mode=brotli.MODE_TEXT) for _ in range(100)]
    for stream in streams:
        stream.process(texts[0])
        stream.flush()
    kib = (status_bytes("VmRSS") - before) / 1024 / len(streams)
    started = time.perf_counter()
    for stream in streams:
        for text in texts[1:]:
            size = len(stream.process(text) + stream.flush())
    spent = (time.perf_counter() - started) / (len(streams) * len(texts[1:]))
    figures |= {"live_brotli_bytes": size, "live_brotli_ms": round(1e3 * spent, 3), "live_brotli_kib": round(kib)}
    return figures


def measure(args: argparse.Namespace) -> Figures:
    """All of it."""
    clients, peers, seconds = args.clients, args.peers, 10.0 if args.quick else 60.0
    figures: Figures = {"clients": clients, "peers": peers, "steps": STEPS} | codings(peers)
    with tempfile.TemporaryDirectory() as name:
        os.environ["TT_HOME"] = name
        store = HistoryWriter(database_url(folders.run_folder(RUN)), RUN.identity)
        fill(database_url(folders.run_folder(RUN)))
        options = vars(WebOptions(RUN.to_toml(), "emoji", "127.0.0.1", 0))
        worker = Worker("tt_cli.auxiliary.web_process", options, Path(name) / "log", {DATABASE: ""})
        try:
            line = next(event.message for event in worker.events(60) if isinstance(event, Log))
            port = int(re.findall(r":(\d+)/", line)[0])
            store.put("snapshot", snapshot(STEPS, peers, time.time()), time.time())
            for coding in ("br", "gzip"):
                first, size = requests(port, ["/api/history?points=2000"], coding)
                figures.setdefault("history_first_ms", round(first[0], 1))
                figures[f"history_{coding}_bytes"] = size
                paths = [f"/api/history?points=2000&first={10 * number + len(coding)}" for number in range(REQUESTS)]
                new, _ = requests(port, paths, coding)
                figures[f"history_{coding}_new_ms"] = round(statistics.median(new), 1)
            known, _ = requests(port, ["/api/history?points=2000"] * REQUESTS)
            figures["history_known_ms"] = round(statistics.median(known), 1)
            figures |= asyncio.run(live(worker.pid, port, store, clients, peers, seconds))
            figures["rss_mib"] = status_bytes("VmRSS", worker.pid) >> 20
        finally:
            worker.leave()
            worker.wait(5)
            worker.kill()
            store.close()
    return figures


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--peers", type=int, default=30, help="in the snapshot")
